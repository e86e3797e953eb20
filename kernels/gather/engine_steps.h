/// \file
/// The steps of copy engines in a launch, in place of share blocks: they bring this rank's rows to
/// the node's other ranks. Host only.
///
/// They begin when the share role has seen that nobody reads the bank any more, and has written the
/// headers (gather::start_dma). Each step comes after the one before it. So a chunk is shown when
/// its bytes are there, and the next launch's bytes wait for the end of this launch on all local
/// ranks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/gather/schedule.h"
#include "shm/host/result.h"

namespace mk::kernels::gather {

/// The order in which the node's others get pieces of the rows.
enum class PieceOrder : std::uint8_t {
  kRankByRank,    ///< all of one's, then the next one's: that one can go on with a rank's rows
  kPieceByPiece,  ///< each piece to all of them: who needs rows of everybody gets the first soon
};

/// The steps of a launch in which this rank has `rows` rows, `piece_bytes` of them at a time.
/// `Engines` has
///
///     Status copy(turn, begin, end);   bytes [begin, end) of the rank's packed rows, to the local
///                                      rank `turn` before this one
///     Status show(turn, chunks);       there, these chunks of this rank
///     Status yield();                  over nodes, after each piece: others have a turn
template <class Engines>
Status bring_rows(const GatherSchedule& gather, std::uint32_t rows, std::uint64_t piece_bytes,
                  PieceOrder order, Engines&& engines) {
  const std::uint64_t total = gather.data_bytes(rows);
  const std::uint64_t pieces = total == 0 ? 0 : (total + piece_bytes - 1) / piece_bytes;
  const std::uint32_t peers = gather.world().locals - 1;
  const auto complete = [&](std::uint64_t bytes) {
    return bytes == total ? gather.chunks(rows)
                          : static_cast<std::uint32_t>(1 + bytes / gather.geometry().chunk_bytes);
  };
  for (std::uint64_t step = 0; step < pieces * peers; ++step) {
    const bool by_rank = order == PieceOrder::kRankByRank;
    const auto turn = static_cast<std::uint32_t>(1 + (by_rank ? step / pieces : step % peers));
    const std::uint64_t begin = piece_bytes * (by_rank ? step % pieces : step / peers);
    const std::uint64_t end = std::min(total, begin + piece_bytes);
    MK_RETURN_IF_ERROR(engines.copy(turn, begin, end));
    const ChunkRange chunks{complete(begin), complete(end)};
    if (chunks.begin < chunks.end) MK_RETURN_IF_ERROR(engines.show(turn, chunks));
    if (gather.world().nodes > 1) MK_RETURN_IF_ERROR(engines.yield());
  }
  return {};
}

}  // namespace mk::kernels::gather
