// What the planner chooses: legal, the same each time, steady with the shape, sensible on another
// machine; and that it can say why.
#include "kernels/plan/choose.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <sstream>

#include "kernels/plan/legal.h"
#include "kernels/plan/operator_plan.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

constexpr Op kOps[] = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr};
struct World2 {
  std::uint32_t nodes, locals;
};
constexpr World2 kWorlds[] = {{1, 2}, {1, 4}, {1, 8}, {2, 1}, {2, 2}, {2, 4}};

TEST(PlanChoice, EveryCandidateIsLegalAndPlaced) {
  const Machine machine = shipped_machine("H100").value();
  for (Op op : kOps) {
    for (const World2& world : kWorlds) {
      for (const Shape& shape : {Shape{2048, 2048, 1024}, Shape{101, 72, 64}}) {
        const Problem problem = problem_of(op, world.nodes, world.locals, shape);
        const auto candidates = legal_candidates(problem, machine);
        EXPECT_GE(candidates.size(), 40u)
            << name_of(op) << " " << world.nodes << "x" << world.locals;
        for (const Candidate& candidate : candidates) {
          ASSERT_TRUE(check_candidate(problem, machine, candidate));
          Candidate placed = candidate;
          ASSERT_TRUE(place_warpgroups(problem, machine, placed));
          ASSERT_EQ(placed, candidate);
        }
      }
    }
  }
}

bool any(const Problem& problem, bool (*is)(const Candidate&)) {
  const auto candidates = legal_candidates(problem, shipped_machine("H100").value());
  return std::any_of(candidates.begin(), candidates.end(), is);
}

// What was measured to be slower is not among them (kernels/cuda/decisions): copy engines of few
// rows or beside short products; compute blocks' sums beside many tiles of much k; tiles of 64 rows
// within a node. Who names copy engines gets them.
TEST(PlanChoice, WaysThatWereMeasuredToBeSlowerAreNotTried) {
  const auto engines = [](const Candidate& candidate) { return candidate.engines; };
  struct Sharing {
    World2 world;
    Shape shape;
    bool engines;
  };
  for (const Sharing& one :
       {Sharing{{1, 2}, {16384, 2048, 16384}, true}, Sharing{{1, 8}, {16384, 2048, 16384}, true},
        Sharing{{1, 4}, {8192, 1024, 8192}, true}, Sharing{{1, 8}, {8192, 1024, 8192}, false},
        Sharing{{1, 8}, {4088, 7168, 8192}, false}, Sharing{{1, 2}, {2048, 7168, 8192}, false},
        Sharing{{1, 4}, {64, 8192, 7168}, false}, Sharing{{2, 4}, {16384, 2048, 16384}, true},
        Sharing{{2, 4}, {32768, 1024, 32768}, false},
        Sharing{{2, 2}, {32768, 4096, 32768}, false}}) {
    Problem problem = problem_of(Op::kAgGemm, one.world.nodes, one.world.locals, one.shape);
    EXPECT_EQ(any(problem, engines), one.engines)
        << one.world.nodes << "x" << one.world.locals << " " << one.shape.m << " x " << one.shape.n
        << " x " << one.shape.k;
    problem.named.engines = true;
    EXPECT_TRUE(any(problem, engines));
  }
  const auto own = [](const Candidate& candidate) { return candidate.sums == Sums::kOwn; };
  EXPECT_TRUE(any(problem_of(Op::kGemmRs, 1, 2, {2048, 2048, 8192}), own));
  EXPECT_TRUE(any(problem_of(Op::kGemmRs, 1, 2, {16384, 16384, 2048}), own));
  EXPECT_FALSE(any(problem_of(Op::kGemmRs, 1, 2, {16384, 16384, 4096}), own));
  EXPECT_FALSE(any(problem_of(Op::kGemmAr, 1, 2, {16384, 16384, 2048}), own));
  const auto low = [](const Candidate& candidate) { return candidate.tiling.tile_m == 64; };
  EXPECT_FALSE(any(problem_of(Op::kAgGemm, 1, 4, {64, 4096, 4096}), low));
  EXPECT_TRUE(any(problem_of(Op::kAgGemm, 2, 2, {64, 4096, 4096}), low));
}

