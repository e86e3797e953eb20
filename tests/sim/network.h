/// \file
/// The `sim` fabric: all endpoints of one cluster on one simulated network, as hostile as each
/// delivery contract of daemon/fabric/fabric.h allows and no more:
///
/// - data lands in pieces, in any order, at any time between `post` and its arrival;
/// - ordered: the flags of one link show in order, each after its own data; unordered: arrivals
///   come in any order, each after its own data; either may come long after the completion;
/// - completions come in any order, some twice; one that is lost brings its link down in the end;
/// - `post` takes fewer writes than offered, or none for a while;
/// - a link fails at any moment: what is outstanding has landed wholly, in part, or not at all.
///
/// It checks what a NIC could see: that a write stays inside registered memory at both ends, and
/// that no memory goes while a write that names it is in flight.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/control/peer_transport.h"
#include "daemon/fabric/fabric.h"
#include "tests/sim/world.h"

namespace mk::sim {

using daemon::NodeId;

/// What the network is like, drawn once per cluster.
struct NetworkPlan {
  fabric::DeliveryContract contract = fabric::DeliveryContract::kOrdered;
  std::uint32_t link_depth = 64;
  std::uint64_t delay_ns_min = 500;
  std::uint64_t delay_ns_max = 50 * kMicrosecond;
  std::uint32_t short_posts = 0;    ///< of a million posts
  std::uint32_t duplicates = 0;     ///< completions that come twice, of a million
  std::uint32_t late_arrivals = 0;  ///< that come after the completion, of a million
  std::uint32_t lost = 0;           ///< completions that never come, of a million writes
  std::uint64_t write_timeout_ns = 2 * kSecond;
};

/// A memory file, by which a registered range and its owner's own mapping find each other.
using FileId = ino_t;
/// The file behind a descriptor.
FileId file_of(int fd);

/// Payload bytes that have just arrived in registered memory.
struct Landing {
  FileId file = 0;
  std::uint64_t offset = 0;  ///< in the file
  std::uint64_t bytes = 0;
  std::uint32_t epoch = 0;  ///< of the write they belong to
};

/// Who looks on.
class NetworkWatch {
 public:
  virtual ~NetworkWatch() = default;
  virtual void on_data(const Landing& landing) = 0;
  /// An arrival flag in this file was written by the network.
  virtual void on_flag(FileId file) = 0;
  /// The network is about to fail a link by its own doing.
  virtual void on_trouble(NodeId from, NodeId to, std::uint64_t for_ns) = 0;
  /// Whether `owner` may have taken memory back that `writer` still writes to: it could not ask.
  virtual bool may_have_lost_touch(NodeId writer, NodeId owner) = 0;
};

class Network {
 public:
  Network(World& world, const NetworkPlan& plan, NetworkWatch& watch);
  ~Network();

  /// A new endpoint; `wake` is called when it has something for its proxy. Gone before this.
  std::unique_ptr<fabric::Endpoint> open(NodeId node, std::uint32_t rail,
                                         std::function<void()> wake);
  /// The daemon of `node` dies: whatever its endpoints had under way stops here, and nothing that
  /// they are asked from now on is held against them.
  void kill(NodeId node);

  /// The links between two nodes, both ways, fail.
  void break_links(NodeId a, NodeId b);
  /// All links of the node's port fail, and none can be made for a while.
  void flap(NodeId node, std::uint32_t rail, std::uint64_t for_ns);
  /// The node's endpoints take next to nothing for a while.
  void storm(NodeId node, std::uint64_t for_ns);

  /// What is held on behalf of a node.
  struct Counts {
    std::size_t local_regions = 0, remote_regions = 0, links = 0, writes = 0;
  };
  Counts counts(NodeId node) const;

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace mk::sim
