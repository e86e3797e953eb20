// The roles of a gather as a discrete-event simulation (support/simulation.h): every rank gets
// every rank's rows, whatever their numbers, in every world, in adversarial orders. Nobody waits in
// a circle.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/gather/plan.h"
#include "kernels/gather/roles.h"
#include "tests/kernels/support/interleaving_tests.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

struct GatherOptions : SimOptions {
  GatherShape shape = {4, 24};
  GatherKind kind = GatherKind::kBroadcast;
  std::uint32_t chunk_bytes = 64;
  std::uint32_t banks = 2;
  std::uint32_t turn_chunks = 0;
  /// Of a rank in a launch; by default any number.
  std::function<std::uint32_t(std::uint32_t rank, std::uint32_t epoch)> rows;
  bool forge_releases = false;   ///< the one bank looks released for ever
  bool forge_arrivals = false;   ///< the first rows of node 0 look arrived for ever
  bool skip_odd = false;         ///< consumers do not look at the rows of odd ranks
  bool skip_all = false;         ///< nor of any other
  bool always_in_place = false;  ///< a broadcast's own rows; else they are in every other launch
  /// Receive blocks share first: as the last ones of that role, besides those of `blocks`.
  bool receivers_share = false;
};

/// What a byte of a rank's rows is in a launch.
std::byte content(std::uint32_t rank, std::uint32_t epoch, std::uint64_t at) {
  std::uint32_t hash =
      rank * 0x9e3779b1u ^ epoch * 0x85ebca6bu ^ static_cast<std::uint32_t>(at) * 0xc2b2ae35u;
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  return static_cast<std::byte>(hash >> 24);
}

struct GatherLaunch : Launch {
  bool in_place = false;
  GatherGeometry geometry;
  GatherSource source;
};

struct GatherRank {
  GatherLaunch launch;
  std::vector<std::byte> own;                   ///< rows with gaps between them
  std::vector<std::vector<std::byte>> arrived;  ///< by origin: as read by the consumers
};

/// Copies row by row, and yields in between.
class Executor : public SimExecutor {
 public:
  Executor(const SimExecutor& frame, std::uint64_t& copied) : SimExecutor(frame), copied_(copied) {}
  void copy(const CopyJob& job) {
    copied_ += std::uint64_t{job.rows} * job.row_bytes * (1 + job.target_count);
    copy_in_pieces(job, 20);
  }

 private:
  std::uint64_t& copied_;  ///< bytes read and written
};

class GatherSimulation : private SimOperator {
 public:
  explicit GatherSimulation(const GatherOptions& options)
      : options_(options),
        plan_(make_plan(options)),
        ranks_(make_ranks()),
        simulation_(*this, options, workspace_bytes_, shm::kFlagGranule + plan_.flag_count()) {
    if (options.forge_releases) forge_releases();
    if (options.forge_arrivals) forge_arrivals();
  }

