// The schedule of AllGather+GEMM, exhaustively for every world of 1-4 nodes x 1-8 local ranks and a
// set of shapes: every element of C once, in the stated order, and rows where A has them.
#include "kernels/ops/ag_gemm/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/gather/plan.h"
#include "kernels/ops/ag_gemm/spec.h"
#include "tests/kernels/support/every_launch.h"

namespace mk::kernels {
namespace {

/// Calls `check(plan, schedule)` for every rank of every world, case and m.
template <class Check>
void for_every_rank(Check&& check) {
  static const testing::LaunchCases cases = {
      .plans = {{{1, 1, 1}, {}},
                {{7, 24, 8}, {}},  // shards without rows
                {{64, 64, 16}, {16, 16, 256, 0}},
                {{65, 72, 5}, {4, 24, 64, 0}},    // edges both ways, rows straddle chunks
                {{129, 40, 3}, {1, 8, 64, 1}},    // a row a tile
                {{300, 101, 32}, {0, 32, 0, 0}},  // n no multiple of 8
                {{1031, 8, 4}, {8, 8, 64, 0}}},   // shards of two sizes with different tile counts
      .rows = {1, 2, 3, 17, 31, 32, 33},
      .launches = 54};
  testing::for_every_launch<AgGemmPlan>(cases, [&](const AgGemmPlan& plan, std::uint32_t m) {
    const std::uint32_t locals = plan.gather.locals;
    for (std::uint32_t rank = 0; rank < plan.gather.nodes * locals; ++rank) {
      SCOPED_TRACE(fmt::format("rank {}", rank));
      check(plan,
            AgGemmSchedule(plan, {plan.gather.nodes, locals, rank / locals, rank % locals}, m));
      if (::testing::Test::HasFailure()) return;
    }
  });
}

std::vector<AgGemmTile> all_tiles(const AgGemmSchedule& schedule, const AgGemmBands& bands = {}) {
  std::vector<AgGemmTile> tiles;
  for (AgGemmWalk walk(schedule, bands, 0); !walk.done(); walk.advance(1))
    tiles.push_back(walk.tile());
  return tiles;
}

// `whole`: of a node that has as many ranks; in_world() cuts it. Bands of one row of each shard, of
// fewer, of more, and of more rows of some shards than of others.
constexpr AgGemmBands kBands[] = {{1, 0, 0},  {8, 0, 0}, {1, 8, 2},  {1, 1, 3},
                                  {2, 3, 16}, {3, 2, 0}, {1, 16, 5}, {1, 1000, 1000}};
AgGemmBands in_world(AgGemmBands bands, const World& world) {
  bands.whole = std::min(bands.whole, world.locals);
  return bands;
}

TEST(AgGemmSchedule, EveryElementOfCIsComputedOnceFromTheRowsAHasThere) {
  for_every_rank([](const AgGemmPlan& plan, const AgGemmSchedule& schedule) {
    for (const AgGemmBands& one : kBands) {
      const AgGemmBands bands = in_world(one, schedule.world());
      std::vector<std::uint8_t> covered(std::size_t{schedule.m()} * plan.max.n, 0);
      for (const AgGemmTile& tile : all_tiles(schedule, bands)) {
        const ShardRange shard = schedule.shard(tile.origin);
        ASSERT_GE(tile.rect.rows, 1u);
        ASSERT_GE(tile.rect.columns, 1u);
        ASSERT_LE(tile.rect.rows, plan.tile_m);
        ASSERT_LE(tile.rect.columns, plan.tile_n);
        ASSERT_LE(tile.row + tile.rect.rows, shard.count) << "beyond its shard";
        ASSERT_EQ(tile.rect.row, shard.first + tile.row);
        ASSERT_LE(tile.rect.row + tile.rect.rows, schedule.m());
        ASSERT_LE(tile.rect.column + tile.rect.columns, plan.max.n);
        for (std::uint32_t i = 0; i < tile.rect.rows; ++i) {
          auto* row = &covered[std::size_t{tile.rect.row + i} * plan.max.n + tile.rect.column];
          for (std::uint32_t j = 0; j < tile.rect.columns; ++j) ++row[j];
        }
      }
      ASSERT_TRUE(std::all_of(covered.begin(), covered.end(),
                              [](std::uint8_t count) { return count == 1; }));
    }
  });
}

// One row of tiles, whose part of each shard begins at a multiple of eight rows: all of C, column
// by column. Every number of rows and of ranks.
TEST(AgGemmSchedule, TilesThatSpanAllShardsCoverCOnce) {
  std::uint32_t spanning = 0;
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    for (std::uint32_t m = 1; m <= 140; ++m) {
      const bool spans = AgGemmSchedule::may_span(1, locals, m, 128);
      EXPECT_FALSE(AgGemmSchedule::may_span(2, locals, m, 128));
      EXPECT_EQ(spans,
                locals > 1 && m >= locals && (m + locals - 1) / locals <= 128 / locals / 8 * 8)
          << locals << " ranks, " << m;
      if (!spans) continue;
      ++spanning;
      const auto plan = AgGemmPlan::make(1, locals, {m, 200, 8}, DType::kBf16, {128, 64, 256, 0});
      ASSERT_TRUE(plan) << plan.error().message;
      const std::uint32_t own = m % locals;
      const AgGemmSchedule schedule(*plan, {1, locals, 0, own}, m, true);
      const std::uint32_t step = schedule.span_step();
      EXPECT_EQ(0u, step % 8);
      EXPECT_LE(locals * step, 128u);
      const auto tiles = all_tiles(schedule);
      ASSERT_EQ(schedule.tiles(), tiles.size());
      ASSERT_EQ(4u, tiles.size());
      std::uint32_t column = 0;
      for (const AgGemmTile& tile : tiles) {
        EXPECT_EQ(own, tile.origin);
        EXPECT_EQ(0u, tile.rect.row);
        EXPECT_EQ(m, tile.rect.rows);
        EXPECT_EQ(column, tile.rect.column);
        column += tile.rect.columns;
        std::uint32_t row = 0;
        for (std::uint32_t rank = 0; rank < locals; ++rank) {
          const AgGemmTile part = schedule.part_of(tile, rank);
          EXPECT_EQ(rank, part.origin);
          EXPECT_EQ(0u, part.row);
          EXPECT_EQ(row, part.rect.row);
          EXPECT_EQ(shard_of(m, locals, rank).count, part.rect.rows);
          EXPECT_LE(part.rect.rows, step);
          EXPECT_EQ(tile.rect.column, part.rect.column);
          EXPECT_EQ(tile.rect.columns, part.rect.columns);
          row += part.rect.rows;
        }
        EXPECT_EQ(m, row);
      }
      EXPECT_EQ(200u, column);
    }
  }
  EXPECT_GT(spanning, 500u);
}

// Own shard in bands, then hop by hop, the own node's others first; on each hop the rails' rows of
// tiles round by round, so many at a time; in each band column by column. The next shards of the
// own node may be walked like its own.
TEST(AgGemmSchedule, TilesComeInTheStatedOrder) {
  for_every_rank([](const AgGemmPlan& plan, const AgGemmSchedule& schedule) {
    const World& world = schedule.world();
    for (const AgGemmBands& one : kBands) {
      const AgGemmBands bands = in_world(one, world);
      const auto key = [&](const AgGemmTile& tile) {
        const std::uint32_t node = tile.origin / plan.locals;
        const std::uint32_t hops = (world.node + plan.nodes - node) % plan.nodes;
        const std::uint32_t rail =
            (tile.origin % plan.locals + plan.locals - world.local) % plan.locals;
        const std::uint32_t round =
            tile.row / div_up(schedule.shard(tile.origin).count,
                              div_up(schedule.shard(tile.origin).count, plan.tile_m));
        const bool whole = hops == 0 && rail < bands.whole;
        if (whole)
          return std::array{hops, rail, round / TileGrid::kBandTiles, tile.rect.column, round, 0u};
        const std::uint32_t first = hops == 0 ? bands.whole : 0;
        const std::uint32_t shards = plan.locals - first;
        const std::uint32_t asked = hops == 0 ? bands.near : bands.far;
        // Of all rows of tiles before this one, in the order in which they arrive. Shards that lack
        // the last round leave no gap in a band.
        std::uint32_t row = round * shards;
        for (std::uint32_t other = first; other < rail; ++other) {
          const std::uint32_t origin = node * plan.locals + (world.local + other) % plan.locals;
          row += round < schedule.grid(origin).tiles_m() ? 1 : 0;
        }
        return std::array{hops,  plan.locals, row / (asked == 0 ? shards : asked), tile.rect.column,
                          round, rail};
      };
      const auto tiles = all_tiles(schedule, bands);
      ASSERT_EQ(tiles.size(), all_tiles(schedule).size());
      for (std::size_t i = 1; i < tiles.size(); ++i) {
        ASSERT_LT(key(tiles[i - 1]), key(tiles[i])) << "tile " << i;
      }
      if (schedule.shard(world.rank()).count != 0) {
        ASSERT_EQ(tiles.front().origin, world.rank());
      }
    }
  });
}

// As many rows of tiles together as are in work at one time, and no more than 16; of each shard
// alike, one at least. One where B is small.
TEST(AgGemmBands, ABandIsInWorkAtOneTime) {
  constexpr std::uint32_t kK = 1024;
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals) {
      for (const std::uint32_t columns : {1u, 3u, 16u, 28u, 200u}) {
        const Shape max{1 << 16, columns * 256, kK};
        const auto plan = AgGemmPlan::make(nodes, locals, max, DType::kBf16, {128, 256, 0, 0});
        ASSERT_TRUE(plan) << plan.error().message;
        const AgGemmSchedule schedule(*plan, {nodes, locals, 0, 0}, max.m);
        ASSERT_EQ(schedule.tiles_n(), columns);
        ASSERT_EQ(schedule.b_bytes(), std::uint64_t{2} * kK * max.n);
        for (std::uint32_t workers = 1; workers <= 132; ++workers) {
          SCOPED_TRACE(
              fmt::format("{} x {}, {} columns, {} workers", nodes, locals, columns, workers));
          const bool large = std::uint64_t{2} * kK * max.n >= 8 << 20;
          const std::uint32_t fit = std::min(workers / columns, 16u);
          const auto expect = [&](std::uint32_t rows, std::uint32_t shards) {
            if (!large || shards == 0 || fit < shards) {
              ASSERT_EQ(rows, 0u) << "one of each";
            } else {
              ASSERT_EQ(rows, fit - fit % shards);
            }
          };
          const AgGemmBands bands = AgGemmBands::of(schedule, Arrival::kSideBySide, workers);
          ASSERT_EQ(bands.whole, 1u);
          expect(bands.far, locals);
          expect(bands.near, locals - 1);
          // One after the other, all the node's are walked like the rank's own.
          const AgGemmBands in_turn = AgGemmBands::of(schedule, Arrival::kInTurn, workers);
          ASSERT_EQ(in_turn.whole, locals);
          expect(in_turn.far, locals);
        }
      }
    }
  }
}

