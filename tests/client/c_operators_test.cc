/// \file
/// The C ABI's operators: all through the same functions, and what each function refuses.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "client/tools/numeric/elements.h"
#include "kernels/ops/registry.h"
#include "tests/client/c_calls.h"

namespace mk {
namespace {

#define MK_NAME(id, name, Class) name,
constexpr const char* kNames[] = {MK_OPERATORS(MK_NAME)};
#undef MK_NAME

// Any of the three products over a session of one rank, all sizes 16.
struct OneRank {
  explicit OneRank(const char* name)
      : cluster(cluster_of(1)), session(attach(*cluster, 1, 0)), ones(256, 0x3f80), c(256) {
    const mk_gemm_shape shape = square_shape(16);
    op = create(session, name, &shape);
  }
  ~OneRank() { leave(session, op); }

  std::unique_ptr<EmbeddedCluster> cluster;
  mk_session* session;
  mk_op* op = nullptr;
  Elements ones, c;
  mk_gemm_arguments arguments = gemm_arguments(ones.data(), ones.data(), c.data(), 16);
};

TEST(CApiOperators, HaveNames) {
  std::vector<std::string> names;
  for (std::uint32_t i = 0; mk_op_name(i) != nullptr; ++i) names.emplace_back(mk_op_name(i));
  EXPECT_EQ(std::vector<std::string>(std::begin(kNames), std::end(kNames)), names);
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  mk_op* op = nullptr;
  expect_refused(mk_op_create(session, "gemm_ar", nullptr, &op), ErrorCode::kInvalidArgument,
                 {"'gemm_ar'", "ag-gemm, gemm-rs, gemm-ar, moe, combine, ring, all-gather, "});
  leave(session);
}

TEST(CApiOperators, AreRefusedWithoutWhatTheyNeed) {
  OneRank on("gemm-ar");
  mk_op* op = nullptr;
  std::uint64_t bytes = 0;
  const mk_gemm_shape shape = square_shape(16);
  const auto refused = [](mk_status status) {
    expect_refused(status, ErrorCode::kInvalidArgument, {"is null"});
  };
  refused(mk_op_create(nullptr, "gemm-ar", &shape, &op));
  refused(mk_op_create(on.session, nullptr, &shape, &op));
  refused(mk_op_create(on.session, "gemm-ar", nullptr, &op));
  refused(mk_op_create(on.session, "gemm-ar", &shape, nullptr));
  refused(mk_op_workspace_bytes(nullptr, "gemm-ar", &shape, &bytes));
  refused(mk_op_workspace_bytes(on.session, "gemm-ar", &shape, nullptr));
  refused(mk_op_launch(nullptr, &on.arguments, MK_AUTO, nullptr));
  refused(mk_op_launch(on.op, nullptr, MK_AUTO, nullptr));
  refused(mk_op_launch_on(nullptr, nullptr, &on.arguments, MK_AUTO));
  refused(mk_op_status(nullptr));
  refused(mk_op_finish(nullptr, nullptr, nullptr));
  refused(mk_op_query(nullptr, MK_OUTPUT, nullptr, nullptr));
  refused(mk_op_set_trace(nullptr, 1));
  refused(mk_op_trace(on.op, nullptr, nullptr));
  mk_op_destroy(nullptr);
}

TEST(CApiOperators, TakeThreeModes) {
  OneRank on("gemm-ar");
  for (const std::uint32_t mode : {MK_FUSED, MK_UNFUSED, MK_AUTO})
    EXPECT_EQ(0, mk_op_launch(on.op, &on.arguments, mode, nullptr)) << mk_last_error();
  expect_refused(mk_op_launch(on.op, &on.arguments, 9, nullptr), ErrorCode::kInvalidArgument,
                 {"mode 9"});
  EXPECT_EQ(Elements(256, 0x4180), on.c);  // 16.0
}

// A caller that was built before bias, activation and pitches came hands over shorter structs: what
// lies behind them is not looked at.
TEST(CApiStructs, OfCallersFromBeforeTheyGrew) {
  OneRank on("gemm-ar");
  mk_gemm_shape shape = square_shape(16);
  shape.struct_bytes = offsetof(mk_gemm_shape, activation);
  shape.activation = 99;
  mk_op* const op = create(on.session, "gemm-ar", &shape);
  mk_gemm_arguments arguments = on.arguments;
  arguments.struct_bytes = offsetof(mk_gemm_arguments, bias);
  arguments.lda = 1;
  EXPECT_EQ(0, mk_op_launch(op, &arguments, MK_AUTO, nullptr)) << mk_last_error();
  EXPECT_EQ(Elements(256, 0x4180), on.c);  // 16.0
  mk_op_destroy(op);
}

// Bias, activation and pitches, of each product.
TEST(CApiOperators, FinishProductsAndFollowPitches) {
  for (const char* const name : {"ag-gemm", "gemm-rs", "gemm-ar"}) {
    OneRank on(name);
    mk_gemm_shape shape = square_shape(8);
    shape.activation = MK_ACTIVATION_RELU;
    shape.bias = 1;
    shape.partials = std::string(name) == "ag-gemm" ? MK_PARTIALS_ELEMENT : MK_PARTIALS_F32;
    mk_op* const op = create(on.session, name, &shape);
    Elements bias(8, 0x3f80);
    bias[3] = 0xc120;  // -10
    Elements c(4 * 12, 0xffff);
    mk_gemm_arguments arguments = gemm_arguments(on.ones.data(), on.ones.data(), c.data(), 4);
    arguments.bias = bias.data();
    arguments.lda = 16;
    arguments.ldb = 8;
    arguments.ldc = 12;
    EXPECT_EQ(0, mk_op_launch(op, &arguments, MK_AUTO, nullptr)) << mk_last_error();
    for (std::size_t i = 0; i < c.size(); ++i) {
      const std::size_t column = i % 12;
      EXPECT_EQ(c[i], column >= 8 ? 0xffff : column == 3 ? 0 : 0x4110) << name << ", " << i;  // 9
    }
    arguments.bias = nullptr;
    expect_refused(mk_op_launch(op, &arguments, MK_AUTO, nullptr), ErrorCode::kInvalidArgument,
                   {"bias is null"});
    shape.activation = 5;
    mk_op* none = nullptr;
    expect_refused(mk_op_create(on.session, name, &shape, &none), ErrorCode::kInvalidArgument,
                   {"activation 5"});
    mk_op_destroy(op);
  }
}

// Pitches whose bytes would wrap are refused, also of a matrix without rows, and change nothing.
class CApiProduct : public testing::TestWithParam<const char*> {};
TEST_P(CApiProduct, RefusesPitchesThatNoMemoryHas) {
  const std::string name = GetParam();
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 2, rank);
    const mk_gemm_shape shape = square_shape(16);
    mk_op* const op = create(session, name.c_str(), &shape);
    const Elements ones(256, 0x3f80);
    for (const std::uint64_t m : {1u, 16u}) {
      std::uint64_t first = 0, own = 0;
      mk_rows_of_rank(m, 2, rank, &first, &own);
      const std::uint64_t rows = name == "gemm-rs" ? own : m;
      Elements c(256, 0xffff);
      const auto right = gemm_arguments(name == "ag-gemm" && own == 0 ? nullptr : ones.data(),
                                        ones.data(), rows == 0 ? nullptr : c.data(), m);
      for (const std::uint64_t pitch : {(1ull << 38) + 8, 1ull << 61, (1ull << 63) - 8, 1ull << 63,
                                        (1ull << 63) + 16, (1ull << 63) + 64, ~0ull - 7, ~0ull}) {
        for (const auto& [field, word] : {std::pair{&mk_gemm_arguments::lda, "lda"},
                                          {&mk_gemm_arguments::ldb, "ldb"},
                                          {&mk_gemm_arguments::ldc, "ldc"}}) {
          auto wrong = right;
          wrong.*field = pitch;
          expect_refused(mk_op_launch(op, &wrong, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                         {word, std::to_string(pitch), "too large"});
        }
      }
      EXPECT_EQ(Elements(256, 0xffff), c);
      ASSERT_EQ(0, mk_op_launch(op, &right, MK_FUSED, nullptr)) << mk_last_error();
      for (std::uint64_t i = 0; i < 256; ++i)
        EXPECT_EQ(c[i], i >= rows * 16 ? 0xffff : name == "ag-gemm" ? 0x4180 : 0x4200) << i;
    }
    leave(session, op);
  });
}
INSTANTIATE_TEST_SUITE_P(, CApiProduct, testing::Values("ag-gemm", "gemm-rs", "gemm-ar"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// A struct of an earlier or a later header says so by its size.
TEST(CApiStructs, OfAnotherSize) {
  OneRank on("gemm-ar");
  mk_op* op = nullptr;
  mk_gemm_shape small = square_shape(16);
  small.struct_bytes = offsetof(mk_gemm_shape, activation) - 1;
  expect_refused(mk_op_create(on.session, "gemm-ar", &small, &op), ErrorCode::kInvalidArgument,
                 {"mk_gemm_shape.struct_bytes", std::to_string(sizeof(small))});
  struct Later {
    mk_gemm_shape shape;
    std::uint64_t more;
  } later = {square_shape(16), 0};
  later.shape.struct_bytes = sizeof(later);
  ASSERT_EQ(0, mk_op_create(on.session, "gemm-ar", &later, &op)) << mk_last_error();
  mk_op_destroy(op);
  later.more = 1;
  expect_refused(mk_op_create(on.session, "gemm-ar", &later, &op), ErrorCode::kUnsupported,
                 {"mk_gemm_shape", "later library"});
  later.shape.struct_bytes = ~std::size_t{0};
  expect_refused(mk_op_create(on.session, "gemm-ar", &later, &op), ErrorCode::kInvalidArgument,
                 {"struct_bytes"});
  auto stats = sized<mk_launch_stats>();
  stats.struct_bytes = offsetof(mk_launch_stats, partition_first) - 1;
  expect_refused(mk_op_launch(on.op, &on.arguments, MK_AUTO, &stats), ErrorCode::kInvalidArgument,
                 {"mk_launch_stats"});
  // A caller from before there were partitions has no room for their figures.
  stats.struct_bytes = offsetof(mk_launch_stats, partition_first);
  stats.partition_turns = 77;
  EXPECT_EQ(0, mk_op_launch(on.op, &on.arguments, MK_AUTO, &stats)) << mk_last_error();
  EXPECT_EQ(77u, stats.partition_turns);
  auto tuning = sized<mk_tuning>();
  tuning.struct_bytes = 0;
  mk_gemm_shape tuned = square_shape(16);
  tuned.tuning = &tuning;
  expect_refused(mk_op_create(on.session, "gemm-ar", &tuned, &op), ErrorCode::kInvalidArgument,
                 {"mk_tuning"});
}

TEST(CApiTuning, ReachesTheOperator) {
  OneRank on("gemm-ar");
  mk_op* op = nullptr;
  auto tuning = sized<mk_tuning>();
  mk_gemm_shape shape = square_shape(16);
  shape.tuning = &tuning;
  tuning.executor = 7;
  expect_refused(mk_op_create(on.session, "gemm-ar", &shape, &op), ErrorCode::kInvalidArgument,
                 {"executor 7"});
  tuning.executor = MK_CPU;
  tuning.partition = 2;
  expect_refused(mk_op_create(on.session, "gemm-ar", &shape, &op), ErrorCode::kInvalidArgument,
                 {"partition 2"});
  tuning.partition = 1;
  mk_op_destroy(create(on.session, "gemm-ar", &shape));
  tuning.partition = 0;
  tuning.flops_per_s = -1;
  EXPECT_NE(0, mk_op_create(on.session, "gemm-ar", &shape, &op));
  tuning.flops_per_s = 0;
  // Equal operators share a workspace and its epochs, others do not.
  const auto epoch_of_a_launch = [&](mk_op* of) {
    auto stats = sized<mk_launch_stats>();
    EXPECT_EQ(0, mk_op_launch(of, &on.arguments, MK_FUSED, &stats)) << mk_last_error();
    return stats.epoch;
  };
  mk_op* const plain = create(on.session, "gemm-ar", &shape);
  EXPECT_EQ(1u, epoch_of_a_launch(plain));
  tuning.batch_invariant = 1;
  op = create(on.session, "gemm-ar", &shape);
  EXPECT_EQ(1u, epoch_of_a_launch(op)) << "it is another kind of operator";
  mk_op_destroy(op);
  // Who was built against the first release has no such field, whatever lies behind its struct.
  tuning.struct_bytes = offsetof(mk_tuning, batch_invariant);
  op = create(on.session, "gemm-ar", &shape);
  EXPECT_EQ(2u, epoch_of_a_launch(op)) << "it is the first one's equal";
  mk_op_destroy(op);
  mk_op_destroy(plain);
  tuning.struct_bytes = sizeof tuning;
  tuning.batch_invariant = 0;
  tuning.machine_file = "/nowhere/machine.json";
  expect_refused(mk_op_create(on.session, "gemm-ar", &shape, &op), ErrorCode::kNotFound,
                 {"/nowhere/machine.json"});
  // A caller from before the files does not look at them.
  tuning.struct_bytes = offsetof(mk_tuning, machine_file);
  mk_op_destroy(create(on.session, "gemm-ar", &shape));
  tuning.struct_bytes = sizeof(tuning);
  tuning.machine_file = "CPU";
  tuning.count_nonfinite = 1;
  tuning.wait_timeout_ms = 5000;
  tuning.tile_m = tuning.tile_n = 8;
  op = create(on.session, "gemm-ar", &shape);
  auto stats = sized<mk_launch_stats>();
  EXPECT_EQ(0, mk_op_launch(op, &on.arguments, MK_FUSED, &stats)) << mk_last_error();
  EXPECT_EQ(1u, stats.epoch);
  EXPECT_EQ(static_cast<std::uint32_t>(MK_FUSED), stats.mode);
  EXPECT_NE(0u, stats.total_ns);
  EXPECT_NE(0u, stats.estimated_fused_ns);
  EXPECT_EQ(0u, stats.nonfinite_partials);
  mk_op_destroy(op);
}

TEST(CApiTuning, SharesNoWorkspaceIfToldSo) {
  OneRank on("gemm-ar");
  mk_gemm_shape shape = square_shape(16);
  mk_op* const other = create(on.session, "gemm-ar", &shape);
  auto tuning = sized<mk_tuning>();
  tuning.own_workspace = 1;
  shape.tuning = &tuning;
  mk_op* const own = create(on.session, "gemm-ar", &shape);
  const auto output_of = [](mk_op* op) {
    void* data = nullptr;
    std::uint64_t bytes = 0;
    EXPECT_EQ(0, mk_op_query(op, MK_OUTPUT, &data, &bytes)) << mk_last_error();
    return data;
  };
  EXPECT_EQ(nullptr, output_of(other)) << "the workspace is that of on.op, too";
  EXPECT_NE(nullptr, output_of(own));
  mk_op_destroy(other);
  EXPECT_NE(nullptr, output_of(on.op)) << "the last one left";
  mk_op_destroy(own);
}

TEST(CApiTuning, CountsPartialsThatAreNotFinite) {
  const auto cluster = cluster_of(1);
  std::atomic<std::uint64_t> counted{0};  // the one tile is one rank's to add
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 2, rank);
    auto tuning = sized<mk_tuning>();
    tuning.count_nonfinite = 1;
    mk_gemm_shape shape = square_shape(16);
    shape.tuning = &tuning;
    shape.dtype = MK_F16;
    mk_op* const op = create(session, "gemm-ar", &shape);
    const Elements infinite(256, 0x7c00), ones(256, 0x3c00);
    Elements c(256);
    auto stats = sized<mk_launch_stats>();
    const auto arguments = gemm_arguments(infinite.data(), ones.data(), c.data(), 16);
    ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, &stats)) << mk_last_error();
    counted += stats.nonfinite_partials;
    leave(session, op);
  });
  EXPECT_GE(counted, 256u);
}

