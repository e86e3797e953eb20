#include "kernels/ops/combine/sm90.h"

#include <algorithm>

#include "kernels/cuda/core/tensor_map.h"
#include "kernels/cuda/host/on_device.h"
#include "kernels/cuda/host/operator_inputs.h"
#include "kernels/ops/combine/schedule.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_combine";
constexpr std::uint64_t kTilesMax = 1u << 30;        // their numbers are ints
constexpr std::uint64_t kSlotsMax = (1u << 28) - 1;  // SlotPlace::kSlotBits

}  // namespace

Tiling combine_cuda_tiling() {
  Tiling tiling;
  tiling.tile_m = cuda::kCombineTileRows;
  tiling.tile_n = cuda::kCombineTileColumns;
  return tiling;
}

Result<std::unique_ptr<CombineCuda>> CombineCuda::create(const CombinePlan& plan,
                                                         const RankContext& context,
                                                         const CudaOptions& options) {
  std::unique_ptr<CombineCuda> made(new CombineCuda(kOp, plan));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status CombineCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  const CombineShape& shape = plan_.shape;
  MK_RETURN_IF_ERROR(check_tile_rows(cuda::kCombineTileRows));
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
  plan::Problem problem;
  problem.op = plan::Op::kCombine;
  problem.shape = {shape.tokens_max * of.size(), shape.hidden, shape.features};
  if (shape.partials == CombinePartials::kF32) problem.result.partials = Partials::kF32;
  const LaunchWork largest = plan_.work(shape.tokens_max * shape.top_k, shape.tokens_max);
  MK_RETURN_IF_ERROR(
      ExpertOperator::start(problem, largest, plan_.flags(), context, options, kCombineM));
  CombineLaunch& launch = arguments_.launch;
  deal_groups();
  const auto* const words = reinterpret_cast<const CombineWords*>(
      launch.context.workspaces[of.local] + plan_.layout.words);
  tell(shape.hidden, shape.features, &words->tiles);
  plan::Candidate candidate;
  candidate.stream_warpgroups = blocks().reduce;
  account_for(problem, candidate, options);
  return choose_kernel();
}

Status CombineCuda::choose_kernel() {
  const auto layout = cuda::cuda_layout(b_layout());
  kernel_ = plan_.dtype == DType::kBf16 ? cuda::combine_kernel_bf16(layout, plan_.shape.partials)
                                        : cuda::combine_kernel_f16(layout, plan_.shape.partials);
  if (kernel_ == nullptr) {
    return fail(ErrorCode::kUnsupported,
                "{}: {} with weights as {} and partials in {} is compiled in release builds only "
                "(CMAKE_BUILD_TYPE=Release); use one, or bf16 and [H, I]",
                kOp, name_of(plan_.dtype), b_layout() == BLayout::kNK ? "[H, I]" : "[I, H]",
                name_of(plan_.shape.partials));
  }
  return frame().check(kernel_->prepare(), "the device refuses the kernel");
}

Status CombineCuda::check_input(const CombineDeviceInput& input, const void* out) const {
  const CombineShape& shape = plan_.shape;
  MK_RETURN_IF_ERROR(check_tokens(input.count));
  if (input.room > plan_.rows_max) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: room for {} rows; {} ranks of at most {} tokens with {} slots can give {}",
                kOp, input.room, world().size(), shape.tokens_max, shape.top_k, plan_.rows_max);
  }
  const bool tokens = input.count > 0;
  const bool rows = input.room > 0;
  return check_addresses({{"y", input.y, rows, 16},
                          {"rows", input.rows, rows, 16},
                          {"offsets", input.offsets, true, 4},
                          {"expert_weights", input.expert_weights, rows && experts().count > 0, 16},
                          {"ids", input.ids, tokens, 4},
                          {"out", out, tokens, 16},
                          {"residual", input.residual, tokens && input.residual != nullptr, 16}});
}

Status CombineCuda::make_maps(const CombineDeviceInput& input) {
  const CombineShape& shape = plan_.shape;
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto features = static_cast<std::int64_t>(shape.features);
  cuda::ProductArguments& product = arguments_.product;
  product.a_box_rows = cuda::kCombineTileRows;
  product.k_blocks = static_cast<int>(div_up(shape.features, cuda::kBlockK));
  if (input.room == 0 || experts().count == 0) {
    // There is nothing to compute: any maps do.
    MK_ASSIGN_OR_RETURN(
        product.a,
        cuda::make_tensor_map(
            "slots", type, arguments_.launch.context.workspaces[world().local] + plan_.layout.slots,
            1, shape.hidden, shape.hidden, 1, cuda::kPieceColumns));
    product.b = arguments_.a_half = product.a;
    return {};
  }
  const auto window = [&](int rows) {
    return cuda::make_row_window_map("y", type, input.y, input.room, features, rows, cuda::kBlockK);
  };
  MK_ASSIGN_OR_RETURN(product.a, window(cuda::kCombineTileRows));
  MK_ASSIGN_OR_RETURN(arguments_.a_half, window(cuda::kCombineTileRows / 2));
  MK_ASSIGN_OR_RETURN(
      product.b, cuda::make_expert_weights_map(
                     "expert_weights", type, cuda::cuda_layout(b_layout()), input.expert_weights,
                     experts().count, shape.hidden, features, 1, cuda::kCombineTileColumns));
  return {};
}

Status CombineCuda::launch(cudaStream_t stream, const CombineDeviceInput& input, void* out,
                           Mode mode) {
  MK_RETURN_IF_ERROR(check_input(input, out));
  MK_RETURN_IF_ERROR(status());
  const cuda::OnDevice on_device(frame().device());
  MK_RETURN_IF_ERROR(make_maps(input));
  // How many rows there are only the device knows: as many as at even routing.
  const std::uint32_t rows = std::min(input.room, input.count * plan_.shape.top_k);
  CombineLaunch& launch = arguments_.launch;
  launch.rows = input.rows;
  launch.offsets = input.offsets;
  launch.room = input.room;
  launch.routing = {input.count, plan_.shape.top_k, input.ids, nullptr};
  launch.residual = static_cast<const std::byte*>(input.residual);
  arguments_.c = out;
  return enqueue(stream, *kernel_, input.count, plan_.work(rows, input.count), mode,
                 [this] { deal_groups(); });
}

void CombineCuda::deal_groups() {
  RoleBlocks& blocks = arguments_.launch.blocks;
  blocks.plan = std::min(blocks.reduce.count(), kBlocksMax);
}

Result<LaunchStats> CombineCuda::finish(cudaStream_t stream) {
  return finish_launches(stream, [this](const CombineRefusals& last) {
    return plan_.refusal(world(), queued_tokens(), last);
  });
}

}  // namespace mk::kernels
