// Operators that are predicted by their plan's account: times near the recorded ones, choices that
// the operator takes, steady with the shape, and sensible on another machine.
#include "kernels/plan/accounted.h"

#include <gtest/gtest.h>

#include <random>

#include "kernels/plan/choose.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/operator_work.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

constexpr Op kAccounted[] = {Op::kRing, Op::kMoe, Op::kCombine};
constexpr Op kAll[] = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr, Op::kRing, Op::kMoe, Op::kCombine};

/// Of any operator, with sides that it takes.
class Problems {
 public:
  explicit Problems(std::uint32_t seed) : random_(seed) {}
  Problem next(Op op) {
    Problem problem = problem_of(op, pick(1, 3), pick(1, 4), {});
    switch (op) {
      case Op::kRing: {
        const std::uint32_t group = pick(1, 4);
        problem.heads = {pick(1, 8), pick(1, 3), pick(0, 1) == 1};
        problem.shape = {pick(64, 20000), group * problem.heads.key_heads, 64 * pick(1, 2)};
        break;
      }
      case Op::kMoe:
      case Op::kCombine:
        problem.experts.count = pick(1, 256);
        problem.experts.top_k = pick(1, std::min(8u, problem.experts.count));
        problem.shape = {pick(1, 20000), 8 * pick(8, 512), 8 * pick(8, 512)};
        break;
      default:
        problem.shape = {pick(1, 20000), 8 * pick(8, 512), 8 * pick(8, 512)};
    }
    return problem;
  }
  std::uint32_t pick(std::uint32_t least, std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(least, most)(random_);
  }

 private:
  std::mt19937 random_;
};

std::string text_of(const Problem& problem) {
  return fmt::format("{} {} x {} x {} on {} x {}", name_of(problem.op), problem.shape.m,
                     problem.shape.n, problem.shape.k, problem.nodes, problem.locals);
}

// What is chosen the operator's own plan takes, on either kind of machine.
TEST(PlanAccounted, EveryChoiceIsAcceptedByTheOperator) {
  Problems problems(4);
  for (const char* name : {"H100", "CPU"}) {
    const Machine machine = shipped_machine(name).value();
    for (int round = 0; round < 5000; ++round) {
      const Op op = name[0] == 'H' ? kAccounted[round % 3] : kAll[round % 6];
      const Problem problem = problems.next(op);
      const auto choice = choose(problem, machine, &shipped_tuned());
      ASSERT_TRUE(choice) << text_of(problem) << ": " << choice.error().message;
      EXPECT_TRUE(check_plan(problem, machine.kind, choice->candidate.tiling)) << text_of(problem);
      EXPECT_TRUE(check_candidate(problem, machine, choice->candidate)) << text_of(problem);
      EXPECT_GT(choice->time.total, 0);
      const auto again = choose(problem, machine, &shipped_tuned());
      EXPECT_EQ(again->candidate, choice->candidate);
    }
  }
}

// Where a shape is one larger and the choice another, the old one costs nearly as little.
TEST(PlanAccounted, ChoicesVarySteadilyWithTheShape) {
  Problems problems(5);
  for (const char* name : {"H100", "CPU"}) {
    const Machine machine = shipped_machine(name).value();
    const bool on_cpu = machine.kind == MachineKind::kCpu;
    for (int round = 0; round < 90; ++round) {
      const Op op = on_cpu ? kAll[round % 6] : kAccounted[round % 3];
      Problem problem = problems.next(op);
      auto old = choose(problem, machine);
      ASSERT_TRUE(old) << old.error().message;
      for (int step = 0; step < 25; ++step) {
        // Heads come by groups, and widths by eights.
        const std::uint32_t side = round / (on_cpu ? 6 : 3) % (op == Op::kRing ? 2 : 3);
        if (side == 0) ++problem.shape.m;
        if (side == 1) problem.shape.n += op == Op::kRing ? problem.heads.key_heads : 8;
        if (side == 2) problem.shape.k += 8;
        auto chosen = choose(problem, machine);
        ASSERT_TRUE(chosen) << chosen.error().message;
        if (check_candidate(problem, machine, old->candidate)) {
          EXPECT_LE(predict(problem, machine, old->candidate).total, 1.03 * chosen->time.total)
              << text_of(problem) << ": " << describe(problem, old->candidate) << " -> "
              << describe(problem, chosen->candidate);
        }
        old = std::move(chosen);
      }
    }
  }
}

