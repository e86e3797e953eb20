/// \file
/// Counters of the data path: single-writer words (the proxy thread), read by anyone, never reset.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "shm/limits.h"

namespace mk::daemon {

/// A monotone counter with one writer.
class Counter {
 public:
  void add(std::uint64_t amount) {
    word_.store(word_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  void set(std::uint64_t value) { word_.store(value, std::memory_order_relaxed); }
  std::uint64_t value() const { return word_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> word_{0};
};

/// A histogram of nanoseconds: four buckets per power of two, so that a bucket is at most 25% wide.
class LatencyHistogram {
 public:
  static constexpr std::uint32_t kBuckets = 160;  ///< up to 2^40 ns

  /// The bucket of a value and a bucket's inclusive lower bound, in ns.
  static constexpr std::uint32_t bucket_of(std::uint64_t ns) {
    if (ns < 4) return static_cast<std::uint32_t>(ns);
    const auto log2 = static_cast<std::uint32_t>(std::bit_width(ns) - 1);
    const std::uint32_t bucket =
        (log2 - 1) * 4 + static_cast<std::uint32_t>((ns >> (log2 - 2)) & 3);
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }
  static constexpr std::uint64_t lower_bound_ns(std::uint32_t bucket) {
    if (bucket < 4) return bucket;
    return std::uint64_t{4 + bucket % 4} << (bucket / 4 - 1);
  }

  void record(std::uint64_t ns, std::uint64_t times = 1) { counts_[bucket_of(ns)].add(times); }
  std::uint64_t count(std::uint32_t bucket) const { return counts_[bucket].value(); }

 private:
  std::array<Counter, kBuckets> counts_;
};

/// One command ring.
struct LaneStats {
  Counter commands;  ///< taken and valid
  Counter bytes;     ///< their payload
  Counter batches;   ///< submissions that held a command of this lane
  Counter completed;
  Counter credit_stalls;  ///< passes in which commands waited for outstanding credits or link depth
  LatencyHistogram commit_to_post;
  LatencyHistogram post_to_completion;
};

struct SessionStats {
  std::array<LaneStats, shm::kLanesMax> lanes;
};

/// What lanes have counted, added up: plain numbers.
struct LaneTotals {
  std::uint64_t commands = 0, bytes = 0, batches = 0, completed = 0, credit_stalls = 0;
  std::array<std::uint64_t, LatencyHistogram::kBuckets> commit_to_post{}, post_to_completion{};

  void add(const LaneStats& lane) {
    commands += lane.commands.value();
    bytes += lane.bytes.value();
    batches += lane.batches.value();
    completed += lane.completed.value();
    credit_stalls += lane.credit_stalls.value();
    for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
      commit_to_post[bucket] += lane.commit_to_post.count(bucket);
      post_to_completion[bucket] += lane.post_to_completion.count(bucket);
    }
  }
};

/// One link, as this side sends. The last two are the control thread's, the others the proxy's.
struct LinkStats {
  Counter messages;
  Counter bytes;
  Counter batches;
  Counter completed;
  Counter errors;
  Counter outstanding;  ///< a gauge
  /// Submissions of 1, 2, ... kBatchMax writes.
  std::array<Counter, shm::kBatchMax> batch_commands;
  Counter post_retries;  ///< submissions that were not taken whole: the rest comes again
  /// When a write last completed, or was posted while none was outstanding: a gauge, in the proxy's
  /// clock.
  Counter progress_ns;
  Counter bytes_per_s;       ///< LinkRate: a gauge, 0 until it is known
  Counter connects;          ///< times that it came up
  Counter connect_failures;  ///< tries that failed
};

/// One proxy thread.
struct ProxyStats {
  Counter passes;
  Counter busy_passes;
  Counter sleeps;
  Counter arrivals;         ///< published from immediates
  Counter bad_arrivals;     ///< immediates that named no session or flag
  Counter bad_completions;  ///< completions that named no write in flight: doubled, or after their
                            ///< session
  Counter looked_ahead;     ///< ring slots read for the marks of handles that go
  /// From the return of the poll that brought arrivals until the flags of all of them are
  /// published: an upper bound for each. Unordered contract only: on ordered networks the write
  /// itself shows the flag.
  LatencyHistogram arrival_to_flag;
};

}  // namespace mk::daemon
