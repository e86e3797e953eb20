// The default tile order, exhaustively on the host: every tile exactly once, whatever the number of
// workers.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/core/tile.h"

namespace mk::kernels::cuda {
namespace {

TEST(RasterOrder, GivesEveryTileToExactlyOneWorker) {
  for (int tiles_m = 1; tiles_m <= 19; ++tiles_m) {
    for (int tiles_n = 1; tiles_n <= 7; ++tiles_n) {
      for (int band : {1, 2, 8, 32}) {
        for (int workers : {1, 3, 16, 200}) {
          std::vector<int> seen(static_cast<std::size_t>(tiles_m * tiles_n), 0);
          for (int worker = 0; worker < workers; ++worker) {
            RasterOrder order({tiles_m, tiles_n, band}, worker, workers);
            for (Tile tile; order.next(&tile);) {
              ASSERT_TRUE(tile.m >= 0 && tile.m < tiles_m && tile.n >= 0 && tile.n < tiles_n);
              ++seen[static_cast<std::size_t>(tile.m) * static_cast<std::size_t>(tiles_n) +
                     static_cast<std::size_t>(tile.n)];
            }
          }
          for (int count : seen)
            ASSERT_EQ(count, 1) << tiles_m << " x " << tiles_n << ", band " << band;
        }
      }
    }
  }
}

TEST(RasterOrder, WorkersAtTheSameStepShareFewRowsAndColumns) {
  // 132 workers on 64 x 32 tiles in bands of 8 rows: 8 rows and 17 columns at a time, not 132 of
  // either.
  constexpr int kWorkers = 132;
  std::vector<bool> rows(64), columns(32);
  for (int worker = 0; worker < kWorkers; ++worker) {
    RasterOrder order({64, 32, 8}, worker, kWorkers);
    Tile tile;
    ASSERT_TRUE(order.next(&tile));
    rows[static_cast<std::size_t>(tile.m)] = true;
    columns[static_cast<std::size_t>(tile.n)] = true;
  }
  EXPECT_EQ(std::count(rows.begin(), rows.end(), true), 8);
  EXPECT_EQ(std::count(columns.begin(), columns.end(), true), 17);
}

}  // namespace
}  // namespace mk::kernels::cuda
