/// \file
/// One block of one launch, with what any operator's blocks see: places in the node's workspaces,
/// the other ranks' beginnings and ends, arrivals and releases. An operator's block derives from it
/// and adds what its own flags mean; its roles are functions over that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/block.h"
#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/packed_tiles.h"
#include "kernels/comm/workspace_head.h"

namespace mk::kernels {

template <class Executor>
class OperatorBlock : public Block<Executor> {
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

  MK_HOST_DEVICE OperatorBlock(Executor& executor_in, const Launch& launch_in, Role role_in,
                               std::uint32_t index_in, BlockTotals& totals_in)
      : Block<Executor>(executor_in, launch_in.control, totals_in, role_in, index_in,
                        launch_in.epoch),
        common(launch_in),
        world(launch_in.context.world),
        head{launch_in.context.world.locals},
        banks(launch_in.banks),
        bank(bank_of(launch_in.epoch, launch_in.banks)) {}

  const Launch& common;  ///< the launch, without the operator's own part
  const World world;
  const WorkspaceHead head;
  const std::uint32_t banks;
  const std::uint32_t bank;  ///< of this launch

  // --- Places; in this rank's workspace where no other is named ---

  MK_HOST_DEVICE std::byte* at(std::uint32_t local, std::uint64_t offset) const {
    return common.context.workspaces[local] + offset;
  }
  MK_HOST_DEVICE std::byte* at(std::uint64_t offset) const { return at(world.local, offset); }
  MK_HOST_DEVICE static std::uint32_t* word(std::byte* address) {
    return reinterpret_cast<std::uint32_t*>(address);
  }
  /// The rank of a local rank of this node.
  MK_HOST_DEVICE std::uint32_t rank_of(std::uint32_t local) const {
    return world.node * world.locals + local;
  }

  // --- Shown by this block ---

  /// Shows the epoch in the word at `offset` of every local rank's workspace.
  MK_HOST_DEVICE void publish_at_every_local(std::uint64_t offset) {
    executor.stores_done();
    shm::store_release_all(
        world.locals, [&](std::uint32_t local) { return word(at(local, offset)); }, epoch);
  }
  /// In that of every other local rank.
  MK_HOST_DEVICE void publish_at_other_locals(std::uint64_t offset) {
    executor.stores_done();
    shm::store_release_all(
        world.locals - 1,
        [&](std::uint32_t i) { return word(at(i < world.local ? i : i + 1, offset)); }, epoch);
  }
  /// In that of one local rank.
  MK_HOST_DEVICE void publish_at_local(std::uint32_t local, std::uint64_t offset) {
    executor.stores_done();
    shm::flag_publish(word(at(local, offset)), epoch);
  }
  /// This block, one of `count` of its role, is done with what await_blocks(role, ...) waits for.
  /// An executor that rather counts them than have each show its own flag supplies
  ///     static bool counts_done(Role);
  ///     bool last_done(Role, std::uint32_t count);   one more is; whether it is the last, and what
  ///                                                  all stored is visible to who acquires its
  ///                                                  next release
  MK_HOST_DEVICE void publish_done(std::uint32_t count) {
    std::uint32_t* flags = common.local->done_by(role);
    if constexpr (requires { executor.last_done(role, count); }) {
      if (executor.counts_done(role)) {
        executor.stores_done();
        if (executor.last_done(role, count)) this->publish_within_rank(&flags[0]);
        return;
      }
    }
    this->publish_within_rank(&flags[index]);
  }

  // --- Awaited by this block; false: the launch has failed ---

