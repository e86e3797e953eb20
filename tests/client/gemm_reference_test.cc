#include "client/tools/numeric/gemm_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "client/tools/numeric/random_matrix.h"

namespace mk::tools {
namespace {

using Elements = std::vector<std::uint16_t>;

struct Inputs {
  std::vector<Elements> a, b;
};

Inputs random_inputs(std::uint32_t ranks, std::uint64_t m, std::uint64_t n, std::uint64_t k,
                     DataType type) {
  Inputs inputs;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    Elements a(m * k);
    Elements b(k * n);
    RandomMatrix{7, rank * 2, k, type}.rows(0, m, a.data());
    RandomMatrix{7, rank * 2 + 1, n, type}.rows(0, k, b.data());
    inputs.a.push_back(std::move(a));
    inputs.b.push_back(std::move(b));
  }
  return inputs;
}

// The operator's roundings, done one by one as its description says, in the worst allowed order of
// sums.
Elements rounded_like_the_operator(const Inputs& in, std::uint32_t nodes, std::uint32_t locals,
                                   std::uint64_t m, std::uint64_t n, std::uint64_t k,
                                   DataType type) {
  Elements c(m * n);
  for (std::uint64_t i = 0; i < m; ++i) {
    for (std::uint64_t j = 0; j < n; ++j) {
      float total = 0;
      for (std::uint32_t node = 0; node < nodes; ++node) {
        float sum = 0;
        for (std::uint32_t local = 0; local < locals; ++local) {
          const std::uint32_t rank = node * locals + local;
          float dot = 0;
          for (std::uint64_t x = 0; x < k; ++x) {
            dot += to_float(type, in.a[rank][i * k + x]) * to_float(type, in.b[rank][x * n + j]);
          }
          sum += to_float(type, from_float(type, dot));
        }
        total += to_float(type, from_float(type, sum));
      }
      c[i * n + j] = from_float(type, total);
    }
  }
  return c;
}

struct World {
  std::uint32_t nodes, locals;
  DataType type;
};

class Reference : public testing::TestWithParam<World> {
 protected:
  static constexpr std::uint64_t kM = 17, kN = 40, kK = 65;

  void SetUp() override {
    inputs_ = random_inputs(ranks(), kM, kN, kK, type());
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
      reference_.add_rank(inputs_.a[rank].data(), inputs_.b[rank].data(), kK, 1, 1);
    }
    c_ = product(inputs_);
  }
  static std::uint32_t ranks() { return GetParam().nodes * GetParam().locals; }
  static DataType type() { return GetParam().type; }
  static Elements product(const Inputs& inputs) {
    return rounded_like_the_operator(inputs, GetParam().nodes, GetParam().locals, kM, kN, kK,
                                     type());
  }

  GemmReference reference_{kM, kN, GetParam().nodes, GetParam().locals, type()};
  Inputs inputs_;
  Elements c_;
};

TEST_P(Reference, IsTheSumOfProducts) {
  for (std::uint64_t i = 0; i < kM; ++i) {
    for (std::uint64_t j = 0; j < kN; ++j) {
      long double sum = 0;
      for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
        for (std::uint64_t x = 0; x < kK; ++x) {
          sum += static_cast<long double>(to_float(type(), inputs_.a[rank][i * kK + x])) *
                 to_float(type(), inputs_.b[rank][x * kN + j]);
        }
      }
      ASSERT_NEAR(static_cast<double>(sum), reference_.expected(i * kN + j), 1e-12);
    }
  }
}

TEST_P(Reference, IsTheSameHoweverManyThreadsMultiply) {
  for (const std::uint32_t threads : {2u, 3u, 16u, 17u, 40u}) {
    GemmReference other{kM, kN, GetParam().nodes, GetParam().locals, type()};
    other.use_threads(threads);
    for (std::uint32_t rank = 0; rank < ranks(); ++rank)
      other.add_rank(inputs_.a[rank].data(), inputs_.b[rank].data(), kK, 1, 1);
    for (std::uint64_t i = 0; i < kM * kN; ++i) {
      ASSERT_EQ(reference_.expected(i), other.expected(i)) << threads << " threads, element " << i;
      ASSERT_EQ(reference_.bound(i), other.bound(i)) << threads << " threads, element " << i;
    }
  }
}

TEST_P(Reference, AcceptsTheOperatorsOwnRoundings) {
  const auto comparison = reference_.compare(c_.data());
  EXPECT_EQ(kM * kN, comparison.compared);
  EXPECT_EQ(0u, comparison.wrong);
  EXPECT_GT(comparison.worst_ratio, 0.1);  // the bound is not many times what it has to be
  EXPECT_LE(comparison.worst_ratio, 1.0);
}

