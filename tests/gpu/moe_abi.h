/// \file
/// A MoE layer of all ranks of a world (world_abi.h), for moe_bench.py: MoE Dispatch+GEMM, and
/// GEMM+Combine over what that leaves.
#pragma once

#include <cstdint>

extern "C" {
#pragma GCC visibility push(default)

struct MkMoeShape {
  int dtype;     ///< 0: bf16, 1: f16
  int epilogue;  ///< MoeEpilogue
  std::uint32_t hidden, features, experts, top_k, tokens_max, rows_max;
  int f32_partials;
  std::uint32_t stream_groups;  ///< CudaOptions, of both operators
  /// Tokens come within a node by: 0: the planner's choice, 1: copy engines, 2: groups. Engines
  /// bring `dma_bytes` at a time, 0: chosen.
  std::uint32_t transport, dma_bytes;
  int first_only;  ///< no second half
};
/// Null: mk_world_error().
void* mk_moe_create(void* world, const MkMoeShape* shape);
void mk_moe_destroy(void* layer);
/// 1: copy engines bring tokens.
int mk_moe_engines(void* layer);

/// One rank's, in device memory.
struct MkMoeTensors {
  const void* tokens;          ///< [count][hidden]
  const std::int32_t* ids;     ///< [count][top_k]
  const float* weights;        ///< [count][top_k]
  const void *first, *second;  ///< expert weights, [experts here][columns][hidden] and
                               ///< [experts here][hidden][features]
  void* y;                     ///< [rows_max][features]
  void* out;                   ///< [count][hidden]
  std::uint32_t count;
};
/// On all ranks' streams: the first half, the second over what it leaves, or both. 0, or 1 with
/// mk_world_error().
int mk_moe_launch(void* layer, const MkMoeTensors* by_rank, int first, int second, int unfused);

/// Of the last launch. Times from its start on the rank, in nanoseconds; waits of the SMs that
/// compute, summed over them.
struct MkMoeStats {
  std::uint64_t total_ns, compute_end_ns, wait_ns, waits;
  std::uint32_t compute_sms;
  std::uint32_t stream_groups;  ///< warpgroups that share, pack or sum
};
/// Of the half that was launched last: of the first, or of the second.
int mk_moe_finish(void* layer, int second, MkMoeStats* by_rank);
/// What the first half left: where a rank's offsets and rows (MoeRow) lie.
void mk_moe_output(void* layer, std::uint32_t rank, const void** offsets, const void** rows);

#pragma GCC visibility pop
}  // extern "C"