// One rank alone computes, as tests/bench/results/attention_h100.json and grouped_gemm_h100.json
// have it: large ones at the rate of the core, few rows at that of the experts' weights.
TEST(PlanAccounted, ComputationTakesWhatWasRecorded) {
  const Machine machine = shipped_machine("H100").value();
  const auto compute = [&](const Problem& problem) {
    Candidate candidate;
    candidate.compute_blocks = 128;
    return predict(problem, machine, candidate).compute;
  };
  Problem ring = problem_of(Op::kRing, 1, 1, {8192, 32, 128});
  EXPECT_NEAR(compute(ring), 1681, 0.1 * 1681);
  ring.shape.m = 32768;
  EXPECT_NEAR(compute(ring), 27320, 0.1 * 27320);
  ring.heads.causal = true;
  EXPECT_NEAR(compute(ring), 13067, 0.1 * 13067);
  Problem moe = problem_of(Op::kMoe, 1, 1, {1024, 2048, 7168});
  moe.experts = {64, 8};
  EXPECT_NEAR(compute(moe), 679, 0.1 * 679);
  moe.shape.m = 8192;
  EXPECT_NEAR(compute(moe), 2573, 0.1 * 2573);
}

// A slower network, attention or memory is felt by what waits for it, and by nothing else.
TEST(PlanAccounted, SlowerPartsAreFeltByWhatUsesThem) {
  const Machine machine = shipped_machine("H100").value();
  Machine slow = machine;
  slow.network_gb_s /= 20;
  slow.attention_share /= 2;
  const Problem ring = problem_of(Op::kRing, 2, 2, {32768, 16, 128});
  const auto fast = choose(ring, machine);
  const auto slowed = choose(ring, slow);
  ASSERT_TRUE(fast && slowed);
  EXPECT_GT(slowed->time.network, 15 * fast->time.network);
  EXPECT_NEAR(slowed->time.compute, 2 * fast->time.compute, 0.01 * slowed->time.compute);
  EXPECT_LE(slowed->time.total, predict(ring, slow, fast->candidate).total * (1 + 1e-9));
  Problem moe = problem_of(Op::kMoe, 1, 4, {8192, 2048, 7168});
  moe.experts = {64, 8};
  slow = machine;
  slow.attention_share /= 2;
  EXPECT_EQ(choose(moe, slow)->time.total, choose(moe, machine)->time.total);
}

// Copy engines bring keys where that is predicted to be quicker, and nowhere else. Either way can
// be named. Where engines cannot bring them, the reason is told.
TEST(PlanAccounted, EnginesBringKeysWhereThatIsQuicker) {
  const Machine machine = shipped_machine("H200").value();
  Problem ring = problem_of(Op::kRing, 1, 2, {12288, 16, 128});
  ring.heads = {16, 16, true};
  const auto chosen = choose(ring, machine);
  ASSERT_TRUE(chosen) << chosen.error().message;
  EXPECT_TRUE(chosen->candidate.engines);
  EXPECT_GT(chosen->candidate.heads_together, 1u);
  Machine slow = machine;
  slow.engine_each_us *= 100;
  EXPECT_FALSE(choose(ring, slow)->candidate.engines);
  slow = machine;
  slow.engine_gb_s /= 20;
  EXPECT_FALSE(choose(ring, slow)->candidate.engines);
  for (const bool engines : {false, true}) {
    ring.named.engines = engines;
    const auto named = choose(ring, engines ? slow : machine);
    ASSERT_TRUE(named) << named.error().message;
    EXPECT_EQ(named->candidate.engines, engines);
    EXPECT_GE(predict(ring, machine, named->candidate).total, chosen->time.total);
  }
  ring.named.engines.reset();
  EXPECT_NE(explain(ring, machine)->find("other transport"), std::string::npos);

  Problem packed = ring;
  packed.heads = {16, 1, true, true};
  Problem windows = problem_of(Op::kRing, 1, 4, {192 * 1024, 16, 128});
  windows.heads = {16, 16, false};
  const Problem nodes = problem_of(Op::kRing, 2, 2, {12288, 16, 128});
  for (const auto& [problem, why] : {std::pair<Problem, const char*>{packed, "packed sequences"},
                                     {windows, "the workspace"},
                                     {nodes, "for the network"}}) {
    const auto text = explain(problem, machine);
    ASSERT_TRUE(text) << text.error().message;
    EXPECT_NE(text->find("no copy engines: "), std::string::npos) << *text;
    EXPECT_NE(text->find(why), std::string::npos) << *text;
    Problem named = problem;
    named.named.engines = true;
    const auto none = choose(named, machine);
    ASSERT_FALSE(none);
    EXPECT_NE(none.error().message.find(why), std::string::npos) << none.error().message;
  }
}

