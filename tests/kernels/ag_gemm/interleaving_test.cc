// The roles of AllGather+GEMM as a discrete-event simulation (support/simulation.h): every launch
// ends. Every tile is made of the right rows of A, each as its rank has it in this launch.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops/ag_gemm/run_role.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "tests/kernels/support/interleaving_tests.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

struct AgGemmOptions : SimOptions {
  Shape max;
  Tiling tiling;
  bool spans = false;  ///< of every other rank and launch, where tiles may
};

/// A's element in a launch.
std::uint16_t element(std::uint32_t epoch, std::uint32_t row, std::uint32_t column) {
  return static_cast<std::uint16_t>(
      (epoch * 0x85ebca6bu ^ row * 0xc2b2ae35u ^ column * 0x27d4eb2fu) >> 15);
}

struct AgGemmRank {
  AgGemmLaunch launch;
  std::vector<std::uint16_t> a;
  std::vector<std::uint16_t> c;
  std::vector<std::uint16_t> gathered;
  std::uint32_t dma_starts = 0;
  std::uint32_t dma_pieces = 0;     ///< that have come over the network
  std::uint32_t dma_passed_on = 0;  ///< 1: all of them
};

/// Instead of a product, C[i][j] = sum of A's row i, plus j, modulo 2^16: as sensitive to any wrong
/// element. Yields between rows.
class Executor : public SimExecutor {
 public:
  Executor(const SimExecutor& frame, AgGemmRank& rank) : SimExecutor(frame), rank_(rank) {}

  bool multiply(const AgGemmTile& tile, const std::byte* rows, std::uint64_t stride_bytes) {
    const std::uint32_t n = rank_.launch.plan.max.n;
    for (std::uint32_t i = 0; i < tile.rect.rows; ++i) {
      std::uint32_t sum = 0;
      for (std::uint32_t at = 0; at < rank_.launch.plan.max.k; ++at) {
        std::uint16_t value = 0;
        std::memcpy(&value, rows + i * stride_bytes + at * kElementBytes, kElementBytes);
        sum += value;
      }
      for (std::uint32_t j = 0; j < tile.rect.columns; ++j) {
        const std::uint32_t column = tile.rect.column + j;
        rank_.c[std::size_t{tile.rect.row + i} * n + column] =
            static_cast<std::uint16_t>(sum + column);
      }
      maybe_yield();
    }
    return true;
  }
  void copy(const CopyJob& job) { copy_in_pieces(job, job.row_bytes); }
  void start_dma(std::uint32_t, std::uint32_t) {
    maybe_yield();
    ++rank_.dma_starts;
  }
  void pass_on_dma() {
    maybe_yield();
    ++rank_.dma_pieces;
    stores_done();
  }
  const std::uint32_t* dma_passed_on() const { return &rank_.dma_passed_on; }
  void dma_done() { rank_.dma_pieces = rank_.dma_passed_on = 0; }

 private:
  AgGemmRank& rank_;
};

class AgGemmSimulation : private SimOperator {
 public:
  explicit AgGemmSimulation(const AgGemmOptions& options)
      : plan_(make_plan(options)),
        spans_(options.spans),
        ranks_(make_ranks(options, plan_)),
        simulation_(*this, options, plan_.workspace_bytes, plan_.flag_count()) {}

