/// \file
/// One gather as index arithmetic: over which nodes rows travel, in what chunks, where they lie,
/// which flag says that they are there, and in which order to expect them. Compiles for host and
/// device.
///
/// **The ring.** A rank's shard goes from its node to the next one, from there to the one after,
/// and so on, always to the rank of the same rail, until all other nodes have it. It crosses to
/// each node once. Hop h of a shard ends on node (origin + h) mod N. So a rank sends its own shard
/// (hop 0 there), and forwards, of its rail, those of node - 1, node - 2, ..., all but that of node
/// + 1, which has come full circle.
///
/// **Chunks.** Chunk 0 of a shard is its header; chunk c, from 1 on, holds the bytes
/// [(c - 1) * chunk_bytes, c * chunk_bytes) of the shard's packed rows. A row may straddle chunks.
/// A shard without rows has just its header.
///
/// Network payload of one rank in one launch, in bytes, with rows(r) the rows of rank r:
///     sum over the nodes d but node + 1 of (64 + rows(rail peer on d) * row_bytes)
/// (with one node: 0), in as many commands as these shards have chunks, and with one bank one more,
/// the release.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/divisor.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/types.h"
#include "kernels/comm/world.h"
#include "kernels/gather/geometry.h"
#include "shm/platform.h"

namespace mk::kernels {

/// Chunks [begin, end) of a shard.
struct ChunkRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// The order in which a rank sends the chunks of several shards. It is one shard after the other,
/// or, if the operator's plan says so, **in turns**. Then the first chunks of all shards are there
/// early, which suits who needs some of each. In turn t, shard s has its run t - s. The predecessor
/// has sent that a turn before, so nobody waits for the latency of each hop. A shard's last run is
/// longer, so that shards end one after the other. Else who waits for the last chunks would have
/// those of all shards left to do.
struct ChunkOrder {
  static constexpr std::uint32_t kLastTurns = 4;

  std::uint32_t shards = 0;
  std::uint32_t turn_chunks = 0;  ///< of a run; 0: all

  /// Run `number` of a shard, in runs of `run` chunks (0: all); an empty one behind its last.
  MK_HOST_DEVICE static ChunkRange run_of(std::uint32_t number, std::uint32_t run,
                                          std::uint32_t chunks) {
    const std::uint32_t begin = number * run;
    const std::uint32_t last = kLastTurns * run;
    if (number != 0 && chunks < begin + last) return {chunks, chunks};
    return {begin, run == 0 || chunks < begin + run + last ? chunks : begin + run};
  }

  /// Calls `one(shard, ChunkRange)` for each run, in their order. `chunks_of(shard)` says how many
  /// the shard has, or 0: the launch has failed. It is asked before each run. False: that, or `one`
  /// says so.
  template <class ChunksOf, class One>
  MK_HOST_DEVICE bool for_each_run(ChunksOf&& chunks_of, One&& one) const {
    const std::uint32_t run = shards > 1 ? turn_chunks : 0;
    std::uint32_t open = 0;  // the first shard that has not ended
    for (std::uint32_t turn = 0; open < shards; ++turn) {
      for (std::uint32_t shard = open; shard <= turn && shard < shards; ++shard) {
        const std::uint32_t chunks = chunks_of(shard);
        if (chunks == 0) return false;
        const ChunkRange range = run_of(turn - shard, run, chunks);
        if (range.begin < range.end && !one(shard, range)) return false;
        if (shard == open && range.end == chunks) ++open;
      }
    }
    return true;
  }
};

class GatherSchedule {
 public:
  GatherSchedule() = default;
  /// As the rank of `world` sees it.
  MK_HOST_DEVICE GatherSchedule(const GatherGeometry& geometry, const World& world)
      : geometry_(geometry),
        world_(world),
        locals_(world.locals),
        chunk_lines_(geometry.chunk_bytes == 0 ? 1 : geometry.chunk_bytes / kGatherLine) {}

  MK_HOST_DEVICE const GatherGeometry& geometry() const { return geometry_; }
  MK_HOST_DEVICE const World& world() const { return world_; }

  // --- The ring ---

