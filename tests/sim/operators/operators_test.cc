// Operators in virtual time: the mirror against all nodes, bytes against the operators' accounts,
// and what a simulation must notice.
#include "tests/sim/operators/simulate.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/operator_block.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/cluster.h"
#include "kernels/plan/operator_work.h"
#include "tests/sim/operators/operator_run.h"

namespace mk::sim {
namespace {

namespace plan = kernels::plan;
using ::testing::HasSubstr;

constexpr plan::Op kOps[] = {plan::Op::kAgGemm, plan::Op::kGemmRs, plan::Op::kGemmAr,
                             plan::Op::kRing,   plan::Op::kMoe,    plan::Op::kCombine};

plan::Machine h200() { return *plan::shipped_machine("H200"); }

/// A problem whose shards are equal on all ranks, drawn by the seed.
plan::Problem drawn(plan::Op op, std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint32_t least, std::uint32_t most) {
    return static_cast<std::uint32_t>(least + random() % (most - least + 1));
  };
  plan::Problem problem;
  problem.op = op;
  problem.nodes = nodes;
  problem.locals = locals;
  problem.named.form = kernels::Mode::kFused;
  const std::uint32_t rows = 64 * pick(1, 8) * problem.ranks();
  problem.shape = {rows, 256 * pick(2, 12), 512 * pick(1, 6)};
  if (op == plan::Op::kRing) problem.shape = {rows, pick(1, 2) * 8, 128};
  // The other form's pieces differ from node to node; it has tests of its own below.
  if (plan::has_exchanges(problem)) problem.named.tiling.exchange = kernels::Exchange::kOneShot;
  problem.experts = {problem.ranks() * pick(1, 3), std::min(problem.ranks(), pick(1, 6))};
  return problem;
}

plan::Candidate chosen(const plan::Problem& problem, const plan::Machine& machine) {
  const auto choice = plan::choose(problem, machine);
  if (!choice) throw std::runtime_error(choice.error().message);
  return choice->candidate;
}

class EveryOperator : public ::testing::TestWithParam<plan::Op> {};

// Where all shards are alike, what happens on one node is what happens on each (virtual_cluster.h).
TEST_P(EveryOperator, TheMirrorOfOneNodeTakesAsLongAsAllNodes) {
  std::uint64_t seed = 1;
  for (std::uint32_t nodes : {2u, 3u, 5u, 8u}) {
    for (std::uint32_t locals : {1u, 2u, 4u}) {
      const plan::Problem problem = drawn(GetParam(), nodes, locals, ++seed);
      const plan::Machine machine = h200();
      const plan::Candidate candidate = chosen(problem, machine);
      const auto all = simulate(problem, machine, candidate, Nodes::kAll);
      const auto one = simulate(problem, machine, candidate, Nodes::kOne);
      ASSERT_TRUE(all) << all.error().message;
      ASSERT_TRUE(one) << one.error().message;
      EXPECT_NEAR(one->us, all->us, 1e-3 * all->us)
          << fmt::format("{} x {}, seed {}", nodes, locals, seed);
      EXPECT_EQ(one->network_bytes, all->network_bytes);
      EXPECT_EQ(one->commands, all->commands);
    }
  }
}

// Shards that differ by a row, and a mask that gives each rank other keys: not exact, but close.
TEST_P(EveryOperator, UnequalShardsAreCloseToTheirMirror) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    plan::Problem problem =
        drawn(GetParam(), static_cast<std::uint32_t>(2 + seed % 3), 2, seed + 100);
    // Each rank of experts has as many tokens.
    if (plan::is_product(problem.op) || problem.op == plan::Op::kRing) problem.shape.m -= 1;
    problem.heads.causal = problem.op == plan::Op::kRing;
    const plan::Machine machine = h200();
    const plan::Candidate candidate = chosen(problem, machine);
    const auto all = simulate(problem, machine, candidate, Nodes::kAll);
    const auto one = simulate(problem, machine, candidate, Nodes::kOne);
    ASSERT_TRUE(all) << all.error().message;
    ASSERT_TRUE(one) << one.error().message;
    EXPECT_NEAR(one->us, all->us, 0.03 * all->us) << "seed " << seed;
  }
}

