/// \file
/// MoE Dispatch+GEMM for the GEMM core: tiles come in the routing plan's order, which begins when
/// the plan is made. Their packed rows come as they become complete. Rows are stored into the
/// caller's output. Loads of weights, epilogues and the store by windows are the grouped product's
/// (kernels/cuda/core).
#pragma once

#include <cstdint>

#include "kernels/comm/row_bands.h"
#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/core/grouped_policies.cuh"
#include "kernels/cuda/core/tile_feed.cuh"
#include "kernels/cuda/skeleton/block_gate.cuh"
#include "kernels/ops/moe/roles.h"
#include "kernels/ops/moe/sm90_arguments.h"

namespace mk::kernels::cuda {

/// A GroupedTile of the output, whose rows of A lie elsewhere. `m` is the row tile's number.
struct MoeTile {
  int m = 0;
  int n = 0;
  int expert = 0;
  int row = 0;
  int rows = 0;
  int packed_row = 0;

  /// For what is stored.
  __device__ operator GroupedTile() const { return {m, n, expert, row, rows}; }
  /// For what is loaded.
  __device__ GroupedTile packed() const { return {m, n, expert, packed_row, rows}; }
};

/// Bands of row tiles, of each its columns (banded_tile); each tile goes to the block that is free
/// first. Made after the gate, which has awaited the plan: without one there are no tiles.
class MoeTiles {
 public:
  struct Params {
    const PlanSummary* summary;
    const RowTile* tiles;
    const std::uint32_t* stop;  ///< the launch has failed
    std::uint32_t columns;      ///< of tiles
    Divisor band_tiles;         ///< kMoeBand times as many
    std::uint32_t* taken;       ///< DeviceState::tiles_taken
  };
  using TileType = MoeTile;
  static constexpr bool kTaken = true;

  __device__ MoeTiles(const Params& params, int worker, int workers)
      : params_(params),
        worker_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)) {}

  __device__ bool next(MoeTile* tile) {
    if (shm::load_relaxed(params_.stop) != 0) return false;
    const std::uint32_t row_tiles = params_.summary->tiles;
    std::uint32_t step;
    const bool some =
        take_step(first_, worker_, workers_, params_.taken, row_tiles * params_.columns, &step);
    first_ = false;
    if (!some) return false;
    const auto [row_tile, column] = banded_tile<kMoeBand>(step, row_tiles, params_.band_tiles);
    const RowTile& from = params_.tiles[row_tile];
    tile->m = static_cast<int>(row_tile);
    tile->n = static_cast<int>(column);
    tile->expert = static_cast<int>(from.expert);
    tile->row = static_cast<int>(from.row);
    tile->rows = static_cast<int>(from.rows);
    tile->packed_row = static_cast<int>(from.packed_row);
    return true;
  }

 private:
  const Params& params_;
  std::uint32_t worker_;
  std::uint32_t workers_;
  bool first_ = true;
};

/// Waits as the compute role does. Of the roles outside the compute blocks the last group to be
/// done shows it for all.
class MoeGateExecutor : public GateExecutor {
 public:
  static __device__ bool counts_done(Role role) { return RoleExecutor::counts_done(role); }
};

template <class Config>
class MoeGate : public GroupedInputs<Config> {
  using Inputs = GroupedInputs<Config>;

 public:
  struct Params {
    typename Inputs::Params inputs;
    WaitsDone waits_done;
  };
  using Shared = BlockGateShared<MoeDispatchLaunch, MoeDispatchBlock, MoeGateExecutor>;

  __device__ MoeGate(const Params& params, Shared& shared)
      : Inputs(params.inputs), params_(params), shared_(shared), block_(shared.make_block()) {
    if (!moe_dispatch::await_tiles(block_)) shared_.in_vain = 1;
  }

  __device__ int wait(const MoeTile& tile, int /*k_block*/) {
    this->set(tile.packed());
    if (tile.m != seen_ && shared_.in_vain == 0 &&
        !block_.await_packed(static_cast<std::uint32_t>(tile.m)))
      shared_.in_vain = 1;
    seen_ = tile.m;
    return kAllReady;
  }
  __device__ void end() const { params_.waits_done.note(); }

 private:
  const Params& params_;
  Shared& shared_;
  typename Shared::Block& block_;
  int seen_ = -1;  ///< the row tile that was awaited last
};

/// The grouped product's, as long as no wait of the gate has failed.
template <class Config, int kSumsPerOutput>
class MoeStore : public GroupedStore<Config, kSumsPerOutput> {
  using Base = GroupedStore<Config, kSumsPerOutput>;

 public:
  using Params = typename Base::Params;

  template <class GateShared>
  __device__ MoeStore(const Params& params, std::uint32_t* words, const GateShared& gate)
      : Base(params, words), in_vain_(gate.in_vain) {}

  __device__ void put(const Piece& piece, const GroupedTile& tile) {
    if (in_vain_ == 0) Base::put(piece, tile);
  }

 private:
  const std::uint32_t& in_vain_;
};

}  // namespace mk::kernels::cuda
