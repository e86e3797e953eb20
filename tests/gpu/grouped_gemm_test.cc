// The grouped product: what it refuses, and on a GPU every element of every way to divide rows
// among experts against float64, rows of nobody untouched.
#include "kernels/cuda/core/grouped_gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "tests/gpu/devices.h"
#include "tests/gpu/grouped_case.h"
#include "tests/gpu/products.h"

namespace mk::test {
namespace {

using kernels::cuda::BLayout;
using kernels::cuda::DType;
using kernels::cuda::GroupedActivation;
using kernels::cuda::GroupedGemmPlan;
using kernels::cuda::GroupedGemmProblem;
using kernels::cuda::GroupedGemmTuning;
using kernels::cuda::GroupedVariant;
using testing::HasSubstr;

constexpr GroupedActivation kActivations[] = {GroupedActivation::kNone,
                                              GroupedActivation::kGatedSiluHalves,
                                              GroupedActivation::kGatedSiluPairs};

/// A number below `end`.
std::uint32_t draw(std::mt19937& random, std::uint32_t end) {
  return static_cast<std::uint32_t>(random() % end);
}

GroupedGemmProblem problem_of(int experts, int rows_max, int n, int k) {
  GroupedGemmProblem problem;
  problem.experts = experts;
  problem.rows_max = rows_max;
  problem.n = n;
  problem.k = k;
  static const std::uint32_t kOffsets[2] = {};
  problem.offsets = kOffsets;
  return problem;
}

std::string refusal_of(const GroupedGemmProblem& problem) {
  const auto plan = GroupedGemmPlan::create(problem);
  if (plan.has_value()) return "accepted";
  EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument) << plan.error().message;
  return plan.error().message;
}

TEST(GroupedGemm, RefusesSizesByName) {
  EXPECT_THAT(refusal_of(problem_of(0, 8, 8, 8)), HasSubstr("0 experts"));
  EXPECT_THAT(refusal_of(problem_of(513, 8, 8, 8)), HasSubstr("513 experts"));
  EXPECT_THAT(refusal_of(problem_of(1, 0, 8, 8)), HasSubstr("rows_max 0"));
  EXPECT_THAT(refusal_of(problem_of(1, 8, -8, 8)), HasSubstr("n -8"));
  EXPECT_THAT(refusal_of(problem_of(1, 8, 12, 8)), HasSubstr("n 12"));
  EXPECT_THAT(refusal_of(problem_of(1, 8, 8, 20)), HasSubstr("k 20"));
  auto gated = problem_of(1, 8, 24, 8);
  gated.activation = GroupedActivation::kGatedSiluPairs;
  EXPECT_THAT(refusal_of(gated), HasSubstr("multiple of 16"));
}

TEST(GroupedGemm, RefusesAddressesByName) {
  auto problem = problem_of(1, 8, 8, 8);
  problem.offsets = nullptr;
  EXPECT_THAT(refusal_of(problem), HasSubstr("give offsets"));
  problem = problem_of(1, 8, 8, 8);
  problem.bias = reinterpret_cast<const void*>(2);
  EXPECT_THAT(refusal_of(problem), HasSubstr("bias"));
}

class GroupedGemmOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
  static GroupedGemmPlan plan_of(const GroupedGemmProblem& problem,
                                 const GroupedGemmTuning& tuning = {}) {
    auto plan = GroupedGemmPlan::create(problem, tuning);
    EXPECT_TRUE(plan.has_value()) << plan.error().message;
    return *plan;
  }
  static void expect_right(const GroupedCase& product, const std::string& text) {
    const GroupedVerdict verdict = product.judge(nullptr);
    EXPECT_TRUE(verdict.right()) << text << ": " << verdict.rows.bad
                                 << " elements wrong, one of them " << verdict.rows.first_bad
                                 << ", worst " << verdict.rows.worst << " of the bound; "
                                 << verdict.touched << " elements of nobody's rows touched";
    EXPECT_LE(verdict.rows.worst, 1.0) << text;
  }
  static void check(const GroupedShape& shape, const GroupedGemmTuning& tuning = {}) {
    const GroupedCase product(shape, fresh_seed());
    const auto plan = plan_of(product.problem(), tuning);
    ASSERT_TRUE(plan.launch(nullptr).has_value());
    expect_right(product, shape.text());
  }
};

TEST_F(GroupedGemmOnGpu, RefusesMisalignedMatricesByName) {
  GroupedCase product({{16}, 64, 64}, 1);
  auto problem = product.problem();
  problem.a = static_cast<const char*>(problem.a) + 2;
  EXPECT_THAT(refusal_of(problem), HasSubstr("matrix A"));
  problem = product.problem();
  problem.b = static_cast<const char*>(problem.b) + 8;
  EXPECT_THAT(refusal_of(problem), HasSubstr("matrix B"));
  problem = product.problem();
  problem.c = nullptr;
  EXPECT_THAT(refusal_of(problem), HasSubstr("matrix C"));
}

