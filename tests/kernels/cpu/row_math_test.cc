// Conversions and sums of 16-bit rows: right for every value, and the same bits in every variant.
#include "kernels/cpu/row_math.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/cpu/sum_rows.h"

namespace mk::kernels {
namespace {

std::vector<std::uint16_t> all_halves() {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

/// fp32 values around everything where rounding changes its mind: each 16-bit value, the middle to
/// the next, and one bit to either side of both.
std::vector<float> interesting_floats(DType dtype) {
  std::vector<float> values;
  const auto add = [&](std::uint32_t bits) {
    for (std::uint32_t around : {bits - 1, bits, bits + 1})
      values.push_back(std::bit_cast<float>(around));
  };
  for (std::uint16_t half : all_halves()) {
    float wide = 0;
    row_math_generic(dtype).widen(&half, &wide, 1);
    const auto bits = std::bit_cast<std::uint32_t>(wide);
    add(bits);
    add(bits + (dtype == DType::kBf16 ? 0x8000u : 0x1000u));
  }
  for (std::uint32_t exponent = 0; exponent < 256;
       ++exponent) {  // f16's subnormals and what is below them
    for (std::uint32_t mantissa : {0u, 1u, 0x400000u, 0x400001u, 0x600000u, 0x7fffffu}) {
      add(exponent << 23 | mantissa);
      add(1u << 31 | exponent << 23 | mantissa);
    }
  }
  return values;
}

double exact(DType dtype, std::uint16_t half) {
  const int sign = half >> 15;
  const int bits = dtype == DType::kBf16 ? 7 : 10;
  const int bias = dtype == DType::kBf16 ? 127 : 15;
  const int exponent = (half & 0x7fff) >> bits;
  const int mantissa = half & ((1 << bits) - 1);
  if (exponent == 2 * bias + 1) return mantissa != 0 ? NAN : sign != 0 ? -INFINITY : INFINITY;
  const double value = exponent == 0 ? std::ldexp(mantissa, 1 - bias - bits)
                                     : std::ldexp(mantissa + (1 << bits), exponent - bias - bits);
  return sign != 0 ? -value : value;
}

class RowMathTest : public ::testing::TestWithParam<DType> {
 protected:
  std::vector<const RowMath*> variants() const {
    std::vector<const RowMath*> all = {&row_math_generic(GetParam())};
    if (const RowMath* avx2 = row_math_avx2(GetParam())) all.push_back(avx2);
    return all;
  }
};

TEST_P(RowMathTest, WidensEveryValueExactly) {
  const auto halves = all_halves();
  for (const RowMath* math : variants()) {
    std::vector<float> wide(halves.size());
    math->widen(halves.data(), wide.data(), halves.size());
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const double expected = exact(GetParam(), halves[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << math->name << " " << i;
      } else {
        ASSERT_EQ(static_cast<double>(wide[i]), expected) << math->name << " " << i;
      }
    }
  }
}

TEST_P(RowMathTest, NarrowsToTheNearestAndTiesToEven) {
  const RowMath& math = row_math_generic(GetParam());
  for (float value : interesting_floats(GetParam())) {
    std::uint16_t half = 0;
    math.narrow(&value, &half, 1);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(exact(GetParam(), half)));
      continue;
    }
    const double got = exact(GetParam(), half);
    if (std::isinf(got)) {
      // From half a step beyond the largest finite value on.
      const std::uint16_t largest = GetParam() == DType::kBf16 ? 0x7f7f : 0x7bff;
      const double top = exact(GetParam(), largest);
      const double step = top - exact(GetParam(), static_cast<std::uint16_t>(largest - 1));
      ASSERT_GE(std::abs(static_cast<double>(value)), top + step / 2);
      continue;
    }
    ASSERT_EQ(std::signbit(got), std::signbit(value));
    const double off = std::abs(got - static_cast<double>(value));
    for (int direction : {-1, 1}) {
      const auto neighbour = static_cast<std::uint16_t>(half + direction);
      if ((neighbour & 0x8000) != (half & 0x8000)) continue;  // beyond zero
      const double other = exact(GetParam(), neighbour);
      if (!std::isfinite(other)) continue;
      const double other_off = std::abs(other - static_cast<double>(value));
      ASSERT_LE(off, other_off) << value;
      if (off == other_off) {
        ASSERT_EQ(half & 1, 0) << value << " lies in the middle";
      }
    }
  }
}

TEST_P(RowMathTest, VariantsGiveTheSameBits) {
  const auto floats = interesting_floats(GetParam());
  const auto halves = all_halves();
  const RowMath& generic = row_math_generic(GetParam());
  std::vector<std::uint16_t> expected(floats.size());
  generic.narrow(floats.data(), expected.data(), floats.size());
  for (const RowMath* math : variants()) {
    std::vector<std::uint16_t> narrow(floats.size());
    math->narrow(floats.data(), narrow.data(), floats.size());
    ASSERT_EQ(narrow, expected) << math->name;
    std::vector<float> sums(halves.size(), 0.1f);
    std::vector<float> expected_sums(halves.size(), 0.1f);
    math->add(halves.data(), sums.data(), halves.size());
    generic.add(halves.data(), expected_sums.data(), halves.size());
    for (std::size_t i = 0; i < halves.size(); ++i) {
      ASSERT_TRUE(sums[i] == expected_sums[i] ||
                  (std::isnan(sums[i]) && std::isnan(expected_sums[i])));
    }
  }
}

TEST_P(RowMathTest, TouchesNothingBeyondTheRow) {
  for (const RowMath* math : variants()) {
    for (std::size_t count = 0; count < 20; ++count) {
      std::vector<std::uint16_t> halves(count, 0x3c00);
      std::vector<float> floats(count + 1, 7.0f);
      math->widen(halves.data(), floats.data(), count);
      math->add(halves.data(), floats.data(), count);
      EXPECT_EQ(floats[count], 7.0f);
      std::vector<std::uint16_t> back(count + 1, 0x1234);
      math->narrow(floats.data(), back.data(), count);
      EXPECT_EQ(back[count], 0x1234);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RowMathTest, ::testing::Values(DType::kBf16, DType::kF16),
                         [](const auto& type) { return name_of(type.param); });

TEST(SumRows, SumsFromLeftToRightInFp32AndStoresToAllTargets) {
  const RowMath& math = row_math(DType::kBf16);
  // 256 + 1 + 1 is 258 in fp32; rounded to bf16 after each step it would stay 256.
  const float rows[3] = {256, 1, 1};
  std::uint16_t sources[3][2 * 5];
  for (int s = 0; s < 3; ++s) {
    for (auto& element : sources[s]) math.narrow(&rows[s], &element, 1);
  }
  std::uint16_t targets[2][2 * 7];
  for (auto& target : targets)
    std::fill(std::begin(target), std::end(target), std::uint16_t{0xabcd});
  SumJob job;
  job.source_count = 3;
  for (int s = 0; s < 3; ++s) job.sources[s] = sources[s];
  job.source_stride = 5;
  job.target_count = 2;
  for (int t = 0; t < 2; ++t) job.targets[t] = targets[t];
  job.target_stride = 7;
  job.rows = 2;
  job.columns = 3;
  sum_rows(math, job);
  for (const auto& target : targets) {
    for (int i = 0; i < 14; ++i) {
      float value = 0;
      math.widen(&target[i], &value, 1);
      if (i % 7 < 3) {
        EXPECT_EQ(value, 258.0f);
      } else {
        EXPECT_EQ(target[i], 0xabcd) << i;
      }
    }
  }
}

// What is added and not finite is counted: each source, and a sum that overflows where it is
// rounded.
TEST(SumRows, CountsWhatIsAddedAndNotFinite) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    const RowMath& math = row_math(dtype);
    const float large = dtype == DType::kF16 ? 40000 : 2e38f;
    // Columns: a NaN, an infinity, numbers, and two that only together are too large.
    const float rows[3][4] = {{std::nanf(""), 1, 1, large}, {1, HUGE_VALF, 1, large}, {1, 1, 1, 0}};
    std::uint16_t sources[3][4];
    SumJob job;
    for (int s = 0; s < 3; ++s) {
      math.narrow(rows[s], sources[s], 4);
      job.add_source(reinterpret_cast<const std::byte*>(sources[s]));
    }
    std::uint16_t target[4];
    job.targets[0] = target;
    job.target_count = 1;
    job.rows = 1;
    job.columns = 4;
    job.source_stride = job.target_stride = 4;
    NonfiniteCounter plain(dtype);
    sum_rows(math, job, &plain);
    EXPECT_EQ(plain.count(), 2u);
    job.rounded_sources = 2;
    NonfiniteCounter rounded(dtype);
    sum_rows(math, job, &rounded);
    EXPECT_EQ(rounded.count(), 2u + 3u) << "the rounded sums of three columns as well";
  }
}

// Two ranks' partials, one of them where the sum is to be: the sum is the same, in every copy, and
// what is not finite in either counts.
TEST(AccumulateRows, AddsAPartialWhereTheSumIsToBeAndCountsWhatIsNotFinite) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    const RowMath& math = row_math(dtype);
    // Two rows of three columns, four elements apart; the sums' rows five apart.
    const float own[2][4] = {{1, std::nanf(""), 3, 77}, {4, 5, 6, 77}};
    const float other[2][4] = {{10, 1, HUGE_VALF, 88}, {40, 50, -6, 88}};
    std::uint16_t partial[2][4];
    std::uint16_t target[2][5];
    std::uint16_t copy[2][5];
    for (int row = 0; row < 2; ++row) {
      math.narrow(other[row], partial[row], 4);
      math.narrow(own[row], target[row], 4);
      target[row][3] = target[row][4] = copy[row][3] = copy[row][4] = 0xabcd;
    }
    AccumulateJob job;
    job.partial = partial;
    job.partial_stride = 4;
    job.target = target;
    job.copies[0] = copy;
    job.copy_count = 1;
    job.target_stride = 5;
    job.rows = 2;
    job.columns = 3;
    NonfiniteCounter counter(dtype);
    accumulate_rows(math, job, &counter);
    EXPECT_EQ(counter.count(), 2u) << "a NaN of one's own, an infinity of the other's";
    const float expected[2][3] = {{11, std::nanf(""), HUGE_VALF}, {44, 55, 0}};
    for (int row = 0; row < 2; ++row) {
      for (int column = 0; column < 3; ++column) {
        float sum = 0;
        math.widen(&target[row][column], &sum, 1);
        if (std::isnan(expected[row][column])) {
          EXPECT_TRUE(std::isnan(sum));
        } else {
          EXPECT_EQ(sum, expected[row][column]) << row << ", " << column;
        }
        EXPECT_EQ(copy[row][column], target[row][column]);
      }
      for (int column = 3; column < 5; ++column) {
        EXPECT_EQ(target[row][column], 0xabcd) << "beyond the job's columns";
        EXPECT_EQ(copy[row][column], 0xabcd);
      }
    }
  }
}

