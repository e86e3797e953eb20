/// \file
/// By what an endpoint knows who speaks to it: each peer is told a token of its own, which no other
/// peer has seen, and puts it on what it sends.
#pragma once

#include <array>
#include <optional>

#include "daemon/fabric/blob.h"
#include "shm/limits.h"

namespace mk::fabric::verbs {

/// Constant once drawn.
class Passes {
 public:
  Status draw() {
    for (Token& token : tokens_) {
      MK_ASSIGN_OR_RETURN(token, make_token());
    }
    return {};
  }
  const Token& of(PeerNumber peer) const { return tokens_[peer < kAny ? peer : kAny]; }
  /// Who was told `pass`; nobody: nullopt.
  std::optional<PeerNumber> owner(const Token& pass) const {
    std::optional<PeerNumber> found;
    for (PeerNumber peer = 0; peer <= kAny; ++peer) {
      if (same_token(tokens_[peer], pass)) found = peer < kAny ? peer : kAnyPeer;
    }
    return found;
  }

 private:
  static constexpr PeerNumber kAny = shm::kNodesMax;
  std::array<Token, kAny + 1> tokens_{};
};

}  // namespace mk::fabric::verbs
