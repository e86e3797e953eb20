/// \file
/// The one warp of a rank that looks at the host's words (arrival flags, the lanes' counters, abort
/// words) while a launch runs. It copies them into device memory, where all other blocks look. A
/// look across the bus takes a microsecond, and many that look make it many more.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/skeleton/launch_state.h"
#include "shm/atomic.h"

namespace mk::kernels::cuda {

class Poller {
 public:
  /// `seen`: shared memory for `host.flag_count` words. All threads of one warp.
  __device__ Poller(const HostWords& host, DeviceState& state, const Launch& launch,
                    std::uint32_t epoch, std::uint32_t* seen)
      : host_(host),
        state_(state),
        launch_(launch),
        epoch_(epoch),
        seen_(reinterpret_cast<uint4*>(seen)),
        lane_(threadIdx.x % kLanes),
        arrivals_begin_(bank_of(epoch, launch.banks) * (host.bank_flags / 4)),
        arrivals_(host.bank_flags / 4),
        polled_(arrivals_ + host.flag_count / 4 - host.releases_begin / 4) {
    const auto* here = reinterpret_cast<const uint4*>(host.flags_here);
    for (std::uint32_t i = lane_; i < polled_; i += kLanes) seen_[i] = here[vector_of(i)];
    if (lane_ < host.lane_count) {
      consumed_ = state.controls[lane_].consumed;
      completed_ = state.controls[lane_].completed;
      produced_ = state.controls[lane_].produced;
      // The session's: other operators have sent since this one's last launch.
      began_ = static_cast<std::uint32_t>(shm::load_relaxed(&host.session_lanes[lane_].produced));
    }
    __syncwarp();
  }

  /// Until `groups` groups have ended or wait for nothing more. So long the host sees a launch
  /// under way.
  __device__ void run(std::uint32_t groups) {
    if (counts()) {
      launches_ = shm::load_relaxed(host_.launches);
      shm::store_relaxed(host_.launches, ++launches_);
      if (host_.progress != nullptr) show_launch();
    }
    if (tells()) begin_waits();
    const bool few = polled_ <= kLanes;
    for (;;) {
      // All on their way together.
      const std::uint32_t done = shm::load_relaxed(&state_.groups_done);
      const std::uint32_t taken = shm::load_relaxed(tiles_taken());
      const auto computed = static_cast<std::uint32_t>(shm::load_relaxed(&account().groups));
      const Counters counters = load_counters();
      uint4 flags{};
      if (few && lane_ < polled_) flags = load_flags<kAcquire>(host_.flags + 4 * vector_of(lane_));
      if (__shfl_sync(0xffffffffu, done, 0) >= groups) break;
      if (!few) {
        look_at_many();
      } else if (lane_ < polled_ && differ(flags, seen_[lane_])) {
        __threadfence();  // to who sees the mirrors, on this GPU
        mirror(lane_, flags);
      }
      mirror_counters(counters);
      bring_produced();
      if (!tells()) continue;
      if (lane_ == 0) show_tiles(taken, computed);
      if (++looks_ % kLooksPerTelling != 0) continue;
      show_waits(computed < launch_.blocks.compute);
      show_chunks();
    }
    __threadfence();  // sees what groups have committed before they ended
    bring_produced();
    if (tells()) {
      show_chunks();
      if (lane_ < kRoles) show_role(0);
    }
    if (counts()) shm::store_relaxed(host_.launches, ++launches_);
  }

 private:
  static constexpr std::uint32_t kLanes = 32;
  static constexpr std::uint32_t kBatch = 4;  ///< vectors of a thread in one step
  static constexpr char kAcquire[] = "acquire";
  static constexpr char kRelaxed[] = "relaxed";

  /// Whether this thread counts the launch when it begins and when it ends.
  __device__ bool counts() const { return lane_ == 0 && host_.launches != nullptr; }

  // What people read; only what has changed, since each word crosses the bus.

  /// So many looks, each of a microsecond or more, are many times those between two at the clock in
  /// a wait (look_at_clock).
  static constexpr std::uint32_t kLooksPerTelling = 256;
  static constexpr std::uint64_t kWorks = shm::encode({.running = 1});

  __device__ bool tells() const { return host_.launches != nullptr && host_.progress != nullptr; }

