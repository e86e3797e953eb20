/// \file
/// What the other lanes of a leader's warp do for it: look at many flags at once. They stand at the
/// warp's barrier, where they cost nothing, until the leader has something for them or ends; then
/// the leader stands there. (Lanes that do the same in another place of the code do it one after
/// the other: two looks.) The barrier orders memory between leader and lanes. So what a lane has
/// acquired the leader has.
///
/// As measured on an H200: a fence of the GPU takes 0.3 to 0.8 µs, an acquiring load 0.2 more than
/// a relaxed one. So flags are acquired by loads, a lane each, not by one thread's relaxed loads
/// and a fence.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/comm/flag_row.h"
#include "shm/flag.h"

namespace mk::kernels::cuda {

/// Lanes of a warp but the leader.
inline constexpr std::uint32_t kHelpers = 31;

/// Shared memory of a leader's warp.
class LeaderWarp {
 public:
  // --- The leader, lane 0 ---

  /// See Block::await_run; of kHelpers flags at most. (To list them takes one thread several
  /// microseconds; those of a row the lanes find themselves.)
  template <class Flag>
  __device__ std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end,
                                         std::uint32_t wanted, Flag&& flag) {
    constexpr bool kRow = std::is_same_v<std::remove_cvref_t<Flag>, FlagRow>;
    task_ = kRow ? Task::kLookAlong : Task::kLook;
    wanted_ = wanted;
    count_ = end - begin < kHelpers ? end - begin : kHelpers;
    if constexpr (kRow) {
      row_ = {flag(begin), flag.step};
    } else {
#pragma unroll 1
      for (std::uint32_t i = 0; i < count_; ++i) flags_[i] = flag(begin + i);
    }
    missing_ = 0;
    do_task();
    return missing_ == 0 ? begin + count_ : begin + static_cast<std::uint32_t>(__ffs(missing_)) - 1;
  }

  /// What the first of those flags showed.
  __device__ std::uint32_t first_seen() const { return seen_; }

  /// Lets the other lanes go.
  __device__ void end() {
    task_ = Task::kEnd;
    __syncwarp();
  }

  // --- The other lanes, 1 to kHelpers ---

  /// Until `end`.
  __device__ void assist(std::uint32_t lane) {
    for (;;) {
      __syncwarp();
      if (task_ == Task::kEnd) return;
      if (lane - 1 < count_) do_share(lane - 1);
      __syncwarp();
    }
  }

 private:
  enum class Task : std::uint32_t { kLook, kLookAlong, kEnd };

  /// By the others; meanwhile the leader waits.
  __device__ void do_task() {
    __syncwarp();
    __syncwarp();
  }
  __device__ void do_share(std::uint32_t share) {
    const std::uint32_t* flag = task_ == Task::kLookAlong ? row_(share) : flags_[share];
    const std::uint32_t seen = shm::load_acquire(flag);
    if (share == 0) seen_ = seen;
    if (!shm::epoch_reached(seen, wanted_)) atomicOr(&missing_, 1u << share);
  }

  Task task_;
  std::uint32_t count_;  ///< of the task's shares
  std::uint32_t wanted_;
  std::uint32_t seen_;     ///< what the first flag showed
  std::uint32_t missing_;  ///< a bit for each flag that does not show `wanted_`
  FlagRow row_;
  const std::uint32_t* flags_[kHelpers];
};

}  // namespace mk::kernels::cuda
