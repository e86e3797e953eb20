// The example of a whole operator runs in adversarial orders, in every world; the fault that its
// head speaks of is seen.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/kernels/example/all_to_all.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {
namespace {

using example::AllToAllBlock;
using example::AllToAllGeometry;
using example::AllToAllLaunch;

struct AllToAllOptions : SimOptions {
  std::uint32_t block_bytes = 16;
  std::uint32_t slot_banks = kBanksMax;
};

/// Byte `i` of what `from` brings for `to`.
std::byte brought(std::uint32_t epoch, std::uint32_t from, std::uint32_t to, std::uint32_t i) {
  return static_cast<std::byte>((epoch * 0x85ebca6bu ^ from * 0xc2b2ae35u ^ to * 0x27d4eb2fu ^ i) >>
                                9);
}

/// Others may look after every piece of a block.
struct Executor : SimExecutor {
  explicit Executor(const SimExecutor& frame) : SimExecutor(frame) {}
  void copy(const CopyJob& job) { copy_in_pieces(job, 8); }
};

class AllToAllSimulation : private SimOperator {
 public:
  explicit AllToAllSimulation(const AllToAllOptions& options)
      : plan_{options.nodes, options.locals, options.block_bytes, options.slot_banks},
        ranks_(plan_.world()),
        simulation_(*this, options, plan_.workspace_bytes(), plan_.flags().count()) {
    for (Rank& rank : ranks_) {
      rank.launch.plan = plan_;
      rank.launch.blocks = options.blocks;
    }
  }
  std::string run() { return simulation_.run(); }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }

 private:
  struct Rank {
    AllToAllLaunch launch;
    std::vector<std::byte> input, output;
  };

  const char* name() const override { return "all_to_all"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCollect, ranks_[0].launch.blocks.compute);
    add_role(threads, Role::kShare, 1);
    if (world.nodes > 1) add_role(threads, Role::kSend, 1);
    if (world.nodes > 1) add_role(threads, Role::kReceive, 1);
    return threads;
  }
  void begin(std::uint32_t index) override {
    Rank& rank = ranks_[index];
    rank.input.clear();
    for (std::uint32_t to = 0; to < plan_.world(); ++to) {
      for (std::uint32_t i = 0; i < plan_.block_bytes; ++i)
        rank.input.push_back(brought(rank.launch.epoch, index, to, i));
    }
    rank.output.assign(rank.input.size(), std::byte{0x7f});
    rank.launch.input = rank.input.data();
    rank.launch.output = rank.output.data();
  }
  bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                const SimExecutor& frame) override {
    Executor executor(frame);
    AllToAllBlock<Executor> block(executor, ranks_[rank].launch, role, index, totals);
    switch (role) {
      case Role::kShare:
        return share(block);
      case Role::kSend:
        return send(block);
      case Role::kReceive:
        return receive(block);
      default:
        return collect(block);
    }
  }
  std::string check(std::uint32_t index) override {
    const Rank& rank = ranks_[index];
    for (std::uint32_t from = 0; from < plan_.world(); ++from) {
      for (std::uint32_t i = 0; i < plan_.block_bytes; ++i) {
        if (rank.output[std::size_t{from} * plan_.block_bytes + i] !=
            brought(rank.launch.epoch, from, index, i))
          return fmt::format("byte {} of rank {}'s block is wrong", i, from);
      }
    }
    return {};
  }

  AllToAllGeometry plan_;
  std::vector<Rank> ranks_;
  Simulation simulation_;
};

AllToAllOptions options_of(std::uint32_t nodes, std::uint32_t locals, std::uint64_t seed) {
  AllToAllOptions options;
  options.nodes = nodes;
  options.locals = locals;
  options.block_bytes = 16 * static_cast<std::uint32_t>(1 + seed % 3);
  options.blocks = {static_cast<std::uint32_t>(1 + seed % 2), 1, 1, 1, 1, 1, 1};
  options.launches = random_sim_launches(6, 9, seed);
  options.set_seed(seed);
  return options;
}

TEST(AllToAllExample, EndsAndIsRightInEveryWorldAndOrder) {
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 4; ++locals) {
      for (std::uint64_t seed = 1; seed <= 12; ++seed) {
        ASSERT_EQ(AllToAllSimulation(options_of(nodes, locals, seed)).run(), "")
            << fmt::format("{} x {}, seed {}", nodes, locals, seed);
      }
    }
  }
}

// Were slots there once, a fast rank would overwrite what a slow one has yet to read.
TEST(AllToAllExample, SlotsReusedTooEarlyAreSeen) {
  EXPECT_GT(seeds_seen_wrong<AllToAllSimulation>(40,
                                                 [](std::uint64_t seed) {
                                                   auto options = options_of(1 + seed % 2, 3, seed);
                                                   options.slot_banks = 1;
                                                   return options;
                                                 }),
            5);
}

}  // namespace
}  // namespace mk::kernels::testing
