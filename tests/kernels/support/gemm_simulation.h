/// \file
/// The simulation of a product summed over all ranks, of any operator that does it (GEMM+AllReduce,
/// GEMM+ReduceScatter), and the tests that all of them must pass. Partials are small integers, so
/// sums are exact.
///
/// An operator is a struct
///     using Plan, Launch, Schedule, Compute;         // Compute: of its protocol.h
///     template <class Executor> using Block;
///     class Executor;                    // from (const SimExecutor&, GemmSimRank<Op>&)
///     static constexpr const char* kName;
///     static constexpr std::uint32_t kRowsMax;       // m in the tests with random shapes
///     static constexpr std::uint32_t kNodesLeast;    // 1, or what its form needs
///     static constexpr bool kReuseIsSafe;            // a launch ends after all its bytes are read
///     static constexpr std::optional<Role> kThen;    // after kCompute, on its threads
///     static ShardRange rows(const Launch&);         // of C, what the rank gets
///     static void begin(Launch&);                    // what it chooses; poisons outputs besides C
///     static bool run_role(block, role)
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/launch.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/shard.h"
#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/cpu/sum_rows.h"
#include "tests/kernels/support/device_block.h"
#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {

/// A rank's partial of an element in a launch: -4 .. 3, so that sums over 32 ranks are exact in
/// bf16.
inline int partial(std::uint32_t rank, std::uint32_t epoch, std::uint32_t row,
                   std::uint32_t column) {
  std::uint32_t hash =
      (rank * 0x9e3779b1u) ^ (epoch * 0x85ebca6bu) ^ (row * 0xc2b2ae35u) ^ (column * 0x27d4eb2fu);
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  hash ^= hash >> 12;
  return static_cast<int>(hash % 8) - 4;
}
/// Of ranks 0 .. ranks - 1.
inline int sum_of_partials(std::uint32_t ranks, std::uint32_t epoch, std::uint32_t row,
                           std::uint32_t column) {
  int sum = 0;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) sum += partial(rank, epoch, row, column);
  return sum;
}

/// Multiplies and sums; yields between rows.
class GemmSimExecutor : public SimExecutor {
 public:
  GemmSimExecutor(const SimExecutor& frame, const Launch& launch)
      : SimExecutor(frame), rank_(launch.context.world.rank()), epoch_(launch.epoch) {}

  bool multiply(const TileRect& rect, void* target, std::uint64_t stride) {
    for (std::uint32_t i = 0; i < rect.rows; ++i) {
      auto* row = static_cast<std::uint16_t*>(target) + i * stride;
      for (std::uint32_t j = 0; j < rect.columns; ++j) {
        const int value = partial(rank_, epoch_, rect.row + i, rect.column + j);
        row[j] = from_float(DType::kBf16, static_cast<float>(value));
      }
      maybe_yield();
    }
    return true;
  }
  void sum(const SumJob& job) {
    for (std::uint32_t i = 0; i < job.rows; ++i) {
      SumJob row = job;
      row.rows = 1;
      row.move_sources(i * job.source_stride * kElementBytes);
      for (std::uint32_t t = 0; t < job.target_count; ++t) {
        row.targets[t] = static_cast<std::uint16_t*>(job.targets[t]) + i * job.target_stride;
      }
      sum_rows(row_math_generic(DType::kBf16), row);
      maybe_yield();
    }
  }
  void accumulate(const AccumulateJob& job) {
    AccumulateJob row = job;
    row.rows = 1;
    for (std::uint32_t i = 0; i < job.rows; ++i) {
      row.partial = static_cast<const std::uint16_t*>(job.partial) + i * job.partial_stride;
      row.target = static_cast<std::uint16_t*>(job.target) + i * job.target_stride;
      for (std::uint32_t c = 0; c < job.copy_count; ++c)
        row.copies[c] = static_cast<std::uint16_t*>(job.copies[c]) + i * job.target_stride;
      accumulate_rows(row_math_generic(DType::kBf16), row);
      maybe_yield();
    }
  }

