// Sequences of different lengths in one launch: the tables against the definition, every element
// of launches in many worlds against float64, and what is refused.
#include "kernels/ops/ring/packed.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/ops/ring/schedule.h"
#include "tests/kernels/ring/job.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {
namespace {

using ::testing::HasSubstr;

/// Many short ones, empty ones among them, and some that are much longer.
std::vector<std::uint32_t> random_lengths(std::mt19937_64& random, std::uint32_t sequences_max,
                                          std::uint32_t rows_max) {
  std::vector<std::uint32_t> lengths;
  const std::uint64_t count = 1 + random() % sequences_max;
  for (std::uint32_t rows = 0; lengths.size() < count && rows < rows_max;) {
    const std::uint64_t most = random() % 3 == 0 ? rows_max : 9;
    const auto length =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(random() % (most + 1), rows_max - rows));
    lengths.push_back(length);
    rows += length;
  }
  return lengths;
}

std::vector<std::uint32_t> starts_of(const std::vector<std::uint32_t>& lengths) {
  std::vector<std::uint32_t> starts{0};
  for (const std::uint32_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

RingAttentionShape shape_of(std::uint32_t rows_max, std::uint32_t sequences_max, bool causal) {
  RingAttentionShape shape{rows_max, 4, 2, 64, causal};
  shape.sequences_max = sequences_max;
  return shape;
}

RingLaunch launch_of(const std::vector<std::uint32_t>& lengths) {
  RingLaunch launch;
  launch.lengths = lengths;
  launch.seq = starts_of(lengths).back();
  return launch;
}

TEST(RingPacked, TablesAreThoseOfEachSequenceByItself) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    const auto nodes = static_cast<std::uint32_t>(1 + random() % 4);
    const auto locals = static_cast<std::uint32_t>(1 + random() % 4);
    const bool causal = random() % 2 == 0;
    const auto plan = RingAttentionPlan::make(nodes, locals, shape_of(200, 12, causal), {5, 7});
    ASSERT_TRUE(plan) << plan.error().message;
    const auto lengths = random_lengths(random, 12, 200);
    const auto starts = starts_of(lengths);
    ASSERT_TRUE(check_starts(*plan, starts));
    for (std::uint32_t rank = 0; rank < nodes * locals; ++rank) {
      const World world{nodes, locals, rank / locals, rank % locals};
      const PackedTables tables(*plan, world, starts);
      const PackedSequences view = tables.view();
      ASSERT_EQ(view.count, lengths.size());
      std::uint32_t items = 0;
      std::vector<std::uint32_t> rows(world.size());
      for (std::uint32_t i = 0; i < view.count; ++i) {
        ASSERT_EQ(view.rows[i], lengths[i]);
        ASSERT_EQ(view.items[i], items);
        const RingAttentionSchedule alone(*plan, world, lengths[i], Mode::kFused);
        for (std::uint32_t item = 0; item < alone.items(); ++item)
          ASSERT_EQ(view.sequence_of(items + item), i);
        items += alone.items();
        for (std::uint32_t other = 0; other < world.size(); ++other) {
          ASSERT_EQ(view.first_rows[other * view.count + i], rows[other]);
          // By the definition of the parts.
          rows[other] += shard_of(lengths[i], plan->parts(), other).count;
          if (causal)
            rows[other] += shard_of(lengths[i], plan->parts(), plan->parts() - 1 - other).count;
        }
      }
      ASSERT_EQ(view.items[view.count], items);
      for (std::uint32_t other = 0; other < world.size(); ++other) {
        ASSERT_EQ(tables.rows(other), rows[other]);
        ASSERT_EQ(view.rank_rows[other], rows[other]);
        ASSERT_LE(rows[other], plan->rows_max());
      }
    }
  }
}

TEST(RingPacked, ARankHasNoMoreRowsThanThePlanHasRoomFor) {
  for (const bool causal : {false, true}) {
    const auto plan = RingAttentionPlan::make(1, 3, shape_of(600, 50, causal), {});
    ASSERT_TRUE(plan);
    // Lengths at which the parts of some rank are all rounded up.
    for (std::uint32_t length = 1; length <= 12; ++length) {
      const auto starts = starts_of(std::vector<std::uint32_t>(50, length));
      const PackedTables tables(*plan, {1, 3, 0, 0}, starts);
      for (std::uint32_t rank = 0; rank < 3; ++rank) EXPECT_LE(tables.rows(rank), plan->rows_max());
    }
  }
}

