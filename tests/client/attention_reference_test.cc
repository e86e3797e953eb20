// The attention reference: right where the answer is known, and with bounds that find what is
// wrong.

#include "client/tools/numeric/attention_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "client/tools/numeric/random_matrix.h"

namespace mk::tools {
namespace {

using Elements = std::vector<std::uint16_t>;

AttentionProblem problem_of(std::uint64_t sequence, bool causal, DataType type) {
  AttentionProblem problem;
  problem.sequence = sequence;
  problem.query_heads = 2;
  problem.head_dim = 64;
  problem.causal = causal;
  problem.scale = 0.125;
  problem.type = type;
  problem.tiles = AttentionProblem::tiles_over(sequence, 4, problem.tile_keys);
  return problem;
}

/// Attention in the most direct way, every query by itself, rounded once at the end. On a GPU the
/// weights of the values are rounded as well.
struct Direct {
  Elements q, k, v, out;
  std::vector<float> lse;

  /// Query i sees the keys for which `sees(i, j)`.
  template <class Sees>
  Direct(const AttentionProblem& problem, Sees&& sees) {
    const std::uint32_t dim = problem.head_dim;
    const std::uint64_t n = problem.sequence;
    const auto draw = [&](std::uint64_t stream, std::uint32_t heads) {
      Elements elements(n * heads * dim);
      RandomMatrix{3, stream, std::uint64_t{heads} * dim, problem.type}.rows(0, n, elements.data());
      return elements;
    };
    q = draw(0, problem.query_heads);
    k = draw(1, problem.key_heads);
    v = draw(2, problem.key_heads);
    const auto value = [&](const Elements& from, std::uint64_t at) {
      return static_cast<double>(to_float(problem.type, from[at]));
    };
    for (std::uint64_t i = 0; i < n; ++i) {
      for (std::uint32_t head = 0; head < problem.query_heads; ++head) {
        double sum = 0, largest = 0;
        std::vector<double> o(dim);
        for (std::uint64_t j = 0; j < n; ++j) {
          if (!sees(i, j)) continue;
          double score = 0;
          for (std::uint32_t d = 0; d < dim; ++d)
            score += value(q, (i * problem.query_heads + head) * dim + d) * value(k, j * dim + d);
          double weight = std::exp(problem.scale * score);
          sum += weight;
          if (problem.on_gpu) {
            // Relative to the largest so far, whichever power of two that is.
            largest = std::max(largest, std::exp2(std::round(problem.scale * score)));
            const auto relative = static_cast<float>(weight / largest);
            weight = double{to_float(problem.type, from_float(problem.type, relative))} * largest;
          }
          for (std::uint32_t d = 0; d < dim; ++d) o[d] += weight * value(v, j * dim + d);
        }
        for (std::uint32_t d = 0; d < dim; ++d)
          out.push_back(from_float(problem.type, static_cast<float>(o[d] / sum)));
        lse.push_back(static_cast<float>(std::log(sum)));
      }
    }
  }

