/// \file
/// Where peers' endpoints are, as far as they have said. An endpoint keeps its token when its port
/// gets another GID or LID, and tells. What the Peer service once handed out is then out of date.
#pragma once

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "daemon/fabric/verbs/wire.h"
#include "shm/limits.h"

namespace mk::fabric::verbs {

/// An endpoint of a peer: what another peer says of it does not count.
struct Remote {
  PeerNumber peer = kAnyPeer;
  Address address;

  bool is(PeerNumber who, const Token& endpoint) const {
    return peer == who && same_token(address.endpoint, endpoint);
  }
};

/// Any thread.
class Directory {
 public:
  /// Endpoints: two on every rail of every node.
  static constexpr std::size_t kPeersMax = std::size_t{2} * shm::kLocalRanksMax * shm::kNodesMax;

  /// Keeps the newest that is known of each endpoint. Whether it was news.
  bool learn(const Remote& remote) {
    const Address& address = remote.address;
    const std::lock_guard lock(mutex_);
    const auto found = newest_.find({remote.peer, address.endpoint});
    if (found != newest_.end()) {
      if (found->second.version >= address.version) return false;
      found->second = address;
      return true;
    }
    // Endpoints of daemons that have ended are never forgotten otherwise; who is dropped tells
    // again with its next connection.
    if (newest_.size() == kPeersMax) newest_.erase(newest_.begin());
    newest_.emplace(std::pair(remote.peer, address.endpoint), address);
    return true;
  }
  /// The newest address of `known`'s endpoint.
  Address newest(const Remote& remote) const {
    const Address& known = remote.address;
    const std::lock_guard lock(mutex_);
    const auto found = newest_.find({remote.peer, known.endpoint});
    return found != newest_.end() && found->second.version > known.version ? found->second : known;
  }
  std::vector<Remote> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<Remote> all;
    for (const auto& [whose, address] : newest_) all.push_back({whose.first, address});
    return all;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<PeerNumber, Token>, Address> newest_;
};

}  // namespace mk::fabric::verbs
