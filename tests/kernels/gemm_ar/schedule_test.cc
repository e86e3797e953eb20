// The schedule of GEMM+AllReduce, exhaustively for every world of 1-4 nodes x 1-8 local ranks and a
// set of shapes: tiles, owners, chunks, places and flags are what schedule.h says.
#include "kernels/ops/gemm_ar/schedule.h"
#include "kernels/comm/workspace_head.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/comm/launch_record.h"
#include "kernels/ops/gemm_ar/spec.h"
#include "tests/kernels/support/claims.h"
#include "tests/kernels/support/every_launch.h"

namespace mk::kernels {
namespace {

/// Calls `check(plan, schedule)` for every world, case and m.
template <class Check>
void for_every_launch(Check&& check) {
  static const testing::LaunchCases cases = {
      .plans = {{{1, 1, 0}, {}},
                {{7, 24, 0}, {}},
                {{64, 64, 0}, {16, 16, 1024, 0}},
                {{65, 72, 0}, {16, 16, 1024, 0}},  // edges both ways
                {{129, 40, 0}, {128, 8, 1, 0}},    // smaller m with larger tiles; a chunk per tile
                {{33, 101, 0},
                 {8, 32, 3000, 1}},  // n no multiple of 8, chunks of odd size, one bank
                {{300, 520, 0}, {}},
                {{70, 8, 0}, {1, 8, 1, 0}}},  // more chunks than a granule has flags
      .rows = {1, 2, 3, 7, 8, 16, 17},
      .launches = 65};
  testing::for_every_launch<GemmArPlan>(cases, [&](const GemmArPlan& plan, std::uint32_t m) {
    check(plan, GemmArSchedule(plan, m));
  });
}

TEST(Schedule, TilesCoverEveryElementOnce) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    std::vector<int> covered(std::size_t{schedule.m()} * plan.max.n, 0);
    for (std::uint32_t tile = 0; tile < schedule.tiles(); ++tile) {
      const TileRect rect = schedule.rect(tile);
      ASSERT_GE(rect.rows, 1u);
      ASSERT_GE(rect.columns, 1u);
      ASSERT_LE(rect.rows, schedule.tile_rows());
      ASSERT_LE(rect.columns, schedule.tile_cols());
      ASSERT_LE(rect.row + rect.rows, schedule.m());
      ASSERT_LE(rect.column + rect.columns, plan.max.n);
      for (std::uint32_t i = 0; i < rect.rows; ++i) {
        for (std::uint32_t j = 0; j < rect.columns; ++j) {
          ++covered[std::size_t{rect.row + i} * plan.max.n + rect.column + j];
        }
      }
    }
    for (int count : covered) ASSERT_EQ(count, 1);
  });
}

TEST(Schedule, TilesStayWithinTheirLimits) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    EXPECT_LE(schedule.tile_rows(), plan.tile_m);
    EXPECT_LE(schedule.tile_cols(), plan.tile_n);
    EXPECT_EQ(schedule.tile_cols() % 8, 0u) << "packed rows are 16-byte aligned";
  });
}

// Rows are spread evenly, so a launch sends less than one row of padding per row of tiles.
TEST(Schedule, PaddingIsLessThanARowAndEightColumnsPerTile) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    const std::uint32_t tiles_m = div_up(schedule.m(), plan.tile_m);
    const std::uint32_t tiles_n = div_up(plan.max.n, plan.tile_n);
    EXPECT_LT(tiles_m * schedule.tile_rows() - schedule.m(), tiles_m);
    EXPECT_LT(tiles_n * schedule.tile_cols() - plan.max.n, tiles_n * 8);
  });
}

TEST(Schedule, EveryRankComputesEveryTileOnce) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    for (std::uint32_t local = 0; local < plan.locals; ++local) {
      std::vector<bool> seen(schedule.tiles(), false);
      for (std::uint32_t step = 0; step < schedule.tiles(); ++step) {
        const std::uint32_t tile = schedule.tile_at(0, local, step);
        ASSERT_LT(tile, schedule.tiles());
        ASSERT_FALSE(seen[tile]);
        seen[tile] = true;
      }
    }
  });
}

