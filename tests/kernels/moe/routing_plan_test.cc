// The routing plan against its definition: every (token, slot) whose expert lives here stands in
// the output once, where the stated order puts it. Tiles cover the rows and come in the stated
// order.
#include "kernels/ops/moe/routing_plan.h"

#include <fmt/format.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/kernels/moe/routing_cases.h"

namespace mk::kernels::testing {
namespace {

/// A plan with memory of its own, of exactly the size it asks for (so that sanitizers see more).
struct PlanOnHeap {
  explicit PlanOnHeap(const RoutingShape& shape)
      : counts(shape.count_words(), 0xdeadbeef),
        places(shape.place_words(), 0xdeadbeef),
        offsets(shape.experts_here_max() + 1, 0xdeadbeef),
        tiles(shape.tiles_max()),
        rows(shape.rows_max, MoeRow{0xdead, 0xdead, 0xdead, -1}),
        plan(shape,
             {counts.data(), places.data(), offsets.data(), tiles.data(), rows.data(), &summary}) {}
  PlanOnHeap(const PlanOnHeap&) = delete;
  PlanOnHeap& operator=(const PlanOnHeap&) = delete;

  /// Parts in random order, as blocks that run side by side do them.
  void make(const std::vector<RankRouting>& routing, std::uint32_t capacity,
            std::mt19937_64& random) {
    std::vector<std::uint32_t> parts(plan.shape().parts());
    std::iota(parts.begin(), parts.end(), 0u);
    const auto table = [&](std::uint32_t part) {
      return routing[plan.rank_of(part)].table(plan.shape().top_k);
    };
    std::shuffle(parts.begin(), parts.end(), random);
    for (std::uint32_t part : parts) plan.count(part, table(part));
    plan.arrange(capacity);
    if (plan.summary().fits == 0) return;
    std::shuffle(parts.begin(), parts.end(), random);
    for (std::uint32_t part : parts) plan.fill(part, table(part));
  }