// A row's owner depends on m. A shard that is summed once begins with its owner's node, and then
// has the others in their order: so of three nodes the order of a row's sum depends on m. All other
// ways can have node order.
TEST(PlanChoice, BatchInvarianceRulesOutSumsWhoseOrderDependsOnM) {
  const Machine machine = shipped_machine("H100").value();
  std::size_t others = 0;
  for (const Op op : kOps) {
    for (const World2& world : {World2{1, 1}, {1, 4}, {2, 1}, {2, 4}, {3, 1}, {3, 2}, {4, 4}}) {
      Problem problem = problem_of(op, world.nodes, world.locals, {1024, 4096, 4096});
      const auto chosen = choose(problem, machine);
      ASSERT_TRUE(chosen) << chosen.error().message;
      problem.batch_invariant = true;
      const auto invariant = choose(problem, machine);
      ASSERT_TRUE(invariant) << invariant.error().message;
      if (op == Op::kGemmRs && world.nodes > 2) {
        EXPECT_NE(invariant->candidate.sums, Sums::kOnce);
        others += chosen->candidate.sums == Sums::kOnce ? 1 : 0;
      } else {
        EXPECT_EQ(invariant->candidate, chosen->candidate);
      }
    }
  }
  EXPECT_GT(others, 0u) << "the rule has never ruled anything out";
  Problem named = problem_of(Op::kGemmRs, 3, 2, {1024, 4096, 4096});
  named.batch_invariant = true;
  named.named.sums_once = true;
  const auto refused = choose(named, machine);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(refused.error().message.find("batch_invariant"), std::string::npos);
}

TEST(PlanChoice, TheCheapestIsChosenAndTheSameEachTime) {
  const Machine machine = shipped_machine("H200").value();
  for (Op op : kOps) {
    const Problem problem = problem_of(op, 2, 4, {8192, 4096, 4096});
    const auto choice = choose(problem, machine);
    ASSERT_TRUE(choice) << choice.error().message;
    for (const Candidate& candidate : legal_candidates(problem, machine))
      EXPECT_GE(predict(problem, machine, candidate).total, choice->time.total);
    EXPECT_EQ(choose(problem, machine)->candidate, choice->candidate);
  }
}

TEST(PlanChoice, WhatNobodyCanRunIsRefusedWithTheReason) {
  const Machine machine = shipped_machine("H100").value();
  Problem problem = problem_of(Op::kGemmRs, 1, 4, {0, 4096, 4096});
  EXPECT_EQ(choose(problem, machine).error().code, ErrorCode::kInvalidArgument);
  problem = problem_of(Op::kGemmRs, 2, 4, {4096, 4096, 4096});
  problem.lanes = 0;
  const auto refused = choose(problem, machine);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("rings"), std::string::npos) << refused.error().message;
}

// Before anything is divided by it: also of worlds whose ranks are 0 in 32 bits.
TEST(PlanChoice, WorldsThatCannotBeAreRefused) {
  for (const char* name : {"H100", "CPU"}) {
    const Machine machine = shipped_machine(name).value();
    for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr, Op::kRing, Op::kMoe, Op::kCombine}) {
      for (const auto& [nodes, locals] :
           {std::pair{0u, 4u}, {2u, 0u}, {65536u, 65536u}, {1025u, 1u}, {1u, 17u}, {1024u, 16u}}) {
        Problem problem = problem_of(op, nodes, locals, {4096, 16, 128});
        problem.experts = {64, 4};
        const auto refused = choose(problem, machine);
        ASSERT_FALSE(refused) << name_of(op) << " " << nodes << "x" << locals;
        EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
        EXPECT_NE(refused.error().message.find("a world of"), std::string::npos)
            << refused.error().message;
        EXPECT_FALSE(explain(problem, machine));
      }
    }
  }
}

