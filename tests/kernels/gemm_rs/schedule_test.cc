// The schedule of GEMM+ReduceScatter, exhaustively for every world of 1-4 nodes x 1-8 local ranks
// and a set of shapes: shards, tiles, their order, pieces, places and flags are what schedule.h
// says.
#include "kernels/ops/gemm_rs/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/comm/workspace_head.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "tests/kernels/support/claims.h"
#include "tests/kernels/support/every_launch.h"

namespace mk::kernels::testing {
namespace {

/// Calls `check(plan, schedule)` for every world, case and m.
template <class Check>
void for_every_launch(Check&& check) {
  static const LaunchCases cases = {
      .plans =
          {{{1, 1, 0}, {}},                   // one rank has a row
           {{7, 24, 0}, {}},                  // most worlds have ranks without rows
           {{64, 64, 0}, {16, 16, 1024, 0}},  // the same for all ranks in worlds of 2, 4, 8, ...
           {{65, 72, 0}, {16, 16, 1024, 0}},
           {{129, 40, 0}, {3, 8, 1, 0}},  // large shards with a row of tiles more; a chunk per tile
           {{133, 101, 0}, {8, 32, 3000, 1}},  // n no multiple of 8, chunks of odd size, one bank
           {{300, 520, 0}, {}},
           {{280, 8, 0}, {1, 8, 1, 0}}},  // more chunks than a granule has flags
      .rows = {1, 2, 7, 17, 31, 32},
      .launches = 58};
  testing::for_every_launch<GemmRsPlan>(cases, [&](const GemmRsPlan& plan, std::uint32_t m) {
    check(plan, GemmRsSchedule(plan, m));
  });
}

/// Calls `look(world)` for every rank.
template <class Look>
void for_every_rank(const GemmRsPlan& plan, Look&& look) {
  for (std::uint32_t node = 0; node < plan.nodes; ++node) {
    for (std::uint32_t local = 0; local < plan.locals; ++local)
      look(World{plan.nodes, plan.locals, node, local});
  }
}

TEST(GemmRsSchedule, ShardsAreTheRowsInRankOrder) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    std::uint32_t next = 0;
    for_every_rank(plan, [&](const World& world) {
      const ShardRange rows = schedule.rows(world.rank());
      ASSERT_EQ(rows, shard_of(schedule.m(), world.size(), world.rank()));
      ASSERT_EQ(rows.first, next);
      ASSERT_EQ(schedule.grid(world.rank()).rows(), rows.count);
      next += rows.count;
    });
    ASSERT_EQ(next, schedule.m());
  });
}

// Every rank computes every tile of every shard once. The tiles cover C once: so every element is
// computed once by each rank, and no tile straddles shards.
TEST(GemmRsSchedule, EveryRankComputesEveryTileOnceAndTheTilesCoverC) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    std::vector<int> covered(std::size_t{schedule.m()} * plan.max.n, 0);
    std::uint32_t tiles = 0;
    for_every_rank(plan, [&](const World& world) {
      const TileGrid& grid = schedule.grid(world.rank());
      const ShardRange rows = schedule.rows(world.rank());
      tiles += grid.tiles();
      ASSERT_LE(grid.tiles(), plan.tiles_max);
      ASSERT_LE(plan.tile_bytes(grid) * grid.tiles(), plan.layout.region_bytes);
      for (std::uint32_t tile = 0; tile < grid.tiles(); ++tile) {
        const TileRect rect = grid.rect(tile);
        ASSERT_LE(rect.row + rect.rows, rows.count);
        for (std::uint32_t i = 0; i < rect.rows; ++i) {
          for (std::uint32_t j = 0; j < rect.columns; ++j) {
            ++covered[std::size_t{rows.first + rect.row + i} * plan.max.n + rect.column + j];
          }
        }
      }
    });
    ASSERT_TRUE(std::all_of(covered.begin(), covered.end(), [](int count) { return count == 1; }));
    ASSERT_EQ(schedule.tiles(), tiles);
    for_every_rank(plan, [&](const World& world) {
      std::set<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> seen;
      for (std::uint32_t step = 0; step < tiles; ++step) {
        const auto tile = schedule.tile_at(world.node, world.local, step);
        ASSERT_LT(tile.tile, schedule.grid(tile.node * plan.locals + tile.local).tiles());
        ASSERT_TRUE(seen.insert({tile.node, tile.local, tile.tile}).second);
      }
    });
  });
}

// The stated order, spelled out the long way.
TEST(GemmRsSchedule, TilesComeInTheStatedOrder) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    for_every_rank(plan, [&](const World& world) {
      std::uint32_t step = 0;
      for (std::uint32_t i = 1; i <= plan.nodes; ++i) {
        const std::uint32_t node = (world.node + i) % plan.nodes;
        for (std::uint32_t tile = 0; tile < plan.tiles_max; ++tile) {
          std::vector<std::uint32_t> group;  // the local ranks whose shards have such a tile
          for (std::uint32_t local = 0; local < plan.locals; ++local) {
            if (tile < schedule.grid(node * plan.locals + local).tiles()) group.push_back(local);
          }
          if (group.empty()) break;
          std::rotate(group.begin(), group.begin() + world.local % group.size(), group.end());
          for (std::uint32_t local : group) {
            const auto at = schedule.tile_at(world.node, world.local, step++);
            ASSERT_EQ(std::tie(at.node, at.local, at.tile), std::tie(node, local, tile));
          }
        }
      }
      ASSERT_EQ(step, schedule.tiles());
    });
  });
}