/// Experts' rows: around the tiles' borders, none, one expert with all.
std::vector<std::vector<std::uint32_t>> row_counts() {
  std::vector<std::vector<std::uint32_t>> counts = {
      {1},
      {0},
      {0, 0, 0},
      {128, 128},
      {64, 64, 64},
      {65, 63, 127, 129, 1, 191, 192, 193, 255, 256, 257},
      {0, 0, 700, 0, 0},
      {0, 5, 0, 0, 130, 0},
      {2500, 1},
      {7, 0, 0, 0, 0, 0, 0, 2400},
      std::vector<std::uint32_t>(512, 1),
      std::vector<std::uint32_t>(512, 0)};
  counts.back()[511] = 300;
  std::mt19937 random(static_cast<unsigned>(fresh_seed()));
  for (int i = 0; i < 4; ++i) {
    std::vector<std::uint32_t> drawn(1 + draw(random, 70));
    for (auto& count : drawn) count = draw(random, 3) == 0 ? 0 : draw(random, 200);
    counts.push_back(drawn);
  }
  return counts;
}

TEST_F(GroupedGemmOnGpu, EveryDivisionOfRowsIsRight) {
  for (const auto& counts : row_counts()) {
    for (const DType dtype : {DType::kBf16, DType::kF16}) {
      for (const auto variant : {GroupedVariant::k128x128, GroupedVariant::k128x256}) {
        GroupedShape shape{counts, 264, 136};
        shape.dtype = dtype;
        GroupedGemmTuning tuning;
        tuning.variant = variant;
        tuning.band_rows = dtype == DType::kBf16 ? 0 : 256;
        tuning.blocks_max = variant == GroupedVariant::k128x128 ? 3 : 0;  // several tiles a block
        check(shape, tuning);
      }
    }
  }
}

TEST_F(GroupedGemmOnGpu, EveryEpilogueLayoutAndTypeIsRight) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    for (const BLayout layout : {BLayout::kNK, BLayout::kKN}) {
      for (const GroupedActivation activation : kActivations) {
        for (const auto variant : {GroupedVariant::k128x128, GroupedVariant::k128x256}) {
          for (int extras = 0; extras < 4; ++extras) {
            GroupedShape shape{{70, 0, 130, 33, 128, 1}, 528, 200};
            shape.dtype = dtype;
            shape.layout = layout;
            shape.activation = activation;
            shape.bias = extras % 2 != 0;
            shape.scale = extras / 2 != 0;
            GroupedGemmTuning tuning;
            tuning.variant = variant;
            check(shape, tuning);
          }
        }
      }
    }
  }
}

TEST_F(GroupedGemmOnGpu, EverySizeIsRight) {
  for (const auto& [n, k] : {std::pair{8, 8},
                             {16, 8},
                             {24, 4096},
                             {128, 64},
                             {136, 72},
                             {256, 56},
                             {400, 1000},
                             {1000, 520},
                             {2064, 264}}) {
    for (const BLayout layout : {BLayout::kNK, BLayout::kKN}) {
      for (const GroupedActivation activation : kActivations) {
        GroupedShape shape{{100, 3, 0, 129}, n, k};
        if (activation != GroupedActivation::kNone && n % 16 != 0) continue;
        shape.layout = layout;
        shape.activation = activation;
        shape.bias = true;
        shape.rows_spare = 90;
        check(shape);
      }
    }
  }
}

TEST_F(GroupedGemmOnGpu, RowsOfNobodyAreNotTouched) {
  for (const int gap : {1, 64, 130}) {
    GroupedShape shape{{100, 0, 64, 1, 200}, 256, 128};
    shape.gap = gap;
    shape.rows_spare = 300;
    check(shape);
    shape.activation = GroupedActivation::kGatedSiluHalves;
    check(shape);
  }
}

