#include "kernels/ops/ring/sm90.h"

#include <algorithm>
#include <cmath>

#include "kernels/comm/banks.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/cuda/core/attention.h"
#include "kernels/cuda/on_device.h"
#include "kernels/cuda/operator_inputs.h"
#include "kernels/cuda/planned.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/gather/plan.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "ring_attention";
constexpr std::uint64_t kItemsMax = 1u << 29;  // their numbers are ints
constexpr std::int64_t kL2Bytes = 32 << 20;    // of keys and values worked on at one time
constexpr float kLog2E = 1.44269504088896340736f;

// The kernels' tiles, as the CPU's statements about a plan know them.
constexpr std::uint32_t tile_queries(std::uint32_t head_dim) { return head_dim == 64 ? 192 : 128; }
constexpr std::uint32_t tile_keys(std::uint32_t head_dim) { return head_dim == 64 ? 128 : 176; }

cuda::AttentionProblem problem_of(const RingAttentionPlan& plan,
                                  const RingAttentionDeviceTensors& tensors, std::uint32_t rows) {
  cuda::AttentionProblem problem;
  problem.dtype = cuda::cuda_type(plan.dtype);
  problem.head_dim = static_cast<int>(plan.head_dim);
  problem.batch = static_cast<int>(plan.batch);
  problem.query_heads = static_cast<int>(plan.query_heads);
  problem.key_heads = static_cast<int>(plan.key_heads);
  problem.queries = problem.keys = static_cast<int>(rows);
  problem.scale = tensors.scale;
  problem.q = tensors.q;
  problem.k = tensors.k;
  problem.v = tensors.v;
  problem.o = tensors.o;
  return problem;
}

HeadTensor source_of(const cuda::AttentionTensor& tensor) {
  const auto bytes = [](std::int64_t elements) {
    return static_cast<std::uint64_t>(elements) * kElementBytes;
  };
  return {static_cast<const std::byte*>(tensor.data), bytes(tensor.batch_stride),
          bytes(tensor.row_stride), bytes(tensor.head_stride)};
}

/// How many query heads are worked on at one time: of whole key heads, as many as have their keys
/// and values in L2 together. Without a mask one by one: their tiles are equally long.
int choose_section(const RingAttentionPlan& plan, std::uint64_t seq) {
  if (!plan.causal) return 1;
  const std::int64_t bytes = static_cast<std::int64_t>(seq) * plan.head_dim * 2 * kElementBytes;
  const std::int64_t key_heads = std::max<std::int64_t>(1, kL2Bytes / bytes);
  const std::int64_t heads = std::int64_t{plan.batch} * plan.query_heads;
  return static_cast<int>(std::min(heads, key_heads * plan.group()));
}

}  // namespace

RingAttentionTiling ring_attention_cuda_tiling(const RingAttentionShape& shape) {
  RingAttentionTiling tiling;
  tiling.packing = KeyPacking::kHeads;
  tiling.tile_q = tile_queries(shape.head_dim);
  tiling.tile_k = tile_keys(shape.head_dim);
  tiling.remote_passes = 1;
  return tiling;
}

RingAttentionCuda::RingAttentionCuda(const RingAttentionPlan& plan) : plan_(plan), frame_(kOp) {
  arguments_.launch.plan = plan;
}

RingAttentionCuda::~RingAttentionCuda() {
  const cuda::OnDevice on_device(frame_.device());
  cudaFree(words_);
}

