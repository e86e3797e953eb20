/// \file
/// GEMM+Combine for the GEMM core: row tiles come in the index's order, which begins when the
/// index is made. Loads are the grouped product's (kernels/cuda/core). Rows leave by sm90_rows.cuh.
#pragma once

#include <cstdint>

#include "kernels/comm/row_bands.h"
#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/core/grouped_policies.cuh"
#include "kernels/cuda/core/tile_feed.cuh"
#include "kernels/cuda/skeleton/block_gate.cuh"
#include "kernels/ops/combine/block.h"
#include "kernels/ops/combine/sm90_arguments.h"

namespace mk::kernels::cuda {

/// Bands of row tiles, of each its columns (banded_tile); each tile goes to the
/// block that is free first. Made after the gate, which has awaited the index. A tile's `m` is its
/// row tile's number.
class CombineTiles {
 public:
  struct Params {
    const CombineWords* words;
    const CombineTile* tiles;
    const std::uint32_t* order;
    const std::uint32_t* stop;  ///< the launch has failed
    std::uint32_t columns;      ///< of tiles
    Divisor band_tiles;
    std::uint32_t* taken;  ///< DeviceState::tiles_taken
  };
  using TileType = GroupedTile;
  static constexpr bool kTaken = true;

  __device__ CombineTiles(const Params& params, int worker, int workers)
      : params_(params),
        worker_(static_cast<std::uint32_t>(worker)),
        workers_(static_cast<std::uint32_t>(workers)) {}

  __device__ bool next(GroupedTile* tile) {
    if (shm::load_relaxed(params_.stop) != 0) return false;
    const std::uint32_t row_tiles = params_.words->tiles;
    std::uint32_t step;
    const bool some =
        take_step(first_, worker_, workers_, params_.taken, row_tiles * params_.columns, &step);
    first_ = false;
    if (!some) return false;
    const auto [turn, column] =
        banded_tile<CombineSchedule::kBand>(step, row_tiles, params_.band_tiles);
    const std::uint32_t number = params_.order[turn];
    const CombineTile& from = params_.tiles[number];
    *tile = {static_cast<int>(number), static_cast<int>(column), static_cast<int>(from.expert),
             static_cast<int>(from.row), static_cast<int>(from.rows)};
    return true;
  }

 private:
  const Params& params_;
  std::uint32_t worker_;
  std::uint32_t workers_;
  bool first_ = true;
};

/// Waits as the compute role does: for the index; the rows were there before the launch.
template <class Config>
class CombineGate : public GroupedInputs<Config> {
  using Inputs = GroupedInputs<Config>;

 public:
  using Params = typename Inputs::Params;
  using Shared = BlockGateShared<CombineLaunch, CombineBlock>;

  __device__ CombineGate(const Params& params, Shared& shared) : Inputs(params) {
    auto& block = shared.make_block();
    if (!block.await_indexed(block.world.local)) shared.in_vain = 1;
  }
};

}  // namespace mk::kernels::cuda
