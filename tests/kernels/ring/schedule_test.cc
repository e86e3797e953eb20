// The schedule of Ring Attention, exhaustively for every world of 1-4 nodes x 1-8 local ranks, with
// and without the causal mask, and a set of sequence lengths and tiles.
#include "kernels/ops/ring/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "kernels/ops/ring/spec.h"

namespace mk::kernels {
namespace {

World world_of(const RingAttentionPlan& plan, std::uint32_t rank) {
  return {plan.nodes, plan.locals, rank / plan.locals, rank % plan.locals};
}

/// Calls `check(plan, seq, mode)`.
template <class Check>
void for_every_launch(Check&& check) {
  const RingAttentionTiling tilings[] = {
      {1, 1, 64, 1, 1}, {3, 4, 300, 3, 2}, {8, 3, 0, 8, 2}, {0, 0, 0, 0, 0}};
  std::uint32_t checked = 0;
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals) {
      for (bool causal : {false, true}) {
        const std::uint32_t parts = nodes * locals * (causal ? 2 : 1);
        const std::uint32_t seq_max = 3 * parts + 17;
        for (const RingAttentionTiling& tiling : tilings) {
          const auto plan =
              RingAttentionPlan::make(nodes, locals, {seq_max, 4, 2, 64, causal}, tiling);
          ASSERT_TRUE(plan) << plan.error().message;
          for (std::uint32_t seq : {parts, parts + 1, 2 * parts - 1, seq_max}) {
            const Mode mode = (seq + locals) % 3 == 0 ? Mode::kUnfused : Mode::kFused;
            SCOPED_TRACE(fmt::format("{} x {} ranks, causal {}, {} rows, tiles {} x {}, {}", nodes,
                                     locals, causal, seq, plan->tile_q, plan->tile_k,
                                     name_of(mode)));
            check(*plan, seq, mode);
            if (::testing::Test::HasFailure()) return;
            ++checked;
          }
        }
      }
    }
  }
  // 32 worlds, two masks, four tilings, four lengths: a loop that ends early shall not look like
  // success.
  EXPECT_EQ(checked, 32u * 2 * 4 * 4);
}

TEST(RingAttentionSchedule, EveryRowOfTheSequenceIsOnOneRank) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    std::vector<int> held(seq, 0);
    for (std::uint32_t rank = 0; rank < plan.nodes * plan.locals; ++rank) {
      const RingAttentionSchedule schedule(plan, world_of(plan, rank), seq, mode);
      std::uint32_t rows = 0;
      for (std::uint32_t half = 0; half < plan.parts_per_rank(); ++half) {
        const ShardRange part = schedule.part(rank, half);
        ASSERT_GE(part.count, 1u);
        rows += part.count;
        for (std::uint32_t i = 0; i < part.count; ++i) ++held[part.first + i];
      }
      ASSERT_EQ(schedule.rows(rank), rows);
      ASSERT_LE(rows, plan.rows_max());
      ASSERT_EQ(schedule.gathered_rows(rank), rows * plan.batch);
    }
    for (int count : held) ASSERT_EQ(count, 1);
  });
}

/// The rank's tensor row by sequence row, from the definition of the parts alone.
std::vector<std::uint32_t> positions_of(const RingAttentionPlan& plan, std::uint32_t rank,
                                        std::uint32_t seq) {
  const std::uint64_t parts = plan.parts();
  std::vector<std::uint32_t> positions;
  for (std::uint64_t part : {std::uint64_t{rank}, parts - 1 - rank}) {
    for (std::uint64_t i = seq * part / parts; i < seq * (part + 1) / parts; ++i) {
      positions.push_back(static_cast<std::uint32_t>(i));
    }
    if (!plan.causal) break;
  }
  return positions;
}

