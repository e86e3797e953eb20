/// \file
/// Where peers' endpoints are, as far as they have said. An endpoint keeps its token when its port
/// gets another GID or LID, and tells; what the Peer service once handed out is then out of date.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "daemon/fabric/verbs/wire.h"

namespace mk::fabric::verbs {

/// Any thread.
class Directory {
 public:
  static constexpr std::size_t kPeersMax = 1024;

  /// Keeps the newest that is known of each endpoint. Whether it was news.
  bool learn(const Address& address) {
    const std::lock_guard lock(mutex_);
    const auto found = newest_.find(address.endpoint);
    if (found != newest_.end()) {
      if (found->second.version >= address.version) return false;
      found->second = address;
      return true;
    }
    // Endpoints of daemons that have ended are never forgotten otherwise; who is dropped tells
    // again with its next connection.
    if (newest_.size() == kPeersMax) newest_.erase(newest_.begin());
    newest_.emplace(address.endpoint, address);
    return true;
  }
  /// The newest address of `known`'s endpoint.
  Address newest(const Address& known) const {
    const std::lock_guard lock(mutex_);
    const auto found = newest_.find(known.endpoint);
    return found != newest_.end() && found->second.version > known.version ? found->second : known;
  }
  std::vector<Address> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<Address> addresses;
    for (const auto& [token, address] : newest_) addresses.push_back(address);
    return addresses;
  }

 private:
  mutable std::mutex mutex_;
  std::map<Token, Address> newest_;
};

}  // namespace mk::fabric::verbs