Result<std::unique_ptr<RingAttentionCuda>> RingAttentionCuda::create(const RingAttentionPlan& plan,
                                                                     const RankContext& context,
                                                                     const CudaOptions& options) {
  std::unique_ptr<RingAttentionCuda> made(new RingAttentionCuda(plan));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status RingAttentionCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  if (plan_.packing != KeyPacking::kHeads) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: the plan packs keys by rows; on a GPU they come by heads "
                "(ring_attention_cuda_tiling)",
                kOp);
  }
  if (plan_.sequences_max != 0) {
    return fail(ErrorCode::kUnsupported,
                "{}: sequences of different lengths run on CPUs only, so far", kOp);
  }
  constexpr std::uint32_t kRunsMax = cuda::RingRuns::kMax;
  if (of.size() * plan_.parts_per_rank() > kRunsMax) {
    return fail(ErrorCode::kUnsupported, "{}: {} ranks{} are more than the kernel takes ({})", kOp,
                of.size(), plan_.causal ? " with two parts each" : "",
                kRunsMax / plan_.parts_per_rank());
  }
  const std::uint64_t items = std::uint64_t{plan_.batch} * plan_.query_heads *
                              (div_up(plan_.rows_max(), tile_queries(plan_.head_dim)) + 1);
  if (items > kItemsMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: batch {} x {} heads x {} rows are {} tiles of queries; at most {}", kOp,
                plan_.batch, plan_.query_heads, plan_.rows_max(), items, kItemsMax);
  }
  MK_RETURN_IF_ERROR(check_context(kOp, plan_.nodes, plan_.locals, plan_.flag_count(),
                                   std::max(1u, options.send_groups), context));
  cuda::GroupNeeds needs;
  needs.streams = Role::kShare;
  needs.stream = of.size() > 1;
  needs.send = of.nodes > 1;
  needs.receive = of.nodes > 1 && of.locals > 1;
  needs.receivers_stream = true;
  constexpr std::uint32_t kGroups = 24;
  const std::uint32_t watchers = of.size() > 1 ? of.nodes : 0;
  needs.receive_groups = kGroups / 2;
  needs.stream_groups = watchers + (needs.receive ? kGroups - needs.receive_groups : kGroups);
  needs.stream_least = watchers + 1;
  const FlagMap flags{of.nodes, plan_.gather.banks, plan_.gather.chunks_max};
  MK_RETURN_IF_ERROR(
      frame_.start(context, options, needs, flags, arguments_.launch, arguments_.frame));
  arguments_.frame.heeds_peers = of.locals > 1 && plan_.gather.local_banks == 1;
  if (of.size() > 1 && cuda::groups_that_only_share(arguments_.frame, blocks()) <= watchers) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} groups share keys, and the first {} of them look for the others' alone; "
                "give it one more at least",
                kOp, cuda::groups_that_only_share(arguments_.frame, blocks()), watchers);
  }
  arguments_.watchers = watchers;
  MK_ASSIGN_OR_RETURN(const auto job, cuda::job_plan_of(options));
  rates_ = plan::gpu_rates(job->machine, options.rates, blocks().compute);

  void* words = nullptr;
  const std::size_t bytes = (1 + of.size()) * sizeof(std::uint64_t);
  MK_RETURN_IF_ERROR(frame_.check(cudaMalloc(&words, bytes), "memory"));
  words_ = words;
  MK_RETURN_IF_ERROR(frame_.check(cudaMemset(words, 0, bytes), "memory"));
  MK_RETURN_IF_ERROR(frame_.check(cudaStreamSynchronize(nullptr), "memory"));
  arguments_.dealer_words = static_cast<std::uint32_t*>(words);
  arguments_.shown = static_cast<std::uint64_t*>(words) + 1;
  kernel_ = plan_.dtype == DType::kBf16 ? cuda::ring_attention_kernel_bf16(plan_.head_dim)
                                        : cuda::ring_attention_kernel_f16(plan_.head_dim);
  if (kernel_ == nullptr) {
    return fail(ErrorCode::kUnsupported,
                "{}: {} with heads of {} is compiled in release builds only "
                "(CMAKE_BUILD_TYPE=Release); use one, or bf16",
                kOp, name_of(plan_.dtype), plan_.head_dim);
  }
  return frame_.check(kernel_->prepare(), "the device refuses the kernel");
}

RingAttentionSchedule RingAttentionCuda::schedule_of(std::uint64_t seq) const {
  return {plan_, world(), static_cast<std::uint32_t>(seq), Mode::kFused};
}

std::uint32_t RingAttentionCuda::rows(std::uint64_t seq) const {
  return schedule_of(seq).rows(world().rank());
}

