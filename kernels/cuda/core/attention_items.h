/// \file
/// What a worker computes next, and which keys it meets: items, key ranges and the arithmetic of
/// their tiles. Compiles for host and device, so that it is tested on the host.
#pragma once

#include <cstdint>

#include "shm/platform.h"

namespace mk::kernels::cuda {

/// An **item** is what one block computes without interruption: the rows of a tile of queries of
/// one head, over all their keys. Its rows of O stay in registers from the first key to the last.
struct AttentionItem {
  int batch = 0;
  int head = 0;       ///< query head
  int first_row = 0;  ///< of the tile, in its sequence
  int rows_end = 0;   ///< rows of the sequence: those from here on are not stored
  int q_row = 0;      ///< row of Q's tensor map where the tile begins
  int place = 0;      ///< an operator's own: where a table of its has more of the item
};

/// Offset of a key range that hides nothing.
inline constexpr int kNoMask = 1 << 30;

/// A **key range** is a run of keys that lie one after the other in one tensor: all keys of a head,
/// or those of one shard. Query row i of the item's sequence sees the range's keys from 0 up to
/// (not including) min(length, i + 1 + offset).
struct KeyRange {
  int source = 0;  ///< which of the tensors
  int batch = 0;
  int head = 0;       ///< key head
  int first_key = 0;  ///< row of the tensor where the range begins
  int length = 0;
  int offset = kNoMask;

  /// How many keys of the range a row sees.
  MK_HOST_DEVICE int visible_to(int row) const {
    const int limit = offset == kNoMask ? length : row + 1 + offset;
    return limit < 0 ? 0 : limit < length ? limit : length;
  }
};

/// The tiles of a range that an item meets: numbers 0 to `tiles` - 1, of which those below `full`
/// show all their keys to all rows. They are met from the last to the first: what needs a mask
/// comes first.
struct TileSpan {
  int tiles = 0;
  int full = 0;
};
MK_HOST_DEVICE inline TileSpan span_of(const AttentionItem& item, int tile_rows,
                                       const KeyRange& range, int tile_keys) {
  const int end = item.first_row + tile_rows;
  const int last_row = (end < item.rows_end ? end : item.rows_end) - 1;
  TileSpan span;
  span.tiles = (range.visible_to(last_row) + tile_keys - 1) / tile_keys;
  span.full = range.visible_to(item.first_row) / tile_keys;
  return span;
}

/// Which heads (of all batches, one batch after the other) are worked on at one time: `each` of
/// them, so that the keys that are read at one time stay in L2. The last section may have more: as
/// its items end a launch, it has enough of them for all blocks to end together.
struct HeadSections {
  /// Items of a last section for each block, where they differ in length.
  static constexpr int kLastOfBlock = 4;

  int heads = 1;
  int each = 1;
  int full = 0;  ///< sections of `each`; what is left is the last one

  /// `last`: items of a head are `tiles`, and the last section has so many in all, if there are.
  static constexpr HeadSections of(int heads, int each, int tiles, int last) {
    const int least = tiles > 0 ? (last + tiles - 1) / tiles : 0;
    const int before = heads - (least > each ? least : each);
    return {heads, each, before > 0 ? before / each : 0};
  }
  struct Place {
    int first = 0;   ///< head of the section
    int heads = 0;   ///< of the section
    int within = 0;  ///< number of the item in its section
  };
  /// The item's, where each head has `tiles`.
  MK_HOST_DEVICE Place place_of(int number, int tiles) const {
    const int section = number / (each * tiles);
    const int first = (section < full ? section : full) * each;
    return {first, section < full ? each : heads - first, number - first * tiles};
  }
};

/// **Items** of a problem without gaps: every head has the same rows. Numbers 0 to count() - 1, in
/// the order in which they are dealt out.
///
///     struct Params;                            plain data, among the kernel's arguments
///     explicit Items(const Params&);
///     int count() const;
///     AttentionItem at(int number) const;
///
/// Heads are taken in sections. Within a section, `longest_first` takes the last tile of every
/// head, then the last but one, and so on: under a causal mask these have the most keys. Otherwise
/// a head's tiles follow each other.
class DenseItems {
 public:
  struct Params {
    int batch = 1;
    int heads = 1;  ///< query heads
    int rows = 0;
    int tiles = 0;  ///< of rows, of one head
    int tile_rows = 128;
    HeadSections sections;
    bool longest_first = false;
  };

  MK_HOST_DEVICE explicit DenseItems(const Params& params) : params_(params) {}
  MK_HOST_DEVICE int count() const { return params_.batch * params_.heads * params_.tiles; }
  MK_HOST_DEVICE AttentionItem at(int number) const {
    const HeadSections::Place at = params_.sections.place_of(number, params_.tiles);
    int head, tile;
    if (params_.longest_first) {
      tile = params_.tiles - 1 - at.within / at.heads;
      head = at.first + at.within % at.heads;
    } else {
      head = at.first + at.within / params_.tiles;
      tile = at.within % params_.tiles;
    }
    AttentionItem item;
    item.batch = head / params_.heads;
    item.head = head % params_.heads;
    item.first_row = tile * params_.tile_rows;
    item.rows_end = params_.rows;
    item.q_row = item.first_row;
    return item;
  }

 private:
  const Params& params_;
};

}  // namespace mk::kernels::cuda
