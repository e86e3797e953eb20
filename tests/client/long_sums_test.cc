// Long sums of products: the reference takes every order of additions, and no sum without a slice.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "client/tools/numeric/combine_reference.h"
#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/moe_reference.h"
#include "client/tools/numeric/random_matrix.h"

namespace mk::tools {
namespace {

using Elements = std::vector<std::uint16_t>;
using Terms = std::vector<float>;

constexpr std::uint64_t kM = 24, kN = 56;

float one_by_one(const Terms& terms) {
  float sum = 0;
  for (const float term : terms) sum += term;
  return sum;
}

float by_halves(const Terms& terms) {
  Terms sums = terms;
  while (sums.size() > 1) {
    Terms next;
    for (std::size_t i = 0; i + 1 < sums.size(); i += 2) next.push_back(sums[i] + sums[i + 1]);
    if (sums.size() % 2 != 0) next.push_back(sums.back());
    sums = next;
  }
  return sums.empty() ? 0 : sums[0];
}

float last_one_first(const Terms& terms) { return one_by_one(Terms(terms.rbegin(), terms.rend())); }

/// As vector instructions: sums of every 16th term, of stretches of 512.
float by_lanes_of_blocks(const Terms& terms) {
  float sum = 0;
  for (std::size_t first = 0; first < terms.size(); first += 512) {
    float lanes[16] = {};
    for (std::size_t i = first; i < std::min(terms.size(), first + 512); ++i)
      lanes[i % 16] += terms[i];
    sum += by_halves(Terms(std::begin(lanes), std::end(lanes)));
  }
  return sum;
}

/// In the order that makes intermediate sums largest.
float positive_ones_first(const Terms& terms) {
  Terms sorted = terms;
  std::partition(sorted.begin(), sorted.end(), [](float term) { return term > 0; });
  return one_by_one(sorted);
}

/// As tensor cores: 16 products and the sum so far are cut off below the largest one's last place.
float by_sixteen_cut_off(const Terms& terms) {
  double sum = 0;
  for (std::size_t first = 0; first < terms.size(); first += 16) {
    const std::size_t end = std::min(terms.size(), first + 16);
    double largest = std::fabs(sum);
    for (std::size_t i = first; i < end; ++i)
      largest = std::max(largest, std::fabs(double{terms[i]}));
    if (largest == 0) continue;
    const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
    const auto cut = [unit](double value) { return std::trunc(value / unit) * unit; };
    double next = cut(sum);
    for (std::size_t i = first; i < end; ++i) next += cut(double{terms[i]});
    const double last = std::ldexp(1.0, std::ilogb(std::max(std::fabs(next), unit)) - 23);
    sum = std::trunc(next / last) * last;
  }
  return static_cast<float>(sum);
}

using Sum = std::function<float(const Terms&)>;

Terms widened(DataType type, const Elements& elements) {
  Terms wide;
  for (const std::uint16_t element : elements) wide.push_back(to_float(type, element));
  return wide;
}

std::vector<Sum> all_orders() {
  return {one_by_one,         last_one_first,      by_halves,
          by_lanes_of_blocks, positive_ones_first, by_sixteen_cut_off};
}

struct Problem {
  std::uint32_t nodes = 1, locals = 1;
  std::uint64_t k = 0;
  DataType type = DataType::kBf16;
  std::vector<Elements> a, b;  ///< by rank
  std::uint64_t m = kM;

