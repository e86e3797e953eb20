// The two-shot form of GEMM+AllReduce as index arithmetic, exhaustively for small worlds: how tiles
// are dealt to nodes, and in which order things are computed, sent and handed out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "kernels/ops/gemm_ar/node_pieces.h"
#include "kernels/ops/gemm_ar/schedule.h"
#include "tests/kernels/support/claims.h"
#include "tests/kernels/support/two_shot_plan.h"

namespace mk::kernels {
namespace {

using testing::TwoShotPlan;

/// Calls `check(pieces, tiles, nodes, per_chunk)` for every small number of each.
template <class Check>
void for_all_pieces(Check&& check) {
  for (std::uint32_t nodes = 3; nodes <= 7; ++nodes) {
    for (std::uint32_t per_chunk = 1; per_chunk <= 4; ++per_chunk) {
      for (std::uint32_t tiles = 0; tiles <= 3 * nodes * per_chunk; ++tiles) {
        SCOPED_TRACE(std::to_string(tiles) + " tiles, " + std::to_string(nodes) + " nodes, " +
                     std::to_string(per_chunk) + " to a chunk");
        check(NodePieces(tiles, nodes, Divisor(per_chunk), Divisor(nodes * per_chunk)), tiles,
              nodes, per_chunk);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(NodePieces, EachTileHasOneChunkAndOnePlaceInItsNodesPiece) {
  for_all_pieces([](const NodePieces& pieces, std::uint32_t tiles, std::uint32_t nodes,
                    std::uint32_t per_chunk) {
    ASSERT_EQ(pieces.rounds(), std::max(1u, div_up(tiles, nodes * per_chunk)));
    std::uint32_t next = 0;
    std::vector<std::set<std::uint32_t>> places(nodes);
    for (std::uint32_t chunk = 0; chunk < pieces.rounds() * nodes; ++chunk) {
      const std::uint32_t round = chunk / nodes;
      const TileRange range = pieces.chunk_tiles(chunk);
      ASSERT_EQ(range.begin, next);
      ASSERT_LE(range.end - range.begin, per_chunk);
      next = range.end;
      for (std::uint32_t tile = range.begin; tile < range.end; ++tile) {
        const NodePieces::Place place = pieces.place_of(tile);
        ASSERT_EQ(pieces.chunk_of(tile), chunk);
        ASSERT_EQ(place.node, chunk % nodes);
        ASSERT_EQ(place.tile, round * per_chunk + tile - range.begin);
        ASSERT_TRUE(places[place.node].insert(place.tile).second);
      }
    }
    ASSERT_EQ(next, tiles);
    for (std::uint32_t node = 0; node < nodes; ++node) {
      ASSERT_EQ(places[node].size(), pieces.piece_tiles(node));
      // Packed without a gap, and no node has more than its share, rounded up.
      if (!places[node].empty()) {
        ASSERT_EQ(*places[node].rbegin() + 1, places[node].size());
      }
      ASSERT_LE(pieces.piece_tiles(node), div_up(tiles, nodes));
    }
  });
}

TEST(NodePieces, EachNodesOrderHasEveryTileOnceAndItsOwnChunkLast) {
  for_all_pieces([](const NodePieces& pieces, std::uint32_t tiles, std::uint32_t nodes,
                    std::uint32_t per_chunk) {
    for (std::uint32_t node = 0; node < nodes; ++node) {
      std::vector<bool> seen(tiles, false);
      std::vector<std::uint32_t> chunks;  // as their tiles come
      for (std::uint32_t position = 0; position < tiles; ++position) {
        const std::uint32_t tile = pieces.tile_at(node, position);
        ASSERT_LT(tile, tiles);
        ASSERT_FALSE(seen[tile]);
        seen[tile] = true;
        ASSERT_EQ(pieces.position_of(node, tile), position);
        ASSERT_EQ(tile / (nodes * per_chunk), position / (nodes * per_chunk)) << "its round";
        const std::uint32_t chunk = pieces.chunk_of(tile);
        if (chunks.empty() || chunks.back() != chunk) chunks.push_back(chunk);
      }
      std::vector<std::uint32_t> expected;
      for (std::uint32_t round = 0; round < pieces.rounds(); ++round) {
        std::uint32_t last = nodes;
        for (std::uint32_t position = 0; position < nodes; ++position) {
          const std::uint32_t of = pieces.node_at(node, round, position);
          const TileRange range = pieces.chunk_tiles(round, of);
          if (range.begin == range.end) continue;
          expected.push_back(round * nodes + of);
          last = of;
        }
        const TileRange own = pieces.chunk_tiles(round, node);
        if (own.begin != own.end) {
          ASSERT_EQ(last, node);
        }
      }
      ASSERT_EQ(chunks, expected);
    }
  });
}

/// Calls `check(plan, schedule)` for worlds of 3 to 6 nodes and several shapes.
template <class Check>
void for_every_launch(Check&& check) {
  struct Case {
    Shape max;
    Tiling tiling;
  };
  const Case cases[] = {{{1, 1, 0}, {}},
                        {{64, 64, 0}, {16, 16, 1024, 0}},
                        {{65, 72, 0}, {16, 16, 1024, 1}},
                        {{33, 101, 0}, {8, 32, 3000, 1}},
                        {{300, 520, 0}, {}},
                        {{300, 8, 0}, {1, 8, 1, 0}}};
  for (std::uint32_t nodes = 3; nodes <= 6; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals) {
      for (const Case& one : cases) {
        for (const Partials partials : {Partials::kElement, Partials::kF32}) {
          const auto plan =
              TwoShotPlan::make(nodes, locals, one.max, DType::kBf16, one.tiling, {{}, partials});
          ASSERT_TRUE(plan) << plan.error().message;
          for (const std::uint32_t m : {1u, 2u, 7u, 17u, one.max.m / 2, one.max.m}) {
            if (m == 0 || m > one.max.m) continue;
            SCOPED_TRACE(std::to_string(nodes) + " x " + std::to_string(locals) +
                         ", m = " + std::to_string(m) + " of " + std::to_string(one.max.m));
            check(*plan, GemmArSchedule(*plan, m));
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(TwoShotSchedule, EveryRankComputesEveryTileOnceByItsNodesOrderOfChunks) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    for (std::uint32_t node = 0; node < plan.nodes; ++node) {
      for (std::uint32_t local = 0; local < plan.locals; ++local) {
        std::vector<bool> seen(schedule.tiles(), false);
        for (std::uint32_t step = 0; step < schedule.tiles(); ++step) {
          const std::uint32_t tile = schedule.tile_at(node, local, step);
          ASSERT_LT(tile, schedule.tiles());
          ASSERT_FALSE(seen[tile]);
          seen[tile] = true;
          // All local ranks are at the same group of tiles, one of each owner.
          ASSERT_EQ(schedule.owned_index(tile),
                    schedule.owned_index(schedule.tile_at(node, 0, step)));
        }
      }
      std::set<std::uint32_t> chunks;
      for (std::uint32_t position = 0; position < schedule.chunks(0); ++position)
        chunks.insert(schedule.chunk_at(node, 0, position));
      ASSERT_EQ(chunks.size(), schedule.chunks(0));
      ASSERT_EQ(*chunks.rbegin() + 1, schedule.chunks(0));
    }
  });
}

// Nodes do not wait in a circle, since in all nodes' orders the sums of a round stand before its
// chunks that are handed out, and both in the order of the rounds.
TEST(TwoShotSchedule, ReceiveStepsHaveEachChunkOnceAndGoByRounds) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    for (std::uint32_t owner = 0; owner < plan.locals; ++owner) {
      for (std::uint32_t node = 0; node < plan.nodes; ++node) {
        std::set<std::uint32_t> sums, handed_out;
        for (std::uint32_t position = 0; position < schedule.receive_steps(owner); ++position) {
          const auto step = schedule.receive_step(owner, node, position);
          ASSERT_LT(step.chunk, schedule.chunks(owner));
          const std::uint32_t round = step.chunk / plan.nodes;
          if (step.sums) {
            ASSERT_EQ(step.chunk % plan.nodes, node);
            ASSERT_EQ(round, sums.size());
            ASSERT_TRUE(sums.insert(step.chunk).second);
          } else {
            ASSERT_GT(sums.size(), round) << "its own sums come first";
            ASSERT_EQ(round, handed_out.size() / plan.nodes);
            ASSERT_TRUE(handed_out.insert(step.chunk).second);
          }
        }
        ASSERT_EQ(sums.size() * plan.nodes, schedule.chunks(owner));
        ASSERT_EQ(handed_out.size(), schedule.chunks(owner));
      }
    }
  });
}

TEST(TwoShotSchedule, PlacesInTheWorkspaceAreDisjointAndInside) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    testing::Claims claims;
    for (std::uint32_t local = 0; local < plan.locals; ++local) {
      for (std::uint32_t owned = 0; owned < schedule.owned(0); ++owned) {
        claims.claim(schedule.tile_ready(local, owned), 4, "tile_ready");
        if (plan.locals > 1)
          claims.claim(schedule.slot(local, owned), schedule.slot_bytes(), "slot");
      }
      for (std::uint32_t chunk = 0; chunk < schedule.chunks(local); ++chunk)
        claims.claim(schedule.out_ready(local, chunk), 4, "out_ready");
    }
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(0); ++chunk)
      claims.claim(schedule.chunk_reduced(chunk), 4, "chunk_reduced");
    for (std::uint32_t round = 0; round < schedule.pieces(0).rounds(); ++round)
      claims.claim(schedule.chunk_finished(round), 4, "chunk_finished");
    for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
      for (std::uint32_t node = 0; node < plan.nodes; ++node) {
        const std::uint64_t finished =
            schedule.pieces(0).piece_tiles(node) * schedule.finished_bytes();
        claims.claim(schedule.staging_bank(bank, node), schedule.piece(0, node).bank_bytes(),
                     "staging");
        claims.claim(schedule.finished_bank(bank, node), finished, "finished");
        if (node != 1)
          claims.claim(schedule.receive_bank(bank, 1, node), schedule.piece(0, 1).bank_bytes(),
                       "receive");
      }
    }
    claims.claim(plan.layout.out, std::uint64_t{plan.max.m} * plan.max.n * kElementBytes, "out");
    EXPECT_LE(claims.end(), plan.workspace_bytes());
  });
}