TEST(CApiTrace, IsOfTheLastLaunch) {
  OneRank on("gemm-ar");
  const mk_trace_span* spans = nullptr;
  std::uint64_t count = 9;
  ASSERT_EQ(0, mk_op_launch(on.op, &on.arguments, MK_FUSED, nullptr)) << mk_last_error();
  ASSERT_EQ(0, mk_op_trace(on.op, &spans, &count));
  EXPECT_EQ(0u, count);
  ASSERT_EQ(0, mk_op_set_trace(on.op, 1));
  ASSERT_EQ(0, mk_op_launch(on.op, &on.arguments, MK_FUSED, nullptr)) << mk_last_error();
  ASSERT_EQ(0, mk_op_trace(on.op, &spans, &count));
  ASSERT_NE(0u, count);
  EXPECT_TRUE(std::any_of(spans, spans + count, [](const mk_trace_span& span) {
    return std::strcmp(span.role, "compute") == 0 && std::strcmp(span.kind, "tile") == 0;
  }));
  for (std::uint64_t i = 0; i < count; ++i) EXPECT_LE(spans[i].begin_ns, spans[i].end_ns);
}

// Until there is another launch, though this operator or its equal switches what later ones keep.
TEST(CApiTrace, StaysUntilTheNextLaunch) {
  OneRank on("gemm-ar");
  const mk_gemm_shape shape = square_shape(16);
  mk_op* const equal = create(on.session, "gemm-ar", &shape);
  const auto launch = [&] {
    ASSERT_EQ(0, mk_op_launch(on.op, &on.arguments, MK_FUSED, nullptr)) << mk_last_error();
  };
  const auto trace = [&] {
    const mk_trace_span* spans = nullptr;
    std::uint64_t count = 0;
    EXPECT_EQ(0, mk_op_trace(on.op, &spans, &count)) << mk_last_error();
    std::vector<std::string> all;
    for (std::uint64_t i = 0; i < count; ++i) {
      const mk_trace_span& span = spans[i];
      EXPECT_LT(0u, span.begin_ns) << i;
      all.push_back(fmt::format("{} {} {} {} {} {} {} {}", span.role, span.block, span.kind,
                                span.index[0], span.index[1], span.rank, span.begin_ns,
                                span.end_ns));
    }
    return all;
  };
  const auto set = [&](mk_op* op, std::uint32_t to) { ASSERT_EQ(0, mk_op_set_trace(op, to)); };
  set(on.op, 1);
  for (mk_op* const by : {on.op, equal}) {
    set(by, 1);
    launch();
    const std::vector<std::string> before = trace();
    ASSERT_FALSE(before.empty());
    for (const std::uint32_t to : {1u, 0u, 0u, 1u, 1u, 0u}) {
      set(by, to);
      EXPECT_EQ(before, trace());
    }
    launch();
    EXPECT_TRUE(trace().empty());
    for (const std::uint32_t to : {1u, 0u}) {
      set(by, to);
      EXPECT_TRUE(trace().empty()) << "that launch was not traced";
    }
  }
  mk_op_destroy(equal);
}

