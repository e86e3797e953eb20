/// \file
/// What a caller may choose of an operator on a GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/launch_work.h"
#include "kernels/comm/types.h"
#include "kernels/comm/units.h"
#include "shm/progress.h"

namespace mk::kernels {

namespace plan {
struct JobPlan;
}

/// What a rank chooses for itself; ranks may differ, but for `ranks_per_device`. 0: chosen.
struct CudaOptions {
  /// Ranks of this process that share the device. Each uses at most its share of the SMs, one block
  /// on each. All blocks of all ranks must be resident at the same time, and copies that they wait
  /// for (plan/legal.h).
  std::uint32_t ranks_per_device = 1;
  ThreadBlocks compute_blocks;  ///< 0: what the groups leave of the share
  Warpgroups stream_groups;     ///< sums within the node, or hands out this rank's rows
  Warpgroups send_groups;       ///< a lane each
  Warpgroups receive_groups;
  /// AllGather+GEMM, several ranks of a node: whether the GPU's DMA engines (what cudaMemcpyAsync
  /// uses) bring this rank's rows to the others, or groups do. For it the plan's local_banks have
  /// to be 1, and a node's ranks have a GPU each. With its banks 1, too, they also pass on what
  /// comes over the network. Ring Attention and MoE Dispatch: the same of keys and
  /// tokens, with a plan for it (RingAttentionTiling::engines, MoeDispatchWay::engines). Not set:
  /// chosen.
  std::optional<bool> dma;
  std::uint32_t dma_bytes = 0;  ///< that they bring at a time; 0: chosen
  /// AllGather+GEMM: AgGemmLaunch::spans, where tiles may. Not set: chosen.
  std::optional<bool> spans;
  /// GEMM+ReduceScatter over several nodes of several ranks: GemmRsLaunch::sums_once. Not set:
  /// chosen.
  std::optional<bool> sums_once;
  /// Of operators that sum, several ranks of a node: FrameArguments::piece_ns. Not set: chosen.
  std::optional<std::uint32_t> piece_ns;
  /// How long one wait may take; see CpuOptions.
  std::chrono::nanoseconds wait_timeout = std::chrono::seconds(30);
  BLayout b_layout = BLayout::kNK;
  /// An element's bits do not depend on M; refused where that cannot hold (plan/legal.h).
  bool batch_invariant = false;
  /// In fused launches the numbers of groups above are only the first ones: from launch to launch
  /// blocks go over from computing to communicating, or back (adaptive_blocks.h). Operators that
  /// multiply or attend; collectives do not heed it.
  bool adaptive = false;
  /// What the planner goes by; an operator takes its plan's.
  GemmResult result;
  /// What the planner goes by in the machine's place; 0: as the machine file says.
  MachineRates rates;
  /// What all ranks of the job plan by; null: the files that are shipped, for this device.
  std::shared_ptr<const plan::JobPlan> job_plan;
  /// Null, or at an address of the device the word SegmentHeader::launches: the kernel adds one
  /// when a launch of several ranks begins, and one when it ends.
  std::uint64_t* launches = nullptr;
  /// Likewise SegmentHeader::progress.
  shm::Progress* progress = nullptr;
};

}  // namespace mk::kernels
