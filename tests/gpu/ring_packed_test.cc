// Ring Attention on GPUs over packed sequences of different lengths: every element of O and LSE
// against float64, lengths that change from launch to launch and from replay to replay, and lengths
// that are not possible.
#include <gmock/gmock.h>

#include "tests/gpu/graphs.h"
#include "tests/gpu/ring_fixture.h"

namespace mk::test {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

class PackedSequencesOnGpus : public RingOnGpus {
 protected:
  static RingSetup packed(std::uint32_t rows, std::uint32_t sequences, std::uint32_t query_heads,
                          std::uint32_t key_heads, std::uint32_t dim, bool causal) {
    RingAttentionShape shape{rows, query_heads, key_heads, dim, causal};
    shape.sequences_max = sequences;
    return setup(shape);
  }
  /// Many short and empty ones, and some that are much longer.
  std::vector<std::uint32_t> random_lengths(std::uint32_t rows, std::uint32_t sequences) {
    std::vector<std::uint32_t> lengths(1 + random_() % sequences);
    for (std::uint32_t& length : lengths) {
      const std::uint64_t most = random_() % 3 == 0 ? rows : 20;
      length = static_cast<std::uint32_t>(std::min<std::uint64_t>(random_() % (most + 1), rows));
      rows -= length;
    }
    return lengths;
  }
};

TEST_P(PackedSequencesOnGpus, EveryElementOfManyLengths) {
  struct Case {
    std::uint32_t query_heads, key_heads, dim;
    bool causal;
    HeadLayout layout;
    std::uint32_t gap;
  };
  const auto rows_first = HeadLayout::kRowsFirst;
  const auto heads_first = HeadLayout::kHeadsFirst;
  for (const Case& one : {Case{4, 2, 128, true, rows_first, 0},
                          {6, 3, 64, false, heads_first, 0},
                          {8, 1, 128, false, rows_first, 16},
                          {4, 4, 64, true, heads_first, 0}}) {
    RingSetup with = packed(1500, 9, one.query_heads, one.key_heads, one.dim, one.causal);
    with.layout = one.layout;
    with.gap = one.gap;
    RingRanks ranks(with);
    const std::uint32_t parts = ranks.plan().parts();
    SCOPED_TRACE(shape_text(with, 1500));
    for (const std::vector<std::uint32_t>& lengths : {std::vector<std::uint32_t>{1500},
                                                      {1},
                                                      {parts, 1, parts + 1},
                                                      {0, 700, 0, 0, 333, 2, 0},
                                                      {1, 1, 1, 1, 1, 1, 1, 1, 1},
                                                      {257, 128, 129, 127, 400},
                                                      {0, 0}}) {
      check_packed(ranks, lengths, Mode::kFused);
      if (HasFatalFailure()) return;
    }
    for (int i = 0; i < 4 && !HasFatalFailure(); ++i)
      check_packed(ranks, random_lengths(1500, 9), i == 0 ? Mode::kUnfused : Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

/// Few items and all roles: what compute-sanitizer can run.
TEST_P(PackedSequencesOnGpus, SmallShapes) {
  for (const bool causal : {false, true}) {
    RingSetup with = packed(200, 4, 2, 1, causal ? 128 : 64, causal);
    with.options.wait_timeout = 20s;
    RingRanks ranks(with);
    check_packed(ranks, {70, 0, 129}, Mode::kFused);
    check_packed(ranks, {3, 50, 1, 140}, Mode::kUnfused);
    if (HasFatalFailure()) return;
  }
}

TEST_P(PackedSequencesOnGpus, SmallChunksAndOneBank) {
  for (const std::uint32_t banks : {1u, 2u}) {
    RingSetup with = packed(900, 6, 6, 3, 128, true);
    with.chunk_bytes = 4096;
    with.banks = banks;
    with.window_pairs = banks;
    RingRanks ranks(with);
    if (ranks.proxy() != nullptr) ranks.proxy()->dawdle(true);
    for (int i = 0; i < 4 && !HasFatalFailure(); ++i)
      check_packed(ranks, random_lengths(900, 6), Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

/// Of another sequence, or behind the mask: nothing of it reaches a row.
TEST_P(PackedSequencesOnGpus, InfAndNanOfOtherRowsChangeNothing) {
  for (const bool causal : {false, true}) {
    RingRanks ranks(packed(1000, 3, 4, 2, 128, causal));
    for (const std::uint16_t bits : {std::uint16_t{0x7f80}, std::uint16_t{0x7fc0}}) {
      RingInputs inputs;
      inputs.from = 350;  // amid the second one
      inputs.to = 420;
      inputs.value = bits;
      inputs.keys_too = random_() % 2 == 0;
      check_packed(ranks, {301, 150, 549}, Mode::kFused, inputs);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(PackedSequencesOnGpus, OneSequenceHasTheBitsThatItHasUnpacked) {
  constexpr std::uint32_t kSeq = 1400;
  RingRanks alone(setup({kSeq, 4, 2, 128, true}));
  RingRanks together(packed(kSeq, 2, 4, 2, 128, true));
  RingInputs inputs;
  inputs.seed = fresh_seed();
  alone.fill(kSeq, inputs);
  together.fill_packed({kSeq, 0}, inputs);
  for (RingRanks* ranks : {&alone, &together}) {
    launch_all(*ranks, Mode::kFused, false);
    finish_all(*ranks);
    if (HasFatalFailure()) return;
    ranks->collect();
  }
  EXPECT_EQ(count_different(alone.outputs(), together.outputs(), alone.output_elements(), nullptr),
            0);
}

/// On the streams, one after the other: the last one's results are judged.
TEST_P(PackedSequencesOnGpus, ManyLaunchesWithoutAPause) {
  RingRanks ranks(packed(700, 5, 4, 2, 64, true));
  for (int round = 0; round < 3 && !HasFatalFailure(); ++round) {
    RingInputs inputs;
    inputs.seed = fresh_seed();
    ranks.fill_packed(random_lengths(700, 5), inputs);
    for (int i = 0; i < 100; ++i) launch_all(ranks, Mode::kFused, i % 25 == 0);
    finish_all(ranks);
    if (!HasFatalFailure()) judge(ranks);
  }
}

TEST_P(PackedSequencesOnGpus, AGraphReplayedWithOtherLengths) {
  constexpr std::uint32_t kSequences = 6;
  RingRanks ranks(packed(900, kSequences, 4, 4, 128, true));
  ranks.fill_packed(std::vector<std::uint32_t>(kSequences, 0), {});
  Graphs graphs;
  const Status captured =
      graphs.capture_all(ranks, [&](std::uint32_t r) { return ranks.launch(r); });
  ASSERT_TRUE(captured) << captured.error().message;
  for (int replay = 0; replay < 20 && !HasFatalFailure(); ++replay) {
    SCOPED_TRACE("replay " + std::to_string(replay));
    std::vector<std::uint32_t> lengths = random_lengths(900, kSequences);
    lengths.resize(kSequences, 0);
    RingInputs inputs;
    inputs.seed = fresh_seed();
    ranks.fill_packed(lengths, inputs);
    graphs.replay_all(ranks);
    finish_all(ranks);
    if (!HasFatalFailure()) judge(ranks);
  }
}

TEST_P(PackedSequencesOnGpus, OtherLengthsOnARankAreAnError) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  RingSetup with = packed(600, 3, 4, 2, 128, true);
  with.options.wait_timeout = 500ms;
  RingRanks ranks(with);
  ranks.fill_packed({100, 200, 300}, {});
  ranks.set_starts(0, {0, 101, 300, 600});
  launch_all(ranks, Mode::kFused, false);
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

/// They are known to the GPU alone: the launch ends, and later ones answer why.
TEST_P(PackedSequencesOnGpus, LengthsThatAreNotPossibleEndTheLaunch) {
  struct Case {
    std::vector<std::uint32_t> starts;
    std::uint32_t room;
    const char* text;
  };
  for (const Case& one :
       {Case{{0, 300, 299, 600}, 0, "sequence 1 starts at row 300 and ends at row 299"},
        Case{{1, 300, 300, 600}, 0, "sequence 0 starts at row 1"},
        Case{{0, 300, 300, 601}, 0, "sequence 2 ends at row 601, and the launch was for 600"},
        Case{{0, 600, 600, 600}, 10, "and its tensors have room for 10"}}) {
    RingSetup with = packed(600, 3, 4, 2, 64, true);
    with.options.wait_timeout = 500ms;
    RingRanks ranks(with);
    ranks.fill_packed({100, 200, 300}, {});
    ranks.set_room(one.room);
    for (std::uint32_t r = 0; r < ranks.world(); ++r) ranks.set_starts(r, one.starts);
    launch_all(ranks, Mode::kFused, false);
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_FALSE(finished);
      EXPECT_EQ(finished.error().code, ErrorCode::kInvalidArgument);
      EXPECT_THAT(finished.error().message, HasSubstr(one.text));
      const Status again = ranks.launch(r);
      ASSERT_FALSE(again);
      EXPECT_EQ(again.error().message, finished.error().message);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, PackedSequencesOnGpus, testing::ValuesIn(kRingWorlds),
                         name_of_world<GpuWorld>);

}  // namespace
}  // namespace mk::test