// The same of tokens, on one node; over nodes only where they are named.
TEST(PlanAccounted, EnginesBringTokensWhereThatIsQuicker) {
  const Machine machine = shipped_machine("H200").value();
  Problem moe = problem_of(Op::kMoe, 1, 2, {32 * 1024, 2 * 2048, 7168});
  moe.experts = {256, 8};
  const auto chosen = choose(moe, machine);
  ASSERT_TRUE(chosen) << chosen.error().message;
  EXPECT_TRUE(chosen->candidate.engines);
  EXPECT_EQ(chosen->candidate.heads_together, 0u);
  EXPECT_NE(describe(moe, chosen->candidate).find("copy engines share"), std::string::npos);
  Machine slow = machine;
  slow.engine_each_us *= 1000;
  EXPECT_FALSE(choose(moe, slow)->candidate.engines);
  slow = machine;
  slow.engine_gb_s /= 20;
  EXPECT_FALSE(choose(moe, slow)->candidate.engines);
  // Few tokens are with the others before engines have begun.
  Problem few = moe;
  few.shape.m = 2 * 128;
  EXPECT_FALSE(choose(few, machine)->candidate.engines);
  for (const std::uint32_t nodes : {1u, 2u}) {
    moe.nodes = nodes;
    for (const bool engines : {false, true}) {
      moe.named.engines = engines;
      const auto named = choose(moe, engines ? slow : machine);
      ASSERT_TRUE(named) << named.error().message;
      EXPECT_EQ(named->candidate.engines, engines);
      EXPECT_TRUE(check_candidate(moe, machine, named->candidate));
    }
    moe.named.engines.reset();
  }
  EXPECT_FALSE(choose(moe, machine)->candidate.engines);
  EXPECT_NE(explain(moe, machine)->find("no copy engines: over nodes"), std::string::npos);
  moe.nodes = 1;
  EXPECT_NE(explain(moe, machine)->find("other transport"), std::string::npos);
  moe.ranks_per_device = 2;
  EXPECT_FALSE(choose(moe, machine)->candidate.engines);
  EXPECT_NE(explain(moe, machine)->find("no copy engines: ranks share a GPU"), std::string::npos);
  moe.ranks_per_device = 1;
  moe.locals = 1;
  moe.nodes = 2;
  EXPECT_NE(explain(moe, machine)->find("alone on its node"), std::string::npos);
  moe.named.engines = true;
  EXPECT_FALSE(choose(moe, machine));
  Problem combine = problem_of(Op::kCombine, 1, 2, {32 * 1024, 7168, 2048});
  combine.experts = {256, 8};
  combine.named.engines = true;
  EXPECT_FALSE(choose(combine, machine)->candidate.engines);
}

// Attention has as many SMs as a role can have blocks: the groups have the four others, with one
// that watches for each node, one that sends, and the poller's place.
TEST(PlanAccounted, GroupsOfRingAttentionTakeNoSmThatCouldCompute) {
  constexpr std::uint32_t kGroups = 4 * 3;
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {1u, 8u}, {2u, 1u}, {2u, 4u}, {4u, 1u}}) {
    const AccountedGroups groups = accounted_groups(Op::kRing, nodes, locals);
    const std::uint32_t besides = nodes + (nodes > 1 ? 2 : 1);
    EXPECT_LE(groups.stream + groups.receive + besides, kGroups) << nodes << " x " << locals;
    EXPECT_GE(groups.stream, 2u) << nodes << " x " << locals;
    EXPECT_EQ(groups.receive != 0, nodes > 1 && locals > 1) << nodes << " x " << locals;
  }
}

