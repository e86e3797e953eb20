/// \file
/// The end of a send role's work where every node sends to every other (GEMM+AllReduce,
/// GEMM+ReduceScatter): the bank's releases, if it has any, and the refresh of idle flags.
#pragma once

#include <cstdint>

#include "kernels/comm/channel.h"

namespace mk::kernels {

/// Once per rank and launch, by one send block (comm/banks.h). When a refresh is due, sends this
/// rank's and sees the peers'. Where there are releases: after all receive blocks have read this
/// rank's receive bank, tells the rail peers that it may be filled again. `sent(node)` and
/// `received(node)`: the chunks of this launch to and from that node.
template <class Executor, class Sent, class Received>
MK_HOST_DEVICE inline bool end_exchange(OperatorBlock<Executor>& block, Channel<Executor>& channel,
                                        const FlagMap& flags, Sent&& sent, Received&& received) {
  const World& world = block.world;
  const bool refresh = refresh_due(block.epoch, block.banks);
  for (std::uint32_t i = 1; refresh && i < world.nodes; ++i) {
    const std::uint32_t node = (world.node + i) % world.nodes;
    if (!block.await_release(flags, node) ||
        !channel.signal_idle(flags, node, world.node, sent(node)))
      return false;
  }
  // The peers wait for these, as this rank does for theirs.
  channel.flush();
  for (std::uint32_t i = 1; refresh && i < world.nodes; ++i) {
    const std::uint32_t node = (world.node + i) % world.nodes;
    const bool seen = flags.for_idle_granules(received(node), [&](std::uint32_t chunk) {
      const std::uint32_t flag = flags.arrival(block.bank, world.node, node, chunk);
      return block.await_arrival_flag(node, flag, chunk);
    });
    if (!seen) return false;
  }
  if (!flags.has_releases()) return true;
  if (!block.await_blocks(Role::kReceive, block.common.blocks.receive, 2)) return false;
  for (std::uint32_t i = 1; i < world.nodes; ++i) {
    if (!channel.release(flags, (world.node + i) % world.nodes)) return false;
  }
  channel.flush();
  return true;
}

}  // namespace mk::kernels
