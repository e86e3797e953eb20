/// \file
/// Ring Attention of all ranks of a world (world_abi.h), and how its baselines merge, for
/// ring_bench.py.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

struct MkRingShape {
  int dtype;  ///< 0: bf16, 1: f16
  std::uint32_t batch, query_heads, key_heads, head_dim, causal;
  std::uint64_t seq;
  std::uint32_t stream_groups;  ///< CudaOptions
  /// Keys come within a node by: 0: the planner's choice, 1: copy engines, 2: groups. Engines have
  /// `heads_together`, 0: chosen.
  std::uint32_t transport, heads_together;
  std::uint32_t window_pairs;  ///< RingAttentionTiling; 0: the operator's own choice
};

/// The operator of every rank for launches of shape.seq rows; null: mk_world_error().
void* mk_ring_create(void* world, const MkRingShape* shape);
void mk_ring_destroy(void* ring);
int mk_ring_tile_keys(void* ring);
/// 1: copy engines bring keys, of so many heads together.
int mk_ring_engines(void* ring, std::uint32_t* heads_together);
/// SMs of a rank that compute, and those that do not.
void mk_ring_blocks(void* ring, std::uint32_t* compute, std::uint32_t* others);

/// Strides of batch, row and head of Q, K, V, O and LSE, in elements.
struct MkRingTensors {
  void *q, *k, *v, *o;
  float* lse;
  std::int64_t strides[5][3];
};
/// On all ranks' streams. 0, or 1 with mk_world_error().
int mk_ring_launch(void* ring, const MkRingTensors* by_rank, int unfused);

/// Of the last launch. Times from its start on the rank, in nanoseconds; waits of the SMs that
/// compute, summed over them.
struct MkRingStats {
  std::uint64_t total_ns, compute_end_ns, share_end_ns, wait_ns, waits;
};
int mk_ring_finish(void* ring, MkRingStats* by_rank);
/// RingAttentionCuda::set_trace, of all ranks.
void mk_ring_set_trace(void* ring, int on);
/// TraceEvent; times in nanoseconds of the rank's GPU.
struct MkRingSpan {
  std::uint64_t begin_ns, end_ns;
  std::uint32_t role, block, kind, index, rank;
};
/// Those of the last launch of a rank, after mk_ring_finish; how many there are, of which `most`
/// are filled in.
std::uint32_t mk_ring_trace(void* ring, std::uint32_t rank, MkRingSpan* spans, std::uint32_t most);

struct MkRingPartial {
  const void* o;
  const float* lse;
  std::int64_t first, rows;
};
/// PartialAttention, of one rank.
void mk_ring_merge(void* world, std::uint32_t rank, void* o, int batch, std::int64_t rows,
                   int heads, int dim, const MkRingPartial* partials, int count, void* stream);

#pragma GCC visibility pop
}  // extern "C"
