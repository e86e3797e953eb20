/// \file
/// The GEMM core: C = A B, fp32 sums, as one persistent warp-specialised sm_90a kernel that every
/// operator reuses.
///
/// A block has one io warpgroup and two math warpgroups (64 rows of the tile each):
///
///     io warp 0     asks the gate, loads A and B by TMA into a ring of stages
///     math w        multiplies stage by stage (wgmma), writes its rows of C by pieces to staging
///     io warp 1+w   hands the pieces of math warpgroup w to the output store
///
/// and four sets of barriers between them (GemmShared): stage_full, stage_empty, piece_full,
/// piece_empty; where another rank's partials are added to tiles (late_adds.cuh), which the storing
/// warps see to as well, a fifth. (The fourth io warp has nothing to do.) The math warpgroups wait
/// for each other nowhere: while one writes its half of C the other keeps the tensor cores busy.
/// The loads of the next tile run through all of it.
///
/// In a cluster of two, the blocks work on tiles one above the other. So they need the same tile of
/// B: each loads half of it and multicasts that to both. A stage is then free when the math warps
/// of both blocks have read it.
///
/// Where tiles are few, a cluster works on one tile, each block on its share of K (split_sums.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/cuda/core/gemm_config.cuh"
#include "kernels/cuda/core/gemm_policies.cuh"
#include "kernels/cuda/core/late_adds.cuh"
#include "kernels/cuda/core/ptx.cuh"
#include "kernels/cuda/core/split_sums.cuh"
#include "kernels/cuda/core/tile.h"
#include "kernels/cuda/core/tile_staging.cuh"
#include "kernels/cuda/core/tile_walk.cuh"

namespace mk::kernels::cuda {

/// The kernel's arguments. Tensor maps must stay in constant memory: pass this as a
/// __grid_constant__ parameter.
template <class Order, class Gate, class Store, class Epilogue = RoundedSums>
struct GemmParams {
  CUtensorMap a;   ///< A as [M,K], box a_box_rows x 64, 128-byte swizzle
  CUtensorMap b;   ///< B as [N,K], box kBBox x 64, or as [K,N], box 64 x 64; 128-byte swizzle
  int a_box_rows;  ///< kBlockM, or M rounded up to 8 if that is less: no more than C has is loaded
  int m_blocks;    ///< ceil(M / kBlockM); a cluster's last tile may lie below it, and is not stored
  int k_blocks;    ///< ceil(K / 64)
  int splits = 1;  ///< blocks of a cluster, which share K; then a cluster has one tile at most
  typename Order::Params order;
  typename Gate::Params gate;
  typename Store::Params store;
  typename Epilogue::Params epilogue;
};

/// Whether the order's tiles are no grid of kBlockM x kBlockN: then `TileRect rect(Tile) const`
/// says where they lie, in elements. Such an order works without clusters.
template <class Order>
inline constexpr bool kHasRect = requires(const Order& order, Tile tile) {
  order.rect(tile);
};

/// Whether math warpgroup `warpgroup` has anything to do: whether so many rows (of A's box) reach
/// its own. Else its wgmma would take as much of the tensor cores' time for nothing.
__device__ __forceinline__ bool has_rows(int warpgroup, int rows) {
  return warpgroup * kWarpgroupRows < rows;
}

/// Whether tiles differ in their rows (TileOf). Then a math warpgroup that has none of a tile's
/// passes on the tile's stages.
template <class TileType>
inline constexpr bool kHasRows = requires(const TileType& tile) {
  tile.rows;
};
/// The rows of a tile that are computed.
template <class TileType>
__device__ __forceinline__ int rows_of(const TileType& tile, int a_box_rows) {
  if constexpr (kHasRows<TileType>) {
    return tile.rows;
  } else {
    return a_box_rows;
  }
}

/// Makes the barriers of gemm_core, by thread 0 of the block; a barrier of the block (or cluster)
/// comes between the two.
template <class Config, class Order, class Gate, class Store, class Epilogue>
__device__ __forceinline__ void prepare_core(const GemmParams<Order, Gate, Store, Epilogue>& params,
                                             SharedOf<Config, Gate, Store, Order>& shared) {
  constexpr int kMathWarpgroups = Config::kMathWarpgroups;
  if constexpr (kOrderShares<Order>) Order::prepare(params.order, shared.order);
  if (threadIdx.x != 0) return;
  int readers = 0;  // of a stage: math warps
  for (int w = 0; w < kMathWarpgroups; ++w)
    readers += has_rows(w, params.a_box_rows) ? Config::kCluster * 4 : 0;
  ptx::prefetch_tensor_map(&params.a);
  ptx::prefetch_tensor_map(&params.b);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    ptx::mbarrier_init(&shared.stage_full[stage], 1);
    ptx::mbarrier_init(&shared.stage_empty[stage], readers);
  }
  for (int w = 0; w < kMathWarpgroups; ++w) {
    for (int buffer = 0; buffer < Config::kStagingBuffers; ++buffer) {
      ptx::mbarrier_init(&shared.piece_full[w][buffer], 4);
      ptx::mbarrier_init(&shared.piece_empty[w][buffer], 1);
    }
  }
  if constexpr (kAccumulates<Order>) shared.late.begin();
  if constexpr (Config::kSplitsK) {
    const auto split = KShare::of<Config>(params.splits, params.k_blocks);
    prepare_split_sums<Config>(shared.split, split, readers);
  }
  // The math warps and the storing threads.
  if constexpr (kIsTaken<Order>) shared.feed.begin(kMathWarpgroups * 4 + kMathWarpgroups);
  for (auto& word : shared.store_words) word = 0;
  ptx::mbarrier_init_fence();
}