 private:
  std::uint32_t rank_;
  std::uint32_t epoch_;
};

/// Whether a rank committed commands while its blocks still computed.
class SentEarly {
 public:
  void begin(const Launch& launch) {
    before_ = produced(launch);
    seen_ = false;
  }
  void watch(const Launch& launch) {
    if (produced(launch) != before_ && !product_done(launch)) seen_ = true;
  }
  bool seen() const { return seen_; }

 private:
  static std::uint64_t produced(const Launch& launch) {
    std::uint64_t sum = 0;
    for (std::uint32_t lane = 0; lane < launch.blocks.send; ++lane)
      sum += launch.context.lanes[lane].produced;
    return sum;
  }
  static bool product_done(const Launch& launch) {
    const std::uint32_t* done = launch.local->done_by(Role::kCompute);
    return std::all_of(done, done + launch.blocks.compute,
                       [&](std::uint32_t epoch) { return epoch == launch.epoch; });
  }

  std::uint64_t before_ = 0;
  bool seen_ = false;
};

/// Of one mode: launches of a rank that sent early, and all.
struct Overlaps {
  int early = 0;
  int all = 0;
  void count(bool sent_early) {
    early += sent_early;
    ++all;
  }
  Overlaps& operator+=(const Overlaps& other) {
    early += other.early;
    all += other.all;
    return *this;
  }
};

struct GemmSimOptions : SimOptions {
  Shape max;
  Tiling tiling;
  bool mixed_modes = false;     ///< every other rank runs fused, whatever the launch says
  bool forge_releases = false;  ///< the one receive bank looks released for ever
  bool forge_ends = false;  ///< to a rank that begins a launch, all others have ended all theirs
  bool forge_partials = false;  ///< and all of them have sent it all partials that it will sum
  /// Compute blocks are a GPU's (device_block.h), not the CPU's one thread.
  bool device_blocks = false;
};

template <class Op>
struct GemmSimRank {
  typename Op::Launch launch;
  SentEarly sent_early;
  std::vector<std::uint16_t> c;                 ///< the rank's rows, dense
  std::vector<DeviceBlockState> device_blocks;  ///< of the launch
};

template <class Op>
class GemmSimulation : private SimOperator {
 public:
  explicit GemmSimulation(const GemmSimOptions& options)
      : plan_(*Op::Plan::make(options.nodes, options.locals, options.max, DType::kBf16,
                              options.tiling)),
        options_(options),
        ranks_(options.nodes * options.locals),
        simulation_(*this, options, plan_.workspace_bytes(), plan_.flag_count()) {
    for (GemmSimRank<Op>& rank : ranks_) {
      rank.launch.plan = plan_;
      rank.launch.banks = plan_.banks;
      rank.launch.blocks = options.blocks;
    }
    if (options.forge_releases) forge_releases();
  }

