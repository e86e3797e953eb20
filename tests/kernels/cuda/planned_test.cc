// From the planner's choice to the groups of an operator on a GPU: whatever is chosen, the
// operator's own plan is made, its groups fit the rank's SMs, and what the caller named stays. Host
// arithmetic: it needs no GPU.
#include "kernels/cuda/host/planned.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <optional>
#include <random>
#include <string>

#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels {
namespace {

using cuda::job_plan_for;
using cuda::plan_launches;
using cuda::planned_needs;
using cuda::planned_tiling;

constexpr std::uint32_t kDevice = 132;
constexpr plan::Op kOps[] = {plan::Op::kAgGemm, plan::Op::kGemmRs, plan::Op::kGemmAr};

/// What the plan of a product over all ranks makes of a tiling.
struct Made {
  Tiling tiling;
  std::uint32_t flags = 0;
};
Result<Made> make_plan(plan::Op op, const World& of, const Shape& shape, const Tiling& tiling) {
  const auto sums = [](const auto& plan) {
    return Made{{plan.tile_m, plan.tile_n, plan.chunk_bytes, plan.banks, 0}, plan.flag_count()};
  };
  switch (op) {
    case plan::Op::kAgGemm: {
      MK_ASSIGN_OR_RETURN(const auto plan,
                          AgGemmPlan::make(of.nodes, of.locals, shape, DType::kBf16, tiling));
      const GatherGeometry& gather = plan.gather;
      return Made{{plan.tile_m, plan.tile_n, gather.chunk_bytes, gather.banks, gather.local_banks},
                  plan.flag_count()};
    }
    case plan::Op::kGemmRs: {
      MK_ASSIGN_OR_RETURN(const auto plan,
                          GemmRsPlan::make(of.nodes, of.locals, shape, DType::kBf16, tiling));
      return sums(plan);
    }
    default:  // the third of the products
      break;
  }
  MK_ASSIGN_OR_RETURN(const auto plan,
                      GemmArPlan::make(of.nodes, of.locals, shape, DType::kBf16, tiling));
  return sums(plan);
}

class Draw {
 public:
  explicit Draw(std::uint32_t seed) : random_(seed) {}
  std::uint32_t pick(std::uint32_t least, std::uint32_t most) {
    return std::uniform_int_distribution<std::uint32_t>(least, most)(random_);
  }
  /// By powers of two, so that few rows are as frequent as many.
  std::uint32_t side(std::uint32_t least, std::uint32_t most) {
    const std::uint32_t bits = pick(least, most);
    return pick(1u << bits, (2u << bits) - 1);
  }

 private:
  std::mt19937 random_;
};

struct Job {
  plan::Op op = plan::Op::kAgGemm;
  World of;
  Shape shape;
  CudaOptions options;
  std::uint32_t device = kDevice;
  std::uint32_t lanes = 1;

