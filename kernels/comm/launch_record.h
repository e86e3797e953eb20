/// \file
/// Ranks tell each other with which `m` they launched: local ranks by a record, rail peers by a
/// header in front of the first chunk. A mismatch would otherwise be a hang or, worse, a wrong
/// result.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

inline constexpr std::uint32_t kLaunchRecordBanks = 2;

/// One per bank and local rank, in every local rank's workspace; written by that local rank alone.
/// Two banks: a rank may begin its next launch while a slower one has not looked at this one's
/// record yet, but not the one after that.
struct alignas(64) LaunchRecord {
  std::uint32_t epoch = 0;
  std::uint32_t m = 0;
};

/// In front of chunk 0 in staging and receive banks.
struct alignas(64) BankHeader {
  std::uint32_t epoch = 0;
  std::uint32_t m = 0;
};
inline constexpr std::uint64_t kBankHeaderBytes = sizeof(BankHeader);

/// The record of launch `epoch` by local rank `local`, in an array of [kLaunchRecordBanks][locals].
MK_HOST_DEVICE constexpr std::uint32_t record_index(std::uint32_t epoch, std::uint32_t locals,
                                                    std::uint32_t local) {
  return epoch % kLaunchRecordBanks * locals + local;
}

}  // namespace mk::kernels