  __device__ const RoleAccount& account() const {
    return state_.accounts[epoch_ % 2].roles[static_cast<std::uint32_t>(host_.told.works)];
  }
  __device__ const std::uint32_t* tiles_taken() const {
    return host_.told.taken != nullptr ? host_.told.taken : &state_.tiles_taken;
  }
  __device__ bool is(Role role) const { return lane_ == static_cast<std::uint32_t>(role); }
  __device__ std::uint32_t* awaited() const { return &state_.local.failure.awaited[lane_]; }

  /// A lane for each role. What the last launch's waits have left is not this one's.
  __device__ void begin_waits() {
    if (lane_ >= kRoles) return;
    shm::store_relaxed(awaited(), 0u);
    show_role(is(host_.told.works) ? kWorks : 0);
  }
  __device__ void show_role(std::uint64_t word) const {
    shm::store_relaxed(&host_.progress->roles[lane_], word);
  }
  /// A block that waits tells it again and again, so a word that has been taken out and is still
  /// zero says that none of its role does.
  __device__ void show_waits(bool computing) {
    if (lane_ == 0 && host_.told.tiles == 0) find_tiles();
    if (lane_ >= kRoles) return;
    std::uint64_t word = AwaitedWord::role_word(shm::load_relaxed(awaited()));
    if (word != 0) {
      shm::store_relaxed(awaited(), 0u);
    } else if (computing) {
      if (is(host_.told.works)) word = kWorks;
    } else if (is(Role::kCollect)) {
      // What is left is sums, copies and what others bring.
      word = shm::encode({.running = 1,
                          .waiting = 1,
                          .rank = launch_.context.world.rank(),
                          .wait = static_cast<std::uint32_t>(FlagKind::kOutReady)});
    }
    show_role(word);
  }
  /// Where the host does not know how many tiles there are.
  __device__ void find_tiles() {
    const LaunchTold& told = host_.told;
    if (told.tiles_of == nullptr) return;
    // The launch's epoch, which would be one register more where it is kept.
    const std::uint32_t epoch = shm::load_relaxed(&state_.epoch) + 1;
    if (told.planned && shm::load_acquire(state_.local.done_by(Role::kPlan)) != epoch) return;
    state_.tiles_found = shm::load_relaxed(told.tiles_of) * told.tiles_each;
    shm::store_relaxed(&host_.progress->tiles, state_.tiles_found);
  }
  __device__ void show_launch() {
    shm::Progress& to = *host_.progress;
    const LaunchTold& told = host_.told;
    state_.tiles_found = told.tiles;
    shm::store_relaxed(&to.op, told.op);
    shm::store_relaxed(&to.epoch, epoch_);
    shm::store_relaxed(&to.tag, told.tag);
    shm::store_relaxed(&to.m, told.m);
    shm::store_relaxed(&to.tiles, told.tiles);
    shm::store_relaxed(&to.tiles_done, 0u);
    shm::store_relaxed(&to.chunks, told.chunks);
    shm::store_relaxed(&to.chunks_done, 0u);
#pragma unroll
    for (std::uint32_t i = 0; i < shm::kProgressSizes; ++i)
      shm::store_relaxed(&to.sizes[i], told.sizes[i]);
  }
  /// `taken`: at run time, as operators do; `computed`: blocks that have computed all of theirs.
  __device__ void show_tiles(std::uint32_t taken, std::uint32_t computed) {
    if (taken + computed == shown_) return;
    shown_ = taken + computed;
    const std::uint32_t blocks = launch_.blocks.compute;
    const std::uint32_t tiles = state_.tiles_found;
    const std::uint32_t of_blocks = tiles / blocks * computed;
    const std::uint32_t ahead = host_.told.taken_ahead;
    const std::uint32_t taken_done = taken > ahead ? taken - ahead : 0;
    // Those taken may be one for each block beyond the last.
    const std::uint32_t some = taken_done > of_blocks ? taken_done : of_blocks;
    const bool all = tiles != 0 && (computed >= blocks || some > tiles);
    shm::store_relaxed(&host_.progress->tiles_done, all ? tiles : some);
  }

  /// All lanes. A chunk is a command each. Those that only show flags come after the last chunk.
  __device__ void show_chunks() const {
    if (host_.told.chunks == 0) return;
    const std::uint32_t sent =
        __reduce_add_sync(0xffffffffu, static_cast<std::uint32_t>(produced_) - began_);
    if (lane_ != 0) return;
    shm::store_relaxed(&host_.progress->chunks_done,
                       sent < host_.told.chunks ? sent : host_.told.chunks);
  }

