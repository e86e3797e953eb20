/// \file
/// The attention core: O = softmax(scale Q K^T) V as one persistent warp-specialised sm_90a kernel
/// that operators reuse.
///
/// A block has one loading warpgroup and two or three math warpgroups (64 queries each):
///
///     loading warp 0      takes items, asks the gate, loads Q, K and V by TMA
///     loading warps 1-3   look through V of masked tiles (non_finite.cuh)
///     math w              multiplies, weighs, multiplies, and stores its rows of O
///
/// A math warpgroup walks all tiles of keys of all its items as one stream. For each tile it issues
/// the tile's scores and, right behind them, the product of the tile before it with that one's
/// weights. While the tensor cores do the second, it turns the scores into weights:
///
///     tensor cores   S(0) | S(1) O(0) | S(2) O(1) | ...
///     the rest          weights(0)  weights(1)  ...
///
/// So a weight product may belong to the item before, whose rows are stored when it is complete.
/// The warpgroups issue in turn, so that each weighs while another one's products run.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/cuda/core/attention_config.cuh"
#include "kernels/cuda/core/attention_items.h"
#include "kernels/cuda/core/attention_policies.cuh"
#include "kernels/cuda/core/attention_shared.cuh"
#include "kernels/cuda/core/attention_softmax.cuh"
#include "kernels/cuda/core/block_sync.cuh"
#include "kernels/cuda/core/gemm_policies.cuh"
#include "kernels/cuda/core/non_finite.cuh"
#include "kernels/cuda/core/ptx.cuh"

