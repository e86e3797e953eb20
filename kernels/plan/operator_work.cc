#include "kernels/plan/operator_work.h"

#include <algorithm>

#include "kernels/ops/ag_gemm/spec.h"
#include "kernels/ops/combine/schedule.h"
#include "kernels/ops/combine/spec.h"
#include "kernels/ops/gemm_ar/schedule.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "kernels/ops/moe/schedule.h"
#include "kernels/ops/moe/spec.h"
#include "kernels/ops/ring/schedule.h"
#include "kernels/ops/ring/spec.h"

namespace mk::kernels::plan {
namespace {

/// Rows of a rank's experts, as if all were alike.
std::uint32_t expert_rows(const Problem& problem) {
  return tokens_of_rank(problem) * problem.experts.top_k;
}

Result<RingAttentionPlan> ring_plan(const Problem& problem, MachineKind kind,
                                    const Candidate& candidate) {
  const Tiling& tiling = candidate.tiling;
  RingAttentionShape shape;
  shape.seq_max = problem.shape.m;
  shape.query_heads = problem.shape.n;
  shape.key_heads = problem.heads.key_heads != 0 ? problem.heads.key_heads : problem.shape.n;
  shape.head_dim = problem.shape.k;
  shape.causal = problem.heads.causal;
  shape.batch = std::max(1u, problem.heads.batch);
  shape.dtype = problem.dtype;
  shape.sequences_max = problem.heads.packed ? 1 : 0;
  RingAttentionTiling tiles;
  if (kind == MachineKind::kGpu) {
    tiles = ring_attention_cuda_tiling(shape);
  } else {
    tiles.tile_q = tiling.tile_m;
    tiles.tile_k = tiling.tile_n;
  }
  tiles.chunk_bytes = tiling.chunk_bytes;
  tiles.banks = tiling.banks;
  tiles.engines = candidate.engines;
  tiles.heads_together = candidate.heads_together;
  tiles.turn_chunks = candidate.turn_chunks;
  return RingAttentionPlan::make(problem.nodes, problem.locals, shape, tiles);
}

Result<MoeDispatchPlan> moe_plan(const Problem& problem, MachineKind kind,
                                 const Candidate& candidate) {
  MoeDispatchShape shape;
  shape.tokens_max = tokens_of_rank(problem);
  shape.hidden = problem.shape.k;
  shape.features = problem.shape.n;
  shape.experts = problem.experts.count;
  shape.top_k = problem.experts.top_k;
  MoeDispatchWay way =
      kind == MachineKind::kGpu ? moe_dispatch_cuda_way(problem.nodes) : MoeDispatchWay{};
  way.engines = candidate.engines;
  return MoeDispatchPlan::make(problem.nodes, problem.locals, shape, problem.dtype,
                               candidate.tiling, way);
}

Result<CombinePlan> combine_plan(const Problem& problem, const Tiling& tiling) {
  CombineShape shape;
  shape.tokens_max = tokens_of_rank(problem);
  shape.hidden = problem.shape.n;
  shape.features = problem.shape.k;
  shape.experts = problem.experts.count;
  shape.top_k = problem.experts.top_k;
  if (problem.result.partials == Partials::kF32) shape.partials = CombinePartials::kF32;
  return CombinePlan::make(problem.nodes, problem.locals, shape, problem.dtype, tiling);
}

/// `use(plan, ask)`: with the operator's plan, or why there is none, and with what its account is
/// asked by.
template <class Use>
auto with_plan(const Problem& problem, MachineKind kind, const Candidate& candidate, Use&& use) {
  const World world{problem.nodes, problem.locals, 0, 0};
  const Shape& shape = problem.shape;
  const Tiling& tiling = candidate.tiling;
  switch (problem.op) {
    case Op::kAgGemm:
      return use(AgGemmPlan::make(problem.nodes, problem.locals, shape, problem.dtype, tiling),
                 [&](const AgGemmPlan& plan) { return plan.work(world, shape.m); });
    case Op::kGemmRs:
      return use(GemmRsPlan::make(problem.nodes, problem.locals, shape, problem.dtype, tiling,
                                  problem.result),
                 [&](const GemmRsPlan& plan) {
                   return plan.work(world, shape.m, shape.k, candidate.sums == Sums::kOnce);
                 });
    case Op::kGemmAr:
      return use(GemmArPlan::make(problem.nodes, problem.locals, shape, problem.dtype, tiling,
                                  problem.result),
                 [&](const GemmArPlan& plan) { return plan.work(world, shape.m, shape.k); });
    case Op::kRing:
      return use(ring_plan(problem, kind, candidate),
                 [&](const RingAttentionPlan& plan) { return plan.work(world, shape.m); });
    case Op::kMoe:
      return use(moe_plan(problem, kind, candidate), [&](const MoeDispatchPlan& plan) {
        return plan.work(world, tokens_of_rank(problem));
      });
    case Op::kCombine:
      break;
  }
  return use(combine_plan(problem, tiling), [&](const CombinePlan& plan) {
    return plan.work(expert_rows(problem), tokens_of_rank(problem));
  });
}

}  // namespace

std::uint32_t tokens_of_rank(const Problem& problem) {
  return div_up(problem.shape.m, problem.ranks());
}

Status check_plan(const Problem& problem, MachineKind kind, const Tiling& tiling) {
  Candidate candidate;
  candidate.tiling = tiling;
  return with_plan(problem, kind, candidate, [](const auto& plan, const auto&) {
    return plan ? Status{} : Status(propagate(plan));
  });
}

Result<LaunchWork> work_by_plan(const Problem& problem, MachineKind kind,
                                const Candidate& candidate) {
  return with_plan(problem, kind, candidate,
                   [](const auto& plan, const auto& ask) -> Result<LaunchWork> {
                     if (!plan) return propagate(plan);
                     return ask(*plan);
                   });
}

Result<OperatorMemory> memory_by_plan(const Problem& problem, MachineKind kind,
                                      const Candidate& candidate) {
  return with_plan(problem, kind, candidate,
                   [](const auto& plan, const auto&) -> Result<OperatorMemory> {
                     if (!plan) return propagate(plan);
                     if constexpr (requires { plan->workspace_bytes(); }) {
                       return OperatorMemory{plan->workspace_bytes(), plan->flag_count()};
                     } else {
                       return OperatorMemory{plan->workspace_bytes, plan->flag_count()};
                     }
                   });
}

Result<OrderNumbers> order_numbers(const Problem& problem, MachineKind kind,
                                   const Candidate& candidate) {
  const World world{problem.nodes, problem.locals, 0, 0};
  const std::uint32_t tokens = tokens_of_rank(problem);
  OrderNumbers numbers;
  if (problem.op == Op::kRing) {
    MK_ASSIGN_OR_RETURN(const RingAttentionPlan plan, ring_plan(problem, kind, candidate));
    const RingAttentionSchedule schedule(plan, world, problem.shape.m, Mode::kFused);
    numbers.chunks = schedule.gather().chunks(schedule.gathered_rows(0)) - 1;
    numbers.turn_chunks = plan.gather.turn_chunks;
  } else if (problem.op == Op::kMoe) {
    MK_ASSIGN_OR_RETURN(const MoeDispatchPlan plan, moe_plan(problem, kind, candidate));
    const MoeDispatchSchedule schedule(plan, world);
    numbers.chunks = schedule.tokens().chunks(tokens) - 1;
    numbers.table_chunks = schedule.routing().chunks(tokens) - 1;
    numbers.tile_rows = plan.tile_m;
    numbers.column_tiles = schedule.column_tiles();
  } else if (problem.op == Op::kCombine) {
    MK_ASSIGN_OR_RETURN(const CombinePlan plan, combine_plan(problem, candidate.tiling));
    const CombineSchedule schedule(plan, world);
    numbers.chunk_tokens = plan.chunk_tokens;
    numbers.tile_rows = plan.tile_m;
    numbers.column_tiles = schedule.column_tiles();
    numbers.tile_columns = plan.tile_n;
  }
  if (problem.op == Op::kGemmAr) {
    MK_ASSIGN_OR_RETURN(const GemmArPlan plan,
                        GemmArPlan::make(problem.nodes, problem.locals, problem.shape,
                                         problem.dtype, candidate.tiling, problem.result));
    numbers.chunk_tiles = GemmArSchedule(plan, problem.shape.m).tiles_per_chunk();
  }
  return numbers;
}

Problem of_one_window(const Problem& problem, MachineKind kind, const Candidate& candidate) {
  const auto plan = ring_plan(problem, kind, candidate);
  if (!plan || plan->windows() == 1) return problem;
  const HeadWindow heads = plan->window(0);
  Problem one = problem;
  one.heads.batch = heads.batches;
  one.heads.key_heads = heads.key_heads;
  one.shape.n = heads.key_heads * plan->group();
  return one;
}

double expert_bytes(const Problem& problem) {
  if (problem.op != Op::kMoe && problem.op != Op::kCombine) return 0;
  const double here = div_up(problem.experts.count, problem.ranks());
  return std::min<double>(here, expert_rows(problem)) * problem.shape.n * problem.shape.k *
         kElementBytes;
}

}  // namespace mk::kernels::plan
