#include "kernels/ops/moe/sm90.h"

#include <algorithm>
#include <array>
#include <new>

#include "kernels/comm/plan_tools.h"
#include "kernels/cuda/core/tensor_map.h"
#include "kernels/cuda/host/on_device.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/cuda/host/planned.h"
#include "kernels/ops/moe/block.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "moe_dispatch";
constexpr std::uint64_t kTilesMax = 1u << 30;  // their numbers are ints

}  // namespace

Tiling moe_dispatch_cuda_tiling() {
  Tiling tiling;
  tiling.tile_m = cuda::kMoeTileRows;
  tiling.tile_n = cuda::kMoeTileColumns;
  return tiling;
}

MoeDispatchCuda::MoeDispatchCuda(const MoeDispatchPlan& plan) : plan_(plan), frame_(kOp) {
  arguments_.launch.plan = plan;
}

MoeDispatchCuda::~MoeDispatchCuda() {
  const cuda::OnDevice on_device(frame_.device());
  cudaFreeHost(refusals_);
}

Result<std::unique_ptr<MoeDispatchCuda>> MoeDispatchCuda::create(const MoeDispatchPlan& plan,
                                                                 const RankContext& context,
                                                                 const CudaOptions& options) {
  std::unique_ptr<MoeDispatchCuda> made(new MoeDispatchCuda(plan));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status MoeDispatchCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  const MoeDispatchShape& shape = plan_.shape;
  if (plan_.tile_m > static_cast<std::uint32_t>(cuda::kMoeTileRows)) {
    return fail(ErrorCode::kUnsupported, "{}: tiles of {} rows: the kernel's have at most {}", kOp,
                plan_.tile_m, cuda::kMoeTileRows);
  }
  arguments_.columns = div_up(shape.weight_columns(), cuda::kMoeTileColumns);
  const std::uint64_t tiles = routing_shape(plan_, of).tiles_max() * arguments_.columns;
  if (tiles > kTilesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} rows of {} columns are up to {} tiles; at most {}: give it a smaller "
                "rows_max",
                kOp, shape.rows_max, shape.weight_columns(), tiles, kTilesMax);
  }
  MK_RETURN_IF_ERROR(check_context(kOp, plan_.nodes, plan_.locals, plan_.flag_count(),
                                   std::max(1u, options.send_groups.count()), context));
  MK_ASSIGN_OR_RETURN(const auto job, cuda::job_plan_of(options));
  plan::Problem problem;
  problem.op = plan::Op::kMoe;
  problem.nodes = of.nodes;
  problem.locals = of.locals;
  problem.shape = {shape.tokens_max * of.size(), shape.weight_columns(), shape.hidden};
  problem.experts = {shape.experts, shape.top_k};
  problem.dtype = plan_.dtype;
  problem.ranks_per_device = options.ranks_per_device;
  const auto groups =
      plan::chosen_groups(problem, job->machine, plan_.work(of, shape.tokens_max), options.rates);
  MoeDispatchLaunch& launch = arguments_.launch;
  MK_RETURN_IF_ERROR(frame_.start(context, options, cuda::accounted_needs(problem, groups),
                                  {plan_.flag_count(), plan_.banks}, launch, arguments_.frame));
  arguments_.frame.heeds_peers = of.locals > 1 && plan_.tokens.local_banks == 1;
  const std::uint32_t streams = launch.blocks.share;
  launch.blocks.pull = streams;
  launch.blocks.plan = moe_dispatch_plan_groups(streams, of.size());
  launch.m = kMoeDispatchM;
  cuda::LaunchTold& told = arguments_.frame.host.told;
  std::ranges::copy(std::array{shape.features, shape.hidden, shape.experts, shape.top_k},
                    told.sizes);
  told.tiles_of = &routing_plan_of(launch).summary().tiles;
  told.tiles_each = arguments_.columns;
  told.planned = true;
  plan::Candidate candidate;
  candidate.compute_blocks = blocks().compute;
  candidate.stream_warpgroups = streams;
  candidate.receive_warpgroups = blocks().receive;
  account_ = plan::account_of(problem, job->machine, candidate, options.rates);

  void* memory = nullptr;
  MK_RETURN_IF_ERROR(frame_.check(
      cudaHostAlloc(&memory, sizeof(MoeRefusals), cudaHostAllocMapped | cudaHostAllocPortable),
      "pinned memory"));
  launch.refusals = refusals_ = new (memory) MoeRefusals;

  b_layout_ = options.b_layout;
  const auto layout = cuda::cuda_layout(b_layout_);
  kernel_ = plan_.dtype == DType::kBf16
                ? cuda::moe_dispatch_kernel_bf16(layout, shape.epilogue, shape.bias)
                : cuda::moe_dispatch_kernel_f16(layout, shape.epilogue, shape.bias);
  if (kernel_ == nullptr) {
    return fail(
        ErrorCode::kUnsupported,
        "{}: {} with weights as {} and the epilogue {}{} is compiled in release builds only "
        "(CMAKE_BUILD_TYPE=Release); use one, or bf16 and [F, H]{}",
        kOp, name_of(plan_.dtype), b_layout_ == BLayout::kNK ? "[F, H]" : "[H, F]",
        name_of(shape.epilogue), shape.bias ? " with a bias" : "",
        shape.bias ? " with the epilogue gated-silu" : "");
  }
  return frame_.check(kernel_->prepare(), "the device refuses the kernel");
}

