/// \file
/// The numbers of an AllGather+GEMM on one rank, for the operator's lifetime. spec.h makes them;
/// per launch: schedule.h. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/types.h"
#include "kernels/gather/geometry.h"

namespace mk::kernels {

struct AgGemmGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Shape max;  ///< the largest m (rows of the whole A), this rank's n, and k
  DType dtype = DType::kBf16;
  Epilogue epilogue;         ///< of this rank, like n
  std::uint32_t tile_m = 0;  ///< of this rank, like n: nobody else sees its tiles
  std::uint32_t tile_n = 0;
  GatherGeometry gather;  ///< of A's rows, k elements each
  std::uint64_t workspace_bytes = 0;

  /// Columns of C.
  MK_HOST_DEVICE constexpr std::uint32_t result_columns() const {
    return epilogue.columns_of(max.n);
  }
};

}  // namespace mk::kernels