  std::uint32_t ranks() const { return nodes * locals; }
  /// `judges_mean`: not each element alone.
  GemmReference reference(bool judges_mean) const {
    GemmReference reference(m, kN, nodes, locals, type);
    if (judges_mean) reference.random_inputs();
    for (std::uint32_t rank = 0; rank < ranks(); ++rank)
      reference.add_rank(a[rank].data(), b[rank].data(), k, 1, 1);
    return reference;
  }
  /// The product, without the terms for which `lost(rank, row, column, k)`.
  template <class Lost>
  Elements product(const Sum& sum, const Lost& lost) const {
    std::vector<Terms> wide_a, wide_b;
    for (const Elements& elements : a) wide_a.push_back(widened(type, elements));
    for (const Elements& elements : b) wide_b.push_back(widened(type, elements));
    Elements c;
    for (std::uint64_t row = 0; row < m; ++row) {
      for (std::uint64_t column = 0; column < kN; ++column) {
        float total = 0;
        for (std::uint32_t node = 0; node < nodes; ++node) {
          float of_node = 0;
          for (std::uint32_t local = 0; local < locals; ++local) {
            const std::uint32_t rank = node * locals + local;
            Terms terms;
            terms.reserve(k);
            for (std::uint64_t i = 0; i < k; ++i) {
              if (lost(rank, row, column, i)) continue;
              terms.push_back(wide_a[rank][row * k + i] * wide_b[rank][i * kN + column]);
            }
            of_node += ranks() == 1 ? sum(terms) : rounded(sum(terms));
          }
          total += nodes == 1 ? of_node : rounded(of_node);
        }
        c.push_back(from_float(type, total));
      }
    }
    return c;
  }
  Elements product(const Sum& sum) const {
    return product(sum, [](auto...) { return false; });
  }
  float rounded(float value) const { return to_float(type, from_float(type, value)); }
};

Problem random_problem(std::uint32_t nodes, std::uint32_t locals, std::uint64_t k, DataType type,
                       std::uint64_t seed) {
  Problem problem{nodes, locals, k, type, {}, {}};
  for (std::uint32_t rank = 0; rank < problem.ranks(); ++rank) {
    Elements& a = problem.a.emplace_back(kM * k);
    Elements& b = problem.b.emplace_back(k * kN);
    RandomMatrix{seed, rank * 2, k, type}.rows(0, kM, a.data());
    RandomMatrix{seed, rank * 2 + 1, kN, type}.rows(0, k, b.data());
  }
  return problem;
}

class LongSums : public testing::TestWithParam<std::tuple<std::uint64_t, DataType>> {
 protected:
  static std::uint64_t k() { return std::get<0>(GetParam()); }
  static DataType type() { return std::get<1>(GetParam()); }
};

TEST_P(LongSums, MayBeAddedInAnyOrder) {
  const Problem problem = random_problem(1, 1, k(), type(), 1);
  const GemmReference reference = problem.reference(true);
  for (const Sum& sum : all_orders()) {
    const Comparison found = reference.compare(problem.product(sum).data());
    EXPECT_EQ(kM * kN, found.compared);
    EXPECT_EQ(0u, found.wrong) << "worst " << found.worst_ratio;
    EXPECT_LT(found.squares, found.squares_most / 2);  // head-room
  }
}

// A step of a tensor core's instruction, of all elements: of one rank, and of one among four.
TEST_P(LongSums, MissNoSliceOfSixteen) {
  for (const std::uint32_t side : {1u, 2u}) {
    const Problem problem = random_problem(side, side, k() / (side * side), type(), 2);
    const std::uint64_t slice = problem.k / 32 * 16;
    const Elements c = problem.product(
        one_by_one, [&](std::uint32_t rank, std::uint64_t, std::uint64_t, std::uint64_t i) {
          return rank + 1 == problem.ranks() && i / 16 * 16 == slice;
        });
    const Comparison found = problem.reference(true).compare(c.data());
    EXPECT_EQ(kM * kN, found.wrong) << side;
    EXPECT_GT(found.worst_ratio, 1) << side;
  }
}

// A mean over many elements has room for these. The elements' own bounds show them, but in the
// longest sums.
class LongSumsInPart : public LongSums {};

TEST_P(LongSumsInPart, MissNoSliceOfOneRow) {
  const Problem problem = random_problem(1, 1, k(), type(), 3);
  const Elements c =
      problem.product(one_by_one, [](std::uint32_t, std::uint64_t row, std::uint64_t,
                                     std::uint64_t i) { return row == 5 && i / 16 == 3; });
  const Comparison found = problem.reference(false).compare(c.data());
  EXPECT_GT(found.wrong, kN / 4);
  EXPECT_LE(found.wrong, kN);
  EXPECT_EQ(5u, found.first_wrong / kN);
}

// A stage of 64 of one tile.
TEST_P(LongSumsInPart, MissNoStageOfATile) {
  const Problem problem = random_problem(1, 1, k(), type(), 7);
  const auto in_tile = [](std::uint64_t row, std::uint64_t column) {
    return row / 8 == 1 && column / 8 == 4;
  };
  const Elements c = problem.product(
      one_by_one, [&](std::uint32_t, std::uint64_t row, std::uint64_t column, std::uint64_t i) {
        return in_tile(row, column) && i / 64 == 21;
      });
  const Comparison found = problem.reference(false).compare(c.data());
  EXPECT_GT(found.wrong, 32u);
  EXPECT_TRUE(in_tile(found.first_wrong / kN, found.first_wrong % kN)) << found.first_wrong;
}

const auto kName = [](const testing::TestParamInfo<LongSums::ParamType>& test) {
  return std::to_string(std::get<0>(test.param)) +
         (std::get<1>(test.param) == DataType::kBf16 ? "Bf16" : "F16");
};
INSTANTIATE_TEST_SUITE_P(Lengths, LongSums,
                         testing::Combine(testing::Values(4096, 16384),
                                          testing::Values(DataType::kBf16, DataType::kF16)),
                         kName);
INSTANTIATE_TEST_SUITE_P(Lengths, LongSumsInPart,
                         testing::Combine(testing::Values(4096, 16384),
                                          testing::Values(DataType::kBf16, DataType::kF16)),
                         kName);

// Numbers that are far from random: all of one sign, all equal, and ones that rise and fall slowly.
TEST(LongSumsOfPatterns, AreRight) {
  constexpr std::uint64_t kK = 16384;
  const auto equal = [](std::uint64_t) { return 0.3f; };
  const auto wave = [](std::uint64_t i) {
    return std::sin(6.283185f * static_cast<float>(i) / kK);
  };
  const auto halves = [](std::uint64_t i) { return i < kK / 2 ? 0.7f : -0.7f; };
  const auto last = [](std::uint64_t i) { return i == kK - 1 ? 1.0f : 1e-3f; };
  for (const std::function<float(std::uint64_t)>& pattern :
       {std::function<float(std::uint64_t)>(equal), {wave}, {halves}, {last}}) {
    for (const DataType type : {DataType::kBf16, DataType::kF16}) {
      Problem problem = random_problem(1, 1, kK, type, 4);
      problem.m = 1;
      for (std::uint64_t i = 0; i < kK; ++i) {
        problem.a[0][i] = from_float(type, pattern(i));
        for (std::uint64_t column = 0; column < kN; ++column)
          problem.b[0][i * kN + column] =
              from_float(type, 0.1f + 0.001f * static_cast<float>(column));
      }
      const GemmReference reference = problem.reference(false);
      for (const Sum& sum : all_orders()) {
        const Comparison found = reference.compare(problem.product(sum).data());
        EXPECT_EQ(0u, found.wrong) << "worst " << found.worst_ratio;
      }
    }
  }
}

/// Tokens of one expert, of an inner dimension that the largest models have.
struct Tokens {
  static constexpr std::uint64_t kCount = 24, kTopK = 2;
  std::uint64_t length, columns;
  DataType type;
  Elements rows, weights;  ///< [slot of a token][length], [length][columns]
  Terms wide_rows, wide_weights;

