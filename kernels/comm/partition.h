/// \file
/// How many of a rank's workers communicate, where that is decided while a launch runs: measured
/// progress in, a target out. Plain arithmetic, without clocks or threads. How workers hear of the
/// target: kernels/cpu/partition_board.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace mk::kernels {

/// The two kinds of work that one worker can do, task by task.
enum class Work : std::uint32_t { kCompute = 0, kCommunicate = 1 };
inline constexpr std::uint32_t kWorks = 2;

/// Measured in a launch so far, by Work: tasks, and the time that they took, summed over workers.
/// Tasks that waited are not in it.
struct WorkDone {
  std::uint64_t tasks[kWorks] = {};
  std::uint64_t ns[kWorks] = {};
};

/// How a launch was partitioned, for statistics. All 0: as planned.
struct PartitionStats {
  std::uint32_t first = 0;  ///< workers that were to communicate, at the begin
  std::uint32_t last = 0;   ///< the same, as published last
  std::uint32_t moves = 0;  ///< how often that changed
  std::uint64_t turns = 0;  ///< tasks before which their worker had done the other kind
};

/// Workers that communicate, so that both kinds of work end at one time: n* = B Rs Cs / (Rp Cp +
/// Rs Cs). `left`: tasks that remain; `cost`: of one of them. There is a task left.
constexpr double balanced_workers(std::uint32_t workers, const std::uint64_t (&left)[kWorks],
                                  const double (&cost)[kWorks]) {
  const double compute = static_cast<double>(left[0]) * cost[0];
  const double communicate = static_cast<double>(left[1]) * cost[1];
  const double all = compute + communicate;
  return all > 0 ? workers * communicate / all : 0;
}

/// The decision. Costs outlive a launch: the next one starts from what the last one has learned.
/// One thread calls it.
class PartitionController {
 public:
  /// A launch with so many tasks. `start`: workers that communicate while nothing is known.
  void begin(std::uint32_t workers, std::uint32_t start, const std::uint64_t (&tasks)[kWorks]) {
    workers_ = workers;
    seen_ = {};
    target_ = bounded(start, tasks);
    if (knows_costs() && tasks[0] != 0 && tasks[1] != 0)
      target_ = bounded(rounded(balanced_workers(workers_, tasks, cost_)), tasks);
  }

  /// The new target. `done` never falls within a launch; `left`: tasks that nobody has taken. Both
  /// may be old.
  std::uint32_t look(const WorkDone& done, const std::uint64_t (&left)[kWorks]) {
    for (std::uint32_t i = 0; i < kWorks; ++i)
      learn(i, done.tasks[i] - seen_.tasks[i], done.ns[i] - seen_.ns[i]);
    seen_ = done;
    if (left[0] == 0 || left[1] == 0) {
      target_ = bounded(target_, left);
    } else if (knows_costs()) {
      const double ideal = balanced_workers(workers_, left, cost_);
      // Half a worker is rounding. More must be worth a move.
      const double band = 0.5 + std::max(kLeastBand, target_ * kBand);
      if (std::abs(ideal - target_) > band) target_ = bounded(rounded(ideal), left);
    }
    return target_;
  }

  std::uint32_t target() const { return target_; }
  /// A task's, in ns; 0: none has been seen.
  double cost(Work work) const { return cost_[static_cast<std::uint32_t>(work)]; }

 private:
  static constexpr double kLeastBand = 0.25;
  static constexpr double kBand = 1.0 / 16;
  /// A cost is the mean of about so many tasks, so that it follows a disturbance.
  static constexpr double kMemory = 16;

  void learn(std::uint32_t work, std::uint64_t tasks, std::uint64_t ns) {
    if (tasks == 0) return;
    const double mean = std::max(1.0, static_cast<double>(ns) / static_cast<double>(tasks));
    const double weight = std::min(1.0, static_cast<double>(tasks) / kMemory);
    cost_[work] = cost_[work] > 0 ? cost_[work] + (mean - cost_[work]) * weight : mean;
  }
  bool knows_costs() const { return cost_[0] > 0 && cost_[1] > 0; }
  static std::uint32_t rounded(double ideal) {
    return static_cast<std::uint32_t>(std::lround(ideal));
  }
  /// While both kinds have tasks, each keeps a worker: the cost of neither goes stale. One worker
  /// alone takes communication first, which others wait for.
  std::uint32_t bounded(std::uint32_t target, const std::uint64_t (&left)[kWorks]) const {
    if (left[1] == 0) return 0;
    if (left[0] == 0 || workers_ <= 1) return workers_;
    return std::clamp(target, 1u, workers_ - 1);
  }

  std::uint32_t workers_ = 1;
  std::uint32_t target_ = 0;
  WorkDone seen_;
  double cost_[kWorks] = {};
};

}  // namespace mk::kernels