  /// The node this rank sends to, and the one it receives from.
  MK_HOST_DEVICE std::uint32_t successor() const { return node_after(world_.node); }
  MK_HOST_DEVICE std::uint32_t predecessor() const { return node_at(1); }
  /// The node whose shards come here over `hops` hops; 0: this node.
  MK_HOST_DEVICE std::uint32_t node_at(std::uint32_t hops) const {
    return node_before(world_.node, hops);
  }
  MK_HOST_DEVICE std::uint32_t hops_from(std::uint32_t origin_node) const {
    return node_before(world_.node, origin_node);
  }
  /// How many shards this rank sends: those of node_at(0) (its own), node_at(1), ...
  MK_HOST_DEVICE std::uint32_t shards_sent() const { return world_.nodes - 1; }
  /// In which order. Shard s of its predecessor is that of node_at(s + 1): in this order they come
  /// here, too.
  MK_HOST_DEVICE ChunkOrder order() const { return {shards_sent(), geometry_.turn_chunks}; }
  MK_HOST_DEVICE bool takes_turns() const { return world_.nodes > 2 && geometry_.turn_chunks != 0; }

  // --- The order in which rows are to be expected here ---

  /// The rank whose rows come as the `position`-th, 0 <= position < world size. This rank comes
  /// first, then the node's others from the next local rank on. Then come the nodes in the order of
  /// their hops, of each the rank of this rail first. The L ranks of one node arrive side by side
  /// over L rails: a consumer takes their chunks in turn (see ag_gemm/schedule.h).
  MK_HOST_DEVICE std::uint32_t origin_at(std::uint32_t position) const {
    const std::uint32_t hops = hops_at(position);
    const std::uint32_t local = world_.local + position - hops * world_.locals;
    return node_at(hops) * world_.locals + (local < world_.locals ? local : local - world_.locals);
  }
  MK_HOST_DEVICE std::uint32_t hops_at(std::uint32_t position) const { return position / locals_; }
  MK_HOST_DEVICE std::uint32_t node_of(std::uint32_t origin) const { return origin / locals_; }
  /// The local rank, of any node, that the origin's rows come to: its rail.
  MK_HOST_DEVICE std::uint32_t rail_of(std::uint32_t origin) const { return origin % locals_; }

  // --- Chunks of a shard of `rows` rows ---

  MK_HOST_DEVICE std::uint64_t data_bytes(std::uint32_t rows) const {
    return std::uint64_t{rows} * geometry_.row_bytes;
  }
  /// The header's included.
  MK_HOST_DEVICE std::uint32_t chunks(std::uint32_t rows) const {
    return 1 + div_up(lines_up(data_bytes(rows)), chunk_lines_);
  }
  /// What of a slot the chunk is.
  MK_HOST_DEVICE ByteRange chunk_range(std::uint32_t rows, std::uint32_t chunk) const {
    ByteRange range;
    if (chunk == 0) {
      range.bytes = kGatherHeaderBytes;
      return range;
    }
    const std::uint64_t begin = std::uint64_t{chunk - 1} * geometry_.chunk_bytes;
    const std::uint64_t left = data_bytes(rows) - begin;
    range.begin = kGatherHeaderBytes + begin;
    range.bytes =
        left < geometry_.chunk_bytes ? static_cast<std::uint32_t>(left) : geometry_.chunk_bytes;
    return range;
  }
  /// Of `count` chunks that follow each other, one at least.
  MK_HOST_DEVICE ByteRange chunks_range(std::uint32_t rows, std::uint32_t first,
                                        std::uint32_t count) const {
    ByteRange range = chunk_range(rows, first);
    const ByteRange last = chunk_range(rows, first + count - 1);
    range.bytes = static_cast<std::uint32_t>(last.begin + last.bytes - range.begin);
    return range;
  }
  /// The chunks that hold bytes of rows [begin, end); none when there is no such row.
  MK_HOST_DEVICE ChunkRange chunks_of_rows(std::uint32_t begin, std::uint32_t end) const {
    if (begin >= end) return {};
    const auto first_line = static_cast<std::uint32_t>(data_bytes(begin) / kGatherLine);
    return {1 + first_line / chunk_lines_, chunks(end)};
  }
  /// Whole rows in the first `count` chunks, the header's included, of a shard of `rows` rows.
  MK_HOST_DEVICE std::uint32_t rows_in(std::uint32_t count, std::uint32_t rows) const {
    const std::uint64_t bytes = count == 0 ? 0 : std::uint64_t{count - 1} * geometry_.chunk_bytes;
    return bytes < data_bytes(rows) ? static_cast<std::uint32_t>(bytes / geometry_.row_bytes)
                                    : rows;
  }
  /// Payload that this rank sends in a launch (the formula above); `rows_of(rank)`.
  template <class RowsOf>
  MK_HOST_DEVICE std::uint64_t network_bytes(RowsOf&& rows_of) const {
    std::uint64_t bytes = 0;
    for (std::uint32_t hops = 0; hops < shards_sent(); ++hops) {
      bytes += kGatherHeaderBytes + data_bytes(rows_of(world_.rail_peer(node_at(hops))));
    }
    return bytes;
  }

