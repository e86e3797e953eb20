/// \file
/// What the other lanes of a leader's warp do for it: look at many flags at once, and commit many
/// commands under one fence. They stand at the warp's barrier, where they cost nothing, until the
/// leader has something for them or ends; then the leader stands there. (Lanes that do the same in
/// another place of the code do it one after the other: two looks, two fences.) The barrier orders
/// memory between leader and lanes, so what a lane has acquired the leader has, and what the leader
/// has stored or acquired a lane's fence releases.
///
/// As measured on an H200: a fence of the whole system takes 1.6 us, 1.9 where the SM also stores;
/// one of the GPU 0.3 to 0.8; an acquiring load 0.2 more than a relaxed one. So flags are acquired
/// by loads, a lane each, not by one thread's relaxed loads and a fence; and one thread that
/// commits commands one after the other would pay for a fence with each.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/flag_row.h"
#include "shm/flag.h"
#include "shm/ring.h"

namespace mk::kernels::cuda {

/// Lanes of a warp but the leader.
inline constexpr std::uint32_t kHelpers = 31;
static_assert(CommandBatch::kCommandsMax == kHelpers, "a command for each of them");

/// Shared memory of a leader's warp.
class LeaderWarp {
 public:
  /// One thread, before the others' first use.
  __device__ void begin() {
    batch_.count = 0;
    batch_.most = CommandBatch::kCommandsMax;
  }

  // --- The leader, lane 0 ---

  /// See Block::first_missing. (To list 32 flags takes one thread several microseconds; those of a
  /// row the lanes find themselves.)
  template <class Flag>
  __device__ std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end,
                                         std::uint32_t wanted, Flag&& flag) {
    constexpr bool kRow = std::is_same_v<std::remove_cvref_t<Flag>, FlagRow>;
    task_ = kRow ? Task::kLookAlong : Task::kLook;
    wanted_ = wanted;
    for (; begin < end; begin += kHelpers) {
      if (end - begin == 1) return shm::flag_reached(flag(begin), wanted) ? end : begin;
      count_ = end - begin < kHelpers ? end - begin : kHelpers;
      if constexpr (kRow) {
        row_ = {flag(begin), flag.step};
      } else {
        for (std::uint32_t i = 0; i < count_; ++i) flags_[i] = flag(begin + i);
      }
      missing_ = 0;
      do_task();
      if (missing_ != 0) return begin + static_cast<std::uint32_t>(__ffs(missing_)) - 1;
    }
    return end;
  }

  __device__ CommandBatch& batch() { return batch_; }
  /// Commits the batch, for which there are credits, and leaves it empty.
  __device__ void commit(shm::RingProducer& ring) {
    task_ = Task::kCommit;
    to_.ring = ring.ring;
    to_.produced = ring.produced;
    count_ = batch_.count;
    if (count_ == 1) {
      do_share(0);
    } else {
      do_task();
    }
    ring.advance(count_);
    batch_.count = 0;
  }

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
  enum class Task : std::uint32_t { kLook, kLookAlong, kCommit, kEnd };

  /// By the others; meanwhile the leader waits.
  __device__ void do_task() {
    __syncwarp();
    __syncwarp();
  }
  __device__ void do_share(std::uint32_t share) {
    if (task_ == Task::kCommit) {
      to_.write(share, batch_.commands[share]);
      __threadfence_system();
      to_.commit(share);
      return;
    }
    const std::uint32_t* flag = task_ == Task::kLookAlong ? row_(share) : flags_[share];
    if (!shm::flag_reached(flag, wanted_)) atomicOr(&missing_, 1u << share);
  }

  Task task_;
  std::uint32_t count_;  ///< of the task's shares
  std::uint32_t wanted_;
  std::uint32_t missing_;  ///< a bit for each flag that does not show `wanted_`
  FlagRow row_;
  const std::uint32_t* flags_[kHelpers];
  CommandBatch batch_;
  shm::RingProducer to_;
};

}  // namespace mk::kernels::cuda
