/// \file
/// By what a receiving endpoint knows who wrote: it gives each peer a number of its own (in its
/// address). The peer's writes carry that above their immediate; where there is no room for it, the
/// endpoint that writes says it once, when it introduces itself.
#pragma once

#include <array>
#include <optional>
#include <unordered_map>

#include "daemon/fabric/blob.h"
#include "shm/limits.h"

namespace mk::fabric::ofi {

/// Constant once drawn.
class SenderTags {
 public:
  Status draw() {
    while (peers_.size() < tags_.size()) {
      MK_ASSIGN_OR_RETURN(const Token random, make_token());
      std::uint32_t tag = 0;
      std::memcpy(&tag, random.data(), sizeof tag);
      // 0 says that there is none.
      if (tag == 0 || peers_.contains(tag)) continue;
      const std::size_t place = peers_.size();
      tags_[place] = tag;
      peers_.emplace(tag, place == kAny ? kAnyPeer : static_cast<PeerNumber>(place));
    }
    return {};
  }
  /// Whether they were drawn: the provider lets peers say them.
  bool usable() const { return !peers_.empty(); }
  /// 0: there are none.
  std::uint32_t of(PeerNumber peer) const { return tags_[peer < kAny ? peer : kAny]; }
  /// Whose `tag` is; nobody's: nullopt. Without tags, anybody's.
  std::optional<PeerNumber> peer(std::uint32_t tag) const {
    if (!usable()) return kAnyPeer;
    const auto found = peers_.find(tag);
    return found == peers_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  static constexpr std::size_t kAny = shm::kNodesMax;
  std::array<std::uint32_t, kAny + 1> tags_{};
  std::unordered_map<std::uint32_t, PeerNumber> peers_;
};

}  // namespace mk::fabric::ofi