  std::string run() {
    const std::string wrong = simulation_.run();
    if (!wrong.empty()) return wrong;
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (simulation_.network().bytes_of(rank) != network_bytes_[rank])
        return fmt::format("rank {} sent {} bytes, not {}", rank,
                           simulation_.network().bytes_of(rank), network_bytes_[rank]);
      if (copied_[rank] != local_bytes_[rank])
        return fmt::format("rank {} copied {} bytes, not {}", rank, copied_[rank],
                           local_bytes_[rank]);
    }
    return {};
  }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }

 private:
  using Block = OperatorBlock<Executor>;

  static GatherPlan make_plan(const GatherOptions& options) {
    GatherPlan plan =
        plan_or_throw(GatherPlan::make("gather", options.nodes, options.locals, options.shape,
                                       options.kind, options.chunk_bytes, options.banks));
    plan.turn_chunks = options.turn_chunks;
    return plan;
  }
  std::vector<GatherRank> make_ranks() {
    WorkspaceLayout workspace(options_.locals);
    plan_.place(workspace, shm::kFlagGranule);  // as a second gather of its operator
    workspace.begin_data();
    plan_.place_rows(workspace);
    workspace_bytes_ = workspace.parts().bytes();
    std::vector<GatherRank> ranks(options_.nodes * options_.locals);
    network_bytes_.resize(ranks.size());
    local_bytes_.resize(ranks.size());
    copied_.resize(ranks.size());
    for (GatherRank& rank : ranks) {
      rank.launch.geometry = plan_;
      rank.launch.banks = plan_.banks;
      rank.launch.blocks = options_.blocks;
      if (receivers_share()) rank.launch.blocks.share += options_.blocks.receive;
    }
    return ranks;
  }

  bool receivers_share() const {
    return options_.receivers_share && options_.nodes > 1 && options_.locals > 1;
  }

  const char* name() const override { return "gather"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = options_.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute);
    add_gather_roles(threads, world, blocks);
    return threads;
  }

  std::uint32_t rows(std::uint32_t rank, std::uint32_t epoch) const {
    if (options_.rows) return options_.rows(rank, epoch);
    std::mt19937_64 random(options_.seed * 1009 + epoch * 131 + rank);
    return static_cast<std::uint32_t>(random() % (options_.shape.rows_max + 1));
  }

  /// In some launches of some ranks: all four ways to follow each other, in both banks.
  bool in_place(std::uint32_t index, std::uint32_t epoch) const {
    if (options_.kind != GatherKind::kBroadcast || options_.nodes == 1) return false;
    return options_.always_in_place || (epoch / 2 + epoch / 3 + index + options_.seed) % 2 == 0;
  }

  /// Rows in the caller's memory, in two pieces when they are long enough, with gaps; or in place,
  /// where the last launch's lay.
  void begin(std::uint32_t index) override {
    GatherRank& rank = ranks_[index];
    const World& world = rank.launch.context.world;
    const GatherSchedule schedule(plan_, world);
    const std::uint32_t epoch = rank.launch.epoch;
    const std::uint32_t count = rows(index, epoch);
    const std::uint32_t bytes = plan_.row_bytes;
    GatherSource source;
    rank.launch.in_place = in_place(index, epoch);
    if (rank.launch.in_place) {
      std::byte* const own =
          rank.launch.context.workspaces[world.local] + schedule.own_rows_in_place();
      for (std::uint64_t at = 0; at < std::uint64_t{count} * bytes; ++at)
        own[at] = content(index, epoch, at);
      source = GatherSource::of(own, bytes, bytes, count);
    } else {
      const std::uint32_t first = epoch % 2 == 0 && bytes > 1 ? bytes / 3 + 1 : bytes;
      const std::uint32_t stride = bytes + epoch % 3;
      // One byte more: a shard without rows has an address, too.
      rank.own.assign(std::size_t{count} * stride + 1, std::byte{0xee});
      for (std::uint64_t at = 0; at < std::uint64_t{count} * bytes; ++at)
        rank.own[at / bytes * stride + at % bytes] = content(index, epoch, at);
      source.rows = count;
      source.add(rank.own.data(), stride, first);
      if (first < bytes) source.add(rank.own.data() + first, stride, bytes - first);
    }
    rank.launch.source = source;
    rank.arrived.assign(ranks_.size(), {});
    for (std::uint32_t origin = 0; origin < ranks_.size(); ++origin)
      rank.arrived[origin].assign(std::size_t{rows(origin, epoch)} * bytes, std::byte{0xdd});
    const auto rows_of = [&](std::uint32_t r) { return rows(r, epoch); };
    network_bytes_[index] += schedule.network_bytes(rows_of);
    local_bytes_[index] += schedule.local_bytes(rows_of, rank.launch.in_place,
                                                SimExecutor::sharing(rank.launch).network_first);
  }

  bool run_role(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
                const SimExecutor& frame) override {
    GatherRank& rank = ranks_[index];
    std::uint64_t by_consumers = 0;
    Executor executor(frame, role == Role::kCompute ? by_consumers : copied_[index]);
    Block block(executor, rank.launch, role, block_index, totals);
    const GatherSchedule schedule(rank.launch.geometry, block.world);
    GatherBlock<Executor> gather(block, schedule, rank.launch.source.rows, rank.launch.in_place);
    switch (role) {
      case Role::kShare:
        return gather::share(gather, rank.launch.source, false, SimExecutor::sharing(rank.launch));
      case Role::kReceive:
        if (receivers_share() &&
            !run_role(index, Role::kShare, options_.blocks.share + block_index, totals, frame))
          return false;
        return gather::receive(gather, SimExecutor::onward(rank.launch));
      case Role::kSend:
        return gather::send(gather, [&block] {
          return block.await_blocks(Role::kCompute, block.common.blocks.compute,
                                    kGatherHopsMax + 1);
        });
      default:
        return consume(rank, block, gather);
    }
  }

  /// Reads rows one by one, in the order in which they are expected.
  bool consume(GatherRank& rank, Block& block, GatherBlock<Executor>& gather) {
    if (rank.launch.mode == Mode::kUnfused && !gather.await_all()) return false;
    const std::uint32_t bytes = plan_.row_bytes;
    for (std::uint32_t position = 1; position < block.world.size(); ++position) {
      const std::uint32_t origin = gather.schedule.origin_at(position);
      if (skips(origin)) continue;
      std::uint32_t count = 0;
      if (!gather.await_row_count(origin, &count)) return false;
      for (std::uint32_t row = block.index; row < count; row += block.common.blocks.compute) {
        if (!gather.await_rows(origin, row, row + 1)) return false;
        if ((std::uint64_t{row} + 1) * bytes > rank.arrived[origin].size()) continue;
        CopyJob job;
        job.source = gather.rows(origin) + std::uint64_t{row} * bytes;
        job.add_target(rank.arrived[origin].data() + std::uint64_t{row} * bytes);
        job.rows = 1;
        job.row_bytes = bytes;
        block.executor.copy(job);
      }
    }
    block.publish_done(block.common.blocks.compute);
    return true;
  }

  std::string check(std::uint32_t index) override {
    const GatherRank& rank = ranks_[index];
    for (std::uint32_t origin = 0; origin < ranks_.size(); ++origin) {
      if (origin == index || skips(origin)) continue;
      for (std::uint64_t at = 0; at < rank.arrived[origin].size(); ++at) {
        if (rank.arrived[origin][at] != content(origin, rank.launch.epoch, at))
          return fmt::format("byte {} of rank {}'s {} is wrong", at, origin,
                             rank.arrived[origin].size());
      }
    }
    return {};
  }

  bool skips(std::uint32_t origin) const {
    return options_.skip_all || (options_.skip_odd && origin % 2 == 1);
  }

  void forge_releases() {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::uint32_t node = rank / options_.locals;
      const GatherSchedule schedule(plan_, {options_.nodes, options_.locals, node, 0});
      simulation_.forge_flag(rank, schedule.release(node));
    }
  }

  void forge_arrivals() {
    for (std::uint32_t rank = options_.locals; rank < ranks_.size(); ++rank) {
      const std::uint32_t node = rank / options_.locals;
      const GatherSchedule schedule(plan_, {options_.nodes, options_.locals, node, 0});
      for (std::uint32_t bank = 0; bank < plan_.banks; ++bank)
        simulation_.forge_flag(rank, schedule.arrival(bank, node, 0, 1));
    }
  }

  GatherOptions options_;
  GatherPlan plan_;
  std::uint64_t workspace_bytes_ = 0;
  // By rank, of all launches so far: what is expected, and what was done.
  std::vector<std::uint64_t> network_bytes_;
  std::vector<std::uint64_t> local_bytes_;
  std::vector<std::uint64_t> copied_;
  std::vector<GatherRank> ranks_;
  Simulation simulation_;
};

