#include <bit>

#include "kernels/cpu/row_math.h"

namespace mk::kernels {
namespace {

float bf16_to_float(std::uint16_t value) {
  return std::bit_cast<float>(std::uint32_t{value} << 16);
}

std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float f16_to_float(std::uint16_t value) {
  const std::uint32_t sign = std::uint32_t{value & 0x8000u} << 16;
  const std::uint32_t magnitude = value & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN (quieted, as the machine's instruction does)
    const std::uint32_t mantissa = magnitude & 0x3ffu;
    return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13 |
                                (mantissa != 0 ? 0x400000u : 0u));
  }
  if (magnitude >= 0x400u) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: a multiple of 2^-24, exact in fp32.
  const float tiny = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -tiny : tiny;
}

std::uint16_t float_to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x1ffu));
  if (magnitude >= 0x477ff000u)
    return static_cast<std::uint16_t>(sign | 0x7c00u);  // from 65520 on: infinity
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 lets the machine round to a multiple of 2^-24.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - 0x3f000000u));
  }
  const std::uint32_t odd = magnitude >> 13 & 1u;
  return static_cast<std::uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + odd) >> 13));
}

template <float (*kWiden)(std::uint16_t)>
void widen(const std::uint16_t* source, float* target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = kWiden(source[i]);
}
template <std::uint16_t (*kNarrow)(float)>
void narrow(const float* source, std::uint16_t* target, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = kNarrow(source[i]);
}
template <float (*kWiden)(std::uint16_t)>
void add(const std::uint16_t* source, float* sum, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += kWiden(source[i]);
}

constexpr RowMath kBf16{"generic", widen<bf16_to_float>, narrow<float_to_bf16>, add<bf16_to_float>};
constexpr RowMath kF16{"generic", widen<f16_to_float>, narrow<float_to_f16>, add<f16_to_float>};

}  // namespace

const RowMath& row_math_generic(DType dtype) { return dtype == DType::kBf16 ? kBf16 : kF16; }

}  // namespace mk::kernels