/// Runs the tiles of worker `worker` of `workers` (a worker is a cluster) in this block, after
/// prepare_core. All threads of the block call it, in a kernel with
/// __launch_bounds__(Config::kThreads, 1) and sizeof(SharedOf) of dynamic shared memory at
/// `shared`.
template <class Config, class Order, class Gate, class Store, class Epilogue>
__device__ __forceinline__ void gemm_core(const GemmParams<Order, Gate, Store, Epilogue>& params,
                                          SharedOf<Config, Gate, Store, Order>& shared, int worker,
                                          int workers) {
  static_assert(sizeof(SharedOf<Config, Gate, Store, Order>) <= kSharedBytesMax,
                "too many stages or staging buffers");
  using Mma = Wgmma<Config>;
  constexpr int kStages = Config::kStages;
  constexpr int kCluster = Config::kCluster;
  constexpr int kMathWarpgroups = Config::kMathWarpgroups;

  // Warp-uniform values come through a shuffle so that the compiler keeps them in uniform
  // registers. (The warp's number where it is used: from before the branch ptxas may spill it.)
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const auto warp_of_group = [] {
    return static_cast<int>(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0));
  };
  const int lane = threadIdx.x % 32;
  const int cluster_rank = kCluster == 1 ? 0 : static_cast<int>(cute::block_rank_in_cluster());

  const auto share = KShare::of<Config>(params.splits, params.k_blocks);

  TileOf<Order> tile;

  if (warpgroup == kMathWarpgroups) {
    // ---- io warpgroup ---------------------------------------------------------------------------
    ptx::registers_shrink<Config::kIoRegisters>();
    const int warp = warp_of_group();

    if (warp == 0 && cute::elect_one_sync()) {
      // Loads. Where A's box is short, the rest of the tile in shared memory is stale: it reaches
      // only rows of the accumulators that lie outside C.
      // The other lanes assist the first (LeaderWarp). That is the one elected, each time, though
      // PTX does not name it.
      if constexpr (kGateLooksByWarp<Gate>) {
        if (lane != 0) __trap();
      }
      constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      Gate gate = [&] {
        if constexpr (kGateShares<Gate>) {
          return Gate(params.gate, shared.gate);
        } else {
          return Gate(params.gate);
        }
      }();
      const auto stage_bytes = [&] {
        if constexpr (requires { gate.a_bytes(); }) {
          return static_cast<std::uint32_t>(gate.a_bytes() + Config::kBBytes);
        } else {
          return static_cast<std::uint32_t>(params.a_box_rows * 128 + Config::kBBytes);
        }
      };
      Order order = make_order<Order>(params.order, shared.order, worker, workers);
      RingPosition<kStages> ring;
      std::uint32_t number = 0;
      [[maybe_unused]] LateAwaits late;
      const auto next = [&] {
        const bool more = order.next(&tile);
        if constexpr (kIsTaken<Order>) shared.feed.put(number++, more, tile);
        return more;
      };
      while (next()) {
        const int m = tile.m * kCluster + cluster_rank;
        const int gated_m = kCluster == 1 ? m : min(m, params.m_blocks - 1);
        Tile origin;  // its first row and column
        if constexpr (kHasRect<Order>) {
          const TileRect rect = order.rect(tile);
          origin = {static_cast<int>(rect.row), static_cast<int>(rect.column)};
        }
        int ready_until = 0;
        for (int k_block = share.begin; k_block < share.end; ++k_block, ring.advance()) {
          if (k_block >= ready_until) {
            if constexpr (requires { gate.wait(tile, k_block); }) {
              ready_until = gate.wait(tile, k_block);
            } else {
              ready_until = gate.wait(gated_m, tile.n, k_block);
            }
          }
          std::uint64_t* full = &shared.stage_full[ring.slot];
          ptx::mbarrier_wait(&shared.stage_empty[ring.slot], ring.parity ^ 1);
          ptx::mbarrier_arrive_expect(full, stage_bytes());

          const int k = k_block * kBlockK;
          if constexpr (kGateLoadsA<Gate>) {
            gate.load_a(params.a, full, kHint, shared.a[ring.slot], k);
          } else {
            cute::SM90_TMA_LOAD_2D::copy(&params.a, full, kHint, shared.a[ring.slot], k,
                                         kHasRect<Order> ? origin.m : m * Config::kBlockM);
          }

          if constexpr (kGateLoadsB<Gate>) {
            gate.load_b(params.b, full, kHint, shared.b[ring.slot], k);
          } else {
            // B: K-major as one box, N-major as boxes of 64 columns; in a cluster, this block's
            // half of it, for both.
            constexpr int kBoxes = Config::kBColumns / kCluster / Config::kBBox;
            constexpr int kBoxBytes = Config::kBBox * kBlockK * 2;
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
              const int box = cluster_rank * kBoxes + i;
              const int n =
                  (kHasRect<Order> ? origin.n : tile.n * Config::kBlockN) + box * Config::kBBox;
              std::uint8_t* to = shared.b[ring.slot] + box * kBoxBytes;
              const int x = Config::kBLayout == BLayout::kNK ? k : n;
              const int y = Config::kBLayout == BLayout::kNK ? n : k;
              if constexpr (kCluster == 1) {
                cute::SM90_TMA_LOAD_2D::copy(&params.b, full, kHint, to, x, y);
              } else {
                cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&params.b, full, (1 << kCluster) - 1, kHint,
                                                       to, x, y);
              }
            }
          }
        }
        if constexpr (kAccumulates<Order>) {
          if (order.accumulates()) {
            late.hand_over(gate, shared);
            late.set(tile);
          }
        }
      }
      if constexpr (kAccumulates<Order>) late.hand_over(gate, shared);
      if constexpr (kGateEnds<Gate>) gate.end();
      if constexpr (kGateLooksByWarp<Gate>) shared.gate.executor.end();
    } else if (warp >= 1 && warp <= kMathWarpgroups && cute::elect_one_sync()) {
      // Stores of math warpgroup `of`.
      const int of = warp - 1;
      Store store = [&] {
        if constexpr (kStoreSees<Store, decltype(shared.gate)>) {
          return Store(params.store, shared.store_words, shared.gate);
        } else {
          return Store(params.store, shared.store_words);
        }
      }();
      TileWalk<Order, false> order(params.order, shared, worker, workers);
      RingPosition<Config::kStagingBuffers> ring;
      [[maybe_unused]] LateAdds<Config> late(of);
      while (order.next(&tile)) {
        const int m = tile.m * kCluster + cluster_rank;
        const bool inside = kCluster == 1 || m < params.m_blocks;
        const int pieces = has_rows(of, rows_of(tile, params.a_box_rows)) && share.sums(of)
                               ? pieces_of<Epilogue, Config>(params.epilogue)
                               : 0;
        // A buffer is given back one piece late, so that a piece already waiting is not held up by
        // the reading of the one before it. Where something is added, all of them are given back
        // after that.
        bool adds = false;
        if constexpr (kAccumulates<Order>) adds = order.accumulates() && late.due();
        const auto first = ring;
#pragma unroll 1
        for (int piece = 0; piece < pieces; ++piece, ring.advance()) {
          ptx::mbarrier_wait(&shared.piece_full[of][ring.slot], ring.parity);
          if (inside) {
            const Piece ready{m, tile.n, of * kWarpgroupRows,
                              piece_column_of<Epilogue, Config>(params.epilogue, piece),
                              shared.piece[of][ring.slot]};
            if constexpr (requires { store.put(ready, tile); }) {
              store.put(ready, tile);
            } else {
              store.put(ready);
            }
          }
          ptx::bulk_commit();
          if (piece > 0 && !adds) {
            ptx::bulk_wait_read<1>();
            ptx::mbarrier_arrive(&shared.piece_empty[of][ring.previous()]);
          }
        }
        ptx::bulk_wait_read<0>();
        if (pieces != 0 && !adds) ptx::mbarrier_arrive(&shared.piece_empty[of][ring.previous()]);
        if constexpr (requires { store.tile_done(tile, of); }) {
          store.tile_done(tile, of);
        } else {
          if (inside) store.tile_done(m, tile.n, of);
        }
        if constexpr (kAccumulates<Order>) {
          if (adds) {
            late.add(store, shared, first);
            auto back = first;
            for (int piece = 0; piece < pieces; ++piece, back.advance())
              ptx::mbarrier_arrive(&shared.piece_empty[of][back.slot]);
            late.done(store);
          }
          if (order.accumulates()) late.set(tile);
        }
      }
      if constexpr (kAccumulates<Order>) {
        if (late.due()) {
          late.add(store, shared, ring);
          late.done(store);
        }
      }
      store.finish();
      ptx::bulk_wait<0>();
    } else if constexpr (kGateLooksByWarp<Gate>) {
      if (warp == 0) shared.gate.executor.assist(lane);
    }
    __syncwarp();
  } else {
    // ---- math warpgroups ------------------------------------------------------------------------
    ptx::registers_grow<Config::kMathRegisters>();

    // Descriptors of stage 0; another stage, or another 16 of K, is an addition to the low word's
    // address field.
    constexpr bool kBIsNk = Config::kBLayout == BLayout::kNK;
    constexpr std::uint32_t kAtomBytes = 8 * 128;
    const std::uint64_t a_base = Mma::descriptor(
        ptx::shared_address(shared.a[0]) + warpgroup * kWarpgroupRows * 128, 0, kAtomBytes);
    const std::uint64_t b_base = Mma::descriptor(ptx::shared_address(shared.b[0]),
                                                 kBIsNk ? 0 : 64 * kBlockK * 2, kAtomBytes);
    constexpr int kAStepK = 16 * 2 / 16;
    constexpr int kBStepK = kBIsNk ? 16 * 2 / 16 : 16 * 128 / 16;

    // Tells the loading warps, here and in the cluster, that this warp has read a stage.
    auto release_stage = [&](int stage) {
      if constexpr (kCluster == 1) {
        if (lane == 0) ptx::mbarrier_arrive(&shared.stage_empty[stage]);
      } else {
        if (lane < kCluster) ptx::mbarrier_arrive_at(&shared.stage_empty[stage], lane);
      }
    };

    RingPosition<kStages> ring;
    RingPosition<Config::kStagingBuffers> staging;
    TileWalk<typename CountOf<Order>::Type, true> order(params.order, shared, worker, workers);
    Epilogue epilogue = [&] {
      if constexpr (kHasForms<Epilogue>) {
        return Epilogue(params.epilogue, worker);
      } else {
        return Epilogue(params.epilogue);
      }
    }();
    float acc[Config::kAccumulators];

    while (order.next(&tile)) {
      if (!has_rows(warpgroup, rows_of(tile, params.a_box_rows))) {
        if constexpr (kHasRows<TileOf<Order>>) {
          for (int k_block = share.begin; k_block < share.end; ++k_block, ring.advance()) {
            ptx::mbarrier_wait(&shared.stage_full[ring.slot], ring.parity);
            release_stage(ring.slot);
          }
        }
        continue;
      }
      int last_stage = 0;
      for (int k_block = 0; k_block < share.end - share.begin; ++k_block, ring.advance()) {
        const std::uint64_t a =
            a_base + static_cast<std::uint64_t>(ring.slot) * (Config::kABytes >> 4);
        const std::uint64_t b =
            b_base + static_cast<std::uint64_t>(ring.slot) * (Config::kBBytes >> 4);
        ptx::mbarrier_wait(&shared.stage_full[ring.slot], ring.parity);
#pragma unroll
        for (auto& value : acc) cute::warpgroup_fence_operand(value);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < kBlockK / 16; ++step) {
          Mma::issue(a + step * kAStepK, b + step * kBStepK, acc, k_block > 0 || step > 0);
        }
        cute::warpgroup_commit_batch();
#pragma unroll
        for (auto& value : acc) cute::warpgroup_fence_operand(value);
        // The products just issued keep the tensor cores busy while the stage before them is
        // released.
        cute::warpgroup_wait<1>();
        if (k_block > 0) release_stage(last_stage);
        last_stage = ring.slot;
      }
      cute::warpgroup_wait<0>();
#pragma unroll
      for (auto& value : acc) cute::warpgroup_fence_operand(value);
      release_stage(last_stage);

      if constexpr (Config::kSplitsK) {
        if (!split_sums<Config>(shared, share, warpgroup, acc)) continue;
      }
      stage_tile<Config>(epilogue, acc, tile, shared, warpgroup, staging);
    }
  }

  // A block's shared memory must outlive what the other block of the cluster sends to it.
  if constexpr (kCluster > 1 || Config::kSplitsK) {
    __syncwarp();
    cute::cluster_sync();
  }
}

/// The core as a whole kernel: a cluster is a worker.
template <class Config, class Order, class Gate, class Store, class Epilogue = RoundedSums>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmParams<Order, Gate, Store, Epilogue> params) {
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedOf<Config, Gate, Store, Order>*>(dynamic_shared);
  prepare_core<Config>(params, shared);
  if constexpr (Config::kCluster == 1 && !Config::kSplitsK) {
    __syncthreads();
  } else {
    cute::cluster_sync();
  }
  const int blocks = Config::kSplitsK ? params.splits : Config::kCluster;
  gemm_core<Config>(params, shared, blockIdx.x / blocks, gridDim.x / blocks);
}

}  // namespace mk::kernels::cuda
