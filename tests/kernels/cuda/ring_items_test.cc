// A rank's items of Ring Attention on a GPU, and the runs of keys that they meet, against the
// definition of the parts.
#include "kernels/ops/ring/items.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/ops/ring/spec.h"

namespace mk::kernels::cuda {
namespace {

constexpr int kTile = 8;

/// Rows of the sequence that the rank has, by the definition of the parts.
std::vector<int> positions_of(const RingAttentionPlan& plan, std::uint32_t rank, int seq) {
  const auto parts = static_cast<int>(plan.parts());
  const auto number = static_cast<int>(rank);
  std::vector<int> positions;
  for (const int part : {number, parts - 1 - number}) {
    for (int i = seq * part / parts; i < seq * (part + 1) / parts; ++i) positions.push_back(i);
    if (!plan.causal) break;
  }
  return positions;
}

struct Launch {
  RingAttentionPlan plan;
  World world;
  int seq;
  RingLaunchItems made;
};

/// 6:3 heads, and on one node 8:4, of which some are together for copy engines.
template <class Check>
void for_every_launch(Check&& check) {
  std::uint32_t checked = 0;
  const auto check_all = [&](std::uint32_t nodes, std::uint32_t locals,
                             const RingAttentionShape& shape, const RingAttentionTiling& tiling) {
    const auto plan = RingAttentionPlan::make(nodes, locals, shape, tiling);
    ASSERT_TRUE(plan) << plan.error().message;
    for (const std::uint32_t seq : {plan->parts(), 101u, 300u}) {
      for (std::uint32_t rank = 0; rank < nodes * locals; ++rank) {
        SCOPED_TRACE(fmt::format("{} x {}, causal {}, {} rows, rank {}, {} together", nodes, locals,
                                 shape.causal, seq, rank, tiling.heads_together));
        const World world{nodes, locals, rank / locals, rank % locals};
        const RingAttentionSchedule schedule(*plan, world, seq, Mode::kFused);
        const int section = 1 + static_cast<int>(seq + rank) % 5;
        check(Launch{*plan, world, static_cast<int>(seq),
                     ring_items(*plan, world, schedule, kTile, section, 2 * section * kTile)});
        if (::testing::Test::HasFailure()) return;
        ++checked;
      }
    }
  };
  for (std::uint32_t nodes = 1; nodes <= 3; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 4; ++locals) {
      for (const bool causal : {false, true}) {
        RingAttentionShape shape{300, 6, 3, 64, causal};
        shape.batch = 2;
        RingAttentionTiling tiling;
        tiling.packing = KeyPacking::kHeads;
        check_all(nodes, locals, shape, tiling);
        shape.query_heads = 8;
        shape.key_heads = 4;
        tiling.engines = true;
        for (tiling.heads_together = 1; tiling.heads_together <= 4; tiling.heads_together *= 2) {
          if (nodes == 1 && locals > 1) check_all(nodes, locals, shape, tiling);
        }
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
  EXPECT_EQ(checked, 2u * 3 * ((1 + 2 + 3) * (1 + 2 + 3 + 4) + 3 * (2 + 3 + 4)));
}

TEST(RingItems, EveryRowOfEveryHeadIsInOneItem) {
  for_every_launch([](const Launch& launch) {
    const RingItems items(launch.made.items);
    const auto own =
        static_cast<int>(positions_of(launch.plan, launch.world.rank(), launch.seq).size());
    std::set<std::tuple<int, int, int>> rows;
    for (int i = 0; i < items.count(); ++i) {
      const AttentionItem item = items.at(i);
      ASSERT_EQ(item.q_row, item.first_row);
      ASSERT_LT(item.first_row, item.rows_end);
      ASSERT_LE(item.rows_end, own);
      for (int row = item.first_row; row < std::min(item.first_row + kTile, item.rows_end); ++row)
        ASSERT_TRUE(rows.insert({item.batch, item.head, row}).second);
    }
    ASSERT_EQ(rows.size(),
              std::size_t{2} * launch.plan.query_heads * static_cast<std::size_t>(own));
  });
}

/// Keys arrive head by head: nobody may wait for a head that comes late while items of an earlier
/// one are left.
TEST(RingItems, SectionsComeInTheOrderOfHeads) {
  for_every_launch([](const Launch& launch) {
    const RingItems items(launch.made.items);
    int last = 0;
    for (int i = 0; i < items.count(); ++i) {
      const AttentionItem item = items.at(i);
      const HeadSections& sections = launch.made.items.sections;
      const int heads = static_cast<int>(launch.plan.query_heads);
      const int section = std::min((item.batch * heads + item.head) / sections.each, sections.full);
      ASSERT_GE(section, last);
      last = section;
    }
  });
}

/// Causal launches of several ranks, of query and key heads of all kinds.
TEST(RingItems, NoItemButThoseOfTheLastSectionPrecedesOneOfAnEarlierKeyHead) {
  constexpr int kTileRows = 128, kBlocks = 132, kSeq = 12288;
  for (const auto& [query_heads, key_heads] :
       {std::pair{64u, 64u}, {64u, 8u}, {32u, 8u}, {6u, 1u}}) {
    for (const World& world : {World{2, 1, 0, 0}, World{2, 1, 1, 0}, World{1, 4, 0, 3}}) {
      const RingAttentionShape shape{kSeq, query_heads, key_heads, 128, true};
      RingAttentionTiling tiling;
      tiling.packing = KeyPacking::kHeads;
      const auto plan = RingAttentionPlan::make(world.nodes, world.locals, shape, tiling);
      ASSERT_TRUE(plan) << plan.error().message;
      const RingAttentionSchedule schedule(*plan, world, kSeq, Mode::kFused);
      const RingLaunchItems made =
          ring_items(*plan, world, schedule, kTileRows, ring_section(*plan, world, kSeq),
                     HeadSections::kLastOfBlock * kBlocks);
      const RingItems items(made.items);
      const int last = made.items.sections.full * made.items.sections.each;
      int latest = 0;
      for (int i = 0; i < items.count() && items.at(i).head < last; ++i) {
        const int key_head = items.at(i).head / static_cast<int>(plan->group());
        ASSERT_GE(key_head, latest) << "item " << i;
        latest = key_head;
      }
      // Few heads are all in the last section.
      if (key_heads >= 8) {
        EXPECT_GT(latest, 0);
      }
    }
  }
}

TEST(RingItems, ARankAloneTakesAsManyHeadsAsL2HoldsKeysOf) {
  const World alone{1, 1, 0, 0};
  const auto section = [&](std::uint32_t seq, std::uint32_t heads, std::uint32_t key_heads) {
    const auto plan = RingAttentionPlan::make(1, 1, {seq, heads, key_heads, 128, true}, {});
    EXPECT_TRUE(plan);
    return plan ? ring_section(*plan, alone, seq) : 0;
  };
  EXPECT_EQ(section(8192, 64, 8), 64);   // 4 MiB a key head: all eight
  EXPECT_EQ(section(16384, 64, 8), 32);  // 8 MiB
  EXPECT_EQ(section(16384, 64, 64), 4);
  EXPECT_EQ(section(131072, 64, 8), 8);  // 64 MiB
}

TEST(RingRanges, EveryAdmittedPairIsMetOnceWhereItsBytesAre) {
  for_every_launch([](const Launch& launch) {
    const RingItems items(launch.made.items);
    const RingRanges ranges(launch.made.ranges);
    const auto own = positions_of(launch.plan, launch.world.rank(), launch.seq);
    for (int i = 0; i < items.count(); ++i) {
      const AttentionItem item = items.at(i);
      const int row = item.first_row;  // one of each item
      std::vector<int> met(static_cast<std::size_t>(launch.seq), 0);
      for (int r = 0; r < ranges.ranges(item); ++r) {
        const KeyRange range = ranges.range(item, r, 1);
        const auto positions = positions_of(launch.plan, ranges.origin(r), launch.seq);
        const auto rows = static_cast<int>(positions.size());
        const auto key_heads = static_cast<int>(launch.plan.key_heads);
        const auto together = static_cast<int>(launch.plan.heads_together);
        const int pair = item.batch * key_heads + item.head / 2;
        ASSERT_EQ(ranges.own(range), ranges.origin(r) == launch.world.rank());
        // Its place in the origin's tensors; by heads, K then V of those together.
        const int before = ranges.own(range) ? 0 : 2 * (pair / together) * rows;
        const int first = range.first_key - before;
        ASSERT_GE(first, 0);
        ASSERT_LE(first + range.length, rows);
        ASSERT_EQ(ranges.first_value(range) - range.first_key, ranges.own(range) ? 0 : rows);
        if (ranges.own(range)) {
          ASSERT_EQ(range.batch, item.batch);
          ASSERT_EQ(range.head, item.head / 2);
        } else {
          const GatherSchedule gather(launch.plan.gather, launch.world);
          ASSERT_EQ(static_cast<std::uint32_t>(range.batch),
                    gather.slot_index(launch.plan.banks > 1 ? 1 : 0, ranges.origin(r)));
          ASSERT_EQ(range.head, pair % together);
          // The last value of the item's heads is there when so many rows of the gather are.
          ASSERT_EQ(ranges.gathered_before(ranges.first_value(range) + rows),
                    2 * (pair / together + 1) * together * rows);
          ASSERT_EQ(ranges.rows(r, 2 * key_heads), 4 * key_heads * rows);
        }
        for (int key = 0; key < range.visible_to(row); ++key)
          ++met[static_cast<std::size_t>(positions[static_cast<std::size_t>(first + key)])];
      }
      for (int key = 0; key < launch.seq; ++key) {
        const bool admitted = !launch.plan.causal || key <= own[static_cast<std::size_t>(row)];
        ASSERT_EQ(met[static_cast<std::size_t>(key)], admitted ? 1 : 0) << "key " << key;
      }
    }
  });
}

TEST(RingRanges, OwnKeysComeFirstThenTheNodesThenThoseOfOthers) {
  for_every_launch([](const Launch& launch) {
    const RingRanges ranges(launch.made.ranges);
    int last = -1;
    for (int r = 0; r < ranges.count(); ++r) {
      const std::uint32_t origin = ranges.origin(r);
      const std::uint32_t node = origin / launch.world.locals;
      const int distance =
          origin == launch.world.rank()
              ? 0
              : 1 + static_cast<int>((launch.world.node + launch.world.nodes - node) %
                                     launch.world.nodes);
      ASSERT_GE(distance, last);
      last = distance;
    }
    ASSERT_EQ(ranges.origin(0), launch.world.rank());
  });
}

}  // namespace
}  // namespace mk::kernels::cuda
