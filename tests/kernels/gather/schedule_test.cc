// The schedule of a gather, exhaustively for every world of 1-4 nodes x 1-8 local ranks, both kinds
// and a set of shapes: rows travel, are cut, and lie as schedule.h says.
#include "kernels/gather/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <ostream>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/comm/workspace_head.h"
#include "kernels/gather/plan.h"
#include "tests/kernels/support/claims.h"

namespace mk::kernels {
namespace {

struct Case {
  GatherShape shape;
  std::uint32_t chunk_bytes;
  std::uint32_t banks;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {{1, 1}, 0, 0},        // the least
      {{5, 2}, 0, 0},        // less than a chunk
      {{70, 96}, 64, 0},     // rows straddle chunks; more chunks than a granule has flags
      {{33, 100}, 1000, 1},  // odd sizes, one bank
      {{7, 640}, 64, 0},     // several chunks a row
      {{300, 4096}, 0, 0},   // chosen: 128 rows are 512 KiB
  };
  return all;
}

/// Rows of a rank in some launch: everything from none to all, different from rank to rank.
std::uint32_t rows_of(const GatherGeometry& plan, std::uint32_t rank, std::uint32_t variant) {
  if (variant == 0) return plan.rows_max;
  if (variant == 1) return rank % 3 == 0 ? 0 : 1;
  return (rank * 7 + variant) % (plan.rows_max + 1);
}
constexpr std::uint32_t kVariants = 4;

/// Calls `check(plan)` for every world, kind and case.
template <class Check>
void for_every_plan(Check&& check) {
  std::uint32_t checked = 0;
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals) {
      for (GatherKind kind : {GatherKind::kBroadcast, GatherKind::kPull}) {
        for (const Case& one : cases()) {
          auto plan =
              GatherPlan::make("test", nodes, locals, one.shape, kind, one.chunk_bytes, one.banks);
          ASSERT_TRUE(plan) << plan.error().message;
          WorkspaceLayout workspace(locals);
          plan->place(workspace, 128);
          workspace.begin_data();
          plan->place_rows(workspace);
          SCOPED_TRACE(fmt::format("{} x {} ranks, kind {}, {} rows of {} bytes, chunks of {}",
                                   nodes, locals, static_cast<int>(kind), one.shape.rows_max,
                                   one.shape.row_bytes, plan->chunk_bytes));
          check(*plan, workspace.parts().bytes());
          if (::testing::Test::HasFailure()) return;
          ++checked;
        }
      }
    }
  }
  EXPECT_EQ(checked, 32u * 2 * cases().size());  // a loop that ends early is no success
}

/// Calls `look(schedule)` as every rank sees it.
template <class Look>
void for_every_rank(const GatherGeometry& plan, Look&& look) {
  for (std::uint32_t node = 0; node < plan.nodes; ++node) {
    for (std::uint32_t local = 0; local < plan.locals; ++local) {
      look(GatherSchedule(plan, {plan.nodes, plan.locals, node, local}));
    }
  }
}

