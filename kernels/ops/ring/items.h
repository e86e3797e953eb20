/// \file
/// Ring Attention in the attention core's words: a rank's items, and which runs of keys each of
/// them meets. Made from kernels/ops/ring/schedule.h on the host, for each launch. Compiles
/// for host and device.
#pragma once

#include <cstdint>

#include "kernels/cuda/core/attention_items.h"
#include "kernels/ops/ring/schedule.h"
#include "shm/platform.h"

namespace mk::kernels::cuda {

/// The parts of the sequence that this rank's rows are, and the tiles of queries they are cut into.
/// No tile straddles a part.
struct RingParts {
  int rows[2] = {};   ///< of each part; the second one follows the first in the tensors
  int tiles[2] = {};  ///< of queries
  int ahead[2] = {};  ///< a row's place in the sequence, less its place in the tensors
};

/// **Items** of a rank: a tile of queries of one head of one batch.
///
/// Keys come head by head. So the heads are taken in that order, `section` query heads at a time,
/// and within a section, under a causal mask, the tiles with the most keys first.
class RingItems {
 public:
  struct Params {
    RingParts parts;
    int batch = 1;
    int heads = 1;    ///< query heads
    int section = 1;  ///< heads of all batches, one batch after the other, that are taken together
    int tile_rows = 128;
    bool longest_first = false;
  };

  MK_HOST_DEVICE explicit RingItems(const Params& params) : params_(params) {}
  MK_HOST_DEVICE int count() const { return params_.batch * params_.heads * tiles(); }
  MK_HOST_DEVICE AttentionItem at(int number) const {
    const int heads = params_.batch * params_.heads;
    const int first_head = number / (params_.section * tiles()) * params_.section;
    const int within = number - first_head * tiles();
    const int left = heads - first_head;
    const int section = left < params_.section ? left : params_.section;
    int head, tile;
    if (params_.longest_first) {
      tile = tiles() - 1 - within / section;
      head = first_head + within % section;
    } else {
      head = first_head + within / tiles();
      tile = within % tiles();
    }
    const int part = tile < params_.parts.tiles[0] ? 0 : 1;
    const int part_row = part == 0 ? 0 : params_.parts.rows[0];
    AttentionItem item;
    item.batch = head / params_.heads;
    item.head = head % params_.heads;
    item.first_row =
        part_row + (part == 0 ? tile : tile - params_.parts.tiles[0]) * params_.tile_rows;
    item.rows_end = part_row + params_.parts.rows[part];
    item.q_row = item.first_row;
    return item;
  }

 private:
  MK_HOST_DEVICE int tiles() const { return params_.parts.tiles[0] + params_.parts.tiles[1]; }
  const Params& params_;
};

/// A part of a rank's rows, as keys.
struct RingRun {
  std::uint32_t origin = 0;  ///< the rank
  int first_row = 0;         ///< in the origin's tensors
  int length = 0;
  int position = 0;     ///< of its first row in the sequence
  int origin_rows = 0;  ///< of the sequence, of that rank
  int slot = -1;        ///< in bank 0; negative: this rank's own keys
  int bank_slots = 0;   ///< from one bank's slot to the next one's
};

/// All runs of a launch, in the order in which every item meets them. First come this rank's own,
/// then those of the node's others from the next one on. Then it goes node by node as they are to
/// be expected.
struct RingRuns {
  static constexpr int kMax = 128;
  int count = 0;
  RingRun runs[kMax];
};

/// Which run is a range is what KeyRange::source says.
class RingRanges {
 public:
  struct Params {
    RingRuns runs;
    RingParts parts;
    bool causal = false;
    int heads_per_key_head = 1;
    int key_heads = 1;
  };

