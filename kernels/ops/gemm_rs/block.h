/// \file
/// A block of GEMM+ReduceScatter: where its tiles lie, and what its flags mean. The roles
/// themselves are in roles.h. An owner's shards are named by their nodes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/sum_block.h"
#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_worker.h"
#include "kernels/ops/gemm_rs/launch.h"
#include "kernels/ops/gemm_rs/schedule.h"

namespace mk::kernels {

template <class Executor>
class GemmRsBlock : public SumBlock<Executor, GemmRsLaunch> {
 public:
  using Base = SumBlock<Executor, GemmRsLaunch>;
  using Base::at;
  using Base::await;
  using Base::bank;
  using Base::epoch;
  using Base::executor;
  using Base::own_tile_site;
  using Base::publish;
  using Base::publish_within_rank;
  using Base::rank_of;
  using Base::receive_bank;
  using Base::schedule;
  using Base::site;
  using Base::word;
  using Base::world;

  MK_HOST_DEVICE GemmRsBlock(Executor& executor_in, const GemmRsLaunch& launch_in, Role role_in,
                             std::uint32_t index_in, BlockTotals& totals_in)
      : Base(executor_in, launch_in, role_in, index_in, totals_in) {}

  // --- Places, in this rank's workspace where no other is named ---

  /// The sums for that node, packed; of its own shard: those it keeps.
  MK_HOST_DEVICE std::byte* sums_for(std::uint32_t node) const {
    if (node == world.node) return at(schedule.kept());
    return at(schedule.staging_bank(bank, world.node, node)) + kBankHeaderBytes;
  }
  /// Adds the local ranks' partials of a tile of this owner's shard of `node`, which is at `offset`
  /// of what is packed.
  MK_HOST_DEVICE void add_partials(SumJob& job, std::uint32_t node, std::uint64_t offset) const {
    for (std::uint32_t source = 0; source < world.locals; ++source)
      job.add_source(at(schedule.slots(source, node) + offset));
  }
  /// A sum of the tile of this owner's shard of `node` from packed sources, which the caller names,
  /// to `targets[0]`: the sums for that node, or, of the result, the caller's C.
  MK_HOST_DEVICE SumJob job_for(std::uint32_t node, std::uint32_t tile, bool result) const {
    const std::uint32_t rank = world.rail_peer(node);
    const TileGrid& grid = schedule.grid(rank);
    const TileRect rect = grid.rect(tile);
    SumJob job;
    job.rows = rect.rows;
    job.columns = rect.columns;
    job.source_stride = grid.tile_cols();
    job.source_type = this->launch.plan.partials;
    job.target_count = 1;
    if (result) {
      this->finish(job, rect);
      job.targets[0] = executor.c_at(schedule.result(rect));
      job.target_stride = executor.c_stride();
    } else {
      job.target_type = this->launch.plan.partials;
      job.targets[0] = sums_for(node) + this->launch.plan.tile_bytes(grid) * tile;
      job.target_stride = grid.tile_cols();
    }
    return job;
  }

  /// The first element of a tile's place; `stride`: from row to row, in elements.
  MK_HOST_DEVICE std::byte* address(const TilePlace& place, std::uint64_t* stride) const {
    const auto& plan = this->launch.plan;
    const std::uint64_t packed =
        std::uint64_t{place.rows} * place.columns * bytes_of(plan.partials) * place.tile;
    *stride = place.columns;
    switch (place.region) {
      case Region::kSlots:
        return at(place.local, schedule.slots(world.local, place.plane) + packed);
      case Region::kStaging:
        return sums_for(place.plane < world.node ? place.plane : place.plane + 1) + packed;
      case Region::kKept:
        return sums_for(world.node) + packed;
      default:
        *stride = executor.c_stride();
        return static_cast<std::byte*>(executor.c_at(schedule.result(place.rect)));
    }
  }
  /// The other local rank's partial of a tile of this rank's shard, whose place is in C.
  AccumulateJob accumulate_job(const TilePlace& place) const {
    AccumulateJob job;
    job.partial = at(schedule.slots(1 - world.local, world.node) +
                     schedule.packed(world.rank()).offset(place.tile));
    job.partial_stride = place.columns;
    job.target = address(place, &job.target_stride);
    job.rows = place.rect.rows;
    job.columns = place.rect.columns;
    return job;
  }

  // --- Shown by this block ---

  MK_HOST_DEVICE void publish_chunk_reduced(const GemmRsSchedule::Piece& piece) {
    publish_within_rank(piece_flag(piece));
  }

  // --- Awaited by this block; false: the launch has failed ---

  /// The tile's partials of all local ranks are in this owner's slots (one local rank: in staging,
  /// or kept).
  MK_HOST_DEVICE bool await_tile(std::uint32_t node, std::uint32_t tile) {
    return this->await_partials(tile, partial_flags(node, tile));
  }
  /// Those of the other local ranks of a tile of this rank's own shard; one node.
  MK_HOST_DEVICE bool await_others(std::uint32_t tile) {
    return this->await_other_partials(tile, partial_flags(world.node, tile));
  }
  /// This node's sums of the piece's `tiles` are in staging, or kept.
  MK_HOST_DEVICE bool await_piece(const GemmRsSchedule::Piece& piece, const TileRange& tiles) {
    if (world.locals > 1) return await([&] { return piece_site(piece); }, piece_flag(piece), epoch);
    return this->await_own_tiles(tiles, own_tile_flags(piece.node), own_tile_site());
  }
  /// Waits for a piece of those for a node, whose shard is `packed`, and answers how many of it and
  /// of the chunks `step`, 2 * `step`, ... after it are done then; `most` at most; 0: the launch
  /// has failed.
  MK_HOST_DEVICE std::uint32_t await_pieces(const GemmRsSchedule::Piece& first,
                                            const PackedTiles& packed, std::uint32_t most,
                                            std::uint32_t step) {
    const bool of_tiles = world.locals == 1;
    return this->await_chunks(packed, first.chunk, most, step, of_tiles,
                              own_tile_flags(first.node).first, piece_flag({first.node, 0}),
                              [&](std::uint32_t i) {
                                return of_tiles ? own_tile_site()(i) : piece_site({first.node, i});
                              });
  }

 private:
  /// Of a tile of this owner's shard of `node`, by the source.
  MK_HOST_DEVICE FlagRow partial_flags(std::uint32_t node, std::uint32_t tile) const {
    return {word(at(schedule.tile_ready(0, node, tile))), schedule.tile_ready_step()};
  }
  // Of a node with one rank.
  MK_HOST_DEVICE FlagRow own_tile_flags(std::uint32_t node) const {
    return {word(at(schedule.tile_ready(0, node, 0)))};
  }
  MK_HOST_DEVICE std::uint32_t* piece_flag(const GemmRsSchedule::Piece& piece) const {
    return word(at(schedule.chunk_reduced(piece.node, piece.chunk)));
  }
  MK_HOST_DEVICE WaitSite piece_site(const GemmRsSchedule::Piece& piece) const {
    return site(FlagKind::kChunkReduced, world.rank(), piece.chunk, piece.node, 1);
  }
};

}  // namespace mk::kernels
