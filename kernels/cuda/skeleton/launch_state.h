/// \file
/// State that the blocks of a GPU's launches share, for any operator. Some of it stays in device
/// memory from launch to launch. The host reads some, and the GPU looks at words of the host. Plain
/// data for host and device.
#pragma once

#include <chrono>
#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/wait.h"
#include "kernels/cuda/skeleton/chunk_steps.h"
#include "kernels/gather/geometry.h"
#include "shm/layout.h"
#include "shm/ring.h"

namespace mk::kernels::cuda {

/// Thread blocks of one rank, of all roles.
inline constexpr std::uint32_t kGridMax = 2 * kBlocksMax;

/// The longest deadline of a wait. The warps of a block wait for the one that waits for another
/// rank, several times in a row perhaps, and end the process if that lasts (ptx::kBlockDeadlineNs).
inline constexpr std::chrono::nanoseconds kWaitTimeoutMax = std::chrono::minutes(5);

/// A role's block (comm/block.h) is a **group** of a warpgroup's size; a thread block has three.
inline constexpr std::uint32_t kGroupThreads = 128;
inline constexpr std::uint32_t kGroupsOfBlock = kWarpgroupsOfBlock;

/// One role's account of a launch, in the GPU's own clock: sums over its groups, but `end_ns`.
struct RoleAccount {
  std::uint64_t end_ns = 0;
  std::uint64_t groups = 0;
  std::uint64_t waits = 0;
  std::uint64_t wait_ns = 0;
  std::uint64_t commands = 0;
  std::uint64_t network_bytes = 0;
};
struct LaunchAccount {
  std::uint64_t begin_ns_inverted = 0;  ///< bits inverted: the earliest is the greatest
  std::uint64_t end_ns = 0;
  RoleAccount roles[kRoles];
};

/// DeviceState::dma_pieces where a launch has failed: more than there are.
inline constexpr std::uint32_t kAllPieces = 0x40000000;

/// A rank's words in its GPU's memory; all zero before the first launch.
struct DeviceState {
  std::uint32_t epoch = 0;        ///< of the last launch that has ended; its last block writes it
  std::uint32_t blocks_done = 0;  ///< of the running launch
  /// Of the running launch, without the poller: groups that have ended, or that wait for nothing
  /// more (WaitsDone).
  std::uint32_t groups_done = 0;
  /// Of the running launch: steps that have been taken at run time, of what is summed or shared
  /// within the node and of what comes over the nodes.
  std::uint32_t streams_taken = 0;
  std::uint32_t receives_taken = 0;
  std::uint32_t tiles_taken = 0;  ///< of the running launch: tiles beyond each block's first
  std::uint32_t tiles_found = 0;  ///< likewise, the poller's: LaunchTold::tiles, once known
  /// Of each chunk's parts those that are done (place_of_parts), of what is sent on (or handed out)
  /// and of what has been received; zero between launches.
  std::uint32_t parts_done[2][kPartPlaces] = {};
  std::uint32_t roles_done[kRoles] = {};  ///< groups of each role, until all are; then zero
  LocalWords local;                       ///< `stop` stays set: later launches then end at once
  LaunchAccount accounts[2];              ///< by epoch; the next launch's is zero
  // What the kernel and DMA engines tell each other (dma_queue.h), where they share rows.
  std::uint32_t dma_go = 0;       ///< 1: they may begin; they set it to 0
  std::uint32_t dma_started = 0;  ///< the last launch in which a block has set it
  /// Of the running launch: pieces that have come over the network, for them to pass on. When they
  /// have passed on all, they set the second to 1, and a group both to 0.
  std::uint32_t dma_pieces = 0;
  std::uint32_t dma_passed_on = 0;
  alignas(16) std::uint32_t dma_flags[kGatherChunksMax] = {};  ///< what they show, of each chunk
  // What the poller brings from the host (poller.cuh).
  std::uint32_t aborts[2] = {};
  shm::LaneControl controls[shm::kLanesMax] = {};
  /// The session's lanes, but with `controls` above for the host's.
  shm::RingProducer lanes[shm::kLanesMax];
  alignas(128) RailPeer rail_peers[shm::kNodesMax];  ///< RankContext's
};

/// The first failure, in memory of the host that the GPU can write. `failed` is written last.
struct HostReport {
  enum : std::uint32_t { kNone = 0, kWait = 1, kLaunchesSpent = 2 };
  std::uint32_t failed = kNone;
  std::uint32_t epoch = 0;
  std::uint32_t peer_failed = 0;  ///< the workspace's `failed` word
  WaitRecord record;
};

/// What people are told of the next launch (shm::Progress), and where to find how far it is.
struct LaunchTold {
  std::uint32_t op = 0;
  std::uint32_t m = 0;
  std::uint64_t tag = 0;
  std::uint32_t sizes[shm::kProgressSizes] = {};
  std::uint32_t chunks = 0;  ///< to send to other nodes; 0: none, or not known to the host
  std::uint32_t tiles = 0;   ///< 0: not known to the host
  /// Then they are so many times what is there in device memory; null: nobody knows.
  std::uint32_t tiles_each = 0;
  const std::uint32_t* tiles_of = nullptr;
  Role works = Role::kCompute;  ///< whose blocks are said to work while none of them waits
  bool planned = false;         ///< as soon as the plan role is done; else from the start
  /// Tiles that blocks have taken beyond their first; null: DeviceState::tiles_taken.
  const std::uint32_t* taken = nullptr;
  std::uint32_t taken_ahead = 0;  ///< so many of these are not computed yet
};

/// Words in memory of the host (mapped for the GPU), and where in device memory they are mirrored.
/// Nobody but the poller looks at the host's.
struct HostWords {
  const std::uint32_t* flags = nullptr;  ///< this operator's arrival flags; 16-byte aligned
  std::uint32_t* flags_here = nullptr;
  std::uint32_t flag_count = 0;  ///< a multiple of 4
  std::uint32_t bank_flags = 0;  ///< of them the arrivals of one bank, a multiple of 4 (FlagMap)
  std::uint32_t releases_begin = 0;  ///< behind all banks' arrivals; 0, as bank_flags: all flags
  const std::uint32_t* aborts[2] = {};
  std::uint64_t* launches = nullptr;  ///< CudaOptions::launches
  shm::Progress* progress = nullptr;  ///< CudaOptions::progress
  LaunchTold told;
  shm::LaneControl* controls[shm::kLanesMax] = {};
  shm::RingProducer* session_lanes = nullptr;  ///< in device memory: where `produced` lives
  std::uint32_t lane_count = 0;                ///< those that this operator uses
};
/// Flags the poller keeps in mind, in a block's shared memory.
inline constexpr std::uint32_t kPolledFlagsMax = 44 * 128;
static_assert(kPolledFlagsMax >= kOperatorFlagsMax);

/// Of an operator that sums: the steps in which groups take a launch's chunks.
struct SumSteps {
  ChunkSteps sums;      ///< within the node: sum_steps
  ChunkSteps arrivals;  ///< over the nodes: arrival_steps
};

/// Groups that sum what comes over the nodes: those that do nothing else, and, when they have no
/// tiles left, those of the compute blocks. (Of GEMM+ReduceScatter perhaps more.)
MK_HOST_DEVICE constexpr Warpgroups receiving_groups(const RoleBlocks& blocks) {
  return warpgroups_of(blocks.receive) + warpgroups_of(blocks.compute);
}

/// What an operator's kernel gets beside its launch.
struct FrameArguments {
  DeviceState* state = nullptr;
  HostReport* report = nullptr;
  HostWords host;
  Warpgroups pollers = 0;  ///< 1: the first group after the compute blocks polls the host's words
  ThreadBlocks comm_blocks = 0;
  /// DMA engines bring this rank's rows to the node's others (gather::Sharing::by_dma).
  bool by_dma = false;
  /// So may those of the node's others, also when their launch has failed: a launch that ends later
  /// has failed, too.
  bool heeds_peers = false;
  /// So many groups, those that receive, share rows first; of the share role's blocks they are the
  /// last. 0 or all of them.
  Warpgroups sharing_receivers = 0;
  /// A storing warp puts a piece of a tile on its way to another rank in so many nanoseconds at
  /// least. 0: as soon as it is there.
  std::uint32_t piece_ns = 0;
  SumSteps steps;
};

/// Groups outside the compute blocks that share rows and do nothing else.
MK_HOST_DEVICE constexpr Warpgroups groups_that_only_share(const FrameArguments& frame,
                                                           const RoleBlocks& blocks) {
  return warpgroups_of(blocks.share) - frame.sharing_receivers;
}

/// A launch's blocks of all roles.
MK_HOST_DEVICE constexpr ThreadBlocks all_blocks(const FrameArguments& frame,
                                                 const RoleBlocks& blocks) {
  return thread_blocks_of(blocks.compute) + frame.comm_blocks;
}
/// Its groups but the poller.
MK_HOST_DEVICE constexpr Warpgroups working_groups(const FrameArguments& frame,
                                                   const RoleBlocks& blocks) {
  return warpgroups_of(all_blocks(frame, blocks)) - frame.pollers;
}

/// The first block whose groups do nothing but stream: neither poll nor send nor receive, which see
/// the launch to its end.
MK_HOST_DEVICE constexpr ThreadBlocks first_streaming_block(const FrameArguments& frame,
                                                            const RoleBlocks& blocks) {
  const Warpgroups before = frame.pollers + warpgroups_of(blocks.send + blocks.receive);
  return thread_blocks_of(blocks.compute) + div_up(before, kGroupsOfBlock);
}

/// Outside the compute blocks, group g is of block g / kGroupsOfBlock there; groups `before`,
/// before + 1, ... are the `streams` that stream. Which of these group `before` + `index` is when
/// one counts those first that are the first of their block, then the second ones, .... So few
/// chunks keep many blocks busy.
MK_HOST_DEVICE constexpr std::uint32_t spread_stream(std::uint32_t index, std::uint32_t before,
                                                     std::uint32_t streams) {
  const auto count_below = [](std::uint32_t group, std::uint32_t place) {
    return (group + kGroupsOfBlock - 1 - place) / kGroupsOfBlock;
  };
  const std::uint32_t group = before + index;
  const std::uint32_t place = group % kGroupsOfBlock;
  std::uint32_t spread = count_below(group, place) - count_below(before, place);
  for (std::uint32_t other = 0; other < place; ++other)
    spread += count_below(before + streams, other) - count_below(before, other);
  return spread;
}

}  // namespace mk::kernels::cuda
