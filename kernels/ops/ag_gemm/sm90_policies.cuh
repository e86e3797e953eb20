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
    std::uint32_t span_bytes;    ///< of a stage, of each shard, if tiles span all; else 0
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
    const bool spans = params_.span_bytes != 0;
    slot_ = tile.origin == params_.world.rank() && !spans
                ? kOwn
                : static_cast<int>(
                      tiles.schedule.gather().slot_index(block_->bank, spans ? 0 : tile.origin));
    barrier_.await_rows(tile);
    return params_.waits_done.counts() ? kLook : kAllReady;
  }
  __device__ void load_a(const CUtensorMap& own, std::uint64_t* full, std::uint64_t hint, void* to,
                         int k) const {
    if (params_.span_bytes != 0) {
      load_shards(own, full, hint, static_cast<std::byte*>(to), k);
    } else if (slot_ == kOwn) {
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
  /// All shards, each from its first row on, into their parts of a stage.
  __device__ void load_shards(const CUtensorMap& own, std::uint64_t* full, std::uint64_t hint,
                              std::byte* to, int k) const {
    const auto locals = static_cast<int>(params_.world.locals);
#pragma unroll 1
    for (int rank = 0; rank < locals; ++rank, to += params_.span_bytes) {
      if (rank == static_cast<int>(params_.world.local)) {
        cute::SM90_TMA_LOAD_2D::copy(&own, full, hint, to, k, 0);
      } else {
        cute::SM90_TMA_LOAD_3D::copy(&params_.gathered, full, hint, to, k, 0, slot_ + rank);
      }
    }
  }

  __device__ void note() {
    params_.waits_done.note();
    noted_ = true;
  }

  const Params& params_;
  Shared::Block* block_;
  InputBarrier barrier_;
  int row_ = 0;
  int slot_ = kOwn;     ///< the origin's; of a tile that spans all shards, rank 0's
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
    if (piece.column >= static_cast<int>(rect_.columns)) return;
    const auto* bytes = static_cast<const std::uint8_t*>(piece.bytes);
    const int column = static_cast<int>(rect_.column) + piece.column;
    const AgGemmSchedule& schedule = params_.tiles.schedule;
    if (!schedule.spans()) {
      put_rows(bytes, static_cast<int>(rect_.rows) - piece.row,
               static_cast<int>(rect_.row) + piece.row, column);
      return;
    }
    const auto step = static_cast<int>(schedule.span_step());
#pragma unroll 1
    for (std::uint32_t rank = 0; rank < schedule.world().size(); ++rank) {
      const ShardRange shard = schedule.shard(rank);
      const int begin = static_cast<int>(rank) * step;
      const int first = max(begin, piece.row);
      const int end = min(begin + static_cast<int>(shard.count), piece.row + kWarpgroupRows);
      put_rows(bytes + (first - piece.row) * kRowBytes, end - first,
               static_cast<int>(shard.first) + first - begin, column);
    }
  }
  __device__ void tile_done(int, int, int) {}
  __device__ void finish() {}

 private:
  static constexpr int kRowBytes = 128;
  /// From rows of a piece that begin at a multiple of eight to rows of C, if there are any.
  __device__ void put_rows(const std::uint8_t* bytes, int rows, int row, int column) const {
    if (rows >= kWarpgroupRows) {
      cute::SM90_TMA_STORE_2D::copy(&params_.c_tile, bytes, column, row);
      return;
    }
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

  const Params& params_;
  TileRect rect_;
};

}  // namespace mk::kernels::cuda
