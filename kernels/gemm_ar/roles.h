/// \file
/// What the blocks of GEMM + AllReduce do. Flags, counters and commands are here, once for all
/// executors; the executor brings the arithmetic and the bulk copies:
///
///     bool multiply(const TileRect&, void* target, uint64_t target_stride);
///                                    this rank's partial of the tile, rounded to the element type;
///                                    false: it cannot, and has noted why
///     void sum(const SumJob&);       comm/sum_job.h
///     bool wants_c();                whether copy_to_c is to be called
///     void copy_to_c(const TileRect&, const void* source, uint64_t source_stride);
///     void stores_done();            all this block stored is visible to who acquires its next
///                                    release
///     void loads_begin();            bulk loads from here on see what this block acquired
///     uint64_t now_ns();             both: the pacer of comm/wait.h
///     bool pause(uint32_t attempt);
///
/// Strides are in elements. The way of a tile, with the flag that hands each step to the next (all
/// hold the epoch; each word has one writer):
///
///     role     on           does                                       then shows
///     compute  every rank   tile -> slot at its owner                  tile_ready[source][tile]
///     reduce   owner        slots -> sum over local ranks -> staging   chunk_reduced[chunk]
///     send     owner        staging -> receive banks of rail peers     arrival[bank][from][chunk]
///     receive  owner        staging and receive banks -> sum over
///                           nodes -> C of every local rank             out_ready[owner][chunk]
///     collect  every rank   C, as it arrives -> the caller's C
///
/// Sums go in rank order and in node order, so every run gives the same bits, on every rank.
/// With one node, reduce stores into C itself; there is no send and no receive. With one local
/// rank, compute stores into staging itself; there is no reduce. With both, compute stores into C.
///
/// Why nothing is overwritten too early (e: this launch; with two banks, b = 2):
///  - Slots and C: launch e ends on a rank when all of C is there, so after every owner has read
///    all its slots. Slots are written in e + 1, by ranks that have ended e; a rank's C is written
///    in e + 1 only after this rank's own tiles of e + 1 went in.
///  - Staging bank: written in e after the daemon has read what e - b sent from it
///    (GemmArLocal::sent_in).
///  - Receive bank: written in e after its reader has released e - b.
///  - Launch records: a rank in launch e + 2 has seen this rank's tiles of e + 1, so this rank is
///    done with the records of e, whose place those of e + 2 take.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/launch_record.h"
#include "kernels/comm/sum_job.h"
#include "kernels/comm/wait.h"
#include "kernels/gemm_ar/launch.h"
#include "kernels/gemm_ar/schedule.h"
#include "shm/flag.h"

namespace mk::kernels {

/// What one block did.
struct BlockTotals {
  WaitTotals waits;
  std::uint64_t commands = 0;
  std::uint64_t network_bytes = 0;
};

/// Tells the local ranks that this rank has begun launch `launch.epoch`, and with which m. Before
/// any of its blocks.
MK_HOST_DEVICE inline void announce_launch(const GemmArLaunch& launch) {
  const GemmArSchedule schedule(launch.plan, launch.m);
  const World& world = launch.context.world;
  for (std::uint32_t local = 0; local < world.locals; ++local) {
    std::byte* record =
        launch.context.workspaces[local] + schedule.record(launch.epoch, world.local);
    publish_record(reinterpret_cast<LaunchRecord*>(record), launch.epoch, launch.m);
  }
}

/// One block of one launch. Each role returns whether it ran to its end; if not, the launch has
/// failed, and its first cause is in `launch.local->failure` or with the executor.
template <class Executor>
class GemmArBlock {
 public:
  MK_HOST_DEVICE GemmArBlock(Executor& executor, const GemmArLaunch& launch, std::uint32_t block,
                             BlockTotals& totals)
      : executor_(executor),
        launch_(launch),
        schedule_(launch.plan, launch.m),
        world_(launch.context.world),
        totals_(totals),
        block_(block),
        epoch_(launch.epoch),
        bank_(bank_of(launch.epoch, launch.plan.banks)) {}

