// Ring Attention on the CPU executor: ranks as threads, every world, with and without the mask,
// grouped heads, both head dimensions and types; each element against float64.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernels/ops/ring/schedule.h"
#include "kernels/plan/account.h"
#include "tests/kernels/ring/job.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/same_bits.h"

namespace mk::kernels::testing {
namespace {

using std::chrono::milliseconds;

RingJobOptions job_options(std::uint32_t nodes, std::uint32_t locals, bool causal,
                           std::uint64_t seed) {
  RingJobOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.shape = {nodes * locals * 12 + 19, 4, 2, 64, causal};
  options.tiling = {5, 7, 700, static_cast<std::uint32_t>(1 + seed % 4),
                    static_cast<std::uint32_t>(1 + seed % 2)};
  options.cpu.wait_timeout = std::chrono::seconds(120);
  options.seed = seed;
  return options;
}

std::vector<RingLaunch> random_launches(const RingAttentionPlan& plan, std::uint32_t count,
                                        std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<RingLaunch> launches(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    RingLaunch& launch = launches[i];
    launch.seq =
        static_cast<std::uint32_t>(plan.parts() + random() % (plan.seq_max - plan.parts() + 1));
    launch.mode = random() % 4 == 0 ? Mode::kUnfused : Mode::kFused;
    launch.inputs = static_cast<RingInputs>(random() % 4);
    launch.padded = random() % 2 == 0;
    launch.lse = random() % 3 != 0;
    launch.draw = i;
  }
  launches.front().seq = plan.parts();
  launches.back().seq = plan.seq_max;
  return launches;
}

class EveryWorld : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(EveryWorld, IsWithinItsBoundOnEveryRank) {
  const std::uint32_t nodes = GetParam();
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    for (bool causal : {false, true}) {
      const std::uint64_t seed = nodes * 100 + locals * 2 + causal;
      RingJobOptions options = job_options(nodes, locals, causal, seed);
      options.shape.dtype = seed % 3 == 0 ? DType::kF16 : DType::kBf16;
      options.shape.head_dim = locals % 4 == 3 ? 128 : 64;
      options.shape.key_heads = locals % 2 == 0 ? 1 : locals % 3 == 0 ? 4 : 2;
      options.cpu.blocks.compute = 1 + locals % 2;
      options.cpu.blocks.send = 1 + locals % 2;
      SCOPED_TRACE(fmt::format("{} x {} ranks, causal {}", nodes, locals, causal));
      RingJob job(options);
      NetworkThread network(job.cluster(), seed);
      const auto launches = random_launches(job.plan(), 3, seed);
      const auto results = job.run(launches);
      for (std::size_t i = 0; i < launches.size(); ++i) {
        ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << i;
        for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
          const World world = job.cluster().rank(rank).world;
          const RingAttentionSchedule schedule(job.plan(), world, launches[i].seq,
                                               launches[i].mode);
          ASSERT_EQ(results[i][rank].stats->network_bytes, schedule.network_bytes());
          ASSERT_EQ(results[i][rank].stats->mode, launches[i].mode);
        }
      }
      ASSERT_EQ(network.stop().complaint(), "");
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorld, ::testing::Values(1u, 2u, 3u, 4u));

// The tiles, chunks and passes that the plan chooses by itself, on a sequence with several of each.
TEST(RingAttentionCpu, ChosenTilesGiveTheSame) {
  for (bool causal : {false, true}) {
    RingJobOptions options = job_options(2, 2, causal, 5);
    options.shape = {600, 8, 2, 128, causal};
    options.tiling = {};
    RingJob job(options);
    NetworkThread network(job.cluster(), 5);
    RingLaunch launch;
    launch.seq = 600;
    ASSERT_EQ(job.check(launch, job.run({launch})[0]), "");
  }
}

// Ranks start launches up to pause_max apart, in two banks and in one, with changing lengths and
// inputs: a stale flag or an early reuse gives a wrong element.
TEST(RingAttentionCpu, SkewedRanksAndManyLaunches) {
  for (std::uint32_t seed : {1u, 2u}) {
    RingJobOptions options = job_options(2 + seed % 2, 2, seed % 2 == 0, seed);
    RingJob job(options);
    NetworkThread network(job.cluster(), seed);
    const auto launches = random_launches(job.plan(), 60, seed);
    const auto results = job.run(launches, milliseconds(4));
    for (std::size_t i = 0; i < launches.size(); ++i) {
      ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << i << ", seed " << seed;
    }
    ASSERT_EQ(network.stop().complaint(), "");
  }
}

TEST(RingAttentionCpu, AnAdaptivePartitionChangesNoBit) {
  for (const auto& [nodes, locals] : {std::pair{1u, 2u}, {1u, 3u}, {2u, 1u}, {2u, 2u}}) {
    for (const bool causal : {false, true}) {
      const RingJobOptions options = job_options(nodes, locals, causal, nodes * 10 + locals);
      RingJobOptions of_plan = options;
      std::vector<RingLaunch> launches = random_launches(RingJob(of_plan).plan(), 32, nodes);
      for (RingLaunch& launch : launches)
        launch.seq = static_cast<std::uint32_t>(options.shape.seq_max);
      std::vector<Workers RoleBlocks::*> roles{&RoleBlocks::share};
      if (nodes > 1 && locals > 1) roles.push_back(&RoleBlocks::receive);
      expect_same_bits_as_threads_go_over<RingJob>(
          options, roles, launches, [](const RingRankResult& one, const RingRankResult& other) {
            return one.out == other.out && one.lse == other.lse;
          });
      if (HasFatalFailure()) return;
    }
  }
}

// The same inputs give the same bits: from run to run, fused or not, in any number of passes and
// blocks.
TEST(RingAttentionCpu, EveryRunGivesTheSameBits) {
  std::vector<std::vector<std::uint16_t>> out;
  std::vector<std::vector<float>> lse;
  for (std::uint32_t run = 0; run < 4; ++run) {
    RingJobOptions options = job_options(3, 2, true, 9);
    options.tiling.remote_passes = run == 0 ? 1 : 1 + run * 2;
    options.tiling.banks = 1 + run % 2;
    options.cpu.blocks.compute = 1 + run;
    RingJob job(options);
    NetworkThread network(job.cluster(), run);
    RingLaunch launch;
    launch.seq = job.plan().seq_max;
    RingLaunch other = launch;
    other.mode = Mode::kUnfused;
    const auto results = job.run({launch, other, launch}, milliseconds(2));
    for (const auto& ranks : results) {
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        ASSERT_TRUE(ranks[rank].stats) << ranks[rank].stats.error().message;
        if (out.size() <= rank) {
          out.push_back(ranks[rank].out);
          lse.push_back(ranks[rank].lse);
        }
        ASSERT_EQ(ranks[rank].out, out[rank]) << "run " << run << ", rank " << rank;
        ASSERT_EQ(ranks[rank].lse, lse[rank]) << "run " << run << ", rank " << rank;
      }
    }
  }
}

// Turns shorter than there are send blocks give none of them all chunks: each has every third of a
// shard's.
TEST(RingAttentionCpu, ShortTurnsAreDealtOutToAllSendBlocks) {
  constexpr std::uint32_t kSenders = 3;
  for (const std::uint32_t turn : {1u, 2u, 4u}) {
    RingJobOptions options = job_options(3, 1, false, 1);
    options.tiling = {5, 7, 128, 1, 2, KeyPacking::kHeads};
    options.tiling.turn_chunks = turn;
    options.cpu.blocks.send = kSenders;
    RingJob job(options);
    NetworkThread network(job.cluster(), 5);
    const RingLaunch launch{static_cast<std::uint32_t>(job.plan().seq_max)};
    const auto results = job.run({launch});
    ASSERT_EQ(job.check(launch, results[0]), "");
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      const RankMemory& memory = job.cluster().rank(rank);
      const RingAttentionSchedule schedule(job.plan(), memory.world, launch.seq, launch.mode);
      for (std::uint32_t lane = 0; lane < kSenders; ++lane) {
        std::uint64_t chunks = 0;
        for (std::uint32_t hops = 0; hops < 2; ++hops) {
          const std::uint32_t origin = schedule.gather().node_at(hops);
          chunks +=
              div_up(schedule.gather().chunks(schedule.gathered_rows(origin)) - lane, kSenders);
        }
        EXPECT_EQ(memory.producers[lane].produced, chunks)
            << "rank " << rank << ", lane " << lane << ", turns of " << turn;
      }
    }
  }
}