// What every operator refuses alike.
class CApiOperator : public testing::TestWithParam<const char*> {};
TEST_P(CApiOperator, RefusesAShapeThatIsNone) {
  const auto cluster = cluster_of(1);
  mk_session* const session = attach(*cluster, 1, 0);
  mk_op* op = nullptr;
  std::uint64_t bytes = 0;
  std::size_t no_bytes = 0;
  expect_refused(mk_op_create(session, GetParam(), &no_bytes, &op), ErrorCode::kInvalidArgument,
                 {"struct_bytes"});
  expect_refused(mk_op_workspace_bytes(session, GetParam(), &no_bytes, &bytes),
                 ErrorCode::kInvalidArgument, {"struct_bytes"});
  // All sizes 0.
  union {
    std::size_t struct_bytes;
    unsigned char all[4096];
  } zeros = {};
  zeros.struct_bytes = sizeof(zeros);
  EXPECT_NE(0, mk_op_create(session, GetParam(), &zeros, &op));
  EXPECT_EQ(nullptr, op);
  leave(session);
}
INSTANTIATE_TEST_SUITE_P(, CApiOperator, testing::ValuesIn(kNames), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST(CApiGemmAr, SumsOverRanks) {
  OneRank on("gemm-ar");
  auto stats = sized<mk_launch_stats>();
  ASSERT_EQ(0, mk_op_launch(on.op, &on.arguments, MK_FUSED, &stats)) << mk_last_error();
  EXPECT_EQ(Elements(256, 0x4180), on.c);  // 16.0
  std::uint64_t bytes = 0;
  void* data = nullptr;
  ASSERT_EQ(0, mk_op_query(on.op, MK_OUTPUT, &data, &bytes)) << mk_last_error();
  EXPECT_EQ(data == nullptr ? 0u : 512u, bytes);
  on.arguments.m = 17;
  expect_refused(mk_op_launch(on.op, &on.arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                 {"from 1 to 16", "17"});
  on.arguments.m = 16;
  on.arguments.gathered = on.c.data();
  expect_refused(mk_op_launch(on.op, &on.arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                 {"gathered"});
  expect_refused(mk_op_query(on.op, MK_ROWS, &data, &bytes), ErrorCode::kUnsupported,
                 {"gemm-ar has no MK_ROWS"});
  expect_refused(mk_op_query(on.op, 77, &data, &bytes), ErrorCode::kInvalidArgument, {"77"});
  EXPECT_EQ(0, mk_op_status(on.op)) << mk_last_error();
  on.arguments.gathered = nullptr;
  EXPECT_NE(0, mk_op_launch_on(on.op, nullptr, &on.arguments, MK_AUTO));  // of the CPU
  EXPECT_NE(0, mk_op_finish(on.op, nullptr, nullptr));
}

TEST(CApiGemmRs, GivesEachRankItsRows) {
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 2, rank);
    const mk_gemm_shape shape = square_shape(16);
    std::uint64_t bytes = 0;
    EXPECT_EQ(0, mk_op_workspace_bytes(session, "gemm-rs", &shape, &bytes)) << mk_last_error();
    EXPECT_GE(bytes, 16u * 16 * 2);
    mk_op* const op = create(session, "gemm-rs", &shape);
    std::uint64_t first = 0, count = 0;
    mk_rows_of_rank(15, 2, rank, &first, &count);
    EXPECT_EQ(rank == 0 ? 0u : 7u, first);
    EXPECT_EQ(rank == 0 ? 7u : 8u, count);
    const Elements ones(256, 0x3f80);
    Elements c((count + 1) * 16, 0xffff);
    const auto arguments = gemm_arguments(ones.data(), ones.data(), c.data(), 15);
    ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
    for (std::size_t i = 0; i < count * 16; ++i) EXPECT_EQ(0x4200, c[i]);  // 32.0
    EXPECT_TRUE(std::all_of(c.end() - 16, c.end(), [](std::uint16_t e) { return e == 0xffff; }));
    leave(session, op);
  });
}

