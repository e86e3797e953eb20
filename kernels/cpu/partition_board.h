/// \file
/// The protocol of an adaptive partition. Workers of one rank take their tasks one at a time, of
/// two kinds (partition.h), and change between them at a task's end.
///
/// One worker, the leader, publishes how many shall communicate. Worker i then prefers to do so if
/// i is below that target. A worker that finds nothing ready of that kind takes the other, so
/// nobody is idle while anything is ready.
///
/// | word       | written by          | read by                   |
/// |------------|---------------------|---------------------------|
/// | target     | the leader          | all, between tasks        |
/// | taken      | all, atomically     | all                       |
/// | done, ns   | its worker          | the leader                |
///
/// No order is demanded of any of them. A stale target is only slower: `taken` alone says whose a
/// task is, and the flags of the operator order its data.
///
/// Nobody waits in a circle, if the tasks of one kind wait for no other task of the launch on this
/// rank. A worker waits only for a task that is not ready when the other kind has none left to
/// take. Then somebody has taken all that it waits for, and is at work on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/comm/partition.h"
#include "kernels/comm/partition_step.h"
#include "shm/atomic.h"

namespace mk::kernels {

/// It serves one launch at a time. Worker 0 is the leader.
class PartitionBoard {
 public:
  explicit PartitionBoard(std::uint32_t workers)
      : workers_(workers), words_(std::make_unique<Words[]>(workers)) {}

  /// Before a launch's workers begin, by one thread.
  void begin(std::uint32_t start, std::uint64_t compute, std::uint64_t communicate,
             std::uint64_t now_ns) {
    const std::uint64_t tasks[kWorks] = {compute, communicate};
    controller_.begin(workers_, start, tasks);
    for (std::uint32_t i = 0; i < kWorks; ++i) {
      tasks_[i] = static_cast<std::uint32_t>(tasks[i]);
      taken_[i] = 0;
    }
    for (std::uint32_t i = 0; i < workers_; ++i) words_[i] = {};
    target_ = controller_.target();
    steps_.clear();
    if (compute + communicate != 0) steps_.push_back({now_ns, target_, 0});
    moves_ = 0;
  }

  std::uint32_t workers() const { return workers_; }
  std::uint32_t tasks(Work work) const { return tasks_[static_cast<std::uint32_t>(work)]; }
  std::uint32_t target() const { return shm::load_relaxed(&target_); }

  /// The kind that the worker prefers now.
  Work preferred(std::uint32_t worker) const {
    return worker < target() ? Work::kCommunicate : Work::kCompute;
  }
  /// Takes the next task of that kind if `ready(task)`, which does not wait.
  template <class Ready>
  bool take_ready(Work work, std::uint32_t* task, Ready&& ready) {
    std::uint32_t* const taken = &taken_[static_cast<std::uint32_t>(work)];
    for (;;) {
      *task = shm::load_relaxed(taken);
      if (*task >= tasks(work) || !ready(*task)) return false;
      if (shm::compare_exchange(taken, *task, *task + 1)) return true;
    }
  }
  /// Takes the next one, ready or not.
  bool take(Work work, std::uint32_t* task) {
    return take_ready(work, task, [](std::uint32_t) { return true; });
  }

