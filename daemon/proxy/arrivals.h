/// \file
/// Arrivals of unordered fabrics: from a write's 32-bit immediate to the session's arrival flag.
#pragma once

#include <cstdint>
#include <memory>

#include "daemon/plant.h"
#include "shm/flag.h"
#include "shm/limits.h"

namespace mk::daemon {

/// One session's flags, with the last epoch seen in each granule of kFlagGranule flags. An
/// immediate carries the low bits of an epoch only; the rest comes from the granule, which belongs
/// to one operator.
class ArrivalBoard {
 public:
  ArrivalBoard(std::uint32_t* flags, std::uint32_t flag_count)
      : flags_(flags),
        flag_count_(flag_count),
        granules_(std::make_unique<std::uint32_t[]>((flag_count + shm::kFlagGranule - 1) /
                                                    shm::kFlagGranule)) {}

  /// Shows the arrival in its flag; a flag never goes back, whatever the order of arrivals. Returns
  /// false when the session has no such flag.
  bool publish(std::uint32_t immediate) {
    const std::uint32_t index = shm::immediate_flag(immediate);
    if (index >= flag_count_) return false;
    std::uint32_t& last = granules_[index / shm::kFlagGranule];
    const std::uint32_t epoch =
        shm::immediate_epoch(immediate, last) + (MK_PLANT(arrives_an_epoch_early) ? 1 : 0);
    if (shm::epoch_reached(epoch, last)) last = epoch;
    // The client can write this word too: it can only mislead itself.
    std::uint32_t* flag = flags_ + index;
    if (!shm::epoch_reached(shm::load_relaxed(flag), epoch)) shm::flag_publish(flag, epoch);
    return true;
  }

 private:
  std::uint32_t* flags_;
  std::uint32_t flag_count_;
  std::unique_ptr<std::uint32_t[]> granules_;
};

}  // namespace mk::daemon
