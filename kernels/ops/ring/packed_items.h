/// \file
/// What items.h is for sequences of one length, for packed ones: a rank's items and the runs of
/// keys that they meet. Lengths lie in the GPU's memory, so a kernel makes the tables here, for
/// each launch (packed_tables.cuh). Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
#include "kernels/comm/shard.h"
#include "kernels/cuda/core/attention_items.h"
#include "kernels/ops/ring/items.h"
#include "kernels/ops/ring/packed_sequences.h"
#include "shm/platform.h"

namespace mk::kernels::cuda {

/// A tile of queries of this rank.
struct PackedTile {
  std::uint32_t sequence = 0;
  std::int32_t first_row = 0;  ///< in the rank's tensors
  std::int32_t rows_end = 0;   ///< of its part there
  std::int32_t ahead = 0;      ///< a row's place in its sequence, less its place in the tensors
};

/// Of a launch, as far as they are one number.
struct PackedTotals {
  std::uint32_t digest = 0;  ///< LengthsDigest
  std::uint32_t tiles = 0;   ///< of this rank
  std::uint32_t rows = 0;    ///< likewise
  std::uint32_t reserved = 0;
};

/// How one sequence is cut, for one rank.
class PackedParts {
 public:
  /// `parts`, of the plan, outlives it.
  MK_HOST_DEVICE PackedParts(std::uint32_t rows, const Divisor& parts, bool causal)
      : parts_(parts), least_(rows / parts), rest_(rows % parts), causal_(causal) {}

  /// `half` < parts_per_rank, of rank `rank`: as shard_of.
  MK_HOST_DEVICE ShardRange part(std::uint32_t rank, std::uint32_t half) const {
    const std::uint32_t part = half == 0 ? rank : parts_.value() - 1 - rank;
    const std::uint32_t first = rows_before(part);
    return {first, rows_before(part + 1) - first};
  }
  MK_HOST_DEVICE std::uint32_t rows(std::uint32_t rank) const {
    return part(rank, 0).count + (causal_ ? part(rank, 1).count : 0);
  }
  /// Causal: of the rank's parts those that begin before `position`, the place of another rank's
  /// row: they also end before it.
  MK_HOST_DEVICE std::uint32_t rows_seen(std::uint32_t rank, std::uint32_t position) const {
    std::uint32_t rows = 0;
    for (std::uint32_t half = 0; half < 2; ++half) {
      const ShardRange range = part(rank, half);
      if (range.first < position) rows += range.count;
    }
    return rows;
  }
  MK_HOST_DEVICE std::uint32_t tiles(std::uint32_t rank, std::uint32_t tile_rows) const {
    const std::uint32_t first = div_up(part(rank, 0).count, tile_rows);
    return causal_ ? first + div_up(part(rank, 1).count, tile_rows) : first;
  }
  /// The `index`-th tile of the rank, whose rows of the sequence begin at `first_row` of its
  /// tensors.
  MK_HOST_DEVICE PackedTile tile(std::uint32_t rank, std::uint32_t tile_rows, std::uint32_t index,
                                 std::uint32_t first_row) const {
    ShardRange range = part(rank, 0);
    const std::uint32_t first_tiles = div_up(range.count, tile_rows);
    if (index >= first_tiles) {
      first_row += range.count;
      index -= first_tiles;
      range = part(rank, 1);
    }
    PackedTile tile;
    tile.first_row = static_cast<std::int32_t>(first_row + index * tile_rows);
    tile.rows_end = static_cast<std::int32_t>(first_row + range.count);
    tile.ahead = static_cast<std::int32_t>(range.first) - static_cast<std::int32_t>(first_row);
    return tile;
  }

 private:
  /// Of parts 0 .. part - 1; see Shards, which makes its divisor itself.
  MK_HOST_DEVICE std::uint32_t rows_before(std::uint32_t part) const {
    return least_ * part + rest_ * part / parts_;
  }
  const Divisor& parts_;
  std::uint32_t least_;
  std::uint32_t rest_;
  bool causal_;
};

/// **Items** of a rank: a tile of queries of one head, as in RingItems. Within a section of heads
/// the tiles come in their table's order, which has those with the most keys first, with a mask or
/// without.
class PackedItems {
 public:
  struct Params {
    const PackedTotals* totals = nullptr;
    const PackedTile* tiles = nullptr;
    int heads = 1;    ///< query heads
    int section = 1;  ///< heads that are taken together: their number of tiles is not known
  };