// Four H200s: 18 warpgroups beat 11 by half at 6144 rows of 16 x 16 heads, and lose by 2 to 9%
// where keys are there in time. A GPU that several ranks share, or another number of them, stays at
// four.
TEST(PlanAccounted, RingAttentionTakesSmsFromAttentionWhereKeysWouldBeLate) {
  const Machine machine = shipped_machine("H200").value();
  const auto stream_of = [&](std::uint32_t seq, std::uint32_t heads, std::uint32_t key_heads,
                             std::uint32_t batch, bool causal, std::uint32_t ranks_per_device) {
    Problem problem = problem_of(Op::kRing, 1, 4, {seq, heads, 128});
    problem.heads.key_heads = key_heads;
    problem.heads.batch = batch;
    problem.heads.causal = causal;
    problem.ranks_per_device = ranks_per_device;
    const auto work = work_by_plan(problem, machine.kind, {});
    EXPECT_TRUE(work);
    return chosen_groups(problem, machine, *work).stream;
  };
  const std::uint32_t least = accounted_groups(Op::kRing, 1, 4).stream;
  EXPECT_GT(stream_of(6144, 16, 16, 16, false, 1), 18u);
  EXPECT_GT(stream_of(12288, 16, 16, 16, true, 1), 18u);
  EXPECT_EQ(stream_of(24576, 64, 8, 1, false, 1), least);
  EXPECT_EQ(stream_of(49152, 16, 16, 16, false, 1), least);
  EXPECT_EQ(stream_of(6144, 16, 16, 16, false, 4), least);
  // Rarer keys and longer rows never take more.
  std::uint32_t before = ~0u;
  for (std::uint32_t seq = 2048; seq <= 65536; seq += 2048) {
    const std::uint32_t now = stream_of(seq, 16, 16, 16, false, 1);
    EXPECT_LE(now, before) << seq;
    before = now;
  }
}

/// Mixtral-like experts of 16 on four H200s.
Problem some_experts(Op op) {
  Problem problem = problem_of(op, 1, 4, {4 * 4096, 7168, 2048});
  if (op == Op::kMoe) problem.shape = {4 * 4096, 2 * 2048, 7168};
  problem.experts = {16, 8};
  return problem;
}
Candidate with_stream(const Problem& problem, const Machine& machine, std::uint32_t stream) {
  Candidate candidate = accounted_candidate(problem, {stream, 0});
  EXPECT_TRUE(place_warpgroups(problem, machine, candidate));
  return candidate;
}

// The routing plan and packing are worth more SMs than 36 warpgroups have, the index is not. No run
// on four GPUs has judged it.
TEST(PlanAccounted, ExpertsTakeSmsFromTheProductForTheirPlanAndTheirSums) {
  const Machine machine = shipped_machine("H200").value();
  struct Chosen {
    Op op;
    std::uint32_t stream, compute;
  };
  for (const Chosen& one : {Chosen{Op::kCombine, 20, 125}, Chosen{Op::kMoe, 50, 115}}) {
    const Problem problem = some_experts(one.op);
    const auto choice = choose(problem, machine);
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->candidate.stream_warpgroups, one.stream);
    EXPECT_EQ(choice->candidate.compute_blocks, one.compute);
    EXPECT_TRUE(check_candidate(problem, machine, choice->candidate));
    EXPECT_LT(choice->time.total,
              predict(problem, machine, with_stream(problem, machine, 36)).total);
  }
  // Few tokens: nothing to plan for, so the product has more.
  Problem few = some_experts(Op::kMoe);
  few.experts = {8, 1};
  few.shape = {4 * 1024, 28672, 7168};
  EXPECT_LT(choose(few, machine)->candidate.stream_warpgroups, 50u);
  // Ranks that share a GPU have their part of the usual number.
  Problem shared = some_experts(Op::kMoe);
  shared.ranks_per_device = 4;
  EXPECT_EQ(chosen_groups(shared, machine, *work_by_plan(shared, machine.kind, {})).stream, 36u);
}

