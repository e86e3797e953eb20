// MoE Dispatch+GEMM on GPUs, one kernel per rank: where every row stands, and every element of it
// against float64. It holds at any skew, with the same bits in every run. Launches come without a
// pause and from graphs, with routing that changes. Some launches have routing that makes no sense,
// rows that do not fit, or lack a rank.
#include <string>
#include <vector>

#include "tests/gpu/graphs.h"
#include "tests/gpu/moe_ranks.h"
#include "tests/gpu/routed_fixture.h"

namespace mk::test {
namespace {

using kernels::BLayout;
using kernels::DType;
using kernels::GatherKind;
using kernels::Mode;
using kernels::MoeDispatchShape;
using kernels::MoeEpilogue;
using kernels::testing::kSkews;
using kernels::testing::Skew;
using testing::HasSubstr;

class MoeDispatchOnGpus : public RoutedOnGpus<MoeSetup, MoeRanks> {
 protected:
  /// Copy engines bring tokens within a node.
  static MoeSetup with_engines(const MoeDispatchShape& shape) {
    MoeSetup with = setup(shape);
    with.engines = true;
    with.options.dma = true;
    return with;
  }
  void many_launches(const MoeSetup& with) {
    check_without_a_pause(with, 200,
                          [](MoeRanks& ranks, const JobRouting& routing, std::uint32_t set) {
                            ranks.fill(routing, 5, set);
                          });
  }
  void replay_with_fresh_routing(const MoeSetup& with) {
    MoeRanks ranks(with);
    ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
    Graphs graphs;
    const Status captured =
        graphs.capture_all(ranks, [&](std::uint32_t r) { return ranks.launch(r); });
    ASSERT_TRUE(captured) << captured.error().message;
    for (std::uint32_t replay = 0; replay < 20; ++replay) {
      SCOPED_TRACE("replay " + std::to_string(replay));
      ranks.fill(draw(ranks, kSkews[replay % std::size(kSkews)], false), fresh_seed());
      graphs.replay_all(ranks);
      for (std::uint32_t r = 0; r < ranks.world(); ++r) {
        auto stats = ranks.op(r).finish(ranks.stream(r));
        ASSERT_TRUE(stats) << stats.error().message;
        ASSERT_EQ(stats->epoch, replay + 1);
      }
      judge_all(ranks);
      if (HasFatalFailure()) return;
    }
  }
};

/// E a multiple of W and not, fewer experts than ranks, every expert of each token; sides that are
/// multiples of 8 and of no tile; every skew, with different numbers of tokens, and with none.
TEST_P(MoeDispatchOnGpus, EveryElementOfManyRoutings) {
  struct Case {
    MoeDispatchShape shape;  // T, H, F, E, k
    DType dtype = DType::kBf16;
    BLayout layout = BLayout::kNK;
    GatherKind kind = GatherKind::kBroadcast;
  };
  const auto none = MoeEpilogue::kNone;
  const DType bf16 = DType::kBf16;
  for (const Case& one :
       {Case{{300, 264, 136, 5, 2, 0, none}},
        Case{{130, 512, 520, 16, 4, 0, MoeEpilogue::kGatedSilu},
             bf16,
             BLayout::kNK,
             GatherKind::kPull},
        Case{{64, 72, 24, 3, 3, 0, none}, bf16, BLayout::kKN},
        Case{{600, 1032, 264, 32, 8, 0, MoeEpilogue::kGatedSiluInterleaved}},
        Case{{700, 1024, 640, 7, 1, 0, none}, bf16, BLayout::kNK, GatherKind::kPull},
        Case{{200, 200, 328, 12, 6, 0, none}, DType::kF16}}) {
    MoeSetup with = setup(one.shape);
    with.dtype = one.dtype;
    with.options.b_layout = one.layout;
    with.kind = one.kind;
    if (!with.has_kernel()) continue;
    MoeRanks ranks(with);
    int turn = 0;
    for (const Skew skew : kSkews) {
      SCOPED_TRACE("E " + std::to_string(one.shape.experts) + ", skew " +
                   std::to_string(static_cast<int>(skew)));
      ranks.fill(draw(ranks, skew, turn % 3 != 0), fresh_seed());
      check(ranks, turn % 4 == 3 ? Mode::kUnfused : Mode::kFused);
      if (HasFatalFailure()) return;
      ++turn;
    }
    ranks.fill(JobRouting(world()), fresh_seed());
    check(ranks, Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

/// Few tiles and all roles: what compute-sanitizer, which slows a kernel a hundredfold, can run.
TEST_P(MoeDispatchOnGpus, SmallShapes) {
  for (const MoeEpilogue epilogue : {MoeEpilogue::kNone, MoeEpilogue::kGatedSilu}) {
    MoeSetup with = setup(MoeDispatchShape{40, 64, 48, 4, 2, 0, epilogue});
    with.options.wait_timeout = 20s;
    MoeRanks ranks(with);
    for (const Skew skew : {Skew::kUniform, Skew::kSparse}) {
      ranks.fill(draw(ranks, skew, true), fresh_seed());
      check(ranks, Mode::kFused);
      if (HasFatalFailure()) return;
    }
  }
}

/// Of the epilogues that this build has with a bias; a launch without is refused.
TEST_P(MoeDispatchOnGpus, AddsTheExpertsBias) {
  int built = 0;
  for (const MoeEpilogue epilogue :
       {MoeEpilogue::kNone, MoeEpilogue::kGatedSilu, MoeEpilogue::kGatedSiluInterleaved}) {
    MoeSetup with = setup(MoeDispatchShape{300, 136, 264, 7, 3, 0, epilogue, true});
    with.options.b_layout = kernels::BLayout::kNK;
    if (!with.has_kernel()) continue;
    ++built;
    MoeRanks ranks(with);
    for (const Skew skew : {Skew::kUniform, Skew::kSparse}) {
      ranks.fill(draw(ranks, skew, true), fresh_seed());
      check(ranks, Mode::kFused);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(built, 0);
}

TEST_P(MoeDispatchOnGpus, SmallChunksAndOneBank) {
  for (const GatherKind kind : {GatherKind::kBroadcast, GatherKind::kPull}) {
    for (const std::uint32_t banks : {1u, 2u}) {
      MoeSetup with = setup(MoeDispatchShape{500, 136, 72, 9, 3, 0, MoeEpilogue::kNone});
      with.chunk_bytes = 4096;  // amid a token
      with.banks = banks;
      with.kind = kind;
      check_dawdling(with);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(MoeDispatchOnGpus, ANanStaysInItsToken) {
  for (const MoeEpilogue epilogue : {MoeEpilogue::kNone, MoeEpilogue::kGatedSilu}) {
    MoeRanks ranks(setup(MoeDispatchShape{260, 192, 96, 6, 2, 0, epilogue}));
    for (int turn = 0; turn < 3; ++turn) {
      ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
      ranks.spoil_token(static_cast<std::uint32_t>(random_() % world()),
                        static_cast<std::uint32_t>(random_() % 260));
      check(ranks, Mode::kFused);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(MoeDispatchOnGpus, SameBitsInEveryRun) {
  MoeRanks ranks(setup(MoeDispatchShape{500, 520, 264, 11, 4, 0, MoeEpilogue::kNone}));
  const JobRouting routing = draw(ranks, Skew::kUniform, true);
  check_same_bits(ranks, [&](std::uint64_t seed) { ranks.fill(routing, seed); });
}

TEST_P(MoeDispatchOnGpus, ManyLaunchesWithoutAPause) {
  many_launches(setup(MoeDispatchShape{300, 128, 64, 10, 3, 0, MoeEpilogue::kNone}));
}

TEST_P(MoeDispatchOnGpus, AGraphReplayedWithFreshRouting) {
  replay_with_fresh_routing(setup(MoeDispatchShape{400, 256, 136, 8, 2, 0, MoeEpilogue::kNone}));
}

/// Every rank says so, by name; nothing is stored; and the next launch is right.
TEST_P(MoeDispatchOnGpus, RoutingThatMakesNoSenseIsRefusedOnTheGpu) {
  MoeRanks ranks(setup(MoeDispatchShape{300, 128, 64, 10, 3, 0, MoeEpilogue::kNone}));
  for (const std::int32_t id : {10, -2, 0x7fffffff, -0x7fffffff - 1}) {
    SCOPED_TRACE("expert " + std::to_string(id));
    JobRouting routing = draw(ranks, Skew::kUniform, false);
    const auto rank = static_cast<std::uint32_t>(random_() % world());
    const auto token = static_cast<std::uint32_t>(random_() % 300);
    const auto slot = static_cast<std::uint32_t>(random_() % 3);
    const std::int32_t right = routing[rank].ids[token * 3 + slot];
    routing[rank].ids[token * 3 + slot] = id;
    ranks.fill(routing, fresh_seed());
    launch_all(ranks, Mode::kFused, true);
    for (std::uint32_t r = 0; r < world(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_FALSE(finished);
      EXPECT_EQ(finished.error().code, ErrorCode::kInvalidArgument);
      EXPECT_THAT(
          finished.error().message,
          HasSubstr("rank " + std::to_string(rank) + "'s token " + std::to_string(token) +
                    ", slot " + std::to_string(slot) + " goes to expert " + std::to_string(id)));
      EXPECT_TRUE(ranks.untouched(r));
    }
    routing[rank].ids[token * 3 + slot] = right;
    ranks.fill(routing, fresh_seed());
    check(ranks, Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

/// The rank whose rows do not fit says so and stores nothing; the others, and the next launch, are
/// right.
TEST_P(MoeDispatchOnGpus, RowsThatDoNotFitAreThatRanksError) {
  MoeRanks ranks(setup(MoeDispatchShape{300, 128, 64, 10, 3, 0, MoeEpilogue::kNone}));
  for (int turn = 0; turn < 3; ++turn) {
    ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
    const auto full = static_cast<std::uint32_t>(random_() % world());
    const std::uint32_t needed = ranks.rows(full);
    ASSERT_GT(needed, 0u);
    for (std::uint32_t r = 0; r < world(); ++r)
      ASSERT_TRUE(ranks.launch(r, Mode::kFused, 0, r == full ? needed - 1 : ranks.rows(r)));
    for (std::uint32_t r = 0; r < world(); ++r) {
      const Status finished = ranks.finish(r);
      if (r != full) {
        ASSERT_TRUE(finished) << finished.error().message;
        ASSERT_EQ(ranks.judge(r), "");
        continue;
      }
      ASSERT_FALSE(finished);
      EXPECT_EQ(finished.error().code, ErrorCode::kLimitExceeded);
      EXPECT_THAT(finished.error().message, HasSubstr("sends " + std::to_string(needed) + " rows"));
      EXPECT_TRUE(ranks.untouched(r));
      EXPECT_EQ(ranks.told_rows(r), 0u);
      // Asked again, it has nothing new to report, and still no rows.
      EXPECT_TRUE(ranks.finish(r));
      EXPECT_EQ(ranks.told_rows(r), 0u);
    }
    check(ranks, Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

TEST_P(MoeDispatchOnGpus, AMissingRankEndsTheLaunchWithinTheDeadline) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  check_a_missing_rank(setup(MoeDispatchShape{200, 128, 64, 8, 2, 0, MoeEpilogue::kNone}),
                       "moe_dispatch");
}

/// In one piece and in many, or by groups where a rank's engines do not bring them. Launches
/// without a pause share the one bank.
TEST_P(MoeDispatchOnGpus, TokensByCopyEngines) {
  if (GetParam().locals == 1) GTEST_SKIP() << "needs a node of several ranks";
  struct Case {
    MoeDispatchShape shape;  // T, H, F, E, k
    std::uint32_t chunk_bytes, dma_bytes;
    bool dma;
  };
  const auto none = MoeEpilogue::kNone;
  for (const Case& one : {Case{{300, 264, 136, 5, 2, 0, none}, 0, 0, true},
                          Case{{500, 136, 72, 9, 3, 0, none}, 4096, 20000, true},
                          Case{{130, 512, 520, 16, 4, 0, MoeEpilogue::kGatedSilu}, 0, 1, true},
                          Case{{600, 1032, 264, 32, 8, 0, none}, 65536, 0, true},
                          Case{{300, 264, 136, 5, 2, 0, none}, 0, 0, false}}) {
    SCOPED_TRACE("T " + std::to_string(one.shape.tokens_max) + (one.dma ? "" : ", by groups"));
    MoeSetup with = with_engines(one.shape);
    with.chunk_bytes = one.chunk_bytes;
    with.options.dma = one.dma;
    with.options.dma_bytes = one.dma_bytes;
    {
      MoeRanks ranks(with);
      ASSERT_EQ(ranks.op(0).shares_by_dma(), one.dma);
      int turn = 0;
      for (const Skew skew : kSkews) {
        ranks.fill(draw(ranks, skew, turn % 3 != 0), fresh_seed());
        check(ranks, turn % 4 == 3 ? Mode::kUnfused : Mode::kFused);
        if (HasFatalFailure()) return;
        ++turn;
      }
      ranks.fill(JobRouting(world()), fresh_seed());
      check(ranks, Mode::kFused);
    }
    if (!HasFatalFailure()) many_launches(with);
    if (HasFatalFailure()) return;
  }
}

TEST_P(MoeDispatchOnGpus, AGraphOfCopyEnginesReplayed) {
  if (GetParam().locals == 1) GTEST_SKIP() << "needs a node of several ranks";
  MoeSetup with = with_engines({400, 256, 136, 8, 2, 0, MoeEpilogue::kNone});
  with.options.dma_bytes = 50000;
  replay_with_fresh_routing(with);
}

TEST_P(MoeDispatchOnGpus, AMissingRankEndsCopyEngines) {
  if (GetParam().locals == 1) GTEST_SKIP() << "needs a node of several ranks";
  check_a_missing_rank(with_engines({200, 128, 64, 8, 2, 0, MoeEpilogue::kNone}), "moe_dispatch");
}

/// Engines go by the plan, on which all ranks agree.
TEST_P(MoeDispatchOnGpus, EnginesWithoutAPlanForThemAreRefused) {
  if (GetParam().locals == 1) GTEST_SKIP() << "needs a node of several ranks";
  MoeRanks ranks(setup(MoeDispatchShape{100, 64, 64, 4, 2, 0, MoeEpilogue::kNone}));
  kernels::RankContext context;
  context.world = {GetParam().nodes, GetParam().locals, 0, 0};
  const auto made = kernels::MoeDispatchCuda::create(ranks.plan(), context, {.dma = true});
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(made.error().message, HasSubstr("MoeDispatchWay::engines"));
}

TEST_P(MoeDispatchOnGpus, AnAbortWordInHostMemoryEndsTheLaunch) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  check_an_abort(setup(MoeDispatchShape{200, 128, 64, 8, 2, 0, MoeEpilogue::kNone}));
}

TEST_P(MoeDispatchOnGpus, WrongArgumentsAreRefusedAndChangeNothing) {
  MoeRanks ranks(setup(MoeDispatchShape{100, 64, 64, 4, 2, 0, MoeEpilogue::kNone}));
  ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
  kernels::MoeDispatchInput input;
  input.count = 101;
  Status refused = ranks.op(0).launch(ranks.stream(0), input, nullptr, 0);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("101 tokens"));
  input.count = 10;
  refused = ranks.op(0).launch(ranks.stream(0), input, nullptr, 0);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("tokens is null"));
  input.tokens = reinterpret_cast<const void*>(0x1008);
  refused = ranks.op(0).launch(ranks.stream(0), input, nullptr, 0);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("multiple of 16"));
  check(ranks, Mode::kFused);
}

INSTANTIATE_TEST_SUITE_P(Worlds, MoeDispatchOnGpus, testing::ValuesIn(kRoutedWorlds),
                         name_of_world<GpuWorld>);

}  // namespace
}  // namespace mk::test
