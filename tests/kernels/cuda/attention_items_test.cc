// Which items there are, in which order, and which tiles of keys each meets: exhaustively for small
// problems, against what the definitions say key by key.
#include "kernels/cuda/core/attention_items.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

namespace mk::kernels::cuda {
namespace {

TEST(AttentionItems, EveryTileOfEveryHeadOnce) {
  for (const int batch : {1, 2, 3}) {
    for (const int heads : {1, 3, 8}) {
      for (const int rows : {1, 127, 128, 129, 700}) {
        for (const int section : {1, 2, 5, 24, 100}) {
          for (const bool longest_first : {false, true}) {
            DenseItems::Params params;
            params.batch = batch;
            params.heads = heads;
            params.rows = rows;
            params.tiles = (rows + 127) / 128;
            params.sections = HeadSections::of(batch * heads, section, params.tiles, 3 * section);
            params.longest_first = longest_first;
            const DenseItems items(params);
            std::set<std::tuple<int, int, int>> seen;
            for (int i = 0; i < items.count(); ++i) {
              const AttentionItem item = items.at(i);
              ASSERT_TRUE(item.batch >= 0 && item.batch < batch);
              ASSERT_TRUE(item.head >= 0 && item.head < heads);
              ASSERT_TRUE(item.first_row >= 0 && item.first_row < rows);
              ASSERT_EQ(item.first_row % 128, 0);
              ASSERT_EQ(item.rows_end, rows);
              ASSERT_EQ(item.q_row, item.first_row);
              seen.insert({item.batch, item.head, item.first_row});
            }
            ASSERT_EQ(static_cast<int>(seen.size()), batch * heads * params.tiles);
            ASSERT_EQ(items.count(), batch * heads * params.tiles);
          }
        }
      }
    }
  }
}

TEST(AttentionItems, LongestFirstWithinASectionOfHeads) {
  DenseItems::Params params;
  params.batch = 2;
  params.heads = 6;
  params.rows = 1000;
  params.tiles = 8;
  params.sections = HeadSections::of(12, 4, 8, 0);
  params.longest_first = true;
  const DenseItems items(params);
  for (int i = 1; i < items.count(); ++i) {
    if (i % (4 * 8) == 0) continue;
    EXPECT_LE(items.at(i).first_row, items.at(i - 1).first_row) << i;
  }
}

TEST(HeadSections, AllButTheLastAreAlikeAndTheLastHasEnoughItems) {
  for (int heads = 1; heads <= 12; ++heads) {
    for (int each = 1; each <= 13; ++each) {
      for (int tiles = 1; tiles <= 3; ++tiles) {
        for (int last = 0; last <= 40; ++last) {
          const HeadSections sections = HeadSections::of(heads, each, tiles, last);
          int number = 0;
          for (int first = 0; first < heads;) {
            const HeadSections::Place place = sections.place_of(number, tiles);
            ASSERT_EQ(place.first, first);
            ASSERT_EQ(place.within, 0);
            const bool is_last = first + place.heads == heads;
            if (is_last) {
              ASSERT_GE(place.heads * tiles, std::min(heads * tiles, std::max(last, each * tiles)));
            } else {
              ASSERT_EQ(place.heads, each);
            }
            // No more heads than it must have, beyond whole sections.
            if (is_last && first > 0) {
              ASSERT_LT(place.heads - each, std::max((last + tiles - 1) / tiles, each));
            }
            for (int i = 0; i < place.heads * tiles; ++i) {
              const HeadSections::Place same = sections.place_of(number + i, tiles);
              ASSERT_EQ(std::tie(same.first, same.heads), std::tie(place.first, place.heads));
              ASSERT_EQ(same.within, i);
            }
            number += place.heads * tiles;
            first += place.heads;
          }
          ASSERT_EQ(number, heads * tiles);
        }
      }
    }
  }
}

TEST(AttentionItems, SpansAreWhatRowsSeeKeyByKey) {
  constexpr int kTileKeys = 6;
  for (const int rows : {1, 5, 17}) {
    for (const int tile_rows : {4, 8}) {
      for (int first = 0; first < rows; first += tile_rows) {
        for (const int length : {0, 1, 6, 13}) {
          for (const int offset : {kNoMask, -30, -9, -1, 0, 1, 7, 40}) {
            AttentionItem item;
            item.first_row = first;
            item.rows_end = rows;
            KeyRange range;
            range.length = length;
            range.offset = offset;
            const TileSpan span = span_of(item, tile_rows, range, kTileKeys);
            int tiles = 0, full = 0;
            for (int tile = 0; tile * kTileKeys < length; ++tile) {
              bool any = false, all = true;
              for (int row = first; row < std::min(rows, first + tile_rows); ++row) {
                for (int key = tile * kTileKeys; key < (tile + 1) * kTileKeys; ++key) {
                  const bool sees = key < length && (offset == kNoMask || key <= row + offset);
                  ASSERT_EQ(sees, key < range.visible_to(row));
                  any |= sees;
                  all &= sees;
                }
              }
              if (any) tiles = tile + 1;
              if (all) full = tile + 1;
            }
            ASSERT_EQ(span.tiles, tiles) << rows << " " << first << " " << length << " " << offset;
            ASSERT_EQ(span.full, full) << rows << " " << first << " " << length << " " << offset;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels::cuda
