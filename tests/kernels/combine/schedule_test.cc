// The index arithmetic of GEMM+Combine, for every world of 1-4 nodes x 1-8 local ranks and a set
// of shapes: tiles, their order, chunks, places and checks are what the headers say.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "kernels/comm/row_bands.h"
#include "kernels/comm/workspace_head.h"
#include "kernels/ops/combine/row_index.h"
#include "kernels/ops/combine/schedule.h"
#include "kernels/ops/combine/spec.h"
#include "tests/kernels/combine/handles.h"
#include "tests/kernels/support/claims.h"

namespace mk::kernels::testing {
namespace {

struct Case {
  CombineShape shape;
  Tiling tiling;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {{1, 8, 8, 1, 1, CombinePartials::kElement}, {}},
      {{9, 40, 24, 3, 2, CombinePartials::kF32}, {8, 16, 64, 0}},
      {{40, 136, 16, 20, 4, CombinePartials::kElement}, {16, 0, 1000, 1}},
      {{100, 8, 8, 5, 5, CombinePartials::kF32}, {}},
      {{150, 16, 8, 64, 3, CombinePartials::kElement}, {8, 8, 1, 2}},  // a chunk for each token
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
        const auto plan = CombinePlan::make(nodes, locals, one.shape, DType::kBf16, one.tiling);
        ASSERT_TRUE(plan) << plan.error().message;
        SCOPED_TRACE(fmt::format("{} x {} ranks, T {}, H {}, E {}, k {}", nodes, locals,
                                 one.shape.tokens_max, one.shape.hidden, one.shape.experts,
                                 one.shape.top_k));
        check(*plan);
        if (::testing::Test::HasFailure()) return;
        ++checked;
      }
    }
  }
  EXPECT_EQ(checked, 32 * cases().size());
}

TEST(CombineSchedule, EveryRowIsInOneTileAndTheMostUrgentTilesComeFirst) {
  std::mt19937_64 random(1);
  std::uint32_t turn = 0;
  for_every_plan([&](const CombinePlan& plan) {
    const std::uint32_t ranks = plan.nodes * plan.locals;
    const CombineShape& shape = plan.shape;
    const Skew skew = kSkews[turn++ % std::size(kSkews)];
    const auto routing = draw_routing(ranks, shape.experts, shape.top_k, shape.tokens_max, skew,
                                      turn % 2 == 0, random);
    const auto rank = static_cast<std::uint32_t>(random() % ranks);
    const Handle handle = draw_handle(routing, shape.experts, shape.top_k, rank, random);
    const World world{plan.nodes, plan.locals, rank / plan.locals, rank % plan.locals};
    const RowIndex index(plan, world, handle.rows.data(), handle.offsets.data(),
                         static_cast<std::uint32_t>(handle.rows.size()));
    ASSERT_EQ(index.first_impossible_row(static_cast<std::uint32_t>(handle.rows.size())),
              handle.rows.size());
    std::vector<CombineTile> tiles;
    std::vector<int> covered(handle.rows.size(), 0);
    const std::uint32_t count =
        index.for_tiles_of(0, 1, [&](std::uint32_t number, CombineTile tile) {
          ASSERT_EQ(number, tiles.size());
          ASSERT_GE(tile.rows, 1u);
          ASSERT_LE(tile.rows, plan.tile_m);
          ASSERT_GE(tile.row, handle.offsets[tile.expert]);
          ASSERT_LE(tile.row + tile.rows, handle.offsets[tile.expert + 1]);
          tile.urgency = ~0u;
          for (std::uint32_t row = tile.row; row < tile.row + tile.rows; ++row) {
            ++covered[row];
            tile.urgency = std::min(tile.urgency, index.urgency_of(handle.rows[row]));
          }
          tiles.push_back(tile);
        });
    ASSERT_EQ(count, tiles.size());
    ASSERT_LE(count, plan.tiles_max);
    // However many blocks share them, each tile is one block's.
    const auto blocks = 2 + static_cast<std::uint32_t>(random() % 9);
    std::vector<int> visits(count, 0);
    for (std::uint32_t block = 0; block < blocks; ++block) {
      const std::uint32_t all =
          index.for_tiles_of(block, blocks, [&](std::uint32_t number, const CombineTile& tile) {
            ASSERT_LT(number, count);
            ASSERT_EQ(number % blocks, block);
            ASSERT_EQ(tile.row, tiles[number].row);
            ASSERT_EQ(tile.rows, tiles[number].rows);
            ASSERT_EQ(tile.expert, tiles[number].expert);
            ++visits[number];
          });
      ASSERT_EQ(all, count);
    }
    for (int times : visits) ASSERT_EQ(times, 1);
    for (int times : covered) ASSERT_EQ(times, 1);
    std::vector<std::uint32_t> order(count);
    std::vector<std::uint32_t> counts(order_count_words(plan.nodes * plan.steps));
    index.arrange(tiles.data(), count, order.data(), counts.data());
    for (std::uint32_t i = 1; i < count; ++i) {
      const std::uint32_t before = tiles[order[i - 1]].urgency;
      const std::uint32_t now = tiles[order[i]].urgency;
      ASSERT_TRUE(before < now || (before == now && order[i - 1] < order[i])) << i;
    }
    // The next node's tokens first, this node's last.
    const auto urgency = [&](std::uint32_t node) {
      return index.urgency_of({node * plan.locals, 0, 0, 0}) / plan.steps;
    };
    for (std::uint32_t after = 1; after <= plan.nodes; ++after)
      ASSERT_EQ(urgency((world.node + after) % plan.nodes), after - 1);
  });
}