  /// All `count` blocks of another role of this rank have published that they are done.
  MK_HOST_DEVICE bool await_blocks(Role other, std::uint32_t count, std::uint32_t hops) {
    std::uint32_t flags = count;
    if constexpr (requires { executor.counts_done(other); }) {
      if (executor.counts_done(other) && count != 0) flags = 1;
    }
    return this->await_each(
        flags, epoch, FlagRow{common.local->done_by(other)}, [&](std::uint32_t block) {
          const auto other_role = static_cast<std::uint32_t>(other);
          return site(FlagKind::kBlockDone, world.rank(), other_role, block, hops);
        });
  }
  /// Every local rank has begun this launch, with the same m.
  MK_HOST_DEVICE bool check_local_records() {
    const auto record = [&](std::uint32_t local) {
      return reinterpret_cast<const LaunchRecord*>(at(head.record(epoch, local)));
    };
    const auto site_of = [&](std::uint32_t local) {
      return site(FlagKind::kLaunchRecord, rank_of(local), local, 0, 0);
    };
    const FlagRow epochs{&record(0)->epoch, WorkspaceHead::kWordStep};
    if (!this->await_each(world.locals, epoch, epochs, site_of)) return false;
    std::uint32_t other = world.locals;
    std::uint32_t its_m = common.m;
    look_at_each([&](std::uint32_t local) { return &record(local)->m; },
                 [&](std::uint32_t local, std::uint32_t m) {
                   if (m == common.m || other != world.locals) return;
                   other = local;
                   its_m = m;
                 });
    return other == world.locals || check_m(site_of(other), its_m);
  }
  /// Those of one rank's own tiles; `flags` and `site_of(tile)` of all.
  template <class SiteOf>
  MK_HOST_DEVICE bool await_own_tiles(const TileRange& tiles, const FlagRow& flags,
                                      SiteOf&& site_of) {
    return this->await_each(tiles.end - tiles.begin, epoch, FlagRow{flags(tiles.begin), flags.step},
                            [&](std::uint32_t i) { return site_of(tiles.begin + i); });
  }
  /// Waits until chunk `first` is there, and answers how many of it and of chunks `first` + `step`,
  /// `first` + 2 * `step`, ... are then, as far as one look tells; `most` at most (one, if the
  /// block has not all chunks and looks at tiles); 0: the launch has failed. A chunk is there when
  /// its flag of `chunks` shows it or, `of_tiles`, when all its tiles' flags of `tiles` do.
  /// `site_of(index)` of those.
  template <class SiteOf>
  MK_HOST_DEVICE std::uint32_t await_chunks(const PackedTiles& packed, std::uint32_t first,
                                            std::uint32_t most, std::uint32_t step, bool of_tiles,
                                            const std::uint32_t* tiles, const std::uint32_t* chunks,
                                            SiteOf&& site_of) {
    const TileRange its_tiles = packed.chunk_tiles(first);
    std::uint32_t begin = 0;
    std::uint32_t least = 1;
    std::uint32_t end = most;
    FlagRow flags{chunks + first, step};
    if (of_tiles) {
      // They follow each other where the chunks do.
      const std::uint32_t left = packed.chunks() - first;
      const std::uint32_t count = step != 1 ? 1 : left < most ? left : most;
      begin = its_tiles.begin;
      least = its_tiles.end;
      end = packed.chunk_tiles(first + count - 1).end;
      flags = {tiles};
      most = count;
    }
    const std::uint32_t missing =
        this->await_run(begin, least, end, epoch, flags,
                        [&](std::uint32_t i) { return site_of(of_tiles ? i : first + i * step); });
    if (missing < least) return 0;
    return missing == end ? most : of_tiles ? packed.chunk_of(missing) - first : missing;
  }
  /// The local rank has ended launch `wanted`: it reads nothing of it any more.
  MK_HOST_DEVICE bool await_finished(std::uint32_t local, std::uint32_t wanted) {
    return await([&] { return site(FlagKind::kFinished, rank_of(local), local, 0, 1); },
                 word(at(head.finished(local))), wanted);
  }
  /// A bit for each local rank that is seen to have ended launch `wanted`; does not wait. Of an
  /// executor with `acquire_fence()`.
  MK_HOST_DEVICE std::uint32_t locals_finished(std::uint32_t wanted) {
    std::uint32_t bits = 0;
    look_at_each([&](std::uint32_t local) { return word(at(head.finished(local))); },
                 [&](std::uint32_t local, std::uint32_t seen) {
                   const bool ended = shm::epoch_reached(seen, wanted);
                   bits |= static_cast<std::uint32_t>(ended) << local;
                 });
    executor.acquire_fence();
    return bits;
  }
  /// Every local rank has ended launch `wanted`.
  MK_HOST_DEVICE bool await_all_finished(std::uint32_t wanted) {
    const FlagRow ends{word(at(head.finished(0))), WorkspaceHead::kWordStep};
    return this->await_each(world.locals, wanted, ends, [&](std::uint32_t local) {
      return site(FlagKind::kFinished, rank_of(local), local, 0, 1);
    });
  }
  /// Flag `flag` of the operator's range shows this launch: what the rank on `node` (of this rail)
  /// has sent is here. `index1` names it to people: the chunk.
  MK_HOST_DEVICE bool await_arrival_flag(std::uint32_t node, std::uint32_t flag,
                                         std::uint32_t index1) {
    return await([&] { return arrival_site(node, index1); }, common.context.arrival_flags + flag,
                 epoch);
  }
  MK_HOST_DEVICE WaitSite arrival_site(std::uint32_t node, std::uint32_t index1) const {
    return site(FlagKind::kArrival, world.rail_peer(node), node, index1, 1);
  }
  /// The node's rank of this rail has read all that the bank's last launch left there.
  MK_HOST_DEVICE bool await_release(const FlagMap& flags, std::uint32_t node) {
    if (!flags.has_releases()) return true;
    return await([&] { return site(FlagKind::kRelease, world.rail_peer(node), node, bank, 1); },
                 common.context.arrival_flags + flags.release(world.node, node),
                 previous_use(epoch, banks));
  }
  /// The daemon has read all that launch `sent_in` sent from this rank's workspace.
  MK_HOST_DEVICE bool await_sent(std::uint32_t sent_in) {
    const std::uint64_t* sent = common.local->sent_in(sent_in);
    for (std::uint32_t lane = 0; lane < common.blocks.send; ++lane) {
      if (!wait_completed(executor, control, common.context, role, index, lane, sent[lane],
                          totals.waits))
        return false;
    }
    return true;
  }
  /// The bank's source bytes may be written again.
  MK_HOST_DEVICE bool await_staging_free() { return await_sent(previous_use(epoch, banks)); }
  /// Calls `take(local, value)` with a word of each local rank, word_of(local), the loads of
  /// several on their way together. Orders nothing.
  template <class WordOf, class Take>
  MK_HOST_DEVICE void look_at_each(WordOf&& word_of, Take&& take) {
    constexpr std::uint32_t kAtOnce = 8;
    for (std::uint32_t begin = 0; begin < world.locals; begin += kAtOnce) {
      std::uint32_t seen[kAtOnce];
      for (std::uint32_t i = 0; i < kAtOnce; ++i)
        seen[i] = shm::load_relaxed(word_of(begin + i < world.locals ? begin + i : begin));
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        if (begin + i < world.locals) take(begin + i, seen[i]);
      }
    }
  }
  /// Fails the launch if the rank of that site launched with another m.
  MK_HOST_DEVICE bool check_m(const WaitSite& where, std::uint32_t m) {
    if (m == common.m) return true;
    fail_wait(control, where, WaitEnd::kMismatch, common.m, m, 0);
    return false;
  }
};

}  // namespace mk::kernels
