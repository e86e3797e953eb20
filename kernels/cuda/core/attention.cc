#include "kernels/cuda/core/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/core/attention_kernels.h"
#include "kernels/cuda/core/tensor_map.h"

namespace mk::kernels::cuda {
namespace {

constexpr int kRowsMax = 1 << 29;  // rows plus offsets are ints
constexpr std::int64_t kElementsOf16Bytes = 8;
constexpr std::int64_t kL2Bytes = 32 << 20;  // of keys and values worked on at one time

int ceil_div(int a, int b) { return (a + b - 1) / b; }

Status check_tensor(const char* name, const AttentionTensor& tensor, int rows) {
  if (rows == 0) return {};
  if (tensor.data == nullptr || reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "attention: tensor {} begins at {}; give it an address that is a multiple of 16",
                name, fmt::ptr(tensor.data));
  }
  for (const auto& [what, stride] : {std::pair{"batch", tensor.batch_stride},
                                     {"row", tensor.row_stride},
                                     {"head", tensor.head_stride}}) {
    if (stride >= 0 && stride % kElementsOf16Bytes == 0) continue;
    return fail(ErrorCode::kInvalidArgument,
                "attention: the {} stride of tensor {} is {} elements; the copy engine needs a "
                "multiple of {}, not negative: pad it",
                what, name, stride, kElementsOf16Bytes);
  }
  return {};
}

float scale_of(const AttentionProblem& problem) {
  return problem.scale != 0 ? problem.scale
                            : 1.0f / std::sqrt(static_cast<float>(problem.head_dim));
}

/// How many heads to work on at one time: as many as have their keys and values in L2 together.
int choose_section(const AttentionProblem& problem) {
  const std::int64_t bytes = std::int64_t{problem.keys} * problem.head_dim * 4;
  std::int64_t key_heads = std::max<std::int64_t>(1, kL2Bytes / std::max<std::int64_t>(1, bytes));
  const std::int64_t heads = key_heads * (problem.query_heads / problem.key_heads);
  return static_cast<int>(
      std::min<std::int64_t>(heads, std::int64_t{problem.batch} * problem.query_heads));
}

struct FreeDevice {
  void operator()(std::uint32_t* words) const { cudaFree(words); }
};

Result<CUtensorMap> map_of(const char* name, const AttentionProblem& problem,
                           const AttentionTensor& tensor, int rows, int heads, int box_rows) {
  HeadsTensor shape;
  shape.batch = problem.batch;
  shape.rows = rows;
  shape.heads = heads;
  shape.head_dim = problem.head_dim;
  shape.batch_stride = tensor.batch_stride;
  shape.row_stride = tensor.row_stride;
  shape.head_stride = tensor.head_stride;
  return make_heads_map(name, problem.dtype, tensor.data, shape, box_rows);
}

}  // namespace

struct AttentionPlan::Parts {
  const AttentionKernel* kernel = nullptr;
  AttentionArguments arguments;
  int blocks = 0;
  std::unique_ptr<std::uint32_t, FreeDevice> dealer_words;
};

Status check_attention(const AttentionProblem& problem) {
  if (problem.head_dim != 64 && problem.head_dim != 128) {
    return fail(ErrorCode::kInvalidArgument,
                "attention: a head dimension of {} is not compiled; 64 and 128 are",
                problem.head_dim);
  }
  if (problem.batch < 1 || problem.query_heads < 1 || problem.key_heads < 1 ||
      problem.query_heads % problem.key_heads != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "attention: batch {}, {} query heads, {} key heads: each must be at least 1, and "
                "the query heads a multiple of the key heads",
                problem.batch, problem.query_heads, problem.key_heads);
  }
  if (problem.queries < 1 || problem.keys < 0 || problem.queries > kRowsMax ||
      problem.keys > kRowsMax) {
    return fail(ErrorCode::kInvalidArgument,
                "attention: {} queries and {} keys; from 1 and from 0 to {} are possible",
                problem.queries, problem.keys, kRowsMax);
  }
  if (!(problem.scale >= 0) || !std::isfinite(problem.scale)) {
    return fail(ErrorCode::kInvalidArgument,
                "attention: a scale of {}; it must be positive, or 0 for 1 / sqrt(head dimension)",
                problem.scale);
  }
  MK_RETURN_IF_ERROR(check_tensor("Q", problem.q, problem.queries));
  MK_RETURN_IF_ERROR(check_tensor("K", problem.k, problem.keys));
  MK_RETURN_IF_ERROR(check_tensor("V", problem.v, problem.keys));
  return check_tensor("O", problem.o, problem.queries);
}

int AttentionPlan::blocks() const { return parts_->blocks; }
int AttentionPlan::tile_queries() const { return parts_->kernel->tile_queries; }
int AttentionPlan::tile_keys() const { return parts_->kernel->tile_keys; }