  /// Computes tiles `block`, `block` + compute blocks, ... of this rank's order.
  MK_HOST_DEVICE bool compute() {
    role_ = Role::kCompute;
    if (world_.locals == 1 && world_.nodes > 1 && !await_staging_free()) return false;
    for (std::uint32_t step = block_; step < schedule_.tiles(); step += launch_.blocks.compute) {
      // A product never waits, so it would go on after the launch has failed.
      if (shm::load_acquire(launch_.control.stop) != 0) return false;
      const std::uint32_t tile = schedule_.tile_at(world_.local, step);
      const std::uint32_t owner = schedule_.owner(tile);
      const std::uint32_t owned = schedule_.owned_index(tile);
      const TileRect rect = schedule_.rect(tile);
      std::uint64_t target = schedule_.slot(world_.local, owned);
      std::uint64_t stride = schedule_.tile_cols();
      if (world_.locals == 1) {
        target = world_.nodes > 1 ? staging_slot(owned) : schedule_.out(rect);
        if (world_.nodes == 1) stride = launch_.plan.max.n;
      }
      if (!executor_.multiply(rect, at(owner, target), stride)) {
        shm::store_release(launch_.control.stop, 1u);
        return false;
      }
      publish(at(owner, schedule_.tile_ready(world_.local, owned)));
    }
    publish(&launch_.local->compute_done[block_]);
    return true;
  }

  /// The owner's local sums, chunks `block`, `block` + reduce blocks, ... Only with several local
  /// ranks.
  MK_HOST_DEVICE bool reduce() {
    role_ = Role::kReduce;
    if (!await_product_in_unfused_mode() || !check_local_records()) return false;
    if (world_.nodes > 1 && !await_staging_free()) return false;
    for (std::uint32_t chunk = block_; chunk < schedule_.chunks(world_.local);
         chunk += launch_.blocks.reduce) {
      const TileRange tiles = schedule_.chunk_tiles(world_.local, chunk);
      for (std::uint32_t owned = tiles.begin; owned < tiles.end; ++owned) {
        if (!await_tile(owned)) return false;
        SumJob job = job_for(owned);
        job.source_count = world_.locals;
        for (std::uint32_t source = 0; source < world_.locals; ++source) {
          job.sources[source] = at(world_.local, schedule_.slot(source, owned));
        }
        if (world_.nodes > 1) {
          job.target_count = 1;
          job.targets[0] = at(world_.local, staging_slot(owned));
          job.target_stride = schedule_.tile_cols();
        } else {
          aim_at_every_c(job, owned);
        }
        executor_.sum(job);
      }
      if (world_.nodes > 1) {
        publish(at(world_.local, schedule_.chunk_reduced(chunk)));
      } else {
        publish_out_ready(chunk);
      }
    }
    return true;
  }

  /// The owner's way to the network, chunks `block`, `block` + send blocks, ..., through lane
  /// `block`. Only with several nodes.
  MK_HOST_DEVICE bool send() {
    role_ = Role::kSend;
    if (!await_product_in_unfused_mode()) return false;
    ChunkSender<Executor> sender(executor_, launch_.control, launch_.context, block_,
                                 totals_.waits);
    const bool sent =
        send_chunks(sender) && send_refresh(sender) && (block_ != 0 || send_releases(sender));
    totals_.commands += sender.commands();
    totals_.network_bytes += sender.payload_bytes();
    return sent;
  }

  /// The owner's sums over the nodes and the broadcast on its node, chunks `block`, `block` +
  /// receive blocks, ... Only with several nodes.
  MK_HOST_DEVICE bool receive() {
    role_ = Role::kReceive;
    if (!await_product_in_unfused_mode()) return false;
    for (std::uint32_t chunk = block_; chunk < schedule_.chunks(world_.local);
         chunk += launch_.blocks.receive) {
      if (!await_chunk_reduced(chunk)) return false;
      for (std::uint32_t node = 0; node < world_.nodes; ++node) {
        if (node != world_.node && !await_arrival(node, chunk)) return false;
      }
      const TileRange tiles = schedule_.chunk_tiles(world_.local, chunk);
      for (std::uint32_t owned = tiles.begin; owned < tiles.end; ++owned) {
        SumJob job = job_for(owned);
        job.source_count = world_.nodes;
        for (std::uint32_t node = 0; node < world_.nodes; ++node) {
          job.sources[node] = at(
              world_.local, node == world_.node ? staging_slot(owned) : receive_slot(node, owned));
        }
        aim_at_every_c(job, owned);
        executor_.sum(job);
      }
      publish_out_ready(chunk);
    }
    // Also with no chunk of its own: send block 0 waits for all receive blocks before it releases
    // the bank.
    publish(&launch_.local->receive_done[block_]);
    return true;
  }

