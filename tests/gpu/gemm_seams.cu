#include "tests/gpu/gemm_seams.h"

#include <algorithm>

#include "kernels/cuda/core/gemm_launch.cuh"
#include "tests/gpu/seam_examples.cuh"

namespace mk::test {
namespace {

namespace mkc = kernels::cuda;
template <int kCluster, bool kStaged>
using Config = mkc::GemmConfig<__nv_bfloat16, mkc::BLayout::kNK, kSeamBlockM, kSeamBlockN,
                               kStaged ? 3 : 4, kCluster, kStaged ? 4 : 2>;

struct Chunks {
  const std::uint16_t* from;
  std::uint16_t* to;
  int m, k, ranges, range_columns, row_blocks, skip;
  std::uint32_t epoch, seed;
  std::uint32_t* flags;
};

__global__ void arrivals_kernel(Chunks c) {
  const int count = c.row_blocks * c.ranges;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const int chunk = static_cast<int>((i + static_cast<std::int64_t>(c.seed)) % count);
    const int row_block = chunk / c.ranges;
    const int range = chunk % c.ranges;
    if (row_block == c.skip) continue;
    for (int row = row_block * kSeamBlockM; row < min(c.m, (row_block + 1) * kSeamBlockM); ++row) {
      const int end = min(c.k, (range + 1) * c.range_columns);
      for (int column = range * c.range_columns + threadIdx.x; column < end; column += blockDim.x) {
        const std::int64_t at = static_cast<std::int64_t>(row) * c.k + column;
        c.to[at] = c.from[at];
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __nanosleep((c.seed * 2654435761u + chunk * 40503u) % 4096);
      shm::flag_publish(c.flags + chunk, c.epoch);
    }
  }
}

struct Slots {
  const std::uint16_t* slots;
  std::uint16_t* c;
  int m, n, tiles, tile_columns;
  std::uint32_t epoch;
  std::uint64_t deadline_ns;
  const std::uint32_t* flags;
};

__global__ void departures_kernel(Slots s) {
  __shared__ bool arrived;
  const std::uint64_t deadline_ns = mkc::ptx::now_ns() + s.deadline_ns;
  for (int tile = blockIdx.x; tile < s.tiles; tile += gridDim.x) {
    if (threadIdx.x == 0) {
      while (!shm::flag_reached(s.flags + tile, s.epoch) && mkc::ptx::now_ns() < deadline_ns)
        __nanosleep(100);
      arrived = shm::flag_reached(s.flags + tile, s.epoch);
    }
    __syncthreads();
    for (int i = threadIdx.x; arrived && i < kSeamBlockM * kSeamBlockN; i += blockDim.x) {
      const int row = tile / s.tile_columns * kSeamBlockM + i / kSeamBlockN;
      const int column = tile % s.tile_columns * kSeamBlockN + i % kSeamBlockN;
      if (row >= s.m || column >= s.n) continue;
      s.c[static_cast<std::int64_t>(row) * s.n + column] =
          s.slots[static_cast<std::int64_t>(tile) * kSeamBlockM * kSeamBlockN + i];
    }
    __syncthreads();
  }
}

constexpr int kHelperBlocks = 8;

template <class Config>
cudaError_t launch_product(const SeamProduct& p, int blocks, cudaStream_t stream) {
  mkc::GemmParams<RotatedOrder, ChunkFlagGate, SlotStore<Config>> params{};
  params.a = p.a;
  params.b = p.b;
  params.a_box_rows = kSeamBlockM;
  params.m_blocks = p.row_blocks();
  params.k_blocks = (p.k + mkc::kBlockK - 1) / mkc::kBlockK;
  params.order.raster = {p.worker_rows(), p.tile_columns(), 16 / Config::kCluster};
  params.order.first_m = p.first_m;
  params.gate.flags = p.chunk_flags;
  params.gate.ranges = p.ranges();
  params.gate.range_k_blocks = p.range_k_blocks;
  params.gate.epoch = p.epoch;
  params.gate.deadline_ns = p.deadline_ns;
  params.gate.incident = p.incident;
  params.store.slots = p.slots;
  params.store.flags = p.tile_flags;
  params.store.tiles_n = p.tile_columns();
  params.store.epoch = p.epoch;
  params.store.incident = p.incident;
  params.store.jitter_ns = p.jitter_ns;
  const int workers = std::min(blocks / Config::kCluster, p.worker_rows() * p.tile_columns());
  return mkc::launch_gemm<Config>(params, workers, stream);
}

template <class Config>
cudaError_t prepare_product() {
  return mkc::prepare_gemm<Config, RotatedOrder, ChunkFlagGate, SlotStore<Config>>();
}

}  // namespace

cudaError_t prepare_seams() {
  cudaFuncAttributes loaded{};
  for (const void* kernel : {reinterpret_cast<const void*>(arrivals_kernel),
                             reinterpret_cast<const void*>(departures_kernel)}) {
    if (cudaError_t error = cudaFuncGetAttributes(&loaded, kernel); error != cudaSuccess)
      return error;
  }
  for (auto* prepare : {prepare_product<Config<1, false>>, prepare_product<Config<2, false>>,
                        prepare_product<Config<1, true>>, prepare_product<Config<2, true>>}) {
    if (cudaError_t error = prepare(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_seam_product(const SeamProduct& p, int blocks, cudaStream_t stream) {
  if (p.staged) {
    return p.pair ? launch_product<Config<2, true>>(p, blocks, stream)
                  : launch_product<Config<1, true>>(p, blocks, stream);
  }
  return p.pair ? launch_product<Config<2, false>>(p, blocks, stream)
                : launch_product<Config<1, false>>(p, blocks, stream);
}

cudaError_t launch_arrivals(const SeamProduct& p, const void* from, void* to, int skip,
                            std::uint32_t seed, cudaStream_t stream) {
  arrivals_kernel<<<kHelperBlocks, 256, 0, stream>>>(
      {static_cast<const std::uint16_t*>(from), static_cast<std::uint16_t*>(to), p.m, p.k,
       p.ranges(), p.range_k_blocks * 64, p.row_blocks(), skip, p.epoch, seed, p.chunk_flags});
  return cudaGetLastError();
}

cudaError_t launch_departures(const SeamProduct& p, const void* slots, void* c,
                              cudaStream_t stream) {
  departures_kernel<<<kHelperBlocks, 256, 0, stream>>>(
      {static_cast<const std::uint16_t*>(slots), static_cast<std::uint16_t*>(c), p.m, p.n,
       p.row_blocks() * p.tile_columns(), p.tile_columns(), p.epoch, p.deadline_ns, p.tile_flags});
  return cudaGetLastError();
}

}  // namespace mk::test