// What comm/deferred.h relies on.
TEST(Schedule, TwoRanksComputeATileInTheSamePairOfSteps) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    if (plan.locals != 2) return;
    std::vector<std::uint32_t> pair(schedule.tiles());
    for (std::uint32_t step = 0; step < schedule.tiles(); ++step)
      pair[schedule.tile_at(0, 0, step)] = step / 2;
    for (std::uint32_t step = 0; step < schedule.tiles(); ++step)
      ASSERT_EQ(pair[schedule.tile_at(0, 1, step)], step / 2);
  });
}

// The stated order: groups of one tile per owner in the order of tile numbers (so first chunks are
// complete first), and in each full group all ranks begin with different owners.
TEST(Schedule, TheOrderIsChunkMajorAndSpreadsOverOwners) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    for (std::uint32_t step = 0; step < schedule.tiles(); ++step) {
      const bool full_group = step / plan.locals < schedule.tiles() / plan.locals;
      std::set<std::uint32_t> owners;
      for (std::uint32_t local = 0; local < plan.locals; ++local) {
        const std::uint32_t tile = schedule.tile_at(0, local, step);
        ASSERT_EQ(schedule.owned_index(tile), step / plan.locals);
        owners.insert(schedule.owner(tile));
      }
      if (full_group) {
        ASSERT_EQ(owners.size(), plan.locals) << "step " << step;
      }
    }
    for (std::uint32_t owner = 0; owner < plan.locals; ++owner) {
      std::uint32_t chunk = 0;
      for (std::uint32_t step = 0; step < schedule.tiles(); ++step) {
        const std::uint32_t tile = schedule.tile_at(0, 0, step);
        if (schedule.owner(tile) != owner) continue;
        ASSERT_GE(schedule.chunk_of(owner, schedule.owned_index(tile)), chunk);
        chunk = schedule.chunk_of(owner, schedule.owned_index(tile));
      }
    }
  });
}

TEST(Schedule, OwnersAndChunksPartitionTheTiles) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    std::vector<bool> seen(schedule.tiles(), false);
    for (std::uint32_t owner = 0; owner < plan.locals; ++owner) {
      ASSERT_LE(schedule.owned(owner), plan.tiles_max);
      ASSERT_GE(schedule.chunks(owner), 1u);
      ASSERT_LE(schedule.chunks(owner), plan.chunks_max);
      ASSERT_LE(schedule.chunks(owner), schedule.chunks(0)) << "collect relies on it";
      // Balanced: no owner has two tiles more than another.
      ASSERT_LE(schedule.owned(0) - schedule.owned(owner), 1u);
      std::uint32_t next = 0;
      for (std::uint32_t chunk = 0; chunk < schedule.chunks(owner); ++chunk) {
        const TileRange range = schedule.chunk_tiles(owner, chunk);
        ASSERT_EQ(range.begin, next);
        ASSERT_TRUE(range.end > range.begin || schedule.owned(owner) == 0);
        next = range.end;
        for (std::uint32_t owned = range.begin; owned < range.end; ++owned) {
          const std::uint32_t tile = schedule.tile_of(owner, owned);
          ASSERT_LT(tile, schedule.tiles());
          ASSERT_FALSE(seen[tile]);
          seen[tile] = true;
          ASSERT_EQ(schedule.owner(tile), owner);
          ASSERT_EQ(schedule.owned_index(tile), owned);
          ASSERT_EQ(schedule.chunk_of(owner, owned), chunk);
        }
      }
      ASSERT_EQ(next, schedule.owned(owner));
    }
    for (bool tile : seen) ASSERT_TRUE(tile);
  });
}

TEST(Schedule, PlacesInTheWorkspaceAreDisjointAndInside) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    testing::Claims claims;
    const WorkspaceHead head{plan.locals};
    claims.claim(WorkspaceHead::failed(), 4, "failed");
    for (std::uint32_t local = 0; local < plan.locals; ++local) {
      for (std::uint32_t epoch = 4; epoch < 6; ++epoch) {
        claims.claim(head.record(epoch, local), sizeof(LaunchRecord), "record");
      }
      claims.claim(head.finished(local), 4, "finished");
      for (std::uint32_t owned = 0; owned < schedule.owned(0); ++owned) {
        claims.claim(schedule.tile_ready(local, owned), 4, "tile_ready");
        if (plan.locals > 1)
          claims.claim(schedule.slot(local, owned), schedule.slot_bytes(), "slot");
      }
      for (std::uint32_t chunk = 0; chunk < schedule.chunks(local); ++chunk) {
        claims.claim(schedule.out_ready(local, chunk), 4, "out_ready");
      }
    }
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(0); ++chunk) {
      claims.claim(schedule.chunk_reduced(chunk), 4, "chunk_reduced");
    }
    if (plan.nodes > 1) {
      const std::uint64_t bank_bytes = schedule.slot_in_bank(schedule.owned(0));
      for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
        claims.claim(schedule.staging_bank(bank), bank_bytes, "staging");
        for (std::uint32_t from = 1; from < plan.nodes; ++from) {
          claims.claim(schedule.receive_bank(bank, 0, from), bank_bytes, "receive");
        }
      }
    }
    claims.claim(plan.layout.out, std::uint64_t{plan.max.m} * plan.max.n * kElementBytes, "out");
    EXPECT_LE(claims.end(), plan.workspace_bytes());
    EXPECT_EQ(plan.workspace_bytes() % 4096, 0u);
  });
}

