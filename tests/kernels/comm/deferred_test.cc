// Sums that come one tile late (comm/deferred.h): which when, and that nobody waits in a circle.
#include "kernels/comm/deferred.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace mk::kernels {
namespace {

TEST(DeferredAccumulate, EachTileWhenTheNextOneIsComputedAndTheLastOneInTheEnd) {
  DeferredAccumulate<std::uint32_t> late;
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

TEST(DeferredAccumulate, NothingToSumWhereNoTileIsOwn) {
  DeferredAccumulate<int> late;
  EXPECT_TRUE(late.end([](int) -> bool { throw 1; }));
}

TEST(DeferredAccumulate, AFailedSumEndsIt) {
  DeferredAccumulate<int> late;
  const auto fails = [](int) { return false; };
  EXPECT_TRUE(late.next(1, fails));
  EXPECT_FALSE(late.next(2, fails));
  EXPECT_FALSE(late.end(fails));
}

/// Two ranks of so many blocks each go through pairs of tiles, the first of which is rank 0's, then
/// through `singles` tiles of one rank's. A block computes its steps in their order, and sums as
/// DeferredAccumulate says, each only when the other rank has computed that tile.
class TwoRanks {
 public:
  struct Setup {
    std::uint32_t pairs = 0;
    std::uint32_t singles = 0;
    std::uint32_t singles_of = 0;      ///< whose those are
    std::uint32_t blocks[2] = {1, 1};  ///< of each rank
    bool turned = false;               ///< rank 1 begins each pair with its own tile
    bool sums[2] = {true, true};       ///< who sums
  };
  explicit TwoRanks(const Setup& setup) : setup_(setup), tiles_(2 * setup.pairs + setup.singles) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      computed_[rank].assign(tiles_, false);
      blocks_[rank].resize(setup.blocks[rank]);
      for (std::uint32_t b = 0; b < setup.blocks[rank]; ++b) blocks_[rank][b].step = b;
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
    DeferredAccumulate<std::uint32_t> late;
    bool counted = false;  ///< the tile of `step` is computed, its own sum is not begun
    bool ended = false;
  };
  bool is_paired(std::uint32_t step) const { return step < 2 * setup_.pairs; }
  std::uint32_t tile_at(std::uint32_t rank, std::uint32_t step) const {
    return rank == 1 && setup_.turned && is_paired(step) ? step ^ 1 : step;
  }
  std::uint32_t owner(std::uint32_t tile) const {
    return is_paired(tile) ? tile % 2 : setup_.singles_of;
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
    if (setup_.sums[rank] && owner(tile) == rank && !block.late.next(tile, there)) return false;
    block.counted = false;
    block.step += static_cast<std::uint32_t>(blocks_[rank].size());
    return true;
  }

  const Setup setup_;
  const std::uint32_t tiles_;
  std::vector<bool> computed_[2];
  std::vector<Block> blocks_[2];
};

TEST(DeferredAccumulate, NobodyWaitsInACircle) {
  for (std::uint32_t pairs = 0; pairs <= 9; ++pairs) {
    for (std::uint32_t singles = 0; singles <= 6; ++singles) {
      for (std::uint32_t first = 1; first <= 6; ++first) {
        for (std::uint32_t second = 1; second <= 6; ++second) {
          for (std::uint32_t choice = 0; choice < 16; ++choice) {
            const bool turned = choice % 2 != 0;
            const std::uint32_t singles_of = choice / 2 % 2;
            const bool sums[2] = {choice / 4 % 2 != 0, choice / 8 % 2 != 0};
            ASSERT_TRUE(
                TwoRanks({pairs, singles, singles_of, {first, second}, turned, {sums[0], sums[1]}})
                    .run())
                << pairs << " pairs, " << singles << " singles, " << first << " and " << second
                << " blocks, choice " << choice;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels
