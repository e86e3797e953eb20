/// \file
/// What a GEMM + AllReduce launch hands to its kernel, and what the kernel keeps between launches.
/// Plain data for host and device.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/comm/block.h"
#include "kernels/comm/wait.h"
#include "kernels/cuda/gemm_types.h"
#include "kernels/gemm_ar/launch.h"

namespace mk::kernels::cuda {

/// Thread blocks of one rank, of all roles.
inline constexpr std::uint32_t kGemmArGridMax = 2 * kBlocksMax;

/// One block's account of one launch, in the GPU's own clock.
struct GemmArBlockReport {
  std::uint64_t begin_ns = 0;
  std::uint64_t tiles_end_ns = 0;  ///< compute blocks
  std::uint64_t sums_end_ns = 0;   ///< when the block's first group found no more chunks to sum
  std::uint64_t end_ns = 0;
  WaitTotals reduce_waits;  ///< of the block's first group
  WaitTotals collect_waits;
};

/// A rank's words in its GPU's memory; all zero before the first launch.
struct GemmArDeviceState {
  std::uint32_t epoch = 0;         ///< of the last launch that has ended; its last block writes it
  std::uint32_t blocks_done = 0;   ///< of the running launch
  std::uint32_t chunks_taken = 0;  ///< of the running launch, by groups that reduce
  LocalWords local;                ///< `stop` stays set: later launches then end at once
  GemmArBlockReport reports[kGemmArGridMax];
};

/// The first failure, in memory of the host that the GPU can write. `failed` is written last.
struct GemmArHostReport {
  enum : std::uint32_t { kNone = 0, kWait = 1, kLaunchesSpent = 2 };
  std::uint32_t failed = kNone;
  std::uint32_t epoch = 0;
  std::uint32_t peer_failed = 0;  ///< the workspace's `failed` word
  WaitRecord record;
};

struct GemmArArguments {
  CUtensorMap a;                           ///< [m, k]
  CUtensorMap b;                           ///< [n, k] or [k, n]
  CUtensorMap out;                         ///< C as [m, n]: one rank alone stores there itself
  CUtensorMap slots[shm::kLocalRanksMax];  ///< this rank's slots at each owner, tile by tile
  int a_box_rows = 0;
  int k_blocks = 0;
  GemmArLaunch launch;  ///< the kernel puts in the epoch
  GemmArDeviceState* state = nullptr;
  GemmArHostReport* report = nullptr;
  void* c = nullptr;  ///< the caller's C, or null
  std::uint64_t ldc = 0;
};

/// One compiled kernel, seen from the host.
struct GemmArKernel {
  int block_m;
  int block_n;
  int b_box_rows;  ///< box of B's tensor map
  int b_box_columns;
  cudaError_t (*prepare)();  ///< on the current device, before any launch
  cudaError_t (*launch)(const GemmArArguments&, unsigned blocks, cudaStream_t);
};

/// The kernel for tiles of at most `columns` columns, 256 at most.
const GemmArKernel& gemm_ar_kernel_bf16(BLayout b_layout, std::uint32_t columns);
const GemmArKernel& gemm_ar_kernel_f16(BLayout b_layout, std::uint32_t columns);

}  // namespace mk::kernels::cuda