  std::vector<std::uint32_t> counts;
  std::vector<std::uint32_t> places;
  std::vector<std::uint32_t> offsets;
  std::vector<RowTile> tiles;
  std::vector<MoeRow> rows;
  PlanSummary summary;
  RoutingPlan plan;
};

/// Where a rank stands in the order of arrival, from the words of routing_plan.h and
/// gather/README.md.
std::uint32_t arrival_of(const World& world, std::uint32_t rank) {
  const std::uint32_t node = rank / world.locals;
  const std::uint32_t local = rank % world.locals;
  const std::uint32_t hops =
      node <= world.node ? world.node - node : world.node + world.nodes - node;
  const std::uint32_t turn =
      local >= world.local ? local - world.local : local + world.locals - world.local;
  return hops * world.locals + turn;
}

/// An output row as the definition has it; compares in the order of the output.
struct Expected {
  std::uint32_t expert;
  std::uint32_t hops;
  std::uint32_t arrival;
  MoeRow row;
  /// The sources of a node come side by side, 256 tokens of each at a time.
  auto key() const {
    return std::tuple(expert, hops, row.token / 256, arrival, row.token, row.slot);
  }
};

std::vector<Expected> expected_rows(const RoutingShape& shape,
                                    const std::vector<RankRouting>& routing) {
  const ShardRange here = shard_of(shape.experts, shape.world.size(), shape.world.rank());
  std::vector<Expected> all;
  for (std::uint32_t rank = 0; rank < routing.size(); ++rank) {
    for (std::uint32_t token = 0; token < routing[rank].tokens; ++token) {
      for (std::uint32_t slot = 0; slot < shape.top_k; ++slot) {
        const std::size_t at = std::size_t{token} * shape.top_k + slot;
        const std::int64_t id = routing[rank].ids[at];
        if (id < here.first || id >= std::int64_t{here.first} + here.count) continue;
        const std::uint32_t arrival = arrival_of(shape.world, rank);
        all.push_back({static_cast<std::uint32_t>(id) - here.first, arrival / shape.world.locals,
                       arrival, MoeRow{rank, token, slot, routing[rank].weights[at]}});
      }
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Expected& a, const Expected& b) { return a.key() < b.key(); });
  return all;
}

void check_rows(const RoutingPlan& plan, const std::vector<Expected>& expected) {
  ASSERT_EQ(plan.summary().rows, expected.size());
  for (std::uint32_t row = 0; row < expected.size(); ++row) {
    ASSERT_EQ(plan.rows()[row], expected[row].row) << "row " << row;
  }
  for (std::uint32_t e = 0; e <= plan.experts().count; ++e) {
    const auto first = std::find_if(expected.begin(), expected.end(),
                                    [&](const Expected& row) { return row.expert >= e; });
    ASSERT_EQ(plan.offsets()[e], first - expected.begin()) << "expert " << e;
  }
}

void check_tiles(const RoutingPlan& plan, const std::vector<Expected>& expected) {
  const RoutingShape& shape = plan.shape();
  const auto hops = [](const Expected& row) { return row.hops; };
  ASSERT_LE(plan.summary().tiles, shape.tiles_max());
  std::vector<int> covered(expected.size(), 0);
  std::vector<int> packed(shape.packed_rows_max(), 0);
  std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t> before{};
  // Which sixteenth of the most tokens a rank may have, counted in parts of 256, a row's token is
  // in.
  const auto step = [&](const Expected& row) {
    const std::uint32_t parts = (shape.tokens_max + 255) / 256;
    return row.row.token / 256 * 16 / parts;
  };
  for (std::uint32_t i = 0; i < plan.summary().tiles; ++i) {
    const RowTile& tile = plan.tiles()[i];
    ASSERT_GE(tile.rows, 1u);
    ASSERT_LE(tile.rows, shape.tile_m);
    // A tile is full, or has its expert's last rows, or ends where rows from farther away begin, at
    // the first such place that leaves it at least half full.
    const auto border = [&](std::uint32_t row) {
      return hops(expected[row]) > hops(expected[row - 1]);
    };
    if (tile.row + tile.rows < plan.offsets()[tile.expert + 1] && tile.rows < shape.tile_m) {
      ASSERT_GE(tile.rows, shape.tile_m / 2);
      ASSERT_TRUE(border(tile.row + tile.rows));
    }
    for (std::uint32_t rows = shape.tile_m / 2; rows < tile.rows; ++rows)
      ASSERT_FALSE(border(tile.row + rows)) << "tile " << i << " goes on after row " << rows;
    std::uint32_t latest = 0;
    for (std::uint32_t row = tile.row; row < tile.row + tile.rows; ++row) {
      ++covered[row];
      ASSERT_EQ(expected[row].expert, tile.expert);
      latest = std::max(latest, hops(expected[row]));
    }
    ASSERT_EQ(tile.hops, latest);
    std::uint32_t last_step = 0;
    for (std::uint32_t row = tile.row; row < tile.row + tile.rows; ++row) {
      if (hops(expected[row]) == latest) last_step = std::max(last_step, step(expected[row]));
    }
    ASSERT_EQ(tile.step, last_step);
    const std::tuple now{tile.hops, tile.step, tile.expert, tile.row};
    if (i > 0) {
      ASSERT_LT(before, now) << "tile " << i;
    }
    before = now;
    ASSERT_EQ(tile.packed_row % shape.row_pad, 0u);
    ASSERT_EQ(plan.packed_rows(tile) % shape.row_pad, 0u);
    ASSERT_GE(plan.packed_rows(tile), tile.rows);
    ASSERT_LT(plan.packed_rows(tile), tile.rows + shape.row_pad);
    for (std::uint32_t row = 0; row < plan.packed_rows(tile); ++row) {
      ASSERT_LT(tile.packed_row + row, packed.size());
      ASSERT_EQ(packed[tile.packed_row + row]++, 0) << "packed tiles overlap";
    }
  }
  for (int count : covered) ASSERT_EQ(count, 1);
}

struct Case {
  std::uint32_t experts;
  std::uint32_t top_k;
  std::uint32_t tokens_max;
  std::uint32_t tile_m;
};

/// E divides by W and does not, E < W, one expert; k from 1 to E; tokens within a part, at its
/// limit and beyond.
constexpr Case kCases[] = {{1, 1, 9, 8},    {3, 2, 7, 8},     {7, 7, 5, 8},
                           {8, 8, 11, 16},  {12, 10, 20, 8},  {40, 4, 70, 16},
                           {5, 1, 512, 64}, {64, 2, 513, 64}, {16, 3, 1100, 128}};

class EveryWorld : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(EveryWorld, EveryRowIsWhereTheDefinitionPutsIt) {
  const std::uint32_t nodes = GetParam();
  std::uint32_t checked = 0;
  for (std::uint32_t locals = 1; locals <= 8; ++locals) {
    std::mt19937_64 random(nodes * 100 + locals);
    for (const Case& one : kCases) {
      const Skew skew = kSkews[(checked + locals) % std::size(kSkews)];
      const bool uneven = checked % 3 != 0;
      const std::uint32_t ranks = nodes * locals;
      const auto routing =
          draw_routing(ranks, one.experts, one.top_k, one.tokens_max, skew, uneven, random);
      std::uint64_t rows_of_all = 0;
      for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(fmt::format("{} x {}, rank {}, E {}, k {}, T {}, skew {}", nodes, locals, rank,
                                 one.experts, one.top_k, one.tokens_max, static_cast<int>(skew)));
        RoutingShape shape;
        shape.world = {nodes, locals, rank / locals, rank % locals};
        shape.experts = one.experts;
        shape.top_k = one.top_k;
        shape.tokens_max = one.tokens_max;
        shape.tile_m = one.tile_m;
        shape.row_pad = 8;
        const auto expected = expected_rows(shape, routing);
        shape.rows_max = static_cast<std::uint32_t>(expected.size());  // just enough
        PlanOnHeap heap(shape);
        heap.make(routing, shape.rows_max, random);
        ASSERT_EQ(heap.plan.summary().fits, 1u);
        check_rows(heap.plan, expected);
        check_tiles(heap.plan, expected);
        if (HasFatalFailure()) return;
        rows_of_all += expected.size();
      }
      std::uint64_t sent = 0;
      for (const RankRouting& rank : routing)
        sent += static_cast<std::uint64_t>(std::count_if(rank.ids.begin(), rank.ids.end(),
                                                         [](std::int32_t id) { return id >= 0; }));
      ASSERT_EQ(rows_of_all, sent) << "each row has one home";
      ++checked;
    }
  }
  EXPECT_EQ(checked, 8 * std::size(kCases));
}
INSTANTIATE_TEST_SUITE_P(Nodes, EveryWorld, ::testing::Values(1u, 2u, 3u, 4u));

// All routings of a small job, not a sample of them: 2 x 1 ranks, 3 experts, k = 2, each rank with
// 0 or 1 tokens or 2.
TEST(RoutingPlan, EveryRoutingOfASmallJob) {
  const std::uint32_t experts = 3;
  const std::uint32_t choices = 4;  // -1, 0, 1, 2
  std::mt19937_64 random(1);
  std::uint32_t checked = 0;
  for (std::uint32_t tokens0 = 0; tokens0 <= 2; ++tokens0) {
    for (std::uint32_t tokens1 = 0; tokens1 <= 1; ++tokens1) {
      const std::uint32_t slots = 2 * (tokens0 + tokens1);
      const auto all = static_cast<std::uint32_t>(1u << (2 * slots));
      for (std::uint32_t code = 0; code < all; ++code) {
        std::vector<RankRouting> routing(2);
        routing[0].tokens = tokens0;
        routing[1].tokens = tokens1;
        for (std::uint32_t i = 0; i < slots; ++i) {
          RankRouting& rank = routing[i < 2 * tokens0 ? 0 : 1];
          rank.ids.push_back(static_cast<std::int32_t>(code >> (2 * i) & (choices - 1)) - 1);
          rank.weights.push_back(static_cast<float>(i));
        }
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
          RoutingShape shape{{2, 1, rank, 0}, experts, 2, 2, 0, 8, 8};
          const auto expected = expected_rows(shape, routing);
          shape.rows_max = static_cast<std::uint32_t>(expected.size());
          PlanOnHeap heap(shape);
          heap.make(routing, shape.rows_max, random);
          check_rows(heap.plan, expected);
          check_tiles(heap.plan, expected);
          if (HasFatalFailure()) return;
          ++checked;
        }
      }
    }
  }
  EXPECT_EQ(checked, 2u * (1 + 16 + 16 + 256 + 256 + 4096));
}