TEST(PlanChoice, IllegalCandidatesAreRefused) {
  const Machine machine = shipped_machine("H100").value();
  const Problem gather = problem_of(Op::kAgGemm, 1, 4, {4096, 4096, 4096});
  Candidate candidate;
  candidate.tiling.tile_m = 128;
  candidate.tiling.tile_n = 256;
  candidate.stream_warpgroups = 12;
  ASSERT_TRUE(check_candidate(gather, machine, candidate));
  Candidate other = candidate;
  other.tiling.tile_n = 512;
  EXPECT_FALSE(check_candidate(gather, machine, other));
  other = candidate;
  other.engines = true;
  EXPECT_FALSE(check_candidate(gather, machine, other)) << "two banks";
  other.tiling.local_banks = 1;
  EXPECT_TRUE(check_candidate(gather, machine, other));
  Problem shared = gather;
  shared.ranks_per_device = 2;
  EXPECT_FALSE(check_candidate(shared, machine, other)) << "ranks share a GPU";
  other = candidate;
  other.stream_warpgroups = 3 * 132;
  EXPECT_FALSE(check_candidate(gather, machine, other)) << "no SM is left";
  other = candidate;
  other.sums = Sums::kOnce;
  EXPECT_FALSE(check_candidate(gather, machine, other));
  const Problem reduce = problem_of(Op::kGemmAr, 1, 4, {4096, 4096, 4096});
  other.sums = Sums::kOwn;
  EXPECT_FALSE(check_candidate(reduce, machine, other)) << "four ranks";
  Problem pair = problem_of(Op::kGemmAr, 1, 2, {4096, 4096, 4096});
  EXPECT_TRUE(check_candidate(pair, machine, other));
  pair.shape.m = 100;
  EXPECT_FALSE(check_candidate(pair, machine, other)) << "tiles of 100 rows are no whole pieces";
}

/// The old choice at the new shape against the new one's, or 1 where the old one is not legal.
double cost_of_staying(const Problem& problem, const Machine& machine, const Choice& old,
                       const Choice& chosen) {
  if (old.candidate == chosen.candidate) return 1;
  if (!check_candidate(problem, machine, old.candidate)) return 1;
  return predict(problem, machine, old.candidate).total / chosen.time.total;
}

// n, k and m by ones: where the choice changes, the old one costs nearly as little. The goal
// is 1.03 everywhere; where one more column makes one more row or column of tiles, and so perhaps a
// wave, the old tile itself costs more from there on, and the bound is wider.
TEST(PlanChoice, ChoicesVarySteadilyWithTheShape) {
  const Machine machine = shipped_machine("H100").value();
  struct Walk {
    Op op;
    World2 world;
    Shape from;
    Shape step;
    int steps;
  };
  std::vector<Walk> walks = {
      // Where tables had thresholds.
      {Op::kAgGemm, {1, 4}, {2048, 3000, 4096}, {0, 1, 0}, 150},
      {Op::kAgGemm, {1, 4}, {2048, 6100, 4096}, {0, 1, 0}, 100},
      {Op::kAgGemm, {2, 2}, {4046, 2048, 4096}, {1, 0, 0}, 100},
      {Op::kGemmRs, {1, 4}, {4096, 4096, 206}, {0, 0, 1}, 100},
      {Op::kGemmRs, {2, 4}, {16384, 16384, 2000}, {0, 0, 1}, 50},
      {Op::kGemmAr, {1, 4}, {1998, 2048, 256}, {1, 0, 0}, 100},
      {Op::kGemmAr, {1, 8}, {4096, 4096, 974}, {0, 0, 1}, 100},
      {Op::kGemmAr, {1, 2}, {2048, 2000, 3584}, {0, 1, 0}, 100},
  };
  std::mt19937 random(20261127);
  const auto pick = [&](std::uint32_t least, std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(least, most)(random);
  };
  for (int round = 0; round < 36; ++round) {
    const Shape step{round % 3 == 0 ? 1u : 0u, round % 3 == 1 ? 1u : 0u, round % 3 == 2 ? 1u : 0u};
    walks.push_back({kOps[round / 3 % 3],
                     kWorlds[pick(0, 5)],
                     {pick(64, 9000), pick(256, 9000), pick(128, 9000)},
                     step,
                     30});
  }
  for (const Walk& walk : walks) {
    Problem problem = problem_of(walk.op, walk.world.nodes, walk.world.locals, walk.from);
    auto old = choose(problem, machine);
    ASSERT_TRUE(old) << old.error().message;
    for (int step = 0; step < walk.steps; ++step) {
      const Problem before = problem;
      problem.shape.m += walk.step.m;
      problem.shape.n += walk.step.n;
      problem.shape.k += walk.step.k;
      auto chosen = choose(problem, machine);
      ASSERT_TRUE(chosen) << chosen.error().message;
      const bool more_tiles =
          work_of(before, old->candidate).tiles != work_of(problem, old->candidate).tiles;
      EXPECT_LE(cost_of_staying(problem, machine, *old, *chosen), more_tiles ? 1.12 : 1.03)
          << name_of(walk.op) << " " << problem.shape.m << " x " << problem.shape.n << " x "
          << problem.shape.k << ": " << describe(problem, old->candidate) << " -> "
          << describe(problem, chosen->candidate);
      old = std::move(chosen);
    }
  }
}

