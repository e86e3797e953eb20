#include "kernels/ops/gemm_ar/spec.h"

#include <algorithm>

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
  if (plan.two_shot)
    layout.chunk_finished = workspace.place(std::uint64_t{plan.rounds_max()} * 4, 64);
  workspace.begin_data();
  layout.slots = workspace.place(locals > 1 ? locals * layout.slot_region_bytes : 0, kPage);
  // A node's piece has at most its share of the tiles, rounded up, whatever the rounds are.
  const std::uint64_t tile_bytes = tiles_bytes / std::max(1u, plan.tiles_max);
  const std::uint64_t piece_tiles = div_up(plan.tiles_max, plan.planes());
  layout.bank_bytes =
      round_up_to(kBankHeaderBytes + piece_tiles * tile_bytes, plan.two_shot ? 64 : kPage);
  const std::uint64_t banks = plan.banks;
  layout.staging =
      workspace.place(plan.nodes > 1 ? banks * plan.planes() * layout.bank_bytes : 0, kPage);
  layout.receive = workspace.place(banks * (plan.nodes - 1) * layout.bank_bytes, kPage);
  if (plan.two_shot) {
    const std::uint64_t finished_tile = tile_bytes / bytes_of(plan.partials) * kElementBytes;
    layout.finished_bytes = round_up_to(piece_tiles * finished_tile, 64);
    layout.finished = workspace.place(banks * plan.nodes * layout.finished_bytes, kPage);
  }
  layout.out =
      workspace.place(std::uint64_t{plan.max.m} * plan.result_columns() * kElementBytes, kPage);
  plan.workspace = workspace.parts();
  layout.bytes = plan.workspace.bytes();
}

}  // namespace

Result<GemmArPlan> GemmArPlan::make(std::uint32_t nodes, std::uint32_t locals, Shape max,
                                    DType dtype, const Tiling& tiling, const GemmResult& result) {
  MK_ASSIGN_OR_RETURN(SumGeometry sums,
                      begin_sums("gemm_ar", nodes, locals, max, dtype, tiling, result));
  SumRules rules{"gemm_ar", max.m};
  rules.owners = locals;
  const bool two_shot = tiling.exchange == Exchange::kTwoShot;
  if (two_shot && nodes < 3) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm_ar: a two-shot exchange is for three nodes and more; here are {}: leave the "
                "choice to the planner",
                nodes);
  }
  if (two_shot) rules.chunk_nodes = nodes;
  MK_RETURN_IF_ERROR(choose_sums(rules, tiling, sums));
  GemmArPlan plan;
  static_cast<SumGeometry&>(plan) = sums;
  plan.two_shot = two_shot;
  // A round has a chunk of each node.
  if (two_shot) plan.chunks_max = div_up(sums.chunks_max, nodes) * nodes;
  lay_out(plan);
  MK_RETURN_IF_ERROR(check_workspace("gemm_ar", plan.layout.bytes));
  return plan;
}

void GemmArPlan::move_data(std::uint64_t by) {
  workspace.data_at += by;
  layout.slots += by;
  layout.staging += by;
  layout.receive += by;
  layout.finished += by;
  layout.out += by;
}

std::uint32_t GemmArPlan::flag_count() const { return flags().count(); }

LaunchWork GemmArPlan::work(const World& world, std::uint32_t m, std::uint32_t k) const {
  const GemmArSchedule schedule(*this, m);
  const double owned = static_cast<double>(schedule.owned(world.local) * schedule.slot_bytes());
  LaunchWork work;
  work.flops = 2.0 * m * max.n * k;
  // Read from each source, written to each target: sums over the node, then over the nodes.
  if (locals > 1) work.local_bytes += owned * (locals + (nodes > 1 ? 1 : locals));
  if (two_shot) {
    const double finished =
        static_cast<double>(schedule.owned(world.local) * schedule.finished_bytes());
    const double piece = schedule.pieces(world.local).piece_tiles(world.node);
    work.local_bytes += piece * static_cast<double>(schedule.slot_bytes() * nodes) +
                        piece * static_cast<double>(schedule.finished_bytes()) +
                        finished * (1 + locals);
  } else if (nodes > 1) {
    work.local_bytes += owned * (nodes + locals);
  }
  work.local_bytes += 2.0 * m * result_columns() * kElementBytes;  // copied to the caller
  work.network_bytes = static_cast<double>(schedule.network_bytes(world.node, world.local));
  // A finished chunk leaves a round after its sums.
  work.steps = two_shot ? schedule.pieces(world.local).rounds() + 1 : schedule.chunks(world.local);
  work.commands = schedule.sends(world.node, world.local);
  if (nodes > 1 && flags().has_releases()) work.commands += nodes - 1;
  return work;
}

std::uint64_t GemmArPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 5;
  return fingerprint_of({sum_fingerprint(kRules, *this, layout.bytes), two_shot ? 1u : 0u});
}

}  // namespace mk::kernels
