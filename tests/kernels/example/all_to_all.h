/// \file
/// A whole operator in one small file, as an example: the page
/// deploy/docs/operator.md explains it. AllToAll: each rank brings a block of bytes for every
/// rank, and gets every rank's block for it.
///
///     role     does                                       waits for      then shows
///     share    blocks for this node -> their slots                       here[rank]
///     send     blocks for a node -> staging -> its rank   staging        arrival[node]
///              of the same local rank
///     receive  a node's blocks -> their slots here        arrival[node]  here[source]
///     collect  slots -> the caller's output               here[source]
///
/// Why nothing is overwritten too early: slots and receive banks are there twice, and launches take
/// them in turn. In each launch a rank hears from every rank that it writes to. So a rank in launch
/// e + 2, which has ended e + 1, knows that all those have begun e + 1, and so have ended e.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/channel.h"
#include "kernels/comm/exchange.h"
#include "kernels/comm/launch.h"
#include "kernels/gather/copy_job.h"

namespace mk::kernels::example {

/// 1, geometry: all ranks agree on it. It says where everything lies in a rank's workspace. All
/// offsets are in bytes.
struct AllToAllGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t block_bytes = 0;         ///< what a rank brings for another, a multiple of 16
  std::uint32_t slot_banks = kBanksMax;  ///< one is a fault, which a test must see

  MK_HOST_DEVICE std::uint32_t world() const { return nodes * locals; }
  /// The flag that a source's block is in its slot; a line each, behind what every workspace has.
  MK_HOST_DEVICE std::uint64_t here(std::uint32_t source) const {
    return WorkspaceHead{locals}.bytes() + WorkspaceHead::kLine * source;
  }
  MK_HOST_DEVICE std::uint64_t slot(std::uint32_t epoch, std::uint32_t source) const {
    return here(world()) +
           std::uint64_t{bank_of(epoch, slot_banks) * world() + source} * block_bytes;
  }
  /// A node's blocks on their way out, and what has come from a node: one block for each local
  /// rank.
  MK_HOST_DEVICE std::uint64_t staging(std::uint32_t bank, std::uint32_t node) const {
    return slot(0, 0) + std::uint64_t{kBanksMax} * world() * block_bytes +
           (bank * nodes + node) * node_bytes();
  }
  MK_HOST_DEVICE std::uint64_t receive(std::uint32_t bank, std::uint32_t node) const {
    return staging(kBanksMax, 0) + (bank * nodes + node) * node_bytes();
  }
  MK_HOST_DEVICE std::uint64_t workspace_bytes() const { return receive(kBanksMax, 0); }
  MK_HOST_DEVICE std::uint64_t node_bytes() const { return std::uint64_t{locals} * block_bytes; }
  /// Arrival flags: one chunk from each other node, in each bank.
  MK_HOST_DEVICE FlagMap flags() const { return {nodes, kBanksMax, 1}; }
};

struct AllToAllLaunch : Launch {
  AllToAllGeometry plan;
  const std::byte* input = nullptr;  ///< the caller's: a block for each rank, in their order
  std::byte* output = nullptr;       ///< a block from each rank
};

/// 3, block: what a worker of a role sees. Places and flags have names here.
template <class Executor>
class AllToAllBlock : public OperatorBlock<Executor> {
 public:
  MK_HOST_DEVICE AllToAllBlock(Executor& executor_in, const AllToAllLaunch& launch_in, Role role_in,
                               std::uint32_t index_in, BlockTotals& totals_in)
      : OperatorBlock<Executor>(executor_in, launch_in, role_in, index_in, totals_in),
        launch(launch_in),
        plan(launch_in.plan) {}

  const AllToAllLaunch& launch;
  const AllToAllGeometry& plan;

  MK_HOST_DEVICE void copy(const std::byte* from, std::byte* to, std::uint64_t bytes) {
    CopyJob job;
    job.source = from;
    job.add_target(to);
    job.rows = 1;
    job.row_bytes = static_cast<std::uint32_t>(bytes);
    this->executor.copy(job);
  }
  /// `source`'s block for a local rank goes into its slot there, and is shown.
  MK_HOST_DEVICE void hand_over(std::uint32_t source, std::uint32_t local, const std::byte* from) {
    copy(from, this->at(local, plan.slot(this->epoch, source)), plan.block_bytes);
    this->publish_at_local(local, plan.here(source));
  }
  /// `source`'s block is in its slot here. From another node it comes by two steps: 2 hops.
  MK_HOST_DEVICE bool await_here(std::uint32_t source) {
    const auto who = [&] {
      return this->site(FlagKind::kRowsReady, source, /*index0=*/source, /*index1=*/0, /*hops=*/2);
    };
    return this->await(who, this->word(this->at(plan.here(source))), this->epoch);
  }
};