// The operator's own account says how many bytes cross the network.
TEST_P(EveryOperator, SendsTheBytesOfItsAccount) {
  for (std::uint32_t nodes : {2u, 4u}) {
    const plan::Problem problem = drawn(GetParam(), nodes, 2, nodes);
    const plan::Machine machine = h200();
    const plan::Candidate candidate = chosen(problem, machine);
    const auto work = plan::work_by_plan(problem, machine.kind, candidate);
    ASSERT_TRUE(work) << work.error().message;
    const auto one = simulate(problem, machine, candidate, Nodes::kOne);
    ASSERT_TRUE(one) << one.error().message;
    // That of GEMM+Combine is an expectation over the routing.
    const double within = GetParam() == plan::Op::kCombine ? 0.1 : 0;
    EXPECT_NEAR(static_cast<double>(one->network_bytes), work->network_bytes,
                within * work->network_bytes + 0.5);
  }
}

// A rail at a tenth of its rate is what decides, and the launch takes its bytes' time.
TEST_P(EveryOperator, ASlowRailDecides) {
  const plan::Problem problem = drawn(GetParam(), 4, 2, 7);
  plan::Machine machine = h200();
  const plan::Candidate candidate = chosen(problem, machine);
  machine.network_gb_s = 0.5;
  const auto slow = simulate(problem, machine, candidate, Nodes::kOne);
  ASSERT_TRUE(slow) << slow.error().message;
  const double rail_us = static_cast<double>(slow->network_bytes) / (0.5 * 1e3);
  EXPECT_GE(slow->us, rail_us);
  EXPECT_LE(slow->us, 1.6 * rail_us + 500);
}

INSTANTIATE_TEST_SUITE_P(Operators, EveryOperator, ::testing::ValuesIn(kOps),
                         [](const auto& one) { return std::string(plan::name_of(one.param)); });

// --- Ring Attention ---

// The first items have all that they need when all shards' first head is there, not when the last
// shard is: what is computed hides the network.
TEST(RingSimulation, AnItemWaitsForItsHeadOnly) {
  for (const std::uint32_t nodes : {3u, 4u}) {
    plan::Problem problem;
    problem.op = plan::Op::kRing;
    problem.nodes = nodes;
    problem.named.form = kernels::Mode::kFused;
    problem.shape = {24576, 32, 128};
    problem.heads.key_heads = 8;
    const plan::Machine machine = h200();
    const plan::Candidate candidate = chosen(problem, machine);
    const double compute = plan::predict(problem, machine, candidate).compute;
    const auto one = simulate(problem, machine, candidate, Nodes::kOne);
    ASSERT_TRUE(one) << one.error().message;
    EXPECT_LT(one->us, 1.02 * compute) << nodes << " nodes";
  }
}

// The planner takes the quickest of all turns that shards may have on the ring (ChunkOrder).
TEST(RingSimulation, ThePlannersTurnIsTheQuickest) {
  struct Case {
    std::uint32_t nodes, locals, rows, heads, key_heads;
    bool causal;
    double network_gb_s, latency_us;
    std::uint32_t chunk_bytes = 0;
  };
  constexpr Case kCases[] = {
      {4, 1, 24576, 32, 8, false, 50, 5},          {4, 1, 12288, 64, 64, false, 50, 60},
      {3, 1, 24576, 32, 8, true, 50, 60},          {8, 2, 24576, 32, 8, false, 50, 20},
      {4, 2, 24576, 64, 8, true, 25, 20},          {8, 1, 24576, 32, 8, false, 12.5, 5},
      {4, 1, 24576, 32, 8, false, 50, 5, 32 << 10}};
  for (const Case& one : kCases) {
    plan::Problem problem;
    problem.op = plan::Op::kRing;
    problem.nodes = one.nodes;
    problem.locals = one.locals;
    problem.named.form = kernels::Mode::kFused;
    problem.shape = {one.rows, one.heads, 128};
    problem.heads.key_heads = one.key_heads;
    problem.heads.causal = one.causal;
    problem.named.tiling.chunk_bytes = one.chunk_bytes;
    plan::Machine machine = h200();
    machine.network_gb_s = one.network_gb_s;
    machine.network_latency_us = one.latency_us;
    plan::Candidate candidate = chosen(problem, machine);
    const auto planned = simulate(problem, machine, candidate, Nodes::kOne);
    ASSERT_TRUE(planned) << planned.error().message;
    for (const std::uint32_t turn :
         {1u, 2u, 3u, 4u, 8u, 32u, kernels::RingAttentionTiling::kWholeShards}) {
      candidate.turn_chunks = turn;
      const auto other = simulate(problem, machine, candidate, Nodes::kOne);
      ASSERT_TRUE(other) << other.error().message;
      EXPECT_LT(planned->us, 1.02 * other->us) << fmt::format(
          "{} x {}, {} rows: turns of {} chunks", one.nodes, one.locals, one.rows, turn);
    }
  }
}

