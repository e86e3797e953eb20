// What an operator gets of the planner: what its caller named stays, what is chosen can run, and
// each launch's estimate is the model's.
#include "kernels/plan/operator_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "kernels/plan/legal.h"
#include "tests/kernels/plan/problems.h"

namespace mk::kernels::plan {
namespace {

constexpr Op kOps[] = {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr};

std::shared_ptr<const JobPlan> job_on(std::string_view machine) {
  auto job = std::make_shared<JobPlan>();
  job->machine = shipped_machine(machine).value();
  return job;
}

/// A seeded space of problems: shapes with few rows and odd ones, all worlds, shares of a GPU.
class Problems {
 public:
  Problem next() {
    Problem problem = problem_of(kOps[pick(0, 2)], pick(1, 4), pick(1, 8), {});
    // By powers of two, so that small sides are as frequent as large ones.
    problem.shape = {side(1, 16), side(3, 15), side(3, 15)};
    problem.shape.n = std::max(8u, problem.shape.n / 8 * 8);
    problem.shape.k = std::max(8u, problem.shape.k / 8 * 8);
    problem.in_place = pick(0, 1) == 1;
    problem.ranks_per_device = pick(0, 2) == 0 ? pick(2, 16) : 1;
    problem.lanes = pick(1, 4);
    return problem;
  }
  std::uint32_t pick(std::uint32_t least, std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(least, most)(random_);
  }

