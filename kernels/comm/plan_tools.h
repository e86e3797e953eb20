/// \file
/// The steps of every operator's plan on the host: it checks the world, the tiles and the context,
/// and lays out the workspace. Ranks compare plans by its fingerprint. `op` names the operator in
/// messages ("gemm_ar").
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "kernels/comm/banks.h"
#include "kernels/comm/epilogue.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "shm/host/result.h"

namespace mk::kernels {

inline constexpr std::uint32_t kSideMax = 1u << 24;  ///< rows and columns of any matrix
inline constexpr std::uint64_t kPage = 4096;
/// An operator is good for this many launches: a flag that a launch leaves alone (small m) must
/// stay less than 2^31 epochs behind.
inline constexpr std::uint32_t kLaunchesMax = 0x7fffffffu;

/// How an AllReduce's sums of nodes come together (ops/gemm_ar/schedule.h). kAuto: chosen by the
/// planner; a plan that is made without it takes kOneShot. kOneShot: each node sends its sums to
/// every other, and adds up all. kTwoShot, over three nodes or more: one node of a rail adds up
/// each chunk and sends the result to the others.
enum class Exchange : std::uint8_t { kAuto = 0, kOneShot = 1, kTwoShot = 2 };

/// Payload of a network command, and rows or columns of a tile: what a caller may ask for. 0:
/// chosen from the shape.
struct Tiling {
  std::uint32_t tile_m = 0;       ///< rows of a tile, at most; 1 .. 1024
  std::uint32_t tile_n = 0;       ///< columns of a tile, at most; a multiple of 8, 8 .. 1024
  std::uint32_t chunk_bytes = 0;  ///< payload of a network command, at most (or one tile, one row)
  std::uint32_t banks = 0;        ///< 1 or 2; comm/banks.h
  /// AllGather+GEMM: GatherGeometry::local_banks, 1 or 2; 0: `banks`.
  std::uint32_t local_banks = 0;
  Exchange exchange = Exchange::kAuto;  ///< of GEMM+AllReduce; of no effect elsewhere
};

/// Rows and columns of a tile.
struct TileSides {
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
};

Status check_world(std::string_view op, std::uint32_t nodes, std::uint32_t locals);
Status check_dtype(std::string_view op, DType dtype);
/// `name` is "m", "n", ...; 1 to kSideMax.
Status check_side(std::string_view op, std::string_view name, std::uint64_t side);
Status check_tiling(std::string_view op, const Tiling& tiling);
/// `n`: columns of the product.
Status check_result(std::string_view op, const GemmResult& result, std::uint32_t n);
/// A launch's bias is there if the operator was made for one, and not if it was not.
Status check_bias(std::string_view op, const Epilogue& epilogue, const void* bias);
/// Everything an executor reads of `context` is there and fits a plan for nodes x locals ranks with
/// `flag_count` arrival flags.
Status check_context(std::string_view op, std::uint32_t nodes, std::uint32_t locals,
                     std::uint32_t flag_count, std::uint32_t send_blocks,
                     const RankContext& context);

/// 128 x 256, or what was asked for; the longer side halved (to 32 x 64 at the least; not what was
/// asked for) while `tiles(sides)` is less than `wanted`.
template <class Count>
TileSides choose_tile_sides(const Tiling& tiling, std::uint64_t wanted, Count&& tiles) {
  TileSides sides{tiling.tile_m != 0 ? tiling.tile_m : 128,
                  tiling.tile_n != 0 ? tiling.tile_n : 256};
  while (tiles(sides) < wanted) {
    const bool can_m = tiling.tile_m == 0 && sides.rows > 32;
    const bool can_n = tiling.tile_n == 0 && sides.columns > 64;
    if (can_n && (sides.columns > sides.rows || !can_m)) {
      sides.columns /= 2;
    } else if (can_m) {
      sides.rows /= 2;
    } else {
      break;
    }
  }
  return sides;
}

/// Tiles of one expert's rows: `tile_m` is a power of two from 8 to 256, or 0: left open.
Status check_row_tiles(std::string_view op, std::uint32_t tile_m);
/// Such a tile is computed with a multiple of this many rows, so that few heights occur: each needs
/// a kernel of its own.
constexpr std::uint32_t row_tile_pad(std::uint32_t tile_m) {
  return tile_m / 8 < 8 ? 8 : tile_m / 8;
}

/// The two parts of a workspace, in whole pages.
struct WorkspaceParts {
  /// Head, flags, and all that means anything between launches: one operator's, from offset 0 on.
  std::uint64_t words = 0;
  /// It means nothing between launches: operators that take turns may have it in common.
  std::uint64_t data = 0;
  std::uint64_t data_at = 0;  ///< its offset: behind the words, unless the plan has moved it

  std::uint64_t bytes() const { return words + data; }
};

/// Deals out a workspace from its head on: first the words, then the data.
class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(std::uint32_t locals);
  /// The offset of the next `bytes` bytes.
  std::uint64_t place(std::uint64_t bytes, std::uint64_t alignment);
  /// All that is placed from here on is data. Once.
  void begin_data();
  /// So far.
  WorkspaceParts parts() const;

 private:
  std::uint64_t end_;
  std::uint64_t words_ = 0;
};

/// kLimitExceeded when the daemon cannot register that much.
Status check_workspace(std::string_view op, std::uint64_t bytes);

/// FNV-1a over the numbers from which everything else follows. The first should be the version of
/// the rules by which it follows.
std::uint64_t fingerprint_of(std::initializer_list<std::uint64_t> parts);

}  // namespace mk::kernels