TEST(TwoShotSchedule, BytesAndCommandsAreTheFormula) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    const std::uint64_t others = plan.nodes - 1;
    for (std::uint32_t owner = 0; owner < plan.locals; ++owner) {
      std::uint64_t bytes = 0;
      for (std::uint32_t node = 0; node < plan.nodes; ++node) {
        std::uint64_t sums = 0, commands = 0, headers = 0;
        for (std::uint32_t chunk = 0; chunk < schedule.chunks(owner); ++chunk) {
          const TileRange tiles = schedule.chunk_tiles(owner, chunk);
          const bool own = chunk % plan.nodes == node;
          if (tiles.begin == tiles.end && (own || chunk >= plan.nodes)) continue;
          if (own) {
            sums += others * (tiles.end - tiles.begin) * schedule.finished_bytes();
            commands += others;
          } else {
            headers += chunk < plan.nodes;
            sums += (tiles.end - tiles.begin) * schedule.slot_bytes();
            ++commands;
          }
        }
        ASSERT_EQ(headers, others);
        ASSERT_EQ(schedule.network_bytes(node, owner), sums + headers * kBankHeaderBytes);
        ASSERT_EQ(schedule.sends(node, owner), commands);
        bytes += schedule.network_bytes(node, owner);
      }
      // 2 (N - 1) / N of the share, or 1.5 times that with partial sums in fp32.
      const std::uint64_t of_all = others * schedule.owned(owner);
      ASSERT_EQ(bytes, of_all * (schedule.slot_bytes() + schedule.finished_bytes()) +
                           plan.nodes * others * kBankHeaderBytes);
    }
  });
}

