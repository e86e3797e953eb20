#include "kernels/ops/gemm_ar/spec.h"

#include "kernels/comm/banks.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/sum_plan.h"
#include "kernels/ops/gemm_ar/schedule.h"

namespace mk::kernels {
namespace {

void lay_out(GemmArPlan& plan) {
  GemmArLayout& layout = plan.layout;
  const std::uint64_t locals = plan.locals;
  WorkspaceLayout workspace(plan.locals);
  const std::uint64_t tiles_bytes = packed_bytes_max(plan, plan.max.m);
  layout.tile_ready = workspace.place(locals * plan.tiles_max * 4, 64);
  layout.chunk_reduced = workspace.place(std::uint64_t{plan.chunks_max} * 4, 64);
  layout.out_ready = workspace.place(locals * plan.chunks_max * 4, 64);
  layout.slot_region_bytes = round_up_to(tiles_bytes, 64);
  layout.slots = workspace.place(locals > 1 ? locals * layout.slot_region_bytes : 0, kPage);
  layout.bank_bytes = round_up_to(kBankHeaderBytes + tiles_bytes, kPage);
  layout.staging = workspace.place(plan.nodes > 1 ? plan.banks * layout.bank_bytes : 0, kPage);
  layout.receive =
      workspace.place(std::uint64_t{plan.banks} * (plan.nodes - 1) * layout.bank_bytes, kPage);
  layout.out =
      workspace.place(std::uint64_t{plan.max.m} * plan.result_columns() * kElementBytes, kPage);
  layout.bytes = workspace.bytes();
}

}  // namespace

Result<GemmArPlan> GemmArPlan::make(std::uint32_t nodes, std::uint32_t locals, Shape max,
                                    DType dtype, const Tiling& tiling, const GemmResult& result) {
  MK_ASSIGN_OR_RETURN(SumGeometry sums,
                      begin_sums("gemm_ar", nodes, locals, max, dtype, tiling, result));
  SumRules rules{"gemm_ar", max.m};
  rules.owners = locals;
  MK_RETURN_IF_ERROR(choose_sums(rules, tiling, sums));
  GemmArPlan plan;
  static_cast<SumGeometry&>(plan) = sums;
  lay_out(plan);
  MK_RETURN_IF_ERROR(check_workspace("gemm_ar", plan.layout.bytes));
  return plan;
}

std::uint32_t GemmArPlan::flag_count() const { return flags().count(); }

LaunchWork GemmArPlan::work(const World& world, std::uint32_t m, std::uint32_t k) const {
  const GemmArSchedule schedule(*this, m);
  const double owned = static_cast<double>(schedule.owned(world.local) * schedule.slot_bytes());
  LaunchWork work;
  work.flops = 2.0 * m * max.n * k;
  // Read from each source, written to each target: sums over the node, then over the nodes.
  if (locals > 1) work.local_bytes += owned * (locals + (nodes > 1 ? 1 : locals));
  if (nodes > 1) work.local_bytes += owned * (nodes + locals);
  work.local_bytes += 2.0 * m * result_columns() * kElementBytes;  // copied to the caller
  work.network_bytes = static_cast<double>(schedule.network_bytes(world.local));
  work.steps = schedule.chunks(world.local);
  work.commands = (nodes - 1) * (work.steps + (flags().has_releases() ? 1 : 0));
  return work;
}

std::uint64_t GemmArPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 4;
  return sum_fingerprint(kRules, *this, layout.bytes);
}

}  // namespace mk::kernels
