/// \file
/// Simulated time: one queue of things that happen, one after another, on one thread. A step is
/// one of them. Also what a run leaves behind: its first violation, and the trace of a replay.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/sim/random.h"

namespace mk::sim {

inline constexpr std::uint64_t kMicrosecond = 1'000;
inline constexpr std::uint64_t kMillisecond = 1'000'000;
inline constexpr std::uint64_t kSecond = 1'000'000'000;

class World {
 public:
  /// Time begins well after 0, so that no deadline can be before it.
  World(std::uint64_t seed, bool tracing) : random(seed), tracing_(tracing) {}

  Random random;

  std::uint64_t now() const { return now_; }
  std::uint64_t steps() const { return steps_; }

  /// Runs `event` at that time (now, when it is past); events of one time keep their order.
  void at(std::uint64_t time_ns, std::function<void()> event);
  void after(std::uint64_t delay_ns, std::function<void()> event) {
    at(now_ + delay_ns, std::move(event));
  }
  /// The same for something that may be gone by then: nothing happens if it is.
  template <class T, class Fn>
  void at(std::uint64_t time_ns, const std::shared_ptr<T>& who, Fn event) {
    at(time_ns, [weak = std::weak_ptr<T>(who), event = std::move(event)] {
      if (const std::shared_ptr<T> alive = weak.lock()) event(*alive);
    });
  }

  /// Lets the next thing happen; false when there is none.
  bool step();

  /// An invariant does not hold. The first one ends the run after this step.
  void violate(std::string what);
  const std::optional<std::string>& violation() const { return violation_; }

  /// A line of the trace; `text` is called in a replay only.
  template <class Text>
  void trace(Text text) {
    if (tracing_) record(text());
  }
  const std::deque<std::string>& last_events() const { return events_; }

 private:
  struct Event {
    std::uint64_t time_ns;
    std::uint64_t number;
    std::function<void()> run;
  };
  /// For the heap: the earliest on top.
  static bool later(const Event& a, const Event& b) {
    return a.time_ns != b.time_ns ? a.time_ns > b.time_ns : a.number > b.number;
  }
  void record(std::string line);

  const bool tracing_;
  std::uint64_t now_ = 1'000 * kSecond;
  std::uint64_t steps_ = 0;
  std::uint64_t next_number_ = 0;
  std::vector<Event> heap_;
  std::optional<std::string> violation_;
  std::deque<std::string> events_;
};

/// A queue between two parties that keeps its order while every message takes its own time.
class InOrder {
 public:
  /// When a message that would take `delay_ns` arrives.
  std::uint64_t arrival(std::uint64_t now_ns, std::uint64_t delay_ns) {
    return last_ns_ = now_ns + delay_ns > last_ns_ ? now_ns + delay_ns : last_ns_;
  }

 private:
  std::uint64_t last_ns_ = 0;
};

}  // namespace mk::sim
