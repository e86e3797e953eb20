// The schedule of MoE Dispatch+GEMM, for every world of 1-4 nodes x 1-8 local ranks and a set of
// shapes: tiles, places, flags and bytes are what schedule.h says.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/comm/workspace_head.h"
#include "kernels/ops/moe/roles.h"
#include "kernels/ops/moe/spec.h"
#include "tests/kernels/moe/routing_cases.h"
#include "tests/kernels/support/claims.h"

namespace mk::kernels::testing {
namespace {

struct Case {
  MoeDispatchShape shape;
  Tiling tiling;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {{1, 8, 8, 1, 1, 0}, {}},
      {{9, 24, 40, 3, 2, 0}, {8, 16, 64, 0}},         // a token straddles chunks; edges in features
      {{40, 16, 136, 20, 4, 100}, {16, 0, 1000, 1}},  // chunk of odd size, one bank, few rows
      {{600, 8, 8, 5, 5, 0}, {}},                     // several parts of a table
      {{30, 64, 264, 64, 8, 0}, {8, 64, 128, 0}},     // more chunks than a granule has flags
  };
  return all;
}

/// Calls `check(plan)` for every world and case.
template <class Check>
void for_every_plan(Check&& check) {
  std::uint32_t checked = 0;
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals) {
      for (const Case& one : cases()) {
        const auto plan = MoeDispatchPlan::make(nodes, locals, one.shape, DType::kBf16, one.tiling);
        ASSERT_TRUE(plan) << plan.error().message;
        SCOPED_TRACE(fmt::format("{} x {} ranks, T {}, H {}, F {}, E {}, k {}", nodes, locals,
                                 one.shape.tokens_max, one.shape.hidden, one.shape.features,
                                 one.shape.experts, one.shape.top_k));
        check(*plan);
        if (::testing::Test::HasFailure()) return;
        ++checked;
      }
    }
  }
  EXPECT_EQ(checked, 32 * cases().size());
}

/// A rank's workspace, with the routing plan that the ranks' routing gives.
struct Planned {
  Planned(const MoeDispatchPlan& plan, std::uint32_t rank,
          const std::vector<RankRouting>& all_routing)
      : workspace(plan.workspace_bytes()) {
    launch.plan = plan;
    launch.context.world = {plan.nodes, plan.locals, rank / plan.locals, rank % plan.locals};
    launch.context.workspaces[launch.context.world.local] = workspace.data();
    const RoutingPlan routing = routing_plan_of(launch);
    const auto table = [&](std::uint32_t part) {
      return all_routing[routing.rank_of(part)].table(plan.shape.top_k);
    };
    for (std::uint32_t part = 0; part < routing.shape().parts(); ++part)
      routing.count(part, table(part));
    routing.arrange(plan.shape.rows_max);
    for (std::uint32_t part = 0; routing.summary().fits && part < routing.shape().parts(); ++part)
      routing.fill(part, table(part));
  }
  std::vector<std::byte> workspace;
  MoeDispatchLaunch launch;
};

TEST(MoeDispatchSchedule, EveryOutputElementIsComputedOnceAndInOrder) {
  std::mt19937_64 random(1);
  std::uint32_t turn = 0;
  for_every_plan([&](const MoeDispatchPlan& plan) {
    const std::uint32_t ranks = plan.nodes * plan.locals;
    const Skew skew = kSkews[turn++ % std::size(kSkews)];
    const auto all_routing = draw_routing(ranks, plan.shape.experts, plan.shape.top_k,
                                          plan.shape.tokens_max, skew, turn % 2 == 0, random);
    const auto rank = static_cast<std::uint32_t>(random() % ranks);
    const Planned planned(plan, rank, all_routing);
    const RoutingPlan routing = routing_plan_of(planned.launch);
    const MoeDispatchSchedule schedule(plan, planned.launch.context.world);
    if (routing.summary().fits == 0) {
      ASSERT_GT(routing.summary().rows, plan.shape.rows_max);
      return;
    }
    const std::uint32_t features = plan.shape.features;
    std::vector<std::uint8_t> covered(std::size_t{routing.summary().rows} * features, 0);
    std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t> before{};
    for (std::uint64_t step = 0; step < schedule.steps(routing.summary().tiles); ++step) {
      const RowTile& tile = routing.tiles()[schedule.row_tile_at(step)];
      const TileRect columns = schedule.columns_at(step);
      ASSERT_GE(columns.columns, 1u);
      ASSERT_LE(columns.columns, plan.tile_n);
      ASSERT_LE(columns.column + columns.columns, features);
      const std::tuple now{tile.hops, tile.step, tile.expert, tile.row, columns.column};
      if (step > 0) {
        ASSERT_LT(before, now) << "step " << step;
      }
      before = now;
      for (std::uint32_t row = tile.row; row < tile.row + tile.rows; ++row) {
        for (std::uint32_t column = 0; column < columns.columns; ++column)
          ++covered[std::size_t{row} * features + columns.column + column];
      }
    }
    for (std::uint8_t count : covered) ASSERT_EQ(count, 1);
  });
}

