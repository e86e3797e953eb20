#include "kernels/ops/moe/sm90.h"

#include <algorithm>

#include "kernels/cuda/core/tensor_map.h"
#include "kernels/cuda/host/on_device.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/cuda/transport/dma_rows.h"
#include "kernels/gather/engine_steps.h"
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

Result<std::unique_ptr<MoeDispatchCuda>> MoeDispatchCuda::create(const MoeDispatchPlan& plan,
                                                                 const RankContext& context,
                                                                 const CudaOptions& options) {
  std::unique_ptr<MoeDispatchCuda> made(new MoeDispatchCuda(kOp, plan));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status MoeDispatchCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  const MoeDispatchShape& shape = plan_.shape;
  MK_RETURN_IF_ERROR(check_tile_rows(cuda::kMoeTileRows));
  arguments_.columns = div_up(shape.weight_columns(), cuda::kMoeTileColumns);
  const std::uint64_t tiles = routing_shape(plan_, of).tiles_max() * arguments_.columns;
  if (tiles > kTilesMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} rows of {} columns are up to {} tiles; at most {}: give it a smaller "
                "rows_max",
                kOp, shape.rows_max, shape.weight_columns(), tiles, kTilesMax);
  }
  plan::Problem problem;
  problem.op = plan::Op::kMoe;
  problem.shape = {shape.tokens_max * of.size(), shape.weight_columns(), shape.hidden};
  MK_RETURN_IF_ERROR(create_engines(options));
  problem.named.engines = engines_.used();
  MK_RETURN_IF_ERROR(ExpertOperator::start(problem, plan_.work(of, shape.tokens_max),
                                           {plan_.flag_count(), plan_.banks}, context, options,
                                           kMoeDispatchM));
  MoeDispatchLaunch& launch = arguments_.launch;
  arguments_.frame.heeds_peers = of.locals > 1 && plan_.tokens.local_banks == 1;
  arguments_.frame.by_dma = launch.by_dma = engines_.used();
  // A rank waits for the tokens that its experts need.
  if (plan_.engines) engines_outlast_launches();
  deal_groups();
  tell(shape.features, shape.hidden, &routing_plan_of(launch).summary().tiles);
  plan::Candidate candidate;
  candidate.stream_warpgroups = blocks().share;
  candidate.receive_warpgroups = blocks().receive;
  candidate.engines = engines_.used();
  account_for(problem, candidate, options);

  const auto layout = cuda::cuda_layout(b_layout());
  kernel_ = plan_.dtype == DType::kBf16
                ? cuda::moe_dispatch_kernel_bf16(layout, shape.epilogue, shape.bias)
                : cuda::moe_dispatch_kernel_f16(layout, shape.epilogue, shape.bias);
  if (kernel_ == nullptr) {
    return fail(
        ErrorCode::kUnsupported,
        "{}: {} with weights as {} and the epilogue {}{} is compiled in release builds only "
        "(CMAKE_BUILD_TYPE=Release); use one, or bf16 and [F, H]{}",
        kOp, name_of(plan_.dtype), b_layout() == BLayout::kNK ? "[F, H]" : "[H, F]",
        name_of(shape.epilogue), shape.bias ? " with a bias" : "",
        shape.bias ? " with the epilogue gated-silu" : "");
  }
  return frame().check(kernel_->prepare(), "the device refuses the kernel");
}