// In turns of one small chunk the thread that sends commits each by itself, which takes longer than
// the chunk does on the rail. The planner knows it.
TEST(RingSimulation, ShortTurnsOfSmallChunksTakeTheirCommits) {
  plan::Problem problem;
  problem.op = plan::Op::kRing;
  problem.nodes = 4;
  problem.named.form = kernels::Mode::kFused;
  problem.shape = {4096, 8, 128};
  problem.heads.key_heads = 8;
  problem.named.tiling.chunk_bytes = 32 << 10;
  const plan::Machine machine = h200();
  plan::Candidate candidate = chosen(problem, machine);
  // 1024 rows of 8 heads, in keys and values, and a header; all but the last, longer runs.
  constexpr double kCommits = 3 * (1024.0 * 8 * 2 * 256 / (32 << 10) + 1 - 4);
  for (const std::uint32_t turn : {1u, 2u, 4u, 8u, kernels::RingAttentionTiling::kWholeShards}) {
    candidate.turn_chunks = turn;
    const auto one = simulate(problem, machine, candidate, Nodes::kOne);
    ASSERT_TRUE(one) << one.error().message;
    EXPECT_NEAR(plan::predict_on_cluster(problem, machine, candidate).total, one->us,
                0.01 * one->us)
        << "turns of " << turn;
    if (turn == 1) {
      EXPECT_GT(one->us, kCommits * kernels::kCommitUs);
    }
  }
}

// --- A two-shot exchange ---

plan::Problem two_shot(std::uint32_t nodes, std::uint32_t locals, std::uint32_t rows) {
  plan::Problem problem;
  problem.op = plan::Op::kGemmAr;
  problem.nodes = nodes;
  problem.locals = locals;
  problem.named.form = kernels::Mode::kFused;
  problem.named.tiling = {128, 256, 256 << 10, 0};
  problem.named.tiling.exchange = kernels::Exchange::kTwoShot;
  problem.shape = {rows, 2048, 1024};
  return problem;
}

// Where each node adds up as many tiles, what happens on one node is what happens on each.
TEST(TwoShotSimulation, TheMirrorOfOneNodeTakesAsLongAsAllNodes) {
  for (const std::uint32_t nodes : {3u, 4u, 5u, 8u}) {
    for (const std::uint32_t locals : {1u, 2u}) {
      const plan::Problem problem = two_shot(nodes, locals, 128 * nodes * 3);
      const plan::Machine machine = h200();
      const plan::Candidate candidate = chosen(problem, machine);
      const auto all = simulate(problem, machine, candidate, Nodes::kAll);
      const auto one = simulate(problem, machine, candidate, Nodes::kOne);
      ASSERT_TRUE(all) << all.error().message;
      ASSERT_TRUE(one) << one.error().message;
      EXPECT_NEAR(one->us, all->us, 1e-3 * all->us) << nodes << " x " << locals;
      EXPECT_EQ(one->network_bytes, all->network_bytes);
      EXPECT_EQ(one->commands, all->commands);
    }
  }
}

// Any number of rows ends, also with less than a tile for each node, and sends what the account of
// its first rank says.
TEST(TwoShotSimulation, UnevenPiecesEndAndSendTheBytesOfTheirAccount) {
  for (const std::uint32_t rows : {1u, 128u, 1000u, 3333u}) {
    for (const std::uint32_t nodes : {3u, 6u, 9u}) {
      const plan::Problem problem = two_shot(nodes, 2, rows);
      const plan::Machine machine = h200();
      const plan::Candidate candidate = chosen(problem, machine);
      const auto all = simulate(problem, machine, candidate, Nodes::kAll);
      ASSERT_TRUE(all) << all.error().message;
      const auto work = plan::work_by_plan(problem, machine.kind, candidate);
      ASSERT_TRUE(work) << work.error().message;
      EXPECT_EQ(static_cast<double>(all->network_bytes), work->network_bytes);
      EXPECT_EQ(all->commands, work->commands);
    }
  }
}

// Over a slow rail its bytes decide: 2 (N - 1) / N of a share against N - 1 shares.
TEST(TwoShotSimulation, TakesItsBytesTimeOverASlowRail) {
  plan::Machine machine = h200();
  machine.network_gb_s = 1;
  plan::Problem problem = two_shot(8, 2, 4096);
  const auto two = simulate(problem, machine, chosen(problem, machine), Nodes::kAll);
  problem.named.tiling.exchange = kernels::Exchange::kOneShot;
  const auto one = simulate(problem, machine, chosen(problem, machine), Nodes::kAll);
  ASSERT_TRUE(two && one);
  EXPECT_NEAR(static_cast<double>(one->network_bytes),
              4.0 * static_cast<double>(two->network_bytes),
              0.01 * static_cast<double>(one->network_bytes));
  EXPECT_LT(two->us, 0.35 * one->us);
}