  MK_HOST_DEVICE explicit RingRanges(const Params& params) : params_(params) {}
  MK_HOST_DEVICE int ranges(const AttentionItem&) const { return params_.runs.count; }
  /// `bank`: of this launch.
  MK_HOST_DEVICE KeyRange range(const AttentionItem& item, int number, int bank) const {
    const RingRun& run = params_.runs.runs[number];
    const int key_head = item.head / params_.heads_per_key_head;
    KeyRange range;
    range.source = number;
    range.length = run.length;
    if (params_.causal) {
      const int part = item.first_row < params_.parts.rows[0] ? 0 : 1;
      range.offset = params_.parts.ahead[part] - run.position;
    }
    if (run.slot < 0) {
      range.batch = item.batch;
      range.head = key_head;
      range.first_key = run.first_row;
    } else {
      range.head = run.slot + bank * run.bank_slots;
      range.first_key = 2 * pair(item) * run.origin_rows + run.first_row;
    }
    return range;
  }
  /// Where the range's values begin: those of the caller's like its keys, others behind the keys of
  /// their head.
  MK_HOST_DEVICE int first_value(const KeyRange& range) const {
    const RingRun& run = params_.runs.runs[range.source];
    return range.first_key + (run.slot < 0 ? 0 : run.origin_rows);
  }
  MK_HOST_DEVICE int pair(const AttentionItem& item) const {
    return item.batch * params_.key_heads + item.head / params_.heads_per_key_head;
  }
  MK_HOST_DEVICE bool own(const KeyRange& range) const {
    return params_.runs.runs[range.source].slot < 0;
  }
  MK_HOST_DEVICE int count() const { return params_.runs.count; }
  MK_HOST_DEVICE std::uint32_t origin(int run) const { return params_.runs.runs[run].origin; }
  /// That come of the run's rank over the gather, for so many pairs of K and V; 0: it is this one.
  MK_HOST_DEVICE int rows(int run, int pairs) const {
    const RingRun& of = params_.runs.runs[run];
    return of.slot < 0 ? 0 : 2 * pairs * of.origin_rows;
  }

 private:
  const Params& params_;
};

/// Those of a launch, as its schedule has them. Host only. There are at most RingRuns::kMax runs.
struct RingLaunchItems {
  RingItems::Params items;
  RingRanges::Params ranges;
};
inline RingLaunchItems ring_items(const RingAttentionGeometry& plan, const World& world,
                                  const RingAttentionSchedule& schedule, int tile_queries,
                                  int section) {
  const auto halves = static_cast<int>(plan.parts_per_rank());
  const auto as_int = [](std::uint32_t value) { return static_cast<int>(value); };
  RingParts parts;
  for (int half = 0, row = 0; half < halves; ++half) {
    const ShardRange part = schedule.part(world.rank(), static_cast<std::uint32_t>(half));
    parts.rows[half] = as_int(part.count);
    parts.tiles[half] = (as_int(part.count) + tile_queries - 1) / tile_queries;
    parts.ahead[half] = as_int(part.first) - row;
    row += as_int(part.count);
  }
  RingLaunchItems made;
  made.items = {parts,   as_int(plan.batch), as_int(plan.query_heads),
                section, tile_queries,       plan.causal};
  made.ranges.parts = parts;
  made.ranges.causal = plan.causal;
  made.ranges.key_heads = as_int(plan.key_heads);
  made.ranges.heads_per_key_head = as_int(plan.group());
  RingRuns& runs = made.ranges.runs;
  for (std::uint32_t position = 0; position < world.size(); ++position) {
    const std::uint32_t origin = schedule.gather().origin_at(position);
    const std::uint32_t slot = schedule.gather().slot_index(0, origin);
    for (int half = 0, row = 0; half < halves; ++half) {
      const ShardRange part = schedule.part(origin, static_cast<std::uint32_t>(half));
      RingRun& run = runs.runs[runs.count++];
      run.origin = origin;
      run.first_row = row;
      run.length = as_int(part.count);
      run.position = as_int(part.first);
      run.origin_rows = as_int(schedule.rows(origin));
      if (position != 0) {
        run.slot = as_int(slot);
        run.bank_slots =
            plan.banks > 1 ? as_int(schedule.gather().slot_index(1, origin) - slot) : 0;
      }
      row += as_int(part.count);
    }
  }
  return made;
}

}  // namespace mk::kernels::cuda