  /// Sees this rank's C become complete, and copies it to the caller's. Every compute block does it
  /// after its tiles, for every `compute blocks`-th chunk.
  MK_HOST_DEVICE bool collect() {
    role_ = Role::kCollect;
    if (world_.locals > 1 && !check_local_records()) return false;
    std::uint32_t turn = 0;
    // Owner 0 has at least as many chunks as any other.
    for (std::uint32_t chunk = 0; chunk < schedule_.chunks(0); ++chunk) {
      for (std::uint32_t i = 0; i < world_.locals; ++i) {
        const std::uint32_t owner = (i + world_.local) % world_.locals;
        if (chunk >= schedule_.chunks(owner) || turn++ % launch_.blocks.compute != block_) continue;
        if (!await_out(owner, chunk)) return false;
        if (!executor_.wants_c()) continue;
        const TileRange tiles = schedule_.chunk_tiles(owner, chunk);
        for (std::uint32_t owned = tiles.begin; owned < tiles.end; ++owned) {
          const TileRect rect = schedule_.rect(schedule_.tile_of(owner, owned));
          executor_.copy_to_c(rect, at(world_.local, schedule_.out(rect)), launch_.plan.max.n);
        }
      }
    }
    return true;
  }

 private:
  // --- Addresses ---

  MK_HOST_DEVICE std::byte* at(std::uint32_t local, std::uint64_t offset) const {
    return launch_.context.workspaces[local] + offset;
  }
  MK_HOST_DEVICE static std::uint32_t* word(std::byte* address) {
    return reinterpret_cast<std::uint32_t*>(address);
  }
  MK_HOST_DEVICE std::uint64_t staging_slot(std::uint32_t owned) const {
    return schedule_.staging_bank(bank_) + schedule_.slot_in_bank(owned);
  }
  MK_HOST_DEVICE std::uint64_t receive_bank(std::uint32_t from) const {
    return schedule_.receive_bank(bank_, world_.node, from);
  }
  MK_HOST_DEVICE std::uint64_t receive_slot(std::uint32_t from, std::uint32_t owned) const {
    return receive_bank(from) + schedule_.slot_in_bank(owned);
  }

  MK_HOST_DEVICE SumJob job_for(std::uint32_t owned) const {
    const TileRect rect = schedule_.rect(schedule_.tile_of(world_.local, owned));
    SumJob job;
    job.source_stride = schedule_.tile_cols();
    job.rows = rect.rows;
    job.columns = rect.columns;
    return job;
  }
  MK_HOST_DEVICE void aim_at_every_c(SumJob& job, std::uint32_t owned) const {
    const std::uint64_t out = schedule_.out(schedule_.rect(schedule_.tile_of(world_.local, owned)));
    job.target_count = world_.locals;
    job.target_stride = launch_.plan.max.n;
    // Own first; then the others, each owner from another start.
    for (std::uint32_t i = 0; i < world_.locals; ++i)
      job.targets[i] = at((world_.local + i) % world_.locals, out);
  }

  // --- Flags ---

  /// Release: what this block stored before is visible to who sees the epoch.
  MK_HOST_DEVICE void publish(std::uint32_t* flag) {
    executor_.stores_done();
    shm::flag_publish(flag, epoch_);
  }
  MK_HOST_DEVICE void publish(std::byte* flag) { publish(word(flag)); }
  MK_HOST_DEVICE void publish_out_ready(std::uint32_t chunk) {
    executor_.stores_done();
    for (std::uint32_t local = 0; local < world_.locals; ++local) {
      shm::flag_publish(word(at(local, schedule_.out_ready(world_.local, chunk))), epoch_);
    }
  }

  MK_HOST_DEVICE WaitSite site(FlagKind kind, std::uint32_t rank, std::uint32_t index0,
                               std::uint32_t index1, std::uint32_t hops) const {
    WaitSite site;
    site.role = role_;
    site.kind = kind;
    site.block = block_;
    site.rank = rank;
    site.index[0] = index0;
    site.index[1] = index1;
    site.hops = hops;
    return site;
  }
  MK_HOST_DEVICE bool await(const WaitSite& site, const std::uint32_t* flag, std::uint32_t epoch) {
    if (!wait_flag(executor_, launch_.control, site, totals_.waits, flag, epoch)) return false;
    executor_.loads_begin();
    return true;
  }
  MK_HOST_DEVICE std::uint32_t rank_of(std::uint32_t local) const {
    return world_.node * world_.locals + local;
  }

