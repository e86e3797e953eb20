/// \file
/// The daemon's links to its rail peers' endpoints. They belong to the daemon: jobs share them, and
/// a link stays up between jobs. One in error is connected anew, with backoff: by the next job that
/// wants it, or by itself while the daemon at the other end is there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "daemon/control/peer_transport.h"
#include "daemon/fabric/fabric.h"
#include "daemon/proxy/stats.h"

namespace mk::daemon {
struct LinkInfo;
}

namespace mk::daemon::control {

/// From which rail of this node to which rail of which node.
struct LinkKey {
  std::uint32_t rail = 0;
  NodeId peer = 0;
  std::uint32_t peer_rail = 0;

  friend bool operator<(const LinkKey& a, const LinkKey& b) {
    return std::tie(a.rail, a.peer, a.peer_rail) < std::tie(b.rail, b.peer, b.peer_rail);
  }
};

/// One connection of an endpoint. It is given up when the table and the last session that uses it
/// have let it go, so that a reconnected link never shares its id with writes of the old one.
class Link {
 public:
  Link(fabric::Endpoint& endpoint, fabric::LinkId link_id, std::shared_ptr<LinkStats> counters)
      : id(link_id), stats(std::move(counters)), endpoint_(endpoint) {}
  ~Link() { endpoint_.disconnect(id); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const fabric::LinkId id;
  const std::shared_ptr<LinkStats> stats;

 private:
  fabric::Endpoint& endpoint_;
};

class LinkTable {
 public:
  /// `now_ns`: the clock of all times here.
  LinkTable(std::vector<fabric::Endpoint*> endpoints, std::function<std::uint64_t()> now_ns);

  /// The link to `address`, connected now if it is not, or leads to where the peer was before, and
  /// its backoff is over and `may_block`. Null when it is not up: see `reason`.
  std::shared_ptr<Link> get(const LinkKey& key, const Bytes& address, const std::string& peer_name,
                            bool may_block);
  /// Why the link is not up; empty when it is, or was never wanted.
  std::string reason(const LinkKey& key) const;

  /// The endpoint reported link `id` of `rail` to be in error.
  void on_error(std::uint32_t rail, fabric::LinkId id, const std::string& reason);
  /// The daemon at the other end is gone: its links are let go, and may be connected at once when
  /// it is back.
  void on_peer_down(NodeId peer, const std::string& reason);
  /// The peer's rail has another address: the links to it that are not up may be connected at once.
  void on_moved(NodeId peer, std::uint32_t peer_rail);
  /// The peer has left the cluster, after on_peer_down.
  void forget(NodeId peer);

  /// A link in error to a peer that is `reachable` and that is to be tried again now although
  /// nobody asks: for `get`. Later than jobs that wait would try, and one at a time, since a try
  /// may block.
  std::optional<LinkKey> retry_due(const std::function<bool(NodeId)>& reachable) const;

  std::vector<LinkInfo> snapshot(const std::function<std::string(NodeId)>& describe) const;
  std::size_t up_count() const;

 private:
  struct Entry {
    std::shared_ptr<Link> link;  ///< null when not up
    Bytes address;               ///< that it was connected to
    std::shared_ptr<LinkStats> stats = std::make_shared<LinkStats>();
    std::string reason = "not tried yet";
    bool in_error = false;
    std::uint64_t since_ns = 0;  ///< when it got into its state
    std::uint64_t backoff_ns = 0;
    std::uint64_t next_try_ns = 0;
  };
  /// The pause before the next try begins now: a connect that blocked until its deadline is no part
  /// of it.
  void set_error(Entry& entry, const std::string& reason);

  std::vector<fabric::Endpoint*> endpoints_;
  std::function<std::uint64_t()> now_;
  std::map<LinkKey, Entry> entries_;
};

}  // namespace mk::daemon::control