TEST(RoutingPlan, MoreRowsThanFitAreCountedAndNothingElse) {
  std::mt19937_64 random(2);
  const auto routing = draw_routing(2, 2, 1, 20, Skew::kOneExpert, false, random);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    RoutingShape shape{{1, 2, 0, rank}, 2, 1, 20, 39, 8, 8};
    PlanOnHeap heap(shape);
    heap.make(routing, 39, random);
    const bool has_it = expected_rows(shape, routing).size() == 40;
    EXPECT_EQ(heap.plan.summary().fits, has_it ? 0u : 1u);
    EXPECT_EQ(heap.plan.summary().rows, has_it ? 40u : 0u);
    EXPECT_EQ(heap.plan.summary().tiles, 0u);
    for (const MoeRow& row : heap.rows) EXPECT_EQ(row.weight, -1);
  }
}

/// Threads that make the pieces of a plan together.
class Threads {
 public:
  /// Their scratch is for four experts at a time.
  explicit Threads(std::uint32_t count) : count_(count), scratch_(4 * (count + 1)) {}

  /// One of them.
  struct Lane {
    Threads& all;
    std::uint32_t index;
    std::uint32_t count;
    std::uint32_t* scratch;
    std::uint32_t scratch_words;
    void sync() const {
      const std::uint32_t turn = all.turn_;
      if (++all.here_ == count) {
        all.here_ = 0;
        ++all.turn_;
      }
      while (all.turn_ == turn) std::this_thread::yield();
    }
    void least(std::uint32_t* word, std::uint32_t value) const {
      std::atomic_ref<std::uint32_t> least(*word);
      std::uint32_t seen = least.load();
      while (value < seen && !least.compare_exchange_weak(seen, value)) {
      }
    }
  };
  template <class Piece>
  void run(Piece&& piece) {
    std::vector<std::thread> threads;
    const auto words = static_cast<std::uint32_t>(scratch_.size());
    for (std::uint32_t i = 0; i < count_; ++i)
      threads.emplace_back([&, i] { piece(Lane{*this, i, count_, scratch_.data(), words}); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const std::uint32_t count_;
  std::vector<std::uint32_t> scratch_;
  std::atomic<std::uint32_t> here_{0};
  std::atomic<std::uint32_t> turn_{0};
};

// However many lanes make a plan, they make the same one.
TEST(RoutingPlan, LanesMakeWhatOneMakes) {
  std::mt19937_64 random(7);
  for (const std::uint32_t lanes : {2u, 5u, 96u}) {
    const RoutingShape shape{{2, 2, 1, 0}, 23, 3, 600, 4 * 600 * 3, 16, 8};
    const auto routing = draw_routing(4, 23, 3, 600, Skew::kUniform, true, random);
    PlanOnHeap one(shape);
    one.make(routing, shape.rows_max, random);
    PlanOnHeap many(shape);
    Threads threads(lanes);
    const auto for_parts = [&](auto&& piece) {
      for (std::uint32_t part = 0; part < shape.parts(); ++part) {
        const RoutingTable table = routing[many.plan.rank_of(part)].table(shape.top_k);
        threads.run([&](const Threads::Lane& lane) { piece(part, table, lane); });
      }
    };
    for_parts([&](std::uint32_t part, const RoutingTable& table, const Threads::Lane& lane) {
      many.plan.count(part, table, lane);
    });
    threads.run([&](const Threads::Lane& lane) { many.plan.arrange(shape.rows_max, lane); });
    ASSERT_EQ(many.summary.fits, 1u);
    for_parts([&](std::uint32_t part, const RoutingTable& table, const Threads::Lane& lane) {
      many.plan.fill(part, table, lane);
    });
    ASSERT_EQ(many.summary.tiles, one.summary.tiles);
    EXPECT_EQ(many.rows, one.rows);
    for (std::uint32_t e = 0; e <= one.plan.experts().count; ++e)
      EXPECT_EQ(many.offsets[e], one.offsets[e]);
    check_tiles(many.plan, expected_rows(shape, routing));
    if (HasFatalFailure()) return;
  }
}

// A table that makes no sense is named by every rank, at the place where it comes first; nothing is
// stored.
TEST(RoutingPlan, AFaultIsNamedByEveryRank) {
  std::mt19937_64 random(8);
  for (int turn = 0; turn < 60; ++turn) {
    auto routing = draw_routing(4, 6, 2, 700, Skew::kSparse, false, random);
    const auto rank = static_cast<std::uint32_t>(random() % 4);
    const auto token = static_cast<std::uint32_t>(random() % 700);
    const auto slot = static_cast<std::uint32_t>(random() % 2);
    const std::size_t at = std::size_t{token} * 2 + slot;
    constexpr std::int32_t kIds[] = {6, -2, std::numeric_limits<std::int32_t>::max(),
                                     std::numeric_limits<std::int32_t>::min(), 3};
    const std::int32_t id = kIds[turn % 5];
    routing[rank].ids[at] = id;
    if (id == 3) routing[rank].weights[at] = std::nanf("");
    // A later one of the same table is not the first; where nothing goes, the weight is nobody's.
    if (token + 300 < 700) routing[rank].ids[at + 600] = 77;
    if (token > 0 && routing[rank].ids[at - 2] == -1) routing[rank].weights[at - 2] = std::nanf("");
    for (std::uint32_t of = 0; of < 4; ++of) {
      const RoutingShape shape{{2, 2, of / 2, of % 2}, 6, 2, 700, 4 * 700 * 2, 8, 8};
      PlanOnHeap heap(shape);
      heap.make(routing, shape.rows_max, random);
      ASSERT_TRUE(heap.summary.fault.any()) << "id " << id;
      heap.plan.complete_fault(routing[heap.summary.fault.rank].table(2));
      EXPECT_EQ(heap.summary.fault, (RoutingFault{rank, token, slot, id}));
      EXPECT_EQ(heap.summary.fits, 0u);
      EXPECT_EQ(heap.summary.tiles, 0u);
      // A combine behind it sees that there are no rows.
      EXPECT_EQ(heap.plan.offsets()[heap.plan.experts().count], RoutingPlan::kNoRows);
      for (const MoeRow& row : heap.rows) ASSERT_EQ(row.weight, -1);
    }
  }
}

// The check itself must be able to fail: two rows swapped, two tiles swapped.
TEST(RoutingPlan, ASwapIsSeen) {
  // Static: gtest wants it so.
  static std::mt19937_64 random(3);
  static const auto routing = draw_routing(4, 4, 2, 30, Skew::kUniform, false, random);
  static const RoutingShape shape{{2, 2, 0, 1}, 4, 2, 30, 240, 8, 8};
  static PlanOnHeap heap(shape);
  heap.make(routing, 240, random);
  static const auto expected = expected_rows(shape, routing);
  ASSERT_GT(heap.plan.summary().tiles, 3u);
  check_rows(heap.plan, expected);
  check_tiles(heap.plan, expected);
  std::swap(heap.rows[3], heap.rows[4]);
  EXPECT_FATAL_FAILURE(check_rows(heap.plan, expected), "row 3");
  std::swap(heap.tiles[1], heap.tiles[2]);
  EXPECT_FATAL_FAILURE(check_tiles(heap.plan, expected), "tile 2");
}

}  // namespace
}  // namespace mk::kernels::testing