// A handle that does not make sense has no tiles, whichever expert is not in order.
TEST(CombineSchedule, ADisorderedHandleHasNoTiles) {
  for_every_plan([&](const CombinePlan& plan) {
    const World world{plan.nodes, plan.locals, 0, 0};
    const std::uint32_t experts = experts_of(plan.shape.experts, world).count;
    constexpr std::uint32_t kRoom = 64;
    const std::vector<MoeRow> rows(kRoom);
    for (std::uint32_t bad = 0; bad <= experts; ++bad) {
      std::vector<std::uint32_t> offsets(experts + 1);
      for (std::uint32_t e = 0; e <= experts; ++e) offsets[e] = e < kRoom ? e : kRoom - 1;
      const RowIndex sound(plan, world, rows.data(), offsets.data(), kRoom);
      const auto tiles = [](const RowIndex& index) {
        return index.for_tiles_of(0, 1, [](std::uint32_t, const CombineTile&) {});
      };
      if (plan.rows_max >= kRoom && experts > 0) {
        EXPECT_EQ(tiles(sound), std::min(experts, kRoom - 1));
      }
      offsets[bad] = bad == 0 ? 1 : kRoom + 1;
      if (bad == 0 && experts == 0) continue;
      EXPECT_EQ(tiles(RowIndex(plan, world, rows.data(), offsets.data(), kRoom)), 0u) << bad;
    }
  });
}

TEST(CombineSchedule, PartsAreAllTokensAndFitTheirRoom) {
  for (std::uint32_t most = 1; most <= 20000; most = most * 3 / 2 + 1) {
    for (std::uint32_t tokens = 0; tokens <= most; tokens += 1 + tokens / 7) {
      const std::uint32_t parts = CombineSchedule::parts_of(tokens);
      ASSERT_LE(parts, CombineSchedule::parts_max(most)) << tokens;
      std::uint32_t next = 0;
      for (std::uint32_t part = 0; part < parts; ++part) {
        const TileRange range = CombineSchedule::tokens_of(part, tokens);
        ASSERT_EQ(range.begin, next);
        ASSERT_GT(range.end, range.begin);
        ASSERT_LE(range.end - range.begin, CombineSchedule::kPartTokensMax);
        next = range.end;
      }
      ASSERT_EQ(next, tokens);
    }
  }
}

TEST(CombineSchedule, BandsAreEveryTileOnce) {
  for (std::uint32_t columns = 1; columns <= 9; ++columns) {
    for (std::uint32_t row_tiles = 0; row_tiles <= 70; ++row_tiles) {
      const Divisor band_tiles(columns * CombineSchedule::kBand);
      std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
      std::uint32_t last_band = 0;
      for (std::uint32_t step = 0; step < row_tiles * columns; ++step) {
        const auto tile = banded_tile<CombineSchedule::kBand>(step, row_tiles, band_tiles);
        ASSERT_LT(tile.turn, row_tiles);
        ASSERT_LT(tile.column, columns);
        ASSERT_GE(tile.turn / CombineSchedule::kBand, last_band);
        last_band = tile.turn / CombineSchedule::kBand;
        ASSERT_TRUE(seen.emplace(tile.turn, tile.column).second);
      }
    }
  }
}