// 4 and 5, protocol and roles: what waits for what. Each answers whether it ran to its end.

template <class Executor>
MK_HOST_DEVICE inline bool share(AllToAllBlock<Executor>& block) {
  if (!block.check_local_records()) return false;  // another m on this node ends the launch
  for (std::uint32_t local = 0; local < block.world.locals; ++local) {
    const std::uint32_t to = block.rank_of(local);
    block.hand_over(block.world.rank(), local,
                    block.launch.input + std::uint64_t{to} * block.plan.block_bytes);
  }
  return true;
}

template <class Executor>
MK_HOST_DEVICE inline bool send(AllToAllBlock<Executor>& block) {
  const World& world = block.world;
  const AllToAllGeometry& plan = block.plan;
  // The daemon has read what launch e - 2 left in this bank of staging.
  if (!block.await_staging_free()) return false;
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    block.copy(block.launch.input + node * plan.node_bytes(),
               block.at(plan.staging(block.bank, node)), plan.node_bytes());
  }
  Channel<Executor> channel(block);
  const FlagMap flags = plan.flags();
  // Another node first on each node, so that no link is everybody's first. Each route leads to the
  // rank of the same local rank there.
  const auto route_to = [&](std::uint32_t peer) {
    const std::uint32_t node = (world.node + 1 + peer) % world.nodes;
    return Route{node, plan.staging(block.bank, node), plan.receive(block.bank, world.node),
                 flags.arrival(block.bank, node, world.node, 0)};
  };
  // All that goes to a node is one chunk, and a peer on each other node gets one.
  const Sending one_each{.run = ChunkRun::below(/*chunks=*/1, /*first=*/0, /*step=*/1),
                         .peers = world.nodes - 1,
                         .chunk_bytes = plan.node_bytes(),
                         .origin = world.node,
                         .await_releases = &flags};
  const auto all_of_it = [&](std::uint32_t /*chunk*/) {
    return ByteRange{/*begin=*/0, static_cast<std::uint32_t>(plan.node_bytes())};
  };
  // It is all in staging: what is asked about is ready.
  const auto ready = [](std::uint32_t /*chunk*/, std::uint32_t count) { return count; };
  if (!channel.send_when_ready(one_each, route_to, all_of_it, ready)) return false;
  channel.note_sent();
  // Chunks of this launch to a node, and from it.
  const auto one_chunk = [](std::uint32_t) { return 1u; };
  return end_exchange(block, channel, flags, one_chunk, one_chunk);
}

template <class Executor>
MK_HOST_DEVICE inline bool receive(AllToAllBlock<Executor>& block) {
  const World& world = block.world;
  const FlagMap flags = block.plan.flags();
  for (std::uint32_t node = 0; node < world.nodes; ++node) {
    if (node == world.node) continue;
    const std::uint32_t flag = flags.arrival(block.bank, world.node, node, 0);
    if (!block.await_arrival_flag(node, flag, 0)) return false;
    const std::byte* from = block.at(block.plan.receive(block.bank, node));
    for (std::uint32_t local = 0; local < world.locals; ++local)
      block.hand_over(world.rail_peer(node), local,
                      from + std::uint64_t{local} * block.plan.block_bytes);
  }
  return true;
}

template <class Executor>
MK_HOST_DEVICE inline bool collect(AllToAllBlock<Executor>& block) {
  for (std::uint32_t source = block.index; source < block.plan.world();
       source += block.launch.blocks.compute) {
    if (!block.await_here(source)) return false;
    block.copy(block.at(block.plan.slot(block.epoch, source)),
               block.launch.output + std::uint64_t{source} * block.plan.block_bytes,
               block.plan.block_bytes);
  }
  return true;
}

}  // namespace mk::kernels::example
