// The roles of GEMM+AllReduce as a discrete-event simulation (support/simulation.h). Tiles are
// small integers, so sums are exact.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/sum_rows.h"
#include "kernels/gemm_ar/plan.h"
#include "kernels/gemm_ar/roles.h"
#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

struct GemmArOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  Shape max;
  GemmArTiling tiling;
  RoleBlocks blocks;
  std::vector<SimLaunch> launches;
  Order order = Order::kRandom;
  std::uint64_t seed = 1;
  NetworkOptions network;
  bool forge_releases = false;  ///< all banks look released for ever
};

/// What a rank's partial of an element is in a launch: -4 .. 3, so that sums over 32 ranks are
/// exact in bf16.
int partial(std::uint32_t rank, std::uint32_t epoch, std::uint32_t row, std::uint32_t column) {
  std::uint32_t hash =
      (rank * 0x9e3779b1u) ^ (epoch * 0x85ebca6bu) ^ (row * 0xc2b2ae35u) ^ (column * 0x27d4eb2fu);
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  hash ^= hash >> 12;
  return static_cast<int>(hash % 8) - 4;
}

struct GemmArRank {
  GemmArLaunch launch;
  std::uint64_t commands_before = 0;
  bool sent_early = false;
  std::vector<std::uint16_t> c;
};

/// The executor of kernels/gemm_ar/roles.h; yields between rows.
class Executor : public SimExecutor {
 public:
  Executor(const SimExecutor& frame, GemmArRank& rank) : SimExecutor(frame), rank_(rank) {}

  bool multiply(const TileRect& rect, void* target, std::uint64_t stride) {
    for (std::uint32_t i = 0; i < rect.rows; ++i) {
      auto* row = static_cast<std::uint16_t*>(target) + i * stride;
      for (std::uint32_t j = 0; j < rect.columns; ++j) {
        const int value = partial(rank_.launch.context.world.rank(), rank_.launch.epoch,
                                  rect.row + i, rect.column + j);
        row[j] = from_float(DType::kBf16, static_cast<float>(value));
      }
      maybe_yield();
    }
    return true;
  }
  void sum(const SumJob& job) {
    SumJob row = job;
    row.rows = 1;
    for (std::uint32_t i = 0; i < job.rows; ++i) {
      for (std::uint32_t s = 0; s < job.source_count; ++s) {
        row.sources[s] = static_cast<const std::uint16_t*>(job.sources[s]) + i * job.source_stride;
      }
      for (std::uint32_t t = 0; t < job.target_count; ++t) {
        row.targets[t] = static_cast<std::uint16_t*>(job.targets[t]) + i * job.target_stride;
      }
      sum_rows(row_math_generic(DType::kBf16), row);
      maybe_yield();
    }
  }
  bool wants_c() const { return true; }
  void copy_to_c(const TileRect& rect, const void* source, std::uint64_t stride) {
    const std::uint32_t n = rank_.launch.plan.max.n;
    for (std::uint32_t i = 0; i < rect.rows; ++i) {
      const auto* row = static_cast<const std::uint16_t*>(source) + i * stride;
      std::copy(row, row + rect.columns, &rank_.c[std::size_t{rect.row + i} * n + rect.column]);
    }
  }

 private:
  GemmArRank& rank_;
};

class GemmArSimulation : private SimOperator {
 public:
  explicit GemmArSimulation(const GemmArOptions& options)
      : plan_(*GemmArPlan::make(options.nodes, options.locals, options.max, DType::kBf16,
                                options.tiling)),
        ranks_(make_ranks(options, plan_)),
        simulation_(*this, {{options.nodes, options.locals, plan_.workspace_bytes(),
                             plan_.flag_count(), options.blocks.send, 4},
                            options.launches,
                            options.order,
                            options.seed,
                            options.network}) {
    if (options.forge_releases) forge_releases();
  }