// Where shards arrive in turn, and soon: as many by themselves as give each worker a tile, and one
// more. The others come in bands of 16 rows of tiles of all of them together, or one of each.
TEST(AgGemmBands, ShardsThatArriveSoonInTurnAreWalkedByThemselvesWhileTheyArrive) {
  struct Case {
    std::uint32_t nodes, locals, m, workers;
    std::uint32_t whole, near;
  };
  for (const Case& one :
       {Case{1, 8, 2048, 108, 3, 15}, Case{1, 8, 2048, 56, 2, 12}, Case{1, 8, 2048, 57, 3, 15},
        Case{1, 8, 1024, 108, 5, 15}, Case{1, 8, 256, 108, 5, 15}, Case{1, 4, 2048, 108, 2, 16},
        Case{1, 2, 2048, 108, 2, 0}, Case{2, 4, 4096, 108, 2, 16}, Case{2, 4, 2048, 108, 3, 16}}) {
    SCOPED_TRACE(
        fmt::format("{} x {}, {} rows, {} workers", one.nodes, one.locals, one.m, one.workers));
    const Shape max{one.m, 7168, 8192};
    const auto plan = AgGemmPlan::make(one.nodes, one.locals, max, DType::kBf16, {128, 256, 0, 0});
    ASSERT_TRUE(plan) << plan.error().message;
    const AgGemmSchedule schedule(*plan, {one.nodes, one.locals, 0, 0}, max.m);
    const AgGemmBands bands = AgGemmBands::of(schedule, Arrival::kSoonInTurn, one.workers);
    EXPECT_EQ(bands.whole, one.whole);
    EXPECT_EQ(bands.near, one.near);
  }
}