TEST(RingPacked, OtherLengthsHaveAnotherDigest) {
  const auto plan = RingAttentionPlan::make(1, 1, shape_of(100, 9, true), {});
  ASSERT_TRUE(plan);
  const auto digest = [&](const std::vector<std::uint32_t>& lengths) {
    return PackedTables(*plan, {1, 1, 0, 0}, starts_of(lengths)).digest();
  };
  EXPECT_EQ(digest({10, 20, 30}), digest({10, 20, 30}));
  EXPECT_NE(digest({10, 20, 30}), digest({20, 10, 30}));
  EXPECT_NE(digest({10, 20, 30}), digest({10, 20, 31}));
  EXPECT_NE(digest({10, 20, 30}), digest({10, 50}));
}

class RingPackedWorlds : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(RingPackedWorlds, AreWithinTheirBoundOnEveryRank) {
  const std::uint32_t nodes = GetParam();
  for (std::uint32_t locals = 1; locals <= 4; ++locals) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(fmt::format("{} nodes of {}{}", nodes, locals, causal ? ", causal" : ""));
      RingJobOptions options;
      options.nodes = nodes;
      options.locals = locals;
      options.shape = shape_of(90, 7, causal);
      options.tiling = {5, 7, 700, 1 + locals % 4, 1 + locals % 2};
      // As GPUs have their keys, too.
      if ((nodes + locals) % 2 == 0) {
        options.tiling.packing = KeyPacking::kHeads;
        options.tiling.window_pairs = locals % 3;
      }
      options.cpu.wait_timeout = std::chrono::seconds(60);
      options.seed = nodes * 10 + locals;
      RingJob job(options);
      const NetworkThread network(job.cluster(), options.seed);
      std::mt19937_64 random(options.seed);
      std::vector<RingLaunch> launches;
      for (std::uint32_t i = 0; i < 6; ++i) {
        launches.push_back(launch_of(random_lengths(random, 7, 90)));
        launches.back().mode = i % 3 == 2 ? Mode::kUnfused : Mode::kFused;
        launches.back().inputs = static_cast<RingInputs>(random() % 4);
        launches.back().padded = i % 2 == 0;
        launches.back().draw = i;
      }
      launches.push_back(launch_of({1}));  // most ranks have no row
      launches.push_back(launch_of({90}));
      launches.push_back(launch_of({1, 1, 1, 1, 1, 1, 84}));
      launches.push_back(launch_of({0, 0, 41, 0, 2, 0, 0}));
      launches.push_back(launch_of({0, 0}));  // nobody has a row
      const auto results = job.run(launches);
      for (std::size_t i = 0; i < launches.size(); ++i)
        ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, RingPackedWorlds, ::testing::Values(1, 2, 3));

// The messages on too short sequences advise it.
TEST(RingPacked, ASequenceMayHaveFewerRowsThanThereAreRanks) {
  for (const bool causal : {false, true}) {
    RingJobOptions options;
    options.nodes = options.locals = 2;
    options.shape = shape_of(7, 1, causal);
    options.tiling = {5, 7, 700, 2, 2};
    RingJob job(options);
    NetworkThread network(job.cluster(), 5);
    std::vector<RingLaunch> launches;
    for (std::uint32_t rows = 1; rows <= 7; ++rows) launches.push_back(launch_of({rows}));
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i)
      EXPECT_EQ(job.check(launches[i], results[i]), "") << i + 1 << " rows, causal " << causal;
    EXPECT_EQ(network.stop().complaint(), "");
  }
}

TEST(RingPacked, ASequenceIsAsItIsByItself) {
  RingJobOptions options;
  options.nodes = 2;
  options.shape = shape_of(80, 3, true);
  options.cpu.wait_timeout = std::chrono::seconds(120);
  RingJob packed(options);
  const NetworkThread packed_network(packed.cluster(), 1);
  options.shape.sequences_max = 0;
  RingJob alone(options);
  const NetworkThread network(alone.cluster(), 2);
  RingLaunch one = launch_of({40});
  const auto together = packed.run({launch_of({40, 23, 17})});
  one.lengths.clear();
  const auto by_itself = alone.run({one});
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const auto& expected = by_itself[0][rank].out;
    ASSERT_TRUE(together[0][rank].stats);
    ASSERT_FALSE(expected.empty());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), together[0][rank].out.begin()));
  }
}