TEST(RingAttentionSchedule, TilesCoverARanksRowsAndStayWithinTheirLimits) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    for (std::uint32_t rank = 0; rank < plan.nodes * plan.locals; ++rank) {
      const RingAttentionSchedule schedule(plan, world_of(plan, rank), seq, mode);
      const auto positions = positions_of(plan, rank, seq);
      std::uint32_t next = 0;
      for (std::uint32_t i = 0; i < schedule.query_tiles(); ++i) {
        const SequenceTile tile = schedule.query_tile(i);
        ASSERT_EQ(tile.row, next);
        ASSERT_GE(tile.rows, 1u);
        ASSERT_LE(tile.rows, plan.tile_q);
        // Neighbours in the tensor are neighbours in the sequence: no tile straddles a part.
        for (std::uint32_t row = 0; row < tile.rows; ++row) {
          ASSERT_EQ(positions[tile.row + row], tile.position + row);
        }
        next += tile.rows;
      }
      ASSERT_EQ(next, positions.size());
      ASSERT_EQ(schedule.items(), schedule.query_tiles() * plan.key_heads);
    }
  });
}

// Every pair of a query row and a key row that the mask admits is attended exactly once, and no
// other.
TEST(RingAttentionSchedule, EveryAdmittedPairIsAttendedOnce) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    for (std::uint32_t rank = 0; rank < plan.nodes * plan.locals; ++rank) {
      const RingAttentionSchedule schedule(plan, world_of(plan, rank), seq, mode);
      for (std::uint32_t i = 0; i < schedule.query_tiles(); ++i) {
        const SequenceTile query = schedule.query_tile(i);
        std::vector<int> seen(std::size_t{query.rows} * seq, 0);
        for (std::uint32_t pass = 0; pass < schedule.passes(); ++pass) {
          const StepRange range = schedule.pass_steps(pass);
          for (std::uint32_t step = range.begin; step < range.end; ++step) {
            const KeyTile key = schedule.key_tile(step);
            const Sight sight = schedule.sight(query, key);
            if (sight == Sight::kNone) continue;
            ASSERT_LE(key.tile.rows, plan.tile_k);
            ASSERT_LE(key.tile.row + key.tile.rows, schedule.rows(key.origin));
            const auto positions = positions_of(plan, key.origin, seq);
            for (std::uint32_t j = 0; j < key.tile.rows; ++j) {
              ASSERT_EQ(positions[key.tile.row + j], key.tile.position + j);
              for (std::uint32_t q = 0; q < query.rows; ++q) {
                const bool admitted =
                    sight == Sight::kAll ||
                    std::int64_t{j} <= std::int64_t{q} + schedule.diagonal(query, key);
                seen[std::size_t{q} * seq + key.tile.position + j] += admitted;
              }
            }
          }
        }
        for (std::uint32_t q = 0; q < query.rows; ++q) {
          for (std::uint32_t j = 0; j < seq; ++j) {
            const bool admitted = !plan.causal || j <= query.position + q;
            ASSERT_EQ(seen[std::size_t{q} * seq + j], admitted ? 1 : 0)
                << "rank " << rank << ", row " << query.position + q << ", key " << j;
          }
        }
      }
    }
  });
}

