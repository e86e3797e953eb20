#include "kernels/cuda/host/planned.h"

#include <cstdio>
#include <mutex>
#include <utility>

#include "kernels/plan/legal.h"

namespace mk::kernels::cuda {
namespace {

plan::Problem problem_of(plan::Op op, std::uint32_t nodes, std::uint32_t locals, const Shape& shape,
                         kernels::DType dtype, std::uint32_t blocks, const CudaOptions& options,
                         const Tiling& tiling) {
  plan::Problem problem;
  problem.op = op;
  problem.nodes = nodes;
  problem.locals = locals;
  problem.shape = shape;
  problem.dtype = dtype;
  problem.result = options.result;
  problem.blocks = blocks;
  problem.batch_invariant = options.batch_invariant;
  problem.ranks_per_device = options.ranks_per_device;
  problem.named.tiling = tiling;
  return problem;
}

/// For fused launches: all ranks agree on it.
Result<plan::Candidate> choose_transport(plan::Problem& problem, const plan::JobPlan& job,
                                         const CudaOptions& options) {
  problem.named.form = Mode::kFused;
  problem.named.engines = options.dma;
  if (options.dma == true) MK_RETURN_IF_ERROR(plan::check_row_engines(problem));
  MK_ASSIGN_OR_RETURN(const plan::Choice choice,
                      plan::choose(problem, plan::with_rates(job.machine, options.rates)));
  return choice.candidate;
}

}  // namespace

plan::Machine machine_of(const char* device_name, std::uint32_t sms) {
  plan::DerivedMachine derived = plan::machine_for_gpu(device_name, sms);
  static std::once_flag told;
  if (!derived.warning.empty())
    std::call_once(told, [&] { std::fprintf(stderr, "mkernel: %s\n", derived.warning.c_str()); });
  return std::move(derived.machine);
}

std::shared_ptr<const plan::JobPlan> job_plan_for(const char* device_name, std::uint32_t sms) {
  auto job = std::make_shared<plan::JobPlan>();
  job->machine = machine_of(device_name, sms);
  job->tuned = plan::shipped_tuned();
  return job;
}

Result<Tiling> planned_tiling(plan::Op op, std::uint32_t nodes, std::uint32_t locals,
                              const Shape& shape, kernels::DType dtype, std::uint32_t blocks,
                              const plan::JobPlan& job, const CudaOptions& options,
                              const Tiling& named) {
  plan::Problem problem = problem_of(op, nodes, locals, shape, dtype, blocks, options, named);
  // Each rank's own numbers of groups are of no concern to what all agree on.
  problem.named.form = Mode::kFused;
  MK_ASSIGN_OR_RETURN(
      const plan::Choice choice,
      plan::choose(problem, plan::with_rates(job.machine, options.rates), &job.tuned));
  return choice.candidate.tiling;
}

Result<RingAttentionTiling> planned_ring_tiling(std::uint32_t nodes, std::uint32_t locals,
                                                const RingAttentionShape& shape,
                                                std::uint32_t chunk_bytes, std::uint32_t blocks,
                                                const plan::JobPlan& job,
                                                const CudaOptions& options) {
  RingAttentionTiling tiling = ring_attention_cuda_tiling(shape);
  tiling.chunk_bytes = chunk_bytes;
  const bool engines = locals > 1 && options.dma != false;
  // The plan itself says better why it refuses.
  if (shape.key_heads == 0 || !RingAttentionPlan::make(nodes, locals, shape, tiling)) return tiling;
  const Shape extents{static_cast<std::uint32_t>(shape.seq_max), shape.query_heads, shape.head_dim};
  Tiling named;
  named.chunk_bytes = chunk_bytes;
  plan::Problem problem =
      problem_of(plan::Op::kRing, nodes, locals, extents, shape.dtype, blocks, options, named);
  problem.heads = {shape.key_heads, shape.batch, shape.causal, shape.sequences_max != 0};
  if (!engines && !plan::has_turns(problem)) return tiling;
  CudaOptions transport = options;
  if (!engines) transport.dma = false;
  MK_ASSIGN_OR_RETURN(const plan::Candidate chosen, choose_transport(problem, job, transport));
  tiling.engines = chosen.engines;
  tiling.heads_together = chosen.heads_together;
  tiling.turn_chunks = chosen.turn_chunks;
  return tiling;
}

Result<MoeDispatchWay> planned_moe_way(std::uint32_t nodes, std::uint32_t locals,
                                       const MoeDispatchShape& shape, kernels::DType dtype,
                                       std::uint32_t blocks, const plan::JobPlan& job,
                                       const CudaOptions& options) {
  MoeDispatchWay way = moe_dispatch_cuda_way(nodes);
  if (locals == 1 || options.dma == false) return way;
  // The plan itself says better why it refuses.
  if (!MoeDispatchPlan::make(nodes, locals, shape, dtype, {}, way)) return way;
  const Shape extents{shape.tokens_max * nodes * locals, shape.weight_columns(), shape.hidden};
  plan::Problem problem =
      problem_of(plan::Op::kMoe, nodes, locals, extents, dtype, blocks, options, {});
  problem.experts = {shape.experts, shape.top_k};
  MK_ASSIGN_OR_RETURN(const plan::Candidate chosen, choose_transport(problem, job, options));
  way.engines = chosen.engines;
  return way;
}

Result<plan::OperatorPlan> plan_launches(plan::Op op, const World& world, const Shape& shape,
                                         kernels::DType dtype, const Tiling& tiling,
                                         std::uint32_t blocks, std::uint32_t lanes,
                                         const CudaOptions& options,
                                         std::shared_ptr<const plan::JobPlan> job) {
  plan::Problem problem =
      problem_of(op, world.nodes, world.locals, shape, dtype, blocks, options, tiling);
  problem.lanes = lanes;
  plan::Named& named = problem.named;
  named.compute_blocks = options.compute_blocks;
  named.stream_warpgroups = options.stream_groups;
  named.receive_warpgroups = options.receive_groups;
  named.send_warpgroups = options.send_groups;
  if (op == plan::Op::kAgGemm && world.locals > 1) named.engines = options.dma;
  if (op == plan::Op::kGemmRs && world.nodes > 1 && world.locals > 1)
    named.sums_once = options.sums_once;
  return plan::plan_operator(problem, std::move(job), options.rates);
}

GroupNeeds planned_needs(const plan::OperatorPlan& planned) {
  const plan::Problem& problem = planned.problem;
  const plan::Candidate& candidate = planned.candidate;
  const bool gather = problem.op == plan::Op::kAgGemm;
  GroupNeeds needs;
  needs.streams = gather ? Role::kShare : Role::kReduce;
  needs.stream = gather ? problem.ranks() > 1 : problem.locals > 1;
  needs.send = problem.nodes > 1;
  needs.receive = problem.nodes > 1 && (!gather || problem.locals > 1);
  // What comes is passed on to the node's others when the rank's own rows are, which are needed
  // first.
  needs.receivers_stream = gather;
  needs.stream_groups = candidate.stream_warpgroups;
  needs.receive_groups = candidate.receive_warpgroups;
  if (problem.ranks() > 1) needs.planned_blocks = plan::blocks_outside(problem, candidate);
  return needs;
}

GroupNeeds accounted_needs(const plan::Problem& problem, const plan::AccountedGroups& groups) {
  const bool ring = problem.op == plan::Op::kRing;
  const std::uint32_t watchers = plan::watchers_of(problem);
  GroupNeeds needs;
  needs.streams = problem.op == plan::Op::kCombine ? Role::kReduce : Role::kShare;
  needs.stream = !ring || problem.ranks() > 1;
  needs.send = problem.nodes > 1;
  needs.receive = problem.op != plan::Op::kCombine && problem.nodes > 1 && problem.locals > 1;
  // Keys that come are passed on when the rank's own are.
  needs.receivers_stream = ring;
  needs.stream_groups = watchers + groups.stream;
  needs.receive_groups = groups.receive;
  needs.stream_least = ring ? watchers + 1 : 2;
  needs.watchers = watchers;
  return needs;
}

}  // namespace mk::kernels::cuda
