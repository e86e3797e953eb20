/// \file
/// A block of GEMM+AllReduce: where its tiles lie, and what its flags mean. The roles themselves
/// are in roles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/sum_block.h"
#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_worker.h"
#include "kernels/ops/gemm_ar/launch.h"
#include "kernels/ops/gemm_ar/schedule.h"

namespace mk::kernels {

template <class Executor>
class GemmArBlock : public SumBlock<Executor, GemmArLaunch> {
 public:
  using Base = SumBlock<Executor, GemmArLaunch>;
  using Base::at;
  using Base::await;
  using Base::bank;
  using Base::epoch;
  using Base::own_tile_site;
  using Base::publish;
  using Base::publish_at_every_local;
  using Base::publish_within_rank;
  using Base::rank_of;
  using Base::receive_bank;
  using Base::schedule;
  using Base::site;
  using Base::word;
  using Base::world;

  MK_HOST_DEVICE GemmArBlock(Executor& executor_in, const GemmArLaunch& launch_in, Role role_in,
                             std::uint32_t index_in, BlockTotals& totals_in)
      : Base(executor_in, launch_in, role_in, index_in, totals_in) {}

  // --- Places, in this rank's workspace where no other is named ---

  MK_HOST_DEVICE std::byte* staging_slot(const NodePieces::Place& place) const {
    return at(schedule.staging_bank(bank, place.node) + schedule.slot_in_bank(place.tile));
  }
  MK_HOST_DEVICE std::byte* staging_slot(std::uint32_t owned) const {
    return staging_slot(schedule.place_in_bank(world.local, owned));
  }
  /// Where a tile that this node adds up lies in a receive bank.
  MK_HOST_DEVICE std::uint64_t offset_in_bank(std::uint32_t owned) const {
    return schedule.slot_in_bank(schedule.place_in_bank(world.local, owned).tile);
  }
  /// Two-shot: what one node of the rail makes of the tile.
  MK_HOST_DEVICE std::byte* finished_slot(std::uint32_t owned) const {
    const NodePieces::Place place = schedule.place_in_bank(world.local, owned);
    return at(schedule.finished_bank(bank, place.node) + place.tile * schedule.finished_bytes());
  }
  /// A sum of this owner's tile from packed sources, which the caller names, with no target yet.
  MK_HOST_DEVICE SumJob job_for(std::uint32_t owned) const {
    const TileRect rect = schedule.rect(schedule.tile_of(world.local, owned));
    SumJob job;
    job.source_stride = schedule.tile_cols();
    job.source_type = this->launch.plan.partials;
    job.rows = rect.rows;
    job.columns = rect.columns;
    return job;
  }
  MK_HOST_DEVICE void aim_at_staging(SumJob& job, std::uint32_t owned) const {
    job.target_count = 1;
    job.targets[0] = staging_slot(owned);
    job.target_type = this->launch.plan.partials;
    job.target_stride = schedule.tile_cols();
  }
  /// The tile's sum over all ranks, to its place in C of every local rank.
  MK_HOST_DEVICE void aim_at_every_c(SumJob& job, std::uint32_t owned) const {
    const TileRect rect = schedule.rect(schedule.tile_of(world.local, owned));
    this->finish(job, rect);
    aim_at_rect_of_every_c(job, rect);
  }
  /// That sum, to where what is finished lies packed.
  MK_HOST_DEVICE void aim_at_finished(SumJob& job, std::uint32_t owned) const {
    this->finish(job, schedule.rect(schedule.tile_of(world.local, owned)));
    job.target_count = 1;
    job.targets[0] = finished_slot(owned);
    job.target_stride = schedule.finished_cols();
  }
  /// Copies the finished tile to C of every local rank.
  MK_HOST_DEVICE SumJob copy_of_finished(std::uint32_t owned) const {
    const TileRect rect = schedule.rect(schedule.tile_of(world.local, owned));
    const TileRect result = schedule.result(rect);
    SumJob job;
    job.add_source(finished_slot(owned));
    job.source_stride = schedule.finished_cols();
    job.rows = result.rows;
    job.columns = result.columns;
    aim_at_rect_of_every_c(job, rect);
    return job;
  }
  /// The own one first, so that each owner starts elsewhere.
  MK_HOST_DEVICE void aim_at_rect_of_every_c(SumJob& job, const TileRect& rect) const {
    const std::uint64_t out = schedule.out(rect);
    job.target_count = world.locals;
    job.target_stride = this->launch.plan.result_columns();
    for (std::uint32_t i = 0; i < world.locals; ++i)
      job.targets[i] = at((world.local + i) % world.locals, out);
  }