// What a band's tiles wait for is what is walked together: of each shard the rows of tiles that the
// walk goes by column by column. (Where some shards lack the last one, it may be left out.)
TEST(AgGemmBands, EndWhereTheWalkGoesOn) {
  for_every_rank([](const AgGemmPlan& plan, const AgGemmSchedule& schedule) {
    if (plan.max.m < 300) return;
    const GatherSchedule& gather = schedule.gather();
    const bool rows_missing = schedule.rounds() != schedule.rounds_everywhere();
    for (const AgGemmBands& one : kBands) {
      const AgGemmBands bands = in_world(one, schedule.world());
      const auto is_whole = [&](std::uint32_t origin) {
        for (std::uint32_t i = 0; i < bands.whole; ++i)
          if (gather.origin_at(i) == origin) return true;
        return false;
      };
      // A band ends where the walk is at column 0 again, having left it, or at another hop.
      using Row = std::pair<std::uint32_t, std::uint32_t>;  // origin, round
      std::vector<std::set<Row>> walked;
      std::uint32_t last_column = 1, last_hops = 0;
      for (AgGemmWalk walk(schedule, bands, 0); !walk.done(); walk.advance(1)) {
        if (is_whole(walk.origin())) continue;
        const AgGemmBands::Place at = bands.place(gather, walk.origin());
        const bool full = !walked.empty() && walked.back().size() == bands.rows(at);
        const bool again = walk.column() == 0 && (last_column != 0 || full || at.hops != last_hops);
        if (again) walked.emplace_back();
        walked.back().insert({walk.origin(), walk.round()});
        last_column = walk.column();
        last_hops = at.hops;
      }
      for (const std::set<Row>& band : walked) {
        for (const auto& [origin, round] : band) {
          std::uint32_t last = round;
          for (const auto& [other, its] : band)
            if (other == origin) last = std::max(last, its);
          const std::uint32_t end = std::min(bands.end_of_band(bands.place(gather, origin), round),
                                             schedule.grid(origin).tiles_m());
          ASSERT_GT(end, round);
          if (!(rows_missing && last + 1 == schedule.rounds() && end == last)) {
            ASSERT_EQ(end, last + 1) << "origin " << origin << ", row of tiles " << round;
          }
        }
      }
    }
  });
}