  AttentionReference::Result compare(const AttentionProblem& problem) const {
    return AttentionReference(problem, k.data(), v.data())
        .compare(0, problem.sequence, q.data(), out.data(), lse.data());
  }
};

TEST(AttentionReference, AgreesWithTheDefinition) {
  for (DataType type : {DataType::kBf16, DataType::kF16}) {
    for (bool causal : {false, true}) {
      const AttentionProblem problem = problem_of(90, causal, type);
      const Direct direct(problem,
                          [&](std::uint64_t i, std::uint64_t j) { return !causal || j <= i; });
      const auto result = direct.compare(problem);
      EXPECT_EQ(result.out.wrong, 0u);
      EXPECT_EQ(result.out.compared, 90u * 2 * 64);
      EXPECT_EQ(result.lse.wrong, 0u);
      EXPECT_EQ(result.lse.compared, 90u * 2);
      // Only the last rounding is in it, so it is well inside bounds that allow for more.
      EXPECT_GT(result.out.worst_ratio, 0.05);
      EXPECT_LT(result.out.worst_ratio, 1.0);
    }
  }
}

TEST(AttentionReference, AllowsWeightsRoundedOnAGpuAndThereOnly) {
  for (DataType type : {DataType::kBf16, DataType::kF16}) {
    AttentionProblem problem = problem_of(90, false, type);
    problem.on_gpu = true;
    const Direct direct(problem, [](std::uint64_t, std::uint64_t) { return true; });
    const auto result = direct.compare(problem);
    EXPECT_EQ(result.out.wrong, 0u);
    EXPECT_EQ(result.out.compared, 90u * 2 * 64);
    EXPECT_EQ(result.lse.wrong, 0u);
    EXPECT_GT(result.out.worst_ratio, 0.05);
    problem.on_gpu = false;
    EXPECT_GT(direct.compare(problem).out.wrong, 0u);
  }
}

TEST(AttentionReference, FindsOnAGpuOneKeyTooManyOrTooFewByTheLogSumExp) {
  for (DataType type : {DataType::kBf16, DataType::kF16}) {
    AttentionProblem problem = problem_of(1000, true, type);
    problem.query_heads = 1;
    problem.tile_keys = AttentionProblem::gpu_tile_keys(64);
    problem.on_gpu = true;
    const auto wrong_of_last = [&](auto&& sees) {
      // The last query alone, whose keys are the most.
      const Direct direct(problem, [&](std::uint64_t i, std::uint64_t j) {
        return i + 1 == problem.sequence && sees(j);
      });
      return AttentionReference(problem, direct.k.data(), direct.v.data())
          .compare(999, 1, direct.q.data() + 999 * 64, direct.out.data() + 999 * 64,
                   direct.lse.data() + 999);
    };
    EXPECT_EQ(wrong_of_last([](std::uint64_t) { return true; }).lse.wrong, 0u);
    EXPECT_EQ(wrong_of_last([](std::uint64_t j) { return j != 500; }).lse.wrong, 1u);
    EXPECT_EQ(wrong_of_last([](std::uint64_t j) { return j != 999; }).lse.wrong, 1u);
    // A tile of them: values, too.
    EXPECT_GT(wrong_of_last([](std::uint64_t j) { return j / 128 != 3; }).out.wrong, 0u);
  }
}

// With random values the roundings of weights cancel, and the output itself shows values that are
// not those of their keys. The LSE cannot.
TEST(AttentionReference, FindsOnAGpuWrongValuesOfALongSequence) {
  constexpr std::uint64_t kQueries = 8;
  for (DataType type : {DataType::kBf16, DataType::kF16}) {
    AttentionProblem problem = problem_of(8192, false, type);
    problem.tile_keys = AttentionProblem::gpu_tile_keys(64);
    problem.on_gpu = problem.random = true;
    const std::uint64_t first = problem.sequence - kQueries;
    const Direct direct(problem, [&](std::uint64_t i, std::uint64_t) { return i >= first; });
    const auto compared_with = [&](const Elements& v) {
      const std::uint64_t row = first * problem.query_heads;
      auto result = AttentionReference(problem, direct.k.data(), v.data())
                        .compare(first, kQueries, direct.q.data() + row * 64,
                                 direct.out.data() + row * 64, direct.lse.data() + row);
      result.out.judge_mean();
      return result;
    };
    const auto right = compared_with(direct.v);
    EXPECT_EQ(0u, right.out.wrong);
    EXPECT_EQ(kQueries * 2 * 64, right.out.in_mean);
    EXPECT_LT(right.out.squares, right.out.squares_most / 2);
    Elements other = direct.v;  // 16 keys of 8192 have their neighbours' values
    std::rotate(other.begin() + 64 * 1024, other.begin() + 64 * 1025, other.begin() + 64 * 1040);
    const auto wrong = compared_with(other);
    EXPECT_EQ(wrong.out.compared, wrong.out.wrong);
    EXPECT_EQ(0u, wrong.lse.wrong);
  }
}

TEST(AttentionReference, FindsOnAGpuASwappedRowAndZeros) {
  AttentionProblem problem = problem_of(120, false, DataType::kBf16);
  problem.on_gpu = true;
  const Direct right(problem, [](std::uint64_t, std::uint64_t) { return true; });
  Direct swapped = right;
  std::swap_ranges(swapped.out.begin(), swapped.out.begin() + 64, swapped.out.begin() + 64 * 50);
  EXPECT_GT(swapped.compare(problem).out.wrong, 32u);
  Direct zeros = right;
  std::fill(zeros.out.begin(), zeros.out.end(), std::uint16_t{0});
  EXPECT_GT(zeros.compare(problem).out.wrong, zeros.out.size() / 2);
}

// Each of these is a mistake that a schedule could make.
TEST(AttentionReference, FindsOneKeyTooManyOrTooFewOrTwice) {
  for (DataType type : {DataType::kBf16, DataType::kF16}) {
    const AttentionProblem causal = problem_of(300, true, type);
    const AttentionProblem open = problem_of(300, false, type);
    // The last query alone, whose keys are the most: one in 300 is missing, or one too many.
    const auto wrong_of_last = [](const AttentionProblem& problem, const Direct& direct) {
      const std::uint64_t last = problem.sequence - 1;
      const std::uint64_t row = std::uint64_t{problem.query_heads} * problem.head_dim;
      return AttentionReference(problem, direct.k.data(), direct.v.data())
          .compare(last, 1, direct.q.data() + last * row, direct.out.data() + last * row,
                   direct.lse.data() + last * problem.query_heads);
    };
    const Direct one_less(causal,
                          [](std::uint64_t i, std::uint64_t j) { return j <= i && j != 150; });
    EXPECT_GT(wrong_of_last(causal, one_less).out.wrong, 0u);
    EXPECT_GT(wrong_of_last(causal, one_less).lse.wrong, 0u);
    const Direct shifted(causal, [](std::uint64_t i, std::uint64_t j) { return j < i + (i == 0); });
    EXPECT_GT(wrong_of_last(causal, shifted).out.wrong, 0u);
    const Direct masked(open, [](std::uint64_t i, std::uint64_t j) { return j <= i; });
    EXPECT_GT(masked.compare(open).out.wrong, 300u * 64);
  }
}

TEST(AttentionReference, FindsASwappedRowZerosAndWhatIsNoNumber) {
  const AttentionProblem problem = problem_of(120, false, DataType::kBf16);
  const Direct right(problem, [](std::uint64_t, std::uint64_t) { return true; });
  Direct swapped = right;
  std::swap_ranges(swapped.out.begin(), swapped.out.begin() + 64, swapped.out.begin() + 64 * 50);
  EXPECT_GT(swapped.compare(problem).out.wrong, 64u);
  Direct zeros = right;
  std::fill(zeros.out.begin(), zeros.out.end(), std::uint16_t{0});
  EXPECT_GT(zeros.compare(problem).out.wrong, zeros.out.size() / 2);
  Direct poisoned = right;
  poisoned.out[777] = 0x7fff;
  poisoned.lse[7] = std::numeric_limits<float>::quiet_NaN();
  const auto result = poisoned.compare(problem);
  EXPECT_EQ(result.out.wrong, 1u);
  EXPECT_EQ(result.out.first_wrong, 777u);
  EXPECT_EQ(result.lse.wrong, 1u);
  EXPECT_EQ(result.lse.first_wrong, 7u);
}

// Keys and values that are not finite have their effect on the queries that see them, and none on
// the others.
TEST(AttentionReference, SpecialKeysAndValuesCountForThoseWhoSeeThem) {
  const float infinity = std::numeric_limits<float>::infinity();
  const AttentionProblem problem = problem_of(40, true, DataType::kBf16);
  const Direct plain(problem, [](std::uint64_t i, std::uint64_t j) { return j <= i; });
  const auto set = [&](Elements& tensor, std::uint64_t row, std::uint64_t element, float value) {
    tensor[row * 64 + element] = from_float(DataType::kBf16, value);
  };
  const auto wrong_rows = [&](const Direct& direct) {
    std::vector<std::uint64_t> rows;
    const AttentionReference reference(problem, direct.k.data(), direct.v.data());
    for (std::uint64_t row = 0; row < 40; ++row) {
      const auto result =
          reference.compare(row, 1, direct.q.data() + row * 128, direct.out.data() + row * 128,
                            direct.lse.data() + row * 2);
      if (result.out.wrong + result.lse.wrong != 0) rows.push_back(row);
    }
    return rows;
  };
  ASSERT_TRUE(wrong_rows(plain).empty());

  // A value: one element of the output of each later row.
  Direct special = plain;
  set(special.v, 30, 5, infinity);
  EXPECT_EQ(wrong_rows(special).size(), 10u) << "the rows from 30 on do not have it yet";
  for (std::uint64_t row = 30; row < 40; ++row) {
    for (std::uint64_t head = 0; head < 2; ++head) set(special.out, row * 2 + head, 5, infinity);
  }
  EXPECT_TRUE(wrong_rows(special).empty());
  set(special.out, 70, 5, -infinity);
  set(special.out, 10, 6, infinity);
  EXPECT_EQ(wrong_rows(special), (std::vector<std::uint64_t>{5, 35}));

  // A key: all of it.
  special = plain;
  set(special.k, 39, 0, std::nanf(""));
  EXPECT_EQ(wrong_rows(special), (std::vector<std::uint64_t>{39}));
  std::fill(special.out.begin() + 39 * 128, special.out.end(), std::uint16_t{0x7fc0});
  std::fill(special.lse.begin() + 39 * 2, special.lse.end(), std::nanf(""));
  EXPECT_TRUE(wrong_rows(special).empty());
}

}  // namespace
}  // namespace mk::tools
