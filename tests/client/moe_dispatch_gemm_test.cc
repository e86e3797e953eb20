// MoE Dispatch+GEMM through libmkclient against real engines in this process.

#include "mkernel/moe_dispatch_gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/tools/numeric/moe_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel_c.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using Elements = std::vector<std::uint16_t>;

constexpr std::uint64_t kTokens = 50, kHidden = 72, kFeatures = 136;
constexpr std::uint32_t kExperts = 7, kTopK = 3;

/// Every rank's input of a launch. One launch has all tokens on one expert, and one has none.
std::vector<tools::MoeSource> sources_of(std::uint32_t launch, std::uint32_t world, DataType type) {
  std::vector<tools::MoeSource> sources(world);
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    tools::MoeSource& source = sources[rank];
    source.tokens = launch == 1 ? kTokens : tools::mix64(launch * 100 + rank) % (kTokens + 1);
    for (std::uint64_t i = 0; i < source.tokens * kTopK; ++i) {
      const std::uint64_t draw = tools::mix64(launch * 1'000'000 + rank * 10'000 + i);
      auto id = static_cast<std::int32_t>(draw % (kExperts + 1)) - 1;
      if (launch == 2) id = i % kTopK == 0 ? 4 : -1;
      if (launch == 3) id = -1;
      source.ids.push_back(id);
      source.weights.push_back(static_cast<float>(draw % 97) / 97);
    }
    source.values.resize(source.tokens * kHidden);
    tools::RandomMatrix{5, launch * 100 + rank, kHidden, type}.rows(0, source.tokens,
                                                                    source.values.data());
  }
  return sources;
}

Elements weights_of(std::uint32_t expert, DataType type) {
  Elements weights(kHidden * kFeatures);
  tools::RandomMatrix{6, expert, kFeatures, type}.rows(0, kHidden, weights.data());
  return weights;
}

class MoeDispatchWorld : public testing::TestWithParam<EmbeddedWorld> {};

// Fresh inputs, poisoned outputs, every row's origin and every element of every rank.
TEST_P(MoeDispatchWorld, GivesEveryRankTheRowsOfItsExperts) {
  const auto [nodes, locals, fabric, type] = GetParam();
  const std::uint32_t world = nodes * locals;
  constexpr std::uint32_t kLaunches = 7;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  for_ranks(world, [&, nodes = nodes, type = type, locals = locals](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "world"));
    ASSERT_TRUE(session) << session.error().message;
    const std::uint64_t rows_max = world * kTokens * kTopK;
    auto op = MoeDispatchGemm::create(
        *session, {kTokens, kHidden, kFeatures, kExperts, kTopK, rows_max, type});
    ASSERT_TRUE(op) << op.error().message;
    Elements experts;
    for (std::uint32_t i = 0; i < op->expert_count(); ++i) {
      const Elements one = weights_of(op->first_expert() + i, type);
      experts.insert(experts.end(), one.begin(), one.end());
    }
    for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
      const auto sources = sources_of(launch, world, type);
      const tools::MoeSource& mine = sources[rank];
      Elements y(rows_max * kFeatures, 0xffff);
      const auto stats = op->launch(
          {mine.values.data(), mine.ids.data(), mine.weights.data(), mine.tokens, experts.data()},
          {y.data(), rows_max}, launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused);
      ASSERT_TRUE(stats) << stats.error().message;
      EXPECT_EQ(launch + 1, stats->epoch);
      const tools::MoeReference reference(
          {nodes, locals, kExperts, kTopK, kHidden, kFeatures, type}, rank, sources);
      ASSERT_EQ(reference.rows().size(), op->rows().size());
      for (std::size_t row = 0; row < op->rows().size(); ++row) {
        const tools::MoeReference::Row& expected = reference.rows()[row];
        const MoeRow& got = op->rows()[row];
        ASSERT_TRUE(got.rank == expected.rank && got.token == expected.token &&
                    got.slot == expected.slot && got.weight == expected.weight)
            << "launch " << launch << " row " << row;
      }
      for (std::uint32_t i = 0; i < op->expert_count(); ++i) {
        EXPECT_EQ(reference.offset(i), op->expert_offsets()[i]);
        const Elements weights = weights_of(op->first_expert() + i, type);
        EXPECT_EQ(0u, reference.compare(i, weights.data(), y.data()).wrong) << "launch " << launch;
      }
      EXPECT_EQ(op->rows().size(), op->expert_offsets().back());
      const auto beyond = y.begin() + static_cast<std::ptrdiff_t>(op->rows().size() * kFeatures);
      EXPECT_TRUE(std::all_of(beyond, y.end(), [](std::uint16_t v) { return v == 0xffff; }));
    }
    EXPECT_TRUE(session->barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, MoeDispatchWorld, testing::ValuesIn(kEmbeddedWorlds),
                         name_of_world);

TEST(MoeDispatchGemm, WrongArgumentsChangeNothing) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "arguments"));
  ASSERT_TRUE(session);
  using Op = MoeDispatchGemm;
  const auto refused = [&](const Op::Shape& shape, const std::string& part) {
    const auto op = Op::create(*session, shape);
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kInvalidArgument, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find(part)) << op.error().message;
  };
  refused({0, 8, 8, 4, 2}, "tokens_max from 1");
  refused({8, 12, 8, 4, 2}, "multiples of 8");
  refused({8, 8, 8, 4, 5}, "1 to 4 of 4 experts");
  refused({8, 8, 8, 0, 1}, "experts");
  refused({8, 8, 8, 4, 2, 0, static_cast<DataType>(7)}, "bf16 or f16");
  refused({8, 8, 8, 4, 2, 0, DataType::kBf16, BLayout::kKN, static_cast<MoeEpilogue>(3)},
          "no epilogue 3");
  auto op = Op::create(*session, {8, 8, 8, 4, 2});
  ASSERT_TRUE(op) << op.error().message;
  const Elements x(64, 0), weights(4 * 64, 0);
  std::vector<std::int32_t> ids(16, 1);
  const std::vector<float> routing(16, 1.0f);
  Elements y(16 * 8, 0xffff);
  const auto launch = [&](std::uint64_t count, std::uint64_t capacity) {
    return op->launch({x.data(), ids.data(), routing.data(), count, weights.data()},
                      {y.data(), capacity});
  };
  EXPECT_EQ(ErrorCode::kInvalidArgument, launch(9, 16).error().code);
  ids[5] = 4;
  EXPECT_EQ(ErrorCode::kInvalidArgument, launch(8, 16).error().code);
  ids[5] = 1;
  const auto crowded = launch(8, 15);
  ASSERT_FALSE(crowded);
  EXPECT_EQ(ErrorCode::kLimitExceeded, crowded.error().code);
  EXPECT_NE(std::string::npos, crowded.error().message.find("16 rows")) << crowded.error().message;
  EXPECT_EQ(y, Elements(16 * 8, 0xffff));
  EXPECT_TRUE(launch(8, 1000)) << "more room than rows can be is fine";
}

}  // namespace
}  // namespace mk