namespace mk::kernels::cuda {

/// What the loading thread does: walks all items and their tiles.
template <class Config, class Items, class Keys, class Gate, class Store>
__device__ __forceinline__ void load_attention(
    const AttentionParams<Items, Keys, Gate, Store>& params, AttentionShared<Config>& shared,
    int worker, int workers) {
  constexpr auto kQueryHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
  constexpr auto kKeyHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
  const Items items(params.items);
  const Keys keys(params.keys);
  Gate gate = [&] {
    if constexpr (kGateShares<Gate>) {
      return Gate(params.gate, gate_shared<Gate>(shared));
    } else {
      return Gate(params.gate);
    }
  }();
  ItemDealer dealer(params.dealer, worker, workers);
  StageCount<Config::kStages> loaded{0};  // tiles of K
  auto& [fed, begun, masked, shared_item, shared_range] = shared.load_counts;
  fed.count = begun = masked.count = 0;
  [[maybe_unused]] AttentionItem own_item;
  [[maybe_unused]] KeyRange own_range;
  AttentionItem& item = kGateShares<Gate> ? shared_item : own_item;
  KeyRange& range = kGateShares<Gate> ? shared_range : own_range;

  const auto load_q = [&] {
#pragma unroll 1
    for (int w = 0; w < Config::kMathWarpgroups; ++w) {
      wait_lean(&shared.q_empty[w], begun & 1 ^ 1);
      ptx::mbarrier_arrive_expect(&shared.q_full[w], Config::kQueryBytes);
      cute::SM90_TMA_LOAD_5D::copy(&params.q, &shared.q_full[w], kQueryHint, shared.q[w], 0,
                                   item.q_row + w * kAttentionRows, 0, item.head, item.batch);
    }
  };

  for (int index = dealer.next(); index < items.count(); index = dealer.next()) {
    shared.feed.put(fed, index);
    ++fed.count;
    item = items.at(index);
    bool first = true;  // its queries are not loaded
#pragma unroll 1
    for (int r = 0; r < keys.ranges(item); ++r) {
      range = keys.range(item, r);
      const TileSpan span = span_of(item, Config::kTileQueries, range, Config::kTileKeys);
      if (span.tiles == 0) continue;
      gate.wait(item, range, keys);

      const auto load_k = [&](int tile) {
        const std::uint32_t slot = loaded.slot();
        wait_lean(&shared.k_empty[slot], loaded.parity() ^ 1);
        ptx::mbarrier_arrive_expect(&shared.k_full[slot], Config::kKeyBytes);
        cute::SM90_TMA_LOAD_5D::copy(&keys.k(range), &shared.k_full[slot], kKeyHint, shared.k[slot],
                                     0, range.first_key + tile * Config::kTileKeys, 0, range.head,
                                     range.batch);
        ++loaded.count;
      };
      const auto load_v = [&](int tile, std::uint32_t tiles_of_k_since) {
        const StageCount<Config::kStages> place{loaded.count - 1 - tiles_of_k_since};
        const std::uint32_t slot = place.slot();
        std::uint64_t* full = &shared.v_full[slot];
        wait_lean(&shared.v_empty[slot], place.parity() ^ 1);
        if (tile < span.full) {
          ptx::mbarrier_arrive(full);
          ptx::mbarrier_arrive(full);
        } else {
          full = &shared.v_raw[masked.slot()];
          MaskedTile& told = shared.masked[masked.slot()];
          told.stage = static_cast<int>(slot);
          told.keys = range.length - tile * Config::kTileKeys;
          told.shift = range.offset == kNoMask
                           ? -kNoMask
                           : tile * Config::kTileKeys - range.offset - item.first_row;
          told.item = begun;
          ++masked.count;
        }
        ptx::mbarrier_arrive_expect(full, Config::kKeyBytes);
        cute::SM90_TMA_LOAD_5D::copy(&keys.v(range), full, kKeyHint, shared.v[slot], 0,
                                     keys.first_value(range) + tile * Config::kTileKeys, 0,
                                     range.head, range.batch);
      };

      // V of a tile is wanted one tile later than K.
      for (int tile = span.tiles - 1; tile >= 0; --tile) {
        load_k(tile);
        if (first) {
          first = false;
          load_q();
        }
        if (tile < span.tiles - 1) load_v(tile + 1, 1);
      }
      // The answer comes while this waits for its stage.
      if (r + 1 == keys.ranges(item)) dealer.ask();
      load_v(0, 0);
    }
    if (!first) ++begun;
  }
  if constexpr (kGateEnds<Gate>) gate.end();
  shared.feed.put(fed, ItemFeed::kNoMore);
  // The slot of the last word to the inspecting warps is free when the stage would be.
  wait_lean(&shared.v_empty[loaded.slot()], loaded.parity() ^ 1);
  shared.masked[masked.slot()].stage = -1;
  ptx::mbarrier_arrive(&shared.v_raw[masked.slot()]);
  dealer.end();
}

/// What an inspecting thread does.
template <class Config>
__device__ __forceinline__ void inspect_attention(AttentionShared<Config>& shared, int thread) {
  for (StageCount<Config::kStages> place{0};; ++place.count) {
    wait_lean(&shared.v_raw[place.slot()], place.parity());
    const MaskedTile& tile = shared.masked[place.slot()];
    const int stage = tile.stage;
    if (stage < 0) return;
    NonFiniteSearch<Config>::inspect(tile, shared.v[stage], shared.non_finite, shared.cleared,
                                     thread);
    if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.v_full[tile.stage]);
  }
}

/// A math warpgroup: what one thread of it has in registers, and what it does.
template <class Config, class Items, class Keys, class Gate, class Store>
class MathWarpgroup {
 public:
  using Params = AttentionParams<Items, Keys, Gate, Store>;
  using Shared = AttentionShared<Config>;