// Own keys come first, then the node's ranks from the next one on, each at a stretch. Then comes
// node after node in the order of their hops, the tiles of its ranks in turn, those of this rail
// first.
TEST(RingAttentionSchedule, StepsComeInTheOrderOfArrival) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    const std::uint32_t ranks = plan.nodes * plan.locals;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      const World world = world_of(plan, rank);
      const RingAttentionSchedule schedule(plan, world, seq, mode);
      ASSERT_EQ(schedule.steps() % ranks, 0u);
      const std::uint32_t most = schedule.steps() / ranks;
      std::vector<std::uint32_t> next_row(ranks, 0);
      std::uint32_t busy = 0;
      for (std::uint32_t step = 0; step < schedule.steps(); ++step) {
        const KeyTile key = schedule.key_tile(step);
        const std::uint32_t hops = step / (plan.locals * most);
        const std::uint32_t within = step % (plan.locals * most);
        const std::uint32_t node = (world.node + plan.nodes - hops) % plan.nodes;
        const std::uint32_t turn = hops == 0 ? within / most : within % plan.locals;
        ASSERT_EQ(key.origin, node * plan.locals + (world.local + turn) % plan.locals);
        if (key.tile.rows == 0) continue;
        ASSERT_EQ(key.tile.row, next_row[key.origin]);
        next_row[key.origin] += key.tile.rows;
        ++busy;
      }
      for (std::uint32_t origin = 0; origin < ranks; ++origin) {
        ASSERT_EQ(next_row[origin], schedule.rows(origin));
      }
      // Parts differ by one row at most, hence ranks by one tile per part.
      ASSERT_LE(schedule.steps() - busy, ranks * plan.parts_per_rank());
    }
  });
}

TEST(RingAttentionSchedule, PassesCutTheStepsAndAreFewWhateverTheNumberOfRanks) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    const RingAttentionSchedule schedule(plan, world_of(plan, 0), seq, mode);
    if (plan.nodes == 1 || mode == Mode::kUnfused) {
      ASSERT_EQ(schedule.passes(), 1u);
    } else {
      ASSERT_GE(schedule.passes(), 2u);
      ASSERT_LE(schedule.passes(), 1 + plan.remote_passes);
    }
    std::uint32_t next = 0;
    for (std::uint32_t pass = 0; pass < schedule.passes(); ++pass) {
      const StepRange range = schedule.pass_steps(pass);
      ASSERT_EQ(range.begin, next);
      ASSERT_GT(range.end, range.begin);
      next = range.end;
      for (std::uint32_t step = range.begin; schedule.passes() > 1 && step < range.end; ++step) {
        const bool local = schedule.key_tile(step).origin / plan.locals == 0;
        ASSERT_EQ(local, pass == 0) << "pass 0 is this node's, the others are remote";
      }
    }
    ASSERT_EQ(next, schedule.steps());
  });
}

TEST(RingAttentionSchedule, ATileIsPutAsideOnlyForPassesThatItIsIn) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    for (std::uint32_t rank = 0; rank < plan.nodes * plan.locals; ++rank) {
      const RingAttentionSchedule schedule(plan, world_of(plan, rank), seq, mode);
      for (std::uint32_t i = 0; i < schedule.query_tiles(); ++i) {
        const SequenceTile query = schedule.query_tile(i);
        std::uint32_t last = 0;
        for (std::uint32_t pass = 0; pass < schedule.passes(); ++pass) {
          const StepRange range = schedule.pass_steps(pass);
          bool any = false;
          for (std::uint32_t step = range.begin; step < range.end; ++step) {
            any = any || schedule.sight(query, schedule.key_tile(step)) != Sight::kNone;
          }
          ASSERT_EQ(schedule.in_pass(query, pass), any);
          ASSERT_TRUE(any || pass > 0) << "the first pass begins each tile";
          if (any) last = pass;
        }
        ASSERT_EQ(schedule.last_pass(query), last);
      }
    }
  });
}

// Zigzag: with x the bounds of the parts before they are rounded down, each rank's number of pairs
// would be the same. Rounding moves a bound b by less than 1 and thereby the count of the rows
// before it, b (b + 1) / 2, by less than b + 1. A rank's four bounds, i, i + 1, P - i - 1 and P - i
// of the P parts' bounds, add to the count with signs -, +, -, +. Up to the sum of two of them and
// 2, that is at most s + s / P + 2.
TEST(RingAttentionSchedule, ZigzagBalancesTheWorkToAboutOneRow) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    if (!plan.causal) return;
    const std::uint32_t ranks = plan.nodes * plan.locals;
    const double s = seq;
    const double equal = s * (s + 1) / 2 / ranks;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      double pairs = 0;
      for (std::uint32_t position : positions_of(plan, rank, seq)) pairs += position + 1;
      const RingAttentionSchedule schedule(plan, world_of(plan, rank), seq, mode);
      ASSERT_EQ(static_cast<double>(schedule.pairs()), pairs);
      ASSERT_LE(std::abs(pairs - equal), s + s / plan.parts() + 2);
      if (seq % plan.parts() == 0) {
        ASSERT_EQ(pairs, equal);
      }
    }
  });
}

