/// \file
/// bf16 and f16 to float and back, round to nearest even: the plain definition (IEEE 754; bf16 is
/// the upper half of a binary32), kept apart from the executors' own conversions so that checks do
/// not share their mistakes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "mkernel/mkernel.h"

namespace mk::tools {

inline float bf16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value))
    return static_cast<std::uint16_t>(bits >> 16 | 0x40u);  // stays a NaN, becomes quiet
  const std::uint32_t tie_to_even = bits >> 16 & 1;
  return static_cast<std::uint16_t>((bits + 0x7fffu + tie_to_even) >> 16);
}

inline float f16_to_float(std::uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 0x1f) return fraction == 0 ? sign * HUGE_VALF : std::nanf("");
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
}

inline std::uint16_t float_to_f16(float value) {
  const auto sign = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 65520.0f)
    return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude == 0) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, f in [0.5, 1)
  const int scale = exponent < -13 ? 24 : 11 - exponent;  // subnormals have 2^-24 as their unit
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, scale)));
  if (exponent < -13)
    return static_cast<std::uint16_t>(sign | units);  // 0x400 units are the least normal number
  return static_cast<std::uint16_t>(
      sign | ((static_cast<std::uint32_t>(exponent + 14) << 10) + units - 0x400u));
}

inline float to_float(DataType type, std::uint16_t bits) {
  return type == DataType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
}
inline std::uint16_t from_float(DataType type, float value) {
  return type == DataType::kBf16 ? float_to_bf16(value) : float_to_f16(value);
}

/// The unit roundoff 2^-p of a type with p bits of significand.
constexpr double unit_roundoff(DataType type) {
  return type == DataType::kBf16 ? 1.0 / 256 : 1.0 / 2048;
}
inline constexpr double kUnitRoundoffFp32 = 1.0 / 16777216;
/// g(n) = n u / (1 - n u): the relative error of n roundings in fp32 (Higham).
constexpr double fp32_error(double roundings) {
  return roundings * kUnitRoundoffFp32 / (1 - roundings * kUnitRoundoffFp32);
}

}  // namespace mk::tools
