/// \file
/// What becomes of a product's sums before they are rounded, and the type in which partial sums
/// travel: the part of a GEMM operator's description that all three have. Compiles for host and
/// device.
#pragma once

#include <cstdint>

#include "kernels/comm/tile_grid.h"
#include "kernels/comm/types.h"
#include "shm/platform.h"

namespace mk::kernels {

/// Of a sum s in fp32.
enum class Activation : std::uint8_t {
  kNone = 0,
  kRelu = 1,       ///< max(s, 0)
  kGelu = 2,       ///< s P(X <= s) for a standard normal X: the exact form, by erf
  kSilu = 3,       ///< s / (1 + exp(-s))
  kGatedSilu = 4,  ///< silu(s) u: columns alternate, a gate s, then its up projection u
};

/// Applied once to the whole sum: first the bias, then the activation, then the rounding.
struct Epilogue {
  Activation activation = Activation::kNone;
  bool bias = false;  ///< a launch brings one element for each column of the product

  MK_HOST_DEVICE constexpr bool any() const { return bias || activation != Activation::kNone; }
  MK_HOST_DEVICE constexpr bool gated() const { return activation == Activation::kGatedSilu; }
  /// Columns of C, of a product with `n`.
  MK_HOST_DEVICE constexpr std::uint32_t columns_of(std::uint32_t n) const {
    return gated() ? n / 2 : n;
  }
  /// Tiles' columns are a multiple of these, so that C's are one of eight.
  MK_HOST_DEVICE constexpr std::uint32_t column_step() const {
    return (gated() ? 2 : 1) * TileGrid::kColumnStep;
  }
  /// Where in C the product's tile at `rect` goes.
  MK_HOST_DEVICE constexpr TileRect result_of(TileRect rect) const {
    rect.column = columns_of(rect.column);
    rect.columns = columns_of(rect.columns);
    return rect;
  }
  friend constexpr bool operator==(const Epilogue&, const Epilogue&) = default;
};

/// The type in which one rank's and one node's sums are stored and sent.
enum class Partials : std::uint8_t {
  kElement = 0,  ///< the element type: each is rounded to it
  kF32 = 1,      ///< fp32: twice the bytes, no rounding, no overflow of f16
};
MK_HOST_DEVICE constexpr std::uint32_t bytes_of(Partials partials) {
  return partials == Partials::kF32 ? 4 : kElementBytes;
}

/// What a caller may ask for beside the shape.
struct GemmResult {
  Epilogue epilogue;
  Partials partials = Partials::kElement;

  /// Whether a partial sum has the type of C, and adding another to it gives C.
  MK_HOST_DEVICE constexpr bool adds_in_place() const {
    return partials == Partials::kElement && !epilogue.any();
  }
};

constexpr const char* name_of(Activation activation) {
  constexpr const char* kNames[] = {"none", "relu", "gelu", "silu", "gated-silu"};
  return kNames[static_cast<std::uint8_t>(activation)];
}
constexpr const char* name_of(Partials partials) {
  return partials == Partials::kF32 ? "f32" : "element";
}

}  // namespace mk::kernels
