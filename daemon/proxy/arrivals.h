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
        granules_(
            std::make_unique<Granule[]>((flag_count + shm::kFlagGranule - 1) / shm::kFlagGranule)) {
  }

  /// Shows the arrival in its flag; a flag never goes back, whatever the order of arrivals. Returns
  /// false when the session has no such flag.
  bool publish(std::uint32_t immediate) {
    const std::uint32_t index = shm::immediate_flag(immediate);
    if (index >= flag_count_) return false;
    Granule& granule = granules_[index / shm::kFlagGranule];
    std::uint32_t& last = granule.last_epoch;
    ++granule.arrivals;
    const std::uint32_t epoch =
        shm::immediate_epoch(immediate, last) + (MK_PLANT(arrives_an_epoch_early) ? 1 : 0);
    if (shm::epoch_reached(epoch, last)) last = epoch;
    // The client can write this word too: it can only mislead itself.
    std::uint32_t* flag = flags_ + index;
    if (!shm::epoch_reached(shm::load_relaxed(flag), epoch)) shm::flag_publish(flag, epoch);
    return true;
  }

  /// Arrivals in a range of whole granules, since this was made.
  std::uint64_t arrivals(std::uint32_t base, std::uint32_t count) const {
    std::uint64_t sum = 0;
    for (std::uint32_t at = base; at < base + count && at < flag_count_; at += shm::kFlagGranule)
      sum += granules_[at / shm::kFlagGranule].arrivals;
    return sum;
  }

  /// The range is as new: nothing will arrive for what it was.
  void reset(std::uint32_t base, std::uint32_t count) {
    for (std::uint32_t at = base; at < base + count && at < flag_count_; ++at) {
      shm::store_relaxed(flags_ + at, 0u);
      granules_[at / shm::kFlagGranule].last_epoch = 0;
    }
  }

 private:
  struct Granule {
    std::uint32_t last_epoch = 0;
    std::uint64_t arrivals = 0;
  };

  std::uint32_t* flags_;
  std::uint32_t flag_count_;
  std::unique_ptr<Granule[]> granules_;
};

}  // namespace mk::daemon
