/// \file
/// What every operator's launch hands to its kernel, and how the host sees a compiled kernel. Plain
/// data for host and device.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/cuda/core/gemm_types.h"
#include "kernels/cuda/skeleton/launch_state.h"

namespace mk::kernels::cuda {

/// A and B of a launch.
struct ProductArguments {
  CUtensorMap a;  ///< [m, k]
  CUtensorMap b;  ///< [n, k] or [k, n]
  int a_box_rows = 0;
  int k_blocks = 0;
};

/// What the product's epilogue does besides rounding, of operators that have a choice.
struct EpilogueArguments {
  bool f32 = false;  ///< sums are stored as partial sums in fp32
  Activation activation = Activation::kNone;
  const std::uint16_t* bias = nullptr;  ///< of the product's columns, or null

  MK_HOST_DEVICE bool any() const {
    return f32 || activation != Activation::kNone || bias != nullptr;
  }
};

/// An operator's arguments derive from it. `OperatorLaunch`: of kernels/<operator>/launch.h.
template <class OperatorLaunch>
struct OperatorArguments {
  ProductArguments product;
  OperatorLaunch launch;  ///< the kernel puts in the epoch
  FrameArguments frame;
  void* c = nullptr;  ///< the caller's C, or null
  std::uint64_t ldc = 0;
  EpilogueArguments epilogue;
};

/// Box of B's tensor map.
struct BBox {
  int rows;
  int columns;
};

/// One compiled kernel, seen from the host.
template <class Arguments>
struct OperatorKernel {
  BBox b_box;
  cudaError_t (*prepare)();  ///< on the current device, before any launch
  cudaError_t (*launch)(const Arguments&, cudaStream_t);
};

/// An operator's kernels by element type: those for tiles of at most `columns` columns, 256 at
/// most.
template <class Arguments>
struct KernelChoice {
  using Choose = const OperatorKernel<Arguments>&(BLayout b_layout, std::uint32_t columns);
  Choose* bf16;
  Choose* f16;
};

}  // namespace mk::kernels::cuda
