#include "kernels/cuda/core/grouped_gemm.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/core/grouped_kernels.h"
#include "kernels/cuda/core/tensor_map.h"

namespace mk::kernels::cuda {
namespace {

constexpr int kSizeStep = 8;  // two-byte elements in the copy engine's 16 bytes

int ceil_div(int a, int b) { return (a + b - 1) / b; }

bool is_gated(GroupedActivation activation) { return activation != GroupedActivation::kNone; }

int c_columns(const GroupedGemmProblem& problem) {
  return is_gated(problem.activation) ? problem.n / 2 : problem.n;
}

Status check_sizes(const GroupedGemmProblem& problem) {
  if (problem.experts < 1 || problem.experts > static_cast<int>(kGroupedExpertsMax)) {
    return fail(ErrorCode::kInvalidArgument,
                "grouped gemm: {} experts; a launch has 1 to {}: split them over launches",
                problem.experts, kGroupedExpertsMax);
  }
  if (problem.rows_max < 1 || problem.n < 1 || problem.k < 1) {
    return fail(ErrorCode::kInvalidArgument,
                "grouped gemm: rows_max {}, n {}, k {} must all be at least 1", problem.rows_max,
                problem.n, problem.k);
  }
  if (problem.n % kSizeStep != 0 || problem.k % kSizeStep != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "grouped gemm: n {} and k {} must be multiples of {} (the copy engine moves 16 "
                "bytes at least): pad them",
                problem.n, problem.k, kSizeStep);
  }
  if (is_gated(problem.activation) && problem.n % (2 * kSizeStep) != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "grouped gemm: n {} holds gates and ups; it must be a multiple of {}: pad both",
                problem.n, 2 * kSizeStep);
  }
  return {};
}

Status check_addresses(const GroupedGemmProblem& problem) {
  if (problem.offsets == nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "grouped gemm: give offsets: the first row of each expert");
  }
  const auto aligned = [](const void* address, std::uintptr_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  };
  struct Words {
    const char* name;
    const void* address;
  };
  for (const Words& words : {Words{"offsets", problem.offsets}, Words{"counts", problem.counts},
                             Words{"bias", problem.bias}, Words{"row_scale", problem.row_scale}}) {
    if (aligned(words.address, 4)) continue;
    return fail(ErrorCode::kInvalidArgument,
                "grouped gemm: the address of {}, {}, must be a multiple of 4 bytes", words.name,
                fmt::ptr(words.address));
  }
  return {};
}

/// Two words of device memory, zero at first.
Result<std::shared_ptr<GroupedWords>> make_words() {
  void* memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, kGroupedWordsBytes);
  if (error == cudaSuccess) error = cudaMemset(memory, 0, kGroupedWordsBytes);
  // The memory is cleared in the default stream; launches may be in others.
  if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return fail(ErrorCode::kSystem, "grouped gemm: no device memory for two words: {}",
                cudaGetErrorString(error));
  }
  return std::shared_ptr<GroupedWords>(static_cast<GroupedWords*>(memory),
                                       [](GroupedWords* words) { cudaFree(words); });
}

}  // namespace

struct GroupedGemmPlan::Parts {
  const GroupedKernel* kernel = nullptr;
  GroupedArguments arguments;
  std::shared_ptr<GroupedWords> words;
  int workers = 0;
};

const char* grouped_variant_name(GroupedVariant variant) {
  switch (variant) {
    case GroupedVariant::kAuto:
      return "auto";
    case GroupedVariant::k128x128:
      return "128x128";
    case GroupedVariant::k128x256:
      return "128x256";
  }
  return "unknown";
}

int GroupedGemmPlan::blocks() const { return parts_->workers; }

