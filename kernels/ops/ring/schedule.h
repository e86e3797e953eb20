/// \file
/// One launch of Ring Attention as index arithmetic. It says which rows of the sequence a rank
/// holds and its tiles of queries. It says which tiles of keys each of them meets, in which order
/// and pass. Compiles for host and device; all ranks of a launch compute the same.
///
/// **Parts.** Without a mask the sequence of s rows is cut into W parts (W ranks), and rank r holds
/// part r. With the causal mask it is cut into 2 W parts, and rank r holds parts r and 2W-1-r, one
/// after the other. What part r sees less than the average, part 2W-1-r sees more. So all ranks
/// have the same work (to about one row's, where s is no multiple of 2 W).
///
/// **Tiles.** The rows of each part are spread evenly over as few tiles as hold them (of at most
/// tile_q rows of queries, tile_k of keys). So no tile straddles a part: its rows are neighbours in
/// the sequence. A tile of keys is, for a tile of queries, seen as a whole, along the diagonal, or
/// not at all. Then it is skipped, and never waited for.
///
/// **Steps.** A rank's tiles of keys come in the order in which they are to be expected here. First
/// come its own (from the caller's memory, no wait), then those of the node's other ranks from the
/// next local rank on. Those of the nodes follow in the order of their hops over the ring. The
/// ranks of one node arrive side by side over their rails, so their tiles take turns. Step numbers
/// count through this order; T, the most tiles of any rank, is each rank's share of numbers, and a
/// rank with fewer leaves some idle.
///
/// **Passes.** Pass 0 takes all tiles of queries over the steps of this node. Each further pass
/// takes them all over a stretch of the remote steps. Between two passes a tile's state (output,
/// maximum and sum, in fp32) is put aside as it is. So passes change no bit of the result. Their
/// number is the plan's, whatever the number of ranks. The last of R remote passes of equal length
/// can begin only when everything has arrived. So a launch that is bound by the network takes about
/// 1/R of its remote computation longer than the network does.
#pragma once

#include <cstdint>

#include "kernels/comm/shard.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/gather/schedule.h"
#include "kernels/ops/ring/geometry.h"
#include "shm/platform.h"

namespace mk::kernels {

/// Rows spread evenly over as few tiles as hold them.
struct RowTiles {
  std::uint32_t rows = 0;
  std::uint32_t tiles = 0;
  std::uint32_t height = 0;  ///< of each but the last

  MK_HOST_DEVICE constexpr RowTiles(std::uint32_t rows_in, std::uint32_t limit)
      : rows(rows_in),
        tiles(div_up(rows_in, limit)),
        height(rows == 0 ? 0 : div_up(rows_in, tiles)) {}
  MK_HOST_DEVICE constexpr ShardRange tile(std::uint32_t index) const {
    const std::uint32_t first = index * height;
    return {first, rows - first < height ? rows - first : height};
  }
};

/// Rows [row, row + rows) of a rank's tensors, which are rows `position` and on of the sequence.
struct SequenceTile {
  std::uint32_t row = 0;
  std::uint32_t rows = 0;
  std::uint32_t position = 0;
};

/// Whose keys, and which.
struct KeyTile {
  std::uint32_t origin = 0;  ///< rank
  SequenceTile tile;         ///< rows 0: an idle step
};

/// What a tile of queries sees of a tile of keys.
enum class Sight : std::uint8_t {
  kNone = 0,
  kDiagonal = 1,  ///< query row i sees key j if j <= i + diagonal()
  kAll = 2,
};

/// Steps [begin, end).
struct StepRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

class RingAttentionSchedule {
 public:
  /// As the rank of `world` sees it. `seq` is from plan.parts() to plan.seq_max; of a packed launch
  /// (packed.h), the rows of one of its sequences, of which some ranks may then have none.
  MK_HOST_DEVICE RingAttentionSchedule(const RingAttentionGeometry& plan, const World& world,
                                       std::uint32_t seq, Mode mode)
      : plan_(plan),
        world_(world),
        gather_(plan.gather, world),
        seq_(seq),
        mode_(mode),
        key_tiles_max_(plan.parts_per_rank() *
                       RowTiles(shard_rows_max(seq, plan.parts()), plan.tile_k).tiles) {}