  /// The tile's partials of all local ranks are in this owner's slots (one local rank: in staging,
  /// or in C).
  MK_HOST_DEVICE bool await_tile(std::uint32_t owned) {
    for (std::uint32_t source = 0; source < world_.locals; ++source) {
      const std::byte* flag = at(world_.local, schedule_.tile_ready(source, owned));
      if (!await(site(FlagKind::kTileReady, rank_of(source), source, owned, 0),
                 reinterpret_cast<const std::uint32_t*>(flag), epoch_)) {
        return false;
      }
    }
    return true;
  }
  MK_HOST_DEVICE bool await_tiles_of(std::uint32_t chunk) {
    const TileRange tiles = schedule_.chunk_tiles(world_.local, chunk);
    for (std::uint32_t owned = tiles.begin; owned < tiles.end; ++owned) {
      if (!await_tile(owned)) return false;
    }
    return true;
  }
  /// This node's sum of the chunk is in staging.
  MK_HOST_DEVICE bool await_chunk_reduced(std::uint32_t chunk) {
    if (world_.locals == 1) return await_tiles_of(chunk);
    return await(site(FlagKind::kChunkReduced, world_.rank(), chunk, 0, 1),
                 word(at(world_.local, schedule_.chunk_reduced(chunk))), epoch_);
  }
  /// The chunk's tiles of C are here.
  MK_HOST_DEVICE bool await_out(std::uint32_t owner, std::uint32_t chunk) {
    if (world_.size() == 1) return await_tiles_of(chunk);
    return await(site(FlagKind::kOutReady, rank_of(owner), owner, chunk, 2),
                 word(at(world_.local, schedule_.out_ready(owner, chunk))), epoch_);
  }
  /// The node's sum of the chunk is in the receive bank, made with the same m.
  MK_HOST_DEVICE bool await_arrival(std::uint32_t node, std::uint32_t chunk) {
    const std::uint32_t* flag =
        launch_.context.arrival_flags + schedule_.flags().arrival(bank_, world_.node, node, chunk);
    const WaitSite where = site(FlagKind::kArrival, world_.rail_peer(node), node, chunk, 1);
    if (!await(where, flag, epoch_)) return false;
    if (chunk != 0) return true;
    const auto* header = reinterpret_cast<const BankHeader*>(at(world_.local, receive_bank(node)));
    return check_m(where, header->m);
  }
  /// The daemon has read everything that launch e - 2 sent from this staging bank.
  MK_HOST_DEVICE bool await_staging_free() {
    const std::uint64_t* sent = launch_.local->sent_in(previous_use(epoch_, launch_.plan.banks));
    for (std::uint32_t lane = 0; lane < launch_.blocks.send; ++lane) {
      if (!wait_completed(executor_, launch_.control, launch_.context, role_, block_, lane,
                          sent[lane], totals_.waits)) {
        return false;
      }
    }
    return true;
  }
  /// The node's rank of this rail has read everything that launch e - 2 left in its receive bank.
  MK_HOST_DEVICE bool await_release(std::uint32_t node) {
    const std::uint32_t* flag =
        launch_.context.arrival_flags + schedule_.flags().release(bank_, world_.node, node);
    return await(site(FlagKind::kRelease, world_.rail_peer(node), node, bank_, 1), flag,
                 previous_use(epoch_, launch_.plan.banks));
  }
  MK_HOST_DEVICE bool await_product_in_unfused_mode() {
    if (launch_.mode != Mode::kUnfused) return true;
    for (std::uint32_t block = 0; block < launch_.blocks.compute; ++block) {
      if (!await(site(FlagKind::kBlockDone, world_.rank(),
                      static_cast<std::uint32_t>(Role::kCompute), block, 0),
                 &launch_.local->compute_done[block], epoch_)) {
        return false;
      }
    }
    return true;
  }

  /// Every local rank has begun this launch, with the same m.
  MK_HOST_DEVICE bool check_local_records() {
    for (std::uint32_t local = 0; local < world_.locals; ++local) {
      const auto* record =
          reinterpret_cast<const LaunchRecord*>(at(world_.local, schedule_.record(epoch_, local)));
      const WaitSite where = site(FlagKind::kLaunchRecord, rank_of(local), local, 0, 0);
      if (!await(where, &record->epoch, epoch_) || !check_m(where, shm::load_relaxed(&record->m)))
        return false;
    }
    return true;
  }
  MK_HOST_DEVICE bool check_m(const WaitSite& where, std::uint32_t m) {
    if (m == launch_.m) return true;
    fail_wait(launch_.control, where, WaitEnd::kMismatch, launch_.m, m, 0);
    return false;
  }