  std::string run() { return simulation_.run(); }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }
  std::uint64_t passed_on() const { return passed_on_; }
  std::uint32_t spanned() const { return spanned_; }

 private:
  static AgGemmPlan make_plan(const AgGemmOptions& options) {
    return plan_or_throw(
        AgGemmPlan::make(options.nodes, options.locals, options.max, DType::kBf16, options.tiling));
  }
  static std::vector<AgGemmRank> make_ranks(const AgGemmOptions& options, const AgGemmPlan& plan) {
    std::vector<AgGemmRank> ranks(options.nodes * options.locals);
    for (AgGemmRank& rank : ranks) {
      rank.launch.plan = plan;
      rank.launch.banks = plan.gather.banks;
      rank.launch.blocks = options.blocks;
    }
    return ranks;
  }

  const char* name() const override { return "ag_gemm"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = ranks_[0].launch.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute, Role::kCollect);
    add_gather_roles(threads, world, blocks);
    return threads;
  }
  void begin(std::uint32_t index) override {
    AgGemmRank& rank = ranks_[index];
    rank.launch.spans =
        spans_ && (rank.launch.epoch + index) % 2 == 0 &&
        AgGemmSchedule::may_span(plan_.nodes, plan_.locals, rank.launch.m, plan_.tile_m);
    spanned_ += rank.launch.spans;
    rank.launch.make_schedule();
    const std::uint32_t k = plan_.max.k;
    const ShardRange shard =
        shard_of(rank.launch.m, static_cast<std::uint32_t>(ranks_.size()), index);
    rank.a.assign(std::size_t{shard.count} * (k + 1), 0x7fff);
    for (std::uint32_t row = 0; row < shard.count; ++row) {
      for (std::uint32_t column = 0; column < k; ++column)
        rank.a[row * (k + 1) + column] = element(rank.launch.epoch, shard.first + row, column);
    }
    rank.c.assign(std::size_t{rank.launch.m} * plan_.max.n, 0x7fff);
    rank.gathered.assign(index % 2 == 0 ? std::size_t{rank.launch.m} * k : 0, 0x7fff);
    // Ranks may differ in that.
    const std::uint32_t dice = rank.launch.epoch + index / 2;
    rank.launch.sharing = SimExecutor::sharing(rank.launch);
    rank.launch.sharing.by_dma = plan_.locals > 1 && plan_.gather.local_banks == 1 && dice % 3 != 0;
    rank.launch.arrival = rank.launch.sharing.by_dma ? Arrival::kInTurn
                          : dice % 2 == 0            ? Arrival::kSoonInTurn
                                                     : Arrival::kSideBySide;
    rank.dma_starts = 0;
    rank.launch.onward = SimExecutor::onward(rank.launch);
    rank.launch.collect_parts = 1 + dice % 3;
    if (rank.launch.sharing.by_dma && plan_.nodes > 1 && plan_.gather.banks == 1)
      rank.launch.onward.dma_chunks = 1 + dice % 4;
    rank.launch.shard = GatherSource::of(rank.a.data(), (k + 1) * kElementBytes,
                                         plan_.gather.row_bytes, shard.count);
    rank.launch.gathered =
        rank.gathered.empty() ? nullptr : reinterpret_cast<std::byte*>(rank.gathered.data());
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                const SimExecutor& frame) override {
    Executor executor(frame, ranks_[rank]);
    AgGemmBlock<Executor> block(executor, ranks_[rank].launch, role, index, totals);
    return ag_gemm::run_role(block, role);
  }
  /// A DMA engine: other ranks' rows, chunk by chunk, and each chunk's flag.
  bool run_beside(std::uint32_t index, const SimExecutor& frame) override {
    AgGemmRank& rank = ranks_[index];
    const AgGemmLaunch& launch = rank.launch;
    if (!launch.sharing.by_dma) return true;
    Executor executor(frame, rank);
    BlockTotals totals;
    AgGemmBlock<Executor> block(executor, launch, Role::kPull, 0, totals);
    if (!wait_until(executor, launch.control, WaitSite{.role = Role::kPull}, totals.waits, 1,
                    [&](std::uint64_t*) { return rank.dma_starts != 0; }))
      return false;
    const World& world = block.world;
    const GatherSchedule& gather = block.gather.schedule;
    for (std::uint32_t turn = 1; turn < world.locals; ++turn) {
      const std::uint32_t to = (world.local + world.locals - turn) % world.locals;
      for (std::uint32_t chunk = 1; chunk < gather.chunks(launch.shard.rows); ++chunk) {
        const ByteRange range = gather.chunk_range(launch.shard.rows, chunk);
        const std::uint64_t begin = range.begin - kGatherHeaderBytes;
        CopyJob job;
        job.add_target(block.gather.slot(to, world.rank()) + range.begin);
        launch.shard.copy_packed(begin, begin + range.bytes, job,
                                 [&](const CopyJob& part) { executor.copy(part); });
        block.gather.publish_ready_at(to, chunk);
      }
    }
    return launch.onward.dma_chunks == 0 || pass_on(rank, block);
  }
  /// What comes over the network, piece by piece, to one rank after the other.
  bool pass_on(AgGemmRank& rank, AgGemmBlock<Executor>& block) {
    const AgGemmLaunch& launch = rank.launch;
    const World& world = block.world;
    const GatherSchedule& gather = block.gather.schedule;
    const std::uint32_t at_once = launch.onward.dma_chunks;
    std::uint32_t pieces = 0;
    for (std::uint32_t hops = 1; hops < world.nodes; ++hops) {
      const std::uint32_t origin = world.rail_peer(gather.node_at(hops));
      const std::uint32_t rows = block.schedule.shard(origin).count;
      const std::uint32_t chunks = gather.chunks(rows);
      for (std::uint32_t first = 1; first < chunks; first += at_once) {
        ++pieces;
        if (!wait_until(block.executor, launch.control, WaitSite{.role = Role::kPull},
                        block.totals.waits, 1,
                        [&](std::uint64_t*) { return rank.dma_pieces >= pieces; }))
          return false;
        const std::uint32_t end = std::min(chunks, first + at_once);
        for (std::uint32_t turn = 1; turn < world.locals; ++turn) {
          const std::uint32_t to = (world.local + world.locals - turn) % world.locals;
          const ByteRange range = gather.chunks_range(rows, first, end - first);
          CopyJob job;
          job.source = block.gather.slot(world.local, origin) + range.begin;
          job.add_target(block.gather.slot(to, origin) + range.begin);
          job.rows = 1;
          job.row_bytes = range.bytes;
          block.executor.copy(job);
          for (std::uint32_t chunk = first; chunk < end; ++chunk)
            block.publish_at_local(to, gather.ready(origin, chunk));
        }
      }
    }
    passed_on_ += pieces;
    rank.dma_passed_on = 1;
    block.executor.stores_done();
    return true;
  }
  std::string check(std::uint32_t index) override {
    const AgGemmRank& rank = ranks_[index];
    const std::uint32_t k = plan_.max.k;
    if (rank.dma_starts != (rank.launch.sharing.by_dma ? 1 : 0))
      return fmt::format("DMA engines were started {} times", rank.dma_starts);
    if (rank.dma_pieces != 0 || rank.dma_passed_on != 0) return "DMA engines are not done";
    for (std::uint32_t row = 0; row < rank.launch.m; ++row) {
      std::uint32_t sum = 0;
      for (std::uint32_t at = 0; at < k; ++at) {
        const std::uint16_t expected = element(rank.launch.epoch, row, at);
        sum += expected;
        if (!rank.gathered.empty() && rank.gathered[row * k + at] != expected)
          return fmt::format("gathered [{}][{}] is wrong", row, at);
      }
      for (std::uint32_t column = 0; column < plan_.max.n; ++column) {
        if (rank.c[std::size_t{row} * plan_.max.n + column] !=
            static_cast<std::uint16_t>(sum + column))
          return fmt::format("[{}][{}] is wrong", row, column);
      }
    }
    return {};
  }

  AgGemmPlan plan_;
  const bool spans_;
  std::uint32_t spanned_ = 0;  ///< launches of a rank
  std::vector<AgGemmRank> ranks_;
  std::uint64_t passed_on_ = 0;  ///< pieces, by DMA engines
  Simulation simulation_;
};

