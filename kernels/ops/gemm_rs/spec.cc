#include "kernels/ops/gemm_rs/spec.h"

#include <algorithm>

#include "kernels/comm/banks.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/shard.h"
#include "kernels/comm/sum_plan.h"
#include "kernels/ops/gemm_rs/schedule.h"

namespace mk::kernels {
namespace {

void lay_out(GemmRsPlan& plan) {
  GemmRsLayout& layout = plan.layout;
  const std::uint64_t locals = plan.locals;
  const std::uint64_t nodes = plan.nodes;
  const std::uint32_t rows = shard_rows_max(plan.max.m, plan.nodes * plan.locals);
  const std::uint64_t tiles_bytes = packed_bytes_max(plan, rows);
  WorkspaceLayout workspace(plan.locals);
  layout.tile_ready = workspace.place(locals * nodes * plan.tiles_max * 4, 64);
  layout.chunk_reduced = workspace.place(nodes > 1 ? nodes * plan.chunks_max * 4 : 0, 64);
  layout.region_bytes = round_up_to(tiles_bytes, 64);
  layout.bank_bytes = round_up_to(kBankHeaderBytes + tiles_bytes, kPage);
  workspace.begin_data();
  layout.slots = workspace.place(locals > 1 ? locals * nodes * layout.region_bytes : 0, kPage);
  layout.kept = workspace.place(nodes > 1 ? layout.region_bytes : 0, kPage);
  layout.staging = workspace.place(plan.banks * (nodes - 1) * layout.bank_bytes, kPage);
  layout.receive = workspace.place(plan.banks * (nodes - 1) * layout.bank_bytes, kPage);
  plan.workspace = workspace.parts();
  layout.bytes = plan.workspace.bytes();
}

}  // namespace

Result<GemmRsPlan> GemmRsPlan::make(std::uint32_t nodes, std::uint32_t locals, Shape max,
                                    DType dtype, const Tiling& tiling, const GemmResult& result,
                                    std::string_view op) {
  MK_ASSIGN_OR_RETURN(SumGeometry sums, begin_sums(op, nodes, locals, max, dtype, tiling, result));
  SumRules rules{op, shard_rows_max(max.m, nodes * locals)};
  rules.owned_grids = nodes;
  rules.grids = nodes * locals;
  rules.sent_grids = std::max(nodes - 1, 1u);
  MK_RETURN_IF_ERROR(choose_sums(rules, tiling, sums));
  GemmRsPlan plan;
  static_cast<SumGeometry&>(plan) = sums;
  lay_out(plan);
  MK_RETURN_IF_ERROR(check_workspace(op, plan.layout.bytes));
  return plan;
}

void GemmRsPlan::move_data(std::uint64_t by) {
  workspace.data_at += by;
  layout.slots += by;
  layout.kept += by;
  layout.staging += by;
  layout.receive += by;
}

std::uint32_t GemmRsPlan::flag_count() const { return flags().count(); }

LaunchWork GemmRsPlan::work(const World& world, std::uint32_t m, std::uint32_t k,
                            bool sums_once) const {
  const GemmRsSchedule schedule(*this, m);
  LaunchWork work;
  work.flops = 2.0 * m * max.n * k;
  // Read from each source, written once: sums over the node of one shard per node, then of its own
  // shard over the nodes, or of that all at once.
  const auto sum = [&](std::uint32_t node, std::uint32_t sources) {
    const PackedTiles packed = schedule.packed(world.rail_peer(node));
    work.local_bytes += static_cast<double>(packed.offset(packed.tiles()) * (sources + 1));
  };
  for (std::uint32_t node = 0; node < nodes && locals > 1; ++node) {
    if (node != world.node || !sums_once) sum(node, locals);
  }
  if (nodes > 1) sum(world.node, sums_once ? locals + nodes - 1 : nodes);
  work.network_bytes = static_cast<double>(schedule.network_bytes(world.node, world.local));
  work.steps = schedule.pieces(world.node, world.local);
  work.commands =
      schedule.pieces_sent(world.node, world.local) + (flags().has_releases() ? nodes - 1 : 0);
  return work;
}

std::uint64_t GemmRsPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 3;
  return sum_fingerprint(kRules, *this, layout.bytes);
}

}  // namespace mk::kernels