class EveryWorldKindAndOrder
    : public ::testing::TestWithParam<std::tuple<std::uint32_t, GatherKind>> {};

TEST_P(EveryWorldKindAndOrder, EndsAndBringsAllRows) {
  for_every_world_and_order<GatherOptions>(
      std::get<0>(GetParam()),
      [](GatherOptions& options, std::uint32_t banks, std::mt19937_64& random) {
        options.kind = std::get<1>(GetParam());
        options.shape = {static_cast<std::uint32_t>(1 + random() % 5),
                         static_cast<std::uint32_t>(1 + random() % 70)};
        options.banks = banks;
        options.blocks = random_gather_blocks(random);
        options.launches = random_sim_launches(3, 9, options.seed);
        options.receivers_share = random() % 2 == 0;
        options.turn_chunks = static_cast<std::uint32_t>(random() % 2);
        ASSERT_EQ(GatherSimulation(options).run(), "");
      });
}
INSTANTIATE_TEST_SUITE_P(Worlds, EveryWorldKindAndOrder,
                         ::testing::Combine(::testing::Values(1u, 2u, 3u, 4u),
                                            ::testing::Values(GatherKind::kBroadcast,
                                                              GatherKind::kPull)));

GatherOptions small(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  auto options = small_world<GatherOptions>(nodes, locals, random_sim_launches(8, 6, seed), seed);
  options.kind = seed / 3 % 2 == 0 ? GatherKind::kPull : GatherKind::kBroadcast;
  return options;
}

TEST(GatherInterleaving, ManySeeds) {
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    GatherOptions options = small(static_cast<std::uint32_t>(2 + seed % 3),
                                  static_cast<std::uint32_t>(1 + seed % 4), seed);
    options.banks = static_cast<std::uint32_t>(1 + seed / 2 % 2);
    options.skip_odd = seed % 5 == 0;
    options.receivers_share = seed % 7 < 3;
    options.turn_chunks = seed % 11 < 6 ? 1 : 0;
    ASSERT_EQ(GatherSimulation(options).run(), "") << "seed " << seed;
  }
}

