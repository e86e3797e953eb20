#include "tests/gpu/grouped_seams.h"

#include <algorithm>

#include "kernels/cuda/core/gemm_launch.cuh"
#include "shm/flag.h"
#include "tests/gpu/grouped_seam_examples.cuh"

namespace mk::test {
namespace {

namespace mkc = kernels::cuda;
/// One thread: the last expert's row tiles first.
__global__ void list_kernel(GroupedSeamProduct p) {
  const mkc::GroupedRows rows{p.offsets, nullptr, static_cast<std::uint32_t>(p.rows)};
  int tiles = 0;
  for (int expert = p.experts - 1; expert >= 0; --expert) {
    const mkc::RowRange range = rows.of(static_cast<std::uint32_t>(expert));
    for (std::uint32_t row = range.begin; row < range.end; row += mkc::kGroupedTileRows) {
      const std::uint32_t left = range.end - row;
      p.tiles[tiles] = {tiles, 0, expert, static_cast<int>(row),
                        static_cast<int>(min(left, mkc::kGroupedTileRows))};
      ++tiles;
    }
  }
  p.words[1] = static_cast<std::uint32_t>(tiles);
}

__global__ void row_arrivals_kernel(GroupedSeamProduct p, const std::uint16_t* from,
                                    std::uint16_t* to, int skip, std::uint32_t seed) {
  constexpr int kChunkRows = GroupedSeamProduct::kChunkRows;
  const int chunks = (p.rows + kChunkRows - 1) / kChunkRows;
  for (int i = blockIdx.x; i < chunks; i += gridDim.x) {
    const int chunk = static_cast<int>((i + static_cast<std::int64_t>(seed)) % chunks);
    if (chunk == skip) continue;
    const std::int64_t end = static_cast<std::int64_t>(min(p.rows, (chunk + 1) * kChunkRows)) * p.k;
    for (std::int64_t at = static_cast<std::int64_t>(chunk) * kChunkRows * p.k + threadIdx.x;
         at < end; at += blockDim.x) {
      to[at] = from[at];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __nanosleep((seed * 2654435761u + chunk * 40503u) % 4096);
      shm::flag_publish(p.arrived + chunk, p.epoch);
    }
  }
}

using Params = mkc::GemmParams<ListOrder, ArrivalGate, ScatterStore>;

}  // namespace

cudaError_t prepare_grouped_seams() {
  cudaFuncAttributes loaded{};
  for (const void* kernel : {reinterpret_cast<const void*>(list_kernel),
                             reinterpret_cast<const void*>(row_arrivals_kernel)}) {
    if (cudaError_t error = cudaFuncGetAttributes(&loaded, kernel); error != cudaSuccess)
      return error;
  }
  return mkc::prepare_gemm<GroupedSeamConfig, ListOrder, ArrivalGate, ScatterStore>();
}

cudaError_t launch_grouped_seam_product(const GroupedSeamMaps& maps, const GroupedSeamProduct& p,
                                        int blocks, cudaStream_t stream) {
  list_kernel<<<1, 1, 0, stream>>>(p);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  Params params{};
  params.a = maps.a;
  params.b = maps.b;
  params.a_box_rows = GroupedSeamConfig::kBlockM;
  params.k_blocks = (p.k + mkc::kBlockK - 1) / mkc::kBlockK;
  params.order = {p.tiles, p.words + 1,
                  static_cast<std::uint32_t>((p.n + GroupedSeamConfig::kBlockN - 1) /
                                             GroupedSeamConfig::kBlockN)};
  params.gate = {{1, maps.a_half}, p.arrived, p.epoch, p.deadline_ns, p.words + 2};
  params.store = {maps.c, p.to};
  return mkc::launch_gemm<GroupedSeamConfig>(params, blocks, stream);
}

cudaError_t launch_row_arrivals(const GroupedSeamProduct& p, const void* from, void* to, int skip,
                                std::uint32_t seed, cudaStream_t stream) {
  constexpr int kHelperBlocks = 8;
  row_arrivals_kernel<<<kHelperBlocks, 256, 0, stream>>>(
      p, static_cast<const std::uint16_t*>(from), static_cast<std::uint16_t*>(to), skip, seed);
  return cudaGetLastError();
}

}  // namespace mk::test
