/// \file
/// A row of sums on its way out: bias, activation, rounding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/epilogue.h"
#include "kernels/cpu/row_math.h"

namespace mk::kernels {

/// What a row becomes.
struct RowFinish {
  Partials type = Partials::kElement;         ///< of the target
  Activation activation = Activation::kNone;  ///< none of a target in fp32
  const std::uint16_t* bias = nullptr;        ///< of the row's first column on; or null
};

/// Finishes `columns` sums, which it changes, into `target`. Answers the bytes it has written. The
/// activation's error, in fp32, is at most 2^-22 of its argument's magnitude for GELU, and of its
/// own for SiLU (2^-21 gated).
std::size_t finish_row(const RowMath& math, const RowFinish& finish, float* sums, void* target,
                       std::uint32_t columns);

}  // namespace mk::kernels
