#include "kernels/ops/reduce_scatter/spec.h"

#include <fmt/format.h>

#include "kernels/comm/plan_tools.h"
#include "kernels/comm/shard.h"

namespace mk::kernels {
namespace {

constexpr std::string_view kOp = "reduce_scatter";

}  // namespace

Result<ReduceScatterPlan> ReduceScatterPlan::make(std::uint32_t nodes, std::uint32_t locals,
                                                  std::uint32_t m_max, std::uint32_t n, DType dtype,
                                                  const Tiling& tiling, Partials partials) {
  ReduceScatterPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.m_max = m_max;
  plan.n = n;
  plan.dtype = dtype;
  const bool f32 = dtype == DType::kF32;
  const GemmResult result{{}, f32 ? Partials::kF32 : partials};
  MK_ASSIGN_OR_RETURN(plan.sums, GemmRsPlan::make(nodes, locals, {m_max, n, 0},
                                                  f32 ? DType::kBf16 : dtype, tiling, result, kOp));
  plan.workspace = plan.sums.workspace;
  plan.workspace_bytes = plan.workspace.bytes();
  return plan;
}

Status ReduceScatterPlan::bind(const void* input, void* output, std::uint32_t m,
                               ReduceScatterLaunch& launch) const {
  const World& world = launch.context.world;
  const std::uint32_t rows = shard_of(m, world.size(), world.rank()).count;
  if (input == nullptr)
    return fail(ErrorCode::kInvalidArgument, "reduce_scatter: the input is null");
  if (output == nullptr && rows != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "reduce_scatter: the output is null, but of {} rows rank {} gets {}", m,
                world.rank(), rows);
  }
  launch.dtype = dtype;
  launch.input = static_cast<const std::byte*>(input);
  launch.output = static_cast<std::byte*>(output);
  return {};
}

LaunchWork ReduceScatterPlan::work(const World& world, std::uint32_t m) const {
  LaunchWork work = sums.work(world, m, 0);
  // The rows themselves, read once and written once, where GEMM+ReduceScatter has a product.
  work.local_bytes += 2.0 * m * n * bytes_of(dtype);
  return work;
}

std::uint64_t ReduceScatterPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 1;
  return fingerprint_of({kRules, static_cast<std::uint64_t>(dtype), sums.fingerprint()});
}

std::string ReduceScatterPlan::describe() const {
  return fmt::format(
      "m_max={} n={} dtype={} partials={} tiles={}x{} chunk_bytes={} banks={} "
      "plan={:016x}",
      m_max, n, name_of(dtype), name_of(sums.partials), sums.tile_m, sums.tile_n, sums.chunk_bytes,
      sums.banks, fingerprint());
}

}  // namespace mk::kernels
