#include "tests/bench/mkbench/moe_routing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace mk::bench {
namespace {

constexpr std::uint32_t kRanks = 4;
constexpr std::uint64_t kTokens = 4096;

struct Drawn {
  std::vector<std::int32_t> ids;
  std::vector<double> share;  ///< of the tokens, by expert
};

Drawn draw(const std::string& name, std::uint32_t experts, std::uint32_t top_k,
           std::uint64_t seed = 7) {
  BenchSpec spec;
  spec.seed = seed;
  const MoeRouting routing(name, kTokens, experts, top_k, kRanks, seed);
  Drawn drawn;
  drawn.share.resize(experts);
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    tools::MoeSource source;
    routing.draw(spec, 3, rank, &source);
    EXPECT_EQ(source.ids.size(), kTokens * top_k);
    EXPECT_TRUE(std::all_of(source.weights.begin(), source.weights.end(),
                            [](float weight) { return weight >= 0 && weight < 1; }));
    drawn.ids.insert(drawn.ids.end(), source.ids.begin(), source.ids.end());
  }
  for (const std::int32_t id : drawn.ids)
    if (id >= 0) drawn.share[static_cast<std::size_t>(id)] += 1.0 / (kTokens * kRanks);
  return drawn;
}

class MoeRoutings : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Names, MoeRoutings, testing::ValuesIn(MoeRouting::names()),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(MoeRoutings, ExpertsOfATokenAreDifferentAndThere) {
  for (const auto& [experts, top_k] :
       {std::pair(64u, 8u), std::pair(8u, 2u), std::pair(8u, 8u), std::pair(5u, 1u)}) {
    const Drawn drawn = draw(GetParam(), experts, top_k);
    for (std::size_t first = 0; first < drawn.ids.size(); first += top_k) {
      std::set<std::int32_t> seen;
      for (std::uint32_t slot = 0; slot < top_k; ++slot) {
        const std::int32_t id = drawn.ids[first + slot];
        ASSERT_GE(id, GetParam() == "hot" ? -1 : 0);
        ASSERT_LT(id, static_cast<std::int32_t>(experts));
        ASSERT_TRUE(id < 0 || seen.insert(id).second) << "an expert twice, slot " << first + slot;
      }
    }
  }
}

TEST_P(MoeRoutings, TheSeedDecides) {
  EXPECT_EQ(draw(GetParam(), 64, 8).ids, draw(GetParam(), 64, 8).ids);
  EXPECT_NE(draw(GetParam(), 64, 8).ids, draw(GetParam(), 64, 8, 8).ids);
}

TEST(MoeRouting, UniformIsEven) {
  for (const double share : draw("uniform", 64, 8).share) EXPECT_NEAR(share, 8.0 / 64, 0.015);
}

// With one expert a token there is no rejection: the shares are 1 / n over their sum.
TEST(MoeRouting, ZipfFallsAsOneOverN) {
  std::vector<double> share = draw("zipf", 32, 1).share;
  EXPECT_FALSE(std::is_sorted(share.rbegin(), share.rend())) << "the order is not drawn";
  std::sort(share.rbegin(), share.rend());
  double sum = 0;
  for (int n = 1; n <= 32; ++n) sum += 1.0 / n;
  for (int n = 1; n <= 32; ++n) EXPECT_NEAR(share[n - 1], 1 / (n * sum), 0.01) << n;
}

TEST(MoeRouting, HotIsInEveryToken) {
  const Drawn drawn = draw("hot", 64, 8);
  EXPECT_DOUBLE_EQ(std::round(drawn.share[0] * 1e9), 1e9);
  const auto nowhere = std::count(drawn.ids.begin(), drawn.ids.end(), -1);
  EXPECT_NEAR(static_cast<double>(nowhere), kTokens * kRanks * 7 / 16.0, 500);
}

TEST(MoeRouting, HotRankHasHalfOfAllAtLeast) {
  const std::vector<double> share = draw("hot-rank", 64, 8).share;
  double of_rank_0 = 0;
  for (int expert = 0; expert < 16; ++expert) of_rank_0 += share[expert];
  // Of the other four, each is likely rank 0's as 12 of 60 are.
  EXPECT_NEAR(of_rank_0, 4 + 4 * 12.0 / 60, 0.05);
}

TEST(MoeRouting, TokensOfADocumentPreferTheSame) {
  const auto distinct = [](const Drawn& drawn) {
    return std::set<std::int32_t>(drawn.ids.begin(), drawn.ids.begin() + 16 * 8).size();
  };
  // 16 tokens of one document: 16 experts have three quarters of what would else be spread over
  // 256.
  EXPECT_LT(distinct(draw("correlated", 256, 8)), 60u);
  EXPECT_GT(distinct(draw("uniform", 256, 8)), 80u);
}

}  // namespace
}  // namespace mk::bench