// What comm/deferred.h relies on: pairs, as long as both shards have tiles, then the larger
// shard's.
TEST(GemmRsSchedule, TwoRanksComputeATileInTheSamePairOfSteps) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    if (plan.nodes != 1 || plan.locals != 2) return;
    const std::uint32_t pairs = std::min(schedule.grid(0).tiles(), schedule.grid(1).tiles());
    for (std::uint32_t step = 0; step < schedule.tiles(); ++step) {
      for (std::uint32_t local = 0; local < 2; ++local) {
        const auto tile = schedule.tile_at(0, local, step).tile;
        ASSERT_EQ(tile, step < 2 * pairs ? step / 2 : step - pairs);
      }
    }
  });
}

// While all shards have tiles left, the local ranks of a node are with different owners.
TEST(GemmRsSchedule, NoOwnerReceivesFromEverybodyAtOnce) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    if (plan.nodes != 1) return;  // groups as such are checked above
    const std::uint32_t full = schedule.small_grid().tiles() * plan.locals;
    for (std::uint32_t step = 0; step < full; ++step) {
      std::set<std::uint32_t> owners;
      for (std::uint32_t local = 0; local < plan.locals; ++local)
        owners.insert(schedule.tile_at(0, local, step).local);
      ASSERT_EQ(owners.size(), plan.locals) << "step " << step;
    }
  });
}

// An owner's pieces: the chunks of its shards in the order of the nodes, its own last; each shard's
// chunks hold its tiles once.
TEST(GemmRsSchedule, PiecesAreTheChunksInTheOrderOfTheNodes) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    for_every_rank(plan, [&](const World& world) {
      std::uint32_t index = 0;
      for (std::uint32_t i = 1; i <= plan.nodes; ++i) {
        const std::uint32_t node = (world.node + i) % plan.nodes;
        const PackedTiles packed = schedule.packed(world.rail_peer(node));
        ASSERT_EQ(packed.tiles(), schedule.grid(world.rail_peer(node)).tiles());
        ASSERT_LE(packed.chunks(), plan.chunks_max);
        std::uint32_t next = 0;
        for (std::uint32_t chunk = 0; chunk < packed.chunks(); ++chunk) {
          const auto piece = schedule.piece_at(world.node, world.local, index++);
          ASSERT_EQ(piece.node, node);
          ASSERT_EQ(piece.chunk, chunk);
          const TileRange range = packed.chunk_tiles(chunk);
          ASSERT_EQ(range.begin, next);
          ASSERT_TRUE(range.end > range.begin || packed.tiles() == 0);
          next = range.end;
          for (std::uint32_t tile = range.begin; tile < range.end; ++tile)
            ASSERT_EQ(packed.chunk_of(tile), chunk);
        }
        ASSERT_EQ(next, packed.tiles());
        if (i + 1 == plan.nodes || plan.nodes == 1) {
          ASSERT_EQ(schedule.pieces_sent(world.node, world.local), plan.nodes == 1 ? 0 : index);
        }
      }
      ASSERT_EQ(schedule.pieces(world.node, world.local), index);
    });
  });
}