// A workspace with room for fewer heads than there are: launch by launch of the protocol, with
// skewed ranks, and the bits of one that has room for all.
TEST(RingAttentionCpu, WindowsOfHeadsChangeNoBit) {
  for (const bool causal : {false, true}) {
    RingJobOptions options = job_options(2, 2, causal, 3);
    options.shape.query_heads = 10;
    options.shape.key_heads = 5;
    options.tiling.packing = KeyPacking::kHeads;
    std::vector<std::vector<RingRankResult>> all;
    std::vector<RingLaunch> launches;
    std::uint64_t workspace_bytes = ~0ull;
    for (const std::uint32_t window : {0u, 4u, 2u, 1u}) {
      SCOPED_TRACE(fmt::format("windows of {}, causal {}", window, causal));
      options.tiling.window_pairs = window;
      options.tiling.banks = 1 + window % 2;
      RingJob job(options);
      NetworkThread network(job.cluster(), 3);
      if (window == 0) launches = random_launches(job.plan(), 6, 4);
      const auto results = job.run(launches, milliseconds(2));
      if (window == 0) all = results;
      for (std::size_t i = 0; i < launches.size(); ++i) {
        ASSERT_EQ(job.check(launches[i], results[i]), "") << "launch " << i;
        for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
          ASSERT_EQ(results[i][rank].out, all[i][rank].out);
          ASSERT_EQ(results[i][rank].lse, all[i][rank].lse);
          std::uint64_t bytes = 0;
          for (std::uint32_t w = 0; w < job.plan().windows(); ++w) {
            const RingAttentionGeometry its = job.plan().of_window(job.plan().window(w));
            bytes += RingAttentionSchedule(its, job.cluster().rank(rank).world, launches[i].seq,
                                           launches[i].mode)
                         .network_bytes();
          }
          ASSERT_EQ(results[i][rank].stats->network_bytes, bytes);
        }
      }
      if (options.tiling.banks == 1) {
        ASSERT_LT(job.plan().workspace_bytes, workspace_bytes);
        workspace_bytes = job.plan().workspace_bytes;
      }
      ASSERT_EQ(network.stop().complaint(), "");
    }
  }
}