// A sum that is rounded on its way is what two sums one after the other give.
TEST(SumRows, RoundsTheFirstSourcesBeforeTheOthersAreAdded) {
  const RowMath& math = row_math(DType::kBf16);
  // In bf16 256 + 1 is 256 (even), 256 + 1 + 1 is 258, and 258 + 1 is 260.
  const float rows[4] = {256, 1, 1, 1};
  std::uint16_t sources[4];
  for (int s = 0; s < 4; ++s) math.narrow(&rows[s], &sources[s], 1);
  const float expected[5] = {260, 260, 258, 260, 260};  // 259, 259, 256 + 2, 258 + 1, 259 rounded
  for (std::uint32_t rounded = 0; rounded <= 4; ++rounded) {
    std::uint16_t target = 0;
    SumJob job;
    for (const std::uint16_t& source : sources)
      job.add_source(reinterpret_cast<const std::byte*>(&source));
    job.rounded_sources = rounded;
    job.targets[0] = &target;
    job.target_count = 1;
    job.rows = job.columns = 1;
    job.source_stride = job.target_stride = 1;
    sum_rows(math, job);
    float sum = 0;
    math.widen(&target, &sum, 1);
    EXPECT_EQ(sum, expected[rounded]) << rounded;
  }
}

}  // namespace
}  // namespace mk::kernels