TEST(CombineSchedule, TheRankOfAnExpertIsTheOneThatHasIt) {
  for (std::uint32_t ranks = 1; ranks <= 32; ++ranks) {
    for (std::uint32_t experts = 1; experts <= 70; ++experts) {
      for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        const ShardRange here = shard_of(experts, ranks, rank);
        for (std::uint32_t e = here.first; e < here.first + here.count; ++e)
          ASSERT_EQ(rank_of_expert(e, experts, ranks), rank) << e << " of " << experts;
      }
    }
  }
}

// A sum of hashes of rows tells any row that is missing, twice, or another one's.
TEST(CombineSchedule, ChecksTellRowsApart) {
  const CombinePlan plan =
      *CombinePlan::make(1, 1, {40, 8, 8, 6, 3, CombinePartials::kElement}, DType::kBf16, {});
  const RowIndex index(plan, {}, nullptr, nullptr, 0);
  std::set<std::uint64_t> hashes;
  for (std::uint32_t token = 0; token < 40; ++token) {
    for (std::uint32_t slot = 0; slot < 3; ++slot) {
      for (std::uint32_t expert = 0; expert < 6; ++expert)
        hashes.insert(index.hash_of(token, slot, expert));
    }
  }
  EXPECT_EQ(hashes.size(), 40u * 3 * 6);
  EXPECT_EQ(hashes.count(0), 0u);
  CombineNote note;
  index.add(note, {0, 7, 2, 0}, 4);
  index.add(note, {0, 5, 1, 0}, 4);
  EXPECT_EQ(note.check, index.hash_of(7, 2, 4) + index.hash_of(5, 1, 4));
  EXPECT_EQ(note.rows, 2u);
  EXPECT_EQ(note.end, 8u);
}

TEST(CombineSchedule, ChunksAreEverySumOnceBehindAHeader) {
  for_every_plan([](const CombinePlan& plan) {
    const CombineSchedule schedule(plan, {plan.nodes, plan.locals, 0, 0});
    for (std::uint32_t tokens = 0; tokens <= plan.shape.tokens_max; ++tokens) {
      const std::uint32_t chunks = schedule.chunks(tokens);
      ASSERT_LE(chunks, plan.chunks_max);
      std::uint64_t end = 0;
      std::uint32_t next = 0;
      for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
        const ByteRange range = schedule.chunk_range(tokens, chunk);
        ASSERT_EQ(range.begin, end);
        ASSERT_GT(range.bytes, 0u);
        end += range.bytes;
        if (chunk == 0) continue;
        const TileRange its = schedule.chunk_tokens(tokens, chunk);
        ASSERT_EQ(its.begin, next);
        for (; next < its.end; ++next) {
          ASSERT_EQ(schedule.chunk_of(next), chunk);
          ASSERT_GE(schedule.sum_in_bank(next), range.begin);
          ASSERT_LE(schedule.sum_in_bank(next) + schedule.row_bytes(), end);
        }
      }
      ASSERT_EQ(next, tokens);
      ASSERT_EQ(end, schedule.network_bytes(tokens));
      ASSERT_LE(end, plan.layout.bank_bytes);
    }
  });
}

