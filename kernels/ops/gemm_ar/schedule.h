/// \file
/// One launch of GEMM+AllReduce as index arithmetic: which tile when, who owns it, where its
/// bytes lie, which chunk it belongs to. Compiles for host and device; all ranks of a launch
/// compute the same.
///
/// C is cut into tiles, numbered in bands (comm/tile_grid.h). Tile t belongs to local rank t mod L
/// of every node, as its owned tile number t div L: its **owner** sums it and exchanges it with its
/// rail peers. An owner's chunk c is its owned tiles [c*P, (c+1)*P), P = tiles_per_chunk. Ranks
/// compute tiles in the order of their numbers, so all owners' first chunks are complete first.
/// Each group of L tiles (one per owner) is walked from another start on each rank, so that no
/// owner receives from everybody at once.
///
/// **One-shot.** An owner sends its node's sums to all its rail peers, and each node adds up all.
/// Network payload of the rank of rail l in one launch, in bytes:
///     (N - 1) * (kBankHeaderBytes + owned(l) * tile_rows * tile_cols * p)
/// with p bytes for a partial sum (2, or 4 in fp32), which over all rails is about (N - 1) * m * n
/// * p: each node's sum of each element goes once to each other node.
///
/// **Two-shot** (GemmArGeometry::two_shot). One node of the rail adds up each chunk (node_pieces.h)
/// and sends what is finished to the others. Here chunks are numbered round by round, N to a round.
/// A rank computes in each round the chunk of the next node first, so that no node receives from
/// everybody at once. Network payload of the rank on node d, with p_e the tiles of the piece of e:
///     sum over the other nodes e of (kBankHeaderBytes + p_e * tile_rows * tile_cols * p)
///     + (N - 1) * p_d * tile_rows * (columns of C of a tile) * 2
/// which is about 2 (N - 1) / N of what an owner has.
#pragma once

#include <cstdint>

#include "kernels/comm/banks.h"
#include "kernels/comm/divisor.h"
#include "kernels/comm/launch_record.h"
#include "kernels/comm/packed_tiles.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/types.h"
#include "kernels/ops/gemm_ar/geometry.h"
#include "kernels/ops/gemm_ar/node_pieces.h"
#include "shm/platform.h"

namespace mk::kernels {

class GemmArSchedule {
 public:
  GemmArSchedule() = default;
  MK_HOST_DEVICE GemmArSchedule(const GemmArGeometry& plan, std::uint32_t m)
      : plan_(plan),
        locals_(plan.locals),
        grid_(m, plan.max.n, plan.tile_m, plan.tile_n, plan.epilogue.column_step()),
        tiles_per_chunk_(PackedTiles::per_chunk(plan.tile_bytes(grid_), plan.chunk_bytes)),
        tiles_per_round_(tiles_per_chunk_.value() * plan.nodes) {}

  MK_HOST_DEVICE const TileGrid& grid() const { return grid_; }
  MK_HOST_DEVICE std::uint32_t m() const { return grid_.rows(); }
  MK_HOST_DEVICE std::uint32_t tiles() const { return grid_.tiles(); }
  /// Size of every packed tile; the last ones of a row or column of tiles use less of it.
  MK_HOST_DEVICE std::uint32_t tile_rows() const { return grid_.tile_rows(); }
  MK_HOST_DEVICE std::uint32_t tile_cols() const { return grid_.tile_cols(); }
  MK_HOST_DEVICE std::uint64_t slot_bytes() const { return plan_.tile_bytes(grid_); }
  MK_HOST_DEVICE std::uint32_t tiles_per_chunk() const { return tiles_per_chunk_.value(); }

  // --- Tiles ---

  /// Where tile `tile` lies in C.
  MK_HOST_DEVICE TileRect rect(std::uint32_t tile) const { return grid_.rect(tile); }

  MK_HOST_DEVICE std::uint32_t owner(std::uint32_t tile) const { return tile % locals_; }
  MK_HOST_DEVICE std::uint32_t owned_index(std::uint32_t tile) const { return tile / locals_; }
  MK_HOST_DEVICE std::uint32_t tile_of(std::uint32_t owner, std::uint32_t owned_index) const {
    return owned_index * plan_.locals + owner;
  }
  /// How many tiles local rank `owner` owns; 0 when there are fewer tiles than local ranks.
  MK_HOST_DEVICE std::uint32_t owned(std::uint32_t owner) const {
    return owner < tiles() ? div_up(tiles() - owner, locals_) : 0;
  }

  /// The tile that the rank (node, local) computes as its `step`-th, 0 ≤ step < tiles().
  MK_HOST_DEVICE std::uint32_t tile_at(std::uint32_t node, std::uint32_t local,
                                       std::uint32_t step) const {
    if (two_shot()) step = turned_step(node, step);
    const std::uint32_t first = step / locals_ * plan_.locals;
    const std::uint32_t left = tiles() - first;
    const std::uint32_t turned = step - first + local;
    return first + (left < plan_.locals ? turned % left : turned % locals_);
  }

  // --- Chunks ---

