// Sums that come one tile late (comm/late_sum.h): which when, and that nobody waits in a circle.
#include "kernels/comm/late_sum.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace mk::kernels {
namespace {

TEST(LateSum, EachTileWhenTheNextOneIsComputedAndTheLastOneInTheEnd) {
  LateSum<std::uint32_t> late;
  std::vector<std::uint32_t> summed;
  const auto sum = [&](std::uint32_t tile) {
    summed.push_back(tile);
    return true;
  };
  for (std::uint32_t tile : {3u, 5u, 4u}) {
    const std::size_t before = summed.size();
    ASSERT_TRUE(late.next(tile, sum));
    ASSERT_EQ(summed.size(), tile == 3 ? 0 : before + 1);
  }
  ASSERT_TRUE(late.end(sum));
  EXPECT_EQ(summed, (std::vector<std::uint32_t>{3, 5, 4}));
}

TEST(LateSum, NothingToSumWhereNoTileIsOwn) {
  LateSum<int> late;
  EXPECT_TRUE(late.end([](int) -> bool { throw 1; }));
}

TEST(LateSum, AFailedSumEndsIt) {
  LateSum<int> late;
  const auto fails = [](int) { return false; };
  EXPECT_TRUE(late.next(1, fails));
  EXPECT_FALSE(late.next(2, fails));
  EXPECT_FALSE(late.end(fails));
}

/// Two ranks of so many blocks each go through pairs of tiles, of which the first is rank 0's: a
/// block computes its steps in their order, and sums as LateSum says, each only when the other rank
/// has computed that tile.
class TwoRanks {
 public:
  /// `tiles`: of both ranks; `turned`: rank 1 begins each pair with its own tile. `sums`: who sums.
  TwoRanks(std::uint32_t tiles, const std::uint32_t (&blocks)[2], bool turned,
           const bool (&sums)[2])
      : tiles_(tiles), turned_(turned), sums_{sums[0], sums[1]} {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      computed_[rank].assign(tiles, false);
      blocks_[rank].resize(blocks[rank]);
      for (std::uint32_t b = 0; b < blocks[rank]; ++b) blocks_[rank][b].step = b;
    }
  }
  /// Whether all blocks come to their ends.
  bool run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        for (Block& block : blocks_[rank]) {
          while (advance(rank, block)) moved = true;
        }
      }
    }
    for (const auto& blocks : blocks_) {
      for (const Block& block : blocks) {
        if (!block.ended) return false;
      }
    }
    return true;
  }

 private:
  struct Block {
    std::uint32_t step = 0;
    LateSum<std::uint32_t> late;
    bool counted = false;  ///< the tile of `step` is computed, its own sum is not begun
    bool ended = false;
  };
  std::uint32_t tile_at(std::uint32_t rank, std::uint32_t step) const {
    const bool whole = step / 2 * 2 + 1 < tiles_;
    return rank == 1 && turned_ && whole ? step ^ 1 : step;
  }
  /// One thing that the block can do now; false: it waits, or has ended.
  bool advance(std::uint32_t rank, Block& block) {
    if (block.ended) return false;
    const auto there = [&](std::uint32_t tile) {
      return static_cast<bool>(computed_[1 - rank][tile]);
    };
    if (block.step >= tiles_) return block.ended = block.late.end(there);
    const std::uint32_t tile = tile_at(rank, block.step);
    if (!block.counted) {
      block.counted = true;
      computed_[rank][tile] = true;
      return true;
    }
    if (sums_[rank] && tile % 2 == rank && !block.late.next(tile, there)) return false;
    block.counted = false;
    block.step += static_cast<std::uint32_t>(blocks_[rank].size());
    return true;
  }

  const std::uint32_t tiles_;
  const bool turned_;
  const bool sums_[2];
  std::vector<bool> computed_[2];
  std::vector<Block> blocks_[2];
};

TEST(LateSum, NobodyWaitsInACircle) {
  for (std::uint32_t tiles = 0; tiles <= 21; ++tiles) {
    for (std::uint32_t first = 1; first <= 7; ++first) {
      for (std::uint32_t second = 1; second <= 7; ++second) {
        for (const bool turned : {false, true}) {
          for (const bool both : {false, true}) {
            ASSERT_TRUE(TwoRanks(tiles, {first, second}, turned, {both, true}).run())
                << tiles << " tiles, " << first << " and " << second << " blocks";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels
