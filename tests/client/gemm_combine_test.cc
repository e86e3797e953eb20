// GEMM+Combine through libmkclient against real engines in this process, with what MoE
// Dispatch+GEMM leaves there.

#include "mkernel/gemm_combine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/tools/numeric/combine_reference.h"
#include "client/tools/numeric/moe_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using Elements = std::vector<std::uint16_t>;

constexpr std::uint64_t kTokens = 30, kModel = 72, kInner = 40;
constexpr std::uint32_t kExperts = 7, kTopK = 3;

/// One rank's tokens of a launch. One launch has all tokens on one expert, one has none.
struct Tokens {
  std::uint64_t count = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  Elements values, residual;
};

Tokens tokens_of(std::uint32_t launch, std::uint32_t rank, DataType type) {
  Tokens tokens;
  tokens.count = launch == 1 ? kTokens : tools::mix64(launch * 100 + rank) % (kTokens + 1);
  for (std::uint64_t i = 0; i < tokens.count * kTopK; ++i) {
    const std::uint64_t draw = tools::mix64(launch * 1'000'000 + rank * 10'000 + i);
    auto id = static_cast<std::int32_t>(draw % (kExperts + 1)) - 1;
    if (launch == 2) id = 4;
    if (launch == 3) id = -1;
    tokens.ids.push_back(id);
    tokens.weights.push_back(static_cast<float>(draw % 97) / 97);
  }
  tokens.values.resize(tokens.count * kModel);
  tools::RandomMatrix{5, launch * 100 + rank, kModel, type}.rows(0, tokens.count,
                                                                 tokens.values.data());
  tokens.residual.resize(tokens.count * kModel);
  tools::RandomMatrix{9, launch * 100 + rank, kModel, type}.rows(0, tokens.count,
                                                                 tokens.residual.data());
  return tokens;
}

Elements weights_of(std::uint32_t expert, std::uint64_t rows, std::uint64_t columns,
                    DataType type) {
  Elements weights(rows * columns);
  tools::RandomMatrix{6 + rows, expert, columns, type}.rows(0, rows, weights.data());
  return weights;
}
/// Gates and up projections, or up projections alone.
Elements up_of(std::uint32_t expert, DataType type, MoeEpilogue epilogue) {
  return weights_of(expert, kModel, epilogue == MoeEpilogue::kNone ? kInner : 2 * kInner, type);
}
Elements down_of(std::uint32_t expert, DataType type) {
  return weights_of(expert, kInner, kModel, type);
}

class CombineWorld : public testing::TestWithParam<EmbeddedWorld> {};

// A whole layer, fresh inputs at each launch: every element of every token, with each epilogue and
// partials of both kinds.
TEST_P(CombineWorld, BringsEveryTokenTheSumOfWhatItsExpertsMadeOfIt) {
  const auto [nodes, locals, fabric, type] = GetParam();
  const std::uint32_t world = nodes * locals;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  for_ranks(world, [&, nodes = nodes, type = type, locals = locals](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "world"));
    ASSERT_TRUE(session) << session.error().message;
    constexpr MoeEpilogue kEpilogues[] = {MoeEpilogue::kNone, MoeEpilogue::kGatedSilu,
                                          MoeEpilogue::kGatedSiluInterleaved};
    for (std::uint32_t turn = 0; turn < 3; ++turn) {
      const MoeEpilogue epilogue = kEpilogues[turn];
      const Partials partials = turn % 2 == 0 ? Partials::kElement : Partials::kF32;
      auto dispatch = MoeDispatchGemm::create(
          *session, {kTokens, kModel, kInner, kExperts, kTopK, 0, type, BLayout::kKN, epilogue});
      ASSERT_TRUE(dispatch) << dispatch.error().message;
      Elements up, down;
      for (std::uint32_t i = 0; i < dispatch->expert_count(); ++i) {
        const Elements one = up_of(dispatch->first_expert() + i, type, epilogue);
        up.insert(up.end(), one.begin(), one.end());
        const Elements other = down_of(dispatch->first_expert() + i, type);
        down.insert(down.end(), other.begin(), other.end());
      }
      auto combine = GemmCombine::create(
          *session, {kTokens, kModel, kInner, kExperts, kTopK, type, BLayout::kKN, partials});
      ASSERT_TRUE(combine) << combine.error().message;
      EXPECT_EQ(dispatch->first_expert(), combine->first_expert());
      EXPECT_EQ(dispatch->expert_count(), combine->expert_count());
      for (std::uint32_t launch = 0; launch < 5; ++launch) {
        const Tokens mine = tokens_of(launch, rank, type);
        const std::uint64_t room = world * kTokens * kTopK;
        Elements y(room * kInner, 0xffff);
        Elements out(mine.count * kModel, 0xffff);
        const bool residual = launch % 2 == 0;
        const auto mode = launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused;
        ASSERT_TRUE(dispatch->launch(
            {mine.values.data(), mine.ids.data(), mine.weights.data(), mine.count, up.data()},
            {y.data(), room}, mode));
        const auto stats = combine->launch(
            {y.data(), dispatch->rows(), dispatch->expert_offsets(), down.data(), mine.ids.data(),
             mine.count, residual ? mine.residual.data() : nullptr},
            out.data(), mode);
        ASSERT_TRUE(stats) << stats.error().message;
        EXPECT_EQ(launch + 1, stats->epoch);
        tools::CombineReference reference(
            {nodes, kTopK, kModel, kInner, type, partials == Partials::kF32});
        tools::Comparison comparison;
        for (std::uint64_t token = 0; token < mine.count; ++token) {
          std::vector<tools::CombineTerm> terms;
          std::vector<std::vector<double>> rows(kTopK), offs(kTopK);
          std::vector<Elements> weights(kTopK);
          for (std::uint32_t slot = 0; slot < kTopK; ++slot) {
            const std::int32_t id = mine.ids[token * kTopK + slot];
            if (id < 0) continue;
            const auto expert = static_cast<std::uint32_t>(id);
            tools::moe_row({nodes, locals, kExperts, kTopK, kModel, kInner, type, epilogue},
                           mine.values.data() + token * kModel,
                           up_of(expert, type, epilogue).data(), nullptr, &rows[slot], &offs[slot]);
            weights[slot] = down_of(expert, type);
            terms.push_back(
                {rows[slot], offs[slot], weights[slot].data(), mine.weights[token * kTopK + slot]});
          }
          reference.compare(terms, residual ? mine.residual.data() + token * kModel : nullptr,
                            out.data() + token * kModel, token * kModel, &comparison);
        }
        EXPECT_EQ(0u, comparison.wrong)
            << "launch " << launch << ", worst " << comparison.worst_ratio;
      }
    }
    EXPECT_TRUE(session->barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CombineWorld, testing::ValuesIn(kEmbeddedWorlds), name_of_world);

TEST(GemmCombine, WrongArgumentsChangeNothing) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "arguments"));
  ASSERT_TRUE(session);
  using Op = GemmCombine;
  const auto refused = [&](const Op::Shape& shape, const std::string& part) {
    const auto op = Op::create(*session, shape);
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kInvalidArgument, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find(part)) << op.error().message;
  };
  refused({0, 8, 8, 4, 2}, "tokens_max from 1");
  refused({8, 12, 8, 4, 2}, "multiples of 8");
  refused({8, 8, 8, 4, 5}, "1 to 4 of 4 experts");
  refused({8, 8, 8, 4, 2, static_cast<DataType>(7)}, "bf16 or f16");
  refused({8, 8, 8, 4, 2, DataType::kBf16, BLayout::kKN, static_cast<Partials>(2)},
          "in fp32 (1), not as 2");
  auto op = Op::create(*session, {8, 8, 8, 2, 1});
  ASSERT_TRUE(op) << op.error().message;
  const Elements y(16, 0x3f80), weights(2 * 64, 0x3f80);
  const std::vector<MoeRow> rows = {{0, 1, 0, 0.5f}, {0, 0, 0, 2.0f}};
  const std::vector<std::uint32_t> offsets = {0, 1, 2};
  std::vector<std::int32_t> ids = {1, 0};
  Elements out(16, 0xffff);
  const auto launch = [&](std::uint64_t count, std::span<const MoeRow> of) {
    return op->launch({y.data(), of, offsets, weights.data(), ids.data(), count}, out.data());
  };
  EXPECT_EQ(ErrorCode::kInvalidArgument, launch(9, rows).error().code);
  EXPECT_EQ(ErrorCode::kInvalidArgument, launch(2, {rows.data(), 1}).error().code);
  EXPECT_EQ(out, Elements(16, 0xffff));
  // What a dispatch without room leaves.
  const auto none = launch(2, {});
  ASSERT_FALSE(none);
  EXPECT_EQ(ErrorCode::kLimitExceeded, none.error().code);
  EXPECT_NE(std::string::npos, none.error().message.find("2 rows")) << none.error().message;
  ids = {1, 1};
  const auto other = launch(2, rows);
  ASSERT_FALSE(other);
  EXPECT_EQ(ErrorCode::kInvalidArgument, other.error().code);
  EXPECT_EQ(out, Elements(16, 0xffff));
  ids = {1, 0};
  ASSERT_TRUE(launch(2, rows));
  for (std::size_t i = 0; i < 16; ++i)
    EXPECT_EQ(i < 8 ? 16.0f : 4.0f, tools::bf16_to_float(out[i])) << i;
}

}  // namespace
}  // namespace mk