// Every shard crosses to every other node exactly once, in whole. Nobody sends what it does not
// have: what a rank sends at hop h it has itself, or has from its predecessor.
TEST(GatherSchedule, EveryByteCrossesToEachNodeOnceAndTheBytesAreTheFormula) {
  for_every_plan([](const GatherPlan& plan, std::uint64_t) {
    for (std::uint32_t variant = 0; variant < kVariants; ++variant) {
      const auto rows = [&](std::uint32_t rank) { return rows_of(plan, rank, variant); };
      std::map<std::tuple<std::uint32_t, std::uint32_t>, std::uint64_t> landed;  // at rank, origin
      for_every_rank(plan, [&](const GatherSchedule& schedule) {
        const World& world = schedule.world();
        std::uint64_t sent = 0;
        for (std::uint32_t hops = 0; hops < schedule.shards_sent(); ++hops) {
          const std::uint32_t origin = world.rail_peer(schedule.node_at(hops));
          ASSERT_NE(schedule.node_of(origin), schedule.successor()) << "it would come home";
          std::uint64_t of_shard = 0;
          for (std::uint32_t chunk = 0; chunk < schedule.chunks(rows(origin)); ++chunk) {
            of_shard += schedule.chunk_range(rows(origin), chunk).bytes;
          }
          ASSERT_EQ(of_shard, 64 + std::uint64_t{rows(origin)} * plan.row_bytes);
          auto& there = landed[{world.rail_peer(schedule.successor()), origin}];
          ASSERT_EQ(there, 0u) << "sent twice";
          there = of_shard;
          sent += of_shard;
        }
        ASSERT_EQ(sent, schedule.network_bytes(rows));
      });
      for_every_rank(plan, [&](const GatherSchedule& schedule) {
        const World& world = schedule.world();
        for (std::uint32_t node = 0; node < plan.nodes; ++node) {
          if (node == world.node) continue;
          ASSERT_EQ(landed.count({world.rank(), world.rail_peer(node)}), 1u);
          // Over as many hops as stated, each from the one before.
          const std::uint32_t hops = schedule.hops_from(node);
          ASSERT_EQ(schedule.node_at(hops), node);
          ASSERT_GE(hops, 1u);
          ASSERT_LT(hops, plan.nodes);
          const GatherSchedule before(
              plan, {plan.nodes, plan.locals, schedule.predecessor(), world.local});
          ASSERT_EQ(before.successor(), world.node);
          ASSERT_EQ(before.hops_from(node), hops - 1);
          ASSERT_LT(before.hops_from(node), before.shards_sent());
        }
      });
      ASSERT_EQ(landed.size(), std::size_t{plan.nodes} * plan.locals * (plan.nodes - 1));
    }
  });
}

struct SentRun {
  std::uint32_t shard, begin, end;
  bool operator==(const SentRun&) const = default;
};
std::ostream& operator<<(std::ostream& out, const SentRun& run) {
  return out << run.shard << ": [" << run.begin << ", " << run.end << ")";
}
std::vector<SentRun> runs_of(const ChunkOrder& order, const std::vector<std::uint32_t>& chunks) {
  std::vector<SentRun> runs;
  const auto chunks_of = [&](std::uint32_t shard) { return chunks[shard]; };
  const bool right = order.for_each_run(chunks_of, [&](std::uint32_t shard, ChunkRange range) {
    runs.push_back({shard, range.begin, range.end});
    return true;
  });
  EXPECT_TRUE(right);
  return runs;
}

TEST(ChunkOrder, OneShardGoesAfterTheOtherOrAllInTurns) {
  using SentRuns = std::vector<SentRun>;
  EXPECT_EQ(runs_of({3, 0}, {9, 1, 7}), (SentRuns{{0, 0, 9}, {1, 0, 1}, {2, 0, 7}}));
  EXPECT_EQ(
      runs_of({2, 1}, {7, 7}),
      (SentRuns{
          {0, 0, 1}, {0, 1, 2}, {1, 0, 1}, {0, 2, 3}, {1, 1, 2}, {0, 3, 7}, {1, 2, 3}, {1, 3, 7}}));
  // Shards of unequal lengths; a last run has 8 chunks to 9.
  EXPECT_EQ(runs_of({3, 2}, {13, 1, 10}),
            (SentRuns{{0, 0, 2}, {0, 2, 4}, {1, 0, 1}, {0, 4, 13}, {2, 0, 2}, {2, 2, 10}}));
  EXPECT_EQ(runs_of({0, 1}, {}), SentRuns{});
}

// Two nodes send one shard each: nothing takes turns with it.
TEST(ChunkOrder, OfOneShardIsThatShard) {
  for (std::uint32_t chunks = 1; chunks < 30; ++chunks)
    EXPECT_EQ(runs_of({1, 2}, {chunks}), (std::vector<SentRun>{{0, 0, chunks}}));
}

TEST(ChunkOrder, EndsWhenALaunchHasFailed) {
  int runs = 0;
  const auto one = [&](std::uint32_t, const ChunkRange&) { return ++runs < 3; };
  EXPECT_FALSE(ChunkOrder({2, 1}).for_each_run([](std::uint32_t) { return 9u; }, one));
  EXPECT_EQ(runs, 3);
  const auto failed = [](std::uint32_t shard) { return shard == 0 ? 9u : 0u; };
  runs = -100;
  EXPECT_FALSE(ChunkOrder({2, 1}).for_each_run(failed, one));
}

