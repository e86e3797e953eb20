/// \file
/// The words in which callers speak of an operator: element types, layouts, shapes, modes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels {

/// Element type of A, B and C, of the partial tiles and of what crosses the network. Sums are
/// always fp32. kF32 is for operators that multiply nothing.
enum class DType : std::uint8_t { kBf16 = 0, kF16 = 1, kF32 = 2 };

inline constexpr std::uint32_t kElementBytes = 2;  ///< of bf16 and f16
MK_HOST_DEVICE constexpr std::uint32_t bytes_of(DType dtype) {
  return dtype == DType::kF32 ? 4 : kElementBytes;
}

/// How B lies in memory: row-major [K,N] (N contiguous), or row-major [N,K] (K contiguous, the
/// usual weight layout).
enum class BLayout : std::uint8_t { kKN = 0, kNK = 1 };

/// C[m,n] = A[m,k] B[k,n].
struct Shape {
  std::uint32_t m = 0;
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  friend constexpr bool operator==(const Shape&, const Shape&) = default;
};

/// kFused: tiles and chunks go as soon as they can. kUnfused: the same blocks and the same data
/// path, but one after the other: the baseline. The collective starts only when this rank's whole
/// product is done, or the product only when the collective is. kAuto: whichever the planner
/// (kernels/plan) expects to be faster. A launch runs as one of the first two. Ranks of one launch
/// may run different modes.
enum class Mode : std::uint8_t { kFused = 0, kUnfused = 1, kAuto = 2 };

constexpr const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"bf16", "f16", "f32"};
  return kNames[static_cast<std::uint8_t>(dtype)];
}
constexpr const char* name_of(Mode mode) {
  return mode == Mode::kFused ? "fused" : mode == Mode::kUnfused ? "unfused" : "auto";
}

MK_HOST_DEVICE constexpr std::uint32_t div_up(std::uint32_t a, std::uint32_t b) {
  return a / b + (a % b != 0);
}
MK_HOST_DEVICE constexpr std::uint64_t round_up_to(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace mk::kernels
