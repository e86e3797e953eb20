/// \file
/// The plain matrix product on one GPU: C = A B, two-byte elements, fp32 sums. What operators run
/// when the fused form would lose, and what shows that the core under all of them is as fast as the
/// vendor's library.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/cuda/core/gemm_types.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

const char* gemm_variant_name(GemmVariant variant);

/// What may be set by hand; 0 and kAuto leave the choice to the plan.
struct GemmTuning {
  GemmVariant variant = GemmVariant::kAuto;
  int splits = 0;      ///< blocks that share a tile's K, of a variant that is set
  int band_rows = 0;   ///< rows of C in one band of the tile order
  int blocks_max = 0;  ///< thread blocks to use, at most one per SM: leaves the other SMs to others
  bool one_order_of_k = false;  ///< a row's bits do not depend on m: K is not shared
};

/// A product ready to launch any number of times on the device that was current at creation. It
/// keeps the addresses, not the memory. Immutable, so any thread may launch it; launches are
/// asynchronous and may be captured into a graph.
class GemmPlan {
 public:
  /// kInvalidArgument names the size or address that does not fit; kUnsupported: the device is no
  /// Hopper.
  static Result<GemmPlan> create(const GemmProblem& problem, const GemmTuning& tuning = {});

  /// kSystem with CUDA's reason if the launch was refused.
  Status launch(cudaStream_t stream) const;

  GemmVariant variant() const { return variant_; }
  /// Shares of a tile's K, each summed by itself: C's bits depend on their number, and on no tile.
  int splits() const;
  int blocks() const;

 private:
  struct Parts;
  GemmPlan() = default;
  std::shared_ptr<const Parts> parts_;
  GemmVariant variant_ = GemmVariant::kAuto;
};

}  // namespace mk::kernels::cuda