  std::uint32_t share() const { return plan::blocks_of_share(device, options.ranks_per_device); }
  std::string text() const {
    return fmt::format("{} {}x{} {} x {} x {}, {} ranks on {} SMs", plan::name_of(op), of.nodes,
                       of.locals, shape.m, shape.n, shape.k, options.ranks_per_device, device);
  }
};

Job draw_job(Draw& draw) {
  Job job;
  job.op = kOps[draw.pick(0, 2)];
  job.of = {draw.pick(1, 4), draw.pick(1, 8), 0, 0};
  job.shape = {draw.side(0, 16), draw.side(3, 15) / 8 * 8, draw.side(3, 15) / 8 * 8};
  job.options.ranks_per_device = draw.pick(0, 2) == 0 ? draw.pick(2, 16) : 1;
  if (draw.pick(0, 3) == 0) job.device = draw.pick(64, 144);
  job.lanes = draw.pick(1, 4);
  return job;
}

/// All that an operator's creation does on the host with the planner's answer.
struct Run {
  plan::OperatorPlan planned;
  RoleBlocks blocks;
  cuda::FrameArguments frame;
};
Result<Run> run(const Job& job, std::uint32_t pollers, const Tiling& named = {}) {
  const auto of_job = job_plan_for("NVIDIA H100 80GB HBM3", job.device);
  MK_ASSIGN_OR_RETURN(const Tiling tiling,
                      planned_tiling(job.op, job.of.nodes, job.of.locals, job.shape, DType::kBf16,
                                     job.share(), *of_job, job.options, named));
  MK_ASSIGN_OR_RETURN(const Made made, make_plan(job.op, job.of, job.shape, tiling));
  EXPECT_LE(made.flags, cuda::kPolledFlagsMax);
  Run run;
  MK_ASSIGN_OR_RETURN(
      run.planned, plan_launches(job.op, job.of, job.shape, DType::kBf16, made.tiling, job.share(),
                                 job.lanes, job.options, of_job));
  run.frame.pollers = job.of.size() > 1 ? pollers : 0;
  if (job.of.nodes > 1) run.frame.pollers = 1;
  MK_RETURN_IF_ERROR(cuda::choose_blocks("op", job.options, planned_needs(run.planned), job.lanes,
                                         job.device, run.blocks, run.frame));
  return run;
}

// Few rows and odd shapes, all worlds, shares of a GPU, GPUs that nobody measured, with and without
// abort words to poll.
TEST(Planned, WhateverIsChosenFitsTheRanksShare) {
  Draw draw(20261127);
  int engines = 0;
  int own = 0;
  int once = 0;
  for (int round = 0; round < 4000; ++round) {
    const Job job = draw_job(draw);
    SCOPED_TRACE(job.text());
    const auto made = run(job, draw.pick(0, 1));
    ASSERT_TRUE(made) << made.error().message;
    const auto& [planned, blocks, frame] = *made;
    const plan::Candidate& candidate = planned.candidate;
    SCOPED_TRACE(plan::describe(planned.problem, candidate));
    EXPECT_LE(cuda::all_blocks(frame, blocks), job.share());
    EXPECT_GE(blocks.compute, std::max(1u, std::min(job.share(), kBlocksMax) / 2 - 1));
    EXPECT_LE(blocks.compute, kBlocksMax);
    EXPECT_LE(blocks.receive, kBlocksMax);
    const Warpgroups only_stream =
        warpgroups_of(blocks.reduce) + cuda::groups_that_only_share(frame, blocks);
    EXPECT_LE(frame.pollers + warpgroups_of(blocks.send + blocks.receive) + only_stream,
              warpgroups_of(frame.comm_blocks));
    EXPECT_EQ(blocks.receive, candidate.receive_warpgroups);
    EXPECT_EQ(blocks.send, job.of.nodes > 1 ? 1u : 0u);
    const bool gather = job.op == plan::Op::kAgGemm;
    EXPECT_EQ(blocks.reduce > 0, !gather && job.of.locals > 1);
    EXPECT_EQ(blocks.share > 0, gather && job.of.size() > 1);
    // As many as planned, but for the last block's places and the poller's.
    EXPECT_NEAR(only_stream, candidate.stream_warpgroups, 2);
    engines += candidate.engines ? 1 : 0;
    own += candidate.sums == plan::Sums::kOwn ? 1 : 0;
    once += candidate.sums == plan::Sums::kOnce ? 1 : 0;
  }
  EXPECT_GT(engines, 20);
  EXPECT_GT(own, 20);
  EXPECT_GT(once, 20);
}

// What makes the plan, and what the operator is then asked, are one choice.
TEST(Planned, AnOperatorRunsAsItsPlanWasChosen) {
  Draw draw(5);
  for (int round = 0; round < 1000; ++round) {
    Job job = draw_job(draw);
    const auto of_job = job_plan_for("NVIDIA H200", job.device);
    plan::Problem problem;
    problem.op = job.op;
    problem.nodes = job.of.nodes;
    problem.locals = job.of.locals;
    problem.shape = job.shape;
    problem.blocks = job.share();
    problem.ranks_per_device = job.options.ranks_per_device;
    problem.named.form = Mode::kFused;
    const auto whole = plan::choose(problem, of_job->machine, &of_job->tuned);
    ASSERT_TRUE(whole);
    const auto made = make_plan(job.op, job.of, job.shape, whole->candidate.tiling);
    ASSERT_TRUE(made) << job.text() << ": " << made.error().message;
    const auto planned = plan_launches(job.op, job.of, job.shape, DType::kBf16, made->tiling,
                                       job.share(), 1, job.options, of_job);
    ASSERT_TRUE(planned);
    EXPECT_EQ(planned->candidate.engines, whole->candidate.engines) << job.text();
    EXPECT_EQ(planned->candidate.sums, whole->candidate.sums) << job.text();
  }
}

TEST(Planned, KeysComeByWhatIsQuickerUnlessItIsNamed) {
  const auto job = job_plan_for("NVIDIA H200", 132);
  RingAttentionShape shape{12288, 16, 16, 128, true};
  shape.batch = 16;
  CudaOptions options;
  const auto tiling = [&](std::uint32_t blocks = 132) {
    return cuda::planned_ring_tiling(1, 2, shape, 0, blocks, *job, options);
  };
  const auto chosen = tiling();
  ASSERT_TRUE(chosen) << chosen.error().message;
  EXPECT_TRUE(chosen->engines);
  EXPECT_GT(chosen->heads_together, 1u);
  const auto plan = RingAttentionPlan::make(1, 2, shape, *chosen);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->banks, 1u);
  // Ranks that share a GPU have them only if they are named.
  options.ranks_per_device = 2;
  EXPECT_FALSE(tiling(65)->engines);
  options.dma = true;
  EXPECT_TRUE(tiling(65)->engines);
  options.ranks_per_device = 1;
  options.dma = false;
  EXPECT_FALSE(tiling()->engines);
  options.dma = true;
  shape.batch = 1;
  shape.sequences_max = 8;
  EXPECT_EQ(tiling().error().code, ErrorCode::kInvalidArgument);
  options.dma.reset();
  EXPECT_FALSE(tiling()->engines);
}