// The estimate chooses, each rank for itself, and the statistics say what ran.
TEST(RingAttentionCpu, AutoRunsTheCheaperForm) {
  for (const auto& [step_ns, cheaper] : {std::pair{1.0, Mode::kFused}, {1e9, Mode::kUnfused}}) {
    RingJobOptions options = job_options(2, 2, true, 10);
    options.cpu.rates = {1e9, 1e9, 1e9, 1, step_ns};
    RingJob job(options);
    NetworkThread network(job.cluster(), 10);
    auto launches = random_launches(job.plan(), 8, 10);
    for (RingLaunch& launch : launches) launch.mode = Mode::kAuto;
    const auto results = job.run(launches);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      ASSERT_EQ(job.check(launches[i], results[i]), "");
      for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
        const LaunchStats& stats = *results[i][rank].stats;
        const Estimate expected = plan::expected(
            job.plan().work(job.cluster().rank(rank).world, launches[i].seq), options.cpu.rates);
        EXPECT_EQ(stats.estimate.fused_ns, expected.fused_ns);
        EXPECT_EQ(stats.estimate.unfused_ns, expected.unfused_ns);
        EXPECT_EQ(stats.mode, expected.cheaper());
      }
    }
    EXPECT_EQ(results.back()[0].stats->mode, cheaper) << "the longest sequence";
  }
}