  // --- Sending ---

  MK_HOST_DEVICE bool send_chunks(ChunkSender<Executor>& sender) {
    const FlagMap flags = schedule_.flags();
    const std::uint64_t staging = schedule_.staging_bank(bank_);
    bool released = false;
    for (std::uint32_t chunk = block_; chunk < schedule_.chunks(world_.local);
         chunk += launch_.blocks.send) {
      if (!await_chunk_reduced(chunk)) return false;
      if (chunk == 0) write_header(at(world_.local, staging));
      const ByteRange range = schedule_.chunk_range(world_.local, chunk);
      // Each node starts with the next one, so that no link is everybody's first.
      for (std::uint32_t i = 1; i < world_.nodes; ++i) {
        const std::uint32_t node = (world_.node + i) % world_.nodes;
        if (!released && !await_release(node)) return false;
        if (!sender.send_chunk(node, staging + range.begin,
                               schedule_.receive_bank(bank_, node, world_.node) + range.begin,
                               range.bytes, flags.arrival(bank_, node, world_.node, chunk),
                               epoch_)) {
          return false;
        }
      }
      released = true;
    }
    launch_.local->sent_in(epoch_)[block_] = sender.produced();
    return true;
  }
  MK_HOST_DEVICE void write_header(std::byte* bank) {
    auto* header = reinterpret_cast<BankHeader*>(bank);
    header->epoch = epoch_;
    header->m = launch_.m;
    executor_.stores_done();
  }
  /// See refresh_due. This launch has no such chunks.
  MK_HOST_DEVICE bool send_refresh(ChunkSender<Executor>& sender) {
    if (block_ != 0 || !refresh_due(epoch_, launch_.plan.banks)) return true;
    const FlagMap flags = schedule_.flags();
    for (std::uint32_t chunk = flags.first_idle_granule(schedule_.chunks(world_.local));
         chunk < flags.stride(); chunk += shm::kFlagGranule) {
      for (std::uint32_t node = 0; node < world_.nodes; ++node) {
        if (node == world_.node) continue;
        if (!sender.send_flag(node, flags.arrival(bank_, node, world_.node, chunk), epoch_)) {
          return false;
        }
      }
    }
    return true;
  }
  MK_HOST_DEVICE bool await_refresh() {
    if (!refresh_due(epoch_, launch_.plan.banks)) return true;
    const FlagMap flags = schedule_.flags();
    for (std::uint32_t chunk = flags.first_idle_granule(schedule_.chunks(world_.local));
         chunk < flags.stride(); chunk += shm::kFlagGranule) {
      for (std::uint32_t node = 0; node < world_.nodes; ++node) {
        if (node == world_.node) continue;
        const std::uint32_t flag = flags.arrival(bank_, world_.node, node, chunk);
        if (!await(site(FlagKind::kArrival, world_.rail_peer(node), node, chunk, 1),
                   launch_.context.arrival_flags + flag, epoch_)) {
          return false;
        }
      }
    }
    return true;
  }
  /// Tells the rail peers that this rank's receive banks may be filled again, once all its receive
  /// blocks are done.
  MK_HOST_DEVICE bool send_releases(ChunkSender<Executor>& sender) {
    for (std::uint32_t block = 0; block < launch_.blocks.receive; ++block) {
      if (!await(site(FlagKind::kBlockDone, world_.rank(),
                      static_cast<std::uint32_t>(Role::kReceive), block, 2),
                 &launch_.local->receive_done[block], epoch_)) {
        return false;
      }
    }
    if (!await_refresh()) return false;
    const FlagMap flags = schedule_.flags();
    for (std::uint32_t i = 1; i < world_.nodes; ++i) {
      const std::uint32_t node = (world_.node + i) % world_.nodes;
      if (!sender.send_flag(node, flags.release(bank_, node, world_.node), epoch_)) return false;
    }
    return true;
  }

  Executor& executor_;
  const GemmArLaunch& launch_;
  GemmArSchedule schedule_;
  World world_;
  BlockTotals& totals_;
  Role role_ = Role::kCompute;
  std::uint32_t block_;
  std::uint32_t epoch_;
  std::uint32_t bank_;
};

}  // namespace mk::kernels