// NVLink at half its rate: what it carries takes longer, no choice gives it more warpgroups than it
// can use, and the planner gains from knowing.
TEST(PlanChoice, ASlowerNvlinkChangesChoicesSensibly) {
  const Machine machine = shipped_machine("H100").value();
  Machine halved = machine;
  for (double Machine::*rate : {&Machine::link_gb_s, &Machine::rows_link_gb_s,
                                &Machine::sums_link_gb_s, &Machine::engine_gb_s}) {
    halved.*rate /= 2;
  }
  int changed = 0;
  for (Op op : kOps) {
    for (const Shape& shape : {Shape{8192, 1024, 8192}, Shape{8192, 8192, 1024},
                               Shape{16384, 16384, 2048}, Shape{4096, 512, 4096}}) {
      const Problem problem = problem_of(op, 1, 8, shape);
      const auto real = choose(problem, machine);
      const auto slow = choose(problem, halved);
      ASSERT_TRUE(real && slow);
      EXPECT_GE(slow->time.total, real->time.total);
      // On the halved machine its own choice is at least as good as the other's.
      EXPECT_LE(slow->time.total, predict(problem, halved, real->candidate).total * (1 + 1e-9));
      if (op == Op::kAgGemm && !slow->candidate.engines && !real->candidate.engines) {
        EXPECT_LE(slow->candidate.stream_warpgroups, real->candidate.stream_warpgroups)
            << "half the link needs no more warpgroups to fill";
      }
      changed += slow->candidate == real->candidate ? 0 : 1;
    }
  }
  EXPECT_GE(changed, 3);
}

// Large products take the largest tiles, as the plain product does on both GPUs.
TEST(PlanChoice, LargeProductsTakeLargeTiles) {
  for (const char* gpu : {"H100", "H200"}) {
    const Machine machine = shipped_machine(gpu).value();
    for (Op op : kOps) {
      const auto choice = choose(problem_of(op, 1, 4, {16384, 8192, 7168}), machine);
      ASSERT_TRUE(choice);
      EXPECT_EQ(choice->candidate.tiling.tile_m, 128u) << gpu << " " << name_of(op);
      EXPECT_EQ(choice->candidate.tiling.tile_n, 256u) << gpu << " " << name_of(op);
    }
  }
}

// A slow network turns a launch into its rail's time: the choice keeps SMs for sums and sends.
TEST(PlanChoice, ASlowNetworkIsSeen) {
  const Machine machine = shipped_machine("H200").value();
  Machine tcp = machine;
  tcp.network_gb_s = 0.5;
  const Problem problem = problem_of(Op::kAgGemm, 2, 1, {4096, 4096, 4096});
  const auto fast = choose(problem, machine);
  const auto slow = choose(problem, tcp);
  ASSERT_TRUE(fast && slow);
  EXPECT_GT(slow->time.total, 20 * fast->time.total);
  EXPECT_GT(slow->time.network, 0.9 * slow->time.total);
}