// Every node's peers have banks of their own, and all nodes agree where a sender's bank lies at its
// receiver.
TEST(Schedule, ReceiveBanksAreOnePerSender) {
  const auto plan = GemmArPlan::make(4, 2, {64, 64, 0}, DType::kBf16, {});
  ASSERT_TRUE(plan);
  const GemmArSchedule schedule(*plan, 64);
  for (std::uint32_t at = 0; at < 4; ++at) {
    std::set<std::uint64_t> banks;
    for (std::uint32_t bank = 0; bank < 2; ++bank) {
      for (std::uint32_t from = 0; from < 4; ++from) {
        if (from != at) banks.insert(schedule.receive_bank(bank, at, from));
      }
    }
    EXPECT_EQ(banks.size(), 6u);
    EXPECT_GE(*banks.begin(), plan->layout.receive);
    EXPECT_LE(*banks.rbegin() + plan->layout.bank_bytes, plan->layout.out);
  }
}

TEST(Schedule, ChunksTileTheBankAndTheBytesAreTheFormula) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    std::uint64_t of_all_rails = 0;
    for (std::uint32_t owner = 0; owner < plan.locals; ++owner) {
      std::uint64_t next = 0;
      std::uint64_t sent = 0;
      for (std::uint32_t chunk = 0; chunk < schedule.chunks(owner); ++chunk) {
        const ByteRange range = schedule.packed(owner).chunk_range(chunk);
        ASSERT_EQ(range.begin, next);
        ASSERT_GT(range.bytes, 0u);
        ASSERT_LE(range.bytes, std::max<std::uint64_t>(plan.chunk_bytes, schedule.slot_bytes()) +
                                   kBankHeaderBytes);
        next += range.bytes;
        sent += std::uint64_t{range.bytes} * (plan.nodes - 1);
      }
      ASSERT_EQ(next, schedule.slot_in_bank(schedule.owned(owner)));
      ASSERT_LE(next, plan.layout.bank_bytes);
      ASSERT_EQ(sent, schedule.network_bytes(0, owner));
      of_all_rails += sent;
    }
    const std::uint64_t elements =
        std::uint64_t{schedule.tiles()} * schedule.tile_rows() * schedule.tile_cols();
    ASSERT_EQ(of_all_rails,
              (plan.nodes - 1) * (plan.locals * kBankHeaderBytes + elements * kElementBytes));
  });
}

TEST(Schedule, ArrivalFlagsAreDisjointAndInside) {
  for_every_launch([](const GemmArPlan& plan, const GemmArSchedule& schedule) {
    if (plan.nodes == 1) {
      EXPECT_EQ(plan.flag_count(), 0u);
      return;
    }
    const FlagMap flags = schedule.flags();
    for (std::uint32_t at = 0; at < plan.nodes; ++at) {
      std::set<std::uint32_t> seen;
      std::map<std::uint32_t, std::uint32_t> granule_sender;
      for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
        for (std::uint32_t from = 0; from < plan.nodes; ++from) {
          if (from == at) continue;
          for (std::uint32_t chunk = 0; chunk < plan.chunks_max; ++chunk) {
            const std::uint32_t flag = flags.arrival(bank, at, from, chunk);
            ASSERT_TRUE(seen.insert(flag).second);
            const std::uint32_t sender = bank * plan.nodes + from;
            ASSERT_EQ(granule_sender.emplace(flag / shm::kFlagGranule, sender).first->second,
                      sender);
          }
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
}  // namespace mk::kernels