 private:
  std::uint32_t side(std::uint32_t least, std::uint32_t most) {
    const std::uint32_t bits = pick(least, most);
    return pick(1u << bits, (2u << bits) - 1);
  }
  std::mt19937 random_{20261127};
};

std::string text_of(const Problem& problem) {
  return std::string(name_of(problem.op)) + " " + std::to_string(problem.nodes) + "x" +
         std::to_string(problem.locals) + " " + std::to_string(problem.shape.m) + " x " +
         std::to_string(problem.shape.n) + " x " + std::to_string(problem.shape.k) + ", " +
         std::to_string(problem.ranks_per_device) + " ranks a GPU";
}

// Whatever the shape, the world and the share of a GPU: something is chosen, and it can run.
TEST(OperatorPlan, EveryProblemHasAWayToRun) {
  Problems problems;
  for (const char* machine : {"H100", "H200"}) {
    const auto job = job_on(machine);
    for (int round = 0; round < 3000; ++round) {
      const Problem problem = problems.next();
      const auto planned = plan_operator(problem, job, {});
      ASSERT_TRUE(planned) << text_of(problem) << ": " << planned.error().message;
      const Candidate& candidate = planned->candidate;
      SCOPED_TRACE(text_of(problem) + ": " + describe(problem, candidate));
      EXPECT_EQ(candidate.form, Mode::kFused);
      EXPECT_TRUE(check_candidate(problem, job->machine, candidate));
      // What kernels are compiled for.
      EXPECT_TRUE(candidate.tiling.tile_m == 128 ||
                  (problem.op == Op::kAgGemm && candidate.tiling.tile_m == 64));
      const std::uint32_t columns = candidate.tiling.tile_n;
      EXPECT_TRUE(columns == 256 || columns == 128 || columns == 64);
      // Sums of narrow tiles were measured for few rows on one node.
      EXPECT_TRUE(columns != 64 || problem.op == Op::kAgGemm ||
                  (problem.nodes == 1 && problem.shape.m <= 256));
      // Every role that the world has is there, and the product has half of the SMs.
      const std::uint32_t share = blocks_of_rank(problem, job->machine);
      EXPECT_LE(candidate.compute_blocks + blocks_outside(problem, candidate), share);
      EXPECT_GE(candidate.compute_blocks, std::min(share, kBlocksMax) / 2);
      EXPECT_EQ(candidate.send_warpgroups > 0, problem.nodes > 1);
      const bool receives = problem.nodes > 1 && (problem.op != Op::kAgGemm || problem.locals > 1);
      EXPECT_EQ(candidate.receive_warpgroups > 0, receives);
      const bool streams = problem.op == Op::kAgGemm ? problem.ranks() > 1 : problem.locals > 1;
      EXPECT_EQ(candidate.stream_warpgroups > 0,
                streams && !(candidate.engines && problem.nodes > 1));
      EXPECT_FALSE(candidate.engines && problem.ranks_per_device > 1);
    }
  }
}

TEST(OperatorPlan, WhatTheCallerNamedStays) {
  Problems problems;
  const auto job = job_on("H100");
  int named_engines = 0;
  for (int round = 0; round < 1500; ++round) {
    Problem problem = problems.next();
    Named& named = problem.named;
    const bool several = problem.ranks() > 1;
    named.tiling.tile_n = problems.pick(0, 1) * 128;
    named.tiling.chunk_bytes = problems.pick(0, 1) << 19;
    const bool few = blocks_of_rank(problem, job->machine) < 40;
    if (!few && problems.pick(0, 2) == 0) named.stream_warpgroups = problems.pick(1, 30);
    if (!few && problems.pick(0, 2) == 0) named.receive_warpgroups = problems.pick(1, 30);
    if (!few && problems.pick(0, 2) == 0) named.compute_blocks = problems.pick(1, 20);
    if (problem.op == Op::kAgGemm && problem.locals > 1 && problem.ranks_per_device == 1 &&
        problems.pick(0, 1) == 1) {
      named.engines = problems.pick(0, 1) == 1;
    }
    if (problem.op == Op::kGemmRs && problem.nodes > 1 && problem.locals > 1 &&
        problem.nodes + problem.locals <= 9 && problems.pick(0, 1) == 1) {
      named.sums_once = problems.pick(0, 1) == 1;
    }
    SCOPED_TRACE(text_of(problem));
    const auto planned = plan_operator(problem, job, {});
    ASSERT_TRUE(planned) << planned.error().message;
    const Candidate& candidate = planned->candidate;
    SCOPED_TRACE(describe(problem, candidate));
    if (named.tiling.tile_n != 0) {
      EXPECT_EQ(candidate.tiling.tile_n, named.tiling.tile_n);
    }
    if (named.tiling.chunk_bytes != 0) {
      EXPECT_EQ(candidate.tiling.chunk_bytes, named.tiling.chunk_bytes);
    }
    if (named.compute_blocks != 0) {
      EXPECT_EQ(candidate.compute_blocks, named.compute_blocks);
    }
    if (named.engines) {
      EXPECT_EQ(candidate.engines, *named.engines);
    }
    named_engines += named.engines.value_or(false) ? 1 : 0;
    if (named.sums_once) {
      EXPECT_EQ(candidate.sums == Sums::kOnce, *named.sums_once);
    }
    if (several && named.stream_warpgroups != 0) {
      EXPECT_NE(candidate.sums, Sums::kOwn) << "who names warpgroups wants them to sum";
      EXPECT_TRUE(candidate.stream_warpgroups == named.stream_warpgroups ||
                  candidate.stream_warpgroups == 0);
      if (!named.engines) {
        EXPECT_FALSE(candidate.engines);
      }
    }
    if (candidate.receive_warpgroups != 0 && named.receive_warpgroups != 0) {
      EXPECT_EQ(candidate.receive_warpgroups, named.receive_warpgroups);
    }
  }
  EXPECT_GT(named_engines, 20);
}

// With its tiling named, as an operator does whose plan was made of the choice, the choice stays.
TEST(OperatorPlan, ThePlannedTilingHasThePlannedWay) {
  Problems problems;
  const auto job = job_on("H200");
  for (int round = 0; round < 500; ++round) {
    Problem problem = problems.next();
    const auto planned = plan_operator(problem, job, {});
    ASSERT_TRUE(planned);
    problem.named.tiling = planned->candidate.tiling;
    const auto again = plan_operator(problem, job, {});
    ASSERT_TRUE(again);
    EXPECT_EQ(again->candidate, planned->candidate) << text_of(problem);
  }
}

// Smaller GPUs than any that was measured, and what does not fit: an answer that says so.
TEST(OperatorPlan, WhatDoesNotFitIsNamed) {
  const auto job = job_on("H100");
  Problem problem = problem_of(Op::kGemmAr, 2, 4, {4096, 4096, 1024});
  problem.blocks = 5;
  EXPECT_TRUE(plan_operator(problem, job, {}));
  problem.blocks = 132;
  problem.named.stream_warpgroups = 400;
  const auto refused = plan_operator(problem, job, {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kLimitExceeded);
  EXPECT_NE(refused.error().message.find("do not fit"), std::string::npos)
      << refused.error().message;
}

TEST(OperatorPlan, AnEstimateIsTheModelsForEachLaunchsRows) {
  const auto job = job_on("H100");
  const auto planned = plan_operator(problem_of(Op::kGemmRs, 1, 4, {8192, 8192, 2048}), job, {});
  ASSERT_TRUE(planned);
  for (const std::uint32_t m : {1u, 512u, 8192u}) {
    Problem launch = planned->problem;
    launch.shape.m = m;
    Candidate as = planned->candidate;
    const Estimate expected = planned->expected(m);
    EXPECT_NEAR(static_cast<double>(expected.fused_ns) / 1e3,
                predict(launch, job->machine, as).total, 1e-3);
    as.form = Mode::kUnfused;
    EXPECT_NEAR(static_cast<double>(expected.unfused_ns) / 1e3,
                predict(launch, job->machine, as).total, 1e-3);
    EXPECT_EQ(planned->form(m, expected), expected.cheaper());
  }
}

TEST(OperatorPlan, ATunedFormIsWhatAutoRuns) {
  auto job = std::make_shared<JobPlan>(*job_on("H100"));
  const Problem problem = problem_of(Op::kGemmRs, 1, 4, {8192, 8192, 2048});
  const auto model = plan_operator(problem, job, {});
  ASSERT_TRUE(model);
  TunedEntry entry;
  entry.op = problem.op;
  entry.machine = "H100";
  entry.nodes = 1;
  entry.locals = 4;
  entry.bucket = bucket_of(problem.shape);
  entry.candidate = model->candidate;
  entry.candidate.form = Mode::kUnfused;
  job->tuned.put(entry);
  const auto tuned = plan_operator(problem, job, {});
  ASSERT_TRUE(tuned);
  EXPECT_EQ(tuned->candidate.form, Mode::kFused) << "what a fused launch runs as";
  EXPECT_EQ(tuned->form(8192, tuned->expected(8192)), Mode::kUnfused);
  EXPECT_EQ(tuned->form(2048, {1, 2}), Mode::kFused) << "another bucket: the quicker";
}

// A caller's rates reach every term that they are of.
TEST(OperatorPlan, ACallersRatesReplaceTheMachines) {
  const Machine machine = shipped_machine("H100").value();
  EXPECT_EQ(with_rates(machine, {}), machine);
  MachineRates rates;
  rates.network_bytes_per_s = 1e9;
  rates.local_bytes_per_s = machine.link_gb_s * 1e9 / 2;
  rates.command_ns = 7000;
  const Machine told = with_rates(machine, rates);
  EXPECT_DOUBLE_EQ(told.network_gb_s, 1);
  EXPECT_DOUBLE_EQ(told.network_command_us, 7);
  EXPECT_DOUBLE_EQ(told.rows_link_gb_s, machine.rows_link_gb_s / 2);
  EXPECT_DOUBLE_EQ(told.engine_gb_s, machine.engine_gb_s / 2);
  EXPECT_DOUBLE_EQ(told.step_us_256, machine.step_us_256);
  rates = {};
  rates.flops_per_s = 2.0 * 128 * 256 * 64 * machine.sms / machine.step_us_256 * 1e6 / 2;
  EXPECT_NEAR(with_rates(machine, rates).step_us_128, 2 * machine.step_us_128, 1e-9);

  // Over a network of 0.5 GB/s AllGather+GEMM takes its time, whatever else is chosen.
  rates = {};
  rates.network_bytes_per_s = 0.5e9;
  const Problem problem = problem_of(Op::kAgGemm, 2, 1, {4096, 4096, 4096});
  const auto slow = plan_operator(problem, job_on("H200"), rates);
  ASSERT_TRUE(slow);
  EXPECT_GT(slow->expected(4096).fused_ns, 4096.0 / 2 * 4096 * 2 / 0.5);
}

// On GPUs the fused form won at every size measured (tests/bench/results); a machine on which
// chunks are dear gets the other one.
TEST(OperatorPlan, GpusRunFusedUnlessChunksAreDear) {
  const auto job = job_on("H200");
  for (const std::uint32_t m : {2048u, 8192u, 32768u}) {
    for (const Problem& problem : {problem_of(Op::kAgGemm, 1, 8, {m, m / 8, m}),
                                   problem_of(Op::kGemmRs, 1, 8, {m, m, m / 8})}) {
      const auto planned = plan_operator(problem, job, {});
      ASSERT_TRUE(planned);
      EXPECT_EQ(planned->expected(m).cheaper(), Mode::kFused) << text_of(problem);
      if (problem.op != Op::kAgGemm || planned->candidate.engines) continue;
      MachineRates dear;
      dear.step_ns = 1e6;
      OperatorPlan slow = *planned;
      slow.machine = with_rates(slow.machine, dear);
      EXPECT_EQ(slow.expected(m).cheaper(), Mode::kUnfused) << text_of(problem);
    }
  }
}

// A piece of a tile every so often, of one node where the product outlasts NVLink.
TEST(OperatorPlan, TilesLeaveAtAPaceBesideALongProduct) {
  const Machine machine = shipped_machine("H100").value();
  const auto pace = [&](const Problem& problem, std::uint32_t columns = 256) {
    Candidate candidate;
    candidate.tiling.tile_m = 128;
    candidate.tiling.tile_n = columns;
    candidate.compute_blocks = 128;
    return tile_pace_ns(problem, machine, candidate);
  };
  Problem problem = problem_of(Op::kGemmRs, 1, 4, {16384, 16384, 2048});
  const double tile = tile_us(machine, {128, 256, 0, 0, 0}, 32, work_of(problem, {}).b_bytes);
  EXPECT_NEAR(pace(problem), 0.75 * tile / 4 * 1e3, 1);
  EXPECT_GT(pace(problem, 128), 0u);
  problem.shape.k = 512;
  EXPECT_EQ(pace(problem), 0u) << "NVLink takes longer";
  problem.shape.k = 1 << 20;
  EXPECT_EQ(pace(problem), 1'000'000u) << "the longest";
  problem.shape.k = 2048;
  problem.op = Op::kGemmAr;
  EXPECT_EQ(pace(problem), 0u) << "results take NVLink, too";
  problem.shape.k = 4096;
  EXPECT_GT(pace(problem), 0u);
  problem.ranks_per_device = 2;
  EXPECT_EQ(pace(problem), 0u) << "ranks share a GPU";
  EXPECT_EQ(pace(problem_of(Op::kGemmRs, 2, 4, {16384, 16384, 2048})), 0u);
  EXPECT_EQ(pace(problem_of(Op::kGemmRs, 1, 1, {16384, 16384, 2048})), 0u);
}

}  // namespace
}  // namespace mk::kernels::plan
