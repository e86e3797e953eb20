/// \file
/// How an owner's tiles are dealt to the nodes of its rail where each node adds up a part of them.
/// Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
#include "kernels/comm/tile_grid.h"
#include "kernels/comm/types.h"
#include "shm/platform.h"

namespace mk::kernels {

/// In which order a node adds up its chunks, and hands out those that are finished. It has one to
/// add up in each round, for which the others wait, and all N to hand out. A round's last few
/// chunks come when the next one's sums are complete, so those go first.
struct FinishingOrder {
  std::uint32_t nodes = 1;
  std::uint32_t rounds = 1;

  struct Step {
    bool sums = false;
    std::uint32_t round = 0;
    std::uint32_t turn = 0;  ///< of what is handed out: so many nodes before this one
  };

  MK_HOST_DEVICE constexpr std::uint32_t steps() const { return rounds * (nodes + 1); }
  MK_HOST_DEVICE constexpr Step at(std::uint32_t position) const {
    if (position == 0) return {true, 0, 0};
    constexpr std::uint32_t kLate = 4;
    const std::uint32_t late = nodes < kLate ? nodes : kLate;
    // Sums, the late ones of the round before, and this round's others.
    const std::uint32_t turned = position + late;
    const std::uint32_t round = turned / (nodes + 1);
    const std::uint32_t within = turned - round * (nodes + 1);
    if (round == rounds) return {false, round - 1, nodes - late + within};
    if (within == 0) return {true, round, 0};
    if (within <= late) return {false, round - 1, nodes - late + within - 1};
    return {false, round, within - late - 1};
  }
};

/// `tiles` owned tiles, in rounds. In a round each node has one chunk: node 0 the first P tiles,
/// node 1 the next P, and so on. The last round's chunks are smaller, so that all nodes have about
/// as many tiles; some may have none. A node's **piece** is its chunks of all rounds. Chunk c is
/// that of node c mod N in round c div N.
class NodePieces {
 public:
  /// A node's place of a tile: the tile's number in the node's piece.
  struct Place {
    std::uint32_t node = 0;
    std::uint32_t tile = 0;
  };

  /// `per_round`: N * P.
  MK_HOST_DEVICE NodePieces(std::uint32_t tiles, std::uint32_t nodes, const Divisor& per_chunk,
                            const Divisor& per_round)
      : tiles_(tiles),
        nodes_(nodes),
        per_chunk_(per_chunk),
        per_round_(per_round),
        whole_(tiles / per_round),
        whole_tiles_(whole_ * per_round.value()),
        last_(div_up(tiles - whole_tiles_, nodes)) {}

  /// At least one, in which a node without a tile has a chunk of a header alone.
  MK_HOST_DEVICE std::uint32_t rounds() const {
    const std::uint32_t rounds = whole_ + (tiles_ != whole_tiles_ ? 1 : 0);
    return rounds == 0 ? 1 : rounds;
  }
  MK_HOST_DEVICE TileRange chunk_tiles(std::uint32_t round, std::uint32_t node) const {
    TileRange range;
    if (round < whole_) {
      range.begin = round * per_round_.value() + node * per_chunk_.value();
      range.end = range.begin + per_chunk_.value();
      return range;
    }
    range.begin = least(whole_tiles_ + node * last_);
    range.end = least(range.begin + last_);
    return range;
  }
  MK_HOST_DEVICE TileRange chunk_tiles(std::uint32_t chunk) const {
    return chunk_tiles(chunk / nodes_, chunk % nodes_);
  }
  /// The tiles of a node's piece.
  MK_HOST_DEVICE std::uint32_t piece_tiles(std::uint32_t node) const {
    const TileRange last = chunk_tiles(whole_, node);
    return whole_ * per_chunk_.value() + last.end - last.begin;
  }
  MK_HOST_DEVICE Place place_of(std::uint32_t tile) const {
    const std::uint32_t round = tile / per_round_;
    const std::uint32_t within = tile - round * per_round_.value();
    const std::uint32_t node = round < whole_ ? within / per_chunk_ : within / last_;
    const std::uint32_t before = node * (round < whole_ ? per_chunk_.value() : last_);
    return {node, round * per_chunk_.value() + within - before};
  }
  MK_HOST_DEVICE std::uint32_t chunk_of(std::uint32_t tile) const {
    return tile / per_round_ * nodes_ + place_of(tile).node;
  }

  // --- A node's order: in each round the chunk of the next node first, its own last ---

  /// The tile that comes `position`-th on `node`, position < tiles.
  MK_HOST_DEVICE std::uint32_t tile_at(std::uint32_t node, std::uint32_t position) const {
    const Round round = round_of(position);
    const std::uint32_t turned = position - round.begin + first_tile(round, node);
    return round.begin + (turned < round.tiles ? turned : turned - round.tiles);
  }
  /// Where a tile stands in that order.
  MK_HOST_DEVICE std::uint32_t position_of(std::uint32_t node, std::uint32_t tile) const {
    const Round round = round_of(tile);
    const std::uint32_t first = first_tile(round, node);
    const std::uint32_t within = tile - round.begin;
    return round.begin + (within < first ? within + round.tiles : within) - first;
  }
  /// The node whose chunk comes `position`-th on `node` in a round, position < nodes.
  MK_HOST_DEVICE std::uint32_t node_at(std::uint32_t node, std::uint32_t round,
                                       std::uint32_t position) const {
    const std::uint32_t chunks = round < whole_ ? nodes_
                                 : last_ == 0   ? 0
                                                : div_up(tiles_ - whole_tiles_, last_);
    const std::uint32_t first = node + 1 < chunks ? node + 1
                                : chunks == 0     ? (node + 1) % nodes_
                                                  : 0;
    const std::uint32_t turned = first + position;
    return turned < nodes_ ? turned : turned - nodes_;
  }

 private:
  /// The tiles of a round.
  struct Round {
    std::uint32_t begin = 0;
    std::uint32_t tiles = 0;
    std::uint32_t per_chunk = 0;
  };
  MK_HOST_DEVICE Round round_of(std::uint32_t tile) const {
    if (tile >= whole_tiles_) return {whole_tiles_, tiles_ - whole_tiles_, last_};
    return {tile - tile % per_round_, per_round_.value(), per_chunk_.value()};
  }
  /// The tile of the round with which `node` begins.
  MK_HOST_DEVICE std::uint32_t first_tile(const Round& round, std::uint32_t node) const {
    const std::uint32_t first = (node + 1) * round.per_chunk;
    return node + 1 < nodes_ && first < round.tiles ? first : 0;
  }
  MK_HOST_DEVICE std::uint32_t least(std::uint32_t tile) const {
    return tile < tiles_ ? tile : tiles_;
  }

  std::uint32_t tiles_;
  std::uint32_t nodes_;
  Divisor per_chunk_;
  Divisor per_round_;
  std::uint32_t whole_;        ///< rounds of N * P tiles
  std::uint32_t whole_tiles_;  ///< tiles of these
  std::uint32_t last_;         ///< tiles of a chunk of the last round; 0: there is none
};

}  // namespace mk::kernels
