// MoE Dispatch+GEMM on GPUs, one kernel per rank: where every row stands, and every element of it
// against float64. It holds at any skew, with the same bits in every run. Launches come without a
// pause and from graphs, with routing that changes. Some launches have routing that makes no sense,
// rows that do not fit, or lack a rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shm/atomic.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/graphs.h"
#include "tests/gpu/moe_ranks.h"
#include "tests/gpu/products.h"
#include "tests/gpu/summed_reference.h"

namespace mk::test {
namespace {

using kernels::BLayout;
using kernels::DType;
using kernels::GatherKind;
using kernels::Mode;
using kernels::MoeDispatchShape;
using kernels::MoeEpilogue;
using kernels::testing::draw_routing;
using kernels::testing::kSkews;
using kernels::testing::Skew;
using testing::HasSubstr;
using namespace std::chrono_literals;

/// All ranks and proxies are one process here. With CUDA's 8 connections to a GPU, a proxy's copy
/// may get in line behind launches that wait for it.
[[maybe_unused]] const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

struct MoeWorld {
  std::uint32_t nodes;
  std::uint32_t locals;
  int devices;
};

class MoeDispatchOnGpus : public testing::TestWithParam<MoeWorld> {
 protected:
  void SetUp() override {
    if (device_count() < GetParam().devices)
      GTEST_SKIP() << "needs " << GetParam().devices << " CUDA devices";
  }
  static std::uint32_t world() { return GetParam().nodes * GetParam().locals; }
  static MoeSetup setup(const MoeDispatchShape& shape) {
    MoeSetup setup;
    setup.nodes = GetParam().nodes;
    setup.locals = GetParam().locals;
    setup.devices = GetParam().devices;
    setup.shape = shape;
    setup.options.wait_timeout = 10s;
    return setup;
  }

  JobRouting draw(const MoeRanks& ranks, Skew skew, bool uneven) {
    const MoeDispatchShape& shape = ranks.plan().shape;
    return draw_routing(world(), shape.experts, shape.top_k, shape.tokens_max, skew, uneven,
                        random_);
  }
  void launch_all(MoeRanks& ranks, Mode mode, bool late, std::uint32_t set = 0) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      if (late && random_() % 3 == 0) {
        ranks.make_current(r);
        delay(random_() % 200'000, ranks.stream(r));
      }
      const Status launched = ranks.launch(r, mode, set);
      ASSERT_TRUE(launched) << launched.error().message;
    }
  }
  void finish_all(MoeRanks& ranks) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_TRUE(finished) << finished.error().message;
    }
  }
  void judge_all(MoeRanks& ranks, std::uint32_t set = 0, bool behind = false) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) ASSERT_EQ(ranks.judge(r, set, behind), "");
    worst_ = std::max(worst_, ranks.worst());
  }
  void check(MoeRanks& ranks, Mode mode) {
    launch_all(ranks, mode, true);
    if (HasFatalFailure()) return;
    finish_all(ranks);
    if (!HasFatalFailure()) judge_all(ranks);
  }
  void TearDown() override {
    if (worst_ > 0) RecordProperty("worst_error_over_bound", std::to_string(worst_));
  }

  std::mt19937_64 random_{std::random_device{}()};
  double worst_ = 0;
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
    MoeSetup with = setup({40, 64, 48, 4, 2, 0, epilogue});
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
    MoeSetup with = setup({300, 136, 264, 7, 3, 0, epilogue, true});
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
      MoeSetup with = setup({500, 136, 72, 9, 3, 0, MoeEpilogue::kNone});
      with.chunk_bytes = 4096;  // amid a token
      with.banks = banks;
      with.kind = kind;
      MoeRanks ranks(with);
      if (ranks.proxy() != nullptr) ranks.proxy()->dawdle(true);
      for (int i = 0; i < 4; ++i) {
        ranks.fill(draw(ranks, Skew::kUniform, true), fresh_seed());
        check(ranks, Mode::kFused);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(MoeDispatchOnGpus, ANanStaysInItsToken) {
  for (const MoeEpilogue epilogue : {MoeEpilogue::kNone, MoeEpilogue::kGatedSilu}) {
    MoeRanks ranks(setup({260, 192, 96, 6, 2, 0, epilogue}));
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
  MoeRanks ranks(setup({500, 520, 264, 11, 4, 0, MoeEpilogue::kNone}));
  const JobRouting routing = draw(ranks, Skew::kUniform, true);
  const std::uint64_t seed = fresh_seed();
  std::vector<std::vector<std::uint16_t>> first;
  for (int run = 0; run < 10; ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    ranks.fill(routing, seed);
    launch_all(ranks, run % 4 == 3 ? Mode::kUnfused : Mode::kFused, true);
    finish_all(ranks);
    if (HasFatalFailure()) return;
    if (run == 0) judge_all(ranks);
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      if (run == 0) {
        first.push_back(ranks.output(r));
      } else {
        ASSERT_EQ(ranks.output(r), first[r]) << "rank " << r;
      }
    }
    if (HasFatalFailure()) return;
  }
}

/// On the streams, one after the other, each with another routing than the one before: the last
/// one's results are judged.
TEST_P(MoeDispatchOnGpus, ManyLaunchesWithoutAPause) {
  constexpr std::uint32_t kSets = 4;
  MoeSetup with = setup({300, 128, 64, 10, 3, 0, MoeEpilogue::kNone});
  with.sets = kSets;
  MoeRanks ranks(with);
  for (std::uint32_t set = 0; set < kSets; ++set)
    ranks.fill(draw(ranks, kSkews[random_() % std::size(kSkews)], true), 5, set);
  for (std::uint32_t last = 0; last < kSets; ++last) {
    for (std::uint32_t i = 0; i < 200; ++i)
      launch_all(ranks, Mode::kFused, false, (last + i + 1) % kSets);
    finish_all(ranks);
    if (HasFatalFailure()) return;
    judge_all(ranks, (last + 200) % kSets, true);
    if (HasFatalFailure()) return;
  }
}

TEST_P(MoeDispatchOnGpus, AGraphReplayedWithFreshRouting) {
  MoeRanks ranks(setup({400, 256, 136, 8, 2, 0, MoeEpilogue::kNone}));
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

/// Every rank says so, by name; nothing is stored; and the next launch is right.
TEST_P(MoeDispatchOnGpus, RoutingThatMakesNoSenseIsRefusedOnTheGpu) {
  MoeRanks ranks(setup({300, 128, 64, 10, 3, 0, MoeEpilogue::kNone}));
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
  MoeRanks ranks(setup({300, 128, 64, 10, 3, 0, MoeEpilogue::kNone}));
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
    }
    check(ranks, Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

TEST_P(MoeDispatchOnGpus, AMissingRankEndsTheLaunchWithinTheDeadline) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  MoeSetup with = setup({200, 128, 64, 8, 2, 0, MoeEpilogue::kNone});
  with.options.wait_timeout = 200ms;
  MoeRanks ranks(with);
  ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
  check(ranks, Mode::kFused);
  const std::uint32_t missing = ranks.world() - 1;
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint32_t r = 0; r < missing; ++r) ASSERT_TRUE(ranks.launch(r));
  bool named = false;
  std::string texts;
  for (std::uint32_t r = 0; r < missing; ++r) {
    const Status finished = ranks.finish(r);
    ASSERT_FALSE(finished);
    const std::string& text = finished.error().message;
    texts += text + "\n";
    named |= text.find("for rank " + std::to_string(missing)) != std::string::npos;
    if (finished.error().code != ErrorCode::kTimeout) {
      EXPECT_EQ(finished.error().code, ErrorCode::kAborted) << text;
    }
    EXPECT_THAT(text, HasSubstr("moe_dispatch launch 2 on rank " + std::to_string(r)));
    const Status again = ranks.launch(r);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.error().message, text);
  }
  EXPECT_TRUE(named) << texts;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  // The late one comes to a broken job; it ends in any case, and the GPU is as usable as before.
  ASSERT_TRUE(ranks.launch(missing));
  (void)ranks.finish(missing);
  MoeRanks fresh(setup({200, 128, 64, 8, 2, 0, MoeEpilogue::kNone}));
  fresh.fill(draw(fresh, Skew::kUniform, false), fresh_seed());
  check(fresh, Mode::kFused);
}

