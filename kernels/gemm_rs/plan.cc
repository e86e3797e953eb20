#include "kernels/gemm_rs/plan.h"

#include <algorithm>

#include "kernels/comm/banks.h"
#include "kernels/comm/launch_record.h"
#include "kernels/comm/shard.h"
#include "kernels/gemm_rs/schedule.h"

namespace mk::kernels {
namespace {

constexpr std::uint64_t kTilesMax = 1u << 30;  ///< of all shards
constexpr std::uint32_t kTilesWanted = 16;     ///< that one rank sums
constexpr std::uint32_t kChunksWanted = 8;     ///< that one rank sends

/// Of the largest shard of the largest launch.
std::uint64_t tile_count(const GemmRsPlan& plan) {
  const std::uint32_t rows = shard_rows_max(plan.max.m, plan.nodes * plan.locals);
  return std::uint64_t{div_up(rows, plan.tile_m)} * div_up(plan.max.n, plan.tile_n);
}

/// The largest packed tile of any launch: smaller shards may have taller tiles than the largest.
std::uint64_t tile_bytes_max(const GemmRsPlan& plan) {
  const std::uint32_t rows = shard_rows_max(plan.max.m, plan.nodes * plan.locals);
  const std::uint64_t cols = round_up_to(div_up(plan.max.n, div_up(plan.max.n, plan.tile_n)), 8);
  return std::min(plan.tile_m, rows) * cols * kElementBytes;
}

void choose_tiles(GemmRsPlan& plan, const Tiling& tiling) {
  // A rank sums its node's partials of one shard per node.
  const TileSides sides = choose_tile_sides(tiling, kTilesWanted, [&](const TileSides& tile) {
    plan.tile_m = tile.rows;
    plan.tile_n = tile.columns;
    return plan.nodes * tile_count(plan);
  });
  plan.tile_m = sides.rows;
  plan.tile_n = sides.columns;
}

void lay_out(GemmRsPlan& plan) {
  GemmRsLayout& layout = plan.layout;
  const std::uint64_t locals = plan.locals;
  const std::uint64_t nodes = plan.nodes;
  const std::uint64_t tiles_bytes = plan.tiles_max * tile_bytes_max(plan);
  WorkspaceLayout workspace(plan.locals);
  layout.tile_ready = workspace.place(locals * nodes * plan.tiles_max * 4, 64);
  layout.chunk_reduced = workspace.place(nodes > 1 ? nodes * plan.chunks_max * 4 : 0, 64);
  layout.region_bytes = round_up_to(tiles_bytes, 64);
  layout.bank_bytes = round_up_to(kBankHeaderBytes + tiles_bytes, kPage);
  layout.slots = workspace.place(locals > 1 ? locals * nodes * layout.region_bytes : 0, kPage);
  layout.kept = workspace.place(nodes > 1 ? layout.region_bytes : 0, kPage);
  layout.staging = workspace.place(plan.banks * (nodes - 1) * layout.bank_bytes, kPage);
  layout.receive = workspace.place(plan.banks * (nodes - 1) * layout.bank_bytes, kPage);
  layout.bytes = workspace.bytes();
}

}  // namespace

Result<GemmRsPlan> GemmRsPlan::make(std::uint32_t nodes, std::uint32_t locals, Shape max,
                                    DType dtype, const Tiling& tiling) {
  MK_RETURN_IF_ERROR(check_world("gemm_rs", nodes, locals));
  MK_RETURN_IF_ERROR(check_side("gemm_rs", "m", max.m));
  MK_RETURN_IF_ERROR(check_side("gemm_rs", "n", max.n));
  MK_RETURN_IF_ERROR(check_dtype("gemm_rs", dtype));
  MK_RETURN_IF_ERROR(check_tiling("gemm_rs", tiling));
  GemmRsPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.max = {max.m, max.n, 0};
  plan.dtype = dtype;
  plan.banks = tiling.banks != 0 ? tiling.banks : kBanksMax;
  choose_tiles(plan, tiling);
  const std::uint64_t all_tiles = tile_count(plan) * nodes * locals;
  if (all_tiles > kTilesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "gemm_rs: {} x {} in tiles of {} x {} are {} tiles; at most {}: use larger tiles",
                max.m, max.n, plan.tile_m, plan.tile_n, all_tiles, kTilesMax);
  }
  plan.tiles_max = static_cast<std::uint32_t>(tile_count(plan));
  // Smaller shards have no larger tiles and no more of them, hence no more chunks.
  const std::uint32_t wanted = div_up(kChunksWanted, std::max(nodes - 1, 1u));
  MK_ASSIGN_OR_RETURN(const Chunking chunking,
                      choose_chunks("gemm_rs", tiling, plan.tiles_max, tile_bytes_max(plan), wanted,
                                    nodes, plan.banks));
  plan.chunk_bytes = chunking.chunk_bytes;
  plan.chunks_max = chunking.chunks_max;
  lay_out(plan);
  MK_RETURN_IF_ERROR(check_workspace("gemm_rs", plan.layout.bytes));
  return plan;
}

std::uint32_t GemmRsPlan::flag_count() const { return FlagMap{nodes, banks, chunks_max}.count(); }

LaunchWork GemmRsPlan::work(const World& world, std::uint32_t m, std::uint32_t k) const {
  const GemmRsSchedule schedule(*this, m);
  LaunchWork work;
  work.flops = 2.0 * m * max.n * k;
  // Read from each source, written once: sums over the node of one shard per node, then of its own
  // shard over the nodes.
  for (std::uint32_t node = 0; node < nodes && locals > 1; ++node) {
    const PackedTiles packed = schedule.packed(world.rail_peer(node));
    work.local_bytes += static_cast<double>(packed.offset(packed.tiles()) * (locals + 1));
  }
  if (nodes > 1) {
    const PackedTiles own = schedule.packed(world.rank());
    work.local_bytes += static_cast<double>(own.offset(own.tiles()) * (nodes + 1));
  }
  work.network_bytes = static_cast<double>(schedule.network_bytes(world.node, world.local));
  work.steps = schedule.pieces(world.node, world.local);
  work.commands = schedule.pieces_sent(world.node, world.local) + nodes - 1;
  return work;
}

std::uint64_t GemmRsPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 1;
  return fingerprint_of({kRules, nodes, locals, max.m, max.n, static_cast<std::uint64_t>(dtype),
                         tile_m, tile_n, chunk_bytes, banks, layout.bytes});
}

}  // namespace mk::kernels