  /// Commands with payload that this rank sends in a launch, and flag-only ones: a release.
  template <class RowsOf>
  MK_HOST_DEVICE std::uint32_t commands(RowsOf&& rows_of) const {
    std::uint32_t commands = world_.nodes > 1 && flags().has_releases() ? 1 : 0;
    for (std::uint32_t hops = 0; hops < shards_sent(); ++hops)
      commands += chunks(rows_of(world_.rail_peer(node_at(hops))));
    return commands;
  }
  /// Bytes that this rank's share and receive roles read and write on the node in a launch. These
  /// are its own rows, and in a broadcast the shards of its rail's other ranks. They are read once,
  /// and written once for each target. `in_place`: its own rows are (GatherBlock). `network_first`:
  /// so many chunks of them are copied for the network first (gather::Sharing), and read twice
  /// where local ranks get them, too.
  template <class RowsOf>
  MK_HOST_DEVICE std::uint64_t local_bytes(RowsOf&& rows_of, bool in_place = false,
                                           std::uint32_t network_first = 0) const {
    const bool broadcast = geometry_.kind == GatherKind::kBroadcast;
    const std::uint64_t peers = broadcast ? world_.locals - 1 : 0;
    const bool to_own_slot = broadcast ? world_.nodes > 1 && !in_place : world_.size() > 1;
    const std::uint64_t own_slot = to_own_slot ? 1 : 0;
    const auto bytes = [](std::uint64_t data, std::uint64_t targets) {
      return targets == 0 ? 0 : data * (1 + targets);
    };
    const std::uint64_t own = data_bytes(rows_of(world_.rank()));
    std::uint64_t sum = bytes(own, own_slot + peers);
    if (network_first > 1 && to_own_slot && peers != 0) {
      const std::uint64_t first = std::uint64_t{network_first - 1} * geometry_.chunk_bytes;
      sum += first < own ? first : own;
    }
    for (std::uint32_t hops = 1; hops < world_.nodes; ++hops) {
      const std::uint32_t rows = rows_of(world_.rail_peer(node_at(hops)));
      sum += bytes(kGatherHeaderBytes + data_bytes(rows), peers);
    }
    return sum;
  }

  // --- Places, as byte offsets in a workspace ---

