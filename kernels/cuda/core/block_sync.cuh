/// \file
/// What the roles of a block wait for each other with: mbarriers for roles that have no registers
/// to spare, named barriers, places in rings of stages, and the items' numbers.
#pragma once

#include <cstdint>

#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// Until `came()`, as ptx::mbarrier_wait, but the clock is the timer's upper half (4.3 s), and the
/// end a store to address 0. A trap where a role has asked for more registers than the kernel
/// begins with makes ptxas 13.0 keep them from it (C7512).
template <class Came>
__device__ __forceinline__ void wait_lean_until(const Came& came) {
  constexpr std::uint32_t kTriesPerLook = 1u << 16;
  constexpr auto kDeadlineTicks = static_cast<std::uint32_t>(ptx::kBlockDeadlineNs >> 32);
  std::uint32_t deadline = 0;
  for (std::uint32_t tries = 1; !came(); ++tries) {
    if (tries % kTriesPerLook != 0) continue;
    std::uint32_t now;
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(now));
    if (deadline == 0) deadline = now + kDeadlineTicks;
    if (now > deadline) asm volatile("st.global.u32 [%0], 0;" ::"l"(0ull) : "memory");
  }
}
__device__ __forceinline__ void wait_lean(std::uint64_t* barrier, std::uint32_t parity) {
  wait_lean_until([&] { return ptx::mbarrier_try_wait(barrier, parity); });
}

/// Waits until `threads` threads, this warp's among them, have come to named barrier `id` (1 to
/// 15).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts this warp in at a named barrier, and does not wait.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Walks a ring of slots: the slot and the parity of the phase it is in.
template <int kSlots>
struct StagePosition {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ StagePosition previous() const {
    return slot == 0 ? StagePosition{kSlots - 1, parity ^ 1} : StagePosition{slot - 1, parity};
  }
  __device__ __forceinline__ void advance() {
    slot = slot == kSlots - 1 ? 0 : slot + 1;
    parity ^= slot == 0;
  }
};

/// The same as one number, for roles that are short of registers: how many slots came before.
template <int kSlots>
struct StageCount {
  static_assert((kSlots & (kSlots - 1)) == 0, "slot and parity are bits of the count");
  std::uint32_t count;
  __device__ __forceinline__ std::uint32_t slot() const { return count % kSlots; }
  __device__ __forceinline__ std::uint32_t parity() const { return count / kSlots % 2; }
};

/// Numbers of items, from the loading thread to the math warps.
struct ItemFeed {
  static constexpr int kSlots = 4;
  static constexpr int kNoMore = -1;
  std::uint64_t known[kSlots];  ///< to the readers: the slot holds the next item
  std::uint64_t read[kSlots];   ///< to the loads: all readers have read it
  int items[kSlots];

  /// One thread, before the block's first barrier.
  __device__ void begin(std::uint32_t reading_warps) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(&known[slot], 1);
      ptx::mbarrier_init(&read[slot], reading_warps);
    }
  }
  /// The loading thread's `place`-th.
  __device__ __forceinline__ void put(StageCount<kSlots> place, int item) {
    wait_lean(&read[place.slot()], place.parity() ^ 1);
    items[place.slot()] = item;
    ptx::mbarrier_arrive(&known[place.slot()]);
  }
  /// A whole warp's.
  __device__ __forceinline__ int get(StageCount<kSlots> place) {
    wait_lean(&known[place.slot()], place.parity());
    const int item = *static_cast<volatile int*>(&items[place.slot()]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&read[place.slot()]);
    return item;
  }
};

}  // namespace mk::kernels::cuda
