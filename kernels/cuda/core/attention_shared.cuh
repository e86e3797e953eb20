/// \file
/// What the roles of an attention block share: the kernel's arguments, and its shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/core/attention_config.cuh"
#include "kernels/cuda/core/attention_items.h"
#include "kernels/cuda/core/attention_policies.cuh"
#include "kernels/cuda/core/block_sync.cuh"
#include "kernels/cuda/core/non_finite.cuh"
#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// The kernel's arguments. Tensor maps must stay in constant memory: pass this as a
/// __grid_constant__ parameter.
template <class Items, class Keys, class Gate, class Store>
struct AttentionParams {
  CUtensorMap q;     ///< as those of Keys, its box the queries of one warpgroup
  float scale_log2;  ///< scale * log2(e), positive
  ItemDealer::Params dealer;
  typename Items::Params items;
  typename Keys::Params keys;
  typename Gate::Params gate;
  typename Store::Params store;
};

/// Shared memory of one block. A barrier's name says what has happened to its slot.
template <class Config>
struct alignas(1024) AttentionShared {
  using Bytes = std::uint8_t;
  using Barrier = std::uint64_t;
  static constexpr int kStages = Config::kStages;
  static constexpr int kMath = Config::kMathWarpgroups;

  alignas(1024) Bytes q[kMath][Config::kQueryBytes];
  alignas(1024) Bytes k[kStages][Config::kKeyBytes];
  alignas(1024) Bytes v[kStages][Config::kKeyBytes];

  Barrier q_full[kMath];     ///< to a math warpgroup: its queries have landed
  Barrier q_empty[kMath];    ///< to the loads: its last scores of the item are there
  Barrier k_full[kStages];   ///< to math: the tile has landed
  Barrier k_empty[kStages];  ///< to the loads: all have multiplied with it
  Barrier v_full[kStages];   ///< to math: the tile has landed and, if masked, is finite
  Barrier v_empty[kStages];
  Barrier v_raw[kStages];  ///< to the inspecting warps: a masked tile has landed
  MaskedTile masked[kStages];
  std::uint32_t cleared[kMath];  ///< to the inspecting warps: by item, 4 warps done with the table
  NonFiniteTable<Config::kHeadDim> non_finite[kMath];
  struct {
    StageCount<ItemFeed::kSlots> fed;  ///< items, empty ones too
    std::uint32_t begun;               ///< items that have keys
    StageCount<kStages> masked;        ///< masked tiles
    AttentionItem item;                ///< of a kernel whose gate waits, for the same reason
    KeyRange range;
  } load_counts;  ///< the loading thread's, which has no registers for them
  ItemFeed feed;  ///< items' numbers, from the loading thread to the math warps
};

/// What a gate shares with its warp, if anything, lies behind the core's own shared memory.
template <class Gate, class Config>
__device__ __forceinline__ typename Gate::Shared& gate_shared(AttentionShared<Config>& shared) {
  return *reinterpret_cast<typename Gate::Shared*>(&shared + 1);
}

/// Makes the barriers of attention_core, by all threads of the block; a barrier of the block comes
/// between the two.
template <class Config, class Params>
__device__ __forceinline__ void prepare_attention(const Params& params,
                                                  AttentionShared<Config>& shared) {
  constexpr int kMathWarps = Config::kMathWarpgroups * 4;
  using Search = NonFiniteSearch<Config>;
  for (auto& table : shared.non_finite) table.clear(threadIdx.x, Config::kThreads);
  if (threadIdx.x != 0) return;
  ptx::prefetch_tensor_map(&params.q);
  for (int w = 0; w < Config::kMathWarpgroups; ++w) {
    ptx::mbarrier_init(&shared.q_full[w], 1);
    ptx::mbarrier_init(&shared.q_empty[w], 4);
    shared.cleared[w] = 0;
  }
  for (int stage = 0; stage < Config::kStages; ++stage) {
    ptx::mbarrier_init(&shared.k_full[stage], 1);
    ptx::mbarrier_init(&shared.k_empty[stage], kMathWarps);
    ptx::mbarrier_init(&shared.v_full[stage], Search::kWarps);
    ptx::mbarrier_init(&shared.v_empty[stage], kMathWarps);
    ptx::mbarrier_init(&shared.v_raw[stage], 1);
  }
  shared.feed.begin(kMathWarps);
  ptx::mbarrier_init_fence();
}

}  // namespace mk::kernels::cuda
