/// \file
/// Banks and the arrival flags that go with them. A launch uses bank `epoch & 1` of everything that
/// crosses the network; launch e may fill a bank only after its reader is done with launch e - 2
/// and has said so by a release flag.
#pragma once

#include <cstdint>

#include "kernels/comm/types.h"
#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::kernels {

inline constexpr std::uint32_t kBanks = 2;

MK_HOST_DEVICE constexpr std::uint32_t bank_of(std::uint32_t epoch) { return epoch & (kBanks - 1); }

/// The launch that used the same bank before. Before launch 3 this is not a launch yet; flags,
/// which start at 0, count as having reached it.
MK_HOST_DEVICE constexpr std::uint32_t previous_use(std::uint32_t epoch) { return epoch - kBanks; }

/// Where node `from` stands among the nodes - 1 others that node `at` hears of.
MK_HOST_DEVICE constexpr std::uint32_t peer_index(std::uint32_t at, std::uint32_t from) {
  return from < at ? from : from - 1;
}

/// The arrival flags of an operator that moves chunks between rail peers, as indices into its flag
/// range:
///
///     arrival(bank, from, chunk)   "chunk has landed in my receive bank"       written for the
///     sender `from` release(bank, from)          "you may fill my bank at `from` again" written
///     for the reader `from`
///
/// Each has one writer. The arrivals of one (bank, sender) begin at a granule of their own, because
/// an unordered fabric rebuilds the epochs of a granule from its recent ones (shm/flag.h): see
/// refresh_due().
struct FlagMap {
  std::uint32_t nodes = 1;
  std::uint32_t chunks_max = 0;

  MK_HOST_DEVICE constexpr std::uint32_t stride() const {
    return static_cast<std::uint32_t>(round_up_to(chunks_max, shm::kFlagGranule));
  }
  MK_HOST_DEVICE constexpr std::uint32_t arrival(std::uint32_t bank, std::uint32_t at,
                                                 std::uint32_t from, std::uint32_t chunk) const {
    return (bank * (nodes - 1) + peer_index(at, from)) * stride() + chunk;
  }
  MK_HOST_DEVICE constexpr std::uint32_t release(std::uint32_t bank, std::uint32_t at,
                                                 std::uint32_t from) const {
    return kBanks * (nodes - 1) * stride() + bank * (nodes - 1) + peer_index(at, from);
  }
  MK_HOST_DEVICE constexpr std::uint32_t count() const {
    return nodes == 1 ? 0 : kBanks * (nodes - 1) * (stride() + 1);
  }
};

/// Launches with fewer chunks leave the higher flags alone. So that no granule falls 512 epochs
/// behind, every 128th use of a bank its sender also shows the epoch in the first flag of each
/// granule that the launch does not reach.
MK_HOST_DEVICE constexpr bool refresh_due(std::uint32_t epoch) {
  return (epoch / kBanks) % 128 == 0;
}

}  // namespace mk::kernels