Result<AttentionPlan> AttentionPlan::create(const AttentionProblem& problem,
                                            const AttentionTuning& tuning) {
  MK_RETURN_IF_ERROR(check_attention(problem));
  int device = 0;
  int major = 0;
  int sm_count = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return fail(ErrorCode::kUnavailable, "attention: no CUDA device: {}",
                cudaGetErrorString(error));
  }
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  if (major != 9) {
    return fail(ErrorCode::kUnsupported,
                "attention: device {} has compute capability {}.x; these kernels are for 9.0 "
                "(H100, H200)",
                device, major);
  }

  auto parts = std::make_shared<Parts>();
  const AttentionKernel& kernel = problem.dtype == DType::kBf16
                                      ? attention_kernel_bf16(problem.head_dim)
                                      : attention_kernel_f16(problem.head_dim);
  parts->kernel = &kernel;
  AttentionArguments& arguments = parts->arguments;
  MK_ASSIGN_OR_RETURN(arguments.q, map_of("Q", problem, problem.q, problem.queries,
                                          problem.query_heads, kernel.query_box_rows));
  if (problem.keys > 0) {
    MK_ASSIGN_OR_RETURN(arguments.k, map_of("K", problem, problem.k, problem.keys,
                                            problem.key_heads, kernel.tile_keys));
    MK_ASSIGN_OR_RETURN(arguments.v, map_of("V", problem, problem.v, problem.keys,
                                            problem.key_heads, kernel.tile_keys));
  }
  constexpr float kLog2E = 1.44269504088896340736f;
  arguments.scale_log2 = scale_of(problem) * kLog2E;
  arguments.keys = problem.keys;
  arguments.heads_per_key_head = problem.query_heads / problem.key_heads;
  arguments.offset = problem.causal ? problem.keys - problem.queries : kNoMask;
  arguments.o = problem.o;
  arguments.lse = problem.lse;
  arguments.lse_batch_stride = problem.lse_batch_stride;
  arguments.lse_row_stride = problem.lse_row_stride;
  arguments.lse_head_stride = problem.lse_head_stride;

  DenseItems::Params& items = arguments.items;
  items.batch = problem.batch;
  items.heads = problem.query_heads;
  items.rows = problem.queries;
  items.tile_rows = kernel.tile_queries;
  items.tiles = ceil_div(problem.queries, kernel.tile_queries);
  items.longest_first = problem.causal;
  const std::int64_t count = std::int64_t{items.batch} * items.heads * items.tiles;
  // The number of the item after the last one of each block is an int, too.
  if (count > kRowsMax) {
    return fail(ErrorCode::kInvalidArgument,
                "attention: batch {} x {} heads x {} tiles of queries are more than {} items: give "
                "fewer batches or heads at one time",
                items.batch, items.heads, items.tiles, kRowsMax);
  }
  const int blocks = tuning.blocks_max > 0 ? std::min(tuning.blocks_max, sm_count) : sm_count;
  parts->blocks = static_cast<int>(std::min<std::int64_t>(count, blocks));
  const int section = tuning.section > 0 ? tuning.section
                      : problem.causal   ? choose_section(problem)
                                         : 1;
  items.sections = HeadSections::of(items.batch * items.heads, section, items.tiles,
                                    problem.causal ? HeadSections::kLastOfBlock * blocks : 0);

  void* words = nullptr;
  if (cudaError_t error = cudaMalloc(&words, 2 * sizeof(std::uint32_t)); error != cudaSuccess) {
    return fail(ErrorCode::kSystem, "attention: no device memory for the items' counter: {}",
                cudaGetErrorString(error));
  }
  parts->dealer_words.reset(static_cast<std::uint32_t*>(words));
  arguments.dealer_words = parts->dealer_words.get();
  cudaError_t cleared = cudaMemset(words, 0, 2 * sizeof(std::uint32_t));
  // Cleared in the default stream; launches may be in others.
  if (cleared == cudaSuccess) cleared = cudaStreamSynchronize(nullptr);
  if (cleared != cudaSuccess) {
    return fail(ErrorCode::kSystem, "attention: the items' counter cannot be cleared: {}",
                cudaGetErrorString(cleared));
  }
  if (cudaError_t error = kernel.prepare(); error != cudaSuccess) {
    return fail(ErrorCode::kSystem, "attention: the device refuses the kernel's shared memory: {}",
                cudaGetErrorString(error));
  }
  AttentionPlan plan;
  plan.parts_ = std::move(parts);
  return plan;
}

Status AttentionPlan::launch(cudaStream_t stream) const {
  if (cudaError_t error = parts_->kernel->launch(parts_->arguments, parts_->blocks, stream);
      error != cudaSuccess) {
    return fail(ErrorCode::kSystem, "attention: the launch failed: {}", cudaGetErrorString(error));
  }
  return {};
}

}  // namespace mk::kernels::cuda
