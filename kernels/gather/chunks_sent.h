/// \file
/// Counts what a rank sends of a gather.
#pragma once

#include <cstdint>

#include "kernels/gather/schedule.h"

namespace mk::kernels {

/// Chunks that this rank sends to other nodes; `rows_of(rank)`: rows that the rank brings.
template <class RowsOf>
std::uint32_t gather_chunks_sent(const GatherSchedule& schedule, RowsOf&& rows_of) {
  std::uint32_t chunks = 0;
  for (std::uint32_t hops = 0; hops < schedule.shards_sent(); ++hops)
    chunks += schedule.chunks(rows_of(schedule.world().rail_peer(schedule.node_at(hops))));
  return chunks;
}

}  // namespace mk::kernels
