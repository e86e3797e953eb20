/// \file
/// What a proxy did, event by event, while somebody wants to know: a ring from the proxy's thread
/// to one reader. Off, it costs a load per submission and completion; on, what comes faster than
/// the reader takes it is dropped and counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "shm/host/progress_sizes.h"

namespace mk::daemon {

/// What a rank says of its launch (shm/progress.h).
struct TracedLaunch {
  std::uint64_t tag = 0;
  std::uint32_t op = 0, epoch = 0, m = 0;
  shm::ProgressSizes sizes{};

  friend bool operator==(const TracedLaunch&, const TracedLaunch&) = default;
};

struct TraceRecord {
  /// kLaunch: with a session's first command that was taken after its words had changed.
  enum class Kind : std::uint8_t { kPosted, kCompleted, kFailed, kArrived, kLaunch };

  std::uint64_t time_ns = 0;    ///< the proxy's clock
  std::uint64_t cookie = 0;     ///< of the write (Cookie); kArrived: the immediate
  std::uint64_t batch = 0;      ///< kPosted: the submission's number
  fabric::LinkId link = 0;      ///< but for kArrived and kLaunch
  std::uint32_t bytes = 0;      ///< kPosted
  std::uint32_t waited_ns = 0;  ///< kPosted: since the commit; 0: unknown
  Kind kind = Kind::kPosted;
  TracedLaunch launch;  ///< kLaunch; kPosted: the epoch alone
};

class TraceBuffer {
 public:
  static constexpr std::uint64_t kRecords = 1u << 16;

  // -- proxy thread --
  bool on() const { return on_.load(std::memory_order_acquire); }
  /// Which recording it is; while `on`.
  std::uint32_t recording() const { return recording_.load(std::memory_order_relaxed); }
  /// Only when `on`.
  void record(const TraceRecord& record) {
    const std::uint64_t head = head_.load(std::memory_order_relaxed);
    if (head - tail_.load(std::memory_order_acquire) >= kRecords) {
      dropped_.store(dropped_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      return;
    }
    records_[head % kRecords] = record;
    head_.store(head + 1, std::memory_order_release);
  }

  // -- the reader: one at a time --
  /// Begins to record; what was left of an earlier time is gone. The memory is taken with the first
  /// call and kept.
  void start() {
    if (!records_) records_ = std::make_unique<TraceRecord[]>(kRecords);
    tail_.store(head_.load(std::memory_order_acquire), std::memory_order_release);
    dropped_before_ = dropped_.load(std::memory_order_relaxed);
    recording_.fetch_add(1, std::memory_order_relaxed);
    on_.store(true, std::memory_order_release);
  }
  void stop() { on_.store(false, std::memory_order_release); }
  /// Appends what was recorded since the last call.
  void take(std::vector<TraceRecord>& out) {
    const std::uint64_t head = head_.load(std::memory_order_acquire);
    std::uint64_t tail = tail_.load(std::memory_order_relaxed);
    for (; tail != head; ++tail) out.push_back(records_[tail % kRecords]);
    tail_.store(tail, std::memory_order_release);
  }
  /// Since `start`.
  std::uint64_t dropped() const {
    return dropped_.load(std::memory_order_relaxed) - dropped_before_;
  }

 private:
  std::atomic<bool> on_{false};
  std::atomic<std::uint32_t> recording_{0};
  alignas(64) std::atomic<std::uint64_t> head_{0};
  std::atomic<std::uint64_t> dropped_{0};
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  std::unique_ptr<TraceRecord[]> records_;
  std::uint64_t dropped_before_ = 0;
};

}  // namespace mk::daemon