// Counted at the receivers: every byte of every bank comes once from each other node, and nothing
// else is sent. The sum is the formula of schedule.h, counted here from the shapes alone.
TEST(GemmRsSchedule, EveryByteCrossesOnceAndTheBytesAreTheFormula) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> arrived;  // at rank, from node
    std::uint64_t all = 0;
    std::uint64_t elements = 0;
    for_every_rank(plan, [&](const World& world) {
      std::uint64_t sent = 0;
      for (std::uint32_t i = 0; i < schedule.pieces_sent(world.node, world.local); ++i) {
        const auto piece = schedule.piece_at(world.node, world.local, i);
        const std::uint32_t to = world.rail_peer(piece.node);
        const ByteRange range = schedule.packed(to).chunk_range(piece.chunk);
        ASSERT_GT(range.bytes, 0u);
        ASSERT_LE(range.bytes,
                  std::max<std::uint64_t>(plan.chunk_bytes, plan.tile_bytes(schedule.grid(to))) +
                      kBankHeaderBytes);
        auto& there = arrived[{to, world.node}];
        ASSERT_EQ(range.begin, there) << "a gap, or sent twice";
        there += range.bytes;
        sent += range.bytes;
      }
      std::uint64_t formula = 0;
      for (std::uint32_t node = 0; node < plan.nodes; ++node) {
        if (node == world.node) continue;
        const std::uint64_t rows =
            shard_of(schedule.m(), world.size(), world.rail_peer(node)).count;
        const std::uint64_t tiles_m = (rows + plan.tile_m - 1) / plan.tile_m;
        const std::uint64_t tiles_n = (plan.max.n + plan.tile_n - 1) / plan.tile_n;
        const std::uint64_t tile_rows = rows == 0 ? 0 : (rows + tiles_m - 1) / tiles_m;
        const std::uint64_t tile_cols = ((plan.max.n + tiles_n - 1) / tiles_n + 7) / 8 * 8;
        formula += 64 + tiles_m * tiles_n * tile_rows * tile_cols * 2;
        elements += rows * plan.max.n;
      }
      ASSERT_EQ(sent, formula);
      ASSERT_EQ(schedule.network_bytes(world.node, world.local), formula);
      all += sent;
    });
    for_every_rank(plan, [&](const World& world) {
      for (std::uint32_t from = 0; from < plan.nodes; ++from) {
        if (from == world.node) continue;
        ASSERT_EQ((arrived[{world.rank(), from}]), schedule.packed(world.rank()).bank_bytes());
        ASSERT_LE(schedule.packed(world.rank()).bank_bytes(), plan.layout.bank_bytes);
      }
    });
    // Of each rank's rows, one sum from each other node: (N - 1) m n elements over all ranks, and
    // hardly any padding.
    ASSERT_EQ(elements, std::uint64_t{plan.nodes - 1} * schedule.m() * plan.max.n);
    ASSERT_GE(all, elements * kElementBytes);
  });
}

TEST(GemmRsSchedule, WithoutPaddingTheBytesAreThoseOfTheTable) {
  const auto plan = GemmRsPlan::make(4, 2, {1024, 512, 0}, DType::kBf16, {});
  ASSERT_TRUE(plan);
  // (N - 1) M / (N L) rows of partial sums per rank.
  for (std::uint32_t local = 0; local < 2; ++local)
    EXPECT_EQ(GemmRsSchedule(*plan, 1024).network_bytes(1, local), 3 * (64 + 1024 / 8 * 512 * 2));
}

TEST(GemmRsSchedule, PlacesInTheWorkspaceAreDisjointAndInside) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    Claims claims;
    const WorkspaceHead head{plan.locals};
    claims.claim(WorkspaceHead::failed(), 4, "failed");
    std::uint64_t region = 0;  // of the largest shard in this launch
    for_every_rank(plan, [&](const World& world) {
      const PackedTiles packed = schedule.packed(world.rank());
      region = std::max(region, packed.offset(packed.tiles()));
    });
    for (std::uint32_t local = 0; local < plan.locals; ++local) {
      for (std::uint32_t epoch = 4; epoch < 6; ++epoch)
        claims.claim(head.record(epoch, local), sizeof(LaunchRecord), "record");
      claims.claim(head.finished(local), 4, "finished");
      for (std::uint32_t node = 0; node < plan.nodes; ++node) {
        claims.claim(schedule.tile_ready(local, node, 0), std::uint64_t{plan.tiles_max} * 4,
                     "tile_ready");
        if (plan.locals > 1) claims.claim(schedule.slots(local, node), region, "slots");
      }
    }
    if (plan.nodes > 1) {
      claims.claim(schedule.kept(), region, "kept");
      for (std::uint32_t node = 0; node < plan.nodes; ++node) {
        claims.claim(schedule.chunk_reduced(node, 0), std::uint64_t{plan.chunks_max} * 4,
                     "chunk_reduced");
        for (std::uint32_t bank = 0; bank < plan.banks && node != 0; ++bank) {
          claims.claim(schedule.staging_bank(bank, 0, node), kBankHeaderBytes + region, "staging");
          claims.claim(schedule.receive_bank(bank, 0, node), kBankHeaderBytes + region, "receive");
        }
      }
    }
    EXPECT_LE(claims.end(), plan.workspace_bytes());
    EXPECT_EQ(plan.workspace_bytes() % 4096, 0u);
  });
}

TEST(GemmRsSchedule, ArrivalFlagsAreDisjointAndInside) {
  for_every_launch([](const GemmRsPlan& plan, const GemmRsSchedule& schedule) {
    if (plan.nodes == 1) {
      EXPECT_EQ(plan.flag_count(), 0u);
      return;
    }
    const FlagMap flags = schedule.flags();
    for (std::uint32_t at = 0; at < plan.nodes; ++at) {
      std::set<std::uint32_t> seen;
      for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
        for (std::uint32_t from = 0; from < plan.nodes; ++from) {
          if (from == at) continue;
          for (std::uint32_t chunk = 0; chunk < plan.chunks_max; ++chunk)
            ASSERT_TRUE(seen.insert(flags.arrival(bank, at, from, chunk)).second);
          if (bank == 0 && flags.has_releases()) {
            ASSERT_TRUE(seen.insert(flags.release(at, from)).second);
          }
        }
      }
      ASSERT_LT(*seen.rbegin(), plan.flag_count());
    }
  });
}

}  // namespace
}  // namespace mk::kernels::testing
