// The roles of GEMM+AllReduce as a discrete-event simulation: the real role code of all ranks in
// one thread, switched at every wait and in the middle of every tile, in adversarial orders. Every
// launch must end (no cyclic wait) and every rank must see every element right (nothing read too
// early or overwritten too soon). Tiles are small integers, so sums are exact.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/comm/wait_text.h"
#include "kernels/cpu/sum_rows.h"
#include "kernels/gemm_ar/plan.h"
#include "kernels/gemm_ar/roles.h"
#include "tests/kernels/support/cluster.h"
#include "tests/kernels/support/fibers.h"
#include "tests/kernels/support/network.h"
#include "tests/kernels/support/reference.h"

namespace mk::kernels::testing {
namespace {

struct SimLaunch {
  std::uint32_t m = 0;
  Mode mode = Mode::kFused;
};

struct SimOptions {
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

class Simulation {
 public:
  explicit Simulation(const SimOptions& options)
      : options_(options),
        plan_(*GemmArPlan::make(options.nodes, options.locals, options.max, DType::kBf16,
                                options.tiling)),
        cluster_({options.nodes, options.locals, plan_.workspace_bytes(), plan_.flag_count(),
                  options.blocks.send, 4}),
        network_(cluster_, options.seed, options.network),
        fibers_(options.order, options.seed) {
    fibers_.starve(static_cast<std::uint32_t>(options.seed % cluster_.size()));
    if (options.forge_releases) forge_releases();
  }

  /// Empty, or the first thing that went wrong.
  std::string run() {
    for (std::uint32_t rank = 0; rank < cluster_.size(); ++rank) add_rank(rank);
    fibers_.run([this] { return network_.busy(); }, [this] { network_.step(); },
                [this] { end_all_waits(); });
    if (wrong_.empty()) wrong_ = network_.complaint();
    return wrong_;
  }

  /// Whether `run` found an element wrong (and not just a wait or the network).
  bool saw_wrong_element() const { return saw_wrong_element_; }

  /// Launches in which a rank had sent something before its product was done, over all launches of
  /// the mode.
  std::pair<int, int> overlapped(Mode mode) const { return overlapped_[static_cast<int>(mode)]; }

 private:
  struct Rank {
    LocalWords local;
    GemmArLaunch launch;
    std::uint32_t started = 0;  ///< epoch
    std::uint32_t blocks_done = 0;
    std::uint64_t sent_before_done = 0;
    std::vector<std::uint16_t> c;
    std::vector<std::unique_ptr<BlockTotals>> totals;
  };

  /// The executor of kernels/gemm_ar/roles.h; yields between rows, so that a tile is half done when
  /// others look.
  class Executor {
   public:
    Executor(Simulation& simulation, Rank& rank) : simulation_(simulation), rank_(rank) {}