// Every node sends in its order, each chunk when it has it: whatever the shards' lengths, all end.
TEST(ChunkOrder, NobodyWaitsInACircle) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 500; ++round) {
    const auto nodes = static_cast<std::uint32_t>(2 + random() % 6);
    const ChunkOrder order{nodes - 1, static_cast<std::uint32_t>(random() % 4)};
    std::vector<std::uint32_t> chunks(nodes);
    for (std::uint32_t& of_node : chunks)
      of_node = static_cast<std::uint32_t>(random() % 3 == 0 ? 1 : 1 + random() % 40);
    const auto origin_of = [&](std::uint32_t node, std::uint32_t shard) {
      return (node + nodes - shard) % nodes;
    };
    std::vector<std::vector<SentRun>> runs(nodes);
    for (std::uint32_t node = 0; node < nodes; ++node) {
      std::vector<std::uint32_t> sent;
      for (std::uint32_t shard = 0; shard < order.shards; ++shard)
        sent.push_back(chunks[origin_of(node, shard)]);
      runs[node] = runs_of(order, sent);
    }
    // By node and origin: chunks that are there, and the node's next run.
    std::vector<std::vector<std::uint32_t>> here(nodes, std::vector<std::uint32_t>(nodes));
    for (std::uint32_t node = 0; node < nodes; ++node) here[node][node] = chunks[node];
    std::vector<std::size_t> next(nodes);
    for (bool any = true; any;) {
      any = false;
      for (std::uint32_t node = 0; node < nodes; ++node) {
        if (next[node] == runs[node].size()) continue;
        const SentRun& run = runs[node][next[node]];
        const std::uint32_t origin = origin_of(node, run.shard);
        if (here[node][origin] < run.end) continue;
        std::uint32_t& there = here[(node + 1) % nodes][origin];
        ASSERT_EQ(there, run.begin);
        there = run.end;
        ++next[node];
        any = true;
      }
    }
    for (const std::vector<std::uint32_t>& of_node : here) ASSERT_EQ(of_node, chunks);
  }
}

TEST(GatherSchedule, RowsAreExpectedInTheStatedOrder) {
  for_every_plan([](const GatherPlan& plan, std::uint64_t) {
    for_every_rank(plan, [&](const GatherSchedule& schedule) {
      const World& world = schedule.world();
      std::set<std::uint32_t> seen;
      for (std::uint32_t position = 0; position < world.size(); ++position) {
        const std::uint32_t origin = schedule.origin_at(position);
        ASSERT_LT(origin, world.size());
        ASSERT_TRUE(seen.insert(origin).second);
        const std::uint32_t hops = position / plan.locals;
        ASSERT_EQ(schedule.hops_at(position), hops);
        ASSERT_EQ(schedule.node_of(origin), (world.node + plan.nodes - hops) % plan.nodes);
        ASSERT_EQ(schedule.rail_of(origin), (world.local + position) % plan.locals);
      }
      ASSERT_EQ(schedule.origin_at(0), world.rank());
    });
  });
}