TEST_P(Reference, FindsOneElementThatWasNeverWritten) {
  c_[kN * 3 + 5] = 0xffff;
  const auto comparison = reference_.compare(c_.data());
  EXPECT_EQ(1u, comparison.wrong);
  EXPECT_EQ(kN * 3 + 5, comparison.first_wrong);
}

TEST_P(Reference, FindsAMissingRank) {
  for (std::uint32_t lost = 0; lost < ranks(); ++lost) {
    Inputs without = inputs_;
    std::fill(without.a[lost].begin(), without.a[lost].end(), std::uint16_t{0});
    const Elements c = product(without);
    EXPECT_GT(reference_.compare(c.data()).wrong, kM * kN * 8 / 10) << "rank " << lost;
  }
}

TEST_P(Reference, FindsZerosAndSwappedRows) {
  const Elements zeros(kM * kN, 0);
  EXPECT_GT(reference_.compare(zeros.data()).wrong, kM * kN * 8 / 10);
  Elements swapped = c_;
  std::swap_ranges(swapped.begin(), swapped.begin() + kN, swapped.begin() + kN);
  EXPECT_GT(reference_.compare(swapped.data()).wrong, kN);
}

INSTANTIATE_TEST_SUITE_P(Worlds, Reference,
                         testing::Values(World{1, 1, DataType::kBf16}, World{1, 1, DataType::kF16},
                                         World{1, 3, DataType::kBf16}, World{2, 1, DataType::kBf16},
                                         World{2, 3, DataType::kBf16}, World{2, 3, DataType::kF16}),
                         [](const auto& test) {
                           return std::to_string(test.param.nodes) + "x" +
                                  std::to_string(test.param.locals) + name_of(test.param.type);
                         });

TEST(Comparison, ANonFiniteElementIsRightWhereTheReferenceIsTheSame) {
  const double nan = std::nan("");
  struct Case {
    double value, expected;
    bool right;
  };
  for (const auto& [value, expected, right] :
       {Case{nan, nan, true}, Case{HUGE_VAL, HUGE_VAL, true}, Case{-HUGE_VAL, -HUGE_VAL, true},
        Case{nan, 1, false}, Case{1, nan, false}, Case{HUGE_VAL, -HUGE_VAL, false},
        Case{HUGE_VAL, 1, false}, Case{1, HUGE_VAL, false}, Case{nan, HUGE_VAL, false},
        Case{HUGE_VAL, nan, false}}) {
    for (const double bound : {0.0, 1.0, HUGE_VAL}) {
      Comparison comparison;
      comparison.add(0, value, expected, bound);
      EXPECT_EQ(right ? 0u : 1u, comparison.wrong) << value << " for " << expected;
      EXPECT_EQ(right ? 0 : HUGE_VAL, comparison.worst_ratio) << value << " for " << expected;
      EXPECT_EQ(0, comparison.max_error);
    }
  }
  // Where an error decides, either is right, and nothing else.
  const Outcome either = Outcome::finite() | Outcome::infinity(1);
  Comparison comparison;
  comparison.add(0, HUGE_VAL, 65519, 2, either);
  comparison.add(1, 65520, 65519, 2, either);
  EXPECT_EQ(0u, comparison.wrong);
  comparison.add(2, -HUGE_VAL, 65519, 2, either);
  comparison.add(3, nan, 65519, 2, either);
  comparison.add(4, 65522, 65519, 2, either);
  EXPECT_EQ(3u, comparison.wrong);
}

TEST(Outcome, AddsUpLikeNumbers) {
  const double values[] = {1, HUGE_VAL, -HUGE_VAL, std::nan("")};
  for (const double a : values) {
    for (const double b : values) {
      EXPECT_EQ(Outcome::of(a + b), Outcome::of(a) + Outcome::of(b)) << a << " + " << b;
      for (const double c : values) {
        EXPECT_EQ(Outcome::of(a + c) | Outcome::of(b + c),
                  (Outcome::of(a) | Outcome::of(b)) + Outcome::of(c));
      }
    }
  }
  EXPECT_EQ(Outcome::finite(), Outcome::rounded(65519, 0.5, overflow_threshold(DataType::kF16)));
  EXPECT_EQ(Outcome::finite() | Outcome::infinity(-1),
            Outcome::rounded(-65519, 2, overflow_threshold(DataType::kF16)));
  EXPECT_EQ(Outcome::infinity(1), Outcome::rounded(65522, 2, overflow_threshold(DataType::kF16)));
  for (const DataType type : {DataType::kBf16, DataType::kF16}) {
    const auto threshold = static_cast<float>(overflow_threshold(type));
    EXPECT_TRUE(std::isinf(to_float(type, from_float(type, threshold))));
    EXPECT_FALSE(std::isinf(to_float(type, from_float(type, std::nextafter(threshold, 0.0f)))));
  }
}