  std::string run() { return simulation_.run(); }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }

  /// Launches in which a rank had sent something before its product was done, over all launches of
  /// the mode.
  std::pair<int, int> overlapped(Mode mode) const { return overlapped_[static_cast<int>(mode)]; }

 private:
  static std::vector<GemmArRank> make_ranks(const GemmArOptions& options, const GemmArPlan& plan) {
    std::vector<GemmArRank> ranks(options.nodes * options.locals);
    for (GemmArRank& rank : ranks) {
      rank.launch.plan = plan;
      rank.launch.banks = plan.banks;
      rank.launch.blocks = options.blocks;
    }
    return ranks;
  }

  const char* name() const override { return "gemm_ar"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = ranks_[0].launch.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute, Role::kCollect);
    if (world.locals > 1) add_role(threads, Role::kReduce, blocks.reduce);
    if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
    if (world.nodes > 1) add_role(threads, Role::kReceive, blocks.receive);
    return threads;
  }
  void begin(std::uint32_t index) override {
    GemmArRank& rank = ranks_[index];
    rank.c.assign(std::size_t{rank.launch.m} * plan_.max.n, 0x7fff);
    rank.commands_before = produced(rank);
    rank.sent_early = false;
    auto* out = reinterpret_cast<std::uint16_t*>(
        rank.launch.context.workspaces[rank.launch.context.world.local] + plan_.layout.out);
    std::fill(out, out + std::size_t{plan_.max.m} * plan_.max.n, std::uint16_t{0x7fff});
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                const SimExecutor& frame) override {
    Executor executor(frame, ranks_[rank]);
    GemmArBlock block(executor, ranks_[rank].launch, role, index, totals);
    switch (role) {
      case Role::kCompute:
        return gemm_ar::compute(block);
      case Role::kCollect:
        return gemm_ar::collect(block);
      case Role::kReduce:
        return gemm_ar::reduce(block);
      case Role::kSend:
        return gemm_ar::send(block);
      default:
        return gemm_ar::receive(block);
    }
  }
  void watch(std::uint32_t index) override {
    GemmArRank& rank = ranks_[index];
    if (produced(rank) != rank.commands_before && !product_done(rank)) rank.sent_early = true;
  }
  std::string check(std::uint32_t index) override {
    const GemmArRank& rank = ranks_[index];
    auto& [early, all] = overlapped_[static_cast<int>(rank.launch.mode)];
    early += rank.sent_early;
    ++all;
    for (std::uint32_t row = 0; row < rank.launch.m; ++row) {
      for (std::uint32_t column = 0; column < plan_.max.n; ++column) {
        int expected = 0;
        for (std::uint32_t other = 0; other < ranks_.size(); ++other) {
          expected += partial(other, rank.launch.epoch, row, column);
        }
        const double got = to_double(DType::kBf16, rank.c[std::size_t{row} * plan_.max.n + column]);
        if (got != expected)
          return fmt::format("[{}][{}] is {}, expected {}", row, column, got, expected);
      }
    }
    return {};
  }

  static std::uint64_t produced(const GemmArRank& rank) {
    std::uint64_t sum = 0;
    for (std::uint32_t lane = 0; lane < rank.launch.blocks.send; ++lane)
      sum += rank.launch.context.lanes[lane].produced;
    return sum;
  }
  static bool product_done(const GemmArRank& rank) {
    for (std::uint32_t block = 0; block < rank.launch.blocks.compute; ++block) {
      if (rank.launch.local->done_by(Role::kCompute)[block] != rank.launch.epoch) return false;
    }
    return true;
  }

  void forge_releases() {
    const FlagMap flags = GemmArSchedule(plan_, plan_.max.m).flags();
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::uint32_t node = rank / plan_.locals;
      for (std::uint32_t bank = 0; bank < plan_.banks; ++bank) {
        for (std::uint32_t from = 0; from < plan_.nodes; ++from) {
          if (from != node) simulation_.forge_flag(rank, flags.release(bank, node, from));
        }
      }
    }
  }

  GemmArPlan plan_;
  std::vector<GemmArRank> ranks_;
  Simulation simulation_;
  std::pair<int, int> overlapped_[2] = {};
};

