#include "client/tools/numeric/elements.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace mk::tools {
namespace {

// bf16 and f16 by definition: sign, exponent with its bias, fraction; IEEE 754-2019 section 3.4.
double value_of(std::uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits >> (exponent_bits + fraction_bits)) != 0 ? -1 : 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const auto fraction = static_cast<double>(bits & ((1u << fraction_bits) - 1));
  const double scale = std::ldexp(1.0, -fraction_bits);
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * fraction * scale * std::ldexp(1.0, 1 - bias);
  return sign * (1 + fraction * scale) * std::ldexp(1.0, exponent - bias);
}

struct Format {
  DataType type;
  int exponent_bits, fraction_bits;
};

class Elements : public testing::TestWithParam<Format> {};

TEST_P(Elements, EveryBitPatternHasItsValueAndComesBack) {
  const auto [type, exponent_bits, fraction_bits] = GetParam();
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = value_of(bits, exponent_bits, fraction_bits);
    const float got = to_float(type, static_cast<std::uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(to_float(type, from_float(type, got)))) << bits;
    } else {
      ASSERT_EQ(expected, double{got}) << bits;
      ASSERT_EQ(std::signbit(expected), std::signbit(got)) << bits;
      ASSERT_EQ(bits, from_float(type, got)) << bits;
    }
  }
}

TEST_P(Elements, RoundsToTheNearestAndTiesToEven) {
  const auto [type, exponent_bits, fraction_bits] = GetParam();
  const std::uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
  for (std::uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const double low = value_of(bits, exponent_bits, fraction_bits);
    const double high = value_of(bits + 1, exponent_bits, fraction_bits);
    const auto middle = static_cast<float>((low + high) / 2);
    if (double{middle} != (low + high) / 2) continue;  // below float's own resolution
    const std::uint32_t even = bits + bits % 2;
    ASSERT_EQ(even, from_float(type, middle)) << bits;
    ASSERT_EQ(bits, from_float(type, std::nextafter(middle, 0.0f))) << bits;
    ASSERT_EQ(bits + 1, from_float(type, std::nextafter(middle, HUGE_VALF))) << bits;
    ASSERT_EQ(even | 0x8000u, from_float(type, -middle)) << bits;
  }
}

TEST_P(Elements, TooLargeBecomesInfinity) {
  const auto [type, exponent_bits, fraction_bits] = GetParam();
  const std::uint32_t infinity = ((1u << exponent_bits) - 1) << fraction_bits;
  EXPECT_EQ(infinity, from_float(type, std::numeric_limits<float>::max()));
  EXPECT_EQ(infinity, from_float(type, HUGE_VALF));
  EXPECT_EQ(infinity | 0x8000u, from_float(type, -HUGE_VALF));
}

INSTANTIATE_TEST_SUITE_P(
    Types, Elements, testing::Values(Format{DataType::kBf16, 8, 7}, Format{DataType::kF16, 5, 10}),
    [](const auto& test) { return std::string(test.param.exponent_bits == 8 ? "bf16" : "f16"); });

}  // namespace
}  // namespace mk::tools