// Inputs of every kind, partial sums beyond the type's range, and results that only just fit: the
// operator's own roundings are right. A result of another kind is not.
TEST(GemmReference, FollowsInfinitiesAndNaNsThroughTheRoundings) {
  constexpr std::uint64_t kM = 6, kN = 9, kK = 5;
  std::mt19937_64 random(3);
  std::uint64_t kinds[3] = {};  // finite, infinite, NaN
  std::uint64_t refused = 0;
  for (int i = 0; i < 300; ++i) {
    const DataType type = i % 2 == 0 ? DataType::kF16 : DataType::kBf16;
    const auto nodes = static_cast<std::uint32_t>(1 + random() % 3);
    const auto locals = static_cast<std::uint32_t>(1 + random() % 3);
    const float large = type == DataType::kF16 ? 180 : 1.2e19f;  // its square is half the largest
    Inputs inputs = random_inputs(nodes * locals, kM, kN, kK, type);
    double range = 1;
    for (auto* side : {&inputs.a, &inputs.b}) {
      for (Elements& elements : *side) {
        for (std::uint16_t& element : elements) {
          const float value = to_float(type, element);
          switch (random() % (i % 4 < 2 ? 40 : 400)) {
            case 0:
              element = from_float(type, std::nanf(""));
              break;
            case 1:
              element = from_float(type, std::copysign(HUGE_VALF, value));
              break;
            default:
              if (random() % 2 != 0) element = from_float(type, value * large);
          }
          const double magnitude = std::fabs(double{to_float(type, element)});
          if (std::isfinite(magnitude)) range = std::max(range, magnitude);
        }
      }
    }
    GemmReference reference(kM, kN, nodes, locals, type);
    for (std::uint32_t rank = 0; rank < nodes * locals; ++rank) {
      reference.add_rank(inputs.a[rank].data(), inputs.b[rank].data(), kK, range, range);
    }
    Elements c = rounded_like_the_operator(inputs, nodes, locals, kM, kN, kK, type);
    const auto comparison = reference.compare(c.data());
    ASSERT_EQ(0u, comparison.wrong) << "case " << i << ", element " << comparison.first_wrong;
    for (std::uint64_t at = 0; at < kM * kN; ++at) {
      const float value = to_float(type, c[at]);
      ++kinds[std::isnan(value) ? 2 : std::isinf(value) ? 1 : 0];
      const std::uint16_t was = c[at];
      for (const float other : {1.0f, HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
        if (reference.outcome(at).allows(double{other})) continue;
        c[at] = from_float(type, other);
        ASSERT_EQ(1u, reference.compare(c.data()).wrong) << "case " << i << ", element " << at;
        ++refused;
      }
      c[at] = was;
    }
  }
  for (const std::uint64_t count : kinds) EXPECT_GT(count, 500u);
  EXPECT_GT(refused, 20'000u) << "of 64800 that are wrong where one kind is right";
}

// What the public headers say of f16: 40000 and -40000 of two ranks each on two nodes are 80000 and
// -80000, infinite as f16, and their sum is a NaN. On one node it is 0.
TEST(GemmReference, PartialSumsBeyondF16AreInfinite) {
  const std::uint16_t one = from_float(DataType::kF16, 1);
  const std::uint16_t plus = from_float(DataType::kF16, 40000);
  const std::uint16_t minus = from_float(DataType::kF16, -40000);
  const auto result_is = [&](std::uint32_t nodes, std::uint32_t locals, float value) {
    GemmReference reference(1, 1, nodes, locals, DataType::kF16);
    for (const std::uint16_t* a : {&plus, &plus, &minus, &minus})
      reference.add_rank(a, &one, 1, 40000, 1);
    const std::uint16_t c = from_float(DataType::kF16, value);
    return reference.compare(&c).wrong == 0;
  };
  EXPECT_TRUE(result_is(2, 2, std::nanf("")));
  EXPECT_FALSE(result_is(2, 2, 0));
  EXPECT_TRUE(result_is(1, 4, 0));
  EXPECT_FALSE(result_is(1, 4, std::nanf("")));
}

// The whole sum gets its bias, then its activation, then one rounding: what does so in fp32 is
// right, and what is a hundredth off is not.
TEST(GemmReference, FinishesTheSum) {
  constexpr std::uint64_t kM = 4, kN = 8, kK = 6;
  for (int i = 0; i < 40; ++i) {
    const auto activation = static_cast<Activation>(i % 5);
    const bool gated = activation == Activation::kGatedSilu;
    const DataType type = i % 2 == 0 ? DataType::kF16 : DataType::kBf16;
    const std::uint32_t ranks = i / 20 == 0 ? 1 : 4;
    const Inputs inputs = random_inputs(ranks, kM, kN, kK, type);
    const Elements bias = i / 5 % 2 == 0 ? Elements{} : random_inputs(1, 1, kN, kN, type).a[0];
    const std::uint32_t side = ranks > 1 ? 2 : 1;
    GemmReference reference(kM, kN, side, side, type, Partials::kF32);
    for (std::uint32_t rank = 0; rank < ranks; ++rank)
      reference.add_rank(inputs.a[rank].data(), inputs.b[rank].data(), kK, 1, 1);
    reference.finish(activation, bias);
    std::vector<float> sums(kM * kN);
    for (std::uint64_t at = 0; at < kM * kN; ++at) {
      for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        for (std::uint64_t k = 0; k < kK; ++k) {
          sums[at] += to_float(type, inputs.a[rank][at / kN * kK + k]) *
                      to_float(type, inputs.b[rank][k * kN + at % kN]);
        }
      }
      if (!bias.empty()) sums[at] += to_float(type, bias[at % kN]);
    }
    Elements c;
    for (std::uint64_t at = 0; at < kM * kN; at += gated ? 2 : 1) {
      const float s = sums[at];
      const float silu = s / (1 + std::exp(-s));
      const float results[] = {s, std::max(s, 0.0f), 0.5f * s * (1 + std::erf(s * 0.70710678f)),
                               silu, gated ? silu * sums[at + 1] : 0};
      c.push_back(from_float(type, results[i % 5]));
    }
    ASSERT_EQ(0u, reference.compare(c.data()).wrong) << "case " << i;
    std::uint64_t refused = 0;
    for (std::uint16_t& element : c) {
      const std::uint16_t was = element;
      const float right = to_float(type, was);
      element = from_float(type, right + std::copysign(std::fabs(right) * 0.05f + 0.01f, right));
      refused += reference.compare(c.data()).wrong;
      element = was;
    }
    EXPECT_EQ(refused, c.size()) << "case " << i;
  }
}

TEST(Comparison, CountsWhatIsOutsideItsBoundAndKeepsTheFirst) {
  Comparison comparison;
  comparison.add(0, 1.0, 1.0, 0);
  comparison.add(1, 1.5, 1.0, 1.0);
  EXPECT_EQ(0u, comparison.wrong);
  EXPECT_EQ(0.5, comparison.worst_ratio);
  comparison.add(2, 1.5, 1.0, 0.25);
  comparison.add(3, std::nan(""), 1.0, 10);
  comparison.add(4, HUGE_VAL, 1.0, 10);
  comparison.add(5, 1.0, 0.0, 0);
  EXPECT_EQ(6u, comparison.compared);
  EXPECT_EQ(4u, comparison.wrong);
  EXPECT_EQ(2u, comparison.first_wrong);
  EXPECT_EQ(HUGE_VAL, comparison.worst_ratio);
  Comparison all;
  all.add(9, 1.0, 1.0, 1.0);
  all.add(comparison);
  EXPECT_EQ(7u, all.compared);
  EXPECT_EQ(4u, all.wrong);
  EXPECT_EQ(2u, all.first_wrong);
}

TEST(RandomMatrixRows, AreTheSameFromWhereverOneStarts) {
  const RandomMatrix matrix{1, 2, 33, DataType::kBf16};
  Elements all(33 * 20);
  matrix.rows(0, 20, all.data());
  for (std::uint64_t first = 0; first < 20; ++first) {
    Elements row(33);
    matrix.rows(first, 1, row.data());
    EXPECT_TRUE(
        std::equal(row.begin(), row.end(), all.begin() + static_cast<std::ptrdiff_t>(first * 33)));
  }
}

TEST(RandomMatrixRows, DifferByStreamAndSeedAndStayInRange) {
  Elements first(1000);
  Elements second(1000);
  Elements third(1000);
  RandomMatrix{1, 2, 1000, DataType::kBf16}.rows(0, 1, first.data());
  RandomMatrix{1, 3, 1000, DataType::kBf16}.rows(0, 1, second.data());
  RandomMatrix{2, 2, 1000, DataType::kBf16}.rows(0, 1, third.data());
  EXPECT_NE(first, second);
  EXPECT_NE(first, third);
  for (const std::uint16_t bits : first)
    EXPECT_LE(std::fabs(to_float(DataType::kBf16, bits)), 1.0f);
}

}  // namespace
}  // namespace mk::tools
