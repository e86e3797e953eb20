/// \file
/// One launch of GEMM+Combine as index arithmetic: which nodes and tokens come when, what of a
/// bank crosses the network, and where everything lies. What depends on the rows is in row_index.h.
/// Compiles for host and device.
///
/// **Order.** What travels far goes first: the sums for tokens of node d + 1, then of d + 2, ....
/// This node's own tokens come last.
///
/// **Chunks** of what a rank sends to a rail peer. Chunk 0 is the header alone. Chunk c, from 1 on,
/// holds the sums of tokens [(c - 1) P, c P) of those that have any row on this node, in the order
/// of the tokens, P = chunk_tokens.
///
/// Network payload of the rank of rail l on node d in one launch, in bytes:
///     sum over the other nodes e of (header + tokens(e, l, d) * H * partial bytes)
/// with tokens(e, l, d) the tokens of the rank of rail l on node e that have a row on node d.
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/world.h"
#include "kernels/ops/combine/geometry.h"
#include "kernels/ops/combine/row_index.h"
#include "shm/platform.h"

namespace mk::kernels {

/// What a launch found out about the handles of all ranks.
struct CombineVerdict {
  std::uint32_t bad_rank = 0;    ///< 1 + the rank whose rows do not fit; 0: all do
  std::uint32_t incomplete = 0;  ///< it has none, because its Dispatch+GEMM failed
};

/// Words between the blocks of one rank.
struct CombineWords {
  std::uint32_t counted[kBlocksMax] = {};  ///< by plan block: epoch in which its tiles were indexed
  std::uint32_t listed[kBlocksMax] = {};  ///< likewise: its parts of the node's entries are counted
  std::uint32_t tiles = 0;                ///< row tiles of this rank
  CombineFault faults[kBlocksMax];        ///< what each plan block found
  CombineFault fault;                     ///< the first of them
  CombineVerdict verdict;
};

/// Of a part of the tokens, and of one node.
struct CombineCounts {
  std::uint32_t there = 0;    ///< this rank's tokens that have an expert on that node
  std::uint32_t tokens = 0;   ///< its rail peer's that have rows on this node
  std::uint32_t entries = 0;  ///< and their rows
  std::uint32_t reserved = 0;
  std::uint64_t late = 0;  ///< of its own node: a byte for each lateness, its tokens (lateness.h)
};
/// Classes of tokens, by when their last row is computed.
inline constexpr std::uint32_t kLatenesses = 8;

/// Of a node: what this rank sends to its rail peer there. Of its own node: only `clash`.
struct CombinePeer {
  std::uint32_t tokens = 0;
  std::uint32_t clash = 0;  ///< 1: two rows claim one slot of a token; then no entry tells of both
};

/// In front of the sums that a rank sends; `checks` of the sender's local ranks follow.
struct CombineHeader {
  std::uint32_t epoch = 0;
  std::uint32_t tokens = 0;
  std::uint64_t reserved = 0;
};
MK_HOST_DEVICE constexpr std::uint64_t combine_header_bytes(std::uint32_t locals) {
  return round_up_to(sizeof(CombineHeader) + std::uint64_t{locals} * 8, 64);
}

class CombineSchedule {
 public:
  CombineSchedule() = default;
  /// As the rank of `world` sees it.
  MK_HOST_DEVICE CombineSchedule(const CombineGeometry& plan, const World& world)
      : plan_(plan), world_(world), columns_(1, plan.shape.hidden, 1, plan.tile_n) {}

  // --- Tiles ---

  /// Column tiles of a row tile.
  MK_HOST_DEVICE std::uint32_t column_tiles() const { return columns_.tiles_n(); }
  MK_HOST_DEVICE TileRect columns_at(std::uint32_t column_tile) const {
    return columns_.rect(column_tile);
  }
  /// Row tiles of a band of the product (banded_tile).
  static constexpr std::uint32_t kBand = 16;
  /// With how many rows the tile is computed; those beyond its own mean nothing.
  MK_HOST_DEVICE std::uint32_t padded_rows(const CombineTile& tile) const {
    return static_cast<std::uint32_t>(round_up_to(tile.rows, plan_.row_pad));
  }

  // --- Parts of the tokens, which plan blocks and their lanes share out ---

