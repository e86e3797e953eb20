/// \file
/// The ranks of a job, their memory, and the network between them, in virtual time. Either every
/// node is simulated, or node 0 alone, and the others are its **mirror**.
///
/// **Why the mirror is exact.** The operators' schedules know nodes only by their distance round
/// the ring: node n does to node n + d what node 0 does to node d, with equal sizes where shards
/// are equal, and all nodes begin at one time at equal cost. So the history of node n is that of
/// node 0 with n added to every node's number. The command that node 0 gives for node d at some
/// time is therefore, turned back by d, the one that node N - d gives for node 0 at that time: it
/// is delivered to node 0 itself, its flag and its place turned by d. Where shards differ by a row
/// the mirror has node 0's, which is the largest: it is late by a row's share, never early.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/banks.h"
#include "kernels/comm/rank_context.h"
#include "shm/command.h"
#include "shm/ring.h"
#include "tests/sim/operators/costs.h"
#include "tests/sim/operators/virtual_threads.h"

namespace mk::sim {

/// Receive memory of an operator that other nodes write, in planes one after the other. A plane
/// begins with a header, which means something here; elements of matrices do not, and stay away.
struct ReceiveRegion {
  enum class Planes {
    kPeers,  ///< [banks][nodes - 1], as FlagMap counts them
    kNodes,  ///< [banks][nodes]
    kRanks,  ///< [banks][nodes * locals]
  };
  std::uint64_t begin = 0;
  std::uint64_t plane_bytes = 0;
  std::uint32_t banks = 0;
  Planes planes = Planes::kPeers;
  bool whole = false;  ///< all of a plane means something: tables
};

/// The numbers of an operator that depend on which node is which.
struct NodeNumbers {
  std::vector<kernels::FlagMap> flags;
  std::vector<ReceiveRegion> regions;
  /// A command's payload has come to the local rank's workspace at `offset`, sent by the node that
  /// is `distance` before it: makes of the mirror's bytes what that node would have sent. Null:
  /// nothing in it depends on the node.
  std::function<void(std::uint32_t local, std::byte* workspace, std::uint64_t offset,
                     std::uint64_t bytes, std::uint32_t distance)>
      turn;
};

struct ClusterOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  bool mirrored = false;
  std::uint64_t workspace_bytes = 0;
  std::uint32_t flag_count = 0;
  std::uint32_t lanes = 1;
  std::uint32_t slot_count_log2 = 10;
  std::uint32_t ended = 0;  ///< the launch that all ranks have ended: arrival flags show it
};

class VirtualCluster {
 public:
  VirtualCluster(VirtualThreads& threads, const ClusterOptions& options, const Costs& costs,
                 NodeNumbers numbers);
  ~VirtualCluster();
  VirtualCluster(const VirtualCluster&) = delete;
  VirtualCluster& operator=(const VirtualCluster&) = delete;

  /// Ranks that are simulated: the first ones.
  std::uint32_t size() const { return static_cast<std::uint32_t>(ranks_.size()); }
  kernels::RankContext context(std::uint32_t rank);
  /// Takes what the rank's send blocks have committed.
  void take(std::uint32_t rank);
  /// A breach of the contract by a sender, or empty.
  const std::string& complaint() const { return complaint_; }
  /// Sent by the rank.
  std::uint64_t bytes_of(std::uint32_t rank) const { return ranks_[rank]->bytes; }
  std::uint64_t commands_of(std::uint32_t rank) const { return ranks_[rank]->commands; }

 private:
  struct Rank {
    kernels::World world;
    std::byte* workspace = nullptr;
    std::vector<shm::CommandSlot> slots;
    std::vector<shm::LaneControl> controls;
    std::vector<shm::RingProducer> producers;
    std::vector<shm::RingConsumer> consumers;
    std::vector<kernels::RailPeer> rail_peers;
    std::vector<std::uint32_t> flags;
    std::uint32_t abort = 0;
    Server out, in;  ///< its rail
    std::uint64_t bytes = 0;
    std::uint64_t commands = 0;
  };
  /// A command on its way, as its receiver sees it.
  struct Delivery {
    std::uint32_t to = 0;    ///< rank
    std::uint32_t flag = 0;  ///< of the operator's
    std::uint32_t epoch = 0;
    std::uint32_t distance = 0;  ///< turned by so many nodes; 0: not
    std::uint64_t offset = 0;
    std::vector<std::byte> payload;  ///< what of it means something here
  };

  void send(Rank& rank, std::uint32_t lane, const shm::Command& command);
  void deliver(const Delivery& delivery);
  void complain(std::string text);
  std::uint32_t turned_flag(std::uint32_t flag, std::uint32_t at) const;
  /// Where in which region an offset is.
  struct Place {
    const ReceiveRegion* region = nullptr;  ///< null: in none
    std::uint64_t bank = 0;
    std::uint32_t plane = 0;
    std::uint64_t within = 0;
  };
  Place place_of(std::uint64_t offset) const;
  std::uint64_t planes_of(const ReceiveRegion& region) const;
  std::uint64_t turned_offset(const Place& place, std::uint32_t at) const;
  std::uint32_t meaning_bytes(const Place& place, std::uint32_t bytes) const;

  VirtualThreads& threads_;
  const ClusterOptions options_;
  const Costs costs_;
  const NodeNumbers numbers_;
  std::string complaint_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace mk::sim