  __device__ __forceinline__ MathWarpgroup(const Params& params, Shared& shared, int warpgroup)
      : shared_(shared),
        warpgroup_(warpgroup),
        lane_(threadIdx.x % 32),
        row_(warpgroup * kAttentionRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        scale_log2_(params.scale_log2),
        items_(params.items),
        keys_(params.keys),
        store_(params.store) {}

  /// All items of the block, to their end.
  __device__ __forceinline__ void run() {
    bool started = false;
    StageCount<ItemFeed::kSlots> fed{0};
    std::uint32_t q_parity = 0;
    if (warpgroup_ == kMath - 1) next_turn();  // the first warpgroup's turn
    for (;; ++fed.count) {
      const int number = shared_.feed.get(fed);
      if (number == ItemFeed::kNoMore) break;
      const AttentionItem item = items_.at(number);
      const int ranges = keys_.ranges(item);
      for (int r = 0; r < ranges; ++r) {
        tiles_left_ += span_of(item, Config::kTileQueries, keys_.range(item, r), kTileKeys).tiles;
      }
      if (tiles_left_ == 0) {
        store_nothing(item);
        continue;
      }
      bool first = true;
      const int row = item.first_row + row_;
      for (int r = 0; r < ranges; ++r) {
        const KeyRange range = keys_.range(item, r);
        const TileSpan span = span_of(item, Config::kTileQueries, range, kTileKeys);
        const int visible0 = range.visible_to(row);
        const int visible1 = range.visible_to(row + 8);
        int tile = span.tiles - 1;
        if (first && tile >= 0) {
          wait_lean(&shared_.q_full[warpgroup_], q_parity);
          q_parity ^= 1;
          const int key = tile * kTileKeys;
          if (started) {
            step<true, true, true>(visible0 - key, visible1 - key);
          } else {
            step<true, true, false>(visible0 - key, visible1 - key);
          }
          started = true;
          first = false;
          --tile;
        }
#pragma unroll 1
        for (; tile >= span.full; --tile) {
          const int key = tile * kTileKeys;
          step<false, true, true>(visible0 - key, visible1 - key);
        }
#pragma unroll 1
        for (; tile >= 0; --tile) step<false, false, true>(0, 0);
      }
      stored_ = number;
    }
    if (started) {
      issue_output(k_ring_.previous());
      finish_output(k_ring_.previous());
      store_item(softmax_);
    }
    if (warpgroup_ == 0) my_turn();  // nobody's turn is left over
  }

 private:
  using Products = AttentionProducts<Config>;
  using Element = typename Config::Element;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kMath = Config::kMathWarpgroups;
  static constexpr int kStages = Config::kStages;

  __device__ __forceinline__ void release(std::uint64_t* barrier) {
    if (lane_ == 0) ptx::mbarrier_arrive(barrier);
  }
  template <int kCount>
  static __device__ __forceinline__ void fence(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(values[i]);
  }
  __device__ __forceinline__ void my_turn() { named_barrier_sync(1 + warpgroup_, 256); }
  __device__ __forceinline__ void next_turn() {
    named_barrier_arrive(1 + (warpgroup_ == kMath - 1 ? 0 : warpgroup_ + 1), 256);
  }

  /// Issues the scores of the next tile.
  __device__ __forceinline__ void issue_scores(float (&s)[Config::kScores]) {
    fence(s);
    cute::warpgroup_arrive();
    Products::scores(ptx::shared_address(shared_.q[warpgroup_]),
                     ptx::shared_address(shared_.k[k_ring_.slot]), s);
    cute::warpgroup_commit_batch();
  }
  /// Issues O += P V of the tile before.
  __device__ __forceinline__ void issue_output(const StagePosition<kStages>& v) {
    wait_lean(&shared_.v_full[v.slot], v.parity);
    fence(o_);
    cute::warpgroup_arrive();
    Products::output(p_, ptx::shared_address(shared_.v[v.slot]), o_);
    cute::warpgroup_commit_batch();
  }
  /// Has the weights so far computed before the wait that follows. ptxas would put them behind it,
  /// where no product runs beside them. It does not move the wait before a store, which here needs
  /// the sums and is never executed; in an item's first step, not before a barrier.
  template <bool kFirst>
  __device__ __forceinline__ void weigh_before_waiting() {
    const float sum = softmax_.sum[0] + softmax_.sum[1];
    const std::uint32_t anywhere = ptx::shared_address(shared_.q[0]);
    if constexpr (kFirst) {
      asm volatile(
          "{\n"
          ".reg .pred p, q;\n"
          "setp.lt.f32 p, %0, 0f00000000;\n"
          "bar.red.or.pred q, %1, 128, p;\n"
          "@q st.shared.f32 [%2], %0;\n"
          "}" ::"f"(sum),
          "r"(1 + kMath + warpgroup_), "r"(anywhere)
          : "memory");
    } else {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "setp.lt.f32 p, %0, 0f00000000;\n"
          "@p st.shared.f32 [%1], %0;\n"
          "}" ::"f"(sum),
          "r"(anywhere)
          : "memory");
    }
  }
  __device__ __forceinline__ void finish_output(const StagePosition<kStages>& v) {
    cute::warpgroup_wait<0>();
    fence(o_);
    release(&shared_.v_empty[v.slot]);
  }

