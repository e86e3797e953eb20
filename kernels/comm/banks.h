/// \file
/// Banks, and the arrival flags that go with them. A launch uses one of two banks of everything
/// that crosses the network, in turn. It may fill a bank only after its reader is done with the
/// bank's last launch.
///
/// With two banks nobody has to say so. Each rank hears, in every launch, of every rank that it
/// sends to, if only by a header, and its launch ends with that. So a rank in launch e has heard of
/// its reader's launch e - 1, which began when the reader's e - 2 had ended. So that had read its
/// bank, and seen all that came into it. With one bank the reader says so, by a release flag.
#pragma once

#include <cstdint>

#include "kernels/comm/types.h"
#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::kernels {

/// Two let a launch send while a slower rank still reads the last one's. One (for memory's sake, or
/// where engines go by addresses) works as well, at the price of the releases. A power of two.
inline constexpr std::uint32_t kBanksMax = 2;

/// Arrival flags that one operator takes, at most.
inline constexpr std::uint32_t kOperatorFlagsMax = 4096;

MK_HOST_DEVICE constexpr std::uint32_t bank_of(std::uint32_t epoch, std::uint32_t banks) {
  return epoch & (banks - 1);
}

/// The launch that used the same bank before. For the first launches this is not a launch; flags,
/// which start at 0, count as having reached it.
MK_HOST_DEVICE constexpr std::uint32_t previous_use(std::uint32_t epoch, std::uint32_t banks) {
  return epoch - banks;
}

/// Where node `from` stands among the nodes - 1 others that node `at` hears of.
MK_HOST_DEVICE constexpr std::uint32_t peer_index(std::uint32_t at, std::uint32_t from) {
  return from < at ? from : from - 1;
}

/// The arrival flags, at node `at`, of an operator that moves chunks between rail peers, as indices
/// into its flag range. Each has one writer, the rank on node `from`:
///
///  - arrival(bank, at, from, chunk): the chunk has landed in this receive bank;
///  - release(at, from), with one bank: its own receive bank may be filled again.
///
/// An unordered fabric rebuilds the epochs of a granule from its recent ones (shm/flag.h): see
/// refresh_due(). So the arrivals of one bank and sender begin at a granule of their own. With
/// many nodes this would be too many flags. Then senders share granules, and have less than a
/// granule each.
struct FlagMap {
  std::uint32_t nodes = 1;
  std::uint32_t banks = kBanksMax;
  std::uint32_t chunks_max = 0;
  std::uint32_t first = 0;  ///< index of the first flag, where the operator's range has more

  MK_HOST_DEVICE constexpr bool shares_granules() const {
    const std::uint32_t of_sender = banks * shm::kFlagGranule + (has_releases() ? 1 : 0);
    return (nodes - 1) * of_sender > kOperatorFlagsMax;
  }
  /// From one sender's flags to the next one's.
  MK_HOST_DEVICE constexpr std::uint32_t stride() const {
    return shares_granules()
               ? chunks_max
               : static_cast<std::uint32_t>(round_up_to(chunks_max, shm::kFlagGranule));
  }
  MK_HOST_DEVICE constexpr std::uint32_t arrival(std::uint32_t bank, std::uint32_t at,
                                                 std::uint32_t from, std::uint32_t chunk) const {
    return first + bank * bank_arrivals() + peer_index(at, from) * stride() + chunk;
  }
  /// Arrivals of a bank, a multiple of 4; they follow each other, bank by bank, and behind them
  /// come the releases.
  MK_HOST_DEVICE constexpr std::uint32_t bank_arrivals() const {
    return static_cast<std::uint32_t>(round_up_to((nodes - 1) * stride(), 4));
  }
  MK_HOST_DEVICE constexpr bool has_releases() const { return banks == 1; }
  MK_HOST_DEVICE constexpr std::uint32_t release(std::uint32_t at, std::uint32_t from) const {
    return first + banks * bank_arrivals() + peer_index(at, from);
  }
  MK_HOST_DEVICE constexpr std::uint32_t count() const {
    return banks * bank_arrivals() + (has_releases() ? nodes - 1 : 0);
  }
  /// A plan's fingerprint begins with this: the version of its rules, and of these.
  constexpr std::uint64_t rules(std::uint64_t version) const {
    return version | std::uint64_t{shares_granules()} << 32;
  }
  /// A chunk in each granule that a launch of `chunks` chunks does not reach, one at least. Calls
  /// `visit(chunk)` for these, until it answers false; whether it never did. A sender that shares
  /// granules has flags in two at most: the last flag's is the one in question.
  template <class Visit>
  MK_HOST_DEVICE bool for_idle_granules(std::uint32_t chunks, Visit&& visit) const {
    if (shares_granules()) return chunks >= stride() || visit(stride() - 1);
    for (auto chunk = static_cast<std::uint32_t>(round_up_to(chunks, shm::kFlagGranule));
         chunk < stride(); chunk += shm::kFlagGranule) {
      if (!visit(chunk)) return false;
    }
    return true;
  }
};

/// A header, or a sum, and one chunk more of every sender.
inline constexpr std::uint32_t kSenderFlagsLeast = 2;
static_assert(FlagMap{shm::kNodesMax, kBanksMax, kSenderFlagsLeast}.count() <= kOperatorFlagsMax,
              "the largest job has flags for an operator");

/// Launches with fewer chunks leave the higher flags alone. No granule may fall 512 epochs behind.
/// So in every 128th use of a bank the sender also shows the epoch in the first flag of each
/// granule that the launch does not reach. The receiver's launch ends (and releases the bank) only
/// after it has seen these too: otherwise a late one could overtake the next launch's flag and set
/// it back.
MK_HOST_DEVICE constexpr bool refresh_due(std::uint32_t epoch, std::uint32_t banks) {
  return (epoch / banks) % 128 == 0;
}

}  // namespace mk::kernels
