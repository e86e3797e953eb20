/// \file
/// How a rank's share blocks hand out its rows: an executor's choice.
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

}  // namespace mk::kernels::gather
