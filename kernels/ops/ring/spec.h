/// \file
/// Makes what all ranks of a Ring Attention agree on, and says what an operator needs before it
/// exists: workspace and arrival flags. Host only.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/ops/ring/geometry.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// Sequences of one length over all ranks.
struct RingAttentionShape {
  std::uint64_t seq_max = 0;      ///< rows over all ranks; a launch takes any from plan.parts() on
  std::uint32_t query_heads = 0;  ///< a multiple of key_heads
  std::uint32_t key_heads = 0;
  std::uint32_t head_dim = 0;  ///< 64 or 128
  bool causal = false;
  DType dtype = DType::kBf16;
  std::uint32_t batch = 1;
  /// Sequences of different lengths in one launch, at most (packed.h); then seq_max is the number
  /// of their rows in all, and batch 1. 0: none, all have one length.
  std::uint32_t sequences_max = 0;
};

/// 0: chosen, see RingAttentionPlan::make.
struct RingAttentionTiling {
  static constexpr std::uint32_t kWholeShards = ~0u;  ///< one after the other
  std::uint32_t tile_q = 0;  ///< sequence rows of a tile of queries, 1 .. 1024
  std::uint32_t tile_k = 0;  ///< keys of a tile, 1 .. 1024
  std::uint32_t chunk_bytes = 0;
  std::uint32_t remote_passes = 0;  ///< 1 .. kRemotePassesMax
  std::uint32_t banks = 0;          ///< 1 or 2; comm/banks.h
  KeyPacking packing = KeyPacking::kRows;
  /// Pairs of K and V (key heads times batch) that the workspace has room for, at most; of
  /// KeyPacking::kRows whole batches.
  std::uint32_t window_pairs = 0;
  /// For copy engines within the node, of KeyPacking::kHeads: then there is one bank, as copies go
  /// by addresses. Else make() tells the reason.
  bool engines = false;
  std::uint32_t heads_together = 0;  ///< RingAttentionGeometry; 0: 1
  /// Of KeyPacking::kHeads over three nodes and more, ChunkOrder::turn_chunks; or kWholeShards.
  std::uint32_t turn_chunks = 0;
};

/// What suits the GPU, for RingAttentionPlan::make; the same on all ranks.
RingAttentionTiling ring_attention_cuda_tiling(const RingAttentionShape& shape);
/// Their rows of queries and keys in a tile, as the plan counts them.
constexpr std::uint32_t ring_tile_queries(std::uint32_t head_dim) {
  return head_dim == 64 ? 192 : 128;
}
constexpr std::uint32_t ring_tile_keys(std::uint32_t head_dim) {
  return head_dim == 64 ? 128 : 176;
}

/// The reason if copy engines cannot bring keys within a node (kInvalidArgument).
Status check_ring_engines(std::uint32_t nodes, std::uint32_t locals,
                          const RingAttentionShape& shape);
/// Numbers of heads that may be together: 1, 2, 4, ... up to all key heads of a batch.
constexpr bool ring_heads_fit(std::uint32_t key_heads, std::uint32_t together) {
  return together != 0 && (together & (together - 1)) == 0 && key_heads % together == 0;
}

struct RingAttentionPlan : RingAttentionGeometry {
  /// Checks the arguments and fills in what was left open:
  ///  - tile_q: as many sequence rows as make 128 queries of one key head (at least 1), halved (to
  ///    32 queries at the least) while a rank has fewer than 8 items; tile_k: 128;
  ///  - remote_passes: 4;
  ///  - chunk_bytes: by rows as GatherPlan::make; by heads those of a head's K and V, but 32 to 256
  ///    KiB, and fewer while a rank would have less than 4 chunks: several groups bring the first
  ///    head then;
  ///  - window_pairs: by rows all; by heads as many as a workspace of 4 GiB has room for.
  /// Errors: kInvalidArgument, kLimitExceeded.
  static Result<RingAttentionPlan> make(std::uint32_t nodes, std::uint32_t locals,
                                        const RingAttentionShape& shape,
                                        const RingAttentionTiling& tiling);

  /// kInvalidArgument, in words, unless a launch may have this many rows.
  Status check_seq(std::uint64_t seq) const;
  /// Tiles of queries of a rank's head on a GPU, at most: each part of each sequence may end with a
  /// smaller one.
  std::uint64_t query_tiles_max() const;
  /// The workspace's data lies `by` bytes further on, not right behind its words. Before the
  /// operator is made, and equally on all ranks.
  void move_data(std::uint64_t by);
  /// Arrival flags this operator needs in its session; 0 with one node.
  std::uint32_t flag_count() const;
  /// Of the rank in a launch with `seq` rows in all.
  LaunchWork work(const World& world, std::uint32_t seq) const;
  /// Equal on two ranks when their plans are: compare before the first launch.
  std::uint64_t fingerprint() const;

  WorkspaceParts workspace;
};

}  // namespace mk::kernels
