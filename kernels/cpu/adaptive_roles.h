/// \file
/// Two roles of a CPU operator, compute and one that communicates within the node, whose threads do
/// each other's tasks (partition_board.h). The roles' own functions run unchanged: each task is a
/// block of its own, the only one to have it, and a few threads are all of those blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/cpu/pacer.h"
#include "kernels/cpu/partition_board.h"

namespace mk::kernels {

class AdaptiveRoles {
 public:
  /// `compute` and `others`: threads that start a launch in either role, as long as nothing is
  /// known of the costs.
  AdaptiveRoles(Role communicates, std::uint32_t compute, std::uint32_t others)
      : board_(compute + others), communicates_(communicates), compute_(compute), others_(others) {}

  /// Before a launch. Without tasks its threads keep the roles that they have.
  void begin(std::uint32_t tiles, std::uint32_t others) {
    board_.begin(others_, tiles, others, CpuPacer::now_ns());
    tiles_done_.store(0, std::memory_order_relaxed);
    on_ = tiles != 0;
  }
  /// Whether a thread of that role takes tasks of both kinds.
  bool has(Role role) const { return on_ && (role == Role::kCompute || role == communicates_); }
  Role role_of(Work work) const { return work == Work::kCompute ? Role::kCompute : communicates_; }
  std::uint32_t worker(Role role, std::uint32_t index) const {
    return role == Role::kCompute ? index : compute_ + index;
  }
  std::uint32_t workers() const { return compute_ + others_; }
  const PartitionBoard& board() const { return board_; }

  /// All that the worker finds to do. False: the launch has failed.
  template <class Tasks>
  bool run(std::uint32_t worker, Tasks& tasks) {
    WorkerStep step = WorkerStep::kRan;
    while (step == WorkerStep::kRan) step = take_task(board_, worker, tasks);
    return step == WorkerStep::kEnd;
  }
  /// Whether all `count` tiles are done, now that one more is (OperatorBlock::publish_done).
  bool last_tile(std::uint32_t count) {
    return tiles_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count;
  }

 private:
  PartitionBoard board_;
  const Role communicates_;
  const std::uint32_t compute_;
  const std::uint32_t others_;
  std::atomic<std::uint32_t> tiles_done_{0};
  bool on_ = false;
};

/// The launch as blocks with one task each see it: `tiles` compute blocks.
template <class OperatorLaunch>
OperatorLaunch dealt_by_task(const OperatorLaunch& launch, std::uint32_t tiles) {
  OperatorLaunch dealt = launch;
  dealt.blocks.compute = std::max(1u, tiles);
  return dealt;
}

}  // namespace mk::kernels
