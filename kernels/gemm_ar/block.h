/// \file
/// A block of GEMM + AllReduce: where its tiles lie, and what its flags mean. The roles themselves
/// are in roles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/block.h"
#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/launch_record.h"
#include "kernels/comm/sum_job.h"
#include "kernels/gemm_ar/launch.h"
#include "kernels/gemm_ar/schedule.h"

namespace mk::kernels {

template <class Executor>
class GemmArBlock : public Block<Executor> {
 public:
  using Block<Executor>::publish;
  using Block<Executor>::await;
  using Block<Executor>::site;
  using Block<Executor>::executor;
  using Block<Executor>::control;
  using Block<Executor>::totals;
  using Block<Executor>::role;
  using Block<Executor>::index;
  using Block<Executor>::epoch;

  MK_HOST_DEVICE GemmArBlock(Executor& executor_in, const GemmArLaunch& launch_in, Role role_in,
                             std::uint32_t index_in, BlockTotals& totals_in)
      : Block<Executor>(executor_in, launch_in.control, totals_in, role_in, index_in,
                        launch_in.epoch),
        launch(launch_in),
        world(launch_in.context.world),
        schedule(launch_in.plan, launch_in.m),
        banks(launch_in.plan.banks),
        bank(bank_of(launch_in.epoch, launch_in.plan.banks)) {}

  const GemmArLaunch& launch;
  const World world;
  const GemmArSchedule schedule;
  const std::uint32_t banks;
  const std::uint32_t bank;  ///< of this launch

  // --- Places, in this rank's workspace where no other is named ---

  MK_HOST_DEVICE std::byte* at(std::uint32_t local, std::uint64_t offset) const {
    return launch.context.workspaces[local] + offset;
  }
  MK_HOST_DEVICE std::byte* at(std::uint64_t offset) const { return at(world.local, offset); }
  MK_HOST_DEVICE std::byte* staging_slot(std::uint32_t owned) const {
    return at(schedule.staging_bank(bank) + schedule.slot_in_bank(owned));
  }
  MK_HOST_DEVICE std::byte* receive_bank(std::uint32_t from) const {
    return at(schedule.receive_bank(bank, world.node, from));
  }
  MK_HOST_DEVICE std::byte* receive_slot(std::uint32_t from, std::uint32_t owned) const {
    return receive_bank(from) + schedule.slot_in_bank(owned);
  }
  MK_HOST_DEVICE static std::uint32_t* word(std::byte* address) {
    return reinterpret_cast<std::uint32_t*>(address);
  }
  MK_HOST_DEVICE std::uint32_t rank_of(std::uint32_t local) const {
    return world.node * world.locals + local;
  }

  /// A sum of this owner's tile from packed sources, which the caller names, with no target yet.
  MK_HOST_DEVICE SumJob job_for(std::uint32_t owned) const {
    const TileRect rect = schedule.rect(schedule.tile_of(world.local, owned));
    SumJob job;
    job.source_stride = schedule.tile_cols();
    job.rows = rect.rows;
    job.columns = rect.columns;
    return job;
  }
  MK_HOST_DEVICE void aim_at_staging(SumJob& job, std::uint32_t owned) const {
    job.target_count = 1;
    job.targets[0] = staging_slot(owned);
    job.target_stride = schedule.tile_cols();
  }
  /// The tile's place in C of every local rank; own first, so that each owner starts elsewhere.
  MK_HOST_DEVICE void aim_at_every_c(SumJob& job, std::uint32_t owned) const {
    const std::uint64_t out = schedule.out(schedule.rect(schedule.tile_of(world.local, owned)));
    job.target_count = world.locals;
    job.target_stride = launch.plan.max.n;
    for (std::uint32_t i = 0; i < world.locals; ++i)
      job.targets[i] = at((world.local + i) % world.locals, out);
  }

  // --- Shown by this block ---

  MK_HOST_DEVICE void publish_tile_ready(std::uint32_t owner, std::uint32_t owned) {
    publish(word(at(owner, schedule.tile_ready(world.local, owned))));
  }
  MK_HOST_DEVICE void publish_chunk_reduced(std::uint32_t chunk) {
    publish(word(at(schedule.chunk_reduced(chunk))));
  }
  MK_HOST_DEVICE void publish_out_ready(std::uint32_t chunk) {
    executor.stores_done();
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      std::uint32_t* flag = word(at(local, schedule.out_ready(world.local, chunk)));
      // A release costs a fence, on a GPU most of a microsecond: one is enough for all flags.
      if constexpr (requires { executor.release_fence(); }) {
        if (local == 0) executor.release_fence();
        shm::store_relaxed(flag, epoch);
      } else {
        shm::flag_publish(flag, epoch);
      }
    }
  }