TEST(CApiAgGemm, GathersAndMultiplies) {
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 2, rank);
    const mk_gemm_shape shape = square_shape(16);
    mk_op* const op = create(session, "ag-gemm", &shape);
    const Elements ones(256, 0x3f80);
    Elements c(256, 0xffff), gathered(256, 0xffff);
    auto arguments = gemm_arguments(ones.data(), ones.data(), c.data(), 15);
    arguments.gathered = gathered.data();
    ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
    for (std::size_t i = 0; i < 256; ++i) {
      EXPECT_EQ(i < 240 ? 0x4180 : 0xffff, c[i]);  // 16.0
      EXPECT_EQ(i < 240 ? 0x3f80 : 0xffff, gathered[i]);
    }
    void* data = nullptr;
    std::uint64_t bytes = 0;
    ASSERT_EQ(0, mk_op_query(op, MK_INPUT, &data, &bytes)) << mk_last_error();
    ASSERT_NE(nullptr, data);
    EXPECT_EQ(8u * 16 * 2, bytes);
    auto* const input = static_cast<std::uint16_t*>(data);
    std::fill(input, input + 128, std::uint16_t{0x4000});  // 2.0, 8 rows of each rank
    arguments = gemm_arguments(input, ones.data(), c.data(), 16);
    ASSERT_EQ(0, mk_op_launch(op, &arguments, MK_FUSED, nullptr)) << mk_last_error();
    EXPECT_EQ(Elements(256, 0x4200), c);  // 32.0
    arguments.a = input + 8;
    expect_refused(mk_op_launch(op, &arguments, MK_FUSED, nullptr), ErrorCode::kInvalidArgument,
                   {});
    leave(session, op);
  });
}

}  // namespace
}  // namespace mk
