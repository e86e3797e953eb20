/// \file
/// How a rank's share blocks hand out its rows, and its receive blocks those that come over the
/// network: an executor's choice.
#pragma once

#include <cstdint>

namespace mk::kernels::gather {

struct Sharing {
  std::uint32_t parts = 1;  ///< of each chunk, each one block's
  /// So many of the first chunks a broadcast brings to this rank's own slot, for the network,
  /// before any to the local ranks: the network, which takes longest, begins so much sooner. Their
  /// parts are counted as those of chunks after the last one.
  std::uint32_t network_first = 0;
  /// Blocks take their steps at run time (next_step), also those of what they pass on: they are not
  /// equally quick.
  bool taken = false;
  /// The node's other ranks get the rows, and see them shown, by something else than blocks, which
  /// the first of the blocks starts (a broadcast only): see start_dma in roles.h.
  bool by_dma = false;
};

/// How receive blocks pass on what comes over the network to this rank's rail.
struct PassingOn {
  std::uint32_t parts = 1;  ///< of each chunk, each one block's
  bool taken = false;       ///< as Sharing::taken
  /// The same engines pass on all but headers, so many chunks of a shard at a time (a piece). The
  /// first of the blocks tells them when those are there: see pass_on_by_dma in roles.h. 0: blocks
  /// do.
  std::uint32_t dma_chunks = 0;
};

}  // namespace mk::kernels::gather