TEST(PlanChoice, ATunedEntryOverridesWhereItIsLegal) {
  const Machine machine = shipped_machine("H100").value();
  const Problem problem = problem_of(Op::kGemmRs, 1, 4, {4000, 4096, 512});
  const auto chosen = choose(problem, machine);
  ASSERT_TRUE(chosen);
  TunedEntry entry;
  entry.op = problem.op;
  entry.machine = "H100";
  entry.nodes = 1;
  entry.locals = 4;
  entry.bucket = bucket_of(problem.shape);
  entry.candidate = chosen->candidate;
  entry.candidate.stream_warpgroups = 99;
  entry.candidate.compute_blocks = 0;
  Tuned tuned;
  tuned.put(entry);
  const auto overridden = choose(problem, machine, &tuned);
  ASSERT_TRUE(overridden);
  EXPECT_TRUE(overridden->tuned);
  EXPECT_EQ(overridden->candidate.stream_warpgroups, 99u);
  EXPECT_EQ(overridden->candidate.compute_blocks, 99u);
  // Another world, another machine, another bucket, or an entry that cannot run: the model's.
  EXPECT_FALSE(choose(problem_of(Op::kGemmRs, 1, 8, problem.shape), machine, &tuned)->tuned);
  EXPECT_FALSE(choose(problem, shipped_machine("H200").value(), &tuned)->tuned);
  EXPECT_FALSE(choose(problem_of(Op::kGemmRs, 1, 4, {2000, 4096, 512}), machine, &tuned)->tuned);
  tuned.entries[0].candidate.engines = true;
  const auto refused = choose(problem, machine, &tuned);
  ASSERT_TRUE(refused);
  EXPECT_FALSE(refused->tuned);
  EXPECT_EQ(refused->candidate, chosen->candidate);
}

TEST(PlanChoice, ExplainIsAScreenWithTermsAndRunnersUp) {
  const Machine machine = shipped_machine("H100").value();
  for (Op op : kOps) {
    const Problem problem = problem_of(op, 2, 4, {8192, 8192, 4096});
    const auto text = explain(problem, machine);
    ASSERT_TRUE(text) << text.error().message;
    EXPECT_LE(std::count(text->begin(), text->end(), '\n'), 24) << *text;
    for (const char* word : {"compute", "NVLink", "network", "launch", "unfused", "H100"})
      EXPECT_NE(text->find(word), std::string::npos) << word << " in\n" << *text;
    std::istringstream lines(*text);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 160u) << line;
  }
}

TEST(PlanChoice, ExplainNamesTheTurnsOfKeys) {
  const Machine machine = shipped_machine("H200").value();
  Problem problem = problem_of(Op::kRing, 4, 1, {24576, 32, 128});
  problem.named.form = Mode::kFused;
  problem.heads.key_heads = 8;
  EXPECT_NE(explain(problem, machine)->find("shards take turns of"), std::string::npos);
  problem.heads.key_heads = 1;  // whose rows all items want from first to last
  EXPECT_NE(explain(problem, machine)->find("shard after shard"), std::string::npos);
  problem.nodes = 2;
  EXPECT_EQ(explain(problem, machine)->find("shard"), std::string::npos);
}

// Shapes that ran both ways on two H200s (kernels/cuda/decisions/few_rows.md).
TEST(PlanChoice, TilesSpanAllShardsWhereThatWasMeasuredToBeQuicker) {
  const Machine machine = shipped_machine("H200").value();
  const std::pair<Shape, bool> shapes[] = {{{96, 9216, 4608}, true},  {{32, 8192, 8192}, true},
                                           {{128, 8192, 8192}, true}, {{128, 14336, 4096}, true},
                                           {{64, 3072, 4096}, false}, {{16, 4096, 4096}, false}};
  for (const auto& [shape, spans] : shapes) {
    Problem problem = problem_of(Op::kAgGemm, 1, 2, shape);
    problem.named.form = Mode::kFused;
    const auto choice = choose(problem, machine);
    ASSERT_TRUE(choice) << choice.error().message;
    EXPECT_EQ(spans, spans_shards(problem, machine, choice->candidate)) << shape.m;
    EXPECT_EQ(spans, explain(problem, machine)->find("spans the rows") != std::string::npos);
  }
}

// --- The exchange of GEMM+AllReduce ---

Problem all_reduce(std::uint32_t nodes, std::uint32_t rows) {
  Problem problem;
  problem.op = Op::kGemmAr;
  problem.nodes = nodes;
  problem.locals = 8;
  problem.shape = {rows, 8192, 1024};
  return problem;
}

