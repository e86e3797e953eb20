// Attention on one GPU: what the plan refuses, and every element of O and LSE against float64, for
// shapes that are no multiple of anything, layouts, masks, and values that are hard.
#include "kernels/cuda/core/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/gpu/attention_reference.h"
#include "tests/gpu/summed_reference.h"

namespace mk::kernels::cuda {
namespace {

using testing::HasSubstr;

bool have_gpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

enum class Layout { kRowsFirst, kHeadsFirst };  // [B,S,H,D], [B,H,S,D]

void set_strides(AttentionTensor* tensor, Layout layout, int rows, int heads, int dim) {
  tensor->row_stride = layout == Layout::kRowsFirst ? std::int64_t{heads} * dim : dim;
  tensor->head_stride = layout == Layout::kRowsFirst ? dim : std::int64_t{rows} * dim;
  tensor->batch_stride = std::int64_t{heads} * rows * dim;
}

AttentionProblem problem_of(int batch, int queries, int keys, int query_heads, int key_heads,
                            int dim, bool causal, Layout layout = Layout::kRowsFirst,
                            DType dtype = DType::kBf16) {
  AttentionProblem problem;
  problem.dtype = dtype;
  problem.head_dim = dim;
  problem.batch = batch;
  problem.query_heads = query_heads;
  problem.key_heads = key_heads;
  problem.queries = queries;
  problem.keys = keys;
  problem.causal = causal;
  set_strides(&problem.q, layout, queries, query_heads, dim);
  set_strides(&problem.k, layout, keys, key_heads, dim);
  set_strides(&problem.v, layout, keys, key_heads, dim);
  set_strides(&problem.o, layout, queries, query_heads, dim);
  problem.lse_row_stride = 1;
  problem.lse_head_stride = queries;
  problem.lse_batch_stride = std::int64_t{query_heads} * queries;
  return problem;
}

std::int64_t query_elements(const AttentionProblem& p) {
  return std::int64_t{p.batch} * p.queries * p.query_heads * p.head_dim;
}
std::int64_t key_elements(const AttentionProblem& p) {
  return std::int64_t{p.batch} * p.keys * p.key_heads * p.head_dim;
}

/// A problem with memory of its own, fresh random values, and poisoned outputs.
class Case {
 public:
  explicit Case(AttentionProblem problem)
      : q_(2 * query_elements(problem)),
        k_(2 * key_elements(problem) + 16),
        v_(2 * key_elements(problem) + 16),
        o_(2 * query_elements(problem)),
        lse_(4 * rows(problem)),
        problem_(problem) {
    problem_.q.data = q_.data();
    problem_.k.data = k_.data();
    problem_.v.data = v_.data();
    problem_.o.data = o_.data();
    problem_.lse = static_cast<float*>(lse_.data());
    fill(std::random_device{}());
  }

  void fill(std::uint64_t seed) {
    seed_ = seed;
    test::fill_normal(q_.data(), problem_.dtype, query_elements(problem_), seed, nullptr);
    test::fill_normal(k_.data(), problem_.dtype, key_elements(problem_), seed + 1, nullptr);
    test::fill_normal(v_.data(), problem_.dtype, key_elements(problem_), seed + 2, nullptr);
    poison();
  }
  void poison() {
    test::poison(o_.data(), query_elements(problem_), nullptr);
    test::poison(lse_.data(), 2 * rows(problem_), nullptr);
  }
  AttentionProblem& problem() { return problem_; }

  AttentionPlan plan() {
    auto plan = AttentionPlan::create(problem_);
    if (!plan.has_value()) ADD_FAILURE() << plan.error().message;
    return std::move(*plan);
  }
  void launch(const AttentionPlan& plan) {
    const auto launched = plan.launch(nullptr);
    ASSERT_TRUE(launched.has_value()) << launched.error().message;
  }
  void expect_right(const AttentionPlan& plan) {
    const auto verdict =
        test::judge_attention(problem_, plan.tile_keys(), 0, problem_.queries, nullptr);
    EXPECT_TRUE(verdict.right()) << "batch " << problem_.batch << ", " << problem_.queries
                                 << " queries, " << problem_.keys << " keys, heads "
                                 << problem_.query_heads << ":" << problem_.key_heads << ", dim "
                                 << problem_.head_dim << ", causal " << problem_.causal << ", "
                                 << (problem_.dtype == DType::kBf16 ? "bf16" : "f16") << ", seed "
                                 << seed_ << ": O " << verdict.o.bad << " bad, first "
                                 << verdict.o.first_bad << ", worst " << verdict.o.worst
                                 << " of its bound; LSE " << verdict.lse.bad << " bad, first "
                                 << verdict.lse.first_bad << ", worst " << verdict.lse.worst;
  }
  void run_and_judge() {
    const AttentionPlan ready = plan();
    launch(ready);
    expect_right(ready);
  }

