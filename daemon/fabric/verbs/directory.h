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
  /// Endpoints of one peer.
  static constexpr std::size_t kOfPeerMax = 64;
  /// Of all that nobody is known to speak for: two on every rail of every node.
  static constexpr std::size_t kUnnamedMax = std::size_t{2} * shm::kLocalRanksMax * shm::kNodesMax;

  /// Keeps the newest that is known of each endpoint. Whether it was news.
  bool learn(const Remote& remote) {
    const Address& address = remote.address;
    const std::lock_guard lock(mutex_);
    const auto found = newest_.find({remote.peer, address.endpoint});
    if (found != newest_.end()) {
      if (found->second.address.version >= address.version) return false;
      found->second.address = address;
      return true;
    }
    forget_oldest(remote.peer);
    newest_.emplace(std::pair(remote.peer, address.endpoint), Known{address, ++learned_});
    return true;
  }
  /// The newest address of `known`'s endpoint.
  Address newest(const Remote& remote) const {
    const Address& known = remote.address;
    const std::lock_guard lock(mutex_);
    const auto found = newest_.find({remote.peer, known.endpoint});
    return found != newest_.end() && found->second.address.version > known.version
               ? found->second.address
               : known;
  }
  std::vector<Remote> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<Remote> all;
    for (const auto& [whose, known] : newest_) all.push_back({whose.first, known.address});
    return all;
  }

 private:
  struct Known {
    Address address;
    std::uint64_t number = 0;  ///< grows with each endpoint that is new
  };
  /// Endpoints of daemons that have ended are never forgotten otherwise. An endpoint that is
  /// dropped tells again with its next connection. No peer pushes another's out.
  void forget_oldest(PeerNumber peer) {
    auto oldest = newest_.end();
    std::size_t count = 0;
    for (auto one = newest_.lower_bound({peer, Token{}});
         one != newest_.end() && one->first.first == peer; ++one, ++count) {
      if (oldest == newest_.end() || one->second.number < oldest->second.number) oldest = one;
    }
    if (count >= (peer == kAnyPeer ? kUnnamedMax : kOfPeerMax)) newest_.erase(oldest);
  }

  mutable std::mutex mutex_;
  std::map<std::pair<PeerNumber, Token>, Known> newest_;
  std::uint64_t learned_ = 0;
};

}  // namespace mk::fabric::verbs
