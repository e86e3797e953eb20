// Operators of a session that are created alike share one core: its memory, its epochs. What each
// computes stays its own, whatever the others do between its launches.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/all_gather_gemm.h"
#include "mkernel/gemm_all_reduce.h"
#include "mkernel/gemm_combine.h"
#include "mkernel/gemm_reduce_scatter.h"
#include "mkernel/ring_attention.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using testing::HasSubstr;
using Elements = std::vector<std::uint16_t>;

constexpr std::uint64_t kM = 70, kN = 136, kK = 33;

/// A rank's part of launch `launch` of a GEMM+AllReduce, and the check of what came of it.
struct Product {
  std::uint32_t nodes, locals;
  DataType type;
  std::uint32_t launch;

  Elements matrix(std::uint32_t rank, bool b, std::uint64_t rows) const {
    const std::uint64_t columns = b ? kN : kK;
    Elements all(rows * columns);
    tools::RandomMatrix{77, launch * 1000 + rank * 2 + b, columns, type}.rows(0, rows, all.data());
    return all;
  }
  std::uint64_t wrong(const Elements& c) const {
    const std::uint64_t m = c.size() / kN;
    tools::GemmReference reference(m, kN, nodes, locals, type);
    for (std::uint32_t rank = 0; rank < nodes * locals; ++rank)
      reference.add_rank(matrix(rank, false, m).data(), matrix(rank, true, kK).data(), kK, 1, 1);
    return reference.compare(c.data()).wrong;
  }
};

/// Launches and gives C, m x kN.
Result<std::pair<Elements, LaunchStats>> run(GemmAllReduce& op, const Product& product,
                                             std::uint32_t rank, std::uint64_t m) {
  Elements c(m * kN, 0xffff);
  const auto stats =
      op.launch(product.matrix(rank, false, m).data(), product.matrix(rank, true, kK).data(),
                c.data(), m, product.launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused);
  if (!stats) return tl::unexpected(stats.error());
  return std::pair(std::move(c), *stats);
}

/// Mappings of this process: peers' workspaces and buffers are among them.
std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(maps, line);)
    lines += line.find("mkernel") != std::string::npos || line.find("memfd") != std::string::npos;
  return lines;
}

class SharedWorkspace : public testing::TestWithParam<EmbeddedWorld> {};

// Layers of one shape: launches in changing order, of changing m, in both modes. Every element of
// every rank.
TEST_P(SharedWorkspace, EqualOperatorsTakeTurnsInOneCore) {
  const auto [nodes, locals, fabric, type] = GetParam();
  const std::uint32_t world = nodes * locals;
  constexpr std::uint32_t kLayers = 5, kLaunches = 17;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  for_ranks(world, [&, nodes = nodes, locals = locals, type = type](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "layers"));
    ASSERT_TRUE(session) << session.error().message;
    std::vector<GemmAllReduce> layers;
    std::size_t mapped = 0;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      auto op = GemmAllReduce::create(*session, {kM, kN, kK, type});
      ASSERT_TRUE(op) << op.error().message;
      layers.push_back(std::move(*op));
      ASSERT_TRUE(session->barrier());
      if (layer == 0) mapped = mappings();
      ASSERT_TRUE(session->barrier());
    }
    EXPECT_EQ(mapped, mappings());
    for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
      const Product product{nodes, locals, type, launch};
      const auto got = run(layers[launch * launch % kLayers], product, rank, 1 + launch * 23 % kM);
      ASSERT_TRUE(got) << got.error().message;
      EXPECT_EQ(launch + 1, got->second.epoch);
      EXPECT_EQ(0u, product.wrong(got->first)) << "launch " << launch << " rank " << rank;
      // Some go, the rest goes on.
      if (launch == 11) layers.erase(layers.begin() + 1, layers.begin() + 2);
      if (launch == 11) layers.insert(layers.begin(), std::move(layers.back()));
      if (launch == 11)
        layers.back() = std::move(*GemmAllReduce::create(*session, {kM, kN, kK, type}));
    }
    EXPECT_TRUE(session->barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, SharedWorkspace, testing::ValuesIn(kEmbeddedWorlds),
                         name_of_world);

/// Two ranks of one node, each a thread.
template <class Body>
void on_two_ranks(const Body& body) {
  const auto cluster = cluster_of(1);
  ASSERT_NE(nullptr, cluster);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "two"));
    ASSERT_TRUE(session) << session.error().message;
    body(*session, rank);
    EXPECT_TRUE(session->barrier());
  });
}

