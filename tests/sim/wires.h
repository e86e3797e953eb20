/// \file
/// The streams between daemons: ordered, each message with a delay of its own; they break with
/// everything that is on its way, the two ends notice at different times, and come back. What
/// daemon/control/peer_transport.h promises, and nothing more.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/control/peer_transport.h"
#include "tests/sim/world.h"

namespace mk::sim {

using daemon::NodeId;

/// One daemon's end of all its streams.
class WireEnd {
 public:
  virtual ~WireEnd() = default;
  virtual void peer_message(NodeId from, const daemon::PeerMessage& message) = 0;
  virtual void peer_down(NodeId from, const std::string& reason) = 0;
  virtual daemon::PeerHello hello() const = 0;
};

class Wires {
 public:
  /// `delay_ns_max`: of a message.
  Wires(World& world, std::uint64_t delay_ns_max) : world_(world), delay_ns_max_(delay_ns_max) {}

  /// A daemon is there, and will soon have a stream to every other one.
  void join(NodeId node, const std::shared_ptr<WireEnd>& end);
  /// It is gone, at once; the others notice.
  void leave(NodeId node);
  /// The stream between two daemons breaks, and cannot be made again for a while.
  void cut(NodeId a, NodeId b, const std::string& reason, std::uint64_t for_ns);

  Status send(NodeId from, NodeId to, const daemon::PeerMessage& message);

 private:
  struct Stream {
    std::uint64_t number = 0;  ///< of this life of it; what belongs to an earlier one is lost
    bool up = false;
    std::set<NodeId> told;  ///< ends that believe it to be up
    std::uint64_t cut_until_ns = 0;
    InOrder to_low, to_high;
  };
  Stream& stream(NodeId a, NodeId b) { return streams_[std::minmax(a, b)]; }
  void make_later(NodeId a, NodeId b, std::uint64_t delay_ns);
  void make(NodeId a, NodeId b);
  void lose(NodeId a, NodeId b, const std::string& reason);
  void notice(NodeId who, NodeId other, const std::string& reason);
  void deliver(NodeId from, NodeId to, daemon::PeerMessage message);

  World& world_;
  const std::uint64_t delay_ns_max_;
  std::map<NodeId, std::shared_ptr<WireEnd>> ends_;
  std::map<std::pair<NodeId, NodeId>, Stream> streams_;
};

}  // namespace mk::sim