  /// A lane has a part to itself: few tokens are cut into parts of one, so that many lanes work.
  static constexpr std::uint32_t kPartTokensMax = 16;
  static constexpr std::uint32_t kPartsOfFew = 512;
  MK_HOST_DEVICE static constexpr std::uint32_t part_tokens(std::uint32_t tokens) {
    const std::uint32_t each = div_up(tokens, kPartsOfFew);
    return each == 0 ? 1 : each < kPartTokensMax ? each : kPartTokensMax;
  }
  MK_HOST_DEVICE static constexpr std::uint32_t parts_of(std::uint32_t tokens) {
    return div_up(tokens, part_tokens(tokens));
  }
  /// The most parts that any number of tokens up to that has.
  MK_HOST_DEVICE static constexpr std::uint32_t parts_max(std::uint32_t tokens_max) {
    const std::uint32_t parts = div_up(tokens_max, kPartTokensMax);
    const std::uint32_t of_few = tokens_max < kPartsOfFew ? tokens_max : kPartsOfFew;
    return parts > of_few ? parts : of_few;
  }
  MK_HOST_DEVICE static constexpr TileRange tokens_of(std::uint32_t part, std::uint32_t tokens) {
    const std::uint32_t each = part_tokens(tokens);
    const std::uint32_t begin = part * each;
    return {begin, tokens - begin < each ? tokens : begin + each};
  }

  // --- Nodes and chunks ---

  /// The node whose tokens come `position`-th here, position < nodes: its own last.
  MK_HOST_DEVICE std::uint32_t node_after(std::uint32_t position) const {
    const std::uint32_t after = world_.node + 1 + position;
    return after < plan_.nodes ? after : after - plan_.nodes;
  }
  /// Of `tokens` sums, with the header's.
  MK_HOST_DEVICE std::uint32_t chunks(std::uint32_t tokens) const {
    return 1 + div_up(tokens, plan_.chunk_tokens);
  }
  MK_HOST_DEVICE std::uint32_t chunk_of(std::uint32_t index) const {
    return 1 + index / plan_.chunk_tokens;
  }
  /// The sums in that chunk, which is not the header's.
  MK_HOST_DEVICE TileRange chunk_tokens(std::uint32_t tokens, std::uint32_t chunk) const {
    const std::uint32_t begin = (chunk - 1) * plan_.chunk_tokens;
    return {begin, tokens - begin < plan_.chunk_tokens ? tokens : begin + plan_.chunk_tokens};
  }
  /// What of a bank the chunk's command carries.
  MK_HOST_DEVICE ByteRange chunk_range(std::uint32_t tokens, std::uint32_t chunk) const {
    if (chunk == 0) return {0, static_cast<std::uint32_t>(header_bytes())};
    const TileRange range = chunk_tokens(tokens, chunk);
    return {sum_in_bank(range.begin),
            static_cast<std::uint32_t>((range.end - range.begin) * row_bytes())};
  }
  /// Of a whole chunk of sums.
  MK_HOST_DEVICE std::uint64_t chunk_bytes() const { return plan_.chunk_tokens * row_bytes(); }
  /// Payload of `tokens` sums for one rail peer.
  MK_HOST_DEVICE std::uint64_t network_bytes(std::uint32_t tokens) const {
    return header_bytes() + tokens * row_bytes();
  }
  MK_HOST_DEVICE FlagMap flags() const { return plan_.flags(); }

  // --- Places in a workspace, as byte offsets ---