/// Of the next launch of `op`; it is a right one.
std::uint32_t epoch_of(GemmAllReduce& op, std::uint32_t rank) {
  static constexpr Product kProduct{1, 2, DataType::kBf16, 4};
  const auto got = run(op, kProduct, rank, kM);
  EXPECT_TRUE(got) << got.error().message;
  if (!got) return 0;
  EXPECT_EQ(0u, kProduct.wrong(got->first));
  return got->second.epoch;
}

TEST(SharedWorkspaces, OperatorsThatDifferInAnythingHaveTheirOwn) {
  on_two_ranks([](Session& session, std::uint32_t rank) {
    const GemmAllReduce::Shape shape{kM, kN, kK};
    auto first = GemmAllReduce::create(session, shape);
    ASSERT_TRUE(first);
    EXPECT_EQ(1u, epoch_of(*first, rank));
    std::vector<GemmAllReduce::Tuning> others(4);
    others[0].tile_m = 64;
    others[1].wait_timeout = std::chrono::milliseconds(40'000);
    others[2].count_nonfinite = true;
    others[3].rates.step_ns = 7;
    for (const GemmAllReduce::Tuning& tuning : others) {
      auto op = GemmAllReduce::create(session, shape, tuning);
      ASSERT_TRUE(op);
      EXPECT_EQ(1u, epoch_of(*op, rank));
    }
    GemmAllReduce::Shape larger = shape;
    larger.m_max = kM + 1;
    auto op = GemmAllReduce::create(session, larger);
    ASSERT_TRUE(op);
    EXPECT_EQ(1u, epoch_of(*op, rank));
    EXPECT_EQ(2u, epoch_of(*first, rank));
  });
}

TEST(SharedWorkspaces, WhatStaysInTheWorkspaceIsOneOperatorsAlone) {
  on_two_ranks([](Session& session, std::uint32_t rank) {
    const GemmAllReduce::Shape shape{kM, kN, kK};
    constexpr Product kProduct{1, 2, DataType::kBf16, 1};
    const Elements a = kProduct.matrix(rank, false, kM);
    const Elements b = kProduct.matrix(rank, true, kK);
    // A result is kept before there is an equal operator: that one gets another workspace.
    auto keeper = GemmAllReduce::create(session, shape);
    ASSERT_TRUE(keeper);
    ASSERT_TRUE(keeper->launch(a.data(), b.data(), nullptr, kM));
    auto one = GemmAllReduce::create(session, shape);
    auto two = GemmAllReduce::create(session, shape);
    ASSERT_TRUE(one && two);
    EXPECT_EQ(1u, epoch_of(*one, rank));
    EXPECT_EQ(2u, epoch_of(*two, rank));
    const auto* const kept = static_cast<const std::uint16_t*>(keeper->output());
    ASSERT_NE(nullptr, kept);
    EXPECT_EQ(0u, kProduct.wrong(Elements(kept, kept + kM * kN)));
    // Those that share keep nothing, and say what to do.
    EXPECT_EQ(nullptr, one->output());
    const auto refused = one->launch(a.data(), b.data(), nullptr, kM);
    ASSERT_FALSE(refused);
    EXPECT_EQ(ErrorCode::kInvalidArgument, refused.error().code);
    EXPECT_THAT(refused.error().message, HasSubstr("own_workspace"));
    EXPECT_EQ(3u, epoch_of(*one, rank));
    // The last one left has it to itself again.
    { const auto gone = std::move(*two); }
    EXPECT_NE(nullptr, one->output());
    EXPECT_TRUE(session.barrier());
  });
}

TEST(SharedWorkspaces, AShardInPlaceIsOneOperatorsAlone) {
  on_two_ranks([](Session& session, std::uint32_t) {
    auto first = AllGatherGemm::create(session, {kM, kN, kK});
    auto second = AllGatherGemm::create(session, {kM, kN, kK});
    ASSERT_TRUE(first && second);
    EXPECT_EQ(nullptr, first->input());
    AllGatherGemm::Tuning own;
    own.own_workspace = true;
    auto third = AllGatherGemm::create(session, {kM, kN, kK}, own);
    ASSERT_TRUE(third) << third.error().message;
    EXPECT_NE(nullptr, third->input());
    auto fourth = AllGatherGemm::create(session, {kM, kN, kK}, own);
    ASSERT_TRUE(fourth) << fourth.error().message;
    EXPECT_NE(nullptr, fourth->input());
    EXPECT_NE(third->input(), fourth->input());
  });
}

TEST(SharedWorkspaces, OneRankThatWantsItsOwnIsEnough) {
  on_two_ranks([](Session& session, std::uint32_t rank) {
    const GemmAllReduce::Shape shape{kM, kN, kK};
    auto first = GemmAllReduce::create(session, shape);
    ASSERT_TRUE(first);
    GemmAllReduce::Tuning tuning;
    tuning.own_workspace = rank == 1;
    auto second = GemmAllReduce::create(session, shape, tuning);
    ASSERT_TRUE(second) << second.error().message;
    EXPECT_EQ(1u, epoch_of(*first, rank));
    EXPECT_EQ(1u, epoch_of(*second, rank));
    // Rank 0 has two to choose from, rank 1 one: they still agree.
    auto third = GemmAllReduce::create(session, shape);
    ASSERT_TRUE(third) << third.error().message;
    const std::uint32_t epoch = epoch_of(*third, rank);
    EXPECT_TRUE(epoch == 1 || epoch == 2) << epoch;
    EXPECT_EQ(epoch == 1 ? 2u : 3u, epoch_of(*first, rank));
  });
}

// Ranks drop operators when they like: what one has left and the other has not, is not shared.
TEST(SharedWorkspaces, RanksThatKeepDifferentOperatorsAgreeOnANewOne) {
  on_two_ranks([](Session& session, std::uint32_t rank) {
    const GemmAllReduce::Shape shape{kM, kN, kK};
    std::optional<GemmAllReduce> old;
    for (int round = 0; round < 3; ++round) {
      auto op = GemmAllReduce::create(session, shape);
      ASSERT_TRUE(op) << op.error().message;
      EXPECT_EQ(1u, epoch_of(*op, rank)) << round;
      if (rank == 1) old.emplace(std::move(*op));
    }
  });
}

TEST(SharedWorkspaces, ABrokenCoreGetsNoFurtherOperator) {
  on_two_ranks([](Session& session, std::uint32_t rank) {
    const GemmAllReduce::Shape shape{kM, kN, kK};
    GemmAllReduce::Tuning tuning;
    tuning.wait_timeout = std::chrono::milliseconds(300);
    auto first = GemmAllReduce::create(session, shape, tuning);
    auto second = GemmAllReduce::create(session, shape, tuning);
    ASSERT_TRUE(first && second);
    constexpr Product kProduct{1, 2, DataType::kBf16, 1};
    // Of different m: both fail.
    EXPECT_FALSE(run(*first, kProduct, rank, kM - rank));
    EXPECT_FALSE(run(*second, kProduct, rank, kM));
    EXPECT_TRUE(session.barrier());
    tuning.wait_timeout = std::chrono::milliseconds(300);
    auto third = GemmAllReduce::create(session, shape, tuning);
    ASSERT_TRUE(third) << third.error().message;
    EXPECT_EQ(1u, epoch_of(*third, rank));
  });
}

TEST(SharedWorkspaces, EveryOperatorThatKeepsNothingShares) {
  on_two_ranks([](Session& session, std::uint32_t) {
    const std::size_t before = mappings();
    EXPECT_TRUE(session.barrier());
    auto scatter = GemmReduceScatter::create(session, {kM, kN, kK});
    auto ring = RingAttention::create(session, {256, 2, 2, 64});
    auto combine = GemmCombine::create(session, {16, 64, 64, 4, 2});
    ASSERT_TRUE(scatter && ring && combine);
    EXPECT_TRUE(session.barrier());
    const std::size_t with_one = mappings();
    EXPECT_LT(before, with_one);
    EXPECT_TRUE(session.barrier());
    auto same_scatter = GemmReduceScatter::create(session, {kM, kN, kK});
    auto same_ring = RingAttention::create(session, {256, 2, 2, 64});
    auto same_combine = GemmCombine::create(session, {16, 64, 64, 4, 2});
    ASSERT_TRUE(same_scatter && same_ring && same_combine);
    EXPECT_TRUE(session.barrier());
    EXPECT_GE(with_one, mappings()) << "the daemon may have let smaller ones go meanwhile";
    EXPECT_TRUE(session.barrier());
  });
}

}  // namespace
}  // namespace mk