// README.md's formula, with each rank's rows by the definition.
TEST(RingAttentionSchedule, NetworkBytesAreTheFormula) {
  for_every_launch([](const RingAttentionPlan& plan, std::uint32_t seq, Mode mode) {
    std::uint64_t all = 0;
    for (std::uint32_t rank = 0; rank < plan.nodes * plan.locals; ++rank) {
      const World world = world_of(plan, rank);
      std::uint64_t expected = 0;
      for (std::uint32_t node = 0; node < plan.nodes; ++node) {
        if (plan.nodes == 1 || node == (world.node + 1) % plan.nodes) continue;
        expected += 64 + positions_of(plan, node * plan.locals + world.local, seq).size() * 2 *
                             plan.key_heads * plan.head_dim * 2;
      }
      const std::uint64_t bytes = RingAttentionSchedule(plan, world, seq, mode).network_bytes();
      ASSERT_EQ(bytes, expected);
      all += bytes;
    }
    // Over all ranks: each row of K and V, and each header, once to each other node.
    ASSERT_EQ(all, std::uint64_t{plan.nodes - 1} *
                       (std::uint64_t{seq} * 2 * plan.key_heads * plan.head_dim * 2 +
                        64u * plan.nodes * plan.locals));
  });
}

TEST(RingAttentionPlan, ABatchIsAsManyTimesTheWork) {
  for (const bool causal : {false, true}) {
    for (const bool on_gpu : {false, true}) {
      RingAttentionShape shape{192, 4, 2, 64, causal};
      const auto work_of = [&](std::uint32_t batch) {
        shape.batch = batch;
        const auto plan = RingAttentionPlan::make(
            2, 2, shape, on_gpu ? ring_attention_cuda_tiling(shape) : RingAttentionTiling{});
        EXPECT_TRUE(plan);
        return plan->work(world_of(*plan, 1), 192);
      };
      const LaunchWork one = work_of(1);
      const LaunchWork seven = work_of(7);
      // Two products for each pair of rows, of all ranks a quarter: zigzag deals them out alike.
      const double pairs = causal ? 192.0 * 193 / 2 / 4 : 192.0 * 192 / 4;
      EXPECT_NEAR(one.flops, 4.0 * 64 * 4 * pairs, causal ? 4.0 * 64 * 4 * 96 : 0);
      EXPECT_EQ(7 * one.flops, seven.flops);
      // All but the shards' headers.
      EXPECT_NEAR(7 * one.local_bytes, seven.local_bytes, 7 * 64 * 64);
      EXPECT_NEAR(7 * one.network_bytes, seven.network_bytes, 7 * 64 * 4);
    }
  }
}