  Tokens(std::uint64_t length_, std::uint64_t columns_, DataType type_, std::uint64_t seed)
      : length(length_),
        columns(columns_),
        type(type_),
        rows(kCount * kTopK * length),
        weights(length * columns) {
    RandomMatrix{seed, 0, length, type}.rows(0, kCount * kTopK, rows.data());
    RandomMatrix{seed, 1, columns, type}.rows(0, length, weights.data());
    wide_rows = widened(type, rows);
    wide_weights = widened(type, weights);
  }
  /// In fp32, one by one, without the terms from `lost` on, 16 of them.
  float product(std::uint64_t row, std::uint64_t column, std::uint64_t lost) const {
    float sum = 0;
    for (std::uint64_t i = 0; i < length; ++i) {
      if (i / 16 != lost / 16)
        sum += wide_rows[row * length + i] * wide_weights[i * columns + column];
    }
    return sum;
  }
  float rounded(float value) const { return to_float(type, from_float(type, value)); }
};
constexpr std::uint64_t kNothingLost = ~std::uint64_t{0};

// A token's sum of weighted products that are rounded to elements, and the sum again.
TEST(LongSumsOfExperts, CombineMissesNoSliceOfSixteen) {
  for (const DataType type : {DataType::kBf16, DataType::kF16}) {
    const Tokens tokens(14336, 48, type, 5);
    for (const std::uint64_t lost : {kNothingLost, std::uint64_t{1600}}) {
      CombineReference reference(
          {2, Tokens::kTopK, tokens.columns, tokens.length, type, false, true});
      Comparison found;
      for (std::uint64_t token = 0; token < Tokens::kCount; ++token) {
        std::vector<std::vector<double>> rows(Tokens::kTopK);
        std::vector<CombineTerm> terms;
        const float weights[] = {0.75f, -0.3f};
        for (std::uint64_t slot = 0; slot < Tokens::kTopK; ++slot) {
          for (std::uint64_t i = 0; i < tokens.length; ++i)
            rows[slot].push_back(
                to_float(type, tokens.rows[(token * Tokens::kTopK + slot) * tokens.length + i]));
          terms.push_back({rows[slot], {}, tokens.weights.data(), weights[slot], {}});
        }
        Elements out;
        for (std::uint64_t column = 0; column < tokens.columns; ++column) {
          float sum = 0;  // over two nodes
          for (std::uint64_t slot = 0; slot < Tokens::kTopK; ++slot)
            sum += tokens.rounded(weights[slot] *
                                  tokens.product(token * Tokens::kTopK + slot, column, lost));
          out.push_back(from_float(type, sum));
        }
        reference.compare(terms, nullptr, out.data(), token * tokens.columns, &found);
      }
      EXPECT_EQ(0u, lost == kNothingLost ? found.wrong : 0u) << "worst " << found.worst_ratio;
      found.judge_mean();
      EXPECT_EQ(Tokens::kCount * tokens.columns, found.in_mean);
      EXPECT_EQ(lost == kNothingLost ? 0 : found.compared, found.wrong);
    }
  }
}

// silu(gate) up, of two products each.
TEST(LongSumsOfExperts, GatedRowsMissNoSliceOfSixteen) {
  for (const DataType type : {DataType::kBf16, DataType::kF16}) {
    const Tokens tokens(16384, 48, type, 6);
    const std::uint64_t features = tokens.columns / 2;
    const MoeJobShape shape{1, 1, 1, 1, tokens.length, features, type, MoeEpilogue::kGatedSilu};
    for (const std::uint64_t lost : {kNothingLost, std::uint64_t{1600}}) {
      Comparison found;
      for (std::uint64_t row = 0; row < Tokens::kCount * Tokens::kTopK; ++row) {
        std::vector<double> exact, off, spread;
        moe_row(shape, tokens.rows.data() + row * tokens.length, tokens.weights.data(), nullptr,
                &exact, &off, &spread);
        for (std::uint64_t i = 0; i < features; ++i) {
          const float gate = tokens.product(row, i, lost);
          const float up = tokens.product(row, features + i, lost);
          const float value = tokens.rounded(gate / (1 + std::exp(-gate)) * up);
          found.add(row * features + i, value, exact[i], off[i], Outcome::finite(),
                    spread[i] * spread[i]);
        }
      }
      EXPECT_EQ(0u, lost == kNothingLost ? found.wrong : 0u) << "worst " << found.worst_ratio;
      found.judge_mean();
      EXPECT_EQ(lost == kNothingLost ? 0 : found.compared, found.wrong);
    }
  }
}

}  // namespace
}  // namespace mk::tools
