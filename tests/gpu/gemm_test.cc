// The plain product's host side: what it refuses and how it says so, which variant it takes,
// capture into a graph.
#include "kernels/cuda/core/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/cuda/core/gemm_choice.h"

#include "tests/gpu/gemm_reference.h"

namespace mk::kernels::cuda {
namespace {

using testing::HasSubstr;

GemmProblem problem_of(int m, int n, int k) {
  GemmProblem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  return problem;
}

TEST(Gemm, RefusesSizesTheCopyEngineCannotMove) {
  for (const auto& [m, n, k] :
       {std::tuple{0, 8, 8}, {8, 0, 8}, {8, 8, -8}, {8, 12, 8}, {8, 8, 20}}) {
    const auto plan = GemmPlan::create(problem_of(m, n, k));
    ASSERT_FALSE(plan.has_value());
    EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument) << plan.error().message;
  }
  EXPECT_THAT(GemmPlan::create(problem_of(8, 12, 8)).error().message, HasSubstr("multiples of 8"));
}

/// An H100's: clusters of 3 and more do not fill it.
GemmRoom h100() { return {132, {0, 132, 66, 38, 30, 22, 18, 16, 16}}; }

int columns_of(GemmVariant variant) {
  switch (variant) {
    case GemmVariant::k128x64:
      return 64;
    case GemmVariant::k128x128:
      return 128;
    case GemmVariant::k128x160:
      return 160;
    case GemmVariant::k128x192:
      return 192;
    case GemmVariant::k128x224:
      return 224;
    default:
      return 256;
  }
}

TEST(GemmChoice, TilesComeOutEvenOnTheMultiprocessors) {
  // 224 tiles of 256 columns are two waves, the second of them two thirds full; 256 of 224 are two.
  EXPECT_EQ(choose_gemm(512, 14336, 8192, h100()).variant, GemmVariant::k128x224);
  // 128 tiles of 160 columns are one wave; 80 of 256 and 160 of 128 are no better.
  EXPECT_EQ(choose_gemm(1024, 2560, 8192, h100()).variant, GemmVariant::k128x160);
  // Many tiles: two blocks share a tile of B.
  EXPECT_EQ(choose_gemm(8192, 8192, 8192, h100()).variant, GemmVariant::k128x256Pair);
  EXPECT_EQ(choose_gemm(8192, 8192, 8192, h100()).splits, 1);
}

TEST(GemmChoice, BlocksShareKWhereTilesAreFew) {
  for (const int m : {16, 64, 128}) {
    const GemmChoice choice = choose_gemm(m, 2560, 8192, h100());
    EXPECT_GT(choice.splits, 1) << m;
    EXPECT_GE((2560 + columns_of(choice.variant) - 1) / columns_of(choice.variant) * choice.splits,
              66)
        << m << ": half of the multiprocessors at least";
    EXPECT_EQ(choose_gemm(m, 2560, 8192, h100(), /*one_order_of_k=*/true).splits, 1);
  }
  EXPECT_EQ(choose_gemm(64, 2560, 64, h100()).splits, 1) << "there is one block of K";
}

// Blocks that share a tile have no other: all of them run at one time.
TEST(GemmChoice, SharesOfKFitTheDevice) {
  std::mt19937 random(20261128);
  const auto side = [&](int least, int most) {
    const int bits = std::uniform_int_distribution(least, most)(random);
    return std::uniform_int_distribution(1 << bits, (2 << bits) - 1)(random);
  };
  int shared = 0;
  for (int i = 0; i < 20000; ++i) {
    const int m = side(0, 12), n = 8 * side(0, 11), k = 8 * side(0, 11);
    GemmRoom room = h100();
    if (i % 3 == 0) room = {44, {0, 44, 20, 12, 8, 6, 4, 4, 4}};
    const GemmChoice choice = choose_gemm(m, n, k, room);
    ASSERT_NE(choice.variant, GemmVariant::kAuto);
    ASSERT_GE(choice.splits, 1);
    ASSERT_LE(choice.splits, std::max(1, splits_max(choice.variant, (k + 63) / 64)));
    ASSERT_EQ(choose_gemm(m, n, k, room, true).splits, 1);
    if (choice.splits == 1) continue;
    ++shared;
    const int columns = columns_of(choice.variant);
    const int tiles = (m + 127) / 128 * ((n + columns - 1) / columns);
    ASSERT_LE(tiles, room.clusters[static_cast<std::size_t>(choice.splits)]) << m << " " << n;
    ASSERT_LE(tiles * choice.splits, room.blocks);
  }
  EXPECT_GT(shared, 500);
}

bool have_gpu() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

TEST(Gemm, SaysThatThereIsNoGpu) {
  if (have_gpu()) GTEST_SKIP() << "there is one";
  const auto plan = GemmPlan::create(problem_of(8, 8, 8));
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, ErrorCode::kUnavailable);
}