// The first keys of all shards are wanted early; long latencies want longer turns.
TEST(Planned, ShardsOfKeysTakeTurnsAsTheNetworkIs) {
  const auto job = job_plan_for("NVIDIA H200", 132);
  const RingAttentionShape shape{24576, 32, 8, 128};
  const auto turn = [&](std::uint32_t nodes, std::uint32_t locals, double latency_us,
                        std::optional<bool> dma = {}) {
    plan::JobPlan on = *job;
    on.machine.network_latency_us = latency_us;
    CudaOptions options;
    options.dma = dma;
    const auto tiling = cuda::planned_ring_tiling(nodes, locals, shape, 0, 132, on, options);
    EXPECT_TRUE(tiling) << tiling.error().message;
    EXPECT_FALSE(tiling->engines);
    return tiling->turn_chunks;
  };
  EXPECT_EQ(turn(2, 1, 5), 0u) << "one shard comes";
  EXPECT_GE(turn(4, 1, 5), 1u);
  EXPECT_LT(turn(4, 1, 5), turn(4, 1, 200));
  EXPECT_LE(turn(8, 2, 5), 2u) << "of few chunks";
  EXPECT_EQ(turn(4, 1, 5, true), turn(4, 1, 5)) << "alone on a node nobody needs engines";
  EXPECT_EQ(turn(4, 2, 5, false), turn(4, 2, 5));
}

// Whatever a plan may be made for is planned in no time, and what none may be made for is refused
// at once: an operator's creation waits for it.
TEST(Planned, TurnsOfLargeJobsAreChosenSoon) {
  const auto job = job_plan_for("NVIDIA H200", 132);
  struct Case {
    std::uint32_t nodes, locals;
    RingAttentionShape shape;
    ErrorCode code;
  };
  const auto with_batch = [](RingAttentionShape shape, std::uint32_t batch) {
    shape.batch = batch;
    return shape;
  };
  const RingAttentionShape kMillion{1 << 20, 128, 8, 128};
  const Case kCases[] = {
      {128, 1, {1 << 24, 128, 8, 128}, ErrorCode::kOk},
      {128, 1, {1 << 24, 128, 8, 128, true}, ErrorCode::kOk},
      {16, 8, {1 << 24, 1024, 1024, 64, true}, ErrorCode::kOk},
      {128, 1, with_batch({128 * 128, 8, 8, 128}, 1 << 16), ErrorCode::kOk},
      {4, 1, with_batch(kMillion, 1024), ErrorCode::kOk},
      {4, 1, with_batch(kMillion, 4096), ErrorCode::kLimitExceeded},
      {4, 1, with_batch(kMillion, 8192), ErrorCode::kLimitExceeded},
      {4, 2, with_batch(kMillion, 1 << 16), ErrorCode::kLimitExceeded},
  };
  for (const Case& one : kCases) {
    SCOPED_TRACE(fmt::format("{} x {}, {} rows, batch {}", one.nodes, one.locals, one.shape.seq_max,
                             one.shape.batch));
    const std::clock_t begin = std::clock();
    const auto tiling =
        cuda::planned_ring_tiling(one.nodes, one.locals, one.shape, 0, 132, *job, {});
    const double s = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    EXPECT_LT(s, 2) << "0.1 without sanitizers";
    ASSERT_TRUE(tiling) << tiling.error().message;
    const auto plan = RingAttentionPlan::make(one.nodes, one.locals, one.shape, *tiling);
    EXPECT_EQ(plan ? ErrorCode::kOk : plan.error().code, one.code);
    if (plan) continue;
    EXPECT_NE(plan.error().message.find("split the batch"), std::string::npos)
        << plan.error().message;
    plan::Problem problem;
    problem.op = plan::Op::kRing;
    problem.nodes = one.nodes;
    problem.locals = one.locals;
    problem.shape = {1 << 20, 128, 128};
    problem.heads = {8, one.shape.batch};
    const auto chosen = plan::choose(problem, job->machine);
    ASSERT_FALSE(chosen);
    EXPECT_EQ(chosen.error().code, ErrorCode::kLimitExceeded);
  }
}