  /// See Simulation.
  std::string run() { return simulation_.run(); }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }

  const Overlaps& overlaps(Mode mode) const { return overlaps_[static_cast<int>(mode)]; }

 private:
  const char* name() const override { return Op::kName; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    std::vector<RoleThread> threads;
    if (options_.device_blocks) {
      for (std::uint32_t i = 0; i < options_.blocks.compute * kDeviceParts; ++i) {
        const bool loads = i % kDeviceParts == kLoadingPart;
        threads.push_back({Role::kCompute, i, loads ? Op::kThen : std::nullopt});
      }
    } else {
      add_role(threads, Role::kCompute, options_.blocks.compute, Op::kThen);
    }
    if (world.locals > 1) add_role(threads, Role::kReduce, options_.blocks.reduce);
    if (world.nodes > 1) add_role(threads, Role::kSend, options_.blocks.send);
    if (world.nodes > 1) add_role(threads, Role::kReceive, options_.blocks.receive);
    return threads;
  }
  void begin(std::uint32_t index) override {
    GemmSimRank<Op>& rank = ranks_[index];
    if (options_.mixed_modes && index % 2 != 0) rank.launch.mode = Mode::kFused;
    rank.c.assign(std::size_t{Op::rows(rank.launch).count} * plan_.max.n, 0x7fff);
    Op::begin(rank.launch);
    rank.launch.make_schedule();
    rank.sent_early.begin(rank.launch);
    rank.device_blocks.assign(options_.blocks.compute, {});
    if (options_.forge_ends) forge_ends(rank.launch.context);
    if (options_.forge_partials) forge_partials(rank.launch);
  }
  bool run_role(std::uint32_t index, Role role, std::uint32_t block, BlockTotals& totals,
                const SimExecutor& frame) override {
    GemmSimRank<Op>& rank = ranks_[index];
    typename Op::Executor executor(frame, rank);
    if (!options_.device_blocks || (role != Role::kCompute && role != Op::kThen))
      return Op::run_role(executor, rank.launch, role, block, totals);
    const std::uint32_t of = block / kDeviceParts;
    if (role != Role::kCompute) return Op::run_role(executor, rank.launch, role, of, totals);
    using Block = typename Op::template Block<typename Op::Executor>;
    Block part(executor, rank.launch, Role::kCompute, of, totals);
    const std::uint32_t k_blocks = 1 + (rank.launch.epoch + index) % 6;
    return DeviceBlock<typename Op::Compute, Block>(part, rank.device_blocks[of], k_blocks)
        .run(block % kDeviceParts);
  }
  void watch(std::uint32_t index) override { ranks_[index].sent_early.watch(ranks_[index].launch); }
  std::string check(std::uint32_t index) override {
    const GemmSimRank<Op>& rank = ranks_[index];
    overlaps_[static_cast<int>(rank.launch.mode)].count(rank.sent_early.seen());
    const ShardRange rows = Op::rows(rank.launch);
    for (std::uint32_t row = 0; row < rows.count; ++row) {
      for (std::uint32_t column = 0; column < plan_.max.n; ++column) {
        const int expected = sum_of_partials(static_cast<std::uint32_t>(ranks_.size()),
                                             rank.launch.epoch, rows.first + row, column);
        const double got = to_double(DType::kBf16, rank.c[std::size_t{row} * plan_.max.n + column]);
        if (got != expected)
          return fmt::format("[{}][{}] is {}, expected {}", row, column, got, expected);
      }
    }
    return {};
  }

  void forge_releases() {
    const FlagMap flags = typename Op::Schedule(plan_, 1).flags();
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::uint32_t node = rank / plan_.locals;
      for (std::uint32_t from = 0; from < plan_.nodes; ++from) {
        if (from != node) simulation_.forge_flag(rank, flags.release(node, from));
      }
    }
  }
  static void forge_ends(const RankContext& context) {
    const World& world = context.world;
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      const std::uint64_t word = WorkspaceHead{world.locals}.finished(local);
      *reinterpret_cast<std::uint32_t*>(context.workspaces[world.local] + word) = kForged;
    }
  }

  static void forge_partials(const typename Op::Launch& launch) {
    const World& world = launch.context.world;
    const auto& layout = launch.plan.layout;
    auto* flags = reinterpret_cast<std::uint32_t*>(launch.context.workspaces[world.local] +
                                                   layout.tile_ready);
    std::fill(flags, flags + std::size_t{world.locals} * launch.plan.nodes * launch.plan.tiles_max,
              kForged);
  }

  typename Op::Plan plan_;
  GemmSimOptions options_;
  std::vector<GemmSimRank<Op>> ranks_;
  Simulation simulation_;
  Overlaps overlaps_[2];  ///< by mode
};

// --- The tests of every such operator: GemmInterleaving, of its struct ---

