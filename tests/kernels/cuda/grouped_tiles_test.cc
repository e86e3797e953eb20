// The tiles of a grouped product: every row of every expert is in one tile of each column, whatever
// the counts, and row tiles that follow each other share weights.
#include "kernels/cuda/core/grouped_tiles.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

namespace mk::kernels::cuda {
namespace {

struct Tiles {
  std::vector<std::uint32_t> offsets;
  std::vector<std::uint32_t> starts;
  GroupedRows rows;

  explicit Tiles(const std::vector<std::uint32_t>& counts) {
    std::uint32_t row = 0;
    std::uint32_t tiles = 0;
    for (const std::uint32_t count : counts) {
      offsets.push_back(row);
      starts.push_back(tiles);
      row += count;
      tiles += (count + kGroupedTileRows - 1) / kGroupedTileRows;
    }
    offsets.push_back(row);
    starts.push_back(tiles);
    rows.offsets = offsets.data();
    rows.rows_max = row;
  }
  GroupedTileList list(std::uint32_t columns, std::uint32_t band) const {
    return {starts.data(), static_cast<std::uint32_t>(offsets.size() - 1), columns, band};
  }
};

/// A number below `end`.
std::uint32_t draw(std::mt19937& random, std::uint32_t end) {
  return static_cast<std::uint32_t>(random() % end);
}

void check(const std::vector<std::uint32_t>& counts, std::uint32_t columns, std::uint32_t band) {
  const Tiles tiles(counts);
  const GroupedTileList list = tiles.list(columns, band);
  std::set<std::pair<int, int>> seen;               // row tile, column
  std::map<int, std::pair<int, int>> rows_of_tile;  // row tile: first row, rows
  int expert_before = 0;
  for (std::uint32_t step = 0; step < list.tiles(); ++step) {
    const GroupedTile tile = list.find(step, tiles.rows);
    ASSERT_TRUE(seen.insert({tile.m, tile.n}).second);
    ASSERT_LT(tile.n, static_cast<int>(columns));
    ASSERT_GE(tile.rows, 1);
    ASSERT_LE(tile.rows, static_cast<int>(kGroupedTileRows));
    const auto expert = static_cast<std::size_t>(tile.expert);
    ASSERT_GE(tile.row, static_cast<int>(tiles.offsets[expert]));
    ASSERT_LE(tile.row + tile.rows, static_cast<int>(tiles.offsets[expert + 1]));
    ASSERT_GE(tile.expert, expert_before) << "experts come one after the other";
    expert_before = tile.expert;
    const auto [at, fresh] = rows_of_tile.insert({tile.m, {tile.row, tile.rows}});
    if (!fresh) {
      ASSERT_EQ(at->second, (std::pair{tile.row, tile.rows}));
    }
  }
  // Row tiles in their order make up the rows, without a hole.
  int row = 0;
  for (const auto& [m, place] : rows_of_tile) {
    ASSERT_EQ(place.first, row);
    row += place.second;
  }
  ASSERT_EQ(row, static_cast<int>(tiles.offsets.back()));
  ASSERT_EQ(seen.size(), rows_of_tile.size() * columns);
}

TEST(GroupedTiles, CoverEveryRowOnceInEveryColumn) {
  std::mt19937 random(44);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::uint32_t> counts(1 + draw(random, 40));
    for (auto& count : counts) {
      const std::uint32_t many = draw(random, 8) == 0 ? 3000 : 300;
      count = draw(random, 3) == 0 ? 0 : draw(random, many);
    }
    check(counts, 1 + draw(random, 9), 1 + draw(random, 20));
  }
  check({0}, 3, 16);
  check({0, 0, 0, 5}, 3, 16);
  check({128, 0, 256, 129}, 1, 1);
}

TEST(GroupedTiles, RowTilesThatFollowEachOtherShareWeights) {
  const Tiles tiles({10 * kGroupedTileRows});
  const GroupedTileList list = tiles.list(6, 16);
  for (std::uint32_t step = 0; step < list.tiles(); ++step) {
    const GroupedTile tile = list.find(step, tiles.rows);
    EXPECT_EQ(tile.n, static_cast<int>(step / 10));
    EXPECT_EQ(tile.m, static_cast<int>(step % 10));
  }
}

TEST(GroupedTiles, WildOffsetsReachNothingBehindTheRows) {
  const std::vector<std::vector<std::uint32_t>> wild = {
      {0, 4000000000u, 50, 60}, {90, 20, 201, 7}, {4294967295u, 4294967295u, 0, 4294967295u}};
  for (const auto& words : wild) {
    for (const bool counted : {false, true}) {
      GroupedRows rows;
      rows.offsets = words.data();
      rows.counts = counted ? words.data() + 1 : nullptr;
      rows.rows_max = 100;
      for (std::uint32_t expert = 0; expert < 3; ++expert) {
        const RowRange range = rows.of(expert);
        EXPECT_LE(range.begin, range.end);
        EXPECT_LE(range.end, 100u);
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels::cuda
