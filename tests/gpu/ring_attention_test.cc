// Ring Attention on GPUs, one kernel per rank: every element of O and LSE against float64, with the
// same bits in every run. Launches come without a pause, with changing lengths, and from graphs.
// Launches end when a rank is missing, disagrees, or is told to stop.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpu/graphs.h"
#include "tests/gpu/ring_fixture.h"

namespace mk::test {
namespace {

using kernels::DType;
using kernels::Mode;
using kernels::RingAttentionShape;

class RingAttentionOnGpus : public RingOnGpus {
 protected:
  std::uint32_t length_from(std::uint32_t least, std::uint32_t most) {
    return static_cast<std::uint32_t>(least + random_() % (most - least + 1));
  }
  /// On the streams, one after the other, of any lengths up to `last`, which is that of the last
  /// one: its results are judged.
  void many_launches(RingRanks& ranks, int count, std::uint32_t last) {
    const std::uint32_t least = ranks.plan().parts();
    RingInputs inputs;
    inputs.seed = fresh_seed();
    ranks.fill(last, inputs);
    for (int i = 0; i < count; ++i) {
      const std::uint32_t seq = i == count - 1 ? last : length_from(least, last);
      for (std::uint32_t r = 0; r < ranks.world(); ++r) {
        ranks.make_current(r);
        const Status launched = ranks.launch_of(r, seq, Mode::kFused);
        ASSERT_TRUE(launched) << launched.error().message;
      }
    }
    finish_all(ranks);
    if (!HasFatalFailure()) judge(ranks);
  }
  void replay_with_changing_inputs(const RingSetup& with, std::uint32_t seq) {
    RingRanks ranks(with);
    RingInputs inputs;
    ranks.fill(seq, inputs);
    Graphs graphs;
    const Status captured =
        graphs.capture_all(ranks, [&](std::uint32_t r) { return ranks.launch(r); });
    ASSERT_TRUE(captured) << captured.error().message;
    for (int replay = 0; replay < 40; ++replay) {
      SCOPED_TRACE("replay " + std::to_string(replay));
      inputs.seed = fresh_seed();
      ranks.fill(seq, inputs);
      graphs.replay_all(ranks);
      for (std::uint32_t r = 0; r < ranks.world(); ++r) {
        auto stats = ranks.op(r).finish(ranks.stream(r));
        ASSERT_TRUE(stats) << stats.error().message;
        ASSERT_EQ(stats->epoch, static_cast<std::uint32_t>(replay + 1));
      }
      judge(ranks);
      if (HasFatalFailure()) return;
    }
  }
};

TEST_P(RingAttentionOnGpus, EveryElementOfManyShapes) {
  struct Case {
    RingAttentionShape shape;
    HeadLayout layout;
    std::uint32_t gap;
  };
  const DType bf16 = DType::kBf16;
  const auto rows = HeadLayout::kRowsFirst;
  const auto heads = HeadLayout::kHeadsFirst;
  for (const Case& one : {Case{{1024, 4, 4, 128, false, bf16, 1}, rows, 0},
                          Case{{1000, 8, 1, 128, true, bf16, 2}, rows, 8},
                          Case{{777, 6, 3, 64, true, bf16, 1}, heads, 0},
                          Case{{1537, 16, 2, 64, false, bf16, 3}, rows, 24},
                          Case{{2900, 8, 8, 128, true, bf16, 1}, heads, 0},
                          Case{{640, 64, 1, 128, true, bf16, 1}, rows, 0}}) {
    RingSetup with = setup(one.shape);
    with.layout = one.layout;
    with.gap = one.gap;
    RingRanks ranks(with);
    const auto most = static_cast<std::uint32_t>(one.shape.seq_max);
    const std::uint32_t least = ranks.plan().parts();
    check(ranks, most, Mode::kFused);
    check(ranks, most, Mode::kUnfused);
    check(ranks, least, Mode::kFused);
    for (int i = 0; i < 3 && !HasFatalFailure(); ++i)
      check(ranks, static_cast<std::uint32_t>(least + random_() % (most - least + 1)),
            Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

/// Few items and all roles: what compute-sanitizer, which slows a kernel a hundredfold, can run.
TEST_P(RingAttentionOnGpus, SmallShapes) {
  for (const bool causal : {false, true}) {
    for (const std::uint32_t dim : {64u, 128u}) {
      RingSetup with = setup({200, 2, 1, dim, causal});
      with.options.wait_timeout = 20s;
      RingRanks ranks(with);
      check(ranks, 200, Mode::kFused);
      check(ranks, 131, Mode::kUnfused);
      check(ranks, ranks.plan().parts(), Mode::kFused);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(RingAttentionOnGpus, SmallChunksAndOneBank) {
  for (const std::uint32_t banks : {1u, 2u}) {
    RingSetup with = setup({900, 6, 3, 128, true});
    with.chunk_bytes = 4096;  // amid rows of a head
    with.banks = banks;
    RingRanks ranks(with);
    if (ranks.proxy() != nullptr) ranks.proxy()->dawdle(true);
    for (int i = 0; i < 4 && !HasFatalFailure(); ++i)
      check(ranks, static_cast<std::uint32_t>(900 - random_() % 300), Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

/// The workspace has room for fewer heads than there are: banks and releases let the next ones in.
TEST_P(RingAttentionOnGpus, WindowsOfHeads) {
  for (const auto& [batch, window] : {std::pair{3u, 4u}, {3u, 1u}, {1u, 2u}}) {
    RingAttentionShape shape{800, 6, 3, 128, batch == 3};
    shape.batch = batch;
    RingSetup with = setup(shape);
    with.window_pairs = window;
    with.layout = window == 1 ? HeadLayout::kHeadsFirst : HeadLayout::kRowsFirst;
    RingRanks ranks(with);
    ASSERT_GT(ranks.plan().windows(), 1u);
    if (ranks.proxy() != nullptr) ranks.proxy()->dawdle(true);
    for (int i = 0; i < 3 && !HasFatalFailure(); ++i)
      check(ranks, static_cast<std::uint32_t>(800 - random_() % 300), Mode::kFused);
    const auto stats = ranks.op(0).finish(ranks.stream(0));
    ASSERT_TRUE(stats) << stats.error().message;
    EXPECT_EQ(stats->epoch, 3 * ranks.plan().windows());
    EXPECT_GE(stats->total_ns, stats->gemm_ns);
    if (HasFatalFailure()) return;
  }
}

/// With keys of so many heads together, brought by copy engines, or by groups where a rank's are
/// none. Launches without a pause and of changing lengths share the one bank; the last is judged.
TEST_P(RingAttentionOnGpus, KeysByCopyEngines) {
  if (GetParam().nodes > 1 || GetParam().locals == 1)
    GTEST_SKIP() << "needs a node of several ranks";
  struct Case {
    RingAttentionShape shape;
    std::uint32_t together;
    HeadLayout layout;
    std::uint32_t gap;
    std::optional<bool> dma;
  };
  const DType bf16 = DType::kBf16;
  const auto rows = HeadLayout::kRowsFirst;
  const auto heads = HeadLayout::kHeadsFirst;
  for (const Case& one : {Case{{1024, 4, 4, 128, false, bf16, 2}, 4, rows, 0, true},
                          Case{{1000, 8, 1, 128, true, bf16, 2}, 1, rows, 8, true},
                          Case{{777, 8, 4, 64, true, bf16, 1}, 2, heads, 0, true},
                          Case{{777, 8, 4, 64, true, bf16, 1}, 1, heads, 0, true},
                          Case{{1537, 16, 2, 64, false, bf16, 3}, 2, rows, 24, true},
                          Case{{900, 6, 6, 128, true, bf16, 1}, 2, rows, 0, false},
                          Case{{900, 4, 4, 128, true, bf16, 1}, 4, heads, 0, false}}) {
    SCOPED_TRACE(std::to_string(one.together) + " together");
    RingSetup with = setup(one.shape);
    with.engines_together = one.together;
    with.layout = one.layout;
    with.gap = one.gap;
    with.options.dma = one.dma;
    RingRanks ranks(with);
    ASSERT_EQ(ranks.op(0).shares_by_dma(), *one.dma);
    const auto most = static_cast<std::uint32_t>(one.shape.seq_max);
    const std::uint32_t least = ranks.plan().parts();
    check(ranks, most, Mode::kFused);
    check(ranks, most, Mode::kUnfused);
    check(ranks, least, Mode::kFused);
    for (int i = 0; i < 3 && !HasFatalFailure(); ++i)
      check(ranks, length_from(least, most), Mode::kFused);
    many_launches(ranks, 60, most);
    if (HasFatalFailure()) return;
  }
}

TEST_P(RingAttentionOnGpus, AGraphOfCopyEnginesReplayed) {
  if (GetParam().nodes > 1 || GetParam().locals == 1)
    GTEST_SKIP() << "needs a node of several ranks";
  RingSetup with = setup({900, 4, 4, 128, true});
  with.engines_together = 2;
  with.options.dma = true;
  replay_with_changing_inputs(with, 900);
}

/// A rank whose engines wait for one that is missing: all of it ends, and the GPU is as usable as
/// before.
TEST_P(RingAttentionOnGpus, AMissingRankEndsCopyEngines) {
  if (GetParam().nodes > 1 || GetParam().locals == 1)
    GTEST_SKIP() << "needs a node of several ranks";
  RingSetup with = setup({600, 4, 2, 128, true});
  with.engines_together = 1;
  with.options.dma = true;
  with.options.wait_timeout = 200ms;
  {
    RingRanks ranks(with);
    check(ranks, 600, Mode::kFused);
    const std::uint32_t missing = ranks.world() - 1;
    for (std::uint32_t r = 0; r < missing; ++r) ASSERT_TRUE(ranks.launch(r));
    for (std::uint32_t r = 0; r < missing; ++r) ASSERT_FALSE(ranks.finish(r));
    ASSERT_TRUE(ranks.launch(missing));
    (void)ranks.finish(missing);
  }
  with.options.wait_timeout = 30s;
  RingRanks fresh(with);
  check(fresh, 600, Mode::kFused);
}

/// Zero times Inf is NaN in the tensor cores: what a row must not see must not reach it.
TEST_P(RingAttentionOnGpus, InfAndNanBehindTheMaskChangeNothing) {
  RingRanks ranks(setup({1100, 4, 2, 128, true}));
  for (const std::uint16_t bits :
       {std::uint16_t{0x7f80}, std::uint16_t{0xff80}, std::uint16_t{0x7fc0}}) {
    for (const bool keys_too : {false, true}) {
      RingInputs inputs;
      inputs.from = static_cast<std::uint32_t>(random_() % 1100);
      inputs.to = inputs.from + 1 + static_cast<std::uint32_t>(random_() % (1100 - inputs.from));
      inputs.value = bits;
      inputs.keys_too = keys_too;
      check(ranks, 1100, Mode::kFused, inputs);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(RingAttentionOnGpus, LargeScoresAndEqualScores) {
  for (const bool causal : {false, true}) {
    RingRanks ranks(setup({700, 4, 2, 128, causal}));
    RingInputs large;
    large.scale = 300;  // scores of some ten thousand
    check(ranks, 700, Mode::kFused, large);
    RingInputs equal;
    equal.equal_keys = true;
    check(ranks, 699, Mode::kFused, equal);
    if (HasFatalFailure()) return;
  }
}

TEST_P(RingAttentionOnGpus, SameBitsInEveryRun) {
  RingRanks ranks(setup({2000, 8, 2, 128, true}));
  RingInputs inputs;
  inputs.seed = fresh_seed();
  DeviceMemory first(std::size_t{2000} * 8 * 128 * 2);
  for (int run = 0; run < 10; ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    ranks.fill(2000, inputs);
    launch_all(ranks, run % 4 == 3 ? Mode::kUnfused : Mode::kFused, true);
    finish_all(ranks);
    if (HasFatalFailure()) return;
    ranks.collect();
    if (run == 0) {
      require(cudaMemcpy(first.data(), ranks.outputs(), std::size_t{2000} * 8 * 128 * 2,
                         cudaMemcpyDefault),
              "copy");
      judge(ranks);
    } else {
      ASSERT_EQ(count_different(first.data(), ranks.outputs(), ranks.output_elements(), nullptr),
                0);
    }
    if (HasFatalFailure()) return;
  }
}

/// On the streams, one after the other, of lengths that change: the last one's results are judged.
TEST_P(RingAttentionOnGpus, ManyLaunchesWithoutAPause) {
  for (const std::uint32_t dim : {128u, 64u}) {
    RingRanks ranks(setup({700, 4, 2, dim, true}));
    for (int round = 0; round < 3 && !HasFatalFailure(); ++round)
      many_launches(ranks, 100, length_from(ranks.plan().parts(), 699));
  }
}

TEST_P(RingAttentionOnGpus, AGraphReplayedWithChangingInputs) {
  replay_with_changing_inputs(setup({900, 4, 4, 128, true}), 900);
}

TEST_P(RingAttentionOnGpus, AMissingRankEndsTheLaunchWithinTheDeadline) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  RingSetup with = setup({600, 4, 2, 128, true});
  with.options.wait_timeout = 200ms;
  RingRanks ranks(with);
  check(ranks, 300, Mode::kFused);
  ranks.fill(600, {});
  (void)miss_last_rank(ranks, "ring_attention", [&](std::uint32_t r) { return ranks.launch(r); });
  RingRanks fresh(setup({600, 4, 2, 128, true}));
  check(fresh, 600, Mode::kFused);
}

TEST_P(RingAttentionOnGpus, DifferentLengthsAreAnError) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  RingSetup with = setup({600, 4, 2, 128, false});
  with.options.wait_timeout = 500ms;
  RingRanks ranks(with);
  ranks.fill(600, {});
  for (std::uint32_t r = 0; r < ranks.world(); ++r)
    ASSERT_TRUE(ranks.launch_of(r, r == 0 ? 500 : 600, Mode::kFused));
  bool mismatch = false;
  std::string texts;
  for (std::uint32_t r = 0; r < ranks.world(); ++r) {
    const Status finished = ranks.finish(r);
    if (finished) continue;
    mismatch |= finished.error().code == ErrorCode::kShapeMismatch;
    texts += finished.error().message + "\n";
  }
  EXPECT_TRUE(mismatch) << texts;
}

TEST_P(RingAttentionOnGpus, AnAbortWordInHostMemoryEndsTheLaunch) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  RingSetup with = setup({600, 4, 2, 128, true});
  const auto make = [&](const std::uint32_t* abort) {
    with.abort = abort;
    auto ranks = std::make_unique<RingRanks>(with);
    check(*ranks, 600, Mode::kFused);
    return ranks;
  };
  abort_launches(make, [](RingRanks& ranks, std::uint32_t r) { return ranks.launch(r); });
}

INSTANTIATE_TEST_SUITE_P(Worlds, RingAttentionOnGpus, testing::ValuesIn(kRingWorlds),
                         name_of_world<GpuWorld>);

}  // namespace
}  // namespace mk::test
