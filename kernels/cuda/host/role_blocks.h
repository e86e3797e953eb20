/// \file
/// How a rank's share of a GPU is dealt out to the roles: by blocks, which have an SM each, and by
/// groups, of which a block has kGroupsOfBlock. Host arithmetic.
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/host/cuda_options.h"
#include "kernels/cuda/skeleton/launch_state.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

/// Which groups an operator has in its world.
struct GroupNeeds {
  /// False: a collective, whose blocks are all alike. RoleBlocks::compute are then the groups that
  /// copy from or to the caller's memory, of all blocks.
  bool multiplies = true;
  Role streams = Role::kReduce;  ///< kReduce or kShare
  bool stream = false;
  bool send = false;
  bool receive = false;
  // By default, of a whole GPU; ranks that share one have so much less, but where they can
  // `stream_least` of those that stream.
  std::uint32_t stream_groups = 24;
  std::uint32_t stream_least = 0;
  std::uint32_t receive_groups = 6;
  /// So many of those that stream only look for what comes, however many others there are.
  std::uint32_t watchers = 0;
  /// Those stream first, too, and receive then.
  bool receivers_stream = false;
  /// 0, or so many blocks outside the compute blocks the planner has chosen (planned.h), with this
  /// rank's own numbers of groups: nothing is scaled then.
  std::uint32_t planned_blocks = 0;
};

/// Fills in `blocks`, in `frame` the blocks outside the compute blocks; its pollers are set. A
/// count that the options name is taken as it is; by default groups leave the compute blocks half
/// of the share, or as many as the options name. Those that stream fill the last block up, or give
/// the poller its place. A collective has all blocks of its share. Its roles but send get equal
/// parts of the groups, receive half of one. kLimitExceeded: `device_blocks`, the device's, do not
/// hold that for every rank that shares it. kInvalidArgument: more send groups than the session's
/// `lane_count` lanes. `op`: for messages.
Status choose_blocks(const char* op, const CudaOptions& options, const GroupNeeds& needs,
                     std::uint32_t lane_count, std::uint32_t device_blocks, RoleBlocks& blocks,
                     FrameArguments& frame);

/// Groups that an operator has outside its compute blocks besides those that poll and send: their
/// shares of what there is.
struct CommShares {
  Warpgroups streams;   ///< that stream and do nothing else, without the watchers
  Warpgroups receives;  ///< that receive
  Warpgroups watchers;  ///< GroupNeeds::watchers: these stay as they are
};
/// As those blocks have them.
CommShares shares_of(Warpgroups watchers, const RoleBlocks& blocks, const FrameArguments& frame);

/// Numbers of blocks outside the compute blocks with which each role has a group.
struct CommTargets {
  std::uint32_t least = 1;
  std::uint32_t most = 0;  ///< less than `least`: there is none
  /// With so many groups in place of the shares'; 0: as there.
  std::uint32_t of(const CommShares& shares, Warpgroups streams, Warpgroups receives) const;

  std::uint32_t besides = 0;  ///< groups that poll, send or watch
};
CommTargets targets_of(ThreadBlocks all, const CommShares& shares, const RoleBlocks& blocks,
                       const FrameArguments& frame);

/// The blocks of a rank's roles with `comm` of `all` outside the compute blocks. `blocks`, `frame`:
/// as they are now; those that poll and send stay.
void deal_blocks(ThreadBlocks all, ThreadBlocks comm, const CommShares& shares, RoleBlocks& blocks,
                 FrameArguments& frame);

}  // namespace mk::kernels::cuda
