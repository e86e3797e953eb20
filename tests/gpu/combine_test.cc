// GEMM+Combine on GPUs, one kernel per rank. Every element is compared with float64, at any skew,
// and has the same bits in every run. Launches come without a pause and from graphs. Handles do not
// fit, or were left by a Dispatch+GEMM without room. Ranks are missing. The whole layer runs, too,
// both kernels one after the other.
#include <string>
#include <vector>

#include "tests/gpu/combine_ranks.h"
#include "tests/gpu/graphs.h"
#include "tests/gpu/routed_fixture.h"

namespace mk::test {
namespace {

using kernels::BLayout;
using kernels::CombinePartials;
using kernels::CombineShape;
using kernels::DType;
using kernels::Mode;
using kernels::MoeEpilogue;
using kernels::testing::kSkews;
using kernels::testing::Skew;
using testing::HasSubstr;

constexpr CombinePartials kElement = CombinePartials::kElement;
constexpr CombinePartials kF32 = CombinePartials::kF32;

class CombineOnGpus : public RoutedOnGpus<CombineSetup, CombineRanks> {
 protected:
  /// Each rank's error; all outputs are as they were.
  std::vector<std::string> refused(CombineRanks& ranks, ErrorCode code) {
    std::vector<std::string> texts;
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      const Status finished = ranks.finish(r);
      EXPECT_FALSE(finished) << "rank " << r;
      texts.push_back(finished ? "" : finished.error().message);
      if (!finished) {
        EXPECT_EQ(finished.error().code, code) << texts.back();
      }
      EXPECT_TRUE(ranks.untouched(r)) << "rank " << r;
    }
    return texts;
  }
};

/// E a multiple of W and not, fewer experts than ranks, every expert of each token; sides that are
/// multiples of 8 and of no tile; every skew, with different numbers of tokens, and with none.
TEST_P(CombineOnGpus, EveryElementOfManyRoutings) {
  struct Case {
    CombineShape shape;  // T, H, I, E, k
    DType dtype = DType::kBf16;
    BLayout layout = BLayout::kNK;
  };
  for (const Case& one :
       {Case{{300, 264, 136, 5, 2, kElement}}, Case{{130, 520, 512, 16, 4, kF32}},
        Case{{64, 24, 72, 3, 3, kElement}, DType::kBf16, BLayout::kKN},
        Case{{600, 264, 1032, 32, 8, kElement}}, Case{{200, 640, 96, 40, 40, kElement}},
        Case{{200, 328, 200, 12, 6, kElement}, DType::kF16}}) {
    CombineSetup with = setup(one.shape);
    with.dtype = one.dtype;
    with.options.b_layout = one.layout;
    if (!with.has_kernel()) continue;
    CombineRanks ranks(with);
    int turn = 0;
    for (const Skew skew : kSkews) {
      SCOPED_TRACE("E " + std::to_string(one.shape.experts) + ", skew " +
                   std::to_string(static_cast<int>(skew)));
      ranks.fill(draw(ranks, skew, turn % 3 != 0), fresh_seed(), turn % 2 != 0);
      check(ranks, turn % 4 == 3 ? Mode::kUnfused : Mode::kFused);
      if (HasFatalFailure()) return;
      ++turn;
    }
    ranks.fill(JobRouting(world()), fresh_seed());
    check(ranks);
    if (HasFatalFailure()) return;
  }
}

/// Few tiles and all roles: what compute-sanitizer can run.
TEST_P(CombineOnGpus, SmallShapes) {
  for (const CombinePartials partials : {kElement, kF32}) {
    CombineSetup with = setup(CombineShape{40, 48, 64, 4, 2, partials});
    with.options.wait_timeout = 20s;
    CombineRanks ranks(with);
    for (const Skew skew : {Skew::kUniform, Skew::kSparse}) {
      ranks.fill(draw(ranks, skew, true), fresh_seed(), skew == Skew::kSparse);
      check(ranks);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CombineOnGpus, SmallChunks) {
  CombineSetup with = setup(CombineShape{500, 72, 136, 9, 3, kElement});
  with.chunk_bytes = 1024;
  check_dawdling(with);
}

TEST_P(CombineOnGpus, ANanStaysInItsToken) {
  for (const CombinePartials partials : {kElement, kF32}) {
    CombineRanks ranks(setup(CombineShape{260, 96, 192, 6, 2, partials}));
    for (int turn = 0; turn < 3; ++turn) {
      ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
      ASSERT_NE(ranks.spoil_row(static_cast<std::uint32_t>(random_() % world())), ~0u);
      check(ranks);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CombineOnGpus, SameBitsInEveryRun) {
  CombineRanks ranks(setup(CombineShape{500, 520, 264, 11, 4, kElement}));
  const JobRouting routing = draw(ranks, Skew::kUniform, true);
  check_same_bits(ranks, [&](std::uint64_t seed) { ranks.fill(routing, seed, true); });
}

TEST_P(CombineOnGpus, AThousandLaunchesWithoutAPause) {
  check_without_a_pause(setup(CombineShape{300, 64, 128, 10, 3, kElement}), 250,
                        [](CombineRanks& ranks, const JobRouting& routing, std::uint32_t set) {
                          ranks.fill(routing, 5, false, set);
                        });
}

/// Both kernels of each rank in one graph, which is replayed with fresh routing.
TEST_P(CombineOnGpus, TheWholeLayerAsAGraph) {
  MoeSetup dispatch;
  dispatch.nodes = GetParam().nodes;
  dispatch.locals = GetParam().locals;
  dispatch.devices = GetParam().devices;
  dispatch.shape = {200, 256, 136, 8, 2, 0, MoeEpilogue::kGatedSilu};
  dispatch.options.wait_timeout = 10s;
  MoeRanks moe(dispatch);
  CombineRanks ranks(setup(CombineShape{200, 256, 136, 8, 2, kElement}));
  JobRouting routing = draw(ranks, Skew::kUniform, false);
  moe.fill(routing, fresh_seed());
  ranks.take(moe, routing);
  // The ids that combine looks at are those that were dispatched.
  Graphs graphs;
  const Status captured = graphs.capture_all(moe, [&](std::uint32_t r) -> Status {
    MK_RETURN_IF_ERROR(moe.launch(r));
    return ranks.launch(r, Mode::kFused, 0, moe.stream(r));
  });
  ASSERT_TRUE(captured) << captured.error().message;
  for (std::uint32_t replay = 0; replay < 6; ++replay) {
    SCOPED_TRACE("replay " + std::to_string(replay));
    routing = draw(ranks, kSkews[replay % std::size(kSkews)], false);
    moe.fill(routing, fresh_seed());
    ranks.renew_ids(routing);
    graphs.replay_all(moe);
    for (std::uint32_t r = 0; r < world(); ++r) {
      auto dispatched = moe.op(r).finish(moe.stream(r));
      ASSERT_TRUE(dispatched) << dispatched.error().message;
      auto combined = ranks.op(r).finish(moe.stream(r));
      ASSERT_TRUE(combined) << combined.error().message;
      ASSERT_EQ(combined->epoch, replay + 1);
    }
    for (std::uint32_t r = 0; r < world(); ++r) ASSERT_EQ(moe.judge(r), "");
    judge_all(ranks);
    if (HasFatalFailure()) return;
  }
}

/// A rank whose Dispatch+GEMM had no room: every rank's combine fails and names it; the next
/// launch is right.
TEST_P(CombineOnGpus, ADispatchWithoutRoomFailsEveryRanksCombine) {
  CombineRanks ranks(setup(CombineShape{300, 64, 128, 10, 3, kElement}));
  for (int turn = 0; turn < 3; ++turn) {
    ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
    const auto full = static_cast<std::uint32_t>(random_() % world());
    const kernels::CombineDeviceInput right = ranks.input(full);
    ASSERT_GT(right.room, 0u);
    --ranks.input(full).room;
    launch_all(ranks, Mode::kFused, true);
    const std::vector<std::string> texts = refused(ranks, ErrorCode::kLimitExceeded);
    for (std::uint32_t r = 0; r < world(); ++r) {
      const std::string named = r == full
                                    ? "no room for its " + std::to_string(right.room) + " rows"
                                    : "rank " + std::to_string(full) + " has no rows to combine";
      EXPECT_THAT(texts[r], HasSubstr(named));
    }
    ranks.input(full) = right;
    check(ranks);
    if (HasFatalFailure()) return;
  }
}

/// Rows of another routing than the ids: whose tokens they are not says so.
TEST_P(CombineOnGpus, HandlesThatDoNotFitAreRefused) {
  CombineSetup with = setup(CombineShape{200, 64, 128, 10, 3, kElement});
  with.sets = 2;
  CombineRanks ranks(with);
  for (int turn = 0; turn < 2; ++turn) {
    ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed(), false, 0);
    ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed(), false, 1);
    const kernels::CombineDeviceInput right = ranks.input(0);
    ranks.input(0).ids = ranks.input(0, 1).ids;
    launch_all(ranks, Mode::kFused, true);
    const Status finished = ranks.finish(0);
    ASSERT_FALSE(finished);
    EXPECT_EQ(finished.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(finished.error().message, HasSubstr("are not those of this rank's 200 tokens"));
    EXPECT_TRUE(ranks.untouched(0));
    for (std::uint32_t r = 1; r < world(); ++r) (void)ranks.finish(r);
    ranks.input(0) = right;
    check(ranks);
    if (HasFatalFailure()) return;
  }
}

/// An id that is no expert's, and a row that is nobody's: refused by name, on the GPU.
TEST_P(CombineOnGpus, WhatMakesNoSenseIsNamed) {
  CombineRanks ranks(setup(CombineShape{200, 64, 128, 10, 3, kElement}));
  JobRouting routing = draw(ranks, Skew::kUniform, false);
  const std::int32_t id = routing[0].ids[100];
  routing[0].ids[100] = 77;
  ranks.fill(routing, fresh_seed());
  launch_all(ranks, Mode::kFused, true);
  Status finished = ranks.finish(0);
  ASSERT_FALSE(finished);
  EXPECT_THAT(finished.error().message, HasSubstr("token 33, slot 1 goes to expert 77"));
  for (std::uint32_t r = 1; r < world(); ++r) (void)ranks.finish(r);
  routing[0].ids[100] = id;
  ranks.fill(routing, fresh_seed());
  const kernels::MoeRow wrong{9999, 1, 1, 1.0f};
  auto* const rows = const_cast<kernels::MoeRow*>(ranks.input(0).rows);
  kernels::MoeRow was;
  require(cudaMemcpy(&was, rows + 5, sizeof was, cudaMemcpyDefault), "row");
  require(cudaMemcpy(rows + 5, &wrong, sizeof wrong, cudaMemcpyDefault), "row");
  launch_all(ranks, Mode::kFused, true);
  finished = ranks.finish(0);
  ASSERT_FALSE(finished);
  EXPECT_THAT(finished.error().message, HasSubstr("row 5 is of rank 9999"));
  for (std::uint32_t r = 1; r < world(); ++r) (void)ranks.finish(r);
  require(cudaMemcpy(rows + 5, &was, sizeof was, cudaMemcpyDefault), "row");
  for (std::uint32_t r = 0; r < world(); ++r) ranks.poison_output(r);
  check(ranks);
}

TEST_P(CombineOnGpus, AMissingRankEndsTheLaunchWithinTheDeadline) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  check_a_missing_rank(setup(CombineShape{200, 64, 128, 8, 2, kElement}), "gemm_combine");
}

TEST_P(CombineOnGpus, AnAbortWordInHostMemoryEndsTheLaunch) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  check_an_abort(setup(CombineShape{200, 64, 128, 8, 2, kElement}));
}

TEST_P(CombineOnGpus, WrongArgumentsAreRefusedAndChangeNothing) {
  CombineRanks ranks(setup(CombineShape{100, 64, 64, 4, 2, kElement}));
  ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
  const kernels::CombineDeviceInput right = ranks.input(0);
  const auto refused_as = [&](const char* text) {
    const Status refused = ranks.launch(0);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().message, HasSubstr(text));
    ranks.input(0) = right;
  };
  ranks.input(0).count = 101;
  refused_as("101 tokens");
  ranks.input(0).offsets = nullptr;
  refused_as("offsets is null");
  ranks.input(0).residual = reinterpret_cast<const void*>(0x1008);
  refused_as("multiple of 16");
  ranks.input(0).room = ranks.plan().rows_max + 1;
  refused_as("room for");
  check(ranks);
}

INSTANTIATE_TEST_SUITE_P(Worlds, CombineOnGpus, testing::ValuesIn(kRoutedWorlds),
                         name_of_world<GpuWorld>);

}  // namespace
}  // namespace mk::test