/// So many nodes, or those that the form needs.
template <class Op>
constexpr std::uint32_t nodes_of(std::uint32_t nodes) {
  return std::max(nodes, Op::kNodesLeast);
}

inline GemmSimOptions small_gemm(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  GemmSimOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.max = {6, 24, 0};
  options.tiling = {2, 8, 64, 2};
  options.launches = random_sim_launches(8, 6, seed);
  options.set_seed(seed);
  return options;
}

template <class Op>
class GemmInterleaving : public ::testing::Test {};
TYPED_TEST_SUITE_P(GemmInterleaving);

TYPED_TEST_P(GemmInterleaving, EveryWorldAndOrderEndsAndIsRight) {
  for (std::uint32_t world = 0; world < 32 * 2; ++world) {
    for (Order order : kOrders) {
      GemmSimOptions options;
      options.nodes = world / 2 % 4 + TypeParam::kNodesLeast;
      // Sums are exact so far; and many fibers take long.
      const std::uint32_t most = TypeParam::kNodesLeast == 1 ? 32 : 16;
      options.locals = std::min(world / 8 + 1, most / options.nodes);
      options.order = order;
      options.seed = 10 * world + static_cast<std::uint64_t>(order);
      std::mt19937_64 random(options.seed);
      options.max = {static_cast<std::uint32_t>(1 + random() % TypeParam::kRowsMax),
                     static_cast<std::uint32_t>(1 + random() % 40), 0};
      options.tiling = {2, 8, static_cast<std::uint32_t>(16 + random() % 100), 1 + world % 2};
      const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
      options.blocks = {blocks(), blocks(), blocks(), blocks()};
      options.launches = random_sim_launches(5, options.max.m, options.seed);
      options.mixed_modes = random() % 2 == 0;
      // Three fibers instead of one each, which larger worlds would only make slow.
      options.device_blocks = random() % 2 == 0 && options.nodes * options.locals <= 12;
      ASSERT_EQ(GemmSimulation<TypeParam>(options).run(), "")
          << fmt::format("{} x {}, order {}, {} banks, seed {}", options.nodes, options.locals,
                         static_cast<int>(order), options.tiling.banks, options.seed);
    }
  }
}

TYPED_TEST_P(GemmInterleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    GemmSimOptions options =
        small_gemm(nodes_of<TypeParam>(2) + static_cast<std::uint32_t>(seed % 2),
                   static_cast<std::uint32_t>(1 + seed % 3), seed);
    options.tiling.banks = static_cast<std::uint32_t>(1 + seed / 2 % 2);
    options.mixed_modes = seed % 3 == 0;
    options.device_blocks = seed / 4 % 2 != 0;
    ASSERT_EQ(GemmSimulation<TypeParam>(options).run(), "") << "seed " << seed;
  }
}

TYPED_TEST_P(GemmInterleaving, FusedLaunchesOverlapAndUnfusedOnesDoNot) {
  Overlaps fused;
  Overlaps unfused;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    GemmSimOptions options = small_gemm(nodes_of<TypeParam>(2), 2, seed);
    options.launches = {
        {6, Mode::kFused}, {6, Mode::kUnfused}, {5, Mode::kUnfused}, {6, Mode::kFused}};
    GemmSimulation<TypeParam> simulation(options);
    ASSERT_EQ(simulation.run(), "");
    fused += simulation.overlaps(Mode::kFused);
    unfused += simulation.overlaps(Mode::kUnfused);
  }
  EXPECT_GT(fused.early, 0);
  EXPECT_EQ(unfused.early, 0);
  EXPECT_EQ(unfused.all, 20 * 2 * 2 * static_cast<int>(nodes_of<TypeParam>(2)));
}