  MK_HOST_DEVICE std::uint32_t seq() const { return seq_; }
  MK_HOST_DEVICE const GatherSchedule& gather() const { return gather_; }

  // --- Rows ---

  /// Rank `rank`'s `half`-th part of the sequence, half < parts_per_rank().
  MK_HOST_DEVICE ShardRange part(std::uint32_t rank, std::uint32_t half) const {
    return shard_of(seq_, plan_.parts(), half == 0 ? rank : plan_.parts() - 1 - rank);
  }
  /// Rows of Q, K, V and O of rank `rank`.
  MK_HOST_DEVICE std::uint32_t rows(std::uint32_t rank) const {
    return plan_.causal ? part(rank, 0).count + part(rank, 1).count : part(rank, 0).count;
  }

  // --- Tiles of queries of this rank ---

  MK_HOST_DEVICE std::uint32_t query_tiles() const { return tiles_of(world_.rank(), plan_.tile_q); }
  MK_HOST_DEVICE SequenceTile query_tile(std::uint32_t tile) const {
    return tile_of(world_.rank(), plan_.tile_q, tile);
  }
  /// What a compute block takes at a time: a tile of queries with all heads of one key head, of one
  /// batch. Item i is tile i / head_pairs() with pair i % head_pairs().
  MK_HOST_DEVICE std::uint32_t items() const { return query_tiles() * plan_.head_pairs(); }

  // --- Rows of the gather (KeyPacking) ---

  /// Of rank `rank`, in all.
  MK_HOST_DEVICE std::uint32_t gathered_rows(std::uint32_t rank) const {
    return plan_.gathered_rows(rows(rank));
  }
  /// The first one with rows of the batch.
  MK_HOST_DEVICE std::uint32_t first_row_of_batch(std::uint32_t rank, std::uint32_t batch) const {
    return batch * rows(rank);
  }

  // --- Steps ---

  MK_HOST_DEVICE std::uint32_t steps() const { return world_.size() * key_tiles_max_; }
  MK_HOST_DEVICE KeyTile key_tile(std::uint32_t step) const {
    const std::uint32_t local_steps = world_.locals * key_tiles_max_;
    const std::uint32_t hops = step / local_steps;
    const std::uint32_t within = step - hops * local_steps;
    // On this node one rank after the other, of other nodes the rails in turn.
    const std::uint32_t rail = hops == 0 ? within / key_tiles_max_ : within % world_.locals;
    const std::uint32_t tile = hops == 0 ? within % key_tiles_max_ : within / world_.locals;
    KeyTile key;
    key.origin = gather_.origin_at(hops * world_.locals + rail);
    if (tile < tiles_of(key.origin, plan_.tile_k)) {
      key.tile = tile_of(key.origin, plan_.tile_k, tile);
    }
    return key;
  }

  // --- Passes ---

  /// Unfused launches have everything when they begin, and need only one.
  MK_HOST_DEVICE std::uint32_t passes() const {
    if (mode_ == Mode::kUnfused || world_.nodes == 1) return 1;
    return 1 + (plan_.remote_passes < remote_rounds() ? plan_.remote_passes : remote_rounds());
  }
  MK_HOST_DEVICE StepRange pass_steps(std::uint32_t pass) const {
    if (passes() == 1) return {0, steps()};
    const std::uint32_t local_steps = world_.locals * key_tiles_max_;
    if (pass == 0) return {0, local_steps};
    // Rounds: one tile of each rail.
    const ShardRange rounds = shard_of(remote_rounds(), passes() - 1, pass - 1);
    return {local_steps + rounds.first * world_.locals,
            local_steps + (rounds.first + rounds.count) * world_.locals};
  }
  /// Whether the tile of queries sees any key in the pass; in pass 0 each does.
  MK_HOST_DEVICE bool in_pass(const SequenceTile& query, std::uint32_t pass) const {
    if (pass == 0) return true;
    const StepRange range = pass_steps(pass);
    for (std::uint32_t step = range.begin; step < range.end; ++step) {
      if (sight(query, key_tile(step)) != Sight::kNone) return true;
    }
    return false;
  }
  /// The last pass in which it does.
  MK_HOST_DEVICE std::uint32_t last_pass(const SequenceTile& query) const {
    std::uint32_t pass = passes() - 1;
    while (!in_pass(query, pass)) --pass;
    return pass;
  }