  MK_HOST_DEVICE explicit PackedItems(const Params& params) : params_(params) {}
  MK_HOST_DEVICE int count() const { return params_.heads * tiles(); }
  MK_HOST_DEVICE AttentionItem at(int number) const {
    const HeadSections sections{params_.heads, params_.section, params_.heads / params_.section};
    const HeadSections::Place at = sections.place_of(number, tiles());
    AttentionItem item;
    item.place = at.within / at.heads;
    item.head = at.first + at.within % at.heads;
    const PackedTile& tile = params_.tiles[item.place];
    item.first_row = tile.first_row;
    item.rows_end = tile.rows_end;
    item.q_row = item.first_row;
    return item;
  }

 private:
  MK_HOST_DEVICE int tiles() const { return static_cast<int>(params_.totals->tiles); }
  const Params& params_;
};

/// One rank's rows of each sequence, as keys (RingRun).
struct PackedRun {
  std::uint32_t origin = 0;  ///< the rank
  int slot = -1;             ///< as RingRun's
  int bank_slots = 0;
};

/// What RingRanges is.
class PackedRanges {
 public:
  struct Params {
    int count = 0;
    PackedRun runs[RingRuns::kMax];
    PackedSequences sequences;
    const PackedTile* tiles = nullptr;
    Divisor parts;
    bool causal = false;
    int heads_per_key_head = 1;
  };

  MK_HOST_DEVICE explicit PackedRanges(const Params& params) : params_(params) {}
  MK_HOST_DEVICE int ranges(const AttentionItem&) const { return params_.count; }
  /// `bank`: of this launch.
  MK_HOST_DEVICE KeyRange range(const AttentionItem& item, int number, int bank) const {
    const PackedRun& run = params_.runs[number];
    const PackedSequences& all = params_.sequences;
    const PackedTile& tile = params_.tiles[item.place];
    const PackedParts parts(all.rows[tile.sequence], params_.parts, params_.causal);
    const std::uint32_t row = all.first_rows[run.origin * all.count + tile.sequence];
    const bool own = run.slot < 0;
    KeyRange range;
    range.source = number;
    if (own || !params_.causal) {
      range.length = static_cast<int>(parts.rows(run.origin));
    } else {
      const auto position = static_cast<std::uint32_t>(tile.first_row + tile.ahead);
      range.length = static_cast<int>(parts.rows_seen(run.origin, position));
    }
    const int key_head = item.head / params_.heads_per_key_head;
    if (own) {
      range.head = key_head;
      range.first_key = static_cast<int>(row);
      if (params_.causal) range.offset = -range.first_key;
    } else {
      range.head = run.slot + bank * run.bank_slots;
      range.first_key = 2 * key_head * rows_of(run) + static_cast<int>(row);
    }
    return range;
  }
  MK_HOST_DEVICE int first_value(const KeyRange& range) const {
    const PackedRun& run = params_.runs[range.source];
    return range.first_key + (run.slot < 0 ? 0 : rows_of(run));
  }
  MK_HOST_DEVICE bool own(const KeyRange& range) const {
    return params_.runs[range.source].slot < 0;
  }
  MK_HOST_DEVICE int gathered_before(int row) const { return row; }
  MK_HOST_DEVICE int count() const { return params_.count; }
  MK_HOST_DEVICE std::uint32_t origin(int run) const { return params_.runs[run].origin; }
  MK_HOST_DEVICE int rows(int run, int pairs) const {
    const PackedRun& of = params_.runs[run];
    return of.slot < 0 ? 0 : 2 * pairs * rows_of(of);
  }

 private:
  MK_HOST_DEVICE int rows_of(const PackedRun& run) const {
    return static_cast<int>(params_.sequences.rank_rows[run.origin]);
  }
  const Params& params_;
};

/// Those of a launch, but for the tables. Host only.
inline PackedRanges::Params packed_ranges(const RingAttentionGeometry& plan, const World& world) {
  const GatherSchedule gather(plan.gather, world);
  PackedRanges::Params made;
  made.parts = Divisor(plan.parts());
  made.causal = plan.causal;
  made.heads_per_key_head = static_cast<int>(plan.group());
  for (std::uint32_t position = 0; position < world.size(); ++position) {
    const std::uint32_t origin = gather.origin_at(position);
    PackedRun& run = made.runs[made.count++];
    run.origin = origin;
    if (position == 0) continue;
    const std::uint32_t slot = gather.slot_index(0, origin);
    run.slot = static_cast<int>(slot);
    run.bank_slots = plan.banks > 1 ? static_cast<int>(gather.slot_index(1, origin) - slot) : 0;
  }
  return made;
}

}  // namespace mk::kernels::cuda