TEST(GatherSchedule, ChunksTileTheShardAndRowsKnowTheirChunks) {
  for_every_plan([](const GatherPlan& plan, std::uint64_t) {
    const GatherSchedule schedule(plan, {plan.nodes, plan.locals, 0, 0});
    for (std::uint32_t rows : {0u, 1u, plan.rows_max / 2, plan.rows_max}) {
      std::uint64_t next = 0;
      for (std::uint32_t chunk = 0; chunk < schedule.chunks(rows); ++chunk) {
        const ByteRange range = schedule.chunk_range(rows, chunk);
        ASSERT_EQ(range.begin, next);
        ASSERT_EQ(range.begin % 64, 0u);
        ASSERT_GT(range.bytes, 0u);
        ASSERT_LE(range.bytes, std::max(plan.chunk_bytes, 64u));
        next += range.bytes;
        for (std::uint32_t first = 0; first <= chunk; ++first) {
          const ByteRange all = schedule.chunks_range(rows, first, chunk + 1 - first);
          ASSERT_EQ(all.begin, schedule.chunk_range(rows, first).begin);
          ASSERT_EQ(all.begin + all.bytes, next) << "chunks " << first << " to " << chunk;
        }
      }
      ASSERT_EQ(next, 64 + schedule.data_bytes(rows));
      ASSERT_LE(next, plan.layout.slot_bytes);
      ASSERT_LE(schedule.chunks(rows), plan.chunks_max);
      const std::uint32_t step = rows > 100 ? 37 : 1;
      for (std::uint32_t begin = 0; begin <= rows; begin += step) {
        for (std::uint32_t end = begin; end <= rows; end += step) {
          const ChunkRange range = schedule.chunks_of_rows(begin, end);
          for (std::uint32_t chunk = 1; chunk < schedule.chunks(rows); ++chunk) {
            const ByteRange bytes = schedule.chunk_range(rows, chunk);
            const std::uint64_t first = 64 + schedule.data_bytes(begin);
            const std::uint64_t last = 64 + schedule.data_bytes(end);
            const bool overlap = bytes.begin < last && first < bytes.begin + bytes.bytes;
            ASSERT_EQ(overlap && begin < end, chunk >= range.begin && chunk < range.end)
                << "rows [" << begin << ", " << end << ") of " << rows << ", chunk " << chunk;
          }
          ASSERT_LE(range.end, schedule.chunks(rows));
        }
      }
    }
    ASSERT_EQ(schedule.chunks(plan.rows_max), plan.chunks_max);
  });
}

TEST(GatherSchedule, PlacesInTheWorkspaceAreDisjointAndInside) {
  for_every_plan([](const GatherPlan& plan, std::uint64_t workspace_bytes) {
    const std::uint32_t world = plan.nodes * plan.locals;
    testing::Claims claims;
    claims.claim(0, WorkspaceHead{plan.locals}.bytes(), "head");
    if (world > 1) {
      const GatherSchedule schedule(plan, {plan.nodes, plan.locals, 0, 0});
      for (std::uint32_t origin = 0; origin < world; ++origin) {
        for (std::uint32_t chunk = 0; chunk < plan.chunks_max; ++chunk) {
          claims.claim(schedule.ready(origin, chunk), 4, "ready");
        }
        // In a pull, of local rank 0's workspace: its rail only.
        if (plan.kind == GatherKind::kPull && schedule.rail_of(origin) != 0) continue;
        for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
          ASSERT_EQ(schedule.slot(bank, origin) % 64, 0u);
          ASSERT_EQ(schedule.rows_at(bank, origin), schedule.slot(bank, origin) + 64);
          claims.claim(schedule.slot(bank, origin), 64 + schedule.data_bytes(plan.rows_max),
                       "slot");
        }
      }
      for (std::uint32_t local = 0; local < plan.locals; ++local) {
        if (plan.kind == GatherKind::kPull && plan.nodes > 1)
          claims.claim(schedule.drained(local), 4, "drained");
        if (plan.kind == GatherKind::kPull && plan.nodes > 1)
          claims.claim(schedule.sent(local), 4, "sent");
      }
    }
    EXPECT_LE(claims.end(), workspace_bytes);
  });
}

// All ranks agree where a shard lies at its receiver, or a command would write somewhere else.
TEST(GatherSchedule, PlacesAreTheSameAsEveryRankSeesThem) {
  for_every_plan([](const GatherPlan& plan, std::uint64_t) {
    const GatherSchedule first(plan, {plan.nodes, plan.locals, 0, 0});
    for_every_rank(plan, [&](const GatherSchedule& schedule) {
      for (std::uint32_t origin = 0; origin < schedule.world().size(); ++origin) {
        for (std::uint32_t bank = 0; bank < plan.banks; ++bank)
          ASSERT_EQ(schedule.slot(bank, origin), first.slot(bank, origin));
        ASSERT_EQ(schedule.ready(origin, 0), first.ready(origin, 0));
      }
    });
  });
}