    bool multiply(const TileRect& rect, void* target, std::uint64_t stride) {
      for (std::uint32_t i = 0; i < rect.rows; ++i) {
        auto* row = static_cast<std::uint16_t*>(target) + i * stride;
        for (std::uint32_t j = 0; j < rect.columns; ++j) {
          const int value = partial(rank_.launch.context.world.rank(), rank_.launch.epoch,
                                    rect.row + i, rect.column + j);
          row[j] = from_float(DType::kBf16, static_cast<float>(value));
        }
        simulation_.fibers_.maybe_yield();
      }
      return true;
    }
    void sum(const SumJob& job) {
      SumJob row = job;
      row.rows = 1;
      for (std::uint32_t i = 0; i < job.rows; ++i) {
        for (std::uint32_t s = 0; s < job.source_count; ++s) {
          row.sources[s] =
              static_cast<const std::uint16_t*>(job.sources[s]) + i * job.source_stride;
        }
        for (std::uint32_t t = 0; t < job.target_count; ++t) {
          row.targets[t] = static_cast<std::uint16_t*>(job.targets[t]) + i * job.target_stride;
        }
        sum_rows(row_math_generic(DType::kBf16), row);
        simulation_.fibers_.maybe_yield();
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
    void stores_done() {
      simulation_.fibers_.maybe_yield();
      simulation_.fibers_.changed();  // the flag is stored before the next switch
    }
    void loads_begin() {}
    std::uint64_t now_ns() { return simulation_.now_ns_; }
    bool pause(std::uint32_t) {
      simulation_.fibers_.poll();
      return true;
    }

   private:
    Simulation& simulation_;
    Rank& rank_;
  };

  void add_rank(std::uint32_t index) {
    ranks_.push_back(std::make_unique<Rank>());
    Rank& rank = *ranks_.back();
    GemmArLaunch& launch = rank.launch;
    launch.plan = plan_;
    launch.banks = plan_.banks;
    launch.context = cluster_.context(index);
    launch.blocks = options_.blocks;
    launch.local = &rank.local;
    launch.control.stop = &rank.local.stop;
    launch.control.record = &rank.local.failure;
    launch.control.timeout_ns = 1000;

    std::uint32_t blocks = 0;
    const auto add = [&](std::uint32_t count, Role role, auto&& run) {
      for (std::uint32_t block = 0; block < count; ++block, ++blocks) {
        fibers_.add(index, [this, &rank, role, block, run] { run_block(rank, role, block, run); });
      }
    };
    using Block = GemmArBlock<Executor>;
    add(options_.blocks.compute, Role::kCompute,
        [](Block& block) { return gemm_ar::compute(block) && gemm_ar::collect(block); });
    if (options_.locals > 1) {
      add(options_.blocks.reduce, Role::kReduce,
          [](Block& block) { return gemm_ar::reduce(block); });
    }
    if (options_.nodes > 1) {
      add(options_.blocks.send, Role::kSend, [](Block& block) { return gemm_ar::send(block); });
      add(options_.blocks.receive, Role::kReceive,
          [](Block& block) { return gemm_ar::receive(block); });
    }
    fibers_.add(index, [this, &rank, blocks] { drive(rank, blocks); });
  }

  template <class Run>
  void run_block(Rank& rank, Role role, std::uint32_t index, const Run& run) {
    for (std::uint32_t epoch = 1; epoch <= options_.launches.size(); ++epoch) {
      while (rank.started != epoch) {
        if (!wrong_.empty()) return;
        fibers_.poll();
      }
      Executor executor(*this, rank);
      BlockTotals totals;
      GemmArBlock<Executor> block(executor, rank.launch, role, index, totals);
      if (!run(block)) fail(rank);
      ++rank.blocks_done;
      fibers_.changed();
    }
  }

  /// The launching thread of one rank.
  void drive(Rank& rank, std::uint32_t blocks) {
    for (std::uint32_t epoch = 1; epoch <= options_.launches.size(); ++epoch) {
      const SimLaunch& launch = options_.launches[epoch - 1];
      rank.launch.epoch = epoch;
      rank.launch.m = launch.m;
      rank.launch.mode = launch.mode;
      rank.blocks_done = 0;
      rank.c.assign(std::size_t{launch.m} * plan_.max.n, 0x7fff);
      auto* out = reinterpret_cast<std::uint16_t*>(
          rank.launch.context.workspaces[rank.launch.context.world.local] + plan_.layout.out);
      std::fill(out, out + std::size_t{plan_.max.m} * plan_.max.n, std::uint16_t{0x7fff});
      announce_launch(rank.launch);
      rank.started = epoch;
      fibers_.changed();
      const std::uint64_t commands = produced(rank);
      bool sent_early = false;
      while (rank.blocks_done != blocks) {
        if (!wrong_.empty()) return;
        if (produced(rank) != commands && !product_done(rank)) sent_early = true;
        fibers_.poll();
      }
      auto& [early, all] = overlapped_[static_cast<int>(launch.mode)];
      early += sent_early;
      ++all;
      check(rank);
    }
  }

  std::uint64_t produced(const Rank& rank) const {
    std::uint64_t sum = 0;
    for (std::uint32_t lane = 0; lane < options_.blocks.send; ++lane)
      sum += rank.launch.context.lanes[lane].produced;
    return sum;
  }
  bool product_done(const Rank& rank) const {
    for (std::uint32_t block = 0; block < options_.blocks.compute; ++block) {
      if (rank.launch.local->done_by(Role::kCompute)[block] != rank.launch.epoch) return false;
    }
    return true;
  }

  void check(const Rank& rank) {
    for (std::uint32_t row = 0; row < rank.launch.m; ++row) {
      for (std::uint32_t column = 0; column < plan_.max.n; ++column) {
        int expected = 0;
        for (std::uint32_t other = 0; other < cluster_.size(); ++other) {
          expected += partial(other, rank.launch.epoch, row, column);
        }
        const double got = to_double(DType::kBf16, rank.c[std::size_t{row} * plan_.max.n + column]);
        if (got != expected && wrong_.empty()) {
          saw_wrong_element_ = true;
          wrong_ = fmt::format("rank {}, launch {}: [{}][{}] is {}, expected {}",
                               rank.launch.context.world.rank(), rank.launch.epoch, row, column,
                               got, expected);
        }
      }
    }
  }

  void fail(const Rank& rank) {
    if (!wrong_.empty()) return;
    wrong_ =
        describe(rank.local.failure, "gemm_ar", rank.launch.epoch, rank.launch.context.world, 0)
            .message;
  }

  /// Nobody can go on: let the clock jump, so that the first waits end and say what they are.
  void end_all_waits() { now_ns_ += 1'000'000; }

  void forge_releases() {
    const FlagMap flags = GemmArSchedule(plan_, plan_.max.m).flags();
    for (std::uint32_t rank = 0; rank < cluster_.size(); ++rank) {
      RankMemory& memory = cluster_.rank(rank);
      for (std::uint32_t bank = 0; bank < plan_.banks; ++bank) {
        for (std::uint32_t from = 0; from < options_.nodes; ++from) {
          if (from != memory.world.node) {
            memory.flags[memory.flag_base + flags.release(bank, memory.world.node, from)] = kForged;
          }
        }
      }
    }
  }

  SimOptions options_;
  GemmArPlan plan_;
  Cluster cluster_;
  Network network_;
  Fibers fibers_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::uint64_t now_ns_ = 0;
  std::string wrong_;
  bool saw_wrong_element_ = false;
  std::pair<int, int> overlapped_[2] = {};
};

std::vector<SimLaunch> random_launches(std::uint32_t count, std::uint32_t m_max,
                                       std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<SimLaunch> launches;
  for (std::uint32_t i = 0; i < count; ++i) {
    launches.push_back({static_cast<std::uint32_t>(1 + random() % m_max),
                        random() % 4 == 0 ? Mode::kUnfused : Mode::kFused});
  }
  launches.back().m = m_max;
  return launches;
}

class EveryWorldAndOrder : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(EveryWorldAndOrder, EndsAndIsRight) {
  const std::uint32_t nodes = GetParam();
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    for (Order order : kOrders) {
      for (std::uint32_t banks = 1; banks <= 2; ++banks) {
        SimOptions options;
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
        options.launches = random_launches(5, options.max.m, options.seed);
        Simulation simulation(options);
        ASSERT_EQ(simulation.run(), "")
            << fmt::format("{} x {}, order {}, {} banks, seed {}", nodes, locals,
                           static_cast<int>(order), banks, options.seed);
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorldAndOrder, ::testing::Values(1u, 2u, 3u, 4u));

SimOptions small(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  SimOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.max = {6, 24, 0};
  options.tiling = {2, 8, 64, 2};
  options.launches = random_launches(8, 6, seed);
  options.order = kOrders[seed % std::size(kOrders)];
  options.seed = seed;
  return options;
}

TEST(Interleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    SimOptions options = small(static_cast<std::uint32_t>(2 + seed % 2),
                               static_cast<std::uint32_t>(1 + seed % 3), seed);
    options.tiling.banks = static_cast<std::uint32_t>(1 + seed / 2 % 2);
    ASSERT_EQ(Simulation(options).run(), "") << "seed " << seed;
  }
}

TEST(Interleaving, FusedLaunchesOverlapAndUnfusedOnesDoNot) {
  std::pair<int, int> fused;
  std::pair<int, int> unfused;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SimOptions options = small(2, 2, seed);
    options.launches = {
        {6, Mode::kFused}, {6, Mode::kUnfused}, {5, Mode::kUnfused}, {6, Mode::kFused}};
    Simulation simulation(options);
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
    SimOptions options = small(2, 1, seed);
    options.tiling.banks = 1;
    options.forge_releases = true;
    options.network.keep_forged_flags = true;
    Simulation simulation(options);
    simulation.run();
    seen += simulation.saw_wrong_element();
  }
  EXPECT_GT(seen, 5) << "of 60";
}

TEST(Interleaving, AStagingBankReusedTooEarlyIsSeen) {
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SimOptions options = small(3, 1, seed);
    options.tiling.banks = 1;
    options.network.complete_early = true;
    Simulation simulation(options);
    simulation.run();
    seen += simulation.saw_wrong_element();
  }
  EXPECT_GT(seen, 5) << "of 60";
}

// More chunks than a granule has flags, most launches with few of them: the granules that those do
// not reach must not fall out of the window in which an immediate's ten bits name the epoch.
TEST(Interleaving, IdleFlagGranulesStayWithinTheEpochWindow) {
  SimOptions options;
  options.nodes = 2;
  options.max = {70, 8, 0};
  options.tiling = {1, 8, 1, 2};
  options.network.immediates = true;
  options.order = Order::kRandom;
  options.launches.assign(1300, {1, Mode::kFused});
  options.launches.front().m = options.launches.back().m = 70;
  options.launches[1].m = options.launches[1298].m = 67;
  EXPECT_EQ(Simulation(options).run(), "");
}

}  // namespace
}  // namespace mk::kernels::testing