  MK_HOST_DEVICE bool two_shot() const { return plan_.two_shot; }
  /// An owner's tiles, by their owned numbers; one-shot.
  MK_HOST_DEVICE PackedTiles packed(std::uint32_t owner) const {
    return PackedTiles(owned(owner), slot_bytes(), tiles_per_chunk_);
  }
  /// Chunks of an owner. One-shot: at least one, which then holds only its bank's header. Two-shot:
  /// N to a round, of which those of the last round may have no tile.
  MK_HOST_DEVICE std::uint32_t chunks(std::uint32_t owner) const {
    return two_shot() ? pieces(owner).rounds() * plan_.nodes : packed(owner).chunks();
  }
  MK_HOST_DEVICE std::uint32_t chunk_of(std::uint32_t owner, std::uint32_t owned_index) const {
    return two_shot() ? pieces(owner).chunk_of(owned_index) : owned_index / tiles_per_chunk_;
  }
  MK_HOST_DEVICE TileRange chunk_tiles(std::uint32_t owner, std::uint32_t chunk) const {
    return two_shot() ? pieces(owner).chunk_tiles(chunk) : packed(owner).chunk_tiles(chunk);
  }
  MK_HOST_DEVICE TilesPart chunk_part(std::uint32_t owner, std::uint32_t chunk, Part part) const {
    return part_of(chunk_tiles(owner, chunk), tiles_per_chunk(), part);
  }
  /// The chunk that `node` computes, and reduces, as its `position`-th.
  MK_HOST_DEVICE std::uint32_t chunk_at(std::uint32_t node, std::uint32_t owner,
                                        std::uint32_t position) const {
    if (!two_shot()) return position;
    const std::uint32_t round = position / plan_.nodes;
    const std::uint32_t first = round * plan_.nodes;
    return first + pieces(owner).node_at(node, round, position - first);
  }
  /// Payload that the rank sends in the launch (the formula above).
  MK_HOST_DEVICE std::uint64_t network_bytes(std::uint32_t node, std::uint32_t local) const {
    if (!two_shot()) return (plan_.nodes - 1) * packed(local).bank_bytes();
    std::uint64_t bytes = (plan_.nodes - 1) * pieces(local).piece_tiles(node) * finished_bytes();
    for (std::uint32_t to = 0; to < plan_.nodes; ++to)
      if (to != node) bytes += piece(local, to).bank_bytes();
    return bytes;
  }
  /// Commands that bring it.
  MK_HOST_DEVICE std::uint32_t sends(std::uint32_t node, std::uint32_t local) const {
    if (!two_shot()) return (plan_.nodes - 1) * chunks(local);
    std::uint32_t count = (plan_.nodes - 1) * finished_chunks(local, node);
    for (std::uint32_t to = 0; to < plan_.nodes; ++to)
      if (to != node) count += piece(local, to).chunks();
    return count;
  }

  // --- Pieces; two-shot ---

  MK_HOST_DEVICE NodePieces pieces(std::uint32_t owner) const {
    return NodePieces(owned(owner), plan_.nodes, tiles_per_chunk_, tiles_per_round_);
  }
  /// A node's piece of an owner's tiles; its chunks by their rounds.
  MK_HOST_DEVICE PackedTiles piece(std::uint32_t owner, std::uint32_t node) const {
    return PackedTiles(pieces(owner).piece_tiles(node), slot_bytes(), tiles_per_chunk_);
  }
  /// Rounds in which a node finishes a chunk.
  MK_HOST_DEVICE std::uint32_t finished_chunks(std::uint32_t owner, std::uint32_t node) const {
    return div_up(pieces(owner).piece_tiles(node), tiles_per_chunk_);
  }
  /// The flag of a round's sums, and of what is finished, as FlagMap counts chunks.
  MK_HOST_DEVICE static std::uint32_t sums_flag(std::uint32_t round) { return 2 * round; }
  MK_HOST_DEVICE static std::uint32_t finished_flag(std::uint32_t round) { return 2 * round + 1; }
  /// Flags of node `from` that a launch shows at node `at`: those below.
  MK_HOST_DEVICE std::uint32_t flags_shown(std::uint32_t owner, std::uint32_t at,
                                           std::uint32_t from) const {
    if (!two_shot()) return chunks(owner);
    const std::uint32_t sums = sums_flag(piece(owner, at).chunks() - 1) + 1;
    const std::uint32_t finished = 2 * finished_chunks(owner, from);
    return sums > finished ? sums : finished;
  }

  /// The receive role's `position`-th step, position < receive_steps(): it adds up a
  /// chunk of its own node, or hands a finished one out (FinishingOrder).
  struct ReceiveStep {
    bool sums = false;
    std::uint32_t chunk = 0;
  };
  MK_HOST_DEVICE std::uint32_t receive_steps(std::uint32_t owner) const {
    if (!two_shot()) return chunks(owner);
    return FinishingOrder{plan_.nodes, pieces(owner).rounds()}.steps();
  }
  MK_HOST_DEVICE ReceiveStep receive_step(std::uint32_t owner, std::uint32_t node,
                                          std::uint32_t position) const {
    const std::uint32_t nodes = plan_.nodes;
    const auto step = FinishingOrder{nodes, pieces(owner).rounds()}.at(position);
    // The node before this one sends here first.
    const std::uint32_t from = step.sums           ? node
                               : step.turn <= node ? node - step.turn
                                                   : node + nodes - step.turn;
    return {step.sums, step.round * nodes + from};
  }

