#include "kernels/ops/combine/sm90.h"

#include <algorithm>
#include <array>
#include <new>

#include "kernels/comm/plan_tools.h"
#include "kernels/cuda/core/tensor_map.h"
#include "kernels/cuda/host/on_device.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/ops/combine/schedule.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_combine";
constexpr std::uint64_t kTilesMax = 1u << 30;        // their numbers are ints
constexpr std::uint64_t kSlotsMax = (1u << 28) - 1;  // SlotRows::kSlotBits

}  // namespace

Tiling combine_cuda_tiling() {
  Tiling tiling;
  tiling.tile_m = cuda::kCombineTileRows;
  tiling.tile_n = cuda::kCombineTileColumns;
  return tiling;
}

CombineCuda::CombineCuda(const CombinePlan& plan) : plan_(plan), frame_(kOp) {
  arguments_.launch.plan = plan;
}

CombineCuda::~CombineCuda() {
  const cuda::OnDevice on_device(frame_.device());
  cudaFreeHost(refusals_);
}

Result<std::unique_ptr<CombineCuda>> CombineCuda::create(const CombinePlan& plan,
                                                         const RankContext& context,
                                                         const CudaOptions& options) {
  std::unique_ptr<CombineCuda> made(new CombineCuda(plan));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status CombineCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  const CombineShape& shape = plan_.shape;
  if (plan_.tile_m > static_cast<std::uint32_t>(cuda::kCombineTileRows)) {
    return fail(ErrorCode::kUnsupported, "{}: tiles of {} rows: the kernel's have at most {}", kOp,
                plan_.tile_m, cuda::kCombineTileRows);
  }
  if (plan_.nodes > 1 && plan_.flags().has_releases()) {
    return fail(ErrorCode::kUnsupported,
                "{}: one bank over {} nodes: on GPUs it takes two (leave banks open)", kOp,
                plan_.nodes);
  }
  const std::uint64_t slots = std::uint64_t{plan_.nodes} * shape.tokens_max * shape.top_k;
  arguments_.columns = div_up(shape.hidden, cuda::kCombineTileColumns);
  const std::uint64_t tiles = std::uint64_t{plan_.tiles_max} * arguments_.columns;
  if (tiles > kTilesMax || slots > kSlotsMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: up to {} tiles and {} slots of a rank; at most {} and {}: give it a smaller "
                "tokens_max",
                kOp, tiles, slots, kTilesMax, kSlotsMax);
  }
  MK_RETURN_IF_ERROR(check_context(kOp, plan_.nodes, plan_.locals, plan_.flag_count(),
                                   std::max(1u, options.send_groups.count()), context));
  MK_ASSIGN_OR_RETURN(const auto job, cuda::job_plan_of(options));
  plan::Problem problem;
  problem.op = plan::Op::kCombine;
  problem.nodes = of.nodes;
  problem.locals = of.locals;
  problem.shape = {shape.tokens_max * of.size(), shape.hidden, shape.features};
  problem.experts = {shape.experts, shape.top_k};
  problem.dtype = plan_.dtype;
  if (shape.partials == CombinePartials::kF32) problem.result.partials = Partials::kF32;
  problem.ranks_per_device = options.ranks_per_device;
  const LaunchWork largest = plan_.work(shape.tokens_max * shape.top_k, shape.tokens_max);
  const auto groups = plan::chosen_groups(problem, job->machine, largest, options.rates);
  CombineLaunch& launch = arguments_.launch;
  MK_RETURN_IF_ERROR(frame_.start(context, options, cuda::accounted_needs(problem, groups),
                                  plan_.flags(), launch, arguments_.frame));
  launch.blocks.plan = std::min(launch.blocks.reduce, kBlocksMax);
  launch.m = kCombineM;
  cuda::LaunchTold& told = arguments_.frame.host.told;
  std::ranges::copy(std::array{shape.hidden, shape.features, shape.experts, shape.top_k},
                    told.sizes);
  const auto* const words = reinterpret_cast<const CombineWords*>(
      launch.context.workspaces[of.local] + plan_.layout.words);
  told.tiles_of = &words->tiles;
  told.tiles_each = arguments_.columns;
  told.planned = true;
  plan::Candidate candidate;
  candidate.compute_blocks = blocks().compute;
  candidate.stream_warpgroups = blocks().reduce;
  account_ = plan::account_of(problem, job->machine, candidate, options.rates);

  void* memory = nullptr;
  MK_RETURN_IF_ERROR(frame_.check(
      cudaHostAlloc(&memory, sizeof(CombineRefusals), cudaHostAllocMapped | cudaHostAllocPortable),
      "pinned memory"));
  launch.refusals = refusals_ = new (memory) CombineRefusals;
  b_layout_ = options.b_layout;
  MK_RETURN_IF_ERROR(map_slots());
  return choose_kernel();
}

Status CombineCuda::choose_kernel() {
  const auto layout = cuda::cuda_layout(b_layout_);
  kernel_ = plan_.dtype == DType::kBf16 ? cuda::combine_kernel_bf16(layout, plan_.shape.partials)
                                        : cuda::combine_kernel_f16(layout, plan_.shape.partials);
  if (kernel_ == nullptr) {
    return fail(ErrorCode::kUnsupported,
                "{}: {} with weights as {} and partials in {} is compiled in release builds only "
                "(CMAKE_BUILD_TYPE=Release); use one, or bf16 and [H, I]",
                kOp, name_of(plan_.dtype), b_layout_ == BLayout::kNK ? "[H, I]" : "[I, H]",
                name_of(plan_.shape.partials));
  }
  return frame_.check(kernel_->prepare(), "the device refuses the kernel");
}

