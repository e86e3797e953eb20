/// \file
/// Ring Attention of all ranks, and what its baselines move and merge, for ring_bench.py through
/// ctypes. Addresses are those of PyTorch's tensors. Every rank has a GPU and a stream. What goes
/// wrong but a launch ends the process.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

struct MkRingSetup {
  std::uint32_t nodes, locals;
  const char* link_bandwidth;  ///< of a rail and direction, "50GB/s"
};

/// All ranks' streams, with NCCL within each node and the daemons' rails between two. To be made
/// before anybody asks CUDA for anything. One of a process.
void* mk_ring_world(const MkRingSetup* setup);
void mk_ring_end(void* world);
void* mk_ring_stream(void* world, std::uint32_t rank);

/// Times what `queue` queues on the ranks' streams, begun together (Stopwatch): microseconds of
/// each rank. `held` 0: what it queues first may wait for the device to be idle.
void mk_ring_time(void* world, void (*queue)(), int held, double* us);

struct MkRingShape {
  int dtype;  ///< 0: bf16, 1: f16
  std::uint32_t batch, query_heads, key_heads, head_dim, causal;
  std::uint64_t seq;
  std::uint32_t stream_groups;  ///< CudaOptions
};

/// The operator of every rank for launches of shape.seq rows; null: mk_ring_error().
void* mk_ring_create(void* world, const MkRingShape* shape);
void mk_ring_destroy(void* ring);
int mk_ring_tile_keys(void* ring);
/// SMs of a rank that compute, and those that do not.
void mk_ring_blocks(void* ring, std::uint32_t* compute, std::uint32_t* others);

/// Strides of batch, row and head of Q, K, V, O and LSE, in elements.
struct MkRingTensors {
  void *q, *k, *v, *o;
  float* lse;
  std::int64_t strides[5][3];
};
/// On all ranks' streams. 0, or 1 with mk_ring_error().
int mk_ring_launch(void* ring, const MkRingTensors* by_rank, int unfused);

/// Of the last launch. Times from its start on the rank, in nanoseconds; waits of the SMs that
/// compute, summed over them.
struct MkRingStats {
  std::uint64_t total_ns, compute_end_ns, share_end_ns, wait_ns, waits;
};
int mk_ring_finish(void* ring, MkRingStats* by_rank);
/// Of the last failure.
const char* mk_ring_error();
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

struct MkRingMove {
  std::uint32_t from, to;  ///< ranks
  const void* source;
  void* target;
  std::uint64_t bytes;
};
/// As one group of NCCL, on a stream of each rank; within a rank a copy.
void mk_ring_exchange(void* world, const MkRingMove* moves, std::uint32_t count,
                      void* const* streams);
/// `count` all-gathers as one group: sources and targets of the first for each rank, then those of
/// the next; `bytes` of one rank.
void mk_ring_all_gather(void* world, const void* const* sources, void* const* targets,
                        std::uint32_t count, std::uint64_t bytes, void* const* streams);

/// Of two nodes: `bytes` of each rank's memory that the daemons know, until mk_ring_destroy of the
/// ring.
void mk_ring_rail_memory(void* ring, std::uint64_t bytes, void** by_rank);
/// Bytes of a rank's such memory to the same place of its rail peer's, on the stream.
struct MkRingParcel {
  std::uint64_t offset, bytes;
};
void mk_ring_rail_send(void* ring, std::uint32_t rank, const MkRingParcel* parcels,
                       std::uint32_t count, void* stream);
/// Keeps the stream until as many parcels of the same sizes have come from the rail peer.
void mk_ring_rail_await(void* ring, std::uint32_t rank, const MkRingParcel* parcels,
                        std::uint32_t count, void* stream);
/// Once before the sends of all ranks.
void mk_ring_rail_begin(void* ring);
/// Whether all that was awaited since the last such question came.
int mk_ring_rail_right(void* ring);

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