  // --- Places in the workspace, as byte offsets ---

  MK_HOST_DEVICE std::uint64_t slot(std::uint32_t source_local, std::uint32_t owned_index) const {
    return plan_.layout.slots + source_local * plan_.layout.slot_region_bytes +
           owned_index * slot_bytes();
  }
  MK_HOST_DEVICE std::uint64_t slot_in_bank(std::uint32_t tile) const {
    return kBankHeaderBytes + tile * slot_bytes();
  }
  /// A tile's place in staging, and in the bank of the node that adds it up. One-shot: node 0.
  MK_HOST_DEVICE NodePieces::Place place_in_bank(std::uint32_t owner,
                                                 std::uint32_t owned_index) const {
    if (two_shot()) return pieces(owner).place_of(owned_index);
    return {0, owned_index};
  }
  /// The sums for node `to` lie there; one-shot, `to` is 0.
  MK_HOST_DEVICE std::uint64_t staging_bank(std::uint32_t bank, std::uint32_t to = 0) const {
    return plan_.layout.staging + (bank * plan_.planes() + to) * plan_.layout.bank_bytes;
  }
  /// The bank on node `at` that node `from` fills.
  MK_HOST_DEVICE std::uint64_t receive_bank(std::uint32_t bank, std::uint32_t at,
                                            std::uint32_t from) const {
    return plan_.layout.receive +
           (bank * (plan_.nodes - 1) + peer_index(at, from)) * plan_.layout.bank_bytes;
  }
  /// The columns of a packed tile of C.
  MK_HOST_DEVICE std::uint32_t finished_cols() const {
    return plan_.epilogue.columns_of(tile_cols());
  }
  MK_HOST_DEVICE std::uint64_t finished_bytes() const {
    return std::uint64_t{tile_rows()} * finished_cols() * kElementBytes;
  }
  /// Where the finished chunks of node `from` lie, on every node.
  MK_HOST_DEVICE std::uint64_t finished_bank(std::uint32_t bank, std::uint32_t from) const {
    return plan_.layout.finished +
           (std::uint64_t{bank} * plan_.nodes + from) * plan_.layout.finished_bytes;
  }
  MK_HOST_DEVICE std::uint64_t chunk_finished(std::uint32_t round) const {
    return plan_.layout.chunk_finished + std::uint64_t{round} * 4;
  }
  /// Where in C what is made of the product's tile at `rect` goes, and from where in the workspace
  /// on.
  MK_HOST_DEVICE TileRect result(const TileRect& rect) const {
    return plan_.epilogue.result_of(rect);
  }
  MK_HOST_DEVICE std::uint64_t out(const TileRect& rect) const {
    const TileRect to = result(rect);
    return plan_.layout.out +
           (std::uint64_t{to.row} * plan_.result_columns() + to.column) * kElementBytes;
  }
  MK_HOST_DEVICE std::uint64_t tile_ready(std::uint32_t source_local,
                                          std::uint32_t owned_index) const {
    return plan_.layout.tile_ready +
           (std::uint64_t{source_local} * plan_.tiles_max + owned_index) * 4;
  }
  /// From one source's to the next one's, in words.
  MK_HOST_DEVICE std::uint32_t tile_ready_step() const { return plan_.tiles_max; }
  MK_HOST_DEVICE std::uint64_t chunk_reduced(std::uint32_t chunk) const {
    return plan_.layout.chunk_reduced + std::uint64_t{chunk} * 4;
  }
  MK_HOST_DEVICE std::uint64_t out_ready(std::uint32_t owner, std::uint32_t chunk) const {
    return plan_.layout.out_ready + (std::uint64_t{owner} * plan_.chunks_max + chunk) * 4;
  }

  MK_HOST_DEVICE FlagMap flags() const { return plan_.flags(); }

 private:
  /// The step that comes `step`-th on `node`: its groups of L tiles are in the order of the first
  /// owner's pieces. The last group may have fewer tiles.
  MK_HOST_DEVICE std::uint32_t turned_step(std::uint32_t node, std::uint32_t step) const {
    const NodePieces first_owner = pieces(0);
    const std::uint32_t groups = owned(0);
    const std::uint32_t missing = groups * plan_.locals - tiles();
    // As if the last group had L tiles, too.
    const std::uint32_t last = first_owner.position_of(node, groups - 1);
    if (missing != 0 && step >= (last + 1) * plan_.locals - missing) step += missing;
    const std::uint32_t position = step / locals_;
    return first_owner.tile_at(node, position) * plan_.locals + (step - position * plan_.locals);
  }

  GemmArGeometry plan_;
  Divisor locals_;
  TileGrid grid_;
  Divisor tiles_per_chunk_;
  Divisor tiles_per_round_;
};

}  // namespace mk::kernels