TEST(RingPacked, RanksWithOtherLengthsAreAnError) {
  RingJobOptions options;
  options.locals = 2;
  options.shape = shape_of(80, 3, true);
  options.cpu.wait_timeout = std::chrono::seconds(60);
  RingJob job(options);
  std::vector<RingRankResult> results(2);
  std::vector<std::thread> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    // As many rows in all.
    ranks.emplace_back([&, rank] {
      results[rank] = job.launch(rank, launch_of(rank == 0 ? std::vector<std::uint32_t>{30, 10, 40}
                                                           : std::vector<std::uint32_t>{30, 50}));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  bool mismatch = false;
  for (const RingRankResult& result : results) {
    ASSERT_FALSE(result.stats);
    mismatch |= result.stats.error().code == ErrorCode::kShapeMismatch;
  }
  EXPECT_TRUE(mismatch);
}

TEST(RingPacked, WrongStartsChangeNothing) {
  RingJobOptions options;
  options.shape = shape_of(80, 3, true);
  RingJob job(options);
  const std::vector<std::uint16_t> some(80 * 4 * 64, 0);
  std::vector<std::uint16_t> out(some.size(), 0x1234);
  const auto error = [&](const std::vector<std::uint32_t>& starts, std::uint64_t seq,
                         std::uint64_t room = 0) {
    RingAttentionTensors tensors;
    tensors.q = tensors.k = tensors.v = some.data();
    tensors.out = out.data();
    tensors.starts = starts.empty() ? nullptr : starts.data();
    tensors.sequences = static_cast<std::uint32_t>(starts.empty() ? 0 : starts.size() - 1);
    tensors.room = room;
    const auto result = job.op(0).launch(tensors, seq);
    if (result) return std::string("none");
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    return result.error().message;
  };
  EXPECT_THAT(error({}, 80), HasSubstr("their starts are null"));
  EXPECT_THAT(error({0}, 80), HasSubstr("0 sequences"));
  EXPECT_THAT(error({0, 1, 2, 3, 4}, 4),
              HasSubstr("4 sequences; the operator was made for 1 to 3"));
  EXPECT_THAT(error({1, 80}, 80), HasSubstr("starts at row 1, not at 0"));
  EXPECT_THAT(error({0, 30, 20, 80}, 80),
              HasSubstr("sequence 1 starts at row 30 and ends at row 20"));
  EXPECT_THAT(error({0, 30, 80}, 80, 79),
              HasSubstr("has 80 rows, and its tensors have room for 79"));
  EXPECT_THAT(error({0, 30, 81}, 81), HasSubstr("81 rows in all"));
  EXPECT_THAT(error({0, 30, 79}, 80), HasSubstr("the last sequence ends at row 79"));
  EXPECT_EQ(out, std::vector<std::uint16_t>(some.size(), 0x1234));
  EXPECT_EQ(job.op(0).epoch(), 0u);
  EXPECT_EQ(error({0, 30, 80}, 80), "none");
}

TEST(RingPacked, PlansThatAreNotPossibleAreRefused) {
  RingAttentionShape shape = shape_of(80, 3, true);
  shape.batch = 2;
  const auto in_batches = RingAttentionPlan::make(1, 1, shape, {});
  ASSERT_FALSE(in_batches);
  EXPECT_THAT(in_batches.error().message, HasSubstr("in a batch of 2"));
  EXPECT_FALSE(RingAttentionPlan::make(1, 1, shape_of(80, 1u << 17, true), {}));
  // Ranks that differ in it are found out.
  const auto one = RingAttentionPlan::make(1, 2, shape_of(80, 3, true), {});
  const auto other = RingAttentionPlan::make(1, 2, shape_of(80, 4, true), {});
  ASSERT_TRUE(one && other);
  EXPECT_NE(one->fingerprint(), other->fingerprint());
}

}  // namespace
}  // namespace mk::kernels::testing
