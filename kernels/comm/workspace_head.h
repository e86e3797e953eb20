/// \file
/// What every operator's workspace begins with, whatever it computes: where the ranks of a node see
/// each other begin, end and fail.
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/comm/launch_record.h"
#include "shm/flag.h"

namespace mk::kernels {

/// Byte offsets in each local rank's workspace; each word has a line of its own.
///
///     failed                      uint32: 1 + the local node's first rank that failed, or 0
///     records[bank][local]        LaunchRecord: that local rank has begun a launch
///     finished[local]             uint32: the last launch that local rank has ended; until then it
///                                 may read its workspace and its peers'
struct WorkspaceHead {
  std::uint32_t locals = 1;

  static constexpr std::uint64_t kLine = 64;
  /// From one local rank's word to the next one's, of those that each has.
  static constexpr std::uint32_t kWordStep = kLine / sizeof(std::uint32_t);

  MK_HOST_DEVICE static constexpr std::uint64_t failed() { return 0; }
  MK_HOST_DEVICE constexpr std::uint64_t record(std::uint32_t epoch, std::uint32_t local) const {
    return kLine * (1 + record_index(epoch, locals, local));
  }
  MK_HOST_DEVICE constexpr std::uint64_t finished(std::uint32_t local) const {
    return kLine * (1 + kLaunchRecordBanks * locals + local);
  }
  MK_HOST_DEVICE constexpr std::uint64_t bytes() const {
    return kLine * (1 + kLaunchRecordBanks * locals + locals);
  }
};
static_assert(sizeof(LaunchRecord) == WorkspaceHead::kLine);

/// Tells the local ranks that this rank has begun launch `launch.epoch`, and with which m. Before
/// any of its blocks, and not before every local rank has ended launch epoch - kLaunchRecordBanks,
/// whose record it overwrites.
MK_HOST_DEVICE inline void announce_launch(const Launch& launch) {
  const World& world = launch.context.world;
  const std::uint64_t offset = WorkspaceHead{world.locals}.record(launch.epoch, world.local);
  const auto record = [&](std::uint32_t local) {
    return reinterpret_cast<LaunchRecord*>(launch.context.workspaces[local] + offset);
  };
  for (std::uint32_t local = 0; local < world.locals; ++local)
    shm::store_relaxed(&record(local)->m, launch.m);
  // Release: a reader of the epoch sees `m`.
  shm::store_release_all(
      world.locals, [&](std::uint32_t local) { return &record(local)->epoch; }, launch.epoch);
}

/// Tells the local ranks that this rank has ended launch `epoch`. After all its blocks. (One that
/// is alone on its node tells only its own next launches, which begin after that anyway.)
MK_HOST_DEVICE inline void announce_end(const RankContext& context, std::uint32_t epoch) {
  const World& world = context.world;
  const std::uint64_t word = WorkspaceHead{world.locals}.finished(world.local);
  if (world.locals == 1) {
    shm::store_relaxed(reinterpret_cast<std::uint32_t*>(context.workspaces[0] + word), epoch);
    return;
  }
  shm::store_release_all(
      world.locals,
      [&](std::uint32_t local) {
        return reinterpret_cast<std::uint32_t*>(context.workspaces[local] + word);
      },
      epoch);
}
MK_HOST_DEVICE inline void announce_end(const Launch& launch) {
  announce_end(launch.context, launch.epoch);
}

/// Tells the local ranks that this rank's launch failed: their waits for it would last to their
/// deadlines. The first to fail in the node is the cause; who failed because of it says nothing
/// new.
MK_HOST_DEVICE inline void announce_failure(const RankContext& context) {
  for (std::uint32_t local = 0; local < context.world.locals; ++local) {
    auto* failed =
        reinterpret_cast<std::uint32_t*>(context.workspaces[local] + WorkspaceHead::failed());
    shm::compare_exchange(failed, 0u, context.world.rank() + 1);
  }
}

}  // namespace mk::kernels
