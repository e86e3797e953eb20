/// \file
/// A block of Ring Attention: a gather of keys and values, and which tiles it makes possible. The
/// roles are in roles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/operator_block.h"
#include "kernels/gather/block.h"
#include "kernels/ops/ring/launch.h"
#include "kernels/ops/ring/schedule.h"

namespace mk::kernels {

/// A tile of queries with the query heads of one key head.
struct AttentionItem {
  std::uint32_t number = 0;
  SequenceTile query;
  std::uint32_t pair = 0;  ///< batch * key_heads + key_head
  std::uint32_t batch = 0;
  std::uint32_t key_head = 0;
  std::uint32_t sequence = 0;  ///< of a packed launch
};

/// A tile of keys of one key head, and their values, where this rank reads them. Strides are in
/// bytes from row to row.
struct AttentionKeys {
  const std::byte* keys = nullptr;
  std::uint64_t key_stride = 0;
  const std::byte* values = nullptr;
  std::uint64_t value_stride = 0;
  std::uint32_t rows = 0;
};

/// How far the rows of each rank have come, as far as one block has seen: those of the first few
/// ranks, and of one more at a time.
class ArrivedRows {
 public:
  MK_HOST_DEVICE GatherProgress& of(std::uint32_t origin) {
    if (origin < kRanks) return progress_[origin];
    if (origin != other_) {
      other_ = origin;
      progress_[kRanks] = {};
    }
    return progress_[kRanks];
  }

 private:
  static constexpr std::uint32_t kRanks = 32;
  GatherProgress progress_[kRanks + 1];
  std::uint32_t other_ = kRanks;
};

template <class Executor>
class RingAttentionBlock : public OperatorBlock<Executor> {
 public:
  using Base = OperatorBlock<Executor>;

  MK_HOST_DEVICE RingAttentionBlock(Executor& executor_in, const RingAttentionLaunch& launch_in,
                                    Role role_in, std::uint32_t index_in, BlockTotals& totals_in)
      : Base(executor_in, launch_in, role_in, index_in, totals_in),
        launch(launch_in),
        schedule(launch_in.plan, launch_in.context.world, launch_in.m, launch_in.mode),
        gather(*this, schedule.gather(), launch_in.keys_values.rows) {}
  RingAttentionBlock(const RingAttentionBlock&) = delete;
  RingAttentionBlock& operator=(const RingAttentionBlock&) = delete;

  const RingAttentionLaunch& launch;
  const RingAttentionSchedule schedule;
  GatherBlock<Executor> gather;

  MK_HOST_DEVICE std::uint32_t items() const {
    return packed() ? launch.packed.items[launch.packed.count] : schedule.items();
  }
  MK_HOST_DEVICE AttentionItem item(std::uint32_t number) const {
    const std::uint32_t sequence = packed() ? launch.packed.sequence_of(number) : 0;
    const std::uint32_t within = packed() ? number - launch.packed.items[sequence] : number;
    const std::uint32_t pairs = launch.plan.head_pairs();
    const std::uint32_t pair = within % pairs;
    SequenceTile query = schedule_of(sequence).query_tile(within / pairs);
    query.row += first_row(this->world.rank(), sequence);
    return {number,  query, pair, pair / launch.plan.key_heads, pair % launch.plan.key_heads,
            sequence};
  }
  /// Of the rows of one sequence by themselves.
  MK_HOST_DEVICE RingAttentionSchedule schedule_of(std::uint32_t sequence) const {
    if (!packed()) return schedule;
    return {launch.plan, this->world, launch.packed.rows[sequence], launch.mode};
  }
  /// Where an origin's rows of the sequence begin among all that it has.
  MK_HOST_DEVICE std::uint32_t first_row(std::uint32_t origin, std::uint32_t sequence) const {
    return packed() ? launch.packed.first_rows[origin * launch.packed.count + sequence] : 0;
  }
  /// Passes that any sequence has, at most.
  MK_HOST_DEVICE std::uint32_t passes() const {
    if (!packed()) return schedule.passes();
    const bool one = launch.mode == Mode::kUnfused || this->world.nodes == 1;
    return one ? 1 : 1 + launch.plan.remote_passes;
  }