// Causal: no row knows what comes after it, NaN and infinities included, however many ranks there
// are and whatever lies together in a tile; the rows themselves do.
TEST(RingAttentionCpu, NothingOfTheFutureReachesARow) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto& [nodes, locals] : {std::pair{1u, 1u}, {1u, 2u}, {2u, 1u}, {1u, 4u}, {2u, 2u}}) {
    for (const std::uint32_t seq : {8u, 77u}) {
      RingJobOptions options = job_options(nodes, locals, true, 3);
      options.shape = {seq, 1, 1, 64, true};
      if (seq == 77) options.tiling.tile_k = 0;
      RingJob job(options);
      NetworkThread network(job.cluster(), 3);
      RingLaunch plain;
      plain.seq = seq;
      plain.inputs = seq == 8 ? RingInputs::kOnes : RingInputs::kRandom;
      std::vector<RingLaunch> launches = {plain};
      for (const float value : {infinity, -infinity, std::nanf("")}) {
        launches.push_back(plain);
        launches.back().special_from = seq - 1;
        launches.back().special = value;
      }
      const auto results = job.run(launches);
      for (std::size_t i = 0; i < launches.size(); ++i) {
        SCOPED_TRACE(fmt::format("{} x {}, {} rows, {}", nodes, locals, seq, launches[i].special));
        ASSERT_EQ(job.check(launches[i], results[i]), "");
        for (std::uint32_t rank = 0; i > 0 && rank < job.size(); ++rank) {
          // Rank 0 has the last row of the sequence, as its last.
          const std::size_t own = results[0][rank].lse.size() - (rank == 0 ? 1 : 0);
          const auto end = static_cast<std::ptrdiff_t>(own * 64);
          EXPECT_TRUE(std::equal(results[0][rank].out.begin(), results[0][rank].out.begin() + end,
                                 results[i][rank].out.begin()));
          EXPECT_TRUE(std::equal(results[0][rank].lse.begin(),
                                 results[0][rank].lse.begin() + static_cast<std::ptrdiff_t>(own),
                                 results[i][rank].lse.begin()));
        }
        if (i > 0) {
          EXPECT_FALSE(std::isfinite(tools::to_float(DataType::kBf16, results[i][0].out.back())));
        }
      }
    }
  }
}

// A network that loses a chunk's bytes, or has them elsewhere, must be noticed; else the tests
// above would prove nothing.
TEST(RingAttentionCpu, AChunkThatDoesNotArriveOrChangedPlacesIsSeen) {
  for (bool NetworkOptions::*fault :
       {&NetworkOptions::truncate_one_chunk, &NetworkOptions::swap_in_one_chunk}) {
    RingJobOptions options = job_options(2, 1, false, 3);
    RingJob job(options);
    NetworkOptions broken;
    broken.*fault = true;
    NetworkThread network(job.cluster(), 3, broken);
    RingLaunch launch;
    launch.seq = job.plan().seq_max;
    const std::string wrong = job.check(launch, job.run({launch})[0]);
    EXPECT_NE(wrong.find("wrong in out"), std::string::npos) << wrong;
  }
}

// Nor would they if the bound did not notice one key too few, one too many, or two swapped.
TEST(RingAttentionCpu, TheReferenceSeesAWrongKey) {
  RingJobOptions options = job_options(1, 2, true, 4);
  options.shape.seq_max = 200;
  RingJob job(options);
  RingLaunch launch;
  launch.seq = 200;
  RingLaunch shorter = launch;
  shorter.seq = 199;
  const auto right = job.run({launch});
  ASSERT_EQ(job.check(launch, right[0]), "");
  // One row's output in another's place.
  auto swapped = right[0];
  const std::size_t row = std::size_t{job.plan().query_heads} * job.plan().head_dim;
  std::swap_ranges(swapped[1].out.begin() + 40 * row, swapped[1].out.begin() + 41 * row,
                   swapped[1].out.begin() + 41 * row);
  EXPECT_NE(job.check(launch, swapped), "");
  // A result over all keys, held against one without the last key.
  RingJobOptions open = options;
  open.shape.causal = false;
  RingJob unmasked(open);
  const auto all = unmasked.run({launch});
  ASSERT_EQ(unmasked.check(launch, all[0]), "");
  // One key too many, of 199.
  const std::string wrong = unmasked.check(shorter, all[0]);
  EXPECT_NE(wrong.find("wrong in out"), std::string::npos) << wrong;
}

}  // namespace
}  // namespace mk::kernels::testing