TEST(Gemm, RefusesMisalignedAddresses) {
  if (!have_gpu()) GTEST_SKIP() << "no CUDA device";
  const test::DeviceMemory memory(4096);
  auto problem = problem_of(8, 8, 8);
  problem.a = static_cast<char*>(memory.data()) + 2;
  problem.b = memory.data();
  problem.c = memory.data();
  const auto plan = GemmPlan::create(problem);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(plan.error().message, HasSubstr("matrix A"));
}

TEST(Gemm, RefusesMoreSharesOfKThanATileHasRoomFor) {
  if (!have_gpu()) GTEST_SKIP() << "no CUDA device";
  const test::DeviceMemory memory(2 << 20);
  auto problem = problem_of(8, 64, 128);
  problem.a = problem.b = problem.c = memory.data();
  GemmTuning tuning;
  tuning.variant = GemmVariant::k128x64;
  tuning.splits = 3;
  const auto plan = GemmPlan::create(problem, tuning);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(plan.error().message, HasSubstr("at most 2"));
}

/// The first row of a product of `m` rows, all with the same first row of A.
std::vector<std::uint16_t> first_row(int m, int n, int k, const GemmTuning& tuning, int* splits) {
  const auto bytes = [](std::int64_t elements) { return static_cast<std::size_t>(2 * elements); };
  const test::DeviceMemory a(bytes(std::int64_t{m} * k)), b(bytes(std::int64_t{n} * k)),
      c(bytes(std::int64_t{m} * n));
  auto problem = problem_of(m, n, k);
  problem.a = a.data();
  problem.b = b.data();
  problem.c = c.data();
  test::fill_normal(a.data(), DType::kBf16, std::int64_t{m} * k, 1 + static_cast<unsigned>(m), 0);
  test::fill_normal(a.data(), DType::kBf16, k, 1, nullptr);
  test::fill_normal(b.data(), DType::kBf16, std::int64_t{n} * k, 2, nullptr);
  test::poison(c.data(), std::int64_t{m} * n, nullptr);
  const auto plan = GemmPlan::create(problem, tuning);
  EXPECT_TRUE(plan.has_value());
  if (splits != nullptr) *splits = plan->splits();
  EXPECT_TRUE(plan->launch(nullptr).has_value());
  EXPECT_TRUE(test::judge(problem, 0, m, nullptr).right()) << m;
  std::vector<std::uint16_t> row(static_cast<std::size_t>(n));
  test::require(cudaMemcpy(row.data(), c.data(), 2 * row.size(), cudaMemcpyDeviceToHost), "row");
  return row;
}

TEST(Gemm, SharedKGivesTheSameBitsEachTime) {
  if (!have_gpu()) GTEST_SKIP() << "no CUDA device";
  int splits = 0;
  const auto row = first_row(64, 2560, 8192, {}, &splits);
  EXPECT_GT(splits, 1);
  for (int run = 0; run < 20; ++run) ASSERT_EQ(first_row(64, 2560, 8192, {}, nullptr), row) << run;
}

// Tiles of every size are chosen among these; with K shared the bits differ somewhere.
TEST(Gemm, UnderOneOrderOfKARowsBitsDoNotDependOnM) {
  if (!have_gpu()) GTEST_SKIP() << "no CUDA device";
  GemmTuning one_order;
  one_order.one_order_of_k = true;
  const auto row = first_row(1, 2560, 8192, one_order, nullptr);
  for (const int m : {2, 64, 65, 128, 200, 256, 512, 1024, 4096}) {
    int splits = 0;
    ASSERT_EQ(first_row(m, 2560, 8192, one_order, &splits), row) << m;
    EXPECT_EQ(splits, 1);
  }
  EXPECT_NE(first_row(64, 2560, 8192, {}, nullptr), row) << "it shares K, so this test can fail";
}

TEST(Gemm, ReplaysFromAGraphWithNewInputs) {
  if (!have_gpu()) GTEST_SKIP() << "no CUDA device";
  constexpr int kM = 520, kN = 1032, kK = 328;
  const test::DeviceMemory a(2 * kM * kK), b(2 * kN * kK), c(2 * kM * kN);
  auto problem = problem_of(kM, kN, kK);
  problem.a = a.data();
  problem.b = b.data();
  problem.c = c.data();
  const auto plan = GemmPlan::create(problem);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;

  cudaStream_t stream = nullptr;
  test::require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  test::require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  ASSERT_TRUE(plan->launch(stream).has_value());
  test::require(cudaStreamEndCapture(stream, &graph), "capture");
  test::require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (std::uint64_t replay = 0; replay < 200; ++replay) {
    test::fill_normal(a.data(), DType::kBf16, kM * kK, 2 * replay, stream);
    test::fill_normal(b.data(), DType::kBf16, kN * kK, 2 * replay + 1, stream);
    test::poison(c.data(), kM * kN, stream);
    test::require(cudaGraphLaunch(executable, stream), "replay");
    ASSERT_TRUE(test::judge(problem, 0, kM, stream).right()) << "replay " << replay;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace mk::kernels::cuda
