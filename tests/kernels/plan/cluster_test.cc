// A plan for a cluster says what is in the way: the limits that a job, a session and a kernel
// really have, and what to do about them.
#include "kernels/plan/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/drawn_rows.h"
#include "shm/limits.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint32_t kLocals = 8;

Result<ClusterPlan> plan_of(Op op, const char* machine, std::uint32_t nodes) {
  Problem problem = problem_of(op, nodes, kLocals, {});
  problem.shape = {std::max(8192u, problem.ranks() * 16), 4096, 1024};
  if (op == Op::kRing) problem.shape = {problem.ranks() * 64, 8, 128};
  if (op == Op::kRing) problem.heads.key_heads = 8;
  problem.experts = {problem.ranks(), 8};
  problem.named.form = Mode::kFused;
  return plan_cluster(problem, shipped_machine(machine).value());
}

class ClusterLimits : public ::testing::TestWithParam<Op> {};
INSTANTIATE_TEST_SUITE_P(Operators, ClusterLimits,
                         ::testing::Values(Op::kAgGemm, Op::kGemmRs, Op::kGemmAr, Op::kRing,
                                           Op::kMoe, Op::kCombine),
                         [](const auto& one) { return std::string(name_of(one.param)); });

TEST_P(ClusterLimits, TheLargestJobRunsOnCpus) {
  for (const std::uint32_t nodes : {2u, 17u, 129u, shm::kNodesMax}) {
    const auto made = plan_of(GetParam(), "CPU", nodes);
    ASSERT_TRUE(made) << made.error().message;
    EXPECT_THAT(made->obstacles, IsEmpty()) << nodes;
    EXPECT_LE(made->arrival_flags, shm::kFlagsMax);
  }
}

TEST_P(ClusterLimits, OneNodeMoreHasNoPlan) {
  const auto refused = plan_of(GetParam(), "CPU", shm::kNodesMax + 1);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("1 to 1024 nodes"));
}

TEST_P(ClusterLimits, GpusHaveThoseOfTheirKernelsBesides) {
  const std::uint32_t most = GetParam() == Op::kRing  ? 128 / kLocals
                             : GetParam() == Op::kMoe ? 705
                                                      : shm::kNodesMax;
  for (const std::uint32_t nodes :
       {2u, 16u, 17u, 23u, 24u, 33u, 34u, 129u, 513u, 705u, 706u, shm::kNodesMax}) {
    const auto made = plan_of(GetParam(), "H200", nodes);
    // Ring Attention has no SMs left on very many nodes.
    if (!made && GetParam() == Op::kRing && nodes > 129) continue;
    ASSERT_TRUE(made) << nodes << ": " << made.error().message;
    const bool crowded = GetParam() == Op::kMoe && nodes > 23 && nodes < 34;
    if (nodes <= most && !crowded) {
      EXPECT_THAT(made->obstacles, IsEmpty()) << nodes;
      EXPECT_LE(made->arrival_flags, cuda::kPolledFlagsMax);
    } else if (GetParam() == Op::kRing) {
      EXPECT_THAT(made->obstacles,
                  ElementsAre(AllOf(HasSubstr("at most 128 ranks"), HasSubstr("fewer nodes"))));
    } else {
      EXPECT_THAT(made->obstacles, ElementsAre(AllOf(HasSubstr("5632"), HasSubstr("fewer nodes"))));
    }
  }
}

// More of what is short is no advice where it makes things worse.
TEST(ClusterAdvice, FewRowsOfARankAreSeen) {
  const Machine machine = shipped_machine("H200").value();
  Problem problem = problem_of(Op::kAgGemm, 1024, kLocals, {65536, 2048, 7168});
  const auto empty = plan_cluster(problem, machine);
  ASSERT_TRUE(empty) << empty.error().message;
  EXPECT_EQ(empty->limit, Limit::kCompute);
  EXPECT_THAT(empty->advice, AllOf(HasSubstr("mostly empty"), HasSubstr("fewer nodes")));
  problem.nodes = 1;
  const auto full = plan_cluster(problem, machine);
  ASSERT_TRUE(full) << full.error().message;
  EXPECT_THAT(full->advice, HasSubstr("faster GPU"));
}

TEST(ClusterAdvice, HopsThatWaitAreSeen) {
  Problem problem = problem_of(Op::kMoe, 1024, kLocals, {65536, 2048, 7168});
  problem.experts = {8192, 8};
  const auto made = plan_cluster(problem, shipped_machine("H200").value());
  ASSERT_TRUE(made) << made.error().message;
  EXPECT_EQ(made->limit, Limit::kLatency);
  EXPECT_THAT(made->advice, HasSubstr("hops"));
}

// Nodes are alike: what one node's experts have is what one node's tokens choose.
TEST(DrawnRows, AreAllSlotsOfANodesTokensByHopsAndPart) {
  Problem problem = problem_of(Op::kCombine, 4, 2, {});
  problem.shape = {8 * 700, 4096, 1024};
  problem.experts = {24, 5};
  const DrawnRows drawn(problem, 1);
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> slots;
  for (std::uint32_t local = 0; local < problem.locals; ++local) {
    ASSERT_EQ(drawn.of_rank(local).size(), 3u);
    for (const DrawnRows::OfExpert& rows : drawn.of_rank(local)) {
      const double even = 5.0 * 2 * 700 / 6;
      EXPECT_NEAR(static_cast<double>(rows.size()), even, 5 * std::sqrt(even));
      const auto place = [](const DrawnRow& row) {
        return std::tuple(row.hops, row.token / 256, row.source, row.token);
      };
      EXPECT_TRUE(std::ranges::is_sorted(rows, {}, place));
      // A token draws an expert once.
      EXPECT_EQ(std::ranges::adjacent_find(rows, {}, place), rows.end());
      for (const DrawnRow& row : rows) ++slots[{row.source, row.token}];
    }
  }
  EXPECT_EQ(slots.size(), 2u * 700);
  for (const auto& [token, count] : slots) EXPECT_EQ(count, 5u) << token.second;
  const auto rows_of = [&](std::uint64_t seed) {
    return DrawnRows(problem, seed).of_rank(0)[0].size();
  };
  EXPECT_EQ(rows_of(7), rows_of(7));
}

// A header costs one command, in turns of one chunk, too, whose first run is the header alone: a
// slow rail takes as long in any order.
TEST(ClusterOrder, TurnsCostNoSecondHeader) {
  Machine machine = shipped_machine("H200").value();
  machine.network_latency_us = 0;
  machine.network_gb_s = 1;
  machine.network_command_us = 1000;
  Problem problem = problem_of(Op::kRing, 5, 1, {5120, 8, 128});
  problem.heads.key_heads = 8;
  problem.named.form = Mode::kFused;
  const auto choice = choose(problem, machine);
  ASSERT_TRUE(choice) << choice.error().message;
  Candidate candidate = choice->candidate;
  const auto us = [&](std::uint32_t turn) {
    candidate.turn_chunks = turn;
    return predict_on_cluster(problem, machine, candidate).total;
  };
  const double whole = us(RingAttentionTiling::kWholeShards);
  for (const std::uint32_t turn : {1u, 2u, 3u})
    EXPECT_NEAR(us(turn), whole, machine.network_command_us / 2) << "turns of " << turn;
}

}  // namespace
}  // namespace mk::kernels::plan