  // --- Awaited by this block; false: the launch has failed ---

  /// The tile's partials of all local ranks are in this owner's slots (one local rank: in staging,
  /// or in C).
  MK_HOST_DEVICE bool await_tile(std::uint32_t owned) {
    for (std::uint32_t source = 0; source < world.locals; ++source) {
      if (!await(site(FlagKind::kTileReady, rank_of(source), source, owned, 0),
                 word(at(schedule.tile_ready(source, owned))), epoch)) {
        return false;
      }
    }
    return true;
  }
  /// This node's sum of the chunk is in staging.
  MK_HOST_DEVICE bool await_chunk_reduced(std::uint32_t chunk) {
    if (world.locals == 1) return await_tiles_of(chunk);
    return await(site(FlagKind::kChunkReduced, world.rank(), chunk, 0, 1),
                 word(at(schedule.chunk_reduced(chunk))), epoch);
  }
  /// The owner's chunk of C is here.
  MK_HOST_DEVICE bool await_out(std::uint32_t owner, std::uint32_t chunk) {
    if (world.size() == 1) return await_tiles_of(chunk);
    return await(site(FlagKind::kOutReady, rank_of(owner), owner, chunk, 2),
                 word(at(schedule.out_ready(owner, chunk))), epoch);
  }
  /// The node's sum of the chunk is in its receive bank here, made with the same m.
  MK_HOST_DEVICE bool await_arrival(std::uint32_t node, std::uint32_t chunk) {
    const WaitSite where = site(FlagKind::kArrival, world.rail_peer(node), node, chunk, 1);
    const std::uint32_t flag = schedule.flags().arrival(bank, world.node, node, chunk);
    if (!await(where, launch.context.arrival_flags + flag, epoch)) return false;
    if (chunk != 0) return true;
    return check_m(where, reinterpret_cast<const BankHeader*>(receive_bank(node))->m);
  }
  /// The node's rank of this rail has read all that the bank's last launch left there.
  MK_HOST_DEVICE bool await_release(std::uint32_t node) {
    const std::uint32_t flag = schedule.flags().release(bank, world.node, node);
    return await(site(FlagKind::kRelease, world.rail_peer(node), node, bank, 1),
                 launch.context.arrival_flags + flag, previous_use(epoch, banks));
  }
  /// The daemon has read all that the bank's last launch sent from staging.
  MK_HOST_DEVICE bool await_staging_free() {
    const std::uint64_t* sent = launch.local->sent_in(previous_use(epoch, banks));
    for (std::uint32_t lane = 0; lane < launch.blocks.send; ++lane) {
      if (!wait_completed(executor, control, launch.context, role, index, lane, sent[lane],
                          totals.waits))
        return false;
    }
    return true;
  }
  /// In unfused mode: this rank's product is done.
  MK_HOST_DEVICE bool await_turn() {
    if (launch.mode != Mode::kUnfused) return true;
    return await_blocks(Role::kCompute, launch.blocks.compute, launch.local->compute_done, 0);
  }
  /// All receive blocks of this rank have read their last chunk.
  MK_HOST_DEVICE bool await_all_received() {
    return await_blocks(Role::kReceive, launch.blocks.receive, launch.local->receive_done, 2);
  }
  /// Every local rank has begun this launch, with the same m.
  MK_HOST_DEVICE bool check_local_records() {
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      const auto* record = reinterpret_cast<const LaunchRecord*>(at(schedule.record(epoch, local)));
      const WaitSite where = site(FlagKind::kLaunchRecord, rank_of(local), local, 0, 0);
      if (!await(where, &record->epoch, epoch) || !check_m(where, shm::load_relaxed(&record->m)))
        return false;
    }
    return true;
  }

 private:
  MK_HOST_DEVICE bool await_tiles_of(std::uint32_t chunk) {
    const TileRange tiles = schedule.chunk_tiles(world.local, chunk);
    for (std::uint32_t owned = tiles.begin; owned < tiles.end; ++owned) {
      if (!await_tile(owned)) return false;
    }
    return true;
  }
  MK_HOST_DEVICE bool await_blocks(Role other, std::uint32_t count, const std::uint32_t* done,
                                   std::uint32_t hops) {
    for (std::uint32_t block = 0; block < count; ++block) {
      const auto other_role = static_cast<std::uint32_t>(other);
      if (!await(site(FlagKind::kBlockDone, world.rank(), other_role, block, hops), &done[block],
                 epoch))
        return false;
    }
    return true;
  }
  MK_HOST_DEVICE bool check_m(const WaitSite& where, std::uint32_t m) {
    if (m == launch.m) return true;
    fail_wait(control, where, WaitEnd::kMismatch, launch.m, m, 0);
    return false;
  }
};

}  // namespace mk::kernels