TEST_P(EveryWorldAndOrder, EndsAndIsRight) {
  for_every_world_and_order<AgGemmOptions>(
      GetParam(), [](AgGemmOptions& options, std::uint32_t banks, std::mt19937_64& random) {
        options.max = {
            static_cast<std::uint32_t>(1 + random() % (options.nodes * options.locals * 5)),
            static_cast<std::uint32_t>(1 + random() % 20),
            static_cast<std::uint32_t>(1 + random() % 30)};
        options.tiling = {2, 8, 64, banks, static_cast<std::uint32_t>(random() % 2)};
        options.blocks = random_gather_blocks(random);
        options.launches = random_sim_launches(3, options.max.m, options.seed);
        ASSERT_EQ(AgGemmSimulation(options).run(), "");
      });
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorldAndOrder, ::testing::Values(1u, 2u, 3u, 4u));

TEST(AgGemmInterleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    auto options = small_world<AgGemmOptions>(static_cast<std::uint32_t>(2 + seed % 2),
                                              static_cast<std::uint32_t>(1 + seed % 3),
                                              random_sim_launches(8, 20, seed), seed);
    options.max = {20, 16, 12};
    options.tiling = {2, 8, 64, static_cast<std::uint32_t>(1 + seed / 2 % 2),
                      static_cast<std::uint32_t>(seed / 4 % 2)};
    ASSERT_EQ(AgGemmSimulation(options).run(), "") << "seed " << seed;
  }
}

