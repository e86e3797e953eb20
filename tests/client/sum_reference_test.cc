#include "client/tools/numeric/sum_reference.h"

#include <gtest/gtest.h>

#include <vector>

#include "client/tools/numeric/random_matrix.h"

namespace mk::tools {
namespace {

using Elements = std::vector<std::uint16_t>;

// The operator's roundings one by one are within the bound, which is not far above them; without
// one summand they are not.
TEST(SumReference, AcceptsTheOperatorsRoundingsAndNothingElse) {
  constexpr std::uint64_t kCount = 4000;
  for (const DataType type : {DataType::kBf16, DataType::kF16}) {
    for (const auto& [nodes, locals] : {std::pair{1u, 1u}, {1u, 8u}, {4u, 1u}, {2u, 4u}}) {
      SumReference reference(kCount, nodes, locals, type);
      std::vector<float> whole(kCount);
      std::vector<float> node(kCount);
      Elements rank(kCount);
      for (std::uint32_t r = 0; r < nodes * locals; ++r) {
        RandomMatrix{3, r, kCount, type}.rows(0, 1, rank.data());
        reference.add_rank(rank.data());
        for (std::uint64_t i = 0; i < kCount; ++i) {
          node[i] += to_float(type, rank[i]);
          if ((r + 1) % locals != 0) continue;
          whole[i] += to_float(type, from_float(type, node[i]));
          node[i] = 0;
        }
      }
      Elements found(kCount);
      for (std::uint64_t i = 0; i < kCount; ++i) found[i] = from_float(type, whole[i]);
      const Comparison right = reference.compare(found.data());
      EXPECT_EQ(kCount, right.compared);
      EXPECT_EQ(0u, right.wrong) << nodes << " x " << locals;
      EXPECT_GE(right.worst_ratio, nodes * locals > 1 ? 0.3 : 0);
      for (std::uint64_t i = 0; i < kCount; ++i)
        found[i] = from_float(type, whole[i] - to_float(type, rank[i]));
      EXPECT_GT(reference.compare(found.data()).wrong, kCount * 9 / 10);
    }
  }
}

TEST(SumReference, FollowsInfinities) {
  const auto f16 = [](float value) { return from_float(DataType::kF16, value); };
  // 60000 twice is beyond f16, and so is each node's sum, unless partials are fp32.
  for (const Partials partials : {Partials::kElement, Partials::kF32}) {
    SumReference reference(1, 2, 2, DataType::kF16, partials);
    for (const float value : {60000.0F, 60000.0F, -60000.0F, -60000.0F}) {
      const std::uint16_t element = f16(value);
      reference.add_rank(&element);
    }
    const std::uint16_t zero = 0;
    const std::uint16_t nan = 0x7e00;
    EXPECT_EQ(partials == Partials::kF32 ? 0u : 1u, reference.compare(&zero).wrong);
    EXPECT_EQ(partials == Partials::kF32 ? 1u : 0u, reference.compare(&nan).wrong);
  }
}

}  // namespace
}  // namespace mk::tools
