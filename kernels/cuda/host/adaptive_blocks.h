/// \file
/// An operator's partition that adapts from launch to launch: how many of a rank's thread blocks
/// are outside the compute blocks. The host measures launches by their accounts, which it has
/// copied behind them, and asks PartitionSearches (kernels/comm/partition_searches.h). It never
/// waits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/comm/launch.h"
#include "kernels/comm/launch_stats.h"
#include "kernels/comm/partition_searches.h"
#include "kernels/cuda/host/role_blocks.h"
#include "kernels/cuda/skeleton/launch_state.h"

namespace mk::kernels::cuda {

/// An operator with such a partition is planned by these. The numbers of groups that it begins with
/// say nothing of how it will run.
inline CudaOptions without_groups(CudaOptions options) {
  options.stream_groups = options.receive_groups = 0;
  return options;
}

/// Not thread-safe. On the operator's device.
class AdaptiveBlocks {
 public:
  /// Null: the operator has nothing to deal out. `all`: blocks that it may have. `blocks` and
  /// `frame` are as planned, with so many `watchers` among the groups that stream. The numbers of
  /// groups in `options` are those of the first launches; 0: the planned ones.
  static std::unique_ptr<AdaptiveBlocks> create(ThreadBlocks all, const CudaOptions& options,
                                                Warpgroups watchers, const RoleBlocks& blocks,
                                                const FrameArguments& frame);
  ~AdaptiveBlocks();
  AdaptiveBlocks(const AdaptiveBlocks&) = delete;
  AdaptiveBlocks& operator=(const AdaptiveBlocks&) = delete;

  /// Before a launch: its blocks. `adapts`: else it has the first one's.
  void choose(cudaStream_t stream, std::uint32_t m, bool adapts, RoleBlocks& blocks,
              FrameArguments& frame);
  /// After it has been put on the stream: has it measured, if it is to be.
  void measure(cudaStream_t stream);
  /// The last launch's blocks that communicate, as first and last, and how often the number has
  /// changed since the first launch.
  PartitionStats stats() const;
  /// Blocks of a launch, of all roles, at most.
  ThreadBlocks all() const { return all_; }

 private:
  class Measurement;
  AdaptiveBlocks(ThreadBlocks all, ThreadBlocks comm, const CommShares& shares,
                 const CommTargets& targets, const DeviceState* state);

  const ThreadBlocks all_;
  const CommShares shares_;
  const DeviceState* const state_;
  const std::unique_ptr<PartitionSearches<Measurement>> searches_;
};

}  // namespace mk::kernels::cuda