TEST(Planned, TokensComeByWhatIsQuickerUnlessItIsNamed) {
  const auto job = job_plan_for("NVIDIA H200", 132);
  MoeDispatchShape shape{16 * 1024, 7168, 2048, 256, 8, 0, MoeEpilogue::kGatedSilu};
  CudaOptions options;
  std::uint32_t nodes = 1;
  std::uint32_t locals = 2;
  const auto engines = [&](std::uint32_t blocks = 132) {
    const auto way =
        cuda::planned_moe_way(nodes, locals, shape, DType::kBf16, blocks, *job, options);
    EXPECT_TRUE(way) << way.error().message;
    const auto plan = MoeDispatchPlan::make(nodes, locals, shape, DType::kBf16, {}, *way);
    EXPECT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->engines, way->engines);
    return way->engines;
  };
  EXPECT_TRUE(engines());
  options.dma = false;
  EXPECT_FALSE(engines());
  // Ranks that share a GPU, and several nodes, have them only if they are named.
  options.dma.reset();
  options.ranks_per_device = 2;
  EXPECT_FALSE(engines(65));
  options.dma = true;
  EXPECT_TRUE(engines(65));
  options.ranks_per_device = 1;
  nodes = 2;
  EXPECT_TRUE(engines());
  options.dma.reset();
  EXPECT_FALSE(engines());
  // A rank that is alone on its node has nobody to bring them to, whatever is named.
  locals = 1;
  options.dma = true;
  EXPECT_FALSE(engines());
}

TEST(Planned, WhatTheCallerNamedIsTakenAsItIs) {
  Draw draw(7);
  for (int round = 0; round < 1000; ++round) {
    Job job = draw_job(draw);
    job.options.ranks_per_device = 1;
    job.device = kDevice;
    job.lanes = 4;
    CudaOptions& options = job.options;
    if (draw.pick(0, 1) == 0) options.stream_groups = draw.pick(1, 60);
    if (draw.pick(0, 1) == 0) options.receive_groups = draw.pick(1, 60);
    if (draw.pick(0, 1) == 0) options.send_groups = draw.pick(1, 4);
    if (draw.pick(0, 1) == 0) options.compute_blocks = draw.pick(1, 40);
    Tiling named;
    if (draw.pick(0, 1) == 0) named.tile_n = 8 * draw.pick(1, 32);
    if (draw.pick(0, 1) == 0) named.chunk_bytes = draw.pick(1, 64) * 16384;
    SCOPED_TRACE(job.text());
    const auto made = run(job, 1, named);
    ASSERT_TRUE(made) << made.error().message;
    const auto& [planned, blocks, frame] = *made;
    if (options.compute_blocks != 0) {
      EXPECT_EQ(thread_blocks_of(blocks.compute), options.compute_blocks);
    }
    if (options.send_groups != 0 && job.of.nodes > 1) {
      EXPECT_EQ(warpgroups_of(blocks.send), options.send_groups);
    }
    if (options.receive_groups != 0 && blocks.receive != 0 && !planned.candidate.engines) {
      EXPECT_EQ(warpgroups_of(blocks.receive), options.receive_groups);
    }
    if (options.stream_groups != 0 && blocks.reduce != 0) {
      EXPECT_EQ(warpgroups_of(blocks.reduce), options.stream_groups);
    }
    if (options.stream_groups != 0 && blocks.share != 0) {
      EXPECT_EQ(cuda::groups_that_only_share(frame, blocks), options.stream_groups);
    }
    if (named.tile_n != 0) {
      EXPECT_EQ(planned.candidate.tiling.tile_n, named.tile_n);
    }
  }
}

