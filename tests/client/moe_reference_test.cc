// The float64 reference of MoE Dispatch+GEMM against an example worked by hand, and that it finds
// what it has to find.
#include "client/tools/numeric/moe_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

namespace mk::tools {
namespace {

using Elements = std::vector<std::uint16_t>;

Elements narrow(const std::vector<float>& values) {
  Elements all;
  for (float value : values) all.push_back(from_float(DataType::kBf16, value));
  return all;
}

/// 2 nodes x 2 ranks, 5 experts: ranks 0 to 3 have experts {0}, {1}, {2}, {3, 4}.
constexpr MoeJobShape kShape{2, 2, 5, 2, 2, 1, DataType::kBf16};

std::vector<MoeSource> sources() {
  return {{2, {3, 4, 0, 3}, {0.1f, 0.2f, 0.3f, 0.4f}, narrow({0.5f, 0.25f, 1.0f, 0.0f})},
          {0, {}, {}, {}},
          {1, {4, -1}, {0.5f, 0.6f}, narrow({-0.5f, 0.5f})},
          {2, {2, 4, 3, 4}, {0.7f, 0.8f, 0.9f, 1.0f}, narrow({0.0f, 1.0f, -1.0f, 0.5f})}};
}

TEST(MoeReference, PutsRowsWhereTheExampleHasThem) {
  const auto all = sources();
  const MoeReference reference(kShape, 3, all);
  EXPECT_EQ(reference.first_expert(), 3u);
  EXPECT_EQ(reference.expert_count(), 2u);
  // For rank 3 (node 1, rail 1): itself, rank 2; then node 0: rank 1, rank 0.
  using Row = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, float>;
  const std::vector<Row> expected = {{3, 3, 1, 0, 0.9f}, {3, 0, 0, 0, 0.1f}, {3, 0, 1, 1, 0.4f},
                                     {4, 3, 0, 1, 0.8f}, {4, 3, 1, 1, 1.0f}, {4, 2, 0, 0, 0.5f},
                                     {4, 0, 0, 1, 0.2f}};
  ASSERT_EQ(reference.rows().size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const MoeReference::Row& row = reference.rows()[i];
    EXPECT_EQ(Row(row.expert, row.rank, row.token, row.slot, row.weight), expected[i]) << i;
  }
  EXPECT_EQ(reference.offset(0), 0u);
  EXPECT_EQ(reference.offset(1), 3u);
  EXPECT_EQ(reference.offset(2), 7u);
  EXPECT_TRUE(MoeReference(kShape, 1, all).rows().empty());
}

// The ranks of a node come side by side, 256 tokens of each at a time.
TEST(MoeReference, TakesTheRanksOfANodeInTurn) {
  const MoeSource many{300, std::vector<std::int32_t>(300, 0), std::vector<float>(300, 1.0f), {}};
  const std::vector<MoeSource> all(4, many);
  const MoeReference reference({2, 2, 1, 1, 2, 1, DataType::kBf16}, 3, all);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> expected;
  for (const auto& [one, other] : {std::pair{3u, 2u}, {1u, 0u}}) {
    for (const auto& [begin, end] : {std::pair{0u, 256u}, {256u, 300u}}) {
      for (std::uint32_t rank : {one, other}) {
        for (std::uint32_t token = begin; token < end; ++token) expected.emplace_back(rank, token);
      }
    }
  }
  ASSERT_EQ(reference.rows().size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(std::pair(reference.rows()[i].rank, reference.rows()[i].token), expected[i]) << i;
  }
}

TEST(MoeReference, ComparesEveryElementAndFindsWhatIsWrong) {
  const auto all = sources();
  const MoeReference reference(kShape, 3, all);
  const Elements weights = narrow({0.5f, -1.0f});
  // Rows of expert 3: (-1, .5), (.5, .25), (1, 0); of expert 4: (0, 1), (-1, .5), (-.5, .5),
  // (.5, .25).
  const Elements y = narrow({-1.0f, 0.0f, 0.5f, -1.0f, -1.0f, -0.75f, 0.0f});
  for (std::uint32_t i = 0; i < 2; ++i) {
    const Comparison right = reference.compare(i, weights.data(), y.data());
    EXPECT_EQ(right.wrong, 0u);
    EXPECT_EQ(right.compared, i == 0 ? 3u : 4u);
  }
  Elements wrong = y;
  wrong[5] = from_float(DataType::kBf16, -0.7f);
  EXPECT_EQ(reference.compare(0, weights.data(), wrong.data()).wrong, 0u);
  EXPECT_EQ(reference.compare(1, weights.data(), wrong.data()).wrong, 1u);
  EXPECT_EQ(reference.compare(1, weights.data(), wrong.data()).first_wrong, 5u);
  wrong = y;
  std::swap(wrong[0], wrong[2]);
  EXPECT_EQ(reference.compare(0, weights.data(), wrong.data()).wrong, 2u);
  wrong = y;
  wrong[6] = 0xffff;  // a NaN: never written
  EXPECT_EQ(reference.compare(1, weights.data(), wrong.data()).wrong, 1u);
}

}  // namespace
}  // namespace mk::tools
