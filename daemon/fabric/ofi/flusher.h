/// \file
/// Makes what the device has written into a GPU's memory visible to the GPU. The device itself
/// reads one byte back, which comes only when what it had written there before has come
/// (`../verbs/flusher.h` says why).
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "daemon/fabric/ofi/link.h"

namespace mk::fabric::ofi {

class Flusher {
 public:
  /// `domain` is one with `reaches_gpus`.
  static Result<std::unique_ptr<Flusher>> open(const Domain& domain);

  // -- proxy thread --
  /// False: no room now.
  bool flush(const OfiLocalRegion& region, std::uint64_t cookie);
  /// kFlushed of what ended, in whatever order.
  std::size_t poll(std::span<Event> events);

 private:
  static constexpr std::size_t kDepth = 128;
  struct Read {
    fi_context2 context{};
    std::uint64_t cookie = 0;
  };
  Flusher() = default;
  Event end(void* context, ErrorCode code);

  std::array<std::byte, 64> sink_{};  ///< what is read back; nobody looks at it
  Fid<fid_mr> sink_region_;
  Port port_;  ///< leads to itself
  fi_addr_t self_ = FI_ADDR_UNSPEC;
  std::vector<Read> reads_ = std::vector<Read>(kDepth);
  std::vector<Read*> free_;
};

}  // namespace mk::fabric::ofi
