// Operators of a session that are not alike take turns in one workspace. It is as large as the
// largest needs it, in any order of creation. Every launch's result is right, although the others
// have left theirs there.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "mkernel/mkernel.h"
#include "tests/client/embedded_ranks.h"
#include "tests/client/unlike_operators.h"

namespace mk {
namespace {

using test::Elements;
using test::RandomProduct;
using testing::AllOf;
using testing::HasSubstr;

class UnlikeOperators : public testing::TestWithParam<EmbeddedWorld> {};

TEST_P(UnlikeOperators, AreRightInAnyOrder) {
  const auto [nodes, locals, fabric, type] = GetParam();
  const std::uint32_t world = nodes * locals;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for_ranks(world, [&, locals = locals, type = type](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "unlike"));
    ASSERT_TRUE(session) << session.error().message;
    const Status right = test::run_unlike_operators(*session, type, seed, 60);
    EXPECT_TRUE(right) << right.error().message;
    EXPECT_TRUE(session->barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnlikeOperators,
                         testing::Values(EmbeddedWorld{1, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{1, 3, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{3, 1, "loopback", DataType::kF16},
                                         EmbeddedWorld{2, 2, "ofi", DataType::kBf16},
                                         EmbeddedWorld{3, 1, "ofi", DataType::kF16}),
                         name_of_world);

/// Ranks as threads: `body(session)` of each.
template <class Body>
void on_ranks(std::uint32_t nodes, std::uint32_t locals, const Body& body) {
  const auto cluster = cluster_of(nodes);
  ASSERT_NE(nullptr, cluster);
  for_ranks(nodes * locals, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "unlike"));
    ASSERT_TRUE(session) << session.error().message;
    body(*session);
  });
}

/// Bytes of workspaces that a rank has, all ranks being threads of this process: of files that are
/// mapped, each once. Collective.
std::uint64_t workspace_bytes(Session& session) {
  EXPECT_TRUE(session.barrier());
  std::map<std::string, std::uint64_t> files;  // by inode
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:") == std::string::npos || line.find(" workspace") == std::string::npos)
      continue;
    std::istringstream fields(line);
    std::string range, rights, offset, device, inode;
    fields >> range >> rights >> offset >> device >> inode;
    const auto dash = range.find('-');
    const std::uint64_t bytes = std::stoull(range.substr(dash + 1), nullptr, 16) -
                                std::stoull(range.substr(0, dash), nullptr, 16);
    files[inode] = std::max<std::uint64_t>(files[inode], bytes + std::stoull(offset, nullptr, 16));
  }
  std::uint64_t sum = 0;
  for (const auto& [inode, bytes] : files) sum += bytes;
  EXPECT_TRUE(session.barrier());
  return sum / session.options().world;
}

// Five shapes of a model's layers, in any order of their sizes: what the largest needs, and words.
TEST(UnlikeOperatorsMemory, FiveShapesNeedTheMemoryOfTheLargest) {
  constexpr std::uint64_t kRows[] = {512, 2048, 1024, 4096, 256};
  constexpr std::uint64_t kWords = 1 << 20;
  for (const bool largest_first : {true, false}) {
    on_ranks(2, 2, [&](Session& session) {
      std::vector<std::uint64_t> rows(std::begin(kRows), std::end(kRows));
      std::ranges::sort(rows);
      if (largest_first) std::ranges::reverse(rows);
      std::uint64_t largest = 0;
      std::uint64_t sum = 0;
      std::vector<GemmAllReduce> layers;
      for (int layer = 0; layer < 64; ++layer) {
        const GemmAllReduce::Shape shape{rows[static_cast<std::size_t>(layer) % rows.size()], 512,
                                         64};
        const auto alone = GemmAllReduce::workspace_bytes(session, shape);
        ASSERT_TRUE(alone);
        largest = std::max(largest, *alone);
        if (layer < 5) sum += *alone;
        auto op = GemmAllReduce::create(session, shape);
        ASSERT_TRUE(op) << op.error().message;
        layers.push_back(std::move(*op));
        if (layer < 10 || layer == 63) {
          EXPECT_LE(workspace_bytes(session), largest + kWords) << "layer " << layer;
        }
      }
      EXPECT_GE(workspace_bytes(session), largest);
      EXPECT_LT(largest + kWords, sum);
      EXPECT_TRUE(session.barrier());
    });
  }
}

TEST(UnlikeOperatorsMemory, WhoKeepsAResultInPlaceSharesWithNone) {
  on_ranks(1, 2, [](Session& session) {
    auto first = GemmAllReduce::create(session, {64, 64, 32});
    auto second = GemmAllReduce::create(session, {96, 64, 32});
    ASSERT_TRUE(first && second);
    EXPECT_EQ(nullptr, first->output());
    EXPECT_EQ(nullptr, second->output());
    GemmAllReduce::Tuning own;
    own.own_workspace = true;
    auto keeper = GemmAllReduce::create(session, {64, 64, 32}, own);
    ASSERT_TRUE(keeper);
    EXPECT_NE(nullptr, keeper->output());
    // Nobody comes into a workspace where somebody has kept something.
    auto alone = GemmAllReduce::create(session, {128, 64, 32}, own);
    ASSERT_TRUE(alone);
    const std::uint64_t before = workspace_bytes(session);
    auto third = GemmAllReduce::create(session, {40, 64, 32});
    ASSERT_TRUE(third);
    EXPECT_GT(before + (64 << 10), workspace_bytes(session)) << "it shares with the first two";
    EXPECT_EQ(nullptr, third->output());
    EXPECT_TRUE(session.barrier());
  });
}

/// Rank 1 launches the second operator where all others launch the first.
void launch_in_different_orders(std::uint32_t nodes, std::uint32_t locals) {
  on_ranks(nodes, locals, [](Session& session) {
    GemmAllReduce::Tuning tuning;
    tuning.wait_timeout = std::chrono::milliseconds(400);
    auto first = GemmAllReduce::create(session, {64, 64, 32}, tuning);
    auto second = GemmReduceScatter::create(session, {96, 64, 32}, tuning);
    ASSERT_TRUE(first && second);
    const Elements a(96 * 32, 0x3f80);
    const Elements b(32 * 64, 0x3f80);
    Elements c(96 * 64);
    ASSERT_TRUE(first->launch(a.data(), b.data(), c.data(), 64, LaunchMode::kFused));
    EXPECT_TRUE(session.barrier());
    if (session.options().rank == 1) {
      const auto late = second->launch(a.data(), b.data(), c.data(), 96, LaunchMode::kFused);
      ASSERT_FALSE(late);
      EXPECT_THAT(late.error().message, AllOf(HasSubstr("gemm_rs"), HasSubstr("rank 0")));
      EXPECT_TRUE(session.barrier());
      return;
    }
    const auto stuck = first->launch(a.data(), b.data(), c.data(), 64, LaunchMode::kFused);
    ASSERT_FALSE(stuck);
    EXPECT_THAT(stuck.error().message,
                AllOf(HasSubstr("gemm_ar"), HasSubstr("rank 1 is in a launch of gemm-rs"),
                      HasSubstr("one order")));
    // The other, which shares with it, is broken, too, and says why.
    const auto broken = second->launch(a.data(), b.data(), c.data(), 96, LaunchMode::kFused);
    ASSERT_FALSE(broken);
    EXPECT_THAT(broken.error().message, HasSubstr("gemm-ar failed"));
    EXPECT_TRUE(session.barrier());
  });
}
TEST(UnlikeOperatorsOrder, DifferentOrdersEndWithBothNamesOnOneNode) {
  launch_in_different_orders(1, 2);
}
TEST(UnlikeOperatorsOrder, DifferentOrdersEndWithBothNamesOverNodes) {
  launch_in_different_orders(2, 1);
}

// After a failure new operators get a workspace where nobody writes.
TEST(UnlikeOperatorsOrder, NewOperatorsWorkAfterAFailure) {
  on_ranks(1, 2, [](Session& session) {
    GemmAllReduce::Tuning tuning;
    tuning.wait_timeout = std::chrono::milliseconds(300);
    auto first = GemmAllReduce::create(session, {64, 64, 32}, tuning);
    ASSERT_TRUE(first);
    const Elements a(96 * 32, 0x3f80);
    const Elements b(32 * 64, 0x3f80);
    Elements c(96 * 64);
    const std::uint64_t m = 40 + session.options().rank;
    EXPECT_FALSE(first->launch(a.data(), b.data(), c.data(), m, LaunchMode::kFused));
    EXPECT_TRUE(session.barrier());
    auto product = RandomProduct::create(session, 50, 64, 40, DataType::kBf16);
    ASSERT_TRUE(product) << product.error().message;
    const Status right = product->launch(session.options(), 1, LaunchMode::kFused);
    EXPECT_TRUE(right) << right.error().message;
    EXPECT_TRUE(session.barrier());
  });
}

}  // namespace
}  // namespace mk
