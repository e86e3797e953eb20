/// \file
/// Parts that the simulations of GEMM+ReduceScatter and of ReduceScatter alone share
/// (gemm_simulation.h).
#pragma once

#include <optional>

#include "kernels/ops/gemm_rs/run_role.h"
#include "kernels/ops/gemm_rs/spec.h"

namespace mk::kernels::testing {

struct ScatteredRows {
  using Plan = GemmRsPlan;
  using Schedule = GemmRsSchedule;
  using Compute = GemmRsCompute;
  template <class Executor>
  using Block = GemmRsBlock<Executor>;
  static constexpr std::uint32_t kNodesLeast = 1;
  static constexpr bool kReuseIsSafe = false;
  static constexpr std::uint32_t kRowsMax = 40;  // shards of 0, 1 and several rows
  static constexpr std::optional<Role> kThen = std::nullopt;

  static ShardRange rows(const Launch& launch) {
    const World& world = launch.context.world;
    return shard_of(launch.m, world.size(), world.rank());
  }
  /// Whether the rank sums its shard once: some ranks, in some launches.
  static bool sums_once(const Launch& launch) {
    return (launch.epoch * 5 + launch.context.world.rank() * 11 + launch.m) % 3 != 0;
  }
};

}  // namespace mk::kernels::testing
