/// \file
/// How a group's workers add up product rows: a token after the other, each thread eight columns at
/// a time. Which rows there are, and their order, is in CombineBlock.
#pragma once

#include <cstdint>

#include "kernels/cuda/transport/worker_sums.cuh"
#include "kernels/ops/combine/block.h"

namespace mk::kernels::cuda {

/// Eight columns of sums, in fp32. Empty they are -0, which adds nothing to any number, so that no
/// term is a special case: with a branch around each, the compiler puts its load behind the branch,
/// and each waits for the one before.
template <class Element, bool kF32>
struct ColumnSums {
  /// Rows whose loads are on their way together.
  static constexpr int kRows = kF32 ? 4 : 8;
  static constexpr int kVectors = kF32 ? 2 : 1;  ///< of a row's eight columns
  static constexpr std::uint32_t kNothing = kF32 ? 0x80000000u : 0x80008000u;  ///< a word of it

  float sum[8] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
  bool any = false;

  /// `count` rows, one at least; `row_of(i)`: their eight columns. For i from `count` on: any's.
  template <class RowOf>
  __device__ __forceinline__ void add_rows(int count, RowOf&& row_of) {
    Vector loaded[kRows][kVectors];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const auto* const row = reinterpret_cast<const Vector*>(row_of(i));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) loaded[i][v] = ptx::load_last(row + v);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        Vector& words = loaded[i][v];
        const bool there = i < count;
        words = {there ? words.x : kNothing, there ? words.y : kNothing, there ? words.z : kNothing,
                 there ? words.w : kNothing};
      }
      add_vectors(loaded[i]);
    }
    any = true;
  }
  __device__ __forceinline__ void add_row(const std::byte* row) {
    Vector loaded[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      loaded[v] = ptx::load_last(reinterpret_cast<const Vector*>(row) + v);
    add_vectors(loaded);
    any = true;
  }
  __device__ __forceinline__ void add_sums(const ColumnSums& other) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += other.sum[i];
    any |= other.any;
  }
  __device__ __forceinline__ void store_partial(std::byte* to) const {
    auto* const vectors = reinterpret_cast<Vector*>(to);
    if constexpr (kF32) {
      vectors[0] = as_vector(sum);
      vectors[1] = as_vector(sum + 4);
    } else {
      vectors[0] = rounded<Element>(sum);
    }
  }
  /// To the caller's output; `residual`: null, or what is added. Without a row it stays as it is.
  __device__ __forceinline__ void store_result(Vector* to, const Vector* residual) {
    if (!any) {
      __stcg(to, residual == nullptr ? Vector{0, 0, 0, 0} : *residual);
      return;
    }
    if (residual != nullptr) add<Element>(sum, *residual, false);
    __stcg(to, rounded<Element>(sum));
  }

 private:
  __device__ __forceinline__ void add_vectors(const Vector (&vectors)[kVectors]) {
    if constexpr (kF32) {
      add_f32(sum, vectors[0], false);
      add_f32(sum + 4, vectors[1], false);
    } else {
      add<Element>(sum, vectors[0], false);
    }
  }
};

/// The run's tokens, by all workers: `thread` is this one. `out`: the caller's output.
template <class Element, bool kF32, class Block>
__device__ __forceinline__ void sum_tokens(const Block& block, const CombineRun& run,
                                           std::uint16_t* out, std::uint32_t thread) {
  using Sums = ColumnSums<Element, kF32>;
  constexpr std::uint32_t kSlotsAtOnce = 32;  // a lane each
  const World& world = block.world;
  const CombineShape& shape = block.launch.plan.shape;
  const std::uint64_t row_bytes = block.schedule.row_bytes();
  const std::uint32_t vectors = shape.hidden / kVectorElements;
  const bool own = block.is_own(run);
#pragma unroll 1
  for (std::uint32_t i = run.begin; i < run.end; ++i) {
    const CombineSum job = block.sum_of(run, i);
    const CombineEntry* const entries = block.entry(world.local, run.node, job.token, 0);
    const std::byte* const rows = block.at(block.schedule.slot(run.node, job.token, 0));
    // A bit for each of the slots from `first` on that has a row. By whole warps.
    const auto slots_from = [&](std::uint32_t first) {
      const std::uint32_t slot = first + threadIdx.x % kSlotsAtOnce;
      return __ballot_sync(0xffffffffu, slot < shape.top_k && entries[slot].epoch == block.epoch);
    };
    const std::uint32_t first_slots = slots_from(0);
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < vectors; begin += kWorkers) {
      const bool there = begin + thread < vectors;
      // (Who has no columns follows the others through the votes.)
      const std::uint32_t vector = there ? begin + thread : 0;
      const std::uint64_t offset = std::uint64_t{vector} * (Sums::kVectors * sizeof(Vector));
      Sums node;
#pragma unroll 1
      for (std::uint32_t first = 0; first < shape.top_k; first += kSlotsAtOnce) {
        std::uint32_t slots = first == 0 ? first_slots : slots_from(first);
        while (slots != 0) {
          std::uint32_t taken[Sums::kRows];
          int count = 0;
#pragma unroll
          for (int r = 0; r < Sums::kRows; ++r) {
            // (Those that are not there are the first one again: see VectorBatch.)
            const std::uint32_t next = first + __ffs(static_cast<int>(slots)) - 1;
            taken[r] = slots != 0 ? next : taken[0];
            count += slots != 0 ? 1 : 0;
            slots &= slots - 1;
          }
          node.add_rows(count, [&](int r) { return rows + taken[r] * row_bytes + offset; });
        }
      }
      if (own && world.nodes > 1) {
        Sums all;
        const auto add = [&](const std::byte* sum) { all.add_row(sum + offset); };
        block.each_sum(0, world.node, job.token, add);
        all.add_sums(node);
        block.each_sum(world.node + 1, world.nodes, job.token, add);
        node = all;
      }
      if (!there) continue;
      if (!own) {
        node.store_partial(job.target + offset);
        continue;
      }
      const std::uint64_t at = std::uint64_t{job.token} * vectors + vector;
      const auto* const residual = reinterpret_cast<const Vector*>(block.launch.residual);
      node.store_result(reinterpret_cast<Vector*>(out) + at,
                        residual == nullptr ? nullptr : residual + at);
    }
  }
}

}  // namespace mk::kernels::cuda
