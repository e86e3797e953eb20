/// \file
/// What a Ring Attention launch hands to its kernel. Plain data for host and device.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/comm/trace.h"
#include "kernels/cuda/core/attention_types.h"
#include "kernels/cuda/skeleton/launch_state.h"
#include "kernels/ops/ring/items.h"
#include "kernels/ops/ring/launch.h"
#include "kernels/ops/ring/packed_items.h"
#include "kernels/ops/ring/packed_tables.h"

namespace mk::kernels::cuda {

/// Of a launch of packed sequences: how its tables are made, and who looks at them.
struct PackedLaunchTables {
  PackedTableArguments make;
  bool there = false;  ///< a launch before this one, on its stream, has made them
  PackedItems::Params items;
  PackedRanges::Params ranges;
};

/// This rank's keys and values as packed rows, where their rows lie apart: loaded
/// kPackedBoxBytes at a time.
struct PackedRowMaps {
  CUtensorMap k;
  CUtensorMap v;
  bool there = false;
};
inline constexpr int kPackedBoxBytes = 16 * 1024;

/// What blocks note of a launch that is traced. Block b, and behind all blocks watcher w, has
/// `capacity` spans, and says at its end how many it would have noted.
struct RingTraceBuffer {
  TraceSpan* spans = nullptr;  ///< null: it is not traced
  std::uint32_t* counts = nullptr;
  std::uint32_t capacity = 0;
};

struct RingAttentionArguments {
  CUtensorMap q;          ///< this rank's queries, box kAttentionRows rows
  CUtensorMap k;          ///< this rank's keys
  CUtensorMap v;          ///< and values
  CUtensorMap gathered;   ///< rows of the gather, [slot of any bank][row]; as K and V of all ranks
  PackedRowMaps rows;     ///< K and V as the gather takes them
  float scale_log2 = 0;   ///< scale * log2(e)
  RingLaunchItems items;  ///< of sequences of one length
  PackedLaunchTables packed;              ///< of packed ones
  std::uint32_t* dealer_words = nullptr;  ///< ItemDealer::Params::words
  std::uint64_t* shown = nullptr;         ///< by rank: ShownRows; zero before the first launch
  std::uint32_t watchers = 0;  ///< groups that look at flags for the compute blocks: the first of
                               ///< those that share
  RingTraceBuffer trace;
  AttentionTensor o;
  float* lse = nullptr;
  std::int64_t lse_batch_stride = 0;
  std::int64_t lse_row_stride = 0;
  std::int64_t lse_head_stride = 0;
  RingAttentionLaunch launch;  ///< the kernel puts in the epoch
  FrameArguments frame;
};

/// Blocks outside the compute blocks that compute, too, when all that they share is shared: those
/// behind the first `late_blocks_begin` of the grid. On one node only: over nodes the groups
/// outside the compute blocks tell when a bank has been read, and end after those.
MK_HOST_DEVICE constexpr ThreadBlocks late_blocks_begin(const FrameArguments& frame,
                                                        const RingAttentionLaunch& launch) {
  return launch.context.world.nodes == 1 ? first_streaming_block(frame, launch.blocks)
                                         : all_blocks(frame, launch.blocks);
}
inline ThreadBlocks late_blocks(const RingAttentionArguments& arguments) {
  return all_blocks(arguments.frame, arguments.launch.blocks) -
         late_blocks_begin(arguments.frame, arguments.launch);
}

/// One compiled kernel, seen from the host.
struct RingAttentionKernel {
  int tile_queries;
  int tile_keys;
  int query_box_rows;  ///< of Q's tensor map; those of keys have tile_keys
  cudaError_t (*prepare)();
  cudaError_t (*launch)(const RingAttentionArguments&, cudaStream_t);
};

/// Null: this build has none. The packed ones make their tables first.
const RingAttentionKernel* ring_attention_kernel_bf16(std::uint32_t head_dim);
const RingAttentionKernel* ring_attention_kernel_f16(std::uint32_t head_dim);
const RingAttentionKernel* ring_attention_packed_kernel_bf16(std::uint32_t head_dim);
const RingAttentionKernel* ring_attention_packed_kernel_f16(std::uint32_t head_dim);

}  // namespace mk::kernels::cuda
