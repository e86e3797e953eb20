/// \file
/// The steps of copy engines in a launch of Ring Attention, in place of the share blocks: they
/// bring this rank's keys to the node's other ranks. Host only.
///
/// They begin when the share role has seen that nobody reads the bank any more, and has written the
/// headers (gather::start_dma). Each step comes after the one before it. So a chunk is shown when
/// its bytes are there, and the next launch's bytes wait for the end of this launch on all local
/// ranks.
#pragma once

#include <cstdint>

#include "kernels/gather/schedule.h"
#include "kernels/ops/ring/geometry.h"
#include "shm/host/result.h"

namespace mk::kernels::ring_attention {

/// The steps of a launch in which this rank has `rows` rows of each sequence. The first heads come
/// first, to each of the others in turn. `Engines` has
///
///     Status copy(turn, begin, end);   bytes [begin, end) of the rank's packed rows, all K or all
///     V,
///                                      to the local rank `turn` before this one
///     Status show(turn, chunks);       there, these chunks of this rank
template <class Engines>
Status bring_keys(const RingAttentionGeometry& plan, const GatherSchedule& gather,
                  std::uint32_t rows, Engines&& engines) {
  const std::uint32_t gathered = plan.gathered_rows(rows);
  const std::uint64_t total = gather.data_bytes(gathered);
  const std::uint32_t chunks = gather.chunks(gathered);
  const std::uint64_t each = total / plan.head_units() / 2;  // K, or V, of heads together
  std::uint32_t shown = 1;                                   // the header is
  for (std::uint64_t begin = 0; begin < total; begin += 2 * each) {
    const std::uint64_t end = begin + 2 * each;
    const std::uint32_t complete =
        end == total ? chunks : static_cast<std::uint32_t>(1 + end / gather.geometry().chunk_bytes);
    for (std::uint32_t turn = 1; turn < plan.locals; ++turn) {
      MK_RETURN_IF_ERROR(engines.copy(turn, begin, begin + each));
      MK_RETURN_IF_ERROR(engines.copy(turn, begin + each, end));
      if (shown < complete) MK_RETURN_IF_ERROR(engines.show(turn, ChunkRange{shown, complete}));
    }
    shown = complete;
  }
  return {};
}

}  // namespace mk::kernels::ring_attention
