// The collectives through libmkclient against real engines in this process: the C++ classes in
// every world and element type, and the C ABI.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "client/tools/numeric/elements.h"
#include "kernels/ops/registry.h"
#include "mkernel/mkernel.h"
#include "tests/client/c_calls.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

class CollectiveWorld : public testing::TestWithParam<EmbeddedWorld> {};

// Many launches of changing m (also fewer rows than ranks) in both forms, of each element type:
// fresh inputs, poisoned outputs, every byte of every rank.
TEST_P(CollectiveWorld, AllGatherGivesEveryRankAllRows) {
  const auto [nodes, locals, fabric, other] = GetParam();
  const std::uint32_t world = nodes * locals;
  constexpr std::uint64_t kM = 150, kN = 133;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  for (const DataType type : {DataType::kF32, other}) {
    for_ranks(world, [&, locals = locals, type = type](std::uint32_t rank) {
      auto session = Session::attach(place(*cluster, locals, rank, name_of(type)));
      ASSERT_TRUE(session) << session.error().message;
      AllGather::Tuning tuning;
      tuning.chunk_bytes = 1024;
      auto op = AllGather::create(*session, {kM, kN, type}, tuning);
      ASSERT_TRUE(op) << op.error().message;
      const std::size_t row_bytes = kN * bytes_of(type);
      for (std::uint32_t launch = 0; launch < 7; ++launch) {
        const std::uint64_t m = 1 + launch * 73 % kM;
        const Bytes all =
            random_bytes(launch + 17 * static_cast<std::uint32_t>(type), m * row_bytes);
        const RowRange own = AllGather::rows_of(m, world, rank);
        const std::byte* input = all.data() + own.first * row_bytes;
        // In the operator's memory, in some launches of some ranks.
        if (world > 1 && (launch + rank) % 3 != 0) {
          ASSERT_NE(op->input(), nullptr);
          std::memcpy(op->input(), input, own.count * row_bytes);
          input = static_cast<std::byte*>(op->input());
        }
        Bytes output(m * row_bytes, std::byte{0xff});
        const auto stats = op->launch(own.count == 0 ? nullptr : input, output.data(), m,
                                      launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused);
        ASSERT_TRUE(stats) << stats.error().message;
        EXPECT_EQ(launch + 1, stats->epoch);
        EXPECT_EQ(all, output) << "launch " << launch << " rank " << rank;
      }
      EXPECT_TRUE(session->barrier());
    });
    if (HasFailure()) return;
  }
}

double value_at(DataType type, const Bytes& bytes, std::size_t at) {
  if (type == DataType::kF32) {
    float value;
    std::memcpy(&value, bytes.data() + at * sizeof value, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes.data() + at * sizeof bits, sizeof bits);
  return tools::to_float(type, bits);
}
// Within +-1.
Bytes random_elements(std::uint64_t seed, DataType type, std::size_t count) {
  std::mt19937_64 random(seed);
  Bytes bytes(count * bytes_of(type));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(random() >> 40) * 0x1p-23F - 1;
    const std::uint16_t bits = type == DataType::kF32 ? 0 : tools::from_float(type, value);
    const void* from = &bits;
    if (type == DataType::kF32) from = &value;
    std::memcpy(bytes.data() + i * bytes_of(type), from, bytes_of(type));
  }
  return bytes;
}

// The same of sums, against float64.
TEST_P(CollectiveWorld, ReduceScatterGivesEachRankItsSums) {
  const auto [nodes, locals, fabric, other] = GetParam();
  const std::uint32_t world = nodes * locals;
  constexpr std::uint64_t kM = 150, kN = 133;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  for (const DataType type : {DataType::kF32, other}) {
    const double rounding = type == DataType::kF32 ? 0 : tools::unit_roundoff(type);
    for_ranks(world, [&, locals = locals, type = type](std::uint32_t rank) {
      auto session = Session::attach(place(*cluster, locals, rank, name_of(type)));
      ASSERT_TRUE(session) << session.error().message;
      ReduceScatter::Tuning tuning;
      tuning.chunk_bytes = 1024;
      const auto partials = type == DataType::kF16 ? Partials::kF32 : Partials::kElement;
      auto op = ReduceScatter::create(*session, {kM, kN, type, partials}, tuning);
      ASSERT_TRUE(op) << op.error().message;
      for (std::uint32_t launch = 0; launch < 7; ++launch) {
        const std::uint64_t m = 1 + launch * 73 % kM;
        std::vector<Bytes> inputs;
        for (std::uint32_t r = 0; r < world; ++r)
          inputs.push_back(random_elements(launch * 100 + r, type, m * kN));
        const RowRange own = ReduceScatter::rows_of(m, world, rank);
        Bytes output(own.count * kN * bytes_of(type), std::byte{0xff});
        const auto stats =
            op->launch(inputs[rank].data(), own.count == 0 ? nullptr : output.data(), m,
                       launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused);
        ASSERT_TRUE(stats) << stats.error().message;
        EXPECT_EQ(launch + 1, stats->epoch);
        for (std::size_t i = 0; i < own.count * kN; ++i) {
          double expected = 0;
          double magnitude = 0;
          for (std::uint32_t r = 0; r < world; ++r) {
            const double value = value_at(type, inputs[r], own.first * kN + i);
            expected += value;
            magnitude += std::fabs(value);
          }
          const double bound =
              world == 1 ? 0 : world * 0x1p-23 * magnitude + 2 * rounding * magnitude + 0x1p-24;
          ASSERT_NEAR(expected, value_at(type, output, i), bound)
              << "launch " << launch << " rank " << rank << " element " << i;
        }
      }
      EXPECT_TRUE(session->barrier());
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, CollectiveWorld, testing::ValuesIn(kEmbeddedWorlds),
                         name_of_world);

TEST(Collectives, RanksThatDisagreeAreNamed) {
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "disagree"));
    ASSERT_TRUE(session) << session.error().message;
    // Rows of one size, but not of one type.
    const auto type = rank == 0 ? DataType::kBf16 : DataType::kF16;
    const auto op = AllGather::create(*session, {64, 8, type});
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kShapeMismatch, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find("dtype=bf16")) << op.error().message;
    EXPECT_NE(std::string::npos, op.error().message.find("dtype=f16")) << op.error().message;
    EXPECT_TRUE(session->barrier());
  });
}

