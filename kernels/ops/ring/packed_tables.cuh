/// \file
/// The kernel that makes the tables of a packed launch (packed_items.h) from the sequences' starts,
/// in the GPU's memory: one block, right before the launch's own kernel. Lengths that are not
/// possible it refuses: the launch then ends as one that has failed.
#pragma once

#include <cstdint>

#include "kernels/ops/ring/packed_tables.h"
#include "shm/atomic.h"

namespace mk::kernels::cuda {

class PackedTableMaker {
 public:
  static constexpr int kThreads = 512;

  __device__ explicit PackedTableMaker(const PackedTableArguments& arguments) : of_(arguments) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      shared().digest = 0;
      shared().bad = of_.count;
      shared().longest = 0;
    }
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared().tiles_of[i] = 0;
    __syncthreads();
    read_lengths();
    __syncthreads();
    if (shared().bad != of_.count) {
      if (threadIdx.x == 0) refuse_lengths(shared().bad);
      return;
    }
    count_rows();
    __syncthreads();
    const std::uint32_t own = of_.rank_rows[of_.rank];
    if (own > of_.room) {
      if (threadIdx.x == 0) refuse({LengthsReport::kNoRoom, 0, 0, own, of_.room});
      return;
    }
    for_tiles([&](const PackedTile& tile) { atomicAdd(&shared().tiles_of[bin_of(tile)], 1u); });
    __syncthreads();
    if (threadIdx.x == 0) {
      std::uint32_t before = 0;
      for (std::uint32_t& bin : shared().tiles_of) {
        const std::uint32_t tiles = bin;
        bin = before;
        before += tiles;
      }
      *of_.totals = {LengthsDigest::finish(shared().digest), before, own, 0};
    }
    __syncthreads();
    // Their order within a bin is left to chance: it changes no bit of the result.
    for_tiles([&](const PackedTile& tile) {
      of_.tiles[atomicAdd(&shared().tiles_of[bin_of(tile)], 1u)] = tile;
    });
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBins = 256;  ///< of tiles, by their number of keys: the most first
  struct Shared {
    unsigned long long digest;
    std::uint32_t bad;  ///< the first sequence that is not possible
    std::uint32_t longest;
    std::uint32_t tiles_of[kBins];
  };
  static __device__ Shared& shared() {
    __shared__ Shared all;
    return all;
  }
  __device__ PackedParts parts(std::uint32_t rows) const { return {rows, of_.parts, of_.causal}; }
  __device__ std::uint32_t rows(std::uint32_t sequence) const {
    return of_.starts[sequence + 1] - of_.starts[sequence];
  }

  __device__ void read_lengths() {
    std::uint64_t digest = 0;
    for (std::uint32_t i = threadIdx.x; i < of_.count; i += kThreads) {
      const std::uint32_t begin = of_.starts[i], end = of_.starts[i + 1];
      if (end < begin || end > of_.rows_max || (i == 0 && begin != 0)) {
        atomicMin(&shared().bad, i);
        continue;
      }
      of_.rows[i] = end - begin;
      atomicMax(&shared().longest, end - begin);
      digest += LengthsDigest::of(i, end);
    }
    atomicAdd(&shared().digest, static_cast<unsigned long long>(digest));
  }
  __device__ void refuse_lengths(std::uint32_t sequence) const {
    const std::uint32_t begin = of_.starts[sequence], end = of_.starts[sequence + 1];
    const bool ascending = end >= begin && !(sequence == 0 && begin != 0);
    refuse({ascending ? LengthsReport::kTooLong : LengthsReport::kNotAscending, sequence, begin,
            end, of_.rows_max});
  }
  /// The launch then ends at once.
  __device__ void refuse(const LengthsReport& why) const {
    LengthsReport& report = *of_.report;
    report.sequence = why.sequence;
    report.begin = why.begin;
    report.end = why.end;
    report.most = why.most;
    shm::store_release(&report.failed, why.failed);
    shm::store_release(of_.stop, 1u);
  }

  /// Of each rank, by one warp: its rows before each sequence.
  __device__ void count_rows() const {
    constexpr unsigned kAll = 0xffffffff;
    const std::uint32_t lane = threadIdx.x % 32;
    for (std::uint32_t rank = threadIdx.x / 32; rank < of_.ranks; rank += kWarps) {
      std::uint32_t before = 0;
      for (std::uint32_t first = 0; first < of_.count; first += 32) {
        const std::uint32_t i = first + lane;
        const std::uint32_t own = i < of_.count ? parts(rows(i)).rows(rank) : 0;
        std::uint32_t sum = own;
        for (std::uint32_t step = 1; step < 32; step *= 2) {
          const std::uint32_t lower = __shfl_up_sync(kAll, sum, step);
          if (lane >= step) sum += lower;
        }
        if (i < of_.count) of_.first_rows[rank * of_.count + i] = before + sum - own;
        before += __shfl_sync(kAll, sum, 31);
      }
      if (lane == 0) of_.rank_rows[rank] = before;
    }
  }

  /// Calls `take(tile)` for each tile of queries of this rank: a warp takes a sequence's.
  template <class Take>
  __device__ void for_tiles(Take&& take) const {
    for (std::uint32_t i = threadIdx.x / 32; i < of_.count; i += kWarps) {
      const PackedParts cut = parts(rows(i));
      const std::uint32_t tiles = cut.tiles(of_.rank, of_.tile_rows);
      const std::uint32_t first_row = of_.first_rows[of_.rank * of_.count + i];
      for (std::uint32_t t = threadIdx.x % 32; t < tiles; t += 32) {
        PackedTile tile = cut.tile(of_.rank, of_.tile_rows, t, first_row);
        tile.sequence = i;
        take(tile);
      }
    }
  }
  __device__ std::uint32_t bin_of(const PackedTile& tile) const {
    std::uint32_t keys = of_.rows[tile.sequence];
    if (of_.causal) {
      const std::int32_t end = tile.first_row + static_cast<std::int32_t>(of_.tile_rows);
      keys = static_cast<std::uint32_t>((end < tile.rows_end ? end : tile.rows_end) + tile.ahead);
    }
    const auto bin =
        static_cast<std::uint32_t>(std::uint64_t{keys} * (kBins - 1) / shared().longest);
    return kBins - 1 - bin;
  }

  const PackedTableArguments& of_;
};

}  // namespace mk::kernels::cuda