// One text for all ranks, one choice on all.
TEST(Planned, EqualTextsGiveEqualChoices) {
  Draw draw(9);
  const auto of_job = job_plan_for("NVIDIA H100 80GB HBM3", kDevice);
  const auto read = plan::parse_job_plan(plan::job_plan_text(*of_job));
  ASSERT_TRUE(read) << read.error().message;
  const auto again = std::make_shared<const plan::JobPlan>(*read);
  for (int round = 0; round < 500; ++round) {
    const Job job = draw_job(draw);
    const auto tiling = [&](const plan::JobPlan& by) {
      return planned_tiling(job.op, job.of.nodes, job.of.locals, job.shape, DType::kBf16,
                            job.share(), by, job.options, {});
    };
    const auto one = tiling(*of_job);
    const auto other = tiling(*again);
    ASSERT_TRUE(one && other);
    const auto planned = [&](const auto& by) {
      return plan_launches(job.op, job.of, job.shape, DType::kBf16, *one, job.share(), 1,
                           job.options, by);
    };
    EXPECT_EQ(planned(of_job)->candidate, planned(again)->candidate) << job.text();
    EXPECT_EQ(one->tile_n, other->tile_n);
    EXPECT_EQ(one->chunk_bytes, other->chunk_bytes);
  }
}

// Operators that are no products: a launch's blocks are what explain() prints, in every world.
TEST(Planned, BlocksOfAccountedOperatorsAreTheExplainedOnes) {
  const auto job = job_plan_for("NVIDIA H200", kDevice);
  for (const plan::Op op : {plan::Op::kRing, plan::Op::kMoe, plan::Op::kCombine}) {
    for (const auto& [nodes, locals] :
         {std::pair{1u, 1u}, {1u, 2u}, {1u, 8u}, {2u, 1u}, {2u, 4u}, {4u, 1u}, {3u, 3u}}) {
      for (const std::uint32_t m : {96u, 4096u, 65536u}) {
        plan::Problem problem;
        problem.op = op;
        problem.nodes = nodes;
        problem.locals = locals;
        problem.shape = {m, 4096, 7168};
        if (op == plan::Op::kRing) problem.shape = {m, 16, 128};
        problem.experts = {256, 8};
        problem.named.form = Mode::kFused;
        SCOPED_TRACE(std::string(plan::name_of(op)) + " " + std::to_string(m) + " on " +
                     std::to_string(nodes) + " x " + std::to_string(locals));
        const auto explained = plan::choose(problem, job->machine, &job->tuned);
        ASSERT_TRUE(explained) << explained.error().message;
        const auto work = plan::work_by_plan(problem, plan::MachineKind::kGpu, {});
        ASSERT_TRUE(work);
        const auto groups = plan::chosen_groups(problem, job->machine, *work);
        cuda::FrameArguments frame;
        frame.pollers = problem.ranks() > 1 ? 1 : 0;
        RoleBlocks blocks;
        ASSERT_TRUE(cuda::choose_blocks("op", {}, cuda::accounted_needs(problem, groups), 4,
                                        kDevice, blocks, frame));
        const plan::Candidate& candidate = explained->candidate;
        EXPECT_EQ(blocks.compute, candidate.compute_blocks);
        EXPECT_EQ(blocks.receive, candidate.receive_warpgroups);
        EXPECT_EQ(blocks.send, candidate.send_warpgroups);
        const Warpgroups streams = op == plan::Op::kCombine
                                       ? warpgroups_of(blocks.reduce)
                                       : cuda::groups_that_only_share(frame, blocks);
        EXPECT_EQ(streams, candidate.stream_warpgroups);
        // What the kernels have words for.
        EXPECT_LE(streams, kBlocksMax);
        EXPECT_LE(blocks.receive, kBlocksMax);
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels
