// The estimate by which Mode::kAuto chooses: the formula of estimate.h with numbers one can follow,
// and what the CPU executor fills in.
#include "kernels/comm/estimate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "kernels/cpu/cpu_rates.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "kernels/plan/operator_plan.h"

namespace mk::kernels {
namespace {

/// 1000 ns of computing, 100 of local work, 600 of network, in 10 steps.
constexpr LaunchWork kWork{2000, 50, 300, 10, 4};
constexpr MachineRates kRates{2e9, 0.5e9, 0.6e9, 25, 0};

TEST(Estimate, UnfusedIsTheSumAndFusedTheLongestPartWithAStepOfTheOthers) {
  const Estimate none = estimate(kWork, kRates);
  EXPECT_EQ(none.unfused_ns, 1000u + 100 + 600);
  EXPECT_EQ(none.fused_ns, 1000u + (100 + 600) / 10);
  EXPECT_EQ(none.cheaper(), Mode::kFused);
}

TEST(Estimate, StepsCostTheFusedForm) {
  MachineRates rates = kRates;
  rates.step_ns = 62;
  EXPECT_EQ(estimate(kWork, rates).fused_ns, 1070u + 620);
  EXPECT_EQ(estimate(kWork, rates).unfused_ns, 1700u);
  EXPECT_EQ(estimate(kWork, rates).cheaper(), Mode::kFused);
  rates.step_ns = 64;
  EXPECT_EQ(estimate(kWork, rates).cheaper(), Mode::kUnfused);
}

TEST(Estimate, OneStepHidesNothing) {
  LaunchWork work = kWork;
  work.steps = 1;
  EXPECT_EQ(estimate(work, kRates).fused_ns, estimate(work, kRates).unfused_ns);
  EXPECT_EQ(estimate(work, kRates).cheaper(), Mode::kFused);
  work.steps = 0;  // nothing to hand over at all
  EXPECT_EQ(estimate(work, kRates).fused_ns, 1700u);
}

TEST(Estimate, TheLongestPartMayBeAny) {
  LaunchWork work = kWork;
  work.local_bytes = 5000;
  EXPECT_EQ(estimate(work, kRates).fused_ns, 10000u + (1000 + 600) / 10);
  work = kWork;
  work.network_bytes = 3000;
  EXPECT_EQ(estimate(work, kRates).fused_ns, 5100u + (1000 + 100) / 10);
}

TEST(Estimate, UnknownRatesCountForNothingAndHugeWorkDoesNotWrap) {
  EXPECT_EQ(estimate(kWork, {}).unfused_ns, 0u);
  EXPECT_EQ(estimate(kWork, {}).cheaper(), Mode::kFused);
  LaunchWork work = kWork;
  work.flops = 1e300;
  EXPECT_GT(estimate(work, kRates).unfused_ns, 1ull << 60);
}

TEST(CpuRates, KeepWhatIsGivenAndFillInTheRest) {
  const MachineRates given{1e9, 2e9, 3e9, 4, 5};
  const MachineRates same = cpu_rates(given, {}, {}, 100e9);
  EXPECT_EQ(same.flops_per_s, 1e9);
  EXPECT_EQ(same.local_bytes_per_s, 2e9);
  EXPECT_EQ(same.network_bytes_per_s, 3e9);
  EXPECT_EQ(same.command_ns, 4);
  EXPECT_EQ(same.step_ns, 5);
  const MachineRates filled = cpu_rates({}, {}, {}, 100e9);
  for (double rate : {filled.flops_per_s, filled.local_bytes_per_s, filled.network_bytes_per_s,
                      filled.command_ns, filled.step_ns})
    EXPECT_GT(rate, 0);
}

TEST(CpuRates, ComputeBlocksShareTheCoresThereAre) {
  const std::uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  RoleBlocks blocks;
  const double one = cpu_rates({}, {}, blocks, 100e9).flops_per_s;
  EXPECT_EQ(one, 100e9);
  blocks.compute = 4 * cores;
  EXPECT_DOUBLE_EQ(cpu_rates({}, {}, blocks, 100e9).flops_per_s, 100e9 * cores);
  const World world{1, 2, 0, 0};
  EXPECT_DOUBLE_EQ(cpu_rates({}, world, blocks, 100e9).flops_per_s, 100e9 * cores / 2);
}

TEST(CpuRates, RatesThatMakeNoSenseAreRefused) {
  EXPECT_TRUE(check_rates("op", {}));
  for (double bad : {-1.0, std::nan(""), HUGE_VAL}) {
    MachineRates rates;
    rates.step_ns = bad;
    EXPECT_EQ(check_rates("op", rates).error().code, ErrorCode::kInvalidArgument);
    rates = {};
    rates.flops_per_s = bad;
    EXPECT_EQ(check_rates("op", rates).error().code, ErrorCode::kInvalidArgument);
  }
}

// For operators that the planner's model has no terms for.
TEST(Estimate, GpuRatesFillInWhatIsNotGiven) {
  const plan::Machine machine = plan::shipped_machine("H200").value();
  MachineRates given;
  given.step_ns = 7;
  const MachineRates rates = plan::gpu_rates(machine, given, 100);
  EXPECT_EQ(rates.step_ns, 7);
  EXPECT_DOUBLE_EQ(rates.flops_per_s, 100 * plan::gpu_rates(machine, {}, 1).flops_per_s);
  // 128 of them beside the power limit: what the plain product reaches (tests/bench/results).
  EXPECT_NEAR(plan::gpu_rates(machine, {}, 128).flops_per_s, 700e12, 50e12);
  for (double rate : {rates.local_bytes_per_s, rates.network_bytes_per_s, rates.command_ns}) {
    EXPECT_GT(rate, 0);
  }
}

// What a rank reads and writes of partials of 1024 x 512 x 2 bytes for each shard: over two nodes
// of four the other node's sum, then its own and what has come; or its own together with what has
// come.
TEST(Estimate, AShardSummedOnceIsReadOnce) {
  const auto plan = GemmRsPlan::make(2, 4, {8192, 512, 0}, DType::kBf16, {128, 256, 512 << 10, 0});
  ASSERT_TRUE(plan) << plan.error().message;
  constexpr double kShard = 1024.0 * 512 * 2;
  const World world{2, 4, 1, 2};
  EXPECT_EQ(plan->work(world, 8192, 64).local_bytes, kShard * (2 * (4 + 1) + (2 + 1)));
  EXPECT_EQ(plan->work(world, 8192, 64, true).local_bytes, kShard * ((4 + 1) + (4 + 1 + 1)));
}

}  // namespace
}  // namespace mk::kernels
