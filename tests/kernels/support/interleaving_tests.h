/// \file
/// The worlds, orders and faults in which the simulations of operators (simulation.h) run.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {

/// By the number of nodes.
class EveryWorldAndOrder : public ::testing::TestWithParam<std::uint32_t> {};

/// Calls `run(options, banks, random)` for 1 to 8 local ranks and every order, until one fails. It
/// draws the rest of its options.
template <class Options, class Run>
void for_every_world_and_order(std::uint32_t nodes, Run&& run) {
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    for (Order order : kOrders) {
      const auto number = static_cast<std::uint32_t>(order);
      Options options;
      options.nodes = nodes;
      options.locals = locals;
      options.order = order;
      options.seed = nodes * 1000 + locals * 100 + std::uint64_t{number} * 10;
      std::mt19937_64 random(options.seed);
      const std::uint32_t banks = 1 + (locals + number) % 2;
      SCOPED_TRACE(fmt::format("{} x {}, order {}, {} banks, seed {}", nodes, locals, number, banks,
                               options.seed));
      run(options, banks, random);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

/// Large worlds take long: half of the orders, others for each world.
inline bool is_left_out(const SimOptions& options) {
  return options.nodes * options.locals > 8 &&
         (static_cast<std::uint32_t>(options.order) + options.locals) % 2 != 0;
}

/// The roles of a gather, and the one that computes with its rows.
inline RoleBlocks random_gather_blocks(std::mt19937_64& random) {
  const auto blocks = [&] { return static_cast<std::uint32_t>(1 + random() % 2); };
  return {blocks(), 1, blocks(), blocks(), blocks(), 1, 1};
}

/// Launches of an operator whose m is always the same.
inline std::vector<SimLaunch> random_sim_launches_of(std::uint32_t m, std::uint32_t count,
                                                     std::uint64_t seed) {
  auto launches = random_sim_launches(count, 1, seed);
  for (SimLaunch& launch : launches) launch.m = m;
  return launches;
}

template <class Options>
Options small_world(std::uint32_t nodes, std::uint32_t locals, std::vector<SimLaunch> launches,
                    std::uint64_t seed) {
  Options options;
  options.nodes = nodes;
  options.locals = locals;
  options.launches = std::move(launches);
  options.set_seed(seed);
  return options;
}

/// Two launches of rows that fit into 40, of two nodes.
template <class Options>
Options two_large_launches(std::uint64_t seed, const NetworkOptions& network) {
  auto options = small_world<Options>(2, static_cast<std::uint32_t>(1 + seed % 2),
                                      {{40, Mode::kFused}, {39, Mode::kUnfused}}, seed);
  options.network = network;
  return options;
}

inline NetworkOptions network_with(bool NetworkOptions::*fault) {
  NetworkOptions network;
  network.*fault = true;
  return network;
}

/// `early(simulation)` counts what a role did before all of the role before it were done: in
/// fused launches it does, in unfused ones never.
template <class OperatorSimulation, class OptionsOf>
void expect_only_fused_overlap(OptionsOf&& options_of,
                               std::uint32_t (OperatorSimulation::*early)() const) {
  std::uint32_t counts[2] = {};
  for (Mode mode : {Mode::kFused, Mode::kUnfused}) {
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      auto options = options_of(seed);
      for (SimLaunch& launch : options.launches) launch.mode = mode;
      OperatorSimulation simulation(options);
      ASSERT_EQ(simulation.run(), "");
      counts[static_cast<int>(mode)] += (simulation.*early)();
    }
  }
  EXPECT_GT(counts[0], 0u);
  EXPECT_EQ(counts[1], 0u);
}

}  // namespace mk::kernels::testing
