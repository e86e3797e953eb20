/// \file
/// One non-trivial example of each policy of the GEMM core, as the operators will use them: tiles
/// in the order in which ranks' shards arrive, a gate on epoch flags with a deadline, a store into
/// tile-packed slots that releases a flag per tile.
#pragma once

#include <cuda/atomic>

#include "kernels/cuda/core/gemm_core.cuh"
#include "shm/atomic.h"
#include "shm/flag.h"
#include "tests/gpu/gemm_seams.h"

namespace mk::test {

/// The raster order, begun at tile row `first_m` and wrapped: a rank's own shard first, then its
/// neighbours' in turn.
class RotatedOrder {
 public:
  struct Params {
    kernels::cuda::RasterOrder::Params raster;
    int first_m = 0;
  };

  __device__ RotatedOrder(const Params& params, int worker, int workers)
      : raster_(params.raster, worker, workers),
        tiles_m_(params.raster.tiles_m),
        first_m_(params.first_m) {}

  __device__ bool next(kernels::cuda::Tile* tile) {
    if (!raster_.next(tile)) return false;
    tile->m = (tile->m + first_m_) % tiles_m_;
    return true;
  }

 private:
  kernels::cuda::RasterOrder raster_;
  int tiles_m_;
  int first_m_;
};

/// Waits until the flag of (block row of A, range of K) shows the epoch: A arrives in chunks of
/// kBlockM rows and `range_k_blocks` * 64 columns. Past the deadline it records the first such wait
/// in `incident` and lets the block run out.
class ChunkFlagGate {
 public:
  struct Params {
    const std::uint32_t* flags = nullptr;  ///< [block rows][ranges of K]
    int ranges = 1;
    int range_k_blocks = 1;
    std::uint32_t epoch = 0;
    std::uint64_t deadline_ns = 0;
    Incident* incident = nullptr;
  };

  __device__ explicit ChunkFlagGate(const Params& params) : params_(params) {}

  __device__ int wait(int m, int /*n*/, int k_block) {
    if (failed_) return kernels::cuda::kAllReady;
    const int range = k_block / params_.range_k_blocks;
    const std::uint32_t* flag = params_.flags + m * params_.ranges + range;
    std::uint64_t deadline_ns = 0;
    while (!shm::flag_reached(flag, params_.epoch)) {
      const std::uint64_t now_ns = kernels::cuda::ptx::now_ns();
      if (deadline_ns == 0) deadline_ns = now_ns + params_.deadline_ns;
      if (now_ns > deadline_ns) record(m, range, shm::load_relaxed(flag));
      if (shm::load_relaxed(&params_.incident->code) !=
          0) {  // ours, or another block's: no use in waiting on
        failed_ = true;
        return kernels::cuda::kAllReady;
      }
      __nanosleep(100);
    }
    kernels::cuda::ptx::fence_acquired_to_async();
    return (range + 1) * params_.range_k_blocks;
  }

 private:
  __device__ void record(int m, int range, std::uint32_t seen) {
    if (!shm::compare_exchange(&params_.incident->code, 0u, Incident::kWriting)) return;
    params_.incident->row_block = m;
    params_.incident->range = range;
    params_.incident->expected = params_.epoch;
    params_.incident->seen = seen;
    shm::store_release(&params_.incident->code, Incident::kTimeout);
  }

  const Params& params_;
  bool failed_ = false;
};

/// Stores tile (m, n) as slot m * tiles_n + n of [slots][kBlockM][kBlockN], and shows the epoch in
/// the slot's flag when all of the tile is there. After an incident nothing is announced.
template <class Config>
class SlotStore {
 public:
  struct Params {
    CUtensorMap slots;  ///< the slots as one matrix [slots * kBlockM, kBlockN], box 64 x 64,
                        ///< 128-byte swizzle
    std::uint32_t* flags;
    int tiles_n;
    std::uint32_t epoch;
    const Incident* incident;
    unsigned jitter_ns;  ///< hold pieces back by up to this long, to shake the order of things
  };
  static constexpr int kSharedWords = 2;

  __device__ SlotStore(const Params& params, std::uint32_t* words)
      : params_(params), halves_done_(reinterpret_cast<std::uint64_t*>(words)) {}

  __device__ void put(const kernels::cuda::Piece& piece) {
    if (params_.jitter_ns > 0) {
      const unsigned mixed = (piece.m * 7919u + piece.n * 104729u + piece.row) * 2654435761u;
      __nanosleep(mixed / 65536 * params_.jitter_ns / 65536);
    }
    cute::SM90_TMA_STORE_2D::copy(&params_.slots, piece.bytes, piece.column,
                                  slot(piece.m, piece.n) * Config::kBlockM + piece.row);
  }

  __device__ void tile_done(int m, int n, int warpgroup) {
    kernels::cuda::ptx::bulk_wait<0>();
    // Tiles done, one 32-bit counter per warpgroup in one word: the later of the two for this tile
    // sees the other's count.
    const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_block> halves_done(*halves_done_);
    const std::uint64_t before =
        halves_done.fetch_add(1ull << (32 * warpgroup), cuda::memory_order_acq_rel);
    const auto mine = static_cast<std::uint32_t>(before >> (32 * warpgroup)) + 1;
    const auto other = static_cast<std::uint32_t>(before >> (32 * (1 - warpgroup)));
    if (other < mine || shm::load_relaxed(&params_.incident->code) != 0) return;
    shm::flag_publish(params_.flags + slot(m, n), params_.epoch);
  }

  __device__ void finish() {}

 private:
  __device__ int slot(int m, int n) const { return m * params_.tiles_n + n; }

  const Params& params_;
  std::uint64_t* halves_done_;
};

}  // namespace mk::test
