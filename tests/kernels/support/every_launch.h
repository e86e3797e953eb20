/// \file
/// The launches in which schedules are checked: every world of 1-4 nodes x 1-8 local ranks, a set
/// of plans in each, and of each some numbers of rows.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "kernels/comm/plan_tools.h"
#include "kernels/comm/types.h"

namespace mk::kernels::testing {

struct PlanCase {
  Shape max;
  Tiling tiling;
};

struct LaunchCases {
  std::vector<PlanCase> plans;
  /// Of launches, where a plan has as many; besides these the plan's largest number, one less, and
  /// half of it.
  std::set<std::uint32_t> rows;
  /// Launches of all plans of one world: a loop that ends early shall not look like success.
  std::uint32_t launches = 0;
};

/// Calls `check(plan, m)` for each, until something has failed.
template <class Plan, class Check>
void for_every_launch(const LaunchCases& cases, Check&& check) {
  std::uint32_t worlds = 0;
  std::uint32_t checked = 0;
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals, ++worlds) {
      for (const PlanCase& one : cases.plans) {
        const auto plan = Plan::make(nodes, locals, one.max, DType::kBf16, one.tiling);
        ASSERT_TRUE(plan) << plan.error().message;
        std::set<std::uint32_t> rows = cases.rows;
        rows.insert({one.max.m / 2, one.max.m - 1, one.max.m});
        for (const std::uint32_t m : rows) {
          if (m == 0 || m > one.max.m) continue;
          SCOPED_TRACE(fmt::format("{} x {} ranks, {} x {} x {}, tiles {} x {}, m = {}", nodes,
                                   locals, one.max.m, one.max.n, one.max.k, plan->tile_m,
                                   plan->tile_n, m));
          check(*plan, m);
          if (::testing::Test::HasFailure()) return;
          ++checked;
        }
      }
    }
  }
  EXPECT_EQ(checked, worlds * cases.launches);
}

}  // namespace mk::kernels::testing