Status MoeDispatchCuda::check_input(const MoeDispatchInput& input, const void* y,
                                    std::uint32_t capacity) const {
  const MoeDispatchShape& shape = plan_.shape;
  if (input.count > shape.tokens_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} tokens are not in 0 to {}, which the operator was made for", kOp,
                input.count, shape.tokens_max);
  }
  if (capacity > shape.rows_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: room for {} output rows; the operator was made for at most {}", kOp, capacity,
                shape.rows_max);
  }
  struct Address {
    const char* name;
    const void* address;
    bool needed;
    std::uintptr_t step;
  };
  const bool some = input.count > 0;
  for (const Address& one :
       {Address{"tokens", input.tokens, some, 16}, Address{"ids", input.ids, some, 4},
        Address{"weights", input.weights, some, 4},
        Address{"expert_weights", input.expert_weights, experts().count > 0, 16},
        Address{"bias", input.bias, shape.bias && experts().count > 0, 16},
        Address{"y", y, capacity > 0, 16}}) {
    if (!one.needed) continue;
    if (one.address == nullptr)
      return fail(ErrorCode::kInvalidArgument, "{}: {} is null", kOp, one.name);
    if (reinterpret_cast<std::uintptr_t>(one.address) % one.step != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: the address of {}, {}, must be a multiple of {} bytes", kOp, one.name,
                  fmt::ptr(one.address), one.step);
    }
  }
  return plan_.check_bias(world(), input);
}

Status MoeDispatchCuda::make_maps(const MoeDispatchInput& input, void* y, std::uint32_t capacity) {
  const MoeDispatchShape& shape = plan_.shape;
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto hidden = static_cast<std::int64_t>(shape.hidden);
  const auto packed_rows =
      static_cast<std::int64_t>(routing_shape(plan_, world()).packed_rows_max());
  const std::byte* const packed =
      arguments_.launch.context.workspaces[world().local] + plan_.layout.packed;
  cuda::ProductArguments& product = arguments_.product;
  product.a_box_rows = cuda::kMoeTileRows;
  product.k_blocks = static_cast<int>(div_up(shape.hidden, cuda::kBlockK));
  arguments_.halves = shape.epilogue == MoeEpilogue::kGatedSilu ? 2 : 1;
  const auto window = [&](int rows) {
    return cuda::make_row_window_map("packed rows", type, packed, packed_rows, hidden, rows,
                                     cuda::kBlockK);
  };
  MK_ASSIGN_OR_RETURN(product.a, window(cuda::kMoeTileRows));
  MK_ASSIGN_OR_RETURN(arguments_.a_half, window(cuda::kMoeTileRows / 2));
  // Where there is nothing to compute, nobody asks for these.
  product.b = arguments_.y = product.a;
  if (experts().count > 0) {
    MK_ASSIGN_OR_RETURN(
        product.b,
        cuda::make_expert_weights_map("expert_weights", type, cuda::cuda_layout(b_layout_),
                                      input.expert_weights, experts().count, shape.weight_columns(),
                                      hidden, arguments_.halves, cuda::kMoeTileColumns));
  }
  if (capacity > 0) {
    MK_ASSIGN_OR_RETURN(
        arguments_.y,
        cuda::make_row_window_map("y", type, y, capacity, shape.features, 64, cuda::kPieceColumns));
  }
  return {};
}

Status MoeDispatchCuda::launch(cudaStream_t stream, const MoeDispatchInput& input, void* y,
                               std::uint32_t capacity, Mode mode) {
  MK_RETURN_IF_ERROR(check_input(input, y, capacity));
  MK_RETURN_IF_ERROR(status());
  const cuda::OnDevice on_device(frame_.device());
  MK_RETURN_IF_ERROR(make_maps(input, y, capacity));
  const Estimate expected = account_.expected(plan_.work(world(), input.count));
  MoeDispatchLaunch& launch = arguments_.launch;
  launch.mode = mode == Mode::kAuto ? expected.cheaper() : mode;
  launch.routing = {input.count, plan_.shape.top_k, input.ids, input.weights};
  launch.tokens = static_cast<const std::byte*>(input.tokens);
  launch.capacity = capacity;
  arguments_.frame.host.told.m = input.count;
  arguments_.bias = input.bias;
  MK_RETURN_IF_ERROR(frame_.put_on(stream, *kernel_, arguments_));
  queued_ = {input.count, launch.mode, expected};
  return {};
}

Result<LaunchStats> MoeDispatchCuda::finish(cudaStream_t stream) {
  MK_ASSIGN_OR_RETURN(LaunchStats stats, frame_.finish(stream));
  const std::uint32_t count = shm::load_acquire(&refusals_->count);
  rows_ = 0;
  if (count != refused_) {
    refused_ = count;
    return tl::unexpected<Error>(
        plan_.refusal(world(), refusals_->epoch, refusals_->capacity, refusals_->summary));
  }
  const cuda::OnDevice on_device(frame_.device());
  PlanSummary summary;
  MK_RETURN_IF_ERROR(frame_.check(
      cudaMemcpyAsync(&summary, output().summary, sizeof summary, cudaMemcpyDeviceToHost, stream),
      "the plan's summary"));
  MK_RETURN_IF_ERROR(frame_.check(cudaStreamSynchronize(stream), "the plan's summary"));
  rows_ = summary.rows;
  stats.m = queued_.m;
  stats.mode = queued_.mode;
  stats.estimate = queued_.estimate;
  return stats;
}

MoeDispatchDeviceOutput MoeDispatchCuda::output() const {
  const RoutingPlan plan = routing_plan_of(arguments_.launch);
  return {plan.offsets(), plan.rows(), &plan.summary()};
}

}  // namespace mk::kernels
