/// \file
/// What the blocks of one GEMM+Combine launch share. Plain data; the same struct goes to a CUDA
/// kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/ops/combine/geometry.h"
#include "kernels/ops/combine/row_index.h"
#include "kernels/ops/combine/schedule.h"

namespace mk::kernels {

/// Launch::m, which must be the same on all ranks; tokens need not be.
inline constexpr std::uint32_t kCombineM = 1;

/// What becomes of launches that nobody on the host waits for: those that stored nothing. All zero
/// before the first launch.
struct CombineRefusals {
  std::uint32_t count = 0;  ///< written last
  std::uint32_t epoch = 0;  ///< of the last of them
  CombineVerdict verdict;   ///< its
  CombineFault fault;       ///< its, of this rank
  MoeRow row;               ///< the row at fault, if it is one
  std::uint32_t rows = 0;   ///< the last expert offset
  std::int32_t id = 0;      ///< that is at fault, if it is one
};

struct CombineLaunch : Launch {
  CombineGeometry plan;
  // The handle: what MoE Dispatch+GEMM left on this rank.
  const MoeRow* rows = nullptr;
  const std::uint32_t* offsets = nullptr;  ///< by expert of this rank, and the end
  std::uint32_t room = 0;                  ///< rows that there can be
  bool complete = true;                    ///< false: it failed here, and there are no rows
  CombineRefusals* refusals = nullptr;     ///< null: the host looks at each launch's verdict
  // This rank's tokens.
  RoutingTable routing;                 ///< as they were dispatched; the weights are the rows'
  const std::byte* residual = nullptr;  ///< [tokens][H], or null: none
};

}  // namespace mk::kernels