// With one local bank, rows of the own node's ranks are at one place in all launches. Those of
// other nodes are in two, where their senders know them to be, and none where others are.
TEST(GatherSchedule, RowsOfTheOwnNodeMayHaveOneBankAndThoseOfOthersTwo) {
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals) {
      SCOPED_TRACE(fmt::format("{} x {}", nodes, locals));
      const auto plan_of = [&](std::uint32_t local_banks) {
        return GatherPlan::make("test", nodes, locals, {10, 48}, GatherKind::kBroadcast, 64, 2,
                                local_banks);
      };
      auto plan = plan_of(1);
      ASSERT_TRUE(plan) << plan.error().message;
      EXPECT_NE(plan->fingerprint(), plan_of(2)->fingerprint()) << "ranks are to agree";
      EXPECT_EQ(plan->banks, nodes == 1 ? 1u : 2u) << "one node has only such rows";
      WorkspaceLayout workspace(locals);
      plan->place(workspace, 0);
      workspace.begin_data();
      plan->place_rows(workspace);
      for_every_rank(*plan, [&](const GatherSchedule& schedule) {
        testing::Claims claims;
        for (std::uint32_t origin = 0; origin < nodes * locals; ++origin) {
          const bool own = schedule.node_of(origin) == schedule.world().node;
          ASSERT_EQ(schedule.slot(0, origin) == schedule.slot(1, origin), own);
          for (std::uint32_t bank = 0; bank < (own ? 1u : 2u); ++bank) {
            claims.claim(schedule.slot(bank, origin), 64 + 480, "slot");
            ASSERT_EQ(
                schedule.slot(bank, origin),
                plan->layout.slots + schedule.slot_index(bank, origin) * plan->layout.slot_bytes);
            if (!own) {
              ASSERT_EQ(schedule.slot(bank, origin), schedule.slot_elsewhere(bank, origin));
            }
          }
        }
        if (nodes * locals > 1) {
          ASSERT_LE(claims.end(), workspace.parts().bytes());
        }
      });
    }
  }
}

TEST(GatherSchedule, FlagsAreDisjointHaveOneWriterAndStayInTheirRange) {
  for_every_plan([](const GatherPlan& plan, std::uint64_t) {
    if (plan.nodes == 1) {
      EXPECT_EQ(plan.flag_count(), 0u);
      return;
    }
    EXPECT_EQ(plan.flag_count() % shm::kFlagGranule, 0u);
    // Who writes which flag of whom, gathered from what all ranks would send.
    std::map<std::tuple<std::uint32_t, std::uint32_t>, std::uint32_t> writer;
    std::map<std::tuple<std::uint32_t, std::uint32_t>, std::uint32_t> granule_use;
    for_every_rank(plan, [&](const GatherSchedule& schedule) {
      const World& world = schedule.world();
      const auto write = [&](std::uint32_t node, std::uint32_t flag, std::uint32_t use) {
        ASSERT_GE(flag, 128u);
        ASSERT_LT(flag, 128 + plan.flag_count());
        const std::uint32_t at = world.rail_peer(node);
        ASSERT_TRUE(writer.emplace(std::tuple{at, flag}, world.rank()).second) << "two meanings";
        const auto granule = std::tuple{at, flag / shm::kFlagGranule};
        ASSERT_EQ(granule_use.emplace(granule, use).first->second, use)
            << "epochs of one granule go together only within one bank and shard";
      };
      for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
        for (std::uint32_t hops = 0; hops < schedule.shards_sent(); ++hops) {
          for (std::uint32_t chunk = 0; chunk < plan.chunks_max; ++chunk) {
            const std::uint32_t origin = schedule.node_at(hops);
            write(schedule.successor(), schedule.arrival(bank, schedule.successor(), origin, chunk),
                  bank * plan.nodes + origin);
          }
        }
      }
      if (plan.banks == 1)
        write(schedule.predecessor(), schedule.release(schedule.predecessor()), 1000);
    });
  });
}

// What a GPU stores over NVLink goes in lines of 128 bytes; a row amid one costs two.
TEST(GatherSchedule, RowsBeginAtALineOfTheGpu) {
  for_every_plan([](const GatherPlan& plan, std::uint64_t) {
    for_every_rank(plan, [&](const GatherSchedule& schedule) {
      for (std::uint32_t bank = 0; bank < plan.banks; ++bank) {
        for (std::uint32_t origin = 0; origin < plan.nodes * plan.locals; ++origin)
          ASSERT_EQ(schedule.rows_at(bank, origin) % 128, 0u);
      }
    });
  });
}