// Several blocks, each going on by as many steps as there are, share the same tiles.
TEST(AgGemmSchedule, BlocksDealOutTheTiles) {
  for_every_rank([](const AgGemmPlan& plan, const AgGemmSchedule& schedule) {
    if (plan.max.m > 129) return;
    const AgGemmBands bands = in_world(kBands[plan.max.m % std::size(kBands)], schedule.world());
    const auto tiles = all_tiles(schedule, bands);
    for (std::uint32_t blocks : {2u, 3u, 40u}) {
      std::size_t seen = 0;
      for (std::uint32_t block = 0; block < blocks; ++block) {
        std::size_t at = block;
        for (AgGemmWalk walk(schedule, bands, block); !walk.done(); walk.advance(blocks)) {
          ASSERT_LT(at, tiles.size());
          ASSERT_EQ(walk.tile().rect.row, tiles[at].rect.row);
          ASSERT_EQ(walk.tile().rect.column, tiles[at].rect.column);
          at += blocks;
          ++seen;
        }
      }
      ASSERT_EQ(seen, tiles.size());
    }
  });
}

TEST(AgGemmSchedule, TheNetworksBytesAreTheFormula) {
  for_every_rank([](const AgGemmPlan& plan, const AgGemmSchedule& schedule) {
    const World& world = schedule.world();
    std::uint64_t expected = 0;
    for (std::uint32_t node = 0; node < plan.nodes; ++node) {
      if (node == (world.node + 1) % plan.nodes) continue;
      expected += 64 + std::uint64_t{schedule.shard(world.rail_peer(node)).count} * plan.max.k * 2;
    }
    ASSERT_EQ(schedule.network_bytes(), plan.nodes == 1 ? 0 : expected);
  });
}

