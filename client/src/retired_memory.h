/// \file
/// What a session has given up and may not have back yet: other ranks still use it. Counts what the
/// daemon has answered, and frees GPU memory when it has.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "shm/gpu/memory.h"

namespace mk::client {

class RetiredMemory {
 public:
  using Clock = std::chrono::steady_clock;

  /// `busy`: whether a launch of this process is under way (GpuLaunches). Freeing memory waits for
  /// kernels, so it waits until none is, and lets none begin meanwhile.
  explicit RetiredMemory(std::function<bool()> busy) : busy_(std::move(busy)) {}
  /// Frees all that is left.
  ~RetiredMemory();

  /// One more is given up; `memory`, if any, is kept until the daemon has answered. `quiet`:
  /// whether no kernel of this node writes there any more. `rest` goes right before the memory.
  /// It is what is freed in the same way, and must not make the caller's thread wait. Returns its
  /// number.
  std::uint64_t add(std::optional<gpu::Allocation> memory, std::function<bool()> quiet,
                    std::shared_ptr<void> rest = nullptr);
  /// From any thread: the daemon says that nobody uses it (`ok`), or it never will say so.
  void answered(std::uint64_t number, bool ok);

  /// How many the daemon has answered.
  std::uint64_t answers() const;
  /// Waits for another answer than the first `seen`; false when none is outstanding, or none comes.
  bool await_answer(std::uint64_t seen, Clock::time_point deadline);
  /// Waits until kernels of this node write to nothing of what is kept; `well`: worth waiting.
  void await_quiet(const std::function<bool()>& well, Clock::time_point deadline);
  /// Waits until no launch is under way, if memory is kept: before the session frees all of it.
  void await_idle(Clock::time_point deadline) const;

 private:
  struct Kept {
    std::optional<gpu::Allocation> memory;
    std::function<bool()> quiet;
    std::shared_ptr<void> rest;  ///< goes first
  };
  void reclaim();

  const std::function<bool()> busy_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_ = 0;
  std::uint64_t answers_ = 0;
  std::map<std::uint64_t, Kept> outstanding_;
  std::vector<Kept> parked_;   ///< until the session ends
  std::vector<Kept> free_;     ///< for the thread
  std::uint32_t freeing_ = 0;  ///< taken from there, not free yet
  bool stop_ = false;
  std::thread thread_;  ///< only where there is GPU memory
};

}  // namespace mk::client
