/// \file
/// A block of Ring Attention: a gather of keys and values, and which tiles it makes possible. The
/// roles are in roles.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/comm/operator_block.h"
#include "kernels/gather/block.h"
#include "kernels/ring_attention/launch.h"
#include "kernels/ring_attention/schedule.h"

namespace mk::kernels {

/// A tile of queries with the query heads of one key head.
struct AttentionItem {
  std::uint32_t number = 0;
  SequenceTile query;
  std::uint32_t key_head = 0;
};

/// A tile of keys of all key heads, and their values, where this rank reads them. Strides are in
/// bytes from row to row.
struct AttentionKeys {
  const std::byte* keys = nullptr;
  std::uint64_t key_stride = 0;
  const std::byte* values = nullptr;
  std::uint64_t value_stride = 0;
  std::uint32_t rows = 0;
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

  MK_HOST_DEVICE AttentionItem item(std::uint32_t number) const {
    const std::uint32_t heads = launch.plan.key_heads;
    return {number, schedule.query_tile(number / heads), number % heads};
  }

  /// Waits until the tile of keys is here; false: the launch has failed.
  MK_HOST_DEVICE bool await_keys(const KeyTile& key) {
    if (key.origin == this->world.rank()) return true;
    return gather.await_rows(key.origin, key.tile.row, key.tile.row + key.tile.rows);
  }
  MK_HOST_DEVICE AttentionKeys keys(const KeyTile& key) const {
    AttentionKeys keys;
    keys.rows = key.tile.rows;
    if (key.origin == this->world.rank()) {
      const RowPiece& k = launch.keys_values.pieces[0];
      const RowPiece& v = launch.keys_values.pieces[1];
      keys.keys = k.base + key.tile.row * k.stride;
      keys.key_stride = k.stride;
      keys.values = v.base + key.tile.row * v.stride;
      keys.value_stride = v.stride;
      return keys;
    }
    const std::uint64_t stride = launch.plan.gather.row_bytes;
    keys.keys = gather.rows(key.origin) + key.tile.row * stride;
    keys.values = keys.keys + launch.plan.key_row_bytes();
    keys.key_stride = stride;
    keys.value_stride = stride;
    return keys;
  }
};

}  // namespace mk::kernels