Status MoeDispatchCuda::check_input(const MoeDispatchInput& input, const void* y,
                                    std::uint32_t capacity) const {
  const MoeDispatchShape& shape = plan_.shape;
  MK_RETURN_IF_ERROR(check_tokens(input.count));
  if (capacity > shape.rows_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: room for {} output rows; the operator was made for at most {}", kOp, capacity,
                shape.rows_max);
  }
  const bool some = input.count > 0;
  MK_RETURN_IF_ERROR(
      check_addresses({{"tokens", input.tokens, some, 16},
                       {"ids", input.ids, some, 4},
                       {"weights", input.weights, some, 4},
                       {"expert_weights", input.expert_weights, experts().count > 0, 16},
                       {"bias", input.bias, shape.bias && experts().count > 0, 16},
                       {"y", y, capacity > 0, 16}}));
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
        cuda::make_expert_weights_map("expert_weights", type, cuda::cuda_layout(b_layout()),
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
  const cuda::OnDevice on_device(frame().device());
  MK_RETURN_IF_ERROR(make_maps(input, y, capacity));
  MoeDispatchLaunch& launch = arguments_.launch;
  launch.routing = {input.count, plan_.shape.top_k, input.ids, input.weights};
  launch.tokens = static_cast<const std::byte*>(input.tokens);
  launch.capacity = capacity;
  arguments_.bias = input.bias;
  return engines_.launch(
      stream, *arguments_.frame.state,
      [&] {
        return enqueue(stream, *kernel_, input.count, plan_.work(world(), input.count), mode,
                       [this] { deal_groups(); });
      },
      [this](cuda::DmaQueue& queue) { return bring_tokens(queue); });
}

/// The plan, on which all ranks agree, says whether copy engines may share, and the options whether
/// this rank's do.
Status MoeDispatchCuda::create_engines(const CudaOptions& options) {
  dma_bytes_ = options.dma_bytes;
  if (plan_.engines) return options.dma == false ? Status{} : engines_.create(options.dma);
  if (options.dma != true || plan_.locals == 1) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: copy engines are to bring tokens, and the plan was not made for them; set "
              "MoeDispatchWay::engines on all ranks",
              kOp);
}

Status MoeDispatchCuda::bring_tokens(cuda::DmaQueue& queue) const {
  const MoeDispatchLaunch& launch = arguments_.launch;
  const GatherSchedule gather(plan_.tokens, world());
  const std::uint32_t rows = launch.routing.tokens;
  const std::uint64_t row_bytes = plan_.tokens.row_bytes;
  const auto source = GatherSource::of(launch.tokens, row_bytes, plan_.tokens.row_bytes, rows);
  const std::uint64_t wanted =
      dma_bytes_ != 0 ? dma_bytes_ : moe_dispatch_dma_bytes(gather.data_bytes(rows));
  // A CopyJob counts bytes in 32 bits.
  constexpr std::uint64_t kMost = 1u << 30;
  const std::uint64_t chunk = plan_.tokens.chunk_bytes;
  const std::uint64_t piece = std::min(round_up_to(wanted, chunk), kMost / chunk * chunk);
  return gather::bring_rows(
      gather, rows, piece, gather::PieceOrder::kPieceByPiece,
      cuda::DmaSharing{queue, gather, *arguments_.frame.state, launch.context, source});
}

void MoeDispatchCuda::deal_groups() {
  RoleBlocks& blocks = arguments_.launch.blocks;
  blocks.pull = blocks.share;
  blocks.plan = moe_dispatch_plan_groups(blocks.share, world().nodes, world().locals,
                                         arguments_.launch.by_dma);
}

Result<LaunchStats> MoeDispatchCuda::finish(cudaStream_t stream) {
  rows_ = 0;
  MK_ASSIGN_OR_RETURN(const LaunchStats stats,
                      finish_launches(stream, [this](const MoeRefusals& last) {
                        return plan_.refusal(world(), last.epoch, last.capacity, last.summary);
                      }));
  const cuda::OnDevice on_device(frame().device());
  PlanSummary summary;
  MK_RETURN_IF_ERROR(frame().check(
      cudaMemcpyAsync(&summary, output().summary, sizeof summary, cudaMemcpyDeviceToHost, stream),
      "the plan's summary"));
  MK_RETURN_IF_ERROR(frame().check(cudaStreamSynchronize(stream), "the plan's summary"));
  // After a refusal nothing of it is there, though nothing is reported a second time.
  rows_ = summary.fits != 0 ? summary.rows : 0;
  return stats;
}

MoeDispatchDeviceOutput MoeDispatchCuda::output() const {
  const RoutingPlan plan = routing_plan_of(arguments_.launch);
  return {plan.offsets(), plan.rows(), &plan.summary()};
}

}  // namespace mk::kernels