// Where rows go to the network first, a chunk's two turns are different blocks': who hands it to
// the local ranks knows nothing of whether it is in the slot that the network reads.
TEST(GatherInterleaving, ATurnSpeaksForItsOwnTargets) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    GatherOptions options = small(2, static_cast<std::uint32_t>(2 + seed % 3), seed);
    options.kind = GatherKind::kBroadcast;
    options.shape = {5, 70};
    options.rows = [](std::uint32_t, std::uint32_t) { return 5u; };
    options.blocks.share = 3;
    ASSERT_EQ(GatherSimulation(options).run(), "") << "seed " << seed;
  }
}

// With two banks a launch's end is all that tells others that they may fill its bank again. It
// comes after what nobody here reads, too. Else a flag of this launch could meet one of the next
// but one.
TEST(GatherInterleaving, ALaunchEndsAfterRowsThatNobodyReads) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    GatherOptions options = small(static_cast<std::uint32_t>(2 + seed % 3),
                                  static_cast<std::uint32_t>(1 + seed % 2), seed);
    options.launches = random_sim_launches(20, 6, seed);
    options.skip_all = true;
    ASSERT_EQ(GatherSimulation(options).run(), "") << "seed " << seed;
  }
}

/// How many of 240 seeds see a wrong element.
int seen_of_240(const std::function<void(GatherOptions&)>& break_it, std::uint32_t nodes,
                std::uint32_t locals) {
  return seeds_seen_wrong<GatherSimulation>(240, [&](std::uint64_t seed) {
    GatherOptions options = small(nodes, locals, seed);
    options.banks = 1;
    options.rows = [](std::uint32_t, std::uint32_t) { return 4u; };
    // The same m, or a header that came too early would be taken for another m.
    options.launches.assign(8, {1, Mode::kFused});
    break_it(options);
    return options;
  });
}

// With one bank, the release is all that keeps a rank from overwriting what its successor still
// reads. If a network that shows releases which nobody sent went unnoticed, the tests above would
// prove nothing about reuse.
TEST(GatherInterleaving, ABankReusedTooEarlyIsSeen) {
  const auto forge = [](GatherOptions& options) {
    options.forge_releases = true;
    options.network.keep_forged_flags = true;
  };
  EXPECT_GT(seen_of_240(forge, 2, 1), 5);
  EXPECT_GT(seen_of_240(forge, 3, 2), 5);
}

TEST(GatherInterleaving, SentBytesReusedTooEarlyAreSeen) {
  const auto early = [](GatherOptions& options) { options.network.complete_early = true; };
  EXPECT_GT(seen_of_240(early, 2, 1), 5) << "a rank's own slot";
  EXPECT_GT(seen_of_240(early, 3, 1), 5) << "and those it forwards from";
}

// With two banks, too: rows in place are one buffer for all launches.
TEST(GatherInterleaving, RowsInPlaceThatAreRewrittenTooEarlyAreSeen) {
  const auto early = [](GatherOptions& options) {
    options.kind = GatherKind::kBroadcast;
    options.always_in_place = true;
    options.banks = 2;
    options.network.complete_early = true;
  };
  EXPECT_GT(seen_of_240(early, 2, 1), 5);
  EXPECT_GT(seen_of_240(early, 3, 2), 5);
}

TEST(GatherInterleaving, AChunkThatDidNotMoveIsSeen) {
  // Of a chunk of 96 bytes only 64 arrive.
  const auto truncate = [](GatherOptions& options) {
    options.chunk_bytes = 128;
    options.network.truncate_one_chunk = true;
  };
  EXPECT_EQ(seen_of_240(truncate, 2, 1), 240);
  EXPECT_EQ(seen_of_240(truncate, 3, 2), 240);
}

TEST(GatherInterleaving, AFlagThatShowsTooEarlyIsSeen) {
  const auto forge = [](GatherOptions& options) {
    options.forge_arrivals = true;
    options.network.keep_forged_flags = true;
  };
  EXPECT_GT(seen_of_240(forge, 2, 1), 5);
  EXPECT_GT(seen_of_240(forge, 3, 2), 5);
}

// More chunks than a granule has flags, most launches with few of them: the granules that those do
// not reach must not fall out of the window in which an immediate's ten bits name the epoch.
TEST(GatherInterleaving, IdleFlagGranulesStayWithinTheEpochWindow) {
  GatherOptions options;
  options.nodes = 3;
  options.shape = {70, 64};
  // No rank's batch is full of these flags alone (see Simulation): they must be flushed.
  options.seed = 2;
  options.network.immediates = true;
  options.launches.assign(1300, {1, Mode::kFused});
  options.rows = [](std::uint32_t rank, std::uint32_t epoch) {
    if (epoch == 1 || epoch == 1300) return 70u;
    if (epoch == 2 || epoch == 1299) return 65 + rank;
    return rank % 2;
  };
  EXPECT_EQ(GatherSimulation(options).run(), "");
}

}  // namespace
}  // namespace mk::kernels::testing
