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

/// The GPUs of a node whose ranks have one each, else 1: more than two want more groups than two
/// do. (Of ranks that share a GPU, and have few SMs, it has not been measured.)
inline std::uint32_t gpus_of_node(const World& world, const CudaOptions& options) {
  return options.ranks_per_device == 1 ? world.locals : 1;
}

/// Few suffice for what comes over the network where a rank sums it for itself, beside a product
/// that takes longer: all groups of the compute blocks join them, and until then an SM does more
/// for the product (kernels/cuda/decisions/sums_over_nodes.md).
inline constexpr std::uint32_t kFewReceiveGroups = 7;
/// Within a node, over several, beside a product that takes longer than the network.
inline constexpr std::uint32_t kReduceGroupsOverNodes = 24;

/// Groups of an operator that sums, of a whole GPU, besides those of the compute blocks, which join
/// when they have no tiles left.
struct SumGroups {
  std::uint32_t reduce = kReduceGroupsOverNodes;  ///< of the node's partial sums
  std::uint32_t receive = kFewReceiveGroups;      ///< of what comes over the network
};
GroupNeeds sum_needs(const World& world, const SumGroups& groups);
/// Those over nodes, by default: the more the sooner sums go out and come in, as long as the
/// product, on those of 128 SMs that are left to it, takes half of the network's time at most. For
/// each element of C a rank computes 2 k operations and sends `sent_bytes`. `otherwise`: where no
/// number is so, ranks share a GPU (which has not been measured), or the caller names compute
/// blocks.
SumGroups sums_over_nodes(const World& world, const CudaOptions& options, std::uint32_t k,
                          double sent_bytes, const SumGroups& otherwise);

/// Fills in `blocks`, in `frame` the blocks outside the compute blocks; its pollers are set. A
/// count that the options name is taken as it is; by default groups leave the compute blocks half
/// of the share, or as many as the options name, and those that stream fill their last block up.
/// kLimitExceeded: `device_blocks`, the device's, do not hold that for every rank that shares it;
/// kInvalidArgument: more send groups than the session's `lane_count` lanes. `op`: for messages.
Status choose_blocks(const char* op, const CudaOptions& options, const GroupNeeds& needs,
                     std::uint32_t lane_count, std::uint32_t device_blocks, RoleBlocks& blocks,
                     FrameArguments& frame);

}  // namespace mk::kernels::cuda
