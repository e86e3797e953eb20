/// \file
/// The end of a send role's work where every node sends to every other (GEMM + AllReduce, GEMM +
/// ReduceScatter): the bank's releases, if it has any, and the refresh of idle flags.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/operator_block.h"

namespace mk::kernels {

/// Once per rank and launch, by one send block (comm/banks.h). When a refresh is due, sends this
/// rank's and sees the peers'. Where there are releases, tells the rail peers that this rank's
/// receive bank may be filled again, after all receive blocks have read it. `sent(node)` and
/// `received(node)`: the chunks of this launch to and from that node.
template <class Executor, class Sent, class Received>
MK_HOST_DEVICE inline bool end_exchange(OperatorBlock<Executor>& block,
                                        ChunkSender<Executor>& sender, const FlagMap& flags,
                                        Sent&& sent, Received&& received) {
  const World& world = block.world;
  const bool refresh = refresh_due(block.epoch, block.banks);
  for (std::uint32_t i = 1; refresh && i < world.nodes; ++i) {
    const std::uint32_t node = (world.node + i) % world.nodes;
    if (!block.await_release(flags, node)) return false;
    for (std::uint32_t chunk = FlagMap::first_idle_granule(sent(node)); chunk < flags.stride();
         chunk += shm::kFlagGranule) {
      const std::uint32_t flag = flags.arrival(block.bank, node, world.node, chunk);
      if (!sender.add_flag(node, flag, block.epoch)) return false;
    }
  }
  // The peers wait for these, as this rank does for theirs.
  sender.commit();
  for (std::uint32_t i = 1; refresh && i < world.nodes; ++i) {
    const std::uint32_t node = (world.node + i) % world.nodes;
    for (std::uint32_t chunk = FlagMap::first_idle_granule(received(node)); chunk < flags.stride();
         chunk += shm::kFlagGranule) {
      const std::uint32_t flag = flags.arrival(block.bank, world.node, node, chunk);
      if (!block.await_arrival_flag(node, flag, chunk)) return false;
    }
  }
  if (!flags.has_releases()) return true;
  if (!block.await_blocks(Role::kReceive, block.common.blocks.receive, 2)) return false;
  for (std::uint32_t i = 1; i < world.nodes; ++i) {
    const std::uint32_t node = (world.node + i) % world.nodes;
    if (!sender.add_flag(node, flags.release(node, world.node), block.epoch)) return false;
  }
  sender.commit();
  return true;
}

}  // namespace mk::kernels