TEST_F(GroupedGemmOnGpu, OffsetsBeyondTheRowsWriteNothingBehindThem) {
  const GroupedShape shape{{100, 100}, 256, 128};
  GroupedCase product(shape, fresh_seed());
  const auto plan = plan_of(product.problem());
  const std::vector<std::vector<std::uint32_t>> wild = {{0, 100, 100000},
                                                        {0, 4000000000u, 50},
                                                        {90, 20, 201},
                                                        {4000000000u, 4000000100u, 4294967295u}};
  for (const auto& offsets : wild) {
    require(cudaMemcpy(const_cast<std::uint32_t*>(product.problem().offsets), offsets.data(),
                       4 * offsets.size(), cudaMemcpyHostToDevice),
            "offsets");
    product.poison_output(nullptr);
    ASSERT_TRUE(plan.launch(nullptr).has_value());
    const auto elements = product.output(nullptr);
    const auto behind = elements.begin() + product.problem().rows_max * product.c_columns();
    EXPECT_TRUE(std::all_of(behind, elements.end(), [](auto v) { return v == 0xffff; }));
  }
}

TEST_F(GroupedGemmOnGpu, NanStaysInItsRow) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    for (const BLayout layout : {BLayout::kNK, BLayout::kKN}) {
      GroupedShape shape{{70, 130, 5}, 264, 200};
      shape.dtype = dtype;
      shape.layout = layout;
      shape.rows_spare = 60;
      const GroupedCase product(shape, fresh_seed());
      const auto plan = plan_of(product.problem());
      constexpr std::uint16_t kNan = 0x7fff;
      // The last row of one expert, the first of the next, one of nobody behind the last.
      for (const std::uint32_t row : {69u, 70u, 205u}) {
        for (const int column : {0, 199}) {
          require(cudaMemcpy(product.element_of_a(row, column), &kNan, 2, cudaMemcpyHostToDevice),
                  "NaN");
        }
      }
      ASSERT_TRUE(plan.launch(nullptr).has_value());
      expect_right(product, shape.text());
    }
  }
}

TEST_F(GroupedGemmOnGpu, NanInOneExpertsWeightsReachesOnlyItsRows) {
  for (const BLayout layout : {BLayout::kNK, BLayout::kKN}) {
    GroupedShape shape{{70, 130, 5}, 264, 200};
    shape.layout = layout;
    const GroupedCase product(shape, fresh_seed());
    auto* const weights = static_cast<std::uint16_t*>(const_cast<void*>(product.problem().b));
    require(cudaMemset(weights + 264 * 200, 0xff, 2 * 264 * 200), "NaN");
    ASSERT_TRUE(plan_of(product.problem()).launch(nullptr).has_value());
    expect_right(product, shape.text());
  }
}

TEST_F(GroupedGemmOnGpu, RunsAreEqualBitByBit) {
  GroupedShape shape{{300, 0, 77, 1000, 64, 190}, 1040, 520};
  shape.activation = GroupedActivation::kGatedSiluHalves;
  shape.scale = true;
  const GroupedCase product(shape, fresh_seed());
  const auto plan = plan_of(product.problem());
  ASSERT_TRUE(plan.launch(nullptr).has_value());
  const auto first = product.output(nullptr);
  for (int run = 0; run < 100; ++run) {
    product.poison_output(nullptr);
    ASSERT_TRUE(plan.launch(nullptr).has_value());
    ASSERT_EQ(product.output(nullptr), first) << "run " << run;
  }
}

TEST_F(GroupedGemmOnGpu, AGraphReplaysWithNewCountsAndInputs) {
  std::mt19937 random(static_cast<unsigned>(fresh_seed()));
  constexpr std::uint32_t kRows = 900;
  GroupedShape shape{std::vector<std::uint32_t>(9, kRows / 9), 520, 136};
  GroupedCase product(shape, fresh_seed());
  const auto plan = plan_of(product.problem());
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  ASSERT_TRUE(plan.launch(stream).has_value());
  require(cudaStreamEndCapture(stream, &graph), "capture");
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (int replay = 0; replay < 100; ++replay) {
    std::vector<std::uint32_t> counts(shape.counts.size(), 0);
    std::uint32_t left = draw(random, kRows + 1);
    for (auto& count : counts) {
      count = draw(random, 3) == 0 ? 0 : draw(random, left + 1);
      left -= count;
    }
    product.set_counts(counts, stream);
    product.fill(fresh_seed(), stream);
    require(cudaGraphLaunch(executable, stream), "replay");
    ASSERT_TRUE(product.judge(stream).right()) << "replay " << replay;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(GroupedGemmOnGpu, LaunchesInARowAreAllRight) {
  const GroupedShape shape{{300, 0, 77, 260, 64, 190}, 520, 264};
  const GroupedCase product(shape, fresh_seed());
  const auto plan = plan_of(product.problem());
  for (int launch = 0; launch < 1000; ++launch) ASSERT_TRUE(plan.launch(nullptr).has_value());
  product.poison_output(nullptr);
  ASSERT_TRUE(plan.launch(nullptr).has_value());
  expect_right(product, shape.text());
}

}  // namespace
}  // namespace mk::test
