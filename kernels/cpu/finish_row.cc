#include "kernels/cpu/finish_row.h"

#include <cmath>
#include <cstring>

#include "kernels/cpu/gated_silu.h"

namespace mk::kernels {
namespace {

float relu(float x) { return x < 0.0f ? 0.0f : x; }  // a NaN stays one
float gelu(float x) {
  constexpr float kRootHalf = 0.70710678118654752f;
  return 0.5f * x * std::erfc(-x * kRootHalf);
}

template <float (*kFunction)(float)>
void apply(float* sums, std::uint32_t columns) {
  for (std::uint32_t i = 0; i < columns; ++i) sums[i] = kFunction(sums[i]);
}

/// Answers how many columns are left.
std::uint32_t activate(Activation activation, float* sums, std::uint32_t columns) {
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      apply<relu>(sums, columns);
      break;
    case Activation::kGelu:
      apply<gelu>(sums, columns);
      break;
    case Activation::kSilu:
      apply<silu>(sums, columns);
      break;
    case Activation::kGatedSilu:
      gated_silu(sums, sums + 1, 2, sums, columns / 2);
      return columns / 2;
  }
  return columns;
}

}  // namespace

std::size_t finish_row(const RowMath& math, const RowFinish& finish, float* sums, void* target,
                       std::uint32_t columns) {
  if (finish.type == Partials::kF32) {
    const std::size_t bytes = std::size_t{columns} * sizeof(float);
    std::memcpy(target, sums, bytes);
    return bytes;
  }
  if (finish.bias != nullptr) math.add(finish.bias, sums, columns);
  const std::uint32_t left = activate(finish.activation, sums, columns);
  math.narrow(sums, static_cast<std::uint16_t*>(target), left);
  return std::size_t{left} * kElementBytes;
}

}  // namespace mk::kernels