  /// One tile of keys. kFirst: the item's first. kMasked: the thread's first row sees `limit0` of
  /// its keys, its second `limit1`. kPending: a tile came before, of this item or another.
  template <bool kFirst, bool kMasked, bool kPending>
  __device__ __forceinline__ void step(int limit0, int limit1) {
    float s[Config::kScores];
    wait_lean(&shared_.k_full[k_ring_.slot], k_ring_.parity);
    my_turn();
    issue_scores(s);
    const StagePosition<kStages> v = k_ring_.previous();
    if constexpr (kPending) issue_output(v);
    next_turn();
    cute::warpgroup_wait<kPending ? 1 : 0>();
    fence(s);
    release(&shared_.k_empty[k_ring_.slot]);
    if (--tiles_left_ == 0) release(&shared_.q_empty[warpgroup_]);

    [[maybe_unused]] const RowSums before = softmax_;
    if constexpr (kMasked) hide_scores(s, limit0, limit1);
    const RowSums::Raised raised = softmax_.template raise<kFirst, kMasked>(s, scale_log2_);
    constexpr int kBeside = kPending ? Config::kWeightsBeside : Config::kScores;
    softmax_.template weigh<0, kBeside>(s, scale_log2_, raised);
    if constexpr (kPending) {
      weigh_before_waiting<kFirst>();
      finish_output(v);
      fence(s);
      softmax_.template weigh<kBeside, Config::kScores>(s, scale_log2_, raised);
    }
    k_ring_.advance();
    pack_weights<Element>(s, p_);
    if constexpr (kFirst) {
      if constexpr (kPending) store_item(before);
#pragma unroll
      for (auto& value : o_) value = 0;
    } else {
      scale_rows(o_, raised.factor);
    }
  }

