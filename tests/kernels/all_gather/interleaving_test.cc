// AllGather's roles as a discrete-event simulation (support/simulation.h): every rank gets every
// row in every world, in adversarial orders; nobody waits in a circle.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "kernels/ops/all_gather/spec.h"
#include "tests/kernels/support/interleaving_tests.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

struct AllGatherOptions : SimOptions {
  std::uint32_t m_max = 1;
  std::uint32_t n = 1;
  Tiling tiling;
};

std::uint16_t element(std::uint32_t epoch, std::uint32_t row, std::uint32_t column) {
  return static_cast<std::uint16_t>(
      (epoch * 0x85ebca6bu ^ row * 0xc2b2ae35u ^ column * 0x27d4eb2fu) >> 15);
}

struct AllGatherRank {
  AllGatherLaunch launch;
  std::vector<std::uint16_t> own;
  std::vector<std::uint16_t> all;
};

/// Others may look after every piece of a row.
struct Executor : SimExecutor {
  explicit Executor(const SimExecutor& frame) : SimExecutor(frame) {}
  void copy(const CopyJob& job) { copy_in_pieces(job, 20); }
};

class AllGatherSimulation : private SimOperator {
 public:
  explicit AllGatherSimulation(const AllGatherOptions& options)
      : plan_(plan_or_throw(AllGatherPlan::make(options.nodes, options.locals, options.m_max,
                                                options.n, DType::kBf16, options.tiling))),
        ranks_(options.nodes * options.locals),
        simulation_(*this, options, plan_.workspace_bytes, plan_.flag_count()) {
    for (AllGatherRank& rank : ranks_) {
      rank.launch.plan = plan_;
      rank.launch.banks = plan_.banks();
      rank.launch.blocks = options.blocks;
    }
  }

  std::string run() { return simulation_.run(); }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }

 private:
  const char* name() const override { return "all_gather"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = ranks_[0].launch.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCollect, blocks.compute);
    add_gather_roles(threads, world, blocks);
    return threads;
  }
  void begin(std::uint32_t index) override {
    AllGatherRank& rank = ranks_[index];
    AllGatherLaunch& launch = rank.launch;
    launch.make_schedule();
    const std::uint32_t n = plan_.n;
    const ShardRange shard = launch.shards.of(index);
    rank.own.clear();
    for (std::uint32_t row = shard.first; row < shard.first + shard.count; ++row) {
      for (std::uint32_t column = 0; column < n; ++column)
        rank.own.push_back(element(launch.epoch, row, column));
    }
    // In some launches of some ranks, where the last one's may lie.
    const void* rows = rank.own.data();
    launch.in_place = plan_.nodes > 1 && (launch.epoch / 2 + launch.epoch / 3 + index) % 2 == 0;
    if (launch.in_place) {
      void* const place = plan_.input(launch.context);
      std::copy(rank.own.begin(), rank.own.end(), static_cast<std::uint16_t*>(place));
      rows = place;
    }
    launch.rows =
        GatherSource::of(rows, plan_.gather.row_bytes, plan_.gather.row_bytes, shard.count);
    rank.all.assign(std::size_t{launch.m} * n, 0x7fff);
    launch.all = reinterpret_cast<std::byte*>(rank.all.data());
    launch.sharing = SimExecutor::sharing(launch);
    launch.onward = SimExecutor::onward(launch);
    launch.collect_parts = 1 + (launch.epoch + index) % 3;
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                const SimExecutor& frame) override {
    Executor executor(frame);
    AllGatherBlock<Executor> block(executor, ranks_[rank].launch, role, index, totals);
    return all_gather::run_role(block);
  }
  std::string check(std::uint32_t index) override {
    const AllGatherRank& rank = ranks_[index];
    for (std::uint32_t i = 0; i < rank.all.size(); ++i) {
      if (rank.all[i] != element(rank.launch.epoch, i / plan_.n, i % plan_.n))
        return fmt::format("[{}][{}] is wrong", i / plan_.n, i % plan_.n);
    }
    return {};
  }

  AllGatherPlan plan_;
  std::vector<AllGatherRank> ranks_;
  Simulation simulation_;
};

TEST_P(EveryWorldAndOrder, EndsAndIsRight) {
  for_every_world_and_order<AllGatherOptions>(
      GetParam(), [](AllGatherOptions& options, std::uint32_t banks, std::mt19937_64& random) {
        const std::uint32_t ranks = options.nodes * options.locals;
        options.m_max = static_cast<std::uint32_t>(1 + random() % (ranks * 5));
        options.n = static_cast<std::uint32_t>(1 + random() % 60);
        options.tiling = {0, 0, 64, banks, static_cast<std::uint32_t>(random() % 2)};
        options.blocks = random_gather_blocks(random);
        options.launches = random_sim_launches(4, options.m_max, options.seed);
        ASSERT_EQ(AllGatherSimulation(options).run(), "");
      });
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorldAndOrder, ::testing::Values(1u, 2u, 3u, 4u));

TEST(AllGatherInterleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    auto options = small_world<AllGatherOptions>(static_cast<std::uint32_t>(2 + seed % 2),
                                                 static_cast<std::uint32_t>(1 + seed % 3),
                                                 random_sim_launches(8, 20, seed), seed);
    options.m_max = 20;
    options.n = 45;
    options.tiling = {0, 0, 64, static_cast<std::uint32_t>(1 + seed / 2 % 2),
                      static_cast<std::uint32_t>(seed / 4 % 2)};
    ASSERT_EQ(AllGatherSimulation(options).run(), "") << "seed " << seed;
  }
}

/// In how many of 20 runs a wrong element was seen.
int wrong_of_20(const NetworkOptions& faults) {
  return seeds_seen_wrong<AllGatherSimulation>(20, [&](std::uint64_t seed) {
    auto options = two_large_launches<AllGatherOptions>(seed, faults);
    options.m_max = 40;
    options.n = 45;
    options.tiling = {0, 0, 256, 2};
    return options;
  });
}

TEST(AllGatherInterleaving, AChunkThatDidNotMoveIsSeen) {
  EXPECT_EQ(wrong_of_20(network_with(&NetworkOptions::truncate_one_chunk)), 20);
}

TEST(AllGatherInterleaving, AFlagBeforeItsDataIsSeen) {
  EXPECT_GT(wrong_of_20(network_with(&NetworkOptions::flags_first)), 5);
}

}  // namespace
}  // namespace mk::kernels::testing
