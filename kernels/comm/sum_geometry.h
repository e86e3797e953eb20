/// \file
/// What GEMM+AllReduce and GEMM+ReduceScatter, whose tiles are packed at an owner and summed
/// there, fix for the operator's lifetime. sum_plan.h chooses it. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/epilogue.h"
#include "kernels/comm/types.h"

namespace mk::kernels {

struct SumGeometry {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Shape max;  ///< the largest m, and n; k is each rank's own and 0 here
  DType dtype = DType::kBf16;
  Epilogue epilogue;
  Partials partials = Partials::kElement;
  std::uint32_t tile_m = 0;
  std::uint32_t tile_n = 0;
  std::uint32_t chunk_bytes = 0;
  std::uint32_t banks = kBanksMax;
  std::uint32_t tiles_max = 0;   ///< packed together, at most (which: SumRules)
  std::uint32_t chunks_max = 0;  ///< of them, at most

  /// Columns of C.
  MK_HOST_DEVICE constexpr std::uint32_t result_columns() const {
    return epilogue.columns_of(max.n);
  }
  /// Of a packed tile.
  MK_HOST_DEVICE std::uint64_t tile_bytes(const TileGrid& grid) const {
    return std::uint64_t{grid.tile_rows()} * grid.tile_cols() * bytes_of(partials);
  }
  /// See GemmResult.
  MK_HOST_DEVICE constexpr bool adds_in_place() const {
    return GemmResult{epilogue, partials}.adds_in_place();
  }

  MK_HOST_DEVICE constexpr FlagMap flags() const { return {nodes, banks, chunks_max}; }
};

}  // namespace mk::kernels