// The largest world: more nodes than a session can have today.
TEST(SimulateTest, AThousandNodesOfEight) {
  plan::Problem problem;
  problem.op = plan::Op::kAgGemm;
  problem.nodes = 1024;
  problem.locals = 8;
  problem.shape = {8192, 1024, 1024};
  problem.named.form = kernels::Mode::kFused;
  const plan::Machine machine = h200();
  const auto one = simulate(problem, machine, chosen(problem, machine), Nodes::kOne);
  ASSERT_TRUE(one) << one.error().message;
  // Each shard comes to this node over up to 1023 links, one after the other.
  EXPECT_GT(one->us, 1023 * machine.network_latency_us);
  EXPECT_LT(one->us, 1.2 * 1023 * machine.network_latency_us);
}

// --- Failures are named ---

/// One rank, whose compute role waits for a flag that nobody sets.
class NobodySends : public OperatorRun {
 public:
  const char* name() const override { return "nobody_sends"; }
  std::uint64_t workspace_bytes() const override { return 1 << 16; }
  std::uint32_t flag_count() const override { return 64; }
  NodeNumbers numbers() const override { return {}; }
  kernels::Launch& launch(std::uint32_t) override { return launch_; }
  std::vector<kernels::RoleThread> threads(const kernels::World&) const override {
    std::vector<kernels::RoleThread> threads;
    kernels::add_role(threads, kernels::Role::kCompute, 2);
    return threads;
  }
  void begin(std::uint32_t) override {}
  bool run_role(std::uint32_t, kernels::Role role, std::uint32_t index,
                kernels::BlockTotals& totals, VirtualThreads& threads, RankState& state,
                const Costs& costs) override {
    VirtualExecutor executor(threads, state, costs, role);
    kernels::OperatorBlock<VirtualExecutor> block(executor, launch_, role, index, totals);
    return block.await_arrival_flag(0, 3, 3);
  }

 private:
  kernels::Launch launch_;
};

TEST(OperatorRunTest, AWaitThatNobodyEndsIsNamed) {
  NobodySends op;
  RunSetup setup;
  setup.blocks.compute = 2;
  const auto outcome = run_launch(op, setup, Costs{});
  ASSERT_FALSE(outcome);
  EXPECT_THAT(outcome.error().message, HasSubstr("nobody_sends"));
}

TEST(SimulateTest, ExpertsThatDoNotFitTheRanksHaveNoMirror) {
  plan::Problem problem = drawn(plan::Op::kMoe, 2, 2, 1);
  problem.experts.count = 9;
  const plan::Machine machine = h200();
  const auto one = simulate(problem, machine, chosen(problem, machine), Nodes::kOne);
  ASSERT_FALSE(one);
  EXPECT_THAT(one.error().message, HasSubstr("multiple"));
}

// --- The clock ---

TEST(VirtualThreadsTest, SleepersGoOnInTheOrderOfTheirTimes) {
  VirtualThreads threads(1);
  std::string order;
  threads.add(0, [&] {
    threads.sleep_until(2);
    order += "a";
    threads.sleep_until(5);
    order += "d";
  });
  threads.add(0, [&] {
    threads.sleep_until(3);
    order += "b";
    threads.sleep_until(4);
    order += "c";
  });
  EXPECT_TRUE(threads.run());
  EXPECT_EQ(order, "abcd");
  EXPECT_EQ(threads.now_us(), 5);
}

TEST(VirtualThreadsTest, WhoWaitsIsWokenOnce) {
  VirtualThreads threads(2);
  double seen = 0;
  bool flag = false;
  threads.add(0, [&] {
    while (!flag) threads.wait();
    seen = threads.now_us();
  });
  threads.add(1, [&] {
    threads.sleep_until(7);
    flag = true;
    threads.wake(0);
  });
  EXPECT_TRUE(threads.run());
  EXPECT_EQ(seen, 7);
}

TEST(VirtualThreadsTest, ThoseWhomNobodyWakesAreStuck) {
  VirtualThreads threads(1);
  bool far_ahead = false;
  threads.add(0, [&] {
    threads.wait();
    far_ahead = threads.now_us() > 1e9;
  });
  EXPECT_FALSE(threads.run());
  EXPECT_TRUE(far_ahead);
}

TEST(ServerTest, ServesOneAfterTheOther) {
  Server server;
  EXPECT_EQ(server.serve(1, 2), 3);
  EXPECT_EQ(server.serve(1, 2), 5);
  EXPECT_EQ(server.serve(9, 1), 10);
}

}  // namespace
}  // namespace mk::sim