Status RingAttentionCuda::launch(cudaStream_t stream, const RingAttentionDeviceTensors& tensors,
                                 std::uint64_t seq, Mode mode) {
  MK_RETURN_IF_ERROR(plan_.check_seq(seq));
  const std::uint32_t own = rows(seq);
  MK_RETURN_IF_ERROR(cuda::check_attention(problem_of(plan_, tensors, own)));
  MK_RETURN_IF_ERROR(status());
  const cuda::OnDevice on_device(frame_.device());
  MK_RETURN_IF_ERROR(make_maps(tensors, own));

  const auto m = static_cast<std::uint32_t>(seq);
  const Estimate expected = estimate(plan_.work(world(), m), rates_);
  RingAttentionLaunch& launch = arguments_.launch;
  launch.m = m;
  launch.mode = mode == Mode::kAuto ? expected.cheaper() : mode;
  launch.keys_values = KeySource::of(plan_, source_of(tensors.k), source_of(tensors.v), own);
  arguments_.items = cuda::ring_items(plan_, world(), schedule_of(seq), kernel_->tile_queries,
                                      choose_section(plan_, seq));
  const float scale =
      tensors.scale != 0 ? tensors.scale : 1.0f / std::sqrt(static_cast<float>(plan_.head_dim));
  arguments_.scale_log2 = scale * kLog2E;
  arguments_.o = tensors.o;
  arguments_.lse = tensors.lse;
  arguments_.lse_batch_stride = tensors.lse_batch_stride;
  arguments_.lse_row_stride = tensors.lse_row_stride;
  arguments_.lse_head_stride = tensors.lse_head_stride;
  MK_RETURN_IF_ERROR(frame_.check(kernel_->launch(arguments_, stream), "the launch was refused"));
  queued_ = {m, launch.mode, expected};
  return {};
}

Result<LaunchStats> RingAttentionCuda::finish(cudaStream_t stream) {
  MK_ASSIGN_OR_RETURN(LaunchStats stats, frame_.finish(stream));
  stats.m = queued_.m;
  stats.mode = queued_.mode;
  stats.estimate = queued_.estimate;
  return stats;
}

Status RingAttentionCuda::make_maps(const RingAttentionDeviceTensors& tensors, std::uint32_t rows) {
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto map_of = [&](const char* name, const cuda::AttentionTensor& tensor,
                          std::uint32_t heads, int box_rows) {
    cuda::HeadsTensor shape;
    shape.batch = plan_.batch;
    shape.rows = rows;
    shape.heads = heads;
    shape.head_dim = plan_.head_dim;
    shape.batch_stride = tensor.batch_stride;
    shape.row_stride = tensor.row_stride;
    shape.head_stride = tensor.head_stride;
    return cuda::make_heads_map(name, type, tensor.data, shape, box_rows);
  };
  MK_ASSIGN_OR_RETURN(arguments_.q,
                      map_of("Q", tensors.q, plan_.query_heads, kernel_->query_box_rows));
  MK_ASSIGN_OR_RETURN(arguments_.k, map_of("K", tensors.k, plan_.key_heads, kernel_->tile_keys));
  MK_ASSIGN_OR_RETURN(arguments_.v, map_of("V", tensors.v, plan_.key_heads, kernel_->tile_keys));
  if (world().size() == 1) {
    arguments_.gathered = arguments_.k;  // nothing is loaded by it
    return {};
  }
  const GatherGeometry& gather = plan_.gather;
  cuda::HeadsTensor slots;
  slots.rows = gather.rows_max;
  slots.heads = std::int64_t{gather.banks} * world().size();
  slots.head_dim = plan_.head_dim;
  slots.row_stride = plan_.head_dim;
  slots.head_stride = static_cast<std::int64_t>(gather.layout.slot_bytes / kElementBytes);
  const std::byte* const first = arguments_.launch.context.workspaces[world().local] +
                                 gather.layout.slots + kGatherHeaderBytes;
  MK_ASSIGN_OR_RETURN(arguments_.gathered, cuda::make_heads_map("gathered keys", type, first, slots,
                                                                kernel_->tile_keys));
  return {};
}

}  // namespace mk::kernels