TEST(MoeDispatchSchedule, PlacesInTheWorkspaceAreDisjointAndInside) {
  for_every_plan([](const MoeDispatchPlan& plan) {
    const World world{plan.nodes, plan.locals, 0, 0};
    const RoutingShape shape = routing_shape(plan, world);
    const MoeDispatchSchedule schedule(plan, world);
    const std::uint64_t experts = shape.experts_here_max();
    Claims claims;
    claims.claim(0, WorkspaceHead{plan.locals}.bytes(), "head");
    for (const GatherSchedule* gather : {&schedule.routing(), &schedule.tokens()}) {
      if (world.size() == 1) continue;
      const GatherGeometry& geometry = gather->geometry();
      const std::string name = gather == &schedule.tokens() ? "tokens" : "routing";
      claims.claim(geometry.layout.ready, std::uint64_t{world.size()} * geometry.chunks_max * 4,
                   name + " ready");
      for (std::uint32_t local = 0; local < plan.locals && plan.nodes > 1; ++local)
        claims.claim(gather->drained(local), 64, name + " drained");
      for (std::uint32_t local = 0; local < plan.locals && plan.nodes > 1; ++local)
        claims.claim(gather->sent(local), 64, name + " sent");
      for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
        for (std::uint32_t node = 0; node < plan.nodes; ++node) {
          claims.claim(gather->slot(bank, node * plan.locals),
                       64 + std::uint64_t{geometry.rows_max} * geometry.row_bytes, name + " slot");
        }
      }
    }
    claims.claim(plan.layout.words, sizeof(MoePlanWords), "words");
    claims.claim(plan.layout.counts, shape.parts() * (experts + 1) * 4, "counts");
    claims.claim(plan.layout.places, (plan.nodes * 16 + 1) * (experts + 1) * 4, "places");
    claims.claim(plan.layout.offsets, (experts + 1) * 4, "offsets");
    claims.claim(plan.layout.tiles, shape.tiles_max() * sizeof(RowTile), "tiles");
    claims.claim(plan.layout.rows, std::uint64_t{plan.shape.rows_max} * sizeof(MoeRow), "rows");
    claims.claim(plan.layout.rows_packed, shape.tiles_max() * 4, "rows_packed");
    claims.claim(schedule.packed_row(0), shape.packed_rows_max() * plan.shape.hidden * 2, "packed");
    EXPECT_LE(claims.end(), plan.workspace_bytes());
    EXPECT_EQ(plan.workspace_bytes() % 4096, 0u);
  });
}

TEST(MoeDispatchSchedule, ArrivalFlagsOfTheTwoGathersAreDisjointAndInside) {
  for_every_plan([](const MoeDispatchPlan& plan) {
    if (plan.nodes == 1) {
      EXPECT_EQ(plan.flag_count(), 0u);
      return;
    }
    for (std::uint32_t at = 0; at < plan.nodes; ++at) {
      const MoeDispatchSchedule schedule(plan, World{plan.nodes, plan.locals, at, 0});
      std::set<std::uint32_t> seen;
      for (const GatherSchedule* gather : {&schedule.routing(), &schedule.tokens()}) {
        for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
          for (std::uint32_t node = 0; node < plan.nodes; ++node) {
            if (node == at) continue;
            for (std::uint32_t chunk = 0; chunk < gather->geometry().chunks_max; ++chunk)
              ASSERT_TRUE(seen.insert(gather->arrival(bank, at, node, chunk)).second);
          }
        }
        if (gather->flags().has_releases()) {
          ASSERT_TRUE(seen.insert(gather->release(at)).second);
        }
      }
      ASSERT_LT(*seen.rbegin(), plan.flag_count());
    }
  });
}

