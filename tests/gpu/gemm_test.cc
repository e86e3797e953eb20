// The plain product's host side: what it refuses and how it says so, which variant it takes,
// capture into a graph.
#include "kernels/cuda/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

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
