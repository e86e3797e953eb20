#include "kernels/cuda/core/gemm.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/core/gemm_choice.h"
#include "kernels/cuda/core/gemm_kernels.h"
#include "kernels/cuda/core/tensor_map.h"

namespace mk::kernels::cuda {
namespace {

constexpr int kSizeStep = 8;  // two-byte elements in the copy engine's 16 bytes

int ceil_div(int a, int b) { return (a + b - 1) / b; }

const PlainGemmKernel& kernel_of(DType dtype, BLayout b_layout, GemmVariant variant) {
  return dtype == DType::kBf16 ? plain_gemm_bf16(b_layout, variant)
                               : plain_gemm_f16(b_layout, variant);
}

/// What the current device holds, of `blocks` blocks that the product may have. Each takes a
/// multiprocessor of its own.
Result<GemmRoom> room_of(const PlainGemmKernel& kernel, int blocks) {
  GemmRoom room;
  room.blocks = blocks;
  for (int size = 1; size <= kClusterMax; ++size) {
    int& clusters = room.clusters[static_cast<std::size_t>(size)];
    if (cudaError_t error = kernel.clusters(size, &clusters); error != cudaSuccess) {
      return fail(ErrorCode::kSystem, "gemm: how many clusters of {} blocks fit is unknown: {}",
                  size, cudaGetErrorString(error));
    }
  }
  return room;
}

Status check_sizes(const GemmProblem& problem) {
  if (problem.m < 1 || problem.n < 1 || problem.k < 1) {
    return fail(ErrorCode::kInvalidArgument, "gemm: m {}, n {}, k {} must all be at least 1",
                problem.m, problem.n, problem.k);
  }
  if (problem.n % kSizeStep != 0 || problem.k % kSizeStep != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm: n {} and k {} must be multiples of {} (the copy engine moves 16 bytes at "
                "least): pad them",
                problem.n, problem.k, kSizeStep);
  }
  return {};
}

}  // namespace

struct GemmPlan::Parts {
  const PlainGemmKernel* kernel = nullptr;
  PlainGemmArguments arguments;
  int workers = 0;
};

const char* gemm_variant_name(GemmVariant variant) {
  switch (variant) {
    case GemmVariant::kAuto:
      return "auto";
    case GemmVariant::k128x64:
      return "128x64";
    case GemmVariant::k128x128:
      return "128x128";
    case GemmVariant::k128x160:
      return "128x160";
    case GemmVariant::k128x192:
      return "128x192";
    case GemmVariant::k128x224:
      return "128x224";
    case GemmVariant::k128x256:
      return "128x256";
    case GemmVariant::k128x256Pair:
      return "128x256x2";
  }
  return "unknown";
}

int GemmPlan::blocks() const {
  return parts_->workers * parts_->kernel->cluster * parts_->arguments.splits;
}
int GemmPlan::splits() const { return parts_->arguments.splits; }

Result<GemmPlan> GemmPlan::create(const GemmProblem& problem, const GemmTuning& tuning) {
  MK_RETURN_IF_ERROR(check_sizes(problem));
  int device = 0;
  int major = 0;
  int sm_count = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return fail(ErrorCode::kUnavailable, "gemm: no CUDA device: {}", cudaGetErrorString(error));
  }
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  if (major != 9) {
    return fail(
        ErrorCode::kUnsupported,
        "gemm: device {} has compute capability {}.x; these kernels are for 9.0 (H100, H200)",
        device, major);
  }

  GemmPlan plan;
  const int blocks = tuning.blocks_max > 0 ? std::min(tuning.blocks_max, sm_count) : sm_count;
  GemmChoice choice{tuning.variant, std::max(1, tuning.splits)};
  if (tuning.variant == GemmVariant::kAuto) {
    const PlainGemmKernel& any = kernel_of(problem.dtype, problem.b_layout, GemmVariant::k128x64);
    MK_ASSIGN_OR_RETURN(const GemmRoom room, room_of(any, blocks));
    choice = choose_gemm(problem.m, problem.n, problem.k, room, tuning.one_order_of_k);
  }
  plan.variant_ = choice.variant;
  const PlainGemmKernel& kernel = kernel_of(problem.dtype, problem.b_layout, plan.variant_);

  auto parts = std::make_shared<Parts>();
  parts->kernel = &kernel;
  PlainGemmArguments& arguments = parts->arguments;
  const DType dtype = problem.dtype;
  const bool b_is_nk = problem.b_layout == BLayout::kNK;
  arguments.a_box_rows = std::min(kernel.block_m, ceil_div(problem.m, 8) * 8);
  MK_ASSIGN_OR_RETURN(arguments.a, make_tensor_map("A", dtype, problem.a, problem.m, problem.k,
                                                   problem.k, arguments.a_box_rows, kBlockK));
  MK_ASSIGN_OR_RETURN(
      arguments.b, make_tensor_map("B", dtype, problem.b, b_is_nk ? problem.n : problem.k,
                                   b_is_nk ? problem.k : problem.n, b_is_nk ? problem.k : problem.n,
                                   kernel.b_box_rows, kernel.b_box_columns));
  MK_ASSIGN_OR_RETURN(
      arguments.c, make_tensor_map("C", dtype, problem.c, problem.m, problem.n, problem.n, 64, 64));
  arguments.m_blocks = ceil_div(problem.m, kernel.block_m);
  arguments.k_blocks = ceil_div(problem.k, kBlockK);
  arguments.splits = choice.splits;
  if (const int most = splits_max(plan.variant_, arguments.k_blocks); arguments.splits > most) {
    return fail(ErrorCode::kInvalidArgument,
                "gemm: {} blocks cannot share k = {} of a tile of {}: at most {} can",
                arguments.splits, problem.k, gemm_variant_name(plan.variant_), most);
  }

  const int worker_rows = kernel.block_m * kernel.cluster;
  // With 132 blocks, 2048 rows of tiles in flight are about as wide as they are high.
  constexpr int kBandRows = 2048;
  arguments.order.tiles_m = ceil_div(problem.m, worker_rows);
  arguments.order.tiles_n = ceil_div(problem.n, kernel.block_n);
  arguments.order.band =
      std::max(1, (tuning.band_rows > 0 ? tuning.band_rows : kBandRows) / worker_rows);
  const int tiles = arguments.order.tiles_m * arguments.order.tiles_n;
  // Blocks that share a tile have no other.
  parts->workers =
      arguments.splits > 1 ? tiles : std::min(tiles, std::max(1, blocks / kernel.cluster));

  if (cudaError_t error = kernel.prepare(); error != cudaSuccess) {
    return fail(ErrorCode::kSystem, "gemm: the device refuses the kernel's shared memory: {}",
                cudaGetErrorString(error));
  }
  plan.parts_ = std::move(parts);
  return plan;
}

Status GemmPlan::launch(cudaStream_t stream) const {
  if (cudaError_t error = parts_->kernel->launch(parts_->arguments, parts_->workers, stream);
      error != cudaSuccess) {
    return fail(ErrorCode::kSystem, "gemm: launch of {} failed: {}", gemm_variant_name(variant_),
                cudaGetErrorString(error));
  }
  return {};
}

}  // namespace mk::kernels::cuda