// Each rank's routing and tokens cross to each other node once, for all its ranks.
TEST(MoeDispatchSchedule, BytesAreTheFormula) {
  std::mt19937_64 random(2);
  for_every_plan([&](const MoeDispatchPlan& plan) {
    const std::uint32_t ranks = plan.nodes * plan.locals;
    std::vector<std::uint32_t> tokens(ranks);
    std::uint64_t expected = 0;
    for (std::uint32_t& count : tokens) {
      count = static_cast<std::uint32_t>(random() % (plan.shape.tokens_max + 1));
      expected += (plan.nodes - 1) *
                  (128 + std::uint64_t{count} * (8 * plan.shape.top_k + 2 * plan.shape.hidden));
    }
    std::uint64_t sent = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const World world{plan.nodes, plan.locals, rank / plan.locals, rank % plan.locals};
      sent += MoeDispatchSchedule(plan, world).network_bytes([&](std::uint32_t origin) {
        EXPECT_EQ(origin % plan.locals, world.local) << "only its rail's";
        return tokens[origin];
      });
    }
    ASSERT_EQ(sent, expected);
  });
}

TEST(MoeDispatchPlan, TheWorkIsThatOfEvenRouting) {
  const auto plan =
      MoeDispatchPlan::make(2, 2, {100, 64, 128, 8, 3, 0}, DType::kBf16, {0, 0, 1024, 0});
  ASSERT_TRUE(plan);
  const LaunchWork work = plan->work({2, 2, 1, 0}, 50);
  EXPECT_EQ(work.flops, 2.0 * (50 * 3) * 64 * 128);
  EXPECT_EQ(work.local_bytes, 2.0 * (50 * 3) * 128 + 2.0 * 50 * (128 + 24));
  EXPECT_EQ(work.network_bytes, 128 + 50 * (128 + 24));
  EXPECT_EQ(work.steps, 7u) << "6400 bytes in chunks of 1024";
  EXPECT_EQ(work.commands, (1 + 2) + (1 + 7u));
  const auto one_bank =
      MoeDispatchPlan::make(2, 2, {100, 64, 128, 8, 3, 0}, DType::kBf16, {0, 0, 1024, 1});
  EXPECT_EQ(one_bank->work({2, 2, 1, 0}, 50).commands, (1 + 2) + (1 + 7) + 2u) << "two releases";
  EXPECT_EQ(plan->work({2, 2, 1, 0}, 0).flops, 0);
  const auto few = MoeDispatchPlan::make(1, 4, {100, 64, 128, 2, 1, 0}, DType::kBf16, {});
  EXPECT_EQ(few->work({1, 4, 0, 0}, 50).flops, 0) << "no expert here";
  EXPECT_EQ(few->work({1, 4, 0, 1}, 50).flops, 2.0 * 100 * 64 * 128);
}

TEST(MoeDispatchPlan, TheFingerprintTellsPlansApart) {
  std::set<std::uint64_t> seen;
  for (const Tiling& tiling :
       {Tiling{}, {64, 0, 0, 0}, {0, 40, 0, 0}, {0, 0, 4096, 0}, {0, 0, 0, 1}}) {
    for (DType dtype : {DType::kBf16, DType::kF16}) {
      for (const MoeDispatchShape& shape : {MoeDispatchShape{512, 64, 64, 8, 2, 0},
                                            {513, 64, 64, 8, 2, 0},
                                            {512, 72, 64, 8, 2, 0},
                                            {512, 64, 72, 8, 2, 0},
                                            {512, 64, 64, 9, 2, 0},
                                            {512, 64, 64, 8, 3, 0},
                                            {512, 64, 64, 8, 2, 100}}) {
        EXPECT_TRUE(
            seen.insert(MoeDispatchPlan::make(2, 4, shape, dtype, tiling)->fingerprint()).second);
      }
    }
  }
}

// Every tile is packed whole, in pieces of one count; pieces come in the order of tiles.
TEST(MoePacking, StepsAreEveryTileOnce) {
  for (std::uint32_t blocks = 1; blocks <= 80; ++blocks) {
    for (std::uint32_t parts = 1; parts <= 8 && parts <= blocks; parts *= 2) {
      std::map<std::uint32_t, std::set<std::uint32_t>> pieces;
      std::map<std::uint32_t, std::uint32_t> counts;
      std::uint32_t last = 0;
      for (std::uint32_t step = 0; step < 6 * blocks; ++step) {
        const moe_dispatch::PackStep piece = moe_dispatch::pack_step(step, blocks, parts);
        ASSERT_GE(piece.tile, last);
        last = piece.tile;
        ASSERT_LT(piece.rows.index, piece.rows.count);
        ASSERT_TRUE(pieces[piece.tile].insert(piece.rows.index).second);
        ASSERT_EQ(counts.emplace(piece.tile, piece.rows.count).first->second, piece.rows.count);
      }
      for (std::uint32_t tile = 0; tile < last; ++tile)
        ASSERT_EQ(pieces[tile].size(), counts[tile]) << tile << " of " << blocks << " x " << parts;
    }
  }
}

}  // namespace
}  // namespace mk::kernels::testing
