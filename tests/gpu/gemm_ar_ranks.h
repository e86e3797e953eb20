/// \file
/// All ranks of a GEMM + AllReduce in one process: on one GPU, each with a stream and a share of
/// the SMs, or spread over GPUs with peer access.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cuda/gemm_ar/gemm_ar_cuda.h"
#include "tests/gpu/gemm_ar_reference.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

/// Devices present; 0 without a driver.
int device_count();

struct GemmArSetup {
  std::uint32_t locals = 2;
  int devices = 1;  ///< ranks are dealt out to so many
  std::uint32_t m = 0, n = 0;
  std::vector<std::uint32_t> k;  ///< by rank
  kernels::DType dtype = kernels::DType::kBf16;
  kernels::BLayout b_layout = kernels::BLayout::kNK;
  std::uint32_t compute_blocks = 0, reduce_blocks = 0;
  kernels::GemmArTiling tiling;  ///< all zero: gemm_ar_cuda_tiling's
  std::chrono::nanoseconds timeout = std::chrono::seconds(5);
  const std::uint32_t* abort = nullptr;  ///< every rank's session abort word
};

/// The same k for all ranks.
GemmArSetup gemm_ar_setup(std::uint32_t locals, int devices, std::uint32_t m, std::uint32_t n,
                          std::uint32_t k);

/// Ends the process on anything unexpected but a failed launch.
class GemmArRanks {
 public:
  explicit GemmArRanks(const GemmArSetup& setup);
  ~GemmArRanks();
  GemmArRanks(const GemmArRanks&) = delete;
  GemmArRanks& operator=(const GemmArRanks&) = delete;

  std::uint32_t locals() const { return setup_.locals; }
  kernels::GemmArCuda& op(std::uint32_t rank) { return *ranks_[rank].op; }
  cudaStream_t stream(std::uint32_t rank) { return ranks_[rank].stream; }
  void make_current(std::uint32_t rank) const;

  /// On the rank's stream: fresh inputs from the seed, for the largest m.
  void fill(std::uint32_t rank, std::uint64_t seed);
  /// On the rank's stream: NaN into C, the rank's own and the operator's.
  void poison(std::uint32_t rank);
  Status launch(std::uint32_t rank, std::uint32_t m, bool to_c = true,
                kernels::Mode mode = kernels::Mode::kFused);
  /// Fills, poisons and launches all.
  void launch_all(std::uint32_t m, std::uint64_t seed, bool to_c, kernels::Mode mode);
  /// The last launch's error, or none; waits.
  Status finish(std::uint32_t rank);

  /// Rank's result of a launch.
  const void* result(std::uint32_t rank, bool to_c) const;
  GemmArProduct product(std::uint32_t m) const;
  /// Every element of rank 0's result, and that all others have the same bits: `bad` counts both.
  Verdict judge_all(std::uint32_t m, bool to_c);

 private:
  struct Rank {
    int device = 0;
    cudaStream_t stream = nullptr;
    std::unique_ptr<DeviceMemory> workspace, a, b, c;
    std::unique_ptr<kernels::GemmArCuda> op;
  };
  GemmArSetup setup_;
  std::vector<Rank> ranks_;
};

}  // namespace mk::test