TEST(ExchangeTest, GoesByThePredictedTime) {
  Machine machine = *shipped_machine("H200");
  machine.network_latency_us = 20;  // a cluster's; the file has that of two nodes in one process
  // Two nodes have one form; one hop is quicker for few bytes, half of the bytes for many.
  EXPECT_EQ(choose(all_reduce(2, 16384), machine)->candidate.tiling.exchange, Exchange::kAuto);
  EXPECT_EQ(choose(all_reduce(4, 64), machine)->candidate.tiling.exchange, Exchange::kOneShot)
      << *explain(all_reduce(4, 64), machine);
  EXPECT_EQ(choose(all_reduce(4, 16384), machine)->candidate.tiling.exchange, Exchange::kTwoShot);
  EXPECT_EQ(choose(all_reduce(16, 16384), machine)->candidate.tiling.exchange, Exchange::kTwoShot);
}

TEST(ExchangeTest, IsForcedByItsNameAndNamedByExplain) {
  const Machine machine = *shipped_machine("H200");
  for (const Exchange exchange : {Exchange::kOneShot, Exchange::kTwoShot}) {
    Problem problem = all_reduce(8, 4096);
    problem.named.tiling.exchange = exchange;
    EXPECT_EQ(choose(problem, machine)->candidate.tiling.exchange, exchange);
    const auto text = explain(problem, machine);
    ASSERT_TRUE(text);
    EXPECT_NE(
        text->find(exchange == Exchange::kTwoShot ? "two-shot exchange" : "one-shot exchange"),
        std::string::npos)
        << *text;
  }
  Problem two_nodes = all_reduce(2, 4096);
  two_nodes.named.tiling.exchange = Exchange::kTwoShot;
  const auto refused = choose(two_nodes, machine);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("three nodes"), std::string::npos)
      << refused.error().message;
}

TEST(ExchangeTest, OfATunedChoiceIsPartOfItsFile) {
  TunedEntry entry;
  entry.op = Op::kGemmAr;
  entry.machine = "H200";
  entry.nodes = 4;
  entry.locals = 8;
  entry.bucket = {16384, 8192, 1024};
  entry.measured_us = 1;
  entry.candidate.tiling = {128, 256, 1 << 20, 0};
  entry.candidate.stream_warpgroups = 12;
  entry.candidate.receive_warpgroups = 12;
  entry.candidate.send_warpgroups = 1;
  for (const Exchange exchange : {Exchange::kAuto, Exchange::kOneShot, Exchange::kTwoShot}) {
    entry.candidate.tiling.exchange = exchange;
    Tuned tuned;
    tuned.put(entry);
    const auto read = parse_tuned(tuned_text(tuned), "a test");
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_TRUE(read->entries[0].candidate == entry.candidate);
    // An entry from before there were two forms is one-shot.
    const auto choice = choose(all_reduce(4, 16384), *shipped_machine("H200"), &*read);
    ASSERT_TRUE(choice && choice->tuned);
    EXPECT_EQ(choice->candidate.tiling.exchange,
              exchange == Exchange::kAuto ? Exchange::kOneShot : exchange);
  }
  Tuned tuned;
  tuned.put(entry);
  std::string text = tuned_text(tuned);
  text.replace(text.find("two-shot"), 8, "no-shot!");
  EXPECT_FALSE(parse_tuned(text, "a test"));
}

// All ranks choose alike on CPUs, whatever their machines are.
TEST(ExchangeTest, OnCpusFewBytesGoInOneHopAndManyInTwo) {
  Problem problem = all_reduce(8, 8192);
  problem.locals = 1;
  problem.shape.k = 1;
  EXPECT_EQ(with_exchange(problem, {}).exchange, Exchange::kTwoShot);
  problem.shape.m = problem.shape.n = 16;
  EXPECT_EQ(with_exchange(problem, {}).exchange, Exchange::kOneShot);
  problem.nodes = 2;
  EXPECT_EQ(with_exchange(problem, {}).exchange, Exchange::kAuto);
}

}  // namespace
}  // namespace mk::kernels::plan