// One bank, and engines that bring rows and pass on what comes, some of the ranks' in each launch.
TEST(AgGemmInterleaving, EnginesPassOnWhatComesOverTheNetwork) {
  std::uint64_t pieces = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    AgGemmOptions options;
    options.nodes = static_cast<std::uint32_t>(2 + seed % 3);
    options.locals = static_cast<std::uint32_t>(2 + seed / 3 % 3);
    options.max = {static_cast<std::uint32_t>(24 + seed % 7), 12, 40};
    options.tiling = {2, 8, 64, 1, 1};
    options.launches = random_sim_launches(8, options.max.m, seed);
    options.set_seed(seed);
    AgGemmSimulation simulation(options);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    pieces += simulation.passed_on();
  }
  EXPECT_GT(pieces, 1000u);
}

// Some ranks' tiles span all shards, others' do not.
TEST(AgGemmInterleaving, TilesThatSpanAllShardsWaitForAllRows) {
  std::uint32_t spanned = 0;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    auto options =
        small_world<AgGemmOptions>(1, static_cast<std::uint32_t>(2 + seed % 3), {}, seed);
    options.max = {40, 24, 12};
    options.tiling = {128, 8, 64, static_cast<std::uint32_t>(1 + seed / 2 % 2),
                      static_cast<std::uint32_t>(seed / 4 % 2)};
    options.launches = random_sim_launches(8, options.max.m, seed);
    options.spans = true;
    AgGemmSimulation simulation(options);
    ASSERT_EQ(simulation.run(), "") << "seed " << seed;
    spanned += simulation.spanned();
  }
  EXPECT_GT(spanned, 800u);
}

/// In how many of 20 runs a wrong element was seen.
int wrong_of_20(const NetworkOptions& faults) {
  return seeds_seen_wrong<AgGemmSimulation>(20, [&](std::uint64_t seed) {
    auto options = two_large_launches<AgGemmOptions>(seed, faults);
    options.max = {40, 16, 24};
    options.tiling = {2, 8, 256, 2};
    return options;
  });
}

// A chunk of which only a part moves makes some tile wrong.
TEST(AgGemmInterleaving, AChunkThatDidNotMoveIsSeen) {
  EXPECT_EQ(wrong_of_20(network_with(&NetworkOptions::truncate_one_chunk)), 20);
}

TEST(AgGemmInterleaving, AFlagBeforeItsDataIsSeen) {
  EXPECT_GT(wrong_of_20(network_with(&NetworkOptions::flags_first)), 5);
}

}  // namespace
}  // namespace mk::kernels::testing
