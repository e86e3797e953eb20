/// \file
/// Arrival flags and epochs. A flag is a 32-bit word holding the epoch of the last thing that
/// arrived; waiting is `flag >= epoch` in wrap-safe arithmetic. A flag never goes back.
#pragma once

#include <cstdint>

#include "shm/atomic.h"
#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::shm {

/// Whether epoch `a` is `b` or later. Right as long as the two are less than 2^31 launches apart
/// (RFC 1982's rule).
MK_HOST_DEVICE constexpr bool epoch_reached(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::int32_t>(a - b) >= 0;
}

/// Whether the flag shows `epoch` or later; if so, the payload behind it is visible to this thread.
MK_HOST_DEVICE inline bool flag_reached(const std::uint32_t* flag, std::uint32_t epoch) {
  return epoch_reached(load_acquire(flag), epoch);
}

/// Shows `epoch` in the flag, after everything this thread stored before.
MK_HOST_DEVICE inline void flag_publish(std::uint32_t* flag, std::uint32_t epoch) {
  store_release(flag, epoch);
}

/// The 32-bit immediate by which an unordered fabric names an arrival: slot 31:26, flag 25:10,
/// epoch 9:0.
MK_HOST_DEVICE constexpr std::uint32_t make_immediate(std::uint32_t session_slot,
                                                      std::uint32_t flag_index,
                                                      std::uint32_t epoch) {
  return session_slot << (kImmediateFlagBits + kImmediateEpochBits) |
         flag_index << kImmediateEpochBits | (epoch & ((1u << kImmediateEpochBits) - 1));
}
MK_HOST_DEVICE constexpr std::uint32_t immediate_slot(std::uint32_t immediate) {
  return immediate >> (kImmediateFlagBits + kImmediateEpochBits);
}
MK_HOST_DEVICE constexpr std::uint32_t immediate_flag(std::uint32_t immediate) {
  return (immediate >> kImmediateEpochBits) & ((1u << kImmediateFlagBits) - 1);
}

/// Rebuilds the full epoch of an immediate: the one with these low bits that lies nearest to
/// `near`, the last epoch seen in the flag's granule. Right while arrivals of one granule are less
/// than 512 epochs apart; banks keep them within two.
MK_HOST_DEVICE constexpr std::uint32_t immediate_epoch(std::uint32_t immediate,
                                                       std::uint32_t near) {
  constexpr std::uint32_t kRange = 1u << kImmediateEpochBits;
  const std::uint32_t ahead = (immediate - near) & (kRange - 1);
  return ahead < kRange / 2 ? near + ahead : near + ahead - kRange;
}

}  // namespace mk::shm