  static std::int64_t rows(const AttentionProblem& p) {
    return std::int64_t{p.batch} * p.queries * p.query_heads;
  }
  void* q() const { return q_.data(); }
  void* k() const { return k_.data(); }
  void* v() const { return v_.data(); }
  void* o() const { return o_.data(); }

 private:
  test::DeviceMemory q_, k_, v_, o_, lse_;
  AttentionProblem problem_;
  std::uint64_t seed_ = 0;
};

// ---- the host's side ----------------------------------------------------------------------------

AttentionProblem good_problem() {
  AttentionProblem problem = problem_of(1, 8, 8, 4, 2, 64, true);
  auto* somewhere = reinterpret_cast<void*>(0x1000);
  problem.q.data = problem.k.data = problem.v.data = problem.o.data = somewhere;
  return problem;
}

TEST(AttentionArguments, AreChecked) {
  EXPECT_TRUE(check_attention(good_problem()).has_value());
  const auto expect_refused = [](const AttentionProblem& problem, const char* why) {
    const auto checked = check_attention(problem);
    ASSERT_FALSE(checked.has_value()) << why;
    EXPECT_EQ(checked.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(checked.error().message, HasSubstr(why));
  };
  auto problem = good_problem();
  problem.head_dim = 96;
  expect_refused(problem, "96");
  problem = good_problem();
  problem.key_heads = 3;
  expect_refused(problem, "3 key heads");
  problem = good_problem();
  problem.batch = 0;
  expect_refused(problem, "batch 0");
  problem = good_problem();
  problem.queries = 0;
  expect_refused(problem, "0 queries");
  problem = good_problem();
  problem.keys = -1;
  expect_refused(problem, "-1 keys");
  problem = good_problem();
  problem.scale = -1;
  expect_refused(problem, "scale of -1");
  problem = good_problem();
  problem.scale = std::numeric_limits<float>::quiet_NaN();
  expect_refused(problem, "scale of nan");
  problem = good_problem();
  problem.k.data = reinterpret_cast<void*>(0x1008);
  expect_refused(problem, "tensor K");
  problem = good_problem();
  problem.v.row_stride += 4;
  expect_refused(problem, "row stride of tensor V");
  problem = good_problem();
  problem.o.head_stride = -64;
  expect_refused(problem, "head stride of tensor O");
}

TEST(AttentionArguments, KeysMayBeMissing) {
  auto problem = good_problem();
  problem.keys = 0;
  problem.k.data = problem.v.data = nullptr;
  EXPECT_TRUE(check_attention(problem).has_value());
}

TEST(AttentionArguments, ThereMayBeNoGpu) {
  if (have_gpu()) GTEST_SKIP() << "there is one";
  const auto plan = AttentionPlan::create(good_problem());
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, ErrorCode::kUnavailable);
}

// ---- on a GPU -----------------------------------------------------------------------------------

class AttentionOnGpu : public testing::TestWithParam<std::tuple<int, DType>> {
 protected:
  void SetUp() override {
    if (!have_gpu()) GTEST_SKIP() << "no CUDA device";
  }
  int dim() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(All, AttentionOnGpu,
                         testing::Combine(testing::Values(64, 128),
                                          testing::Values(DType::kBf16, DType::kF16)),
                         [](const auto& tested) {
                           return "d" + std::to_string(std::get<0>(tested.param)) +
                                  (std::get<1>(tested.param) == DType::kBf16 ? "Bf16" : "F16");
                         });

TEST_P(AttentionOnGpu, LengthsThatAreNoMultipleOfAnything) {
  for (const int rows : {1, 2, 63, 64, 65, 127, 129, 175, 177, 191, 193, 352, 353, 1025}) {
    for (const bool causal : {false, true}) {
      Case(problem_of(1, rows, rows, 2, 1, dim(), causal, Layout::kRowsFirst, dtype()))
          .run_and_judge();
    }
  }
}

TEST_P(AttentionOnGpu, MoreQueriesThanKeysAndFewer) {
  for (const auto& [queries, keys] :
       {std::pair{1, 1000}, {1000, 1}, {300, 1000}, {1000, 300}, {129, 640}, {640, 129}}) {
    for (const bool causal : {false, true}) {
      Case(problem_of(2, queries, keys, 2, 2, dim(), causal, Layout::kHeadsFirst, dtype()))
          .run_and_judge();
    }
  }
}

TEST_P(AttentionOnGpu, RowsThatSeeNoKeyAreZeroAndTheirLseMinusInfinity) {
  for (const int keys : {0, 7}) {
    Case one(problem_of(2, 500, keys, 3, 1, dim(), true, Layout::kRowsFirst, dtype()));
    one.run_and_judge();
  }
}

TEST_P(AttentionOnGpu, QueryHeadsShareKeyHeads) {
  for (const auto& [query_heads, key_heads] :
       {std::pair{1, 1}, {3, 3}, {8, 1}, {8, 2}, {64, 1}, {24, 8}}) {
    for (const auto layout : {Layout::kRowsFirst, Layout::kHeadsFirst}) {
      Case(problem_of(2, 201, 201, query_heads, key_heads, dim(), true, layout, dtype()))
          .run_and_judge();
    }
  }
}

TEST_P(AttentionOnGpu, MoreItemsThanBlocks) {
  Case(problem_of(3, 400, 400, 40, 8, dim(), true, Layout::kRowsFirst, dtype())).run_and_judge();
  Case(problem_of(3, 400, 400, 40, 8, dim(), false, Layout::kRowsFirst, dtype())).run_and_judge();
}

TEST_P(AttentionOnGpu, LargeScoresAndEqualOnes) {
  Case one(problem_of(1, 700, 700, 2, 1, dim(), true, Layout::kRowsFirst, dtype()));
  // Standard normal queries and keys give scores of about sqrt(dim): these, up to 1e4 and more.
  one.problem().scale = 1000;
  one.run_and_judge();
  one.problem().scale = 1e-30f;
  one.poison();
  one.run_and_judge();
  test::require(cudaMemset(one.q(), 0, 2 * query_elements(one.problem())), "memset");
  one.problem().scale = 1;
  one.poison();
  one.run_and_judge();
}

TEST_P(AttentionOnGpu, TheSameBitsEveryTime) {
  Case one(problem_of(2, 1500, 1500, 8, 2, dim(), true, Layout::kRowsFirst, dtype()));
  const std::int64_t elements = query_elements(one.problem());
  const test::DeviceMemory before(2 * elements);
  const AttentionPlan plan = one.plan();
  one.launch(plan);
  test::require(cudaMemcpy(before.data(), one.o(), 2 * elements, cudaMemcpyDeviceToDevice), "copy");
  for (int i = 0; i < 50; ++i) {
    one.poison();
    one.launch(plan);
    ASSERT_EQ(test::count_different(before.data(), one.o(), elements, nullptr), 0) << i;
  }
}

TEST_P(AttentionOnGpu, AGraphReplaysWithNewInputs) {
  Case one(problem_of(1, 600, 600, 4, 4, dim(), true, Layout::kRowsFirst, dtype()));
  const AttentionPlan plan = one.plan();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  test::require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  ASSERT_TRUE(plan.launch(stream).has_value());
  test::require(cudaStreamEndCapture(stream, &graph), "capture");
  test::require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (std::uint64_t replay = 0; replay < 20; ++replay) {
    one.fill(3 * replay);
    test::require(cudaDeviceSynchronize(), "fill");
    test::require(cudaGraphLaunch(executable, stream), "replay");
    test::require(cudaStreamSynchronize(stream), "replay");
    one.expect_right(plan);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_P(AttentionOnGpu, ALaunchBesideABusyDefaultStreamComputesEveryItemOnce) {
  for (int round = 0; round < 5; ++round) {
    Case one(problem_of(3, 400, 400, 40, 8, dim(), true, Layout::kRowsFirst, dtype()));
    // The plan's words have been another's, and what clears them waits in the default stream.
    void* used = nullptr;
    test::require(cudaMalloc(&used, 8), "memory");
    test::require(cudaMemset(used, 0x7f, 8), "memset");
    test::require(cudaDeviceSynchronize(), "memset");
    test::require(cudaFree(used), "memory");
    cudaStream_t stream = nullptr;
    test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    const auto busy = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
    test::require(cudaLaunchHostFunc(nullptr, busy, nullptr), "host function");
    const AttentionPlan plan = one.plan();
    ASSERT_TRUE(plan.launch(stream).has_value());
    ASSERT_TRUE(plan.launch(stream).has_value());
    test::require(cudaDeviceSynchronize(), "launch");
    one.expect_right(plan);
    test::require(cudaStreamDestroy(stream), "stream");
  }
}

/// Values of V that are not finite: row, head of all heads, column and what is there, as bits.
struct NonFinite {
  int row;
  int head;
  int column;
  std::uint16_t bits;
};

TEST_P(AttentionOnGpu, InfAndNanReachOnlyTheRowsThatSeeThem) {
  const std::uint16_t inf = dtype() == DType::kBf16 ? 0x7f80 : 0x7c00;
  const auto nan = static_cast<std::uint16_t>(inf | 1);
  const auto minus = static_cast<std::uint16_t>(inf | 0x8000);
  for (const int rows : {5, 130, 700, 1111}) {
    Case one(problem_of(1, rows, rows, 4, 2, dim(), true, Layout::kRowsFirst, dtype()));
    // Small scores: a weight that underflowed would make NaN of an Inf where float64 keeps it.
    one.problem().scale = 0.01f;
    std::mt19937 random(std::random_device{}());
    std::vector<NonFinite> values = {{rows - 1, 0, 0, nan}, {rows - 1, 1, dim() - 1, inf}};
    for (int i = 0; i < 12; ++i) {
      values.push_back({static_cast<int>(random() % static_cast<unsigned>(rows)),
                        static_cast<int>(random() % 2),
                        static_cast<int>(random() % static_cast<unsigned>(dim())),
                        i % 3 == 0   ? nan
                        : i % 3 == 1 ? inf
                                     : minus});
    }
    for (const NonFinite& value : values) {
      auto* to = static_cast<std::uint16_t*>(one.v()) + value.row * one.problem().v.row_stride +
                 value.head * one.problem().v.head_stride + value.column;
      test::require(cudaMemcpy(to, &value.bits, 2, cudaMemcpyHostToDevice), "copy");
    }
    one.run_and_judge();
  }
}

/// A block has several items of one tile of keys each: what one's V has stays out of the others.
TEST_P(AttentionOnGpu, InfAndNanOfOneSequenceStayOutOfTheNextOnes) {
  const auto nan = static_cast<std::uint16_t>(dtype() == DType::kBf16 ? 0x7f81 : 0x7c01);
  constexpr int kBatch = 500;
  constexpr int kRows = 60;
  for (int round = 0; round < 10; ++round) {
    Case one(problem_of(kBatch, kRows, kRows, 4, 4, dim(), true, Layout::kRowsFirst, dtype()));
    one.problem().scale = 0.01f;
    for (int batch = round % 8; batch < kBatch; batch += 8) {
      const AttentionTensor& v = one.problem().v;
      auto* to = static_cast<std::uint16_t*>(one.v()) + batch * v.batch_stride +
                 batch / 8 % 4 * v.head_stride + (kRows - 1) * v.row_stride + batch % dim();
      test::require(cudaMemcpy(to, &nan, 2, cudaMemcpyHostToDevice), "copy");
    }
    one.run_and_judge();
  }
}

TEST_P(AttentionOnGpu, InfAndNanOfHiddenKeysAndValuesChangeNoBit) {
  Case one(problem_of(1, 640, 640, 2, 1, dim(), true, Layout::kRowsFirst, dtype()));
  const AttentionPlan plan = one.plan();
  const std::int64_t elements = query_elements(one.problem());
  const test::DeviceMemory before(2 * elements);
  one.launch(plan);
  test::require(cudaMemcpy(before.data(), one.o(), 2 * elements, cudaMemcpyDeviceToDevice), "copy");
  // Everything from row 300 on: rows before it must not notice.
  const std::int64_t from = 300 * one.problem().k.row_stride;
  const std::int64_t count = key_elements(one.problem()) - from;
  test::poison(static_cast<std::uint16_t*>(one.k()) + from, count, nullptr);
  test::poison(static_cast<std::uint16_t*>(one.v()) + from, count, nullptr);
  one.poison();
  one.launch(plan);
  EXPECT_EQ(
      test::count_different(before.data(), one.o(), 300 * one.problem().o.row_stride, nullptr), 0);
}

}  // namespace
}  // namespace mk::kernels::cuda