  /// Waits until K and V of the pair (batch * key_heads + key head) are here, rows [row, row +
  /// rows) of the origin's rows of the sequence; false: the launch has failed.
  MK_HOST_DEVICE bool await_keys(std::uint32_t origin, std::uint32_t pair, std::uint32_t row,
                                 std::uint32_t rows) {
    if (origin == this->world.rank()) return true;
    if (launch.plan.packing == KeyPacking::kRows) {
      const std::uint32_t batch = pair / launch.plan.key_heads;
      const std::uint32_t first = schedule.first_row_of_batch(origin, batch) + row;
      return gather.await_rows(origin, first, first + rows);
    }
    // V comes last, and everything comes in order.
    const std::uint32_t end =
        first_row_of_unit(origin, pair) + (rows_of(origin) + row + rows) * together();
    if constexpr (requires { this->executor.rows_shown(origin); }) {
      return await_shown(origin, end);
    } else {
      return gather.await_rows_before(origin, end, arrived_.of(origin));
    }
  }
  /// For others (the watch role): waits until the pair is here as a whole, and shows how far the
  /// origin's rows have come.
  MK_HOST_DEVICE bool watch_pair(std::uint32_t origin, std::uint32_t pair) {
    GatherProgress& progress = arrived_.of(origin);
    const std::uint32_t before = progress.rows;
    const std::uint32_t end = first_row_of_unit(origin, pair + together());
    // Of packed sequences the rank may have no row, but other lengths.
    if (end == 0) return gather.await_header(origin);
    if (!gather.await_rows_before(origin, end, progress)) return false;
    if (progress.rows != before) this->executor.show_rows(origin, progress.rows);
    return true;
  }
  MK_HOST_DEVICE AttentionKeys keys(const AttentionItem& item, const KeyTile& key) const {
    AttentionKeys keys;
    keys.rows = key.tile.rows;
    if (key.origin == this->world.rank()) {
      const HeadTensor& k = launch.keys_values.keys;
      const HeadTensor& v = launch.keys_values.values;
      keys.keys = k.head(item.batch, item.key_head) + key.tile.row * k.row_stride;
      keys.key_stride = k.row_stride;
      keys.values = v.head(item.batch, item.key_head) + key.tile.row * v.row_stride;
      keys.value_stride = v.row_stride;
      return keys;
    }
    const RingAttentionGeometry& plan = launch.plan;
    const std::uint64_t stride = plan.gathered_row_bytes();
    if (plan.packing == KeyPacking::kRows) {
      const std::uint64_t first =
          schedule.first_row_of_batch(key.origin, item.batch) + key.tile.row;
      keys.keys = gather.rows(key.origin) + first * stride + item.key_head * plan.head_bytes();
      keys.values = keys.keys + plan.key_heads * plan.head_bytes();
    } else {
      const std::uint64_t first = first_row_of_unit(key.origin, item.pair) +
                                  key.tile.row * together() + item.key_head % together();
      keys.keys = gather.rows(key.origin) + first * stride;
      keys.values = keys.keys + rows_of(key.origin) * together() * stride;
      keys.key_stride = keys.value_stride = together() * stride;
      return keys;
    }
    keys.key_stride = stride;
    keys.value_stride = stride;
    return keys;
  }

 private:
  MK_HOST_DEVICE bool packed() const { return launch.packed.count != 0; }
  /// All that an origin has of a batch, or of packed sequences.
  MK_HOST_DEVICE std::uint32_t rows_of(std::uint32_t origin) const {
    return packed() ? launch.packed.rank_rows[origin] : schedule.rows(origin);
  }
  MK_HOST_DEVICE std::uint32_t together() const { return launch.plan.heads_together; }
  /// By heads: of K of the pair and those together with it, among the origin's rows of the gather;
  /// their V follows.
  MK_HOST_DEVICE std::uint32_t first_row_of_unit(std::uint32_t origin, std::uint32_t pair) const {
    return 2 * (pair - pair % together()) * rows_of(origin);
  }
  /// Later than who watches: that one names who is behind.
  MK_HOST_DEVICE bool await_shown(std::uint32_t origin, std::uint32_t end) {
    return wait_until(
        this->executor, this->control,
        [&] { return this->site(FlagKind::kRowsReady, origin, origin, 0, kGatherHopsMax + 1); },
        this->totals.waits, end,
        [&](std::uint64_t* seen) {
          *seen = this->executor.rows_shown(origin);
          return *seen >= end;
        });
  }

  ArrivedRows arrived_;
};

}  // namespace mk::kernels