// On a machine whose file says otherwise choices change sensibly: each is the best there, by its
// own terms; what is slower is given more to do it, and what everything waits for takes longer.
TEST(PlanAccounted, AnotherMachineFileChangesTheChoicesSensibly) {
  const Machine machine = shipped_machine("H200").value();
  Machine half_link = machine;
  for (double Machine::*rate : {&Machine::link_gb_s, &Machine::rows_link_gb_s,
                                &Machine::sums_link_gb_s, &Machine::engine_gb_s}) {
    half_link.*rate /= 2;
  }
  Machine slow_groups = machine;
  slow_groups.copy_gb_s /= 2;
  slow_groups.pass_on_gb_s /= 2;
  Machine slow_products = machine;
  slow_products.step_us_256 *= 4;
  Problems problems(6);
  int changed = 0;
  for (int round = 0; round < 300; ++round) {
    Problem problem = problems.next(kAccounted[round % 3]);
    problem.named.form = Mode::kFused;
    SCOPED_TRACE(text_of(problem));
    const auto on = [&](const Machine& by) { return *choose(problem, by); };
    const Choice own = on(machine);
    for (const Machine* other : {&half_link, &slow_groups, &slow_products}) {
      const Choice there = on(*other);
      EXPECT_GE(there.time.total, own.time.total * (1 - 1e-9));
      EXPECT_LE(there.time.total, predict(problem, *other, own.candidate).total * (1 + 1e-9));
      changed += there.candidate == own.candidate ? 0 : 1;
    }
  }
  EXPECT_GT(changed, 60);
  // Keys that would be late on half the link have as many SMs as fill it, and no more.
  Problem ring = problem_of(Op::kRing, 1, 4, {6144, 16, 128});
  ring.heads.batch = 16;
  EXPECT_LT(choose(ring, half_link)->candidate.stream_warpgroups,
            choose(ring, machine)->candidate.stream_warpgroups);
  EXPECT_GT(choose(ring, slow_groups)->candidate.stream_warpgroups,
            choose(ring, machine)->candidate.stream_warpgroups);
  // Slower products want more SMs.
  for (const Op op : {Op::kMoe, Op::kCombine}) {
    const Problem experts = some_experts(op);
    EXPECT_LT(choose(experts, slow_products)->candidate.stream_warpgroups,
              choose(experts, machine)->candidate.stream_warpgroups);
  }
  const Problem moe = some_experts(Op::kMoe);
  EXPECT_GE(choose(moe, slow_groups)->candidate.stream_warpgroups,
            choose(moe, machine)->candidate.stream_warpgroups);
  const Problem combine = some_experts(Op::kCombine);
  EXPECT_GT(choose(combine, half_link)->time.local, 1.9 * choose(combine, machine)->time.local);
}

// Chunks as small as they are cost their commands: where a command is dear, there are fewer.
TEST(PlanAccounted, DearCommandsMakeLargerChunksOnCpus) {
  Machine machine = shipped_machine("CPU").value();
  for (Op op : kAll) {
    if (op == Op::kRing) continue;  // its steps are passes, whatever chunks it has
    Problem problem = problem_of(op, 2, 2, {8192, 2048, 1024});
    problem.experts = {16, 4};
    problem.named.form = Mode::kFused;
    const auto commands = [&](double command_us, double step_us) {
      machine.cpu_command_us = command_us;
      machine.cpu_step_us = machine.cpu_step_in_turns_us = step_us;
      const auto choice = choose(problem, machine);
      EXPECT_TRUE(choice) << choice.error().message;
      return work_by_plan(problem, machine.kind, choice->candidate)->commands;
    };
    EXPECT_LT(commands(1e5, 1e5), commands(0.001, 0.001)) << name_of(op);
  }
}

TEST(PlanAccounted, BatchInvarianceChangesNothingAndSumsOfProductsAreRefused) {
  const Machine machine = shipped_machine("H100").value();
  Problem problem = problem_of(Op::kRing, 1, 2, {4096, 16, 128});
  auto choice = choose(problem, machine);
  ASSERT_TRUE(choice);
  problem.batch_invariant = true;
  const auto invariant = choose(problem, machine);
  ASSERT_TRUE(invariant) << invariant.error().message;
  EXPECT_EQ(invariant->candidate, choice->candidate);
  choice->candidate.sums = Sums::kOwn;
  EXPECT_EQ(check_candidate(problem, machine, choice->candidate).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(choose(problem_of(Op::kRing, 1, 2, {4096, 16, 96}), machine).error().code,
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mk::kernels::plan