class EveryWorldAndOrder : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(EveryWorldAndOrder, EndsAndIsRight) {
  const std::uint32_t nodes = GetParam();
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    for (Order order : kOrders) {
      for (std::uint32_t banks = 1; banks <= 2; ++banks) {
        GemmArOptions options;
        options.nodes = nodes;
        options.locals = locals;
        options.order = order;
        options.seed = nodes * 1000 + locals * 100 + static_cast<std::uint64_t>(order) * 10 + banks;
        std::mt19937_64 random(options.seed);
        options.max = {static_cast<std::uint32_t>(1 + random() % 9),
                       static_cast<std::uint32_t>(1 + random() % 40), 0};
        options.tiling = {2, 8, static_cast<std::uint32_t>(16 + random() % 100), banks};
        const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
        options.blocks = {blocks(), blocks(), blocks(), blocks()};
        options.launches = random_sim_launches(5, options.max.m, options.seed);
        GemmArSimulation simulation(options);
        ASSERT_EQ(simulation.run(), "")
            << fmt::format("{} x {}, order {}, {} banks, seed {}", nodes, locals,
                           static_cast<int>(order), banks, options.seed);
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorldAndOrder, ::testing::Values(1u, 2u, 3u, 4u));

GemmArOptions small(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  GemmArOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.max = {6, 24, 0};
  options.tiling = {2, 8, 64, 2};
  options.launches = random_sim_launches(8, 6, seed);
  options.order = kOrders[seed % std::size(kOrders)];
  options.seed = seed;
  return options;
}

TEST(Interleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    GemmArOptions options = small(static_cast<std::uint32_t>(2 + seed % 2),
                                  static_cast<std::uint32_t>(1 + seed % 3), seed);
    options.tiling.banks = static_cast<std::uint32_t>(1 + seed / 2 % 2);
    ASSERT_EQ(GemmArSimulation(options).run(), "") << "seed " << seed;
  }
}

TEST(Interleaving, FusedLaunchesOverlapAndUnfusedOnesDoNot) {
  std::pair<int, int> fused;
  std::pair<int, int> unfused;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    GemmArOptions options = small(2, 2, seed);
    options.launches = {
        {6, Mode::kFused}, {6, Mode::kUnfused}, {5, Mode::kUnfused}, {6, Mode::kFused}};
    GemmArSimulation simulation(options);
    ASSERT_EQ(simulation.run(), "");
    fused.first += simulation.overlapped(Mode::kFused).first;
    unfused.first += simulation.overlapped(Mode::kUnfused).first;
    unfused.second += simulation.overlapped(Mode::kUnfused).second;
  }
  EXPECT_GT(fused.first, 0);
  EXPECT_EQ(unfused.first, 0);
  EXPECT_EQ(unfused.second, 20 * 2 * 4);
}

// With one bank, the release is all that keeps a sender from overwriting what its peer still reads.
// A network that shows releases which nobody sent must be noticed; else the tests above would prove
// nothing about reuse.
TEST(Interleaving, AReceiveBankReusedTooEarlyIsSeen) {
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    GemmArOptions options = small(2, 1, seed);
    options.tiling.banks = 1;
    options.forge_releases = true;
    options.network.keep_forged_flags = true;
    GemmArSimulation simulation(options);
    simulation.run();
    seen += simulation.saw_wrong_element();
  }
  EXPECT_GT(seen, 5) << "of 60";
}

TEST(Interleaving, AStagingBankReusedTooEarlyIsSeen) {
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    GemmArOptions options = small(3, 1, seed);
    options.tiling.banks = 1;
    options.network.complete_early = true;
    GemmArSimulation simulation(options);
    simulation.run();
    seen += simulation.saw_wrong_element();
  }
  EXPECT_GT(seen, 5) << "of 60";
}

// More chunks than a granule has flags, most launches with few of them: the granules that those do
// not reach must not fall out of the window in which an immediate's ten bits name the epoch.
TEST(Interleaving, IdleFlagGranulesStayWithinTheEpochWindow) {
  GemmArOptions options;
  options.nodes = 2;
  options.max = {70, 8, 0};
  options.tiling = {1, 8, 1, 2};
  options.network.immediates = true;
  options.order = Order::kRandom;
  options.launches.assign(1300, {1, Mode::kFused});
  options.launches.front().m = options.launches.back().m = 70;
  options.launches[1].m = options.launches[1298].m = 67;
  EXPECT_EQ(GemmArSimulation(options).run(), "");
}

}  // namespace
}  // namespace mk::kernels::testing
