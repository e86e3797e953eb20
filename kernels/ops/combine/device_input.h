/// \file
/// What a launch of GEMM+Combine on a GPU is given. Plain data of the host.
#pragma once

#include <cstdint>

#include "kernels/ops/moe/routing_types.h"

namespace mk::kernels {

/// One rank's input of one launch, in device memory; dense. Rows and offsets are those of a
/// MoeDispatchDeviceOutput; nobody on the host needs to know how many rows there are.
struct CombineDeviceInput {
  const void* y = nullptr;  ///< [room][I], at a multiple of 16 bytes
  const MoeRow* rows = nullptr;
  const std::uint32_t* offsets = nullptr;  ///< [experts of this rank + 1]
  std::uint32_t room = 0;                  ///< rows that y has room for; 0: there are none
  const void* expert_weights = nullptr;    ///< of this rank's experts; at a multiple of 16 bytes
  const std::int32_t* ids = nullptr;       ///< [count][top_k]: what was dispatched
  std::uint32_t count = 0;                 ///< of this rank's tokens
  const void* residual = nullptr;          ///< [count][H] at a multiple of 16 bytes, or null
};

}  // namespace mk::kernels