  MK_HOST_DEVICE std::uint64_t header_bytes() const { return combine_header_bytes(plan_.locals); }
  /// Of a product row or a sum, as it travels.
  MK_HOST_DEVICE std::uint64_t row_bytes() const {
    return std::uint64_t{plan_.shape.hidden} * plan_.partial_bytes();
  }
  MK_HOST_DEVICE std::uint64_t sum_in_bank(std::uint32_t index) const {
    return header_bytes() + index * row_bytes();
  }
  /// Which of a rank's slots (and entries).
  MK_HOST_DEVICE static constexpr std::uint64_t slot_index(const CombineShape& shape,
                                                           std::uint32_t node, std::uint32_t token,
                                                           std::uint32_t slot) {
    return (std::uint64_t{node} * shape.tokens_max + token) * shape.top_k + slot;
  }
  MK_HOST_DEVICE std::uint64_t slot(std::uint32_t node, std::uint32_t token,
                                    std::uint32_t slot) const {
    return plan_.layout.slots + entry_index(node, token, slot) * row_bytes();
  }
  MK_HOST_DEVICE std::uint64_t entry(std::uint32_t node, std::uint32_t token,
                                     std::uint32_t slot) const {
    return plan_.layout.entries + entry_index(node, token, slot) * sizeof(CombineEntry);
  }
  MK_HOST_DEVICE std::uint64_t note(std::uint32_t local, std::uint32_t node) const {
    return plan_.layout.notes + (std::uint64_t{local} * plan_.nodes + node) * sizeof(CombineNote);
  }
  MK_HOST_DEVICE std::uint64_t block_note(std::uint32_t block, std::uint32_t rank) const {
    return plan_.layout.block_notes +
           (std::uint64_t{block} * world_.size() + rank) * sizeof(CombineNote);
  }
  /// The checks that plan block `block` has made of this rank's ids; kBlocksMax: those of all.
  MK_HOST_DEVICE std::uint64_t expected(std::uint32_t block) const {
    return plan_.layout.expected + std::uint64_t{block} * world_.size() * 8;
  }
  MK_HOST_DEVICE std::uint64_t counts(std::uint32_t node, std::uint32_t part) const {
    const std::uint64_t parts = parts_max(plan_.shape.tokens_max);
    return plan_.layout.counts + (node * parts + part) * sizeof(CombineCounts);
  }
  MK_HOST_DEVICE std::uint64_t tile_parts(std::uint32_t tile) const {
    return plan_.layout.tile_parts + std::uint64_t{tile} * 4;
  }
  MK_HOST_DEVICE std::uint64_t indexed(std::uint32_t local) const {
    return plan_.layout.indexed + std::uint64_t{local} * 64;
  }
  MK_HOST_DEVICE std::uint32_t tile_flag(std::uint32_t local, std::uint32_t tile) const {
    return local * plan_.tiles_max + tile;
  }
  MK_HOST_DEVICE std::uint64_t tile_ready(std::uint32_t flag) const {
    return plan_.layout.tile_ready + std::uint64_t{flag} * 4;
  }
  MK_HOST_DEVICE std::uint64_t peer(std::uint32_t node) const {
    return plan_.layout.peers + std::uint64_t{node} * sizeof(CombinePeer);
  }
  MK_HOST_DEVICE std::uint64_t list(std::uint32_t node) const {
    return plan_.layout.lists + std::uint64_t{node} * plan_.shape.tokens_max * 4;
  }
  MK_HOST_DEVICE std::uint64_t place(std::uint32_t node) const {
    return plan_.layout.places + std::uint64_t{node} * plan_.shape.tokens_max * 4;
  }
  MK_HOST_DEVICE std::uint64_t chunk_reduced(std::uint32_t node, std::uint32_t chunk) const {
    return plan_.layout.chunk_reduced + (std::uint64_t{node} * plan_.chunks_max + chunk) * 4;
  }
  /// On node `at`, for what goes to node `to`.
  MK_HOST_DEVICE std::uint64_t staging_bank(std::uint32_t bank, std::uint32_t at,
                                            std::uint32_t to) const {
    return plan_.layout.staging +
           (bank * (plan_.nodes - 1) + peer_index(at, to)) * plan_.layout.bank_bytes;
  }
  /// On node `at`, that node `from` fills.
  MK_HOST_DEVICE std::uint64_t receive_bank(std::uint32_t bank, std::uint32_t at,
                                            std::uint32_t from) const {
    return plan_.layout.receive +
           (bank * (plan_.nodes - 1) + peer_index(at, from)) * plan_.layout.bank_bytes;
  }

 private:
  MK_HOST_DEVICE std::uint64_t entry_index(std::uint32_t node, std::uint32_t token,
                                           std::uint32_t slot) const {
    return slot_index(plan_.shape, node, token, slot);
  }

  CombineGeometry plan_;
  World world_;
  TileGrid columns_;
};

}  // namespace mk::kernels