Result<GroupedGemmPlan> GroupedGemmPlan::create(const GroupedGemmProblem& problem,
                                                const GroupedGemmTuning& tuning) {
  MK_RETURN_IF_ERROR(check_sizes(problem));
  MK_RETURN_IF_ERROR(check_addresses(problem));
  int device = 0;
  int major = 0;
  int sm_count = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return fail(ErrorCode::kUnavailable, "grouped gemm: no CUDA device: {}",
                cudaGetErrorString(error));
  }
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  if (major != 9) {
    return fail(ErrorCode::kUnsupported,
                "grouped gemm: device {} has compute capability {}.x; these kernels are for 9.0 "
                "(H100, H200)",
                device, major);
  }

  const int blocks = tuning.blocks_max > 0 ? std::min(tuning.blocks_max, sm_count) : sm_count;
  const int row_tiles_max = std::min(
      problem.rows_max, problem.rows_max / static_cast<int>(kGroupedTileRows) + problem.experts);
  const auto columns_of = [&](int tile_columns) { return ceil_div(problem.n, tile_columns); };
  GroupedGemmPlan plan;
  plan.variant_ = tuning.variant;
  if (plan.variant_ == GroupedVariant::kAuto) {
    // Narrow tiles only where wide ones would leave SMs without any.
    const bool few = row_tiles_max * columns_of(256) < blocks;
    plan.variant_ = few || problem.n <= 128 ? GroupedVariant::k128x128 : GroupedVariant::k128x256;
  }
  const bool plain = problem.activation == GroupedActivation::kNone && problem.bias == nullptr &&
                     problem.row_scale == nullptr;
  const GroupedKernel& kernel =
      problem.dtype == DType::kBf16
          ? grouped_kernel_bf16(problem.b_layout, problem.activation, plain, plan.variant_)
          : grouped_kernel_f16(problem.b_layout, problem.activation, plain, plan.variant_);

  auto parts = std::make_shared<Parts>();
  parts->kernel = &kernel;
  GroupedArguments& arguments = parts->arguments;
  const DType dtype = problem.dtype;
  arguments.halves = problem.activation == GroupedActivation::kGatedSiluHalves ? 2 : 1;
  const auto rows_of_a = [&](std::uint32_t window) {
    return make_row_window_map("A", dtype, problem.a, problem.rows_max, problem.k,
                               static_cast<int>(window), kBlockK);
  };
  MK_ASSIGN_OR_RETURN(arguments.a, rows_of_a(kGroupedTileRows));
  MK_ASSIGN_OR_RETURN(arguments.a_half, rows_of_a(kGroupedTileRows / 2));
  MK_ASSIGN_OR_RETURN(
      arguments.b, make_expert_weights_map("B", dtype, problem.b_layout, problem.b, problem.experts,
                                           problem.n, problem.k, arguments.halves, kernel.block_n));
  MK_ASSIGN_OR_RETURN(arguments.c, make_row_window_map("C", dtype, problem.c, problem.rows_max,
                                                       c_columns(problem), 64, kPieceColumns));
  arguments.k_blocks = ceil_div(problem.k, kBlockK);
  arguments.rows = {problem.offsets, problem.counts, static_cast<std::uint32_t>(problem.rows_max)};
  arguments.experts = static_cast<std::uint32_t>(problem.experts);
  arguments.columns = static_cast<std::uint32_t>(columns_of(kernel.block_n));
  // With 132 blocks, 2048 rows of tiles in flight are about as wide as they are high.
  constexpr int kBandRows = 2048;
  arguments.band = std::max<std::uint32_t>(
      1, static_cast<std::uint32_t>(tuning.band_rows > 0 ? tuning.band_rows : kBandRows) /
             kGroupedTileRows);
  arguments.n = problem.n;
  arguments.bias = problem.bias;
  arguments.row_scale = problem.row_scale;
  MK_ASSIGN_OR_RETURN(parts->words, make_words());
  arguments.words = parts->words.get();
  const std::int64_t tiles_max = std::int64_t{row_tiles_max} * arguments.columns;
  parts->workers = static_cast<int>(std::min<std::int64_t>(blocks, tiles_max));

  if (cudaError_t error = kernel.prepare(); error != cudaSuccess) {
    return fail(ErrorCode::kSystem,
                "grouped gemm: the device refuses the kernel's shared memory: {}",
                cudaGetErrorString(error));
  }
  plan.parts_ = std::move(parts);
  return plan;
}

Status GroupedGemmPlan::launch(cudaStream_t stream) const {
  if (cudaError_t error = parts_->kernel->launch(parts_->arguments, parts_->workers, stream);
      error != cudaSuccess) {
    return fail(ErrorCode::kSystem, "grouped gemm: launch of {} failed: {}",
                grouped_variant_name(variant_), cudaGetErrorString(error));
  }
  return {};
}

}  // namespace mk::kernels::cuda