TEST(GatherPlan, ChunksAre128RowsWithinBounds) {
  const auto chunk = [](std::uint32_t rows, std::uint32_t row_bytes, std::uint32_t asked = 0) {
    auto plan = GatherPlan::make("test", 2, 2, {rows, row_bytes}, GatherKind::kBroadcast, asked, 0);
    EXPECT_TRUE(plan) << plan.error().message;
    return plan ? plan->chunk_bytes : 0;
  };
  EXPECT_EQ(chunk(1024, 2048), 128u * 2048);
  EXPECT_EQ(chunk(1024, 64), 32u * 1024) << "small rows: 32 KiB at the least";
  EXPECT_EQ(chunk(4096, 1u << 20), 4u << 20) << "large ones: 4 MiB at the most";
  EXPECT_EQ(chunk(256, 2048), 64u * 2048) << "few rows: four chunks";
  EXPECT_EQ(chunk(1024, 2048, 100), 2048u) << "as asked, in whole lines, doubled for the flags";
}

TEST(GatherPlan, ManyChunksBecomeLargerOnes) {
  for (std::uint32_t nodes : {1u, 2u, 4u, 128u}) {
    const auto plan =
        GatherPlan::make("test", nodes, 8, {1u << 20, 256}, GatherKind::kBroadcast, 64, 0);
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_LE(plan->chunks_max, kGatherChunksMax);
    if (nodes <= 4) {
      EXPECT_LE(plan->flag_count(), kOperatorFlagsMax + shm::kFlagGranule);
    }
    EXPECT_LE(plan->flag_count(), shm::kFlagsMax);
  }
}

TEST(GatherPlan, RefusesWhatItCannotDoAndSaysWhatIsAllowed) {
  const auto refused = [](const Result<GatherPlan>& plan, std::string_view part,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, code);
    EXPECT_NE(plan.error().message.find(part), std::string::npos) << plan.error().message;
  };
  constexpr auto kKind = GatherKind::kBroadcast;
  refused(GatherPlan::make("op", 0, 1, {4, 4}, kKind, 0, 0), "op: a world of 0 nodes");
  refused(GatherPlan::make("op", 1, 1, {0, 4}, kKind, 0, 0), "0 rows of one rank");
  refused(GatherPlan::make("op", 1, 1, {4, 0}, kKind, 0, 0), "rows of 0 bytes");
  refused(GatherPlan::make("op", 1, 1, {4, (1u << 26) + 1}, kKind, 0, 0), "1 to 67108864 can");
  refused(GatherPlan::make("op", 1, 1, {4, 4}, kKind, 1u << 30, 0), "too large");
  refused(GatherPlan::make("op", 1, 1, {4, 4}, kKind, 0, 3), "3 banks");
  refused(GatherPlan::make("op", 2, 1, {1025, 1u << 26}, kKind, 0, 0), "at most 68719476736",
          ErrorCode::kLimitExceeded);
  refused(GatherPlan::make("op", 128, 1, {1024, 1u << 26}, kKind, 0, 0), "need chunks of",
          ErrorCode::kLimitExceeded);
}

TEST(GatherPlan, TheFingerprintTellsPlansApart) {
  std::set<std::uint64_t> seen;
  for (GatherKind kind : {GatherKind::kBroadcast, GatherKind::kPull}) {
    for (const Case& one : {Case{{512, 64}, 0, 0},
                            {{513, 64}, 0, 0},
                            {{512, 65}, 0, 0},
                            {{512, 64}, 64, 0},
                            {{512, 64}, 0, 1}}) {
      auto plan = GatherPlan::make("test", 2, 4, one.shape, kind, one.chunk_bytes, one.banks);
      ASSERT_TRUE(plan);
      WorkspaceLayout workspace(4);
      plan->place(workspace, 0);
      workspace.begin_data();
      plan->place_rows(workspace);
      EXPECT_TRUE(seen.insert(plan->fingerprint()).second);
    }
  }
}

}  // namespace
}  // namespace mk::kernels
