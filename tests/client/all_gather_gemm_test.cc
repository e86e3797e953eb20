// AllGather+GEMM through libmkclient against real engines in this process.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/all_gather_gemm.h"
#include "mkernel/mkernel_c.h"
#include "tests/client/gemm_arguments.h"

namespace mk {
namespace {

using Elements = std::vector<std::uint16_t>;

class AllGatherGemmWorld : public testing::TestWithParam<EmbeddedWorld> {};

// Many launches of changing m (also fewer rows than ranks) in both modes, with an n of each rank's
// own: fresh inputs, poisoned outputs, every element of every rank.
TEST_P(AllGatherGemmWorld, GivesEveryRankItsProductOfTheWholeA) {
  const auto [nodes, locals, fabric, type] = GetParam();
  const std::uint32_t world = nodes * locals;
  constexpr std::uint64_t kM = 150, kK = 33;
  constexpr std::uint32_t kLaunches = 7;
  const auto cluster = cluster_of(nodes, fabric);
  ASSERT_NE(nullptr, cluster);
  const auto n_of = [](std::uint32_t rank) { return std::uint64_t{136} + rank * 3; };
  const auto rows_of = [](std::uint32_t launch) { return 1 + launch * 73 % kM; };
  const auto a_of = [&, type = type](std::uint32_t launch) {
    return tools::RandomMatrix{98, launch, kK, type};
  };
  const auto b_of = [&, type = type](std::uint32_t launch, std::uint32_t rank) {
    return tools::RandomMatrix{99, launch * 1000 + rank, n_of(rank), type};
  };

  struct Output {
    Elements c, gathered;
  };
  std::vector<std::vector<Output>> outputs(kLaunches, std::vector<Output>(world));
  for_ranks(world, [&, type = type, locals = locals](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, locals, rank, "world"));
    ASSERT_TRUE(session) << session.error().message;
    AllGatherGemm::Tuning tuning;
    tuning.chunk_bytes = 1024;
    auto op = AllGatherGemm::create(*session, {kM, n_of(rank), kK, type}, tuning);
    ASSERT_TRUE(op) << op.error().message;
    for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
      const std::uint64_t m = rows_of(launch);
      const RowRange rows = AllGatherGemm::rows_of(m, world, rank);
      Elements a(rows.count * kK);
      Elements b(kK * n_of(rank));
      a_of(launch).rows(rows.first, rows.count, a.data());
      const void* shard = a.empty() ? nullptr : a.data();
      // In the operator's memory, in some launches of some ranks.
      if (world > 1 && (launch + rank) % 3 != 0) {
        ASSERT_NE(op->input(), nullptr);
        std::copy(a.begin(), a.end(), static_cast<std::uint16_t*>(op->input()));
        shard = op->input();
      }
      b_of(launch, rank).rows(0, kK, b.data());
      Output& out = outputs[launch][rank];
      out.c.assign(m * n_of(rank), 0xffff);
      if ((launch + rank) % 2 == 0) out.gathered.assign(m * kK, 0xffff);
      const auto stats = op->launch(shard, b.data(), out.c.data(), m,
                                    launch % 3 == 2 ? LaunchMode::kUnfused : LaunchMode::kFused,
                                    out.gathered.empty() ? nullptr : out.gathered.data());
      ASSERT_TRUE(stats) << stats.error().message;
      EXPECT_EQ(launch + 1, stats->epoch);
    }
    EXPECT_TRUE(session->barrier());
  });
  if (HasFailure()) return;
  for (std::uint32_t launch = 0; launch < kLaunches; ++launch) {
    const std::uint64_t m = rows_of(launch);
    Elements a(m * kK);
    a_of(launch).rows(0, m, a.data());
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      Elements b(kK * n_of(rank));
      b_of(launch, rank).rows(0, kK, b.data());
      tools::GemmReference reference(m, n_of(rank), 1, 1, type);
      reference.add_rank(a.data(), b.data(), kK, 1, 1);
      const Output& out = outputs[launch][rank];
      EXPECT_EQ(0u, reference.compare(out.c.data()).wrong)
          << "launch " << launch << " rank " << rank;
      if (!out.gathered.empty()) {
        EXPECT_EQ(a, out.gathered) << "launch " << launch << " rank " << rank;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, AllGatherGemmWorld, testing::ValuesIn(kEmbeddedWorlds),
                         name_of_world);

TEST(AllGatherGemm, RanksThatDisagreeAreNamed) {
  const auto cluster = cluster_of(1);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "disagree"));
    ASSERT_TRUE(session) << session.error().message;
    const auto op = AllGatherGemm::create(*session, {64, 8, 16 + 8 * std::uint64_t{rank}});
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kShapeMismatch, op.error().code);
    EXPECT_NE(std::string::npos, op.error().message.find("k=16")) << op.error().message;
    EXPECT_NE(std::string::npos, op.error().message.find("k=24")) << op.error().message;
    EXPECT_TRUE(session->barrier());
  });
}

TEST(AllGatherGemm, WrongArgumentsChangeNothing) {
  expect_wrong_gemm_arguments_change_nothing<AllGatherGemm>();
}

TEST(AllGatherGemm, FollowsPitchesAndChecksThem) {
  expect_pitches_are_followed_and_checked<AllGatherGemm>();
}

TEST(AllGatherGemm, AppliesItsEpilogue) { expect_an_epilogue<AllGatherGemm>(); }

}  // namespace
}  // namespace mk