  /// The first element of a tile's place; `stride`: from row to row, in elements.
  std::byte* address(const TilePlace& place, std::uint64_t* stride) const {
    *stride = place.columns;
    switch (place.region) {
      case Region::kSlots:
        return at(place.local, schedule.slot(world.local, place.tile));
      case Region::kStaging:
        return staging_slot(NodePieces::Place{place.plane, place.tile});
      default:
        *stride = this->launch.plan.result_columns();
        return at(place.local, schedule.out(place.rect));
    }
  }
  /// The other local rank's partial of a tile of this rank's, whose place is in this rank's C; the
  /// sum goes to the other's, too.
  AccumulateJob accumulate_job(const TilePlace& place) const {
    const std::uint32_t other = 1 - world.local;
    AccumulateJob job;
    job.partial = at(schedule.slot(other, place.tile));
    job.partial_stride = place.columns;
    job.target = address(place, &job.target_stride);
    job.copies[0] = at(other, schedule.out(place.rect));
    job.copy_count = 1;
    job.rows = place.rect.rows;
    job.columns = place.rect.columns;
    return job;
  }

  // --- Shown by this block ---

  MK_HOST_DEVICE void publish_chunk_reduced(std::uint32_t chunk) {
    publish_within_rank(reduced_flag(chunk));
  }
  MK_HOST_DEVICE void publish_chunk_finished(std::uint32_t chunk) {
    publish_within_rank(finished_flag(chunk));
  }
  MK_HOST_DEVICE void publish_out_ready(std::uint32_t chunk) {
    publish_at_every_local(schedule.out_ready(world.local, chunk));
  }

  // --- Awaited by this block; false: the launch has failed ---

  /// The tile's partials of all local ranks are in this owner's slots (one local rank: in staging,
  /// or in C).
  MK_HOST_DEVICE bool await_tile(std::uint32_t owned) {
    return this->await_partials(owned, partial_flags(owned));
  }
  /// Those of the other local ranks; one node.
  MK_HOST_DEVICE bool await_others(std::uint32_t owned) {
    return this->await_other_partials(owned, partial_flags(owned));
  }
  /// This node's sums of the chunk's `tiles` are in staging.
  MK_HOST_DEVICE bool await_chunk_reduced(std::uint32_t chunk, const TileRange& tiles) {
    if (world.locals == 1) return await_own(tiles);
    return await([&] { return reduced_site(chunk); }, reduced_flag(chunk), epoch);
  }
  /// Waits for that of chunk `first`, and answers for how many of it and of the chunks `step`, 2 *
  /// `step`, ... after it it is there then, `most` at most; 0: the launch has failed.
  MK_HOST_DEVICE std::uint32_t await_chunks_reduced(std::uint32_t first, std::uint32_t most,
                                                    std::uint32_t step) {
    const bool of_tiles = world.locals == 1;
    return this->await_chunks(schedule.packed(world.local), first, most, step, of_tiles,
                              own_tile_flags().first, reduced_flag(0), [&](std::uint32_t i) {
                                return of_tiles ? own_tile_site()(i) : reduced_site(i);
                              });
  }
  /// The node's sum of a chunk that this node adds up.
  MK_HOST_DEVICE bool await_sum_of(std::uint32_t node, std::uint32_t chunk) {
    return this->await_arrival(
        node, chunk, schedule.two_shot() ? schedule.sums_flag(chunk / world.nodes) : chunk);
  }
  /// Two-shot: the chunk is finished, and here.
  MK_HOST_DEVICE bool await_finished_chunk(std::uint32_t chunk) {
    const std::uint32_t node = chunk % world.nodes;
    // This rank may wait for another node's sums.
    if (node == world.node)
      return await([&] { return site_of_finished(chunk); }, finished_flag(chunk), epoch);
    const std::uint32_t flag = schedule.flags().arrival(
        bank, world.node, node, schedule.finished_flag(chunk / world.nodes));
    // That node may wait for another.
    return await([&] { return site(FlagKind::kArrival, world.rail_peer(node), node, chunk, 2); },
                 this->common.context.arrival_flags + flag, epoch);
  }
  /// The owner's chunk of C is here.
  MK_HOST_DEVICE bool await_out(std::uint32_t owner, std::uint32_t chunk) {
    if (world.size() == 1) return await_own(schedule.chunk_tiles(0, chunk));
    const std::uint32_t hops = schedule.two_shot() ? 3 : 2;
    return await([&] { return site(FlagKind::kOutReady, rank_of(owner), owner, chunk, hops); },
                 word(at(schedule.out_ready(owner, chunk))), epoch);
  }

