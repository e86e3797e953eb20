/// \file
/// The host side that all operators on GPUs share: what a caller may choose, how a rank's blocks
/// are dealt out, what stays between launches, and what became of a launch. Operators add their
/// tensor maps.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "kernels/comm/banks.h"
#include "kernels/comm/estimate.h"
#include "kernels/comm/launch.h"
#include "kernels/comm/launch_stats.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/rank_context.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/operator_arguments.h"
#include "kernels/cuda/role_blocks.h"
#include "shm/host/result.h"

namespace mk::kernels {

/// What a rank chooses for itself; ranks may differ, but for `ranks_per_device`. Numbers of groups:
/// three groups of threads are one block on one SM. 0: chosen.
struct CudaOptions {
  /// Ranks of this process that share the device; each uses at most its share of the SMs, one block
  /// on each, because all blocks of all ranks must be resident at the same time.
  std::uint32_t ranks_per_device = 1;
  std::uint32_t compute_blocks = 0;  ///< 0: what the groups leave of the share
  std::uint32_t stream_groups = 0;   ///< sums within the node, or hands out this rank's rows
  std::uint32_t send_groups = 0;     ///< a lane each
  std::uint32_t receive_groups = 0;
  /// How long one wait may take; see CpuOptions.
  std::chrono::nanoseconds wait_timeout = std::chrono::seconds(30);
  BLayout b_layout = BLayout::kNK;
  /// For Mode::kAuto; 0: see gpu_rates.h.
  MachineRates rates;
  /// Null, or at an address of the device the word SegmentHeader::launches: the kernel adds one
  /// when a launch of several ranks begins, and one when it ends.
  std::uint64_t* launches = nullptr;
};

namespace cuda {

inline constexpr std::uint32_t kTileRowsMax = 128;
inline constexpr std::uint32_t kTileColumnsMax = 256;
inline constexpr std::uint32_t kElementStep = 8;  ///< elements in the copy engine's 16 bytes

/// How long half a tile takes, where a whole one takes 1: as measured, of tiles that stay here.
inline constexpr double kHalfTileTime = 0.54;
/// Of tiles that are summed. Within one node they are handed to their owners, with a flag each;
/// over several the network hides that.
constexpr double half_tile_time(std::uint32_t nodes) { return nodes > 1 ? kHalfTileTime : 0.67; }
/// The columns of a tile, of 128 rows, with which `row_tiles` rows of tiles of n columns take a
/// GPU's `blocks` SMs, some of which communicate, the shortest time.
std::uint32_t best_tile_columns(std::uint64_t row_tiles, std::uint32_t n, std::uint32_t blocks,
                                double half_tile_time);

/// Payload of a network command of a rank that sends about so many bytes in a launch; 0: the plan's
/// default. As measured over the loopback fabric (tests/bench/results).
constexpr std::uint32_t network_chunk_bytes(std::uint64_t sent_bytes) {
  constexpr std::uint64_t kMuch = 32u << 20;
  return sent_bytes >= kMuch ? 512u << 10 : 0;
}

/// Whether, on one node, compute blocks that add up their rank's own tiles are quicker than groups
/// that sum beside the product or after it: where the sums would take long beside the product, or
/// all come at its end. As measured (gemm_rs/README.md).
constexpr bool adds_own_quickly(std::uint32_t k, std::uint32_t tiles) {
  constexpr std::uint32_t kFewK = 1024;
  constexpr std::uint32_t kFewTiles = 4 * kBlocksMax;
  return k <= kFewK || tiles <= kFewTiles;
}

/// Makes a device current while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline DType cuda_type(kernels::DType dtype) {
  return dtype == kernels::DType::kBf16 ? DType::kBf16 : DType::kF16;
}
inline BLayout cuda_layout(kernels::BLayout layout) {
  return layout == kernels::BLayout::kNK ? BLayout::kNK : BLayout::kKN;
}

/// A matrix product's sides and matrices, as an operator's caller gives them.
struct ProductInputs {
  const char* op;
  kernels::DType dtype;
  kernels::BLayout b_layout;
  std::uint32_t n;
  std::uint32_t k;
  const void* a;
  std::uint64_t lda;
  std::uint32_t a_rows;  ///< 0: no A
  std::uint32_t a_box_rows;
  const void* b;
  std::uint64_t ldb;
};
/// kInvalidArgument.
Result<ProductArguments> make_product(const ProductInputs& inputs, const BBox& b_box);

/// `c` of rows `ldc` apart can be stored to; kInvalidArgument.
Status check_c(const char* op, const void* c, std::uint64_t ldc, std::uint32_t n);
/// m is in 1 .. max; kInvalidArgument.
Status check_m(const char* op, std::uint32_t m, std::uint32_t max);
/// Tiles, n and k suit the kernels.
Status check_shape(const char* op, std::uint32_t tile_m, std::uint32_t tile_n, std::uint32_t n,
                   std::uint32_t k);

/// One rank's operator between its launches, on the device that is current at start.
class OperatorFrame {
 public:
  explicit OperatorFrame(const char* op) : op_(op) {}
  ~OperatorFrame();
  OperatorFrame(const OperatorFrame&) = delete;
  OperatorFrame& operator=(const OperatorFrame&) = delete;

  /// Checks device and context, deals out the blocks, and fills in what launches share: all of
  /// `launch` but plan, epoch, m and mode, and all of `frame`. `flags`: the plan's.
  Status start(const RankContext& context, const CudaOptions& options, const GroupNeeds& needs,
               const FlagMap& flags, Launch& launch, FrameArguments& frame);
  int device() const { return device_; }

  /// kSystem with CUDA's reason.
  Status check(cudaError_t error, const char* what) const;
  /// What the host has been told; does not wait.
  Status status() const;
  /// Waits for the stream, then answers what the last launch did, or the first failure: all but its
  /// m, form and estimate.
  Result<LaunchStats> finish(cudaStream_t stream) const;
  /// How far a launch has come that does not end: for people.
  std::string progress(const Launch& launch) const;

 private:
  Status adopt_context(const RankContext& context, const FlagMap& map, Launch& launch,
                       FrameArguments& frame);

  const char* op_;
  int device_ = 0;
  World world_;
  DeviceState* state_ = nullptr;
  std::uint32_t* flags_ = nullptr;
  HostReport* report_ = nullptr;
};

}  // namespace cuda
}  // namespace mk::kernels