template <class Op>
void expect_wrong_arguments_change_nothing() {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "arguments"));
  ASSERT_TRUE(session);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {0, 8}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, Op::create(*session, {8, 0}).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            Op::create(*session, {8, 8, static_cast<DataType>(9)}).error().code);
  auto op = Op::create(*session, {8, 8});
  ASSERT_TRUE(op) << op.error().message;
  const Elements ones(64, 0x3f80);
  Elements output(64, 0xffff);
  const auto refused = [&](const void* input, void* out, std::uint64_t m, const char* part) {
    const auto launched = op->launch(input, out, m);
    ASSERT_FALSE(launched);
    EXPECT_EQ(ErrorCode::kInvalidArgument, launched.error().code);
    EXPECT_NE(std::string::npos, launched.error().message.find(part)) << launched.error().message;
  };
  refused(ones.data(), output.data(), 9, "m from 1 to 8; launched with 9");
  refused(ones.data(), output.data(), 0, "launched with 0");
  refused(nullptr, output.data(), 8, "the input is null");
  refused(ones.data(), nullptr, 8, "the output is null");
  refused(output.data(), output.data() + 8, 4, "shares memory with the input");
  EXPECT_EQ(ErrorCode::kInvalidArgument,
            op->launch_on(nullptr, ones.data(), output.data(), 8).error().code);
  ASSERT_TRUE(op->launch(ones.data(), output.data(), 8));
  EXPECT_EQ(ones, output);
}
#define MK_TEST(id, name, Class)                    \
  TEST(Collectives, Class##RefusesWrongArguments) { \
    expect_wrong_arguments_change_nothing<Class>(); \
  }
MK_COLLECTIVES(MK_TEST)
#undef MK_TEST

// f32 is for these alone.
TEST(Collectives, OperatorsThatMultiplyRefuseF32) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "f32"));
  ASSERT_TRUE(session);
  const auto op = GemmAllReduce::create(*session, {8, 8, 8, DataType::kF32});
  ASSERT_FALSE(op);
  EXPECT_NE(std::string::npos, op.error().message.find("bf16 or f16")) << op.error().message;
}

mk_collective_shape four_rows_of_eight(std::uint32_t dtype) {
  auto shape = sized<mk_collective_shape>();
  shape.m_max = 4;
  shape.n = 8;
  shape.dtype = dtype;
  return shape;
}
void launch_four_rows(mk_op* op, const void* input, void* output) {
  auto arguments = sized<mk_collective_arguments>();
  arguments.input = input;
  arguments.output = output;
  arguments.m = 4;
  EXPECT_EQ(0, mk_op_launch(op, &arguments, MK_AUTO, nullptr)) << mk_last_error();
}

TEST(CApiCollectives, AllGatherOfTwoRanks) {
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 1, rank);
    auto shape = four_rows_of_eight(MK_F32);
    mk_op* const op = create(session, "all-gather", &shape);
    void* input = nullptr;
    std::uint64_t bytes = 0;
    ASSERT_EQ(0, mk_op_query(op, MK_INPUT, &input, &bytes)) << mk_last_error();
    EXPECT_EQ(2 * 8 * sizeof(float), bytes);
    const std::vector<float> rows(16, static_cast<float>(rank + 1));
    std::memcpy(input, rows.data(), bytes);
    std::vector<float> output(32, -1);
    launch_four_rows(op, input, output.data());
    for (std::size_t i = 0; i < output.size(); ++i) EXPECT_EQ(i < 16 ? 1.0F : 2.0F, output[i]);
    expect_refused(mk_op_query(op, MK_OUTPUT, nullptr, nullptr), ErrorCode::kUnsupported,
                   {"all-gather has no MK_OUTPUT"});
    leave(session, op);
  });
}

TEST(CApiCollectives, ReduceScatterOfTwoRanks) {
  const auto cluster = cluster_of(2);
  for_ranks(2, [&](std::uint32_t rank) {
    mk_session* const session = attach(*cluster, 1, rank);
    auto shape = four_rows_of_eight(MK_BF16);
    shape.partials = 7;
    mk_op* refused = nullptr;
    expect_refused(mk_op_create(session, "reduce-scatter", &shape, &refused),
                   ErrorCode::kInvalidArgument, {"reduce-scatter", "7"});
    shape.partials = MK_PARTIALS_F32;
    mk_op* const op = create(session, "reduce-scatter", &shape);
    const Elements rows(32, rank == 0 ? 0x3f80 : 0x4000);  // 1 and 2
    Elements output(16, 0xffff);
    launch_four_rows(op, rows.data(), output.data());
    EXPECT_EQ(Elements(16, 0x4040), output);
    expect_refused(mk_op_query(op, MK_INPUT, nullptr, nullptr), ErrorCode::kUnsupported,
                   {"reduce-scatter has no MK_INPUT"});
    leave(session, op);
  });
}

}  // namespace
}  // namespace mk
