/// \file
/// Ring Attention in the attention core's words: a rank's items, and which runs of keys each of
/// them meets. Made from kernels/ops/ring/schedule.h on the host, for each launch. Compiles
/// for host and device.
#pragma once

#include <algorithm>
#include <bit>
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
};

/// **Items** of a rank: a tile of queries of one head of one batch.
///
/// Keys come head by head. So the query heads are taken in that order, in sections, and within a
/// section, under a causal mask, the tiles with the most keys first.
class RingItems {
 public:
  struct Params {
    RingParts parts;
    int batch = 1;
    int heads = 1;  ///< query heads
    HeadSections sections;
    int tile_rows = 128;
    bool longest_first = false;
  };

  MK_HOST_DEVICE explicit RingItems(const Params& params) : params_(params) {}
  MK_HOST_DEVICE int count() const { return params_.batch * params_.heads * tiles(); }
  MK_HOST_DEVICE AttentionItem at(int number) const {
    const HeadSections::Place at = params_.sections.place_of(number, tiles());
    int head, tile;
    if (params_.longest_first) {
      tile = tiles() - 1 - at.within / at.heads;
      head = at.first + at.within % at.heads;
    } else {
      head = at.first + at.within / tiles();
      tile = at.within % tiles();
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

/// A rank's rows, as keys. Its parts lie one after the other, and what a tile of queries sees of
/// them is their beginning: of another rank one part, both or none; of this one, whose parts are
/// cut by the mask where the queries are, all up to a row's own.
struct RingRun {
  std::uint32_t origin = 0;  ///< the rank
  int visible[2] = {};       ///< rows that queries of each of this rank's parts see, at most
  int origin_rows = 0;       ///< of the sequence, of that rank
  int slot = -1;             ///< in bank 0; negative: this rank's own keys
  int bank_slots = 0;        ///< from one bank's slot to the next one's
};

/// All runs of a launch, in the order in which every item meets them. First comes this rank's own,
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
    int together_log2 = 0;  ///< of RingAttentionGeometry::heads_together
  };

  MK_HOST_DEVICE explicit RingRanges(const Params& params) : params_(params) {}
  MK_HOST_DEVICE int ranges(const AttentionItem&) const { return params_.runs.count; }
  /// `bank`: of this launch.
  MK_HOST_DEVICE KeyRange range(const AttentionItem& item, int number, int bank) const {
    const RingRun& run = params_.runs.runs[number];
    const int key_head = item.head / params_.heads_per_key_head;
    KeyRange range;
    range.source = number;
    range.length = run.visible[item.first_row < params_.parts.rows[0] ? 0 : 1];
    if (run.slot < 0) {
      range.batch = item.batch;
      range.head = key_head;
      if (params_.causal) range.offset = 0;
    } else {
      range.batch = run.slot + bank * run.bank_slots;
      range.head = key_head & ((1 << params_.together_log2) - 1);
      range.first_key = 2 * (pair(item) >> params_.together_log2) * run.origin_rows;
    }
    return range;
  }
  /// Where the range's values begin: those of the caller's like its keys, others behind the keys of
  /// their head, and of those together with it.
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
  /// Rows of the gather before row `row` of the tensor that holds others' keys.
  MK_HOST_DEVICE int gathered_before(int row) const { return row << params_.together_log2; }
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

/// How many query heads are worked on at one time. Host only.
///
/// One, where all tiles are equally long: without a mask. Else those of one key head: keys arrive
/// head by head, and the longest tiles of later heads would wait for them. A rank alone waits for
/// nothing. It takes as many key heads as L2 holds keys and values of, and packed sequences do so
/// in any world, since the number of their last section's items is not known.
inline int ring_section(const RingAttentionGeometry& plan, const World& world, std::uint64_t seq) {
  constexpr std::uint64_t kL2Bytes = 32 << 20;
  const bool packed = plan.sequences_max != 0;
  if (!plan.causal && !packed) return 1;
  if (world.size() > 1 && !packed) return static_cast<int>(plan.group());
  const std::uint64_t bytes = std::max<std::uint64_t>(1, seq * plan.head_bytes() * 2);
  const std::uint64_t key_heads = std::max<std::uint64_t>(1, kL2Bytes / bytes);
  return static_cast<int>(std::min<std::uint64_t>(plan.head_pairs(), key_heads) * plan.group());
}

/// Those of a launch, as its schedule has them. Host only. There are at most RingRuns::kMax runs.
struct RingLaunchItems {
  RingItems::Params items;
  RingRanges::Params ranges;
};
///
/// `section`: heads that are worked on at one time; `last`: items of the last section, at least.
inline RingLaunchItems ring_items(const RingAttentionGeometry& plan, const World& world,
                                  const RingAttentionSchedule& schedule, int tile_queries,
                                  int section, int last) {
  const std::uint32_t halves = plan.parts_per_rank();
  const auto as_int = [](std::uint32_t value) { return static_cast<int>(value); };
  RingParts parts;
  for (std::uint32_t half = 0; half < halves; ++half) {
    parts.rows[half] = as_int(schedule.part(world.rank(), half).count);
    parts.tiles[half] = (parts.rows[half] + tile_queries - 1) / tile_queries;
  }
  const HeadSections sections = HeadSections::of(as_int(plan.batch * plan.query_heads), section,
                                                 parts.tiles[0] + parts.tiles[1], last);
  RingLaunchItems made;
  made.items = {parts,    as_int(plan.batch), as_int(plan.query_heads),
                sections, tile_queries,       plan.causal};
  made.ranges.parts = parts;
  made.ranges.causal = plan.causal;
  made.ranges.key_heads = as_int(plan.key_heads);
  made.ranges.heads_per_key_head = as_int(plan.group());
  made.ranges.together_log2 = std::countr_zero(plan.heads_together);
  RingRuns& runs = made.ranges.runs;
  for (std::uint32_t position = 0; position < world.size(); ++position) {
    const std::uint32_t origin = schedule.gather().origin_at(position);
    const std::uint32_t slot = schedule.gather().slot_index(0, origin);
    RingRun& run = runs.runs[runs.count++];
    run.origin = origin;
    run.origin_rows = as_int(schedule.rows(origin));
    for (std::uint32_t own = 0; own < halves; ++own) {
      for (std::uint32_t half = 0; half < halves; ++half) {
        const ShardRange part = schedule.part(origin, half);
        const bool before = part.first < schedule.part(world.rank(), own).first;
        if (!plan.causal || position == 0 || before) run.visible[own] += as_int(part.count);
      }
    }
    if (position == 0) continue;
    run.slot = as_int(slot);
    run.bank_slots = plan.banks > 1 ? as_int(schedule.gather().slot_index(1, origin) - slot) : 0;
  }
  return made;
}

}  // namespace mk::kernels::cuda