/// Partials in fp32 as twice as many elements: the copy engine only moves them.
Status CombineCuda::map_slots() {
  const CombineShape& shape = plan_.shape;
  const auto slots = static_cast<std::int64_t>(plan_.nodes) * shape.tokens_max * shape.top_k;
  const std::int64_t elements = std::int64_t{shape.hidden} * plan_.partial_bytes() / kElementBytes;
  for (std::uint32_t local = 0; local < plan_.locals; ++local) {
    MK_ASSIGN_OR_RETURN(
        arguments_.slots[local],
        cuda::make_tensor_map("slots", cuda::cuda_type(plan_.dtype),
                              arguments_.launch.context.workspaces[local] + plan_.layout.slots,
                              slots, elements, elements, 1, cuda::kPieceColumns));
  }
  return {};
}

Status CombineCuda::check_input(const CombineDeviceInput& input, const void* out) const {
  const CombineShape& shape = plan_.shape;
  if (input.count > shape.tokens_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} tokens are not in 0 to {}, which the operator was made for", kOp,
                input.count, shape.tokens_max);
  }
  if (input.room > plan_.rows_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: room for {} rows; {} ranks of at most {} tokens with {} slots can give {}",
                kOp, input.room, world().size(), shape.tokens_max, shape.top_k, plan_.rows_max);
  }
  struct Address {
    const char* name;
    const void* address;
    bool needed;
    std::uintptr_t step;
  };
  const bool tokens = input.count > 0;
  const bool rows = input.room > 0;
  for (const Address& one :
       {Address{"y", input.y, rows, 16}, Address{"rows", input.rows, rows, 16},
        Address{"offsets", input.offsets, true, 4},
        Address{"expert_weights", input.expert_weights, rows && experts().count > 0, 16},
        Address{"ids", input.ids, tokens, 4}, Address{"out", out, tokens, 16},
        Address{"residual", input.residual, tokens && input.residual != nullptr, 16}}) {
    if (!one.needed) continue;
    if (one.address == nullptr)
      return fail(ErrorCode::kInvalidArgument, "{}: {} is null", kOp, one.name);
    if (reinterpret_cast<std::uintptr_t>(one.address) % one.step != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: the address of {}, {}, must be a multiple of {} bytes", kOp, one.name,
                  fmt::ptr(one.address), one.step);
    }
  }
  return {};
}

Status CombineCuda::make_maps(const CombineDeviceInput& input) {
  const CombineShape& shape = plan_.shape;
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto features = static_cast<std::int64_t>(shape.features);
  cuda::ProductArguments& product = arguments_.product;
  product.a_box_rows = cuda::kCombineTileRows;
  product.k_blocks = static_cast<int>(div_up(shape.features, cuda::kBlockK));
  // Where there is nothing to compute, nobody asks for these.
  product.a = product.b = arguments_.a_half = arguments_.slots[world().local];
  if (input.room == 0 || experts().count == 0) return {};
  const auto window = [&](int rows) {
    return cuda::make_row_window_map("y", type, input.y, input.room, features, rows, cuda::kBlockK);
  };
  MK_ASSIGN_OR_RETURN(product.a, window(cuda::kCombineTileRows));
  MK_ASSIGN_OR_RETURN(arguments_.a_half, window(cuda::kCombineTileRows / 2));
  MK_ASSIGN_OR_RETURN(
      product.b, cuda::make_expert_weights_map("expert_weights", type, cuda::cuda_layout(b_layout_),
                                               input.expert_weights, experts().count, shape.hidden,
                                               features, 1, cuda::kCombineTileColumns));
  return {};
}

Status CombineCuda::launch(cudaStream_t stream, const CombineDeviceInput& input, void* out,
                           Mode mode) {
  MK_RETURN_IF_ERROR(check_input(input, out));
  MK_RETURN_IF_ERROR(status());
  const cuda::OnDevice on_device(frame_.device());
  MK_RETURN_IF_ERROR(make_maps(input));
  // How many rows there are only the device knows: as many as at even routing.
  const std::uint32_t rows = std::min(input.room, input.count * plan_.shape.top_k);
  const Estimate expected = account_.expected(plan_.work(rows, input.count));
  CombineLaunch& launch = arguments_.launch;
  launch.mode = mode == Mode::kAuto ? expected.cheaper() : mode;
  launch.rows = input.rows;
  launch.offsets = input.offsets;
  launch.room = input.room;
  launch.routing = {input.count, plan_.shape.top_k, input.ids, nullptr};
  launch.residual = static_cast<const std::byte*>(input.residual);
  arguments_.c = out;
  arguments_.frame.host.told.m = input.count;
  MK_RETURN_IF_ERROR(frame_.put_on(stream, *kernel_, arguments_));
  queued_ = {input.count, launch.mode, expected};
  return {};
}

Result<LaunchStats> CombineCuda::finish(cudaStream_t stream) {
  MK_ASSIGN_OR_RETURN(LaunchStats stats, frame_.finish(stream));
  const std::uint32_t count = shm::load_acquire(&refusals_->count);
  if (count != refused_) {
    refused_ = count;
    return tl::unexpected<Error>(plan_.refusal(world(), queued_.m, *refusals_));
  }
  stats.m = queued_.m;
  stats.mode = queued_.mode;
  stats.estimate = queued_.estimate;
  return stats;
}

}  // namespace mk::kernels