/// In how many of 240 runs a wrong element was seen.
template <class Op>
int wrong_of_240(std::uint32_t nodes, std::uint32_t locals, const GemmSimOptions& faults) {
  return seeds_seen_wrong<GemmSimulation<Op>>(240, [&](std::uint64_t seed) {
    GemmSimOptions options = small_gemm(nodes, locals, seed);
    options.tiling.banks = 1;
    options.network = faults.network;
    options.forge_releases = faults.forge_releases;
    options.forge_ends = faults.forge_ends;
    options.forge_partials = faults.forge_partials;
    options.device_blocks = faults.device_blocks;
    return options;
  });
}

/// Runs in which a bank is written too early are seen, unless the form's launches end too late.
template <class Op>
void expect_reuse_is_seen(int wrong) {
  if (Op::kReuseIsSafe) {
    EXPECT_EQ(wrong, 0);
  } else {
    EXPECT_GT(wrong, 5);
  }
}

// With one bank, the release is all that keeps a sender from overwriting what its peer still reads.
// A network that shows releases which nobody sent must be noticed; else the tests above would prove
// nothing about reuse.
TYPED_TEST_P(GemmInterleaving, AReceiveBankReusedTooEarlyIsSeen) {
  GemmSimOptions faults;
  faults.forge_releases = true;
  faults.network.keep_forged_flags = true;
  expect_reuse_is_seen<TypeParam>(wrong_of_240<TypeParam>(nodes_of<TypeParam>(2), 1, faults));
}

TYPED_TEST_P(GemmInterleaving, AFlagBeforeItsDataIsSeen) {
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    GemmSimOptions options = small_gemm(nodes_of<TypeParam>(2), 1, seed);
    options.tiling.chunk_bytes = 256;
    options.network.flags_first = true;
    // A wrong element, or another launch's m in a header.
    seen += !GemmSimulation<TypeParam>(options).run().empty();
  }
  EXPECT_GT(seen, 20);
}

TYPED_TEST_P(GemmInterleaving, AStagingBankReusedTooEarlyIsSeen) {
  GemmSimOptions faults;
  faults.network.complete_early = true;
  for (const bool device : {false, true}) {
    faults.device_blocks = device;
    expect_reuse_is_seen<TypeParam>(wrong_of_240<TypeParam>(3, 1, faults));
  }
}

// The role that sums waits for every partial: a reduce worker, or, of two ranks, the compute worker
// that accumulates its own tiles.
TYPED_TEST_P(GemmInterleaving, APartialSummedBeforeItIsHereIsSeen) {
  GemmSimOptions faults;
  faults.forge_partials = true;
  for (const bool device : {false, true}) {
    faults.device_blocks = device;
    EXPECT_GT(wrong_of_240<TypeParam>(1, 2, faults), 100);
    EXPECT_GT(wrong_of_240<TypeParam>(1, 3, faults), 100);
  }
}

// More chunks than a granule has flags, most launches with few of them: the granules that those do
// not reach must not fall out of the window in which an immediate's ten bits name the epoch.
TYPED_TEST_P(GemmInterleaving, IdleFlagGranulesStayWithinTheEpochWindow) {
  GemmSimOptions options;
  options.nodes = nodes_of<TypeParam>(2);
  options.max = {140, 8, 0};
  options.tiling = {1, 8, 1, 2};
  options.network.immediates = true;
  options.order = Order::kRandom;
  options.launches.assign(1300, {1, Mode::kFused});
  options.launches.front().m = options.launches.back().m = 140;
  options.launches[1].m = options.launches[1298].m = 134;
  EXPECT_EQ(GemmSimulation<TypeParam>(options).run(), "");
}

REGISTER_TYPED_TEST_SUITE_P(GemmInterleaving, EveryWorldAndOrderEndsAndIsRight, ManySeeds,
                            FusedLaunchesOverlapAndUnfusedOnesDoNot,
                            AReceiveBankReusedTooEarlyIsSeen, AFlagBeforeItsDataIsSeen,
                            AStagingBankReusedTooEarlyIsSeen, APartialSummedBeforeItIsHereIsSeen,
                            IdleFlagGranulesStayWithinTheEpochWindow);

}  // namespace mk::kernels::testing