TEST_P(MoeDispatchOnGpus, AnAbortWordInHostMemoryEndsTheLaunch) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  void* word = nullptr;
  require(cudaHostAlloc(&word, 64, cudaHostAllocMapped | cudaHostAllocPortable), "abort word");
  auto* abort = static_cast<std::uint32_t*>(word);
  *abort = 0;
  {
    MoeSetup with = setup({200, 128, 64, 8, 2, 0, MoeEpilogue::kNone});
    with.abort = abort;
    MoeRanks ranks(with);
    ranks.fill(draw(ranks, Skew::kUniform, false), fresh_seed());
    check(ranks, Mode::kFused);
    for (std::uint32_t r = 1; r < ranks.world(); ++r) ASSERT_TRUE(ranks.launch(r));
    std::this_thread::sleep_for(50ms);
    shm::store_release(abort, 1u);
    for (std::uint32_t r = 1; r < ranks.world(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_FALSE(finished);
      EXPECT_EQ(finished.error().code, ErrorCode::kAborted) << finished.error().message;
    }
  }
  require(cudaFreeHost(word), "abort word");
}

TEST_P(MoeDispatchOnGpus, WrongArgumentsAreRefusedAndChangeNothing) {
  MoeRanks ranks(setup({100, 64, 64, 4, 2, 0, MoeEpilogue::kNone}));
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

INSTANTIATE_TEST_SUITE_P(Worlds, MoeDispatchOnGpus,
                         testing::Values(MoeWorld{1, 1, 1}, MoeWorld{1, 2, 1}, MoeWorld{1, 4, 1},
                                         MoeWorld{2, 1, 1}, MoeWorld{2, 2, 1}, MoeWorld{4, 1, 1},
                                         MoeWorld{1, 2, 2}, MoeWorld{1, 4, 4}, MoeWorld{2, 1, 2},
                                         MoeWorld{2, 2, 4}),
                         [](const auto& world) {
                           return std::to_string(world.param.nodes) + "x" +
                                  std::to_string(world.param.locals) + "_on_" +
                                  std::to_string(world.param.devices);
                         });

}  // namespace
}  // namespace mk::test