TEST(RingAttentionPlan, SaysWhatItCannotDo) {
  const RingAttentionShape good{64, 4, 2, 64, true};
  const auto error = [&](RingAttentionShape shape, RingAttentionTiling tiling = {}) {
    const auto plan = RingAttentionPlan::make(2, 2, shape, tiling);
    return plan ? std::string("none") : plan.error().message;
  };
  const auto contains = [](const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_EQ(error(good), "none");
  RingAttentionShape shape = good;
  shape.seq_max = 7;
  EXPECT_TRUE(contains(error(shape), "less than one row for each of 8 parts")) << error(shape);
  shape.causal = false;
  EXPECT_EQ(error(shape), "none");
  shape = good;
  shape.query_heads = 3;
  EXPECT_TRUE(contains(error(shape), "3 query heads over 2 key heads")) << error(shape);
  shape.key_heads = 0;
  EXPECT_TRUE(contains(error(shape), "over 0 key heads")) << error(shape);
  shape = good;
  shape.head_dim = 96;
  EXPECT_TRUE(contains(error(shape), "64 or 128")) << error(shape);
  shape = good;
  shape.dtype = static_cast<DType>(7);
  EXPECT_NE(error(shape), "none");
  EXPECT_TRUE(contains(error(good, {0, 1025}), "at most 1024"));
  EXPECT_TRUE(contains(error(good, {0, 0, 0, 9}), "9 passes"));
  EXPECT_NE(error(good, {0, 0, 0, 0, 3}), "none");

  const auto plan = RingAttentionPlan::make(2, 2, good, {});
  ASSERT_TRUE(plan);
  EXPECT_TRUE(plan->check_seq(8));
  EXPECT_TRUE(plan->check_seq(64));
  EXPECT_FALSE(plan->check_seq(7));
  EXPECT_FALSE(plan->check_seq(65));
}

TEST(RingAttentionPlan, WindowsHaveEveryPairOnceInItsOrder) {
  for (std::uint32_t batch = 1; batch <= 6; ++batch) {
    for (std::uint32_t heads = 1; heads <= 7; ++heads) {
      for (std::uint32_t wanted = 0; wanted <= batch * heads + 1; ++wanted) {
        for (const KeyPacking packing : {KeyPacking::kRows, KeyPacking::kHeads}) {
          RingAttentionShape shape{64, 2 * heads, heads, 64, true};
          shape.batch = batch;
          RingAttentionTiling tiling;
          tiling.packing = packing;
          tiling.window_pairs = wanted;
          const auto plan = RingAttentionPlan::make(1, 2, shape, tiling);
          ASSERT_TRUE(plan) << plan.error().message;
          const bool by_rows = packing == KeyPacking::kRows;
          // By rows, at least a batch.
          const std::uint32_t most = by_rows ? std::max(wanted, heads) : wanted;
          ASSERT_LE(plan->window_pairs, wanted == 0 ? batch * heads : most);
          std::uint32_t next = 0;
          for (std::uint32_t i = 0; i < plan->windows(); ++i) {
            const HeadWindow window = plan->window(i);
            ASSERT_EQ(window.batch * heads + window.key_head, next);
            ASSERT_TRUE(window.batches == 1 || window.key_heads == heads);
            ASSERT_TRUE(!by_rows || window.key_heads == heads);
            const RingAttentionGeometry its = plan->of_window(window);
            ASSERT_EQ(its.head_pairs(), window.batches * window.key_heads);
            ASSERT_LE(its.head_pairs(), plan->window_pairs);
            ASSERT_LE(its.gathered_rows(plan->rows_max()), plan->gather.rows_max);
            ASSERT_EQ(its.gathered_row_bytes(), plan->gather.row_bytes);
            ASSERT_EQ(its.group(), 2u);
            next += its.head_pairs();
          }
          ASSERT_EQ(next, batch * heads);
        }
      }
    }
  }
}

// Batch 16 x 16 heads of 192K: not all 25.8 GB of keys and values, and those twice.
TEST(RingAttentionPlan, AWorkspaceHasRoomForAWindowOfHeads) {
  RingAttentionShape shape{192 * 1024, 16, 16, 128, false};
  shape.batch = 16;
  RingAttentionTiling tiling;
  tiling.packing = KeyPacking::kHeads;
  const auto plan = RingAttentionPlan::make(1, 4, shape, tiling);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_LE(plan->workspace_bytes, std::uint64_t{4400} << 20);
  EXPECT_EQ(plan->window_pairs, 16u);
  EXPECT_EQ(plan->windows(), 16u);
  shape.seq_max = 4096;
  EXPECT_EQ(RingAttentionPlan::make(1, 4, shape, tiling)->windows(), 1u);
}

// By heads: several groups bring the first head together, each whole rows of it.
TEST(RingAttentionPlan, ChunksByHeadsAreSmallAndOfWholeRows) {
  RingAttentionTiling tiling;
  tiling.packing = KeyPacking::kHeads;
  for (const std::uint32_t dim : {64u, 128u}) {
    for (const std::uint64_t seq : {7u, 1001u, 12289u, 49152u}) {
      const auto plan = RingAttentionPlan::make(1, 2, {seq, 3, 3, dim, true}, tiling);
      ASSERT_TRUE(plan) << plan.error().message;
      EXPECT_EQ(plan->gather.chunk_bytes % plan->head_bytes(), 0u) << seq << " rows, dim " << dim;
      EXPECT_LE(plan->gather.chunk_bytes, 256u * 1024) << seq << " rows, dim " << dim;
    }
  }
}

// An item needs its head of every rank. In passes over all heads, one rank's rows after the
// other's.
TEST(RingAttentionPlan, ShardsOfKeysByHeadsTakeTurnsOnTheRing) {
  RingAttentionTiling tiling;
  tiling.packing = KeyPacking::kHeads;
  const auto turn_chunks = [&tiling](std::uint64_t seq) {
    const auto plan = RingAttentionPlan::make(3, 1, {seq, 8, 8, 128}, tiling);
    EXPECT_TRUE(plan) << plan.error().message;
    return plan->gather.turn_chunks;
  };
  EXPECT_EQ(turn_chunks(24576), 4u) << "of 256 KiB";
  EXPECT_EQ(turn_chunks(768), 8u) << "of 128 KiB";
  tiling.turn_chunks = 2;
  EXPECT_EQ(turn_chunks(768), 2u);
  tiling.turn_chunks = RingAttentionTiling::kWholeShards;
  EXPECT_EQ(turn_chunks(768), 0u);
  tiling.turn_chunks -= 1;
  EXPECT_EQ(RingAttentionPlan::make(3, 1, {768, 8, 8, 128}, tiling).error().code,
            ErrorCode::kInvalidArgument);
  tiling.turn_chunks = 0;
  tiling.packing = KeyPacking::kRows;
  EXPECT_EQ(turn_chunks(24576), 0u);
}

TEST(RingAttentionPlan, PlansThatDifferHaveDifferentFingerprints) {
  const RingAttentionShape base{64, 4, 2, 64, true};
  std::vector<RingAttentionShape> shapes(8, base);
  shapes[1].seq_max = 65;
  shapes[2].query_heads = 2;
  shapes[3].key_heads = 1;
  shapes[4].head_dim = 128;
  shapes[5].causal = false;
  shapes[6].dtype = DType::kF16;
  shapes[7].key_heads = 4;
  std::set<std::uint64_t> prints;
  for (const auto& shape : shapes) {
    prints.insert(RingAttentionPlan::make(2, 2, shape, {})->fingerprint());
  }
  for (const RingAttentionTiling tiling :
       {RingAttentionTiling{1}, RingAttentionTiling{0, 5}, RingAttentionTiling{0, 0, 6400},
        RingAttentionTiling{0, 0, 0, 2}, RingAttentionTiling{0, 0, 0, 0, 1},
        RingAttentionTiling{0, 0, 0, 0, 0, KeyPacking::kHeads},
        RingAttentionTiling{0, 0, 0, 0, 0, KeyPacking::kHeads, 1}}) {
    prints.insert(RingAttentionPlan::make(2, 2, base, tiling)->fingerprint());
  }
  EXPECT_EQ(prints.size(), shapes.size() + 7);
  EXPECT_EQ(RingAttentionPlan::make(2, 2, base, {})->fingerprint(),
            RingAttentionPlan::make(2, 2, base, {})->fingerprint());
}

}  // namespace
}  // namespace mk::kernels
