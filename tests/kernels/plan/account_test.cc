// Times by the plan's own account of the work: the formula of account.h with numbers one can
// follow, and what a machine's file fills in.
#include "kernels/plan/account.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/gemm_rs/spec.h"

namespace mk::kernels::plan {
namespace {

/// 1000 ns of computing, 100 of local work, 600 of network, in 10 steps.
constexpr LaunchWork kWork{2000, 50, 300, 10, 4};
constexpr MachineRates kRates{2e9, 0.5e9, 0.6e9, 25, 0};

TEST(PlanAccount, UnfusedIsTheSumAndFusedTheLongestPartWithAStepOfTheOthers) {
  const Estimate none = expected(kWork, kRates);
  EXPECT_EQ(none.unfused_ns, 1000u + 100 + 600);
  EXPECT_EQ(none.fused_ns, 1000u + (100 + 600) / 10);
  EXPECT_EQ(none.cheaper(), Mode::kFused);
}

TEST(PlanAccount, StepsCostTheFusedForm) {
  MachineRates rates = kRates;
  rates.step_ns = 62;
  EXPECT_EQ(expected(kWork, rates).fused_ns, 1070u + 620);
  EXPECT_EQ(expected(kWork, rates).unfused_ns, 1700u);
  EXPECT_EQ(expected(kWork, rates).cheaper(), Mode::kFused);
  rates.step_ns = 64;
  EXPECT_EQ(expected(kWork, rates).cheaper(), Mode::kUnfused);
}

TEST(PlanAccount, OneStepHidesNothing) {
  LaunchWork work = kWork;
  work.steps = 1;
  EXPECT_EQ(expected(work, kRates).fused_ns, expected(work, kRates).unfused_ns);
  EXPECT_EQ(expected(work, kRates).cheaper(), Mode::kFused);
  work.steps = 0;  // nothing to hand over at all
  EXPECT_EQ(expected(work, kRates).fused_ns, 1700u);
}

TEST(PlanAccount, TheLongestPartMayBeAny) {
  LaunchWork work = kWork;
  work.local_bytes = 5000;
  EXPECT_EQ(expected(work, kRates).fused_ns, 10000u + (1000 + 600) / 10);
  work = kWork;
  work.network_bytes = 3000;
  EXPECT_EQ(expected(work, kRates).fused_ns, 5100u + (1000 + 100) / 10);
}

TEST(PlanAccount, UnknownRatesCountForNothingAndHugeWorkDoesNotWrap) {
  EXPECT_EQ(expected(kWork, {}).unfused_ns, 0u);
  EXPECT_EQ(expected(kWork, {}).cheaper(), Mode::kFused);
  LaunchWork work = kWork;
  work.flops = 1e300;
  EXPECT_GT(expected(work, kRates).unfused_ns, 1ull << 60);
}

// Terms add up to the total.
TEST(PlanAccount, TheTermsAreThoseOfTheWork) {
  const Timeline time = predict(kWork, kRates, Mode::kFused);
  EXPECT_NEAR(time.compute, 1.0, 1e-9);
  EXPECT_NEAR(time.local, 0.1, 1e-9);
  EXPECT_NEAR(time.network, 0.6, 1e-9);
  EXPECT_NEAR(time.total, time.compute + time.last + time.launch, 1e-9);
}

TEST(PlanAccount, ACpuFillsInWhatIsNotTold) {
  const MachineRates given{1e9, 2e9, 3e9, 4, 5};
  const MachineRates same = rank_rates(cpu_here(), given, {});
  EXPECT_EQ(same.flops_per_s, 1e9);
  EXPECT_EQ(same.local_bytes_per_s, 2e9);
  EXPECT_EQ(same.network_bytes_per_s, 3e9);
  EXPECT_EQ(same.command_ns, 4);
  EXPECT_EQ(same.step_ns, 5);
  const MachineRates filled = rank_rates(cpu_here(), {}, {});
  for (double rate : {filled.flops_per_s, filled.local_bytes_per_s, filled.network_bytes_per_s,
                      filled.command_ns, filled.step_ns})
    EXPECT_GT(rate, 0);
}

TEST(PlanAccount, ComputeThreadsShareTheCoresThereAre) {
  const std::uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  const auto flops = [](std::uint32_t locals, std::uint32_t threads) {
    return rank_rates(cpu_here(), {}, {locals, threads, 100e9}).flops_per_s;
  };
  EXPECT_EQ(flops(1, 1), 100e9);
  EXPECT_DOUBLE_EQ(flops(1, 4 * cores), 100e9 * cores);
  EXPECT_DOUBLE_EQ(flops(2, 4 * cores), 100e9 * cores / 2);
}

// A network that is slower than daemons who take turns stays the slower.
TEST(PlanAccount, RanksThatTakeTurnsAreNoQuickerThanTheNetwork) {
  Machine machine = cpu_here();
  machine.sms = 1;
  machine.network_gb_s = machine.cpu_network_in_turns_gb_s / 10;
  EXPECT_DOUBLE_EQ(rank_rates(machine, {}, {2, 1, 0}).network_bytes_per_s,
                   machine.network_gb_s * 1e9);
  machine.network_gb_s = machine.cpu_network_in_turns_gb_s * 10;
  EXPECT_DOUBLE_EQ(rank_rates(machine, {}, {2, 1, 0}).network_bytes_per_s,
                   machine.cpu_network_in_turns_gb_s * 1e9);
}

TEST(PlanAccount, RatesThatMakeNoSenseAreRefused) {
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

TEST(PlanAccount, AGpuFillsInWhatIsNotTold) {
  const plan::Machine machine = shipped_machine("H200").value();
  MachineRates given;
  given.step_ns = 7;
  const MachineRates rates = rank_rates(machine, given, {1, 100, 0});
  EXPECT_EQ(rates.step_ns, 7);
  EXPECT_DOUBLE_EQ(rates.flops_per_s, 100 * rank_rates(machine, {}, {1, 1, 0}).flops_per_s);
  // 128 of them beside the power limit: what the plain product reaches (tests/bench/results).
  EXPECT_NEAR(rank_rates(machine, {}, {1, 128, 0}).flops_per_s, 700e12, 50e12);
  for (double rate : {rates.local_bytes_per_s, rates.network_bytes_per_s, rates.command_ns}) {
    EXPECT_GT(rate, 0);
  }
}

// What a rank reads and writes of partials of 1024 x 512 x 2 bytes for each shard: over two nodes
// of four the other node's sum, then its own and what has come; or its own together with what has
// come.
TEST(PlanAccount, AShardSummedOnceIsReadOnce) {
  const auto plan = GemmRsPlan::make(2, 4, {8192, 512, 0}, DType::kBf16, {128, 256, 512 << 10, 0});
  ASSERT_TRUE(plan) << plan.error().message;
  constexpr double kShard = 1024.0 * 512 * 2;
  const World world{2, 4, 1, 2};
  EXPECT_EQ(plan->work(world, 8192, 64).local_bytes, kShard * (2 * (4 + 1) + (2 + 1)));
  EXPECT_EQ(plan->work(world, 8192, 64, true).local_bytes, kShard * ((4 + 1) + (4 + 1 + 1)));
}

}  // namespace
}  // namespace mk::kernels::plan
