/// \file
/// The policies of ag_gemm/protocol.h for the GEMM core; rows of A are read where they lie, tiles
/// stored into the caller's C.
#pragma once

#include "kernels/cuda/core/gemm_core.cuh"
#include "kernels/cuda/core/tile_feed.cuh"
#include "kernels/cuda/skeleton/block_gate.cuh"
#include "kernels/ops/ag_gemm/protocol.h"
#include "kernels/ops/ag_gemm/sm90_arguments.h"

namespace mk::kernels::cuda {

/// Each tile goes to the block that is free first. Blocks that waited for rows, or shared some,
/// would else be behind to the end.
class AgGemmTakenSteps {
 public:
  struct Params {
    AgGemmOrder order;
    std::uint32_t workers;  ///< of those that are there from the start
    std::uint32_t* taken;   ///< DeviceState::tiles_taken
  };
  __device__ AgGemmTakenSteps(const Params& params, int /*worker*/, int /*workers*/)
      : params_(params) {}
  __device__ bool take(bool first, std::uint32_t* step) {
    return take_step(first, blockIdx.x, params_.workers, params_.taken, params_.order.tiles.tiles,
                     step);
  }

 private:
  const Params& params_;
};
class AgGemmTakenTiles : public AgGemmTileScheduler<AgGemmTakenSteps, AgGemmTakenSteps::Params> {
 public:
  using AgGemmTileScheduler::AgGemmTileScheduler;
  static constexpr bool kTaken = true;
};

/// Waits for the tile's rows (ag_gemm/protocol.h), and loads them from the caller's shard or from
/// their origin's slot.
class AgGemmGate {
  using InputBarrier = AgGemmInputBarrier<AgGemmBlock<WarpGateExecutor>>;

 public:
  struct Params {
    InputBarrier::Params barrier;
    World world;
    CUtensorMap gathered;  ///< see AgGemmArguments
    WaitsDone waits_done;
    const std::uint32_t* taken;  ///< the scheduler's
  };
  using Shared = BlockGateShared<AgGemmLaunch, AgGemmBlock, WarpGateExecutor>;

  __device__ AgGemmGate(const Params& params, Shared& shared)
      : params_(params), block_(&shared.make_block()), barrier_(params.barrier, *block_) {}

  __device__ int wait(int m, int n, int k_block) {
    const AgGemmTiles& tiles = params_.barrier.order.tiles;
    if (k_block != 0) {
      // This block's last inputs are there, if nobody gets a tile any more.
      if (!noted_ && all_taken(params_.waits_done.compute, params_.taken, tiles.tiles)) note();
      return kAllReady;
    }
    // The block's loads are far ahead of its products then, so that a look costs nothing.
    constexpr int kLook = 8;
    const AgGemmTile tile = tiles.find({m, n});
    row_ = static_cast<int>(tile.row);
    slot_ = tile.origin == params_.world.rank()
                ? kOwn
                : static_cast<int>(tiles.schedule.gather().slot_index(block_->bank, tile.origin));
    barrier_.await_rows(tile);
    return params_.waits_done.counts() ? kLook : kAllReady;
  }
  __device__ void load_a(const CUtensorMap& own, std::uint64_t* full, std::uint64_t hint, void* to,
                         int k) const {
    if (slot_ == kOwn) {
      cute::SM90_TMA_LOAD_2D::copy(&own, full, hint, to, k, row_);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&params_.gathered, full, hint, to, k, row_, slot_);
    }
  }
  __device__ void end() {
    if (!noted_) note();
  }

 private:
  static constexpr int kOwn = -1;
  __device__ void note() {
    params_.waits_done.note();
    noted_ = true;
  }

  const Params& params_;
  Shared::Block* block_;
  InputBarrier barrier_;
  int row_ = 0;
  int slot_ = kOwn;
  bool noted_ = false;  ///< waits_done
};

// Else nobody would stand at its executor's barriers.
static_assert(kGateLooksByWarp<AgGemmGate>);

/// Into the caller's C. What lies below a tile's rows is another tile's: whole groups of eight rows
/// go by the copy engine, the rest row by row. What lies right of its columns is right, too:
/// any block that computes it stores the same.
template <class Config>
class AgGemmStore {
 public:
  struct Params {
    AgGemmTiles tiles;
    CUtensorMap c_tile;
    CUtensorMap c_eight;
    std::byte* c;
    std::uint64_t ldc_bytes;
    Epilogue epilogue;
    std::uint32_t columns;  ///< of C
  };
  static constexpr int kSharedWords = 0;

  __device__ AgGemmStore(const Params& params, std::uint32_t* /*words*/) : params_(params) {}

  __device__ void put(const Piece& piece) {
    if (piece.column == 0) {
      rect_ = params_.epilogue.result_of(params_.tiles.find({piece.m, piece.n}).rect);
    }
    const int rows = static_cast<int>(rect_.rows) - piece.row;
    if (rows <= 0 || piece.column >= static_cast<int>(rect_.columns)) return;
    const int row = static_cast<int>(rect_.row) + piece.row;
    const int column = static_cast<int>(rect_.column) + piece.column;
    if (rows >= kWarpgroupRows) {
      cute::SM90_TMA_STORE_2D::copy(&params_.c_tile, piece.bytes, column, row);
      return;
    }
    const auto* bytes = static_cast<const std::uint8_t*>(piece.bytes);
    int done = 0;
    for (; done + 8 <= rows; done += 8) {
      cute::SM90_TMA_STORE_2D::copy(&params_.c_eight, bytes + done * kRowBytes, column, row + done);
    }
    const int vectors = min(kRowBytes / 16, (static_cast<int>(params_.columns) - column) / 8);
    for (; done < rows; ++done) {
      std::byte* to = params_.c + static_cast<std::uint64_t>(row + done) * params_.ldc_bytes +
                      static_cast<std::uint64_t>(column) * kElementBytes;
      for (int v = 0; v < vectors; ++v) {
        reinterpret_cast<uint4*>(to)[v] =
            *reinterpret_cast<const uint4*>(bytes + done * kRowBytes + ((v ^ (done % 8)) << 4));
      }
    }
  }
  __device__ void tile_done(int, int, int) {}
  __device__ void finish() {}

 private:
  static constexpr int kRowBytes = 128;
  const Params& params_;
  TileRect rect_;
};

}  // namespace mk::kernels::cuda