  /// Stores the rows of the item that is complete.
  __device__ __forceinline__ void store_item(const RowSums& sums) {
    auto& table = shared_.non_finite[warpgroup_];
    if (*static_cast<volatile int*>(&table.used) != 0) {
#pragma unroll
      for (int i = 0; i < Config::kOutputs; ++i) {
        o_[i] += table.of(i / 4 * 8 + lane_ % 4 * 2 + i % 2,
                          row_ - warpgroup_ * kAttentionRows + i / 2 % 2 * 8);
      }
      named_barrier_sync(1 + kMath + warpgroup_, 128);
      table.clear(threadIdx.x % 128, 128);
    }
    __syncwarp();
    if (lane_ == 0) ptx::count_release_shared(&shared_.cleared[warpgroup_]);
    const AttentionItem stored = items_.at(stored_);
    store_row<0>(sums, stored);
    store_row<1>(sums, stored);
    store_.done(stored);
  }
  template <int kRow>
  __device__ __forceinline__ void store_row(const RowSums& sums, const AttentionItem& stored) {
    const int row = stored.first_row + row_ + 8 * kRow;
    const float total = sum_of_quad(sums.sum[kRow]);
    Element* to = store_.o(stored, row);
    hand_out_row<Element, kRow>(o_, total == 0 ? 0.0f : 1.0f / total,
                                [&](int column, const uint4& run) {
                                  if (to != nullptr) *reinterpret_cast<uint4*>(to + column) = run;
                                });
    if (lane_ % 4 == 0) {
      constexpr float kLn2 = 0.693147180559945309f;
      if (float* lse = store_.lse(stored, row)) {
        *lse = total == 0 ? -INFINITY : (sums.top[kRow] + __log2f(total)) * kLn2;
      }
    }
  }
  /// Of an item whose rows see no key.
  __device__ __forceinline__ void store_nothing(const AttentionItem& item) {
    for (int row = item.first_row + row_, r = 0; r < 2; ++r, row += 8) {
      if (Element* to = store_.o(item, row)) {
        for (int column = lane_ % 4 * 8; column < Config::kHeadDim; column += 32) {
          *reinterpret_cast<uint4*>(to + column) = uint4{};
        }
      }
      if (lane_ % 4 == 0) {
        if (float* lse = store_.lse(item, row)) *lse = -INFINITY;
      }
    }
    store_.done(item);
  }

  Shared& shared_;
  const int warpgroup_;
  const int lane_;
  const int row_;  ///< within the tile: the first of the thread's two, the other is 8 further on
  const float scale_log2_;
  const Items items_;
  const Keys keys_;
  Store store_;

  std::uint32_t p_[Config::kScores / 2];  ///< weights of the tile before
  float o_[Config::kOutputs];
  RowSums softmax_;
  StagePosition<kStages> k_ring_;  ///< the next tile's; the one before it has its V there, too
  int tiles_left_ = 0;             ///< of the item, whose scores are not there yet
  int stored_ = 0;                 ///< number of the item that O is of
};

/// Runs the items of worker `worker` (a worker is a block), one of the first `workers` or one that
/// comes later (ItemDealer), in this block, after prepare_attention. All threads of the block call
/// it, in a kernel with
/// __launch_bounds__(Config::kThreads, 1).
template <class Config, class Items, class Keys, class Gate, class Store>
__device__ __forceinline__ void attention_core(
    const AttentionParams<Items, Keys, Gate, Store>& params, AttentionShared<Config>& shared,
    int worker, int workers) {
  // Warp-uniform values come through a shuffle so that the compiler keeps them in uniform
  // registers.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == Config::kMathWarpgroups) {
    ptx::registers_shrink<Config::kLoadRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    if (warp > 0) {
      inspect_attention<Config>(shared, threadIdx.x - Config::kMathWarpgroups * 128 - 32);
    } else if constexpr (kGateLooksByWarp<Gate>) {
      auto& helpers = gate_shared<Gate>(shared).executor;
      if (threadIdx.x % 32 == 0) {
        load_attention<Config>(params, shared, worker, workers);
        helpers.end();
      } else {
        helpers.assist(threadIdx.x % 32);
      }
    } else if (cute::elect_one_sync()) {
      load_attention<Config>(params, shared, worker, workers);
    }
    __syncwarp();
  } else {
    ptx::registers_grow<Config::kMathRegisters>();
    MathWarpgroup<Config, Items, Keys, Gate, Store>(params, shared, warpgroup).run();
  }
}

/// The core as a whole kernel: block b of the grid is worker b.
template <class Config, class Items, class Keys, class Gate, class Store>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionParams<Items, Keys, Gate, Store> params) {
  extern __shared__ __align__(1024) std::uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<AttentionShared<Config>*>(dynamic_shared);
  prepare_attention<Config>(params, shared);
  __syncthreads();
  attention_core<Config>(params, shared, blockIdx.x, gridDim.x);
}

}  // namespace mk::kernels::cuda