TEST(CombineSchedule, PlacesInTheWorkspaceAreDisjointAndInside) {
  for_every_plan([](const CombinePlan& plan) {
    const CombineSchedule schedule(plan, {plan.nodes, plan.locals, 0, 0});
    const CombineShape& shape = plan.shape;
    const std::uint64_t tokens = shape.tokens_max;
    const std::uint32_t ranks = plan.nodes * plan.locals;
    Claims claims;
    claims.claim(0, WorkspaceHead{plan.locals}.bytes(), "head");
    claims.claim(plan.layout.words, sizeof(CombineWords), "words");
    claims.claim(plan.layout.tiles, plan.tiles_max * sizeof(CombineTile), "tiles");
    claims.claim(plan.layout.order, plan.tiles_max * 4u, "order");
    claims.claim(plan.layout.order_counts, order_count_words(plan.nodes * plan.steps) * 4,
                 "order counts");
    claims.claim(schedule.tile_parts(0), plan.tiles_max * 4u, "parts of tiles");
    for (std::uint32_t block = 0; block < kBlocksMax; ++block) {
      claims.claim(schedule.block_note(block, 0), ranks * sizeof(CombineNote), "block note");
      claims.claim(schedule.expected(block), ranks * 8u, "expected of a block");
    }
    claims.claim(schedule.expected(kBlocksMax), ranks * 8u, "expected");
    for (std::uint32_t node = 0; node < plan.nodes; ++node) {
      claims.claim(schedule.peer(node), sizeof(CombinePeer), "peer");
      claims.claim(schedule.counts(node, 0),
                   CombineSchedule::parts_max(shape.tokens_max) * sizeof(CombineCounts), "counts");
      claims.claim(schedule.list(node), tokens * 4, "list");
      claims.claim(schedule.place(node), tokens * 4, "places");
      if (plan.nodes > 1)
        claims.claim(schedule.chunk_reduced(node, 0), plan.chunks_max * 4u, "chunks");
      for (std::uint32_t local = 0; local < plan.locals; ++local)
        claims.claim(schedule.note(local, node), sizeof(CombineNote), "note");
      for (std::uint32_t token = 0; token < tokens; ++token) {
        claims.claim(schedule.entry(node, token, 0), shape.top_k * sizeof(CombineEntry), "entry");
        for (std::uint32_t slot = 0; slot < shape.top_k; ++slot)
          claims.claim(schedule.slot(node, token, slot), schedule.row_bytes(), "slot");
      }
    }
    for (std::uint32_t local = 0; local < plan.locals; ++local) {
      claims.claim(schedule.indexed(local), 64, "indexed");
      claims.claim(schedule.tile_ready(schedule.tile_flag(local, 0)), plan.tiles_max * 4u, "ready");
    }
    for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
      for (std::uint32_t other = 1; other < plan.nodes; ++other) {
        claims.claim(schedule.staging_bank(bank, 0, other), plan.layout.bank_bytes, "staging");
        claims.claim(schedule.receive_bank(bank, 0, other), plan.layout.bank_bytes, "receive");
      }
    }
    ASSERT_LE(claims.end(), plan.workspace_bytes());
    ASSERT_LT(plan.workspace_bytes(), claims.end() + 2 * kPage);
    ASSERT_EQ(plan.flag_count() == 0, plan.nodes == 1);
  });
}

// What must be equal on all ranks changes the fingerprint, the one way or the other.
TEST(CombineSchedule, PlansThatDifferHaveDifferentFingerprints) {
  const CombineShape shape{20, 24, 40, 6, 2, CombinePartials::kElement};
  std::set<std::uint64_t> prints;
  const auto add = [&](const CombineShape& of, const Tiling& tiling, DType dtype) {
    prints.insert(CombinePlan::make(2, 2, of, dtype, tiling)->fingerprint());
  };
  add(shape, {}, DType::kBf16);
  add(shape, {}, DType::kF16);
  add({20, 24, 40, 6, 2, CombinePartials::kF32}, {}, DType::kBf16);
  add({20, 24, 48, 6, 2, CombinePartials::kElement}, {}, DType::kBf16);
  add({21, 24, 40, 6, 2, CombinePartials::kElement}, {}, DType::kBf16);
  add({20, 24, 40, 7, 2, CombinePartials::kElement}, {}, DType::kBf16);
  add({20, 24, 40, 6, 3, CombinePartials::kElement}, {}, DType::kBf16);
  add(shape, {8, 0, 0, 0}, DType::kBf16);
  add(shape, {0, 8, 0, 0}, DType::kBf16);
  add(shape, {0, 0, 96, 0}, DType::kBf16);
  add(shape, {0, 0, 0, 1}, DType::kBf16);
  EXPECT_EQ(prints.size(), 11u);
}

}  // namespace
}  // namespace mk::kernels::testing