  __device__ void bring_produced() {
    if (lane_ >= host_.lane_count) return;
    const std::uint64_t produced = shm::load_relaxed(&state_.controls[lane_].produced);
    if (produced != produced_) shm::store_relaxed(&host_.controls[lane_]->produced, produced);
    produced_ = produced;
  }

  /// Where the `i`-th vector that is looked at lies: the arrivals of this launch's bank, then all
  /// releases. (What arrives for the next launch is found when that runs.)
  __device__ std::uint32_t vector_of(std::uint32_t i) const {
    return i < arrivals_ ? arrivals_begin_ + i : host_.releases_begin / 4 + i - arrivals_;
  }

  struct Counters {
    std::uint64_t consumed;
    std::uint64_t completed;
    std::uint32_t abort;
  };
  __device__ Counters load_counters() const {
    Counters found{consumed_, completed_, 0};
    if (lane_ < host_.lane_count) {
      found.consumed = shm::load_relaxed(&host_.controls[lane_]->consumed);
      found.completed = shm::load_relaxed(&host_.controls[lane_]->completed);
    }
    if (lane_ < 2 && host_.aborts[lane_] != nullptr)
      found.abort = shm::load_relaxed(host_.aborts[lane_]);
    return found;
  }
  __device__ void mirror_counters(const Counters& found) {
    if (found.consumed == consumed_ && found.completed == completed_ && found.abort == 0) return;
    __threadfence_system();  // what lies behind the words is visible to who sees their mirrors
    if (lane_ < host_.lane_count) {
      shm::store_relaxed(&state_.controls[lane_].consumed, found.consumed);
      shm::store_relaxed(&state_.controls[lane_].completed, found.completed);
      consumed_ = found.consumed;
      completed_ = found.completed;
    }
    if (lane_ < 2 && found.abort != 0) shm::store_relaxed(&state_.aborts[lane_], found.abort);
  }

  /// Many for each, the loads of a step on their way together.
  __device__ void look_at_many() {
    for (std::uint32_t first = 0; first < polled_; first += kBatch * kLanes) {
      uint4 found[kBatch];
      bool changed = false;
#pragma unroll
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        const std::uint32_t i = first + b * kLanes + lane_;
        if (i < polled_) found[b] = load_flags<kRelaxed>(host_.flags + 4 * vector_of(i));
      }
#pragma unroll
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        const std::uint32_t i = first + b * kLanes + lane_;
        changed = changed || (i < polled_ && differ(found[b], seen_[i]));
      }
      if (!changed) continue;
      __threadfence_system();  // what lies behind the flags is visible to who sees their mirrors
#pragma unroll
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        const std::uint32_t i = first + b * kLanes + lane_;
        if (i < polled_ && differ(found[b], seen_[i])) mirror(i, found[b]);
      }
    }
  }

  __device__ void mirror(std::uint32_t i, const uint4& found) {
    seen_[i] = found;
    std::uint32_t* here = host_.flags_here + 4 * vector_of(i);
    shm::store_relaxed(here + 0, found.x);
    shm::store_relaxed(here + 1, found.y);
    shm::store_relaxed(here + 2, found.z);
    shm::store_relaxed(here + 3, found.w);
  }
  /// `order`: as PTX calls it. An acquiring load spares the fence of the whole system, but what
  /// follows waits for it: where there is one vector for each lane at most.
  template <const auto& order>
  static __device__ uint4 load_flags(const std::uint32_t* words) {
    uint4 value;
    asm volatile("ld.%5.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(words), "C"(order)
                 : "memory");
    return value;
  }
  static __device__ bool differ(const uint4& a, const uint4& b) {
    return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) != 0;
  }

  const HostWords& host_;
  DeviceState& state_;
  const Launch& launch_;
  const std::uint32_t epoch_;
  uint4* seen_;  ///< of the vectors that are looked at
  std::uint32_t lane_;
  std::uint32_t arrivals_begin_;  ///< in vectors
  std::uint32_t arrivals_;
  std::uint32_t polled_;
  std::uint64_t consumed_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t produced_ = 0;
  std::uint64_t launches_ = 0;
  std::uint32_t began_ = 0;  ///< what `produced_` was then
  std::uint32_t shown_ = 0;
  std::uint32_t looks_ = 0;
};

}  // namespace mk::kernels::cuda