TEST(AgGemmPlan, RanksMayDifferInNAndTilesOnly) {
  const Shape shape{512, 512, 64};
  const auto print = [](const Shape& max, DType dtype, const Tiling& tiling) {
    const auto plan = AgGemmPlan::make(2, 4, max, dtype, tiling);
    EXPECT_TRUE(plan) << plan.error().message;
    return plan ? plan->fingerprint() : 0;
  };
  const std::uint64_t same = print(shape, DType::kBf16, {});
  EXPECT_EQ(print({512, 24, 64}, DType::kBf16, {}), same);
  EXPECT_EQ(print(shape, DType::kBf16, {48, 64, 0, 0}), same);
  std::set<std::uint64_t> seen = {same};
  EXPECT_TRUE(seen.insert(print({513, 512, 64}, DType::kBf16, {})).second);
  EXPECT_TRUE(seen.insert(print({512, 512, 65}, DType::kBf16, {})).second);
  EXPECT_TRUE(seen.insert(print(shape, DType::kF16, {})).second);
  EXPECT_TRUE(seen.insert(print(shape, DType::kBf16, {0, 0, 64, 0})).second);
  EXPECT_TRUE(seen.insert(print(shape, DType::kBf16, {0, 0, 0, 1})).second);
}

TEST(AgGemmPlan, ChunksAre128Rows) {
  const auto plan = AgGemmPlan::make(2, 2, {8192, 4096, 2048}, DType::kBf16, {});
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->gather.chunk_bytes, 128u * 2048 * 2);
  EXPECT_EQ(plan->gather.chunks_max, 1u + 2048 / 128);
  EXPECT_EQ(plan->tile_m, 128u);
  EXPECT_EQ(plan->tile_n, 256u);
}

TEST(AgGemmPlan, RefusesWhatItCannotDoAndSaysWhatIsAllowed) {
  const auto refused = [](const Result<AgGemmPlan>& plan, std::string_view part) {
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(plan.error().message.find(part), std::string::npos) << plan.error().message;
  };
  const Shape shape{64, 64, 64};
  refused(AgGemmPlan::make(0, 1, shape, DType::kBf16, {}), "0 nodes x 1 local ranks");
  refused(AgGemmPlan::make(1, 17, shape, DType::kBf16, {}), "1 to 16 local ranks");
  refused(AgGemmPlan::make(1, 1, {0, 64, 64}, DType::kBf16, {}), "m = 0");
  refused(AgGemmPlan::make(1, 1, {64, 0, 64}, DType::kBf16, {}), "n = 0");
  refused(AgGemmPlan::make(1, 1, {64, 64, 1u << 25}, DType::kBf16, {}), "k = 33554432");
  refused(AgGemmPlan::make(1, 1, shape, static_cast<DType>(9), {}), "neither bf16 nor f16");
  refused(AgGemmPlan::make(1, 1, shape, DType::kBf16, {0, 12, 0, 0}), "multiple of 8");
  refused(AgGemmPlan::make(1, 1, shape, DType::kBf16, {0, 0, 0, 3}), "3 banks");
}

}  // namespace
}  // namespace mk::kernels