TEST(TwoShotSchedule, FlagsThatALaunchShowsAreBelowTheIdleOnes) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    for (std::uint32_t owner = 0; owner < plan.locals; ++owner) {
      for (std::uint32_t at = 0; at < plan.nodes; ++at) {
        for (std::uint32_t from = 0; from < plan.nodes; ++from) {
          std::set<std::uint32_t> shown;
          for (std::uint32_t round = 0; round < schedule.piece(owner, at).chunks(); ++round)
            shown.insert(schedule.sums_flag(round));
          for (std::uint32_t round = 0; round < schedule.finished_chunks(owner, from); ++round)
            ASSERT_TRUE(shown.insert(schedule.finished_flag(round)).second);
          ASSERT_EQ(*shown.rbegin() + 1, schedule.flags_shown(owner, at, from));
          ASSERT_LT(*shown.rbegin(), plan.flags().chunks_max);
          // No granule in between has none.
          std::set<std::uint32_t> granules;
          for (const std::uint32_t flag : shown) granules.insert(flag / shm::kFlagGranule);
          ASSERT_EQ(*granules.rbegin() + 1, granules.size());
        }
      }
    }
  });
}

// Receive memory: about (N - 1) / N of a share for sums, and one share of C, for each bank.
TEST(TwoShotPlanTest, TakesOneShareOfReceiveMemoryWhateverTheNodes) {
  for (const std::uint32_t nodes : {4u, 16u, 64u}) {
    const auto one = GemmArPlan::make(nodes, 8, {8192, 8192, 0}, DType::kBf16, {});
    const auto two = TwoShotPlan::make(nodes, 8, {8192, 8192, 0}, DType::kBf16, {});
    ASSERT_TRUE(one && two);
    const double share = 8192.0 * 8192 / 8 * kElementBytes;
    EXPECT_LT(static_cast<double>(two->layout.finished - two->layout.receive), 1.02 * 2 * share);
    EXPECT_LT(static_cast<double>(two->layout.out - two->layout.finished), 1.02 * 2 * share);
    EXPECT_LT(two->workspace_bytes(), one->workspace_bytes());
    EXPECT_NE(one->fingerprint(), two->fingerprint());
  }
}

TEST(TwoShotPlanTest, NeedsThreeNodes) {
  Tiling tiling;
  tiling.exchange = Exchange::kTwoShot;
  const auto plan = GemmArPlan::make(2, 4, {64, 64, 0}, DType::kBf16, tiling);
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(plan.error().message.find("three nodes"), std::string::npos) << plan.error().message;
  tiling.exchange = static_cast<Exchange>(3);
  EXPECT_EQ(GemmArPlan::make(4, 4, {64, 64, 0}, DType::kBf16, tiling).error().code,
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mk::kernels
