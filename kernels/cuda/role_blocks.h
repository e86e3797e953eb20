/// \file
/// How a rank's share of a GPU is dealt out to the roles: by blocks, which have an SM each, and by
/// groups, of which a block has kGroupsOfBlock. Host arithmetic.
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/cuda/launch_state.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// A rank has a rail of its own, whatever its share of the GPU: so many groups keep pace with it.
inline constexpr std::uint32_t kGroupsOfRail = 12;

/// Which groups an operator has in its world.
struct GroupNeeds {
  Role streams = Role::kReduce;  ///< kReduce or kShare
  bool stream = false;
  bool send = false;
  bool receive = false;
  // By default, of a whole GPU; ranks that share one have so much less, but where they can
  // `stream_least` of those that stream.
  std::uint32_t stream_groups = 24;
  std::uint32_t stream_least = 0;
  std::uint32_t receive_groups = 6;
  /// Those stream first, too, and receive then.
  bool receivers_stream = false;
  /// By default the groups that receive or stream are those that the SMs hold which the product
  /// cannot have (kBlocksMax; one SM at least).
  bool few_groups = false;
};
/// Whether a node has more ranks than two, with a GPU each: they want more groups than two do. (Of
/// ranks that share a GPU, and have few SMs, it has not been measured.)
inline bool several_gpus(const World& world, const CudaOptions& options) {
  return world.locals > 2 && options.ranks_per_device == 1;
}

/// Of an operator that sums; by groups of a whole GPU besides those of the compute blocks, which
/// join when they have no tiles left: within one node by `groups`, what comes over the network by
/// `receive_groups`.
GroupNeeds sum_needs(const World& world, std::uint32_t groups, std::uint32_t receive_groups);
/// Few suffice for that where a rank sums it for itself: all groups of the compute blocks join
/// them, and until then an SM does more for the product (gemm_rs/EXPERIMENTS.md).
inline constexpr std::uint32_t kFewReceiveGroups = 7;

/// Fills in `blocks`, in `frame` the blocks outside the compute blocks; its pollers are set. A
/// count that the options name is taken as it is; by default groups that stream fill their last
/// block up. kLimitExceeded: `device_blocks`, the device's, do not hold that for every rank that
/// shares it; kInvalidArgument: more send groups than the session's `lane_count` lanes. `op`: for
/// messages.
Status choose_blocks(const char* op, const CudaOptions& options, const GroupNeeds& needs,
                     std::uint32_t lane_count, std::uint32_t device_blocks, RoleBlocks& blocks,
                     FrameArguments& frame);

}  // namespace mk::kernels::cuda