  // --- Who sees what ---

  MK_HOST_DEVICE static std::int64_t diagonal(const SequenceTile& query, const KeyTile& key) {
    return std::int64_t{query.position} - std::int64_t{key.tile.position};
  }
  MK_HOST_DEVICE Sight sight(const SequenceTile& query, const KeyTile& key) const {
    if (key.tile.rows == 0) return Sight::kNone;
    if (!plan_.causal) return Sight::kAll;
    const std::int64_t ahead = diagonal(query, key);
    if (std::int64_t{query.rows} - 1 + ahead < 0) return Sight::kNone;
    return ahead >= std::int64_t{key.tile.rows} - 1 ? Sight::kAll : Sight::kDiagonal;
  }

  /// Pairs of a query row of this rank and a key row that it sees.
  MK_HOST_DEVICE std::uint64_t pairs() const {
    if (!plan_.causal) return std::uint64_t{rows(world_.rank())} * seq_;
    std::uint64_t pairs = 0;
    for (std::uint32_t half = 0; half < 2; ++half) {
      const ShardRange rows = part(world_.rank(), half);
      const std::uint64_t count = rows.count;
      pairs += count * rows.first + count * (count + 1) / 2;
    }
    return pairs;
  }

  // --- What the gather moves, with these rows; see gather/schedule.h ---

  MK_HOST_DEVICE std::uint64_t network_bytes() const {
    return gather_.network_bytes([this](std::uint32_t rank) { return gathered_rows(rank); });
  }
  MK_HOST_DEVICE std::uint64_t local_bytes() const {
    return gather_.local_bytes([this](std::uint32_t rank) { return gathered_rows(rank); });
  }
  MK_HOST_DEVICE std::uint32_t commands() const {
    return gather_.commands([this](std::uint32_t rank) { return gathered_rows(rank); });
  }

 private:
  MK_HOST_DEVICE std::uint32_t remote_rounds() const { return (world_.nodes - 1) * key_tiles_max_; }
  MK_HOST_DEVICE std::uint32_t tiles_of(std::uint32_t rank, std::uint32_t limit) const {
    const std::uint32_t first = RowTiles(part(rank, 0).count, limit).tiles;
    return plan_.causal ? first + RowTiles(part(rank, 1).count, limit).tiles : first;
  }
  MK_HOST_DEVICE SequenceTile tile_of(std::uint32_t rank, std::uint32_t limit,
                                      std::uint32_t tile) const {
    const ShardRange first = part(rank, 0);
    const RowTiles first_tiles(first.count, limit);
    if (tile < first_tiles.tiles) {
      const ShardRange rows = first_tiles.tile(tile);
      return {rows.first, rows.count, first.first + rows.first};
    }
    const ShardRange second = part(rank, 1);
    const ShardRange rows = RowTiles(second.count, limit).tile(tile - first_tiles.tiles);
    return {first.count + rows.first, rows.count, second.first + rows.first};
  }

  RingAttentionGeometry plan_;
  World world_;
  GatherSchedule gather_;
  std::uint32_t seq_;
  Mode mode_;
  std::uint32_t key_tiles_max_;
};

}  // namespace mk::kernels
