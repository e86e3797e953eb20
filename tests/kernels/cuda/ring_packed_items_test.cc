// A rank's items of packed sequences on a GPU, and the runs of keys that they meet, against the
// definition of the parts. The tables are made here as packed_tables.cuh makes them on a GPU.
#include "kernels/ops/ring/packed_items.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/ops/ring/packed.h"
#include "kernels/ops/ring/spec.h"

namespace mk::kernels::cuda {
namespace {

constexpr std::uint32_t kTileRows = 8;
constexpr std::uint32_t kHeads = 6;
constexpr std::uint32_t kKeyHeads = 3;

/// A row's sequence and its place there.
using Place = std::pair<std::uint32_t, std::uint32_t>;

/// The rows of a rank, one after the other, by the definition of the parts.
std::vector<Place> places_of(const RingAttentionPlan& plan, std::uint32_t rank,
                             const std::vector<std::uint32_t>& lengths) {
  const std::uint32_t parts = plan.parts();
  std::vector<Place> places;
  for (std::uint32_t s = 0; s < lengths.size(); ++s) {
    for (const std::uint32_t part : {rank, parts - 1 - rank}) {
      for (std::uint32_t i = lengths[s] * part / parts; i < lengths[s] * (part + 1) / parts; ++i)
        places.emplace_back(s, i);
      if (!plan.causal) break;
    }
  }
  return places;
}

/// A launch's tables, with its tiles in any order.
struct Tables {
  Tables(const RingAttentionPlan& plan, const World& world,
         const std::vector<std::uint32_t>& lengths, std::mt19937_64& random) {
    std::vector<std::uint32_t> starts{0};
    for (const std::uint32_t length : lengths) starts.push_back(starts.back() + length);
    packed = PackedTables(plan, world, starts);
    const PackedSequences sequences = packed.view();
    const Divisor parts(plan.parts());
    for (std::uint32_t s = 0; s < lengths.size(); ++s) {
      const PackedParts cut(lengths[s], parts, plan.causal);
      const std::uint32_t first = sequences.first_rows[world.rank() * sequences.count + s];
      for (std::uint32_t t = 0; t < cut.tiles(world.rank(), kTileRows); ++t) {
        tiles.push_back(cut.tile(world.rank(), kTileRows, t, first));
        tiles.back().sequence = s;
      }
    }
    std::shuffle(tiles.begin(), tiles.end(), random);
    totals.tiles = static_cast<std::uint32_t>(tiles.size());
    items = {&totals, tiles.data(), static_cast<int>(kHeads), 1 + static_cast<int>(random() % 5)};
    ranges = packed_ranges(plan, world);
    ranges.sequences = sequences;
    ranges.tiles = tiles.data();
  }
  PackedTables packed;
  PackedTotals totals;
  std::vector<PackedTile> tiles;
  PackedItems::Params items;
  PackedRanges::Params ranges;
};

template <class Check>
void for_many_launches(Check&& check) {
  std::mt19937_64 random(5);
  for (std::uint32_t round = 0; round < 200; ++round) {
    const auto nodes = static_cast<std::uint32_t>(1 + random() % 3);
    const auto locals = static_cast<std::uint32_t>(1 + random() % 4);
    RingAttentionShape shape{300, kHeads, kKeyHeads, 64, random() % 2 == 0};
    shape.sequences_max = 7;
    RingAttentionTiling tiling;
    tiling.packing = KeyPacking::kHeads;
    const auto plan = RingAttentionPlan::make(nodes, locals, shape, tiling);
    ASSERT_TRUE(plan) << plan.error().message;
    std::vector<std::uint32_t> lengths(1 + random() % 7);
    for (std::uint32_t& length : lengths)
      length = static_cast<std::uint32_t>(random() % (random() % 3 == 0 ? 40 : 4));
    for (std::uint32_t rank = 0; rank < nodes * locals; ++rank) {
      SCOPED_TRACE(fmt::format("{} x {}, causal {}, rank {}, {}", nodes, locals, shape.causal, rank,
                               ::testing::PrintToString(lengths)));
      const World world{nodes, locals, rank / locals, rank % locals};
      Tables tables(*plan, world, lengths, random);
      check(*plan, world, lengths, tables);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(PackedItems, EveryRowOfEveryHeadIsInOneItemAndHeadsComeInTheirOrder) {
  for_many_launches([](const RingAttentionPlan& plan, const World& world,
                       const std::vector<std::uint32_t>& lengths, const Tables& tables) {
    const PackedItems items(tables.items);
    const auto own = places_of(plan, world.rank(), lengths);
    std::set<std::tuple<int, int>> rows;
    int last_section = 0;
    for (int i = 0; i < items.count(); ++i) {
      const AttentionItem item = items.at(i);
      ASSERT_EQ(item.q_row, item.first_row);
      ASSERT_LT(item.first_row, item.rows_end);
      ASSERT_LE(item.rows_end, static_cast<int>(own.size()));
      const int end = std::min(item.first_row + static_cast<int>(kTileRows), item.rows_end);
      for (int row = item.first_row; row < end; ++row)
        ASSERT_TRUE(rows.insert({item.head, row}).second);
      ASSERT_GE(item.head / tables.items.section, last_section);
      last_section = item.head / tables.items.section;
    }
    ASSERT_EQ(rows.size(), kHeads * own.size());
  });
}

TEST(PackedRanges, EveryAdmittedPairIsMetOnceWhereItsBytesAre) {
  for_many_launches([](const RingAttentionPlan& plan, const World& world,
                       const std::vector<std::uint32_t>& lengths, const Tables& tables) {
    const PackedItems items(tables.items);
    const PackedRanges ranges(tables.ranges);
    const auto own = places_of(plan, world.rank(), lengths);
    for (int i = 0; i < items.count(); ++i) {
      const AttentionItem item = items.at(i);
      const int row = item.first_row;  // one of each item
      const auto [sequence, position] = own[static_cast<std::size_t>(row)];
      std::vector<int> met(lengths[sequence], 0);
      ASSERT_EQ(ranges.ranges(item), ranges.count());
      for (int r = 0; r < ranges.count(); ++r) {
        const KeyRange range = ranges.range(item, r, 1);
        const auto places = places_of(plan, ranges.origin(r), lengths);
        const auto rows = static_cast<int>(places.size());
        const int head = item.head / static_cast<int>(kHeads / kKeyHeads);
        const bool its_own = ranges.origin(r) == world.rank();
        ASSERT_EQ(ranges.own(range), its_own);
        const int first = range.first_key - (its_own ? 0 : 2 * head * rows);
        ASSERT_EQ(ranges.first_value(range) - range.first_key, its_own ? 0 : rows);
        ASSERT_EQ(ranges.rows(r, 3), its_own ? 0 : 2 * 3 * rows);
        const GatherSchedule gather(plan.gather, world);
        if (its_own) {
          ASSERT_EQ(range.head, head);
        } else {
          ASSERT_EQ(static_cast<std::uint32_t>(range.head),
                    gather.slot_index(plan.banks > 1 ? 1 : 0, ranges.origin(r)));
        }
        for (int key = 0; key < range.length; ++key) {
          const auto [its_sequence, its_position] =
              places.at(static_cast<std::size_t>(first + key));
          ASSERT_EQ(its_sequence, sequence);
          if (key < range.visible_to(row)) ++met[its_position];
        }
      }
      for (std::uint32_t key = 0; key < lengths[sequence]; ++key)
        ASSERT_EQ(met[key], !plan.causal || key <= position ? 1 : 0) << "key " << key;
    }
  });
}

}  // namespace
}  // namespace mk::kernels::cuda
