/// \file
/// Times what streams do, begun together: those of all ranks of a job, say.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "tests/gpu/operator_ranks.h"

namespace mk::test {

double median(std::vector<double> values);

/// A stream, and the device it is of.
struct TimedStream {
  int device = 0;
  cudaStream_t stream = nullptr;
};

/// Slowest rank per launch, and each rank's times, in microseconds.
struct Timing {
  std::vector<double> slowest;
  std::vector<std::vector<double>> by_rank;
  double us() const { return median(slowest); }
};

/// One of several things that are timed interleaved.
struct Turn {
  std::function<void()> run;  ///< queues a launch on the ranks' streams
  Timing* timing = nullptr;
};

/// All ranks' streams are held until everything is queued, and then go on together.
class Stopwatch {
 public:
  explicit Stopwatch(Job& job);
  /// `tell` says how far they have come, when a launch does not end.
  Stopwatch(std::vector<TimedStream> streams, std::function<void()> tell);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  /// `side` queues a launch on the ranks' streams. A side's first one is not held: what libraries
  /// do then may wait for the device to be idle.
  void run(const std::function<void()>& side, Timing& timing, bool held = true);
  /// Runs each turn `launches` times after a warm-up, once a round. Each round has a random order,
  /// which is the same in every run of a program. The launch before matters: one over the network
  /// takes some per cent longer behind a product than behind another launch over the network.
  void take_turns(const std::vector<Turn>& turns, int launches);
  /// Queues that many launches one after the other, the first of which is held; adds the time of
  /// one of them.
  void endure(const std::function<void()>& side, int launches, Timing& timing);

 private:
  /// Waits for what `queue` queues between the events, of which each rank has `launches`.
  void time(const std::function<void()>& queue, int launches, Timing& timing, bool held);
  void await(std::size_t index);

  std::vector<TimedStream> streams_;
  std::function<void()> tell_;
  std::uint32_t* word_ = nullptr;  ///< pinned: whether the streams may go on
  std::vector<cudaEvent_t> begin_, end_;
};

}  // namespace mk::test