  // --- Looked at, without a wait; what is seen is acquired ---

  MK_HOST_DEVICE bool sees_finished(std::uint32_t chunk) const {
    return shows(finished_flag(chunk));
  }
  /// This node's sums of the chunk's tiles from `*seen` on are in staging. Where tiles have flags,
  /// `*seen` moves on to the first that is not.
  MK_HOST_DEVICE bool sees_reduced(std::uint32_t chunk, const TileRange& tiles,
                                   std::uint32_t* seen) const {
    if (world.locals > 1) return shows(reduced_flag(chunk));
    for (; *seen < tiles.end; ++*seen)
      if (!shows(own_tile_flags()(*seen))) return false;
    return true;
  }
  /// Where a look for that is told: of tile `seen`, or of the chunk.
  MK_HOST_DEVICE WaitSite site_of_reduced(std::uint32_t chunk, std::uint32_t seen) const {
    return world.locals > 1 ? reduced_site(chunk) : own_tile_site()(seen);
  }
  MK_HOST_DEVICE WaitSite site_of_finished(std::uint32_t chunk) const {
    return site(FlagKind::kChunkReduced, world.rank(), chunk, 0, 2);
  }

 private:
  /// Of this owner's tile, by the source.
  MK_HOST_DEVICE FlagRow partial_flags(std::uint32_t owned) const {
    return {word(at(schedule.tile_ready(0, owned))), schedule.tile_ready_step()};
  }
  MK_HOST_DEVICE bool shows(const std::uint32_t* flag) const {
    return shm::epoch_reached(shm::load_acquire(flag), epoch);
  }
  MK_HOST_DEVICE std::uint32_t* finished_flag(std::uint32_t chunk) const {
    return word(at(schedule.chunk_finished(chunk / world.nodes)));
  }
  MK_HOST_DEVICE std::uint32_t* reduced_flag(std::uint32_t chunk) const {
    return word(at(schedule.chunk_reduced(chunk)));
  }
  MK_HOST_DEVICE WaitSite reduced_site(std::uint32_t chunk) const {
    return site(FlagKind::kChunkReduced, world.rank(), chunk, 0, 1);
  }
  // Of a node with one rank.
  MK_HOST_DEVICE FlagRow own_tile_flags() const { return {word(at(schedule.tile_ready(0, 0)))}; }
  MK_HOST_DEVICE bool await_own(const TileRange& tiles) {
    return this->await_own_tiles(tiles, own_tile_flags(), own_tile_site());
  }
};

}  // namespace mk::kernels
