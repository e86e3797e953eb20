// Tiles of attention on one core: every variant of the arithmetic against float64, within the
// derived bounds.
#include "kernels/cpu/cpu_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "client/tools/numeric/attention_reference.h"

namespace mk::kernels {
namespace {

std::vector<const AttentionMath*> variants() {
  std::vector<const AttentionMath*> all = {&attention_math_generic()};
  for (const AttentionMath* math : {attention_math_avx2(), attention_math_avx512()}) {
    if (math != nullptr) all.push_back(math);
  }
  return all;
}

DataType data_type(DType dtype) { return dtype == DType::kBf16 ? DataType::kBf16 : DataType::kF16; }

std::vector<std::uint16_t> random_values(DType dtype, std::size_t count, float range,
                                         std::mt19937_64& random) {
  std::vector<std::uint16_t> values(count);
  for (std::uint16_t& value : values) {
    value = tools::from_float(data_type(dtype),
                              range * (static_cast<float>(random() % 4001) - 2000.0f) / 2000.0f);
  }
  return values;
}

// 2^x is within the 4 * 2^-24 that the bounds are derived from, over all of its range; and 2^0 is
// 1.
TEST(AttentionMath, PowersOfTwoAreWithinFourRoundings) {
  for (const AttentionMath* math : variants()) {
    std::vector<float> scores(kPanel);
    std::vector<float> max(kPanel);
    std::vector<float> sum(kPanel);
    std::vector<float> alpha(kPanel);
    const auto power = [&](float x) {  // of all columns, through the softmax of a zero maximum
      std::fill(scores.begin(), scores.end(), x);
      std::fill(max.begin(), max.end(), 0.0f);
      math->softmax({scores.data(), kPanel, max.data(), sum.data(), alpha.data(), 1, 1});
      return scores[0];
    };
    EXPECT_EQ(power(0.0f), 1.0f);
    EXPECT_EQ(power(-126.0f), 0.0f);
    EXPECT_EQ(power(-1e30f), 0.0f);
    EXPECT_EQ(power(-std::numeric_limits<float>::infinity()), 0.0f);
    EXPECT_TRUE(std::isnan(power(std::numeric_limits<float>::quiet_NaN())));
    double worst = 0;
    // Every 4001st float from the smallest to 125 in magnitude, and each of those around halves,
    // where the exponent changes.
    const auto check = [&](float x) {
      const double exact = std::exp2(double{x});
      worst = std::max(worst, std::abs(double{power(x)} / exact - 1) * 0x1p24);
    };
    std::uint32_t end = 0;
    const float most = 125.0f;
    std::memcpy(&end, &most, sizeof(end));
    for (std::uint32_t bits = 0; bits <= end; bits += 4001) {
      float x = 0;
      std::memcpy(&x, &bits, sizeof(x));
      check(-x);
    }
    for (float half = 0.5f; half < 125; half += 0.5f) {
      for (float x : {std::nextafter(half, 0.0f), half, std::nextafter(half, 200.0f)}) check(-x);
    }
    EXPECT_LE(worst, 4.0) << math->name;
    EXPECT_GT(worst, 0.5) << math->name << ": nothing was measured";
  }
}

struct Case {
  DType dtype = DType::kBf16;
  std::uint32_t head_dim = 64;
  std::uint32_t group = 1;
  std::uint32_t key_heads = 1;
  std::uint32_t queries = 10;  ///< the last rows of the sequence, when causal
  std::uint32_t keys = 40;
  std::uint32_t tile_q = 4;
  std::uint32_t tile_k = 7;
  bool causal = false;
  float range = 1;
  double scale = 0.125;
  /// Keys and values from here on are NaN, infinite and huge, each in turn; none: `keys`.
  std::uint32_t special_from = ~0u;
};

/// Of the type; the `i`-th of those that may stand where a mask hides them.
std::uint16_t special(DType dtype, std::size_t i) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float values[] = {std::nanf(""), kInfinity, -kInfinity, 6e4f, -6e4f};
  return tools::from_float(data_type(dtype), values[i % std::size(values)]);
}

/// Computes the case with tile after tile, putting every tile aside after each `aside`-th tile of
/// keys (0: never), and compares.
void run(const Case& c, const AttentionMath& math, std::uint32_t aside,
         std::vector<std::uint16_t>* bits, std::vector<float>* lse_bits = nullptr) {
  std::mt19937_64 random(c.queries * 131 + c.keys);
  const std::uint32_t heads = c.key_heads * c.group;
  const std::size_t q_row = std::size_t{heads} * c.head_dim;
  const std::size_t k_row = std::size_t{c.key_heads} * c.head_dim;
  const auto q = random_values(c.dtype, c.queries * q_row, c.range, random);
  auto k = random_values(c.dtype, c.keys * k_row, c.range, random);
  auto v = random_values(c.dtype, c.keys * k_row, 1, random);
  for (std::size_t i = c.special_from * k_row; c.special_from < c.keys && i < k.size(); ++i) {
    // Whole heads of one kind, and mixed ones.
    k[i] = special(c.dtype, i / c.head_dim);
    v[i] = special(c.dtype, i / 3);
  }
  std::vector<std::uint16_t> out(c.queries * q_row, 0x7fff);
  std::vector<float> lse(std::size_t{c.queries} * heads, std::nanf(""));

  const CpuAttentionShape shape{c.head_dim, c.group, c.tile_q, c.tile_k, c.dtype};
  CpuAttention attention(shape, math);
  CpuAttention other(shape, math);  // so that nothing but the saved state carries over
  const std::uint32_t first = c.causal ? c.keys - c.queries : 0;
  for (std::uint32_t head = 0; head < c.key_heads; ++head) {
    for (std::uint32_t row = 0; row < c.queries; row += c.tile_q) {
      const std::uint32_t rows = std::min(c.tile_q, c.queries - row);
      const AttentionRows queries{q.data() + row * q_row + head * c.group * c.head_dim, q_row};
      CpuAttention* current = &attention;
      current->begin(queries, rows, c.scale);
      for (std::uint32_t key = 0, tile = 0; key < c.keys; key += c.tile_k, ++tile) {
        const std::uint32_t count = std::min(c.tile_k, c.keys - key);
        const std::int64_t diagonal =
            c.causal ? std::int64_t{first} + row - key : CpuAttention::kSeesAll;
        const std::size_t at = key * k_row + head * c.head_dim;
        current->attend({k.data() + at, k_row}, {v.data() + at, k_row}, count, diagonal);
        if (aside != 0 && tile % aside == 0) {
          std::vector<float> state(CpuAttention::state_floats(shape, rows));
          current->save(state.data());
          current = current == &attention ? &other : &attention;
          current->begin(queries, rows, c.scale);
          current->resume(state.data());
        }
      }
      current->finish(out.data() + row * q_row + head * c.group * c.head_dim, q_row,
                      lse.data() + std::size_t{row} * heads + head * c.group, heads);
    }
  }

  tools::AttentionProblem problem;
  problem.sequence = c.keys;
  problem.query_heads = heads;
  problem.key_heads = c.key_heads;
  problem.head_dim = c.head_dim;
  problem.causal = c.causal;
  problem.scale = c.scale;
  problem.type = data_type(c.dtype);
  problem.tile_keys = c.tile_k;
  problem.tiles = (c.keys + c.tile_k - 1) / c.tile_k;
  const auto result = tools::AttentionReference(problem, k.data(), v.data())
                          .compare(first, c.queries, q.data(), out.data(), lse.data());
  EXPECT_EQ(result.out.compared, c.queries * q_row);
  EXPECT_EQ(result.out.wrong, 0u) << math.name << ": element " << result.out.first_wrong
                                  << ", worst " << result.out.worst_ratio;
  EXPECT_EQ(result.lse.compared, std::uint64_t{c.queries} * heads);
  EXPECT_EQ(result.lse.wrong, 0u) << math.name << ": log-sum-exp " << result.lse.first_wrong
                                  << ", worst " << result.lse.worst_ratio;
  if (bits != nullptr) *bits = out;
  if (lse_bits != nullptr) *lse_bits = lse;
}

TEST(CpuAttention, IsWithinItsBound) {
  std::mt19937_64 random(7);
  for (const AttentionMath* math : variants()) {
    for (int i = 0; i < 24; ++i) {
      const auto pick = [&](std::uint32_t low, std::uint32_t high) {
        return static_cast<std::uint32_t>(low + random() % (high - low + 1));
      };
      Case c;
      c.dtype = i % 3 == 0 ? DType::kF16 : DType::kBf16;
      c.head_dim = i % 2 == 0 ? 64 : 128;
      c.group = pick(1, 5);
      c.key_heads = pick(1, 3);
      c.keys = pick(1, 200);
      c.causal = pick(0, 1) == 1;
      c.queries = pick(1, c.causal ? std::min(c.keys, 60u) : 60);
      c.tile_q = pick(1, 40);
      c.tile_k = pick(1, 130);
      c.scale = 1 / std::sqrt(double{static_cast<float>(c.head_dim)});
      SCOPED_TRACE(testing::Message() << "case " << i);
      run(c, *math, 0, nullptr);
    }
  }
}

// Scores up to some thousands: weights underflow, and one key takes all.
TEST(CpuAttention, StandsExtremeScores) {
  for (const AttentionMath* math : variants()) {
    for (float range : {0.0f, 8.0f, 60.0f}) {
      Case c;
      c.range = range;
      c.queries = 33;
      c.keys = 150;
      c.tile_k = 32;
      c.causal = true;
      run(c, *math, 1, nullptr);
      c.scale = -1;  // any sign
      run(c, *math, 0, nullptr);
      c.scale = 0;
      run(c, *math, 0, nullptr);
    }
  }
}

// A tile that is put aside and taken up again, elsewhere, has the same bits.
TEST(CpuAttention, InterruptionsChangeNoBit) {
  for (const AttentionMath* math : variants()) {
    Case c;
    c.group = 3;
    c.keys = 101;
    std::vector<std::uint16_t> whole;
    run(c, *math, 0, &whole);
    for (std::uint32_t aside : {1u, 3u}) {
      std::vector<std::uint16_t> bits;
      run(c, *math, aside, &bits);
      EXPECT_EQ(bits, whole) << math->name;
    }
  }
}

// A query's bits do not depend on which queries share its tile, or on keys it must not see.
TEST(CpuAttention, TilesOfQueriesChangeNoBit) {
  for (const AttentionMath* math : variants()) {
    Case c;
    c.queries = 40;
    c.causal = true;
    c.keys = 77;
    std::vector<std::uint16_t> whole;
    c.tile_q = 40;
    run(c, *math, 0, &whole);
    for (std::uint32_t tile : {1u, 5u, 33u}) {
      c.tile_q = tile;
      std::vector<std::uint16_t> bits;
      run(c, *math, 0, &bits);
      EXPECT_EQ(bits, whole) << math->name << ", tiles of " << tile;
    }
  }
}

// What the mask hides from a query changes no bit of its output or log-sum-exp, whatever it is.
// What it does not hide has its effect.
TEST(CpuAttention, HiddenKeysChangeNoBitWhateverTheyAre) {
  std::mt19937_64 random(11);
  const auto pick = [&](std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(low + random() % (high - low + 1));
  };
  for (const AttentionMath* math : variants()) {
    for (int i = 0; i < 24; ++i) {
      Case c;
      c.causal = true;
      c.dtype = i % 3 == 0 ? DType::kF16 : DType::kBf16;
      c.head_dim = i % 4 == 0 ? 128 : 64;
      c.group = pick(1, 5);
      c.key_heads = pick(1, 2);
      c.keys = pick(2, 120);
      c.queries = pick(1, c.keys);
      c.tile_q = pick(1, 40);
      c.tile_k = pick(1, 70);
      SCOPED_TRACE(testing::Message() << math->name << ", case " << i);
      std::vector<std::uint16_t> out;
      std::vector<float> lse;
      run(c, *math, 0, &out, &lse);
      c.special_from = pick(c.keys - c.queries, c.keys - 1);
      std::vector<std::uint16_t> special_out;
      std::vector<float> special_lse;
      run(c, *math, i % 3, &special_out, &special_lse);
      const std::size_t clean_rows = c.special_from - (c.keys - c.queries);
      const auto out_end =
          static_cast<std::ptrdiff_t>(clean_rows * c.key_heads * c.group * c.head_dim);
      const auto lse_end = static_cast<std::ptrdiff_t>(clean_rows * c.key_heads * c.group);
      EXPECT_TRUE(std::equal(out.begin(), out.begin() + out_end, special_out.begin()));
      EXPECT_EQ(0, std::memcmp(lse.data(), special_lse.data(), lse_end * sizeof(float)));
      EXPECT_TRUE(std::any_of(special_out.end() - c.head_dim, special_out.end(), [&](auto bits) {
        return !std::isfinite(tools::to_float(data_type(c.dtype), bits));
      }));
    }
  }
}

}  // namespace
}  // namespace mk::kernels