  /// Slots of one bank in one workspace: kBroadcast: one per rank; kPull: one per node, for the
  /// ranks of this workspace's rail.
  MK_HOST_DEVICE std::uint32_t slots() const {
    return geometry_.kind == GatherKind::kBroadcast ? world_.size() : world_.nodes;
  }
  /// Of the origin's shard, in the workspaces of this node; kPull: of local rank rail_of(origin)
  /// only.
  MK_HOST_DEVICE std::uint64_t slot(std::uint32_t bank, std::uint32_t origin) const {
    return slot_at(slot_index(bank, origin));
  }
  /// Which slot that is of those of all banks.
  MK_HOST_DEVICE std::uint32_t slot_index(std::uint32_t bank, std::uint32_t origin) const {
    const bool one_place = geometry_.local_banks == 1 && node_of(origin) == world_.node;
    return index_of(one_place ? 0 : bank, origin);
  }
  /// The same in the workspaces of a node that is not the origin's.
  MK_HOST_DEVICE std::uint64_t slot_elsewhere(std::uint32_t bank, std::uint32_t origin) const {
    return slot_at(index_of(bank, origin));
  }
  /// Of the shard's first row; the others follow without gaps.
  MK_HOST_DEVICE std::uint64_t rows_at(std::uint32_t bank, std::uint32_t origin) const {
    return slot(bank, origin) + kGatherHeaderBytes;
  }
  /// Where this rank's own rows may lie, packed, so that the network reads them there in every
  /// launch (GatherBlock::in_place), whatever its bank: in bank 0, behind the header.
  MK_HOST_DEVICE std::uint64_t own_rows_in_place() const { return rows_at(0, world_.rank()); }
  /// The word that shows, in this workspace, that the chunk may be read on this node.
  MK_HOST_DEVICE std::uint64_t ready(std::uint32_t origin, std::uint32_t chunk) const {
    return geometry_.layout.ready + (std::uint64_t{origin} * geometry_.chunks_max + chunk) * 4;
  }
  /// The word that shows that the local rank has read what it wanted of its peers' slots (kPull).
  MK_HOST_DEVICE std::uint64_t drained(std::uint32_t local) const {
    return geometry_.layout.drained + std::uint64_t{local} * 64;
  }
  /// The word that shows that the local rank has given its daemon all that it sends
  /// (gather::send_first).
  MK_HOST_DEVICE std::uint64_t sent(std::uint32_t local) const {
    return geometry_.layout.sent + std::uint64_t{local} * 64;
  }

  /// Whether the slots of this workspace are read by other local ranks, too.
  MK_HOST_DEVICE bool read_by_others() const {
    return geometry_.kind == GatherKind::kPull && world_.locals > 1;
  }
  /// Whether a rank tells others in a launch that its consumers have read the bank. (Else the
  /// launch's end is all that they wait for.)
  MK_HOST_DEVICE bool awaits_consumers() const {
    return world_.nodes > 1 && (flags().has_releases() || read_by_others());
  }

  // --- Arrival flags, as indices into the operator's; see FlagMap ---

  /// At node `at`: the chunk of the shard of its rail from `origin_node` has landed. Written by the
  /// node before `at` in the ring.
  MK_HOST_DEVICE std::uint32_t arrival(std::uint32_t bank, std::uint32_t at,
                                       std::uint32_t origin_node, std::uint32_t chunk) const {
    return flags().arrival(bank, at, origin_node, chunk);
  }
  /// At node `at`, with one bank: the node after it in the ring has done with it. Written by that
  /// node.
  MK_HOST_DEVICE std::uint32_t release(std::uint32_t at) const {
    return flags().release(at, node_after(at));
  }
  MK_HOST_DEVICE FlagMap flags() const {
    return FlagMap{world_.nodes, geometry_.banks, geometry_.chunks_max, geometry_.first_flag};
  }

 private:
  MK_HOST_DEVICE std::uint32_t index_of(std::uint32_t bank, std::uint32_t origin) const {
    return bank * slots() + (geometry_.kind == GatherKind::kBroadcast ? origin : node_of(origin));
  }
  MK_HOST_DEVICE std::uint64_t slot_at(std::uint32_t index) const {
    return geometry_.layout.slots + std::uint64_t{index} * geometry_.layout.slot_bytes;
  }
  MK_HOST_DEVICE std::uint32_t node_after(std::uint32_t node) const {
    return node + 1 < world_.nodes ? node + 1 : 0;
  }
  /// `hops` nodes before it; at most as many as there are.
  MK_HOST_DEVICE std::uint32_t node_before(std::uint32_t node, std::uint32_t hops) const {
    return node >= hops ? node - hops : node + world_.nodes - hops;
  }
  MK_HOST_DEVICE static std::uint32_t lines_up(std::uint64_t bytes) {
    return static_cast<std::uint32_t>((bytes + kGatherLine - 1) / kGatherLine);
  }

  GatherGeometry geometry_;
  World world_;
  Divisor locals_;
  Divisor chunk_lines_;
};

}  // namespace mk::kernels