  void note_begin(std::uint32_t worker, Work work) {
    Words& words = words_[worker];
    const auto kind = static_cast<std::uint32_t>(work) + 1;
    if (words.last != 0 && words.last != kind) ++words.turns;
    words.last = kind;
    shm::store_relaxed(&words.now, kind);
  }
  /// `ns`: what the task took; 0: it waited, so its time says nothing.
  void note_end(std::uint32_t worker, Work work, std::uint64_t ns) {
    Words& words = words_[worker];
    const auto kind = static_cast<std::uint32_t>(work);
    shm::store_relaxed(&words.now, 0u);
    if (ns == 0) return;
    shm::store_relaxed(&words.done.ns[kind], words.done.ns[kind] + ns);
    shm::store_relaxed(&words.done.tasks[kind], words.done.tasks[kind] + 1);
  }
  /// The leader's, between its tasks.
  void lead(std::uint64_t now_ns) {
    WorkDone done;
    std::uint32_t communicating = 0;
    for (std::uint32_t i = 0; i < workers_; ++i) {
      for (std::uint32_t kind = 0; kind < kWorks; ++kind) {
        done.tasks[kind] += shm::load_relaxed(&words_[i].done.tasks[kind]);
        done.ns[kind] += shm::load_relaxed(&words_[i].done.ns[kind]);
      }
      communicating += shm::load_relaxed(&words_[i].now) == kCommunicating ? 1 : 0;
    }
    std::uint64_t left[kWorks];
    for (std::uint32_t kind = 0; kind < kWorks; ++kind)
      left[kind] = tasks_[kind] - shm::load_relaxed(&taken_[kind]);
    const std::uint32_t target = controller_.look(done, left);
    if (target == target_) return;
    shm::store_relaxed(&target_, target);
    ++moves_;
    if (steps_.size() < kStepsKept) steps_.push_back({now_ns, target, communicating});
  }

  // --- After a launch ---

  /// None of a launch without tasks.
  const std::vector<PartitionStep>& steps() const { return steps_; }
  PartitionStats stats() const {
    PartitionStats stats{steps_.empty() ? 0 : steps_.front().target, target_, moves_, 0};
    for (std::uint32_t i = 0; i < workers_; ++i) stats.turns += words_[i].turns;
    return stats;
  }

 private:
  static constexpr std::uint32_t kCommunicating =
      static_cast<std::uint32_t>(Work::kCommunicate) + 1;
  static constexpr std::size_t kStepsKept = 4096;

  /// One worker's, on lines of their own.
  struct alignas(64) Words {
    WorkDone done;
    std::uint64_t turns = 0;
    std::uint32_t now = 0;  ///< 0: between tasks; else one more than the kind
    std::uint32_t last = 0;
  };

  const std::uint32_t workers_;
  std::uint32_t tasks_[kWorks] = {};
  std::uint32_t taken_[kWorks] = {};
  std::uint32_t target_ = 0;
  std::uint32_t moves_ = 0;
  PartitionController controller_;
  std::vector<PartitionStep> steps_;
  std::unique_ptr<Words[]> words_;
};

/// How one step of a worker ended.
enum class WorkerStep { kRan, kFailed, kEnd };

/// One task of that worker. `Tasks` has
///
///     bool ready(Work, std::uint32_t task);   whether it would not wait; a guess
///     bool run(Work, std::uint32_t task);     false: the launch has failed
///     std::uint64_t now_ns();
///
/// `Board`: PartitionBoard, or what a test makes of it.
template <class Board, class Tasks>
WorkerStep take_task(Board& board, std::uint32_t worker, Tasks& tasks) {
  const Work first = board.preferred(worker);
  const Work kinds[] = {first, first == Work::kCompute ? Work::kCommunicate : Work::kCompute};
  const auto run = [&](Work work, std::uint32_t task, bool waits) {
    const std::uint64_t begin_ns = tasks.now_ns();
    board.note_begin(worker, work);
    if (!tasks.run(work, task)) return WorkerStep::kFailed;
    const std::uint64_t end_ns = tasks.now_ns();
    board.note_end(worker, work, waits ? 0 : std::max<std::uint64_t>(1, end_ns - begin_ns));
    if (worker == 0) board.lead(end_ns);
    return WorkerStep::kRan;
  };
  std::uint32_t task = 0;
  for (const Work work : kinds) {
    if (board.take_ready(work, &task, [&](std::uint32_t next) { return tasks.ready(work, next); }))
      return run(work, task, false);
  }
  for (const Work work : kinds) {
    if (board.take(work, &task)) return run(work, task, true);
  }
  return WorkerStep::kEnd;
}

}  // namespace mk::kernels
