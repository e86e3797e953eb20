#include "kernels/gemm_ar/plan.h"

#include <algorithm>

#include "kernels/comm/banks.h"
#include "kernels/comm/launch_record.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/gemm_ar/schedule.h"

namespace mk::kernels {
namespace {

constexpr std::uint64_t kTilesMax = 1u << 30;
constexpr std::uint32_t kTilesWanted = 16;  ///< of one owner
constexpr std::uint32_t kChunksWanted = 8;  ///< of one owner

std::uint64_t tile_count(const GemmArPlan& plan) {
  return std::uint64_t{div_up(plan.max.m, plan.tile_m)} * div_up(plan.max.n, plan.tile_n);
}

/// The largest packed tile of any launch. Launches with smaller m may have larger tiles than the
/// largest launch (m = 129 gives two tiles of 65 rows, m = 128 one of 128), so this is the tile's
/// limit, not the largest launch's tile.
std::uint64_t slot_bytes_max(const GemmArPlan& plan) {
  const std::uint64_t cols = round_up_to(div_up(plan.max.n, div_up(plan.max.n, plan.tile_n)), 8);
  return std::min(plan.tile_m, plan.max.m) * cols * kElementBytes;
}

void choose_tiles(GemmArPlan& plan, const GemmArTiling& tiling) {
  const TileSides sides = choose_tile_sides(
      tiling, std::uint64_t{kTilesWanted} * plan.locals, [&](const TileSides& tile) {
        return std::uint64_t{div_up(plan.max.m, tile.rows)} * div_up(plan.max.n, tile.columns);
      });
  plan.tile_m = sides.rows;
  plan.tile_n = sides.columns;
}

void lay_out(GemmArPlan& plan) {
  GemmArLayout& layout = plan.layout;
  const std::uint64_t locals = plan.locals;
  WorkspaceLayout workspace(plan.locals);
  const std::uint64_t tiles_bytes = plan.owned_max * slot_bytes_max(plan);
  layout.tile_ready = workspace.place(locals * plan.owned_max * 4, 64);
  layout.chunk_reduced = workspace.place(std::uint64_t{plan.chunks_max} * 4, 64);
  layout.out_ready = workspace.place(locals * plan.chunks_max * 4, 64);
  layout.slot_region_bytes = round_up_to(tiles_bytes, 64);
  layout.slots = workspace.place(locals > 1 ? locals * layout.slot_region_bytes : 0, kPage);
  layout.bank_bytes = round_up_to(kBankHeaderBytes + tiles_bytes, kPage);
  layout.staging = workspace.place(plan.nodes > 1 ? plan.banks * layout.bank_bytes : 0, kPage);
  layout.receive =
      workspace.place(std::uint64_t{plan.banks} * (plan.nodes - 1) * layout.bank_bytes, kPage);
  layout.out = workspace.place(std::uint64_t{plan.max.m} * plan.max.n * kElementBytes, kPage);
  layout.bytes = workspace.bytes();
}

}  // namespace

Result<GemmArPlan> GemmArPlan::make(std::uint32_t nodes, std::uint32_t locals, Shape max,
                                    DType dtype, const GemmArTiling& tiling) {
  MK_RETURN_IF_ERROR(check_world("gemm_ar", nodes, locals));
  MK_RETURN_IF_ERROR(check_side("gemm_ar", "m", max.m));
  MK_RETURN_IF_ERROR(check_side("gemm_ar", "n", max.n));
  MK_RETURN_IF_ERROR(check_dtype("gemm_ar", dtype));
  MK_RETURN_IF_ERROR(check_tiling("gemm_ar", tiling));
  GemmArPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.max = {max.m, max.n, 0};
  plan.dtype = dtype;
  plan.banks = tiling.banks != 0 ? tiling.banks : kBanksMax;
  choose_tiles(plan, tiling);
  if (tile_count(plan) > kTilesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "gemm_ar: {} x {} in tiles of {} x {} are {} tiles; at most {}: use larger tiles",
                max.m, max.n, plan.tile_m, plan.tile_n, tile_count(plan), kTilesMax);
  }
  plan.owned_max = static_cast<std::uint32_t>((tile_count(plan) + plan.locals - 1) / plan.locals);
  // Launches with smaller m have no larger tiles and no more of them, hence no more chunks.
  MK_ASSIGN_OR_RETURN(const Chunking chunking,
                      choose_chunks("gemm_ar", tiling, plan.owned_max, slot_bytes_max(plan),
                                    kChunksWanted, nodes, plan.banks));
  plan.chunk_bytes = chunking.chunk_bytes;
  plan.chunks_max = chunking.chunks_max;
  lay_out(plan);
  MK_RETURN_IF_ERROR(check_workspace("gemm_ar", plan.layout.bytes));
  return plan;
}

std::uint32_t GemmArPlan::flag_count() const { return FlagMap{nodes, banks, chunks_max}.count(); }

LaunchWork GemmArPlan::work(const World& world, std::uint32_t m, std::uint32_t k) const {
  const GemmArSchedule schedule(*this, m);
  const double owned = static_cast<double>(schedule.owned(world.local) * schedule.slot_bytes());
  LaunchWork work;
  work.flops = 2.0 * m * max.n * k;
  // Read from each source, written to each target: sums over the node, then over the nodes.
  if (locals > 1) work.local_bytes += owned * (locals + (nodes > 1 ? 1 : locals));
  if (nodes > 1) work.local_bytes += owned * (nodes + locals);
  work.local_bytes += 2.0 * m * max.n * kElementBytes;  // copied to the caller
  work.network_bytes = static_cast<double>(schedule.network_bytes(world.local));
  work.steps = schedule.chunks(world.local);
  work.commands = (nodes - 1) * (work.steps + 1);
  return work;
}

std::uint64_t GemmArPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 2;
  return fingerprint_of({kRules, nodes, locals, max.m, max.n, static_cast<std::uint64_t>(dtype),
                         tile_m, tile_n, chunk_bytes, banks, layout.bytes});
}

}  // namespace mk::kernels
