/// \file
/// A look at which rows are here, without a wait: a thread may have other work. Host only.
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/gather/schedule.h"
#include "shm/flag.h"

namespace mk::kernels::gather {

/// Whether rows [begin, end) of the origin, and its header, are seen to be here. False for a moment
/// longer than they are not. A look orders nothing: the reader awaits them, too.
inline bool rows_seen(const Launch& launch, const GatherSchedule& schedule, std::uint32_t origin,
                      std::uint32_t begin, std::uint32_t end) {
  const World& world = launch.context.world;
  if (origin == world.rank()) return true;
  const auto flag = [&](std::uint32_t chunk) -> const std::uint32_t* {
    if (schedule.rail_of(origin) == world.local) {
      const std::uint32_t bank = bank_of(launch.epoch, launch.banks);
      return launch.context.arrival_flags +
             schedule.arrival(bank, world.node, schedule.node_of(origin), chunk);
    }
    return reinterpret_cast<const std::uint32_t*>(launch.context.workspaces[world.local] +
                                                  schedule.ready(origin, chunk));
  };
  const auto seen = [&](std::uint32_t chunk) {
    return shm::epoch_reached(shm::load_relaxed(flag(chunk)), launch.epoch);
  };
  if (!seen(0)) return false;
  const ChunkRange chunks = schedule.chunks_of_rows(begin, end);
  for (std::uint32_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
    if (!seen(chunk)) return false;
  }
  return true;
}

}  // namespace mk::kernels::gather
