#include "kernels/cuda/ag_gemm/ag_gemm_cuda.h"

#include <algorithm>
#include <utility>

#include "kernels/ag_gemm/schedule.h"
#include "kernels/cuda/ag_gemm/launch_arguments.h"
#include "kernels/cuda/tensor_map.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "ag_gemm";
constexpr std::uint32_t kLocalChunkBytes = 128 * 1024;  ///< half of it up to kFewRows
constexpr std::uint32_t kFewRows = 4096;
constexpr std::uint32_t kNetworkChunkBytes = 512 * 1024;

/// Share groups, of a whole GPU: the shorter the product beside the gather, the more. As measured
/// with eight ranks on one node (README.md).
std::uint32_t share_groups(const Shape& max) {
  if (max.n < 3072) return 48;
  if (max.n < 6144) return 24;
  if (max.m <= kFewRows) return 36;
  return max.m <= 8192 ? 18 : 12;
}

}  // namespace

Tiling ag_gemm_cuda_tiling(std::uint32_t nodes, std::uint32_t locals, Shape max,
                           std::uint32_t blocks) {
  Tiling tiling;
  tiling.tile_m = cuda::kTileRowsMax;
  const std::uint32_t world = nodes * locals;
  const std::uint64_t row_tiles =
      std::uint64_t{world} * div_up(shard_rows_max(max.m, world), cuda::kTileRowsMax);
  tiling.tile_n = cuda::best_tile_columns(row_tiles, max.n, blocks);
  tiling.chunk_bytes = nodes > 1           ? kNetworkChunkBytes
                       : max.m <= kFewRows ? kLocalChunkBytes / 2
                                           : kLocalChunkBytes;
  return tiling;
}

class AgGemmCuda::Impl {
 public:
  Impl(const AgGemmPlan& plan, kernels::BLayout b_layout)
      : plan_(plan), b_layout_(b_layout), frame_(kOp) {
    arguments_.launch.plan = plan;
  }

  Status start(const RankContext& context, const CudaOptions& options) {
    const World& world = context.world;
    cuda::GroupNeeds needs;
    needs.streams = Role::kShare;
    needs.stream = world.size() > 1;
    needs.send = world.nodes > 1;
    needs.receive = world.nodes > 1 && world.locals > 1;
    needs.stream_groups = share_groups(plan_.max);
    needs.receive_groups = 12;
    MK_RETURN_IF_ERROR(frame_.start(context, options, needs, plan_.flag_count(), plan_.gather.banks,
                                    arguments_.launch, arguments_.frame));
    const TileGrid columns(1, plan_.max.n, plan_.tile_m, plan_.tile_n);
    const auto layout = cuda::cuda_layout(b_layout_);
    kernel_ =
        &(plan_.dtype == DType::kBf16 ? cuda::ag_gemm_kernel_bf16(layout, columns.tile_cols())
                                      : cuda::ag_gemm_kernel_f16(layout, columns.tile_cols()));
    return frame_.check(kernel_->prepare(), "the device refuses the kernel");
  }

  Status launch(cudaStream_t stream, const void* a_shard, std::uint64_t lda, const void* b,
                std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m, Mode mode,
                void* gathered) {
    MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
    MK_RETURN_IF_ERROR(cuda::check_c(kOp, c, ldc, plan_.max.n));
    if (reinterpret_cast<std::uintptr_t>(gathered) % 16 != 0)
      return fail(ErrorCode::kInvalidArgument, "{}: gathered must lie at a multiple of 16 bytes",
                  kOp);
    MK_RETURN_IF_ERROR(frame_.status());
    const cuda::OnDevice on_device(frame_.device());
    const World& world = arguments_.launch.context.world;
    const AgGemmSchedule schedule(plan_, world, m);
    const std::uint32_t shard_rows = schedule.shard(world.rank()).count;
    // Shards of one row more may have lower tiles.
    std::uint32_t tile_rows = 0;
    for (std::uint32_t rows : {m / world.size(), shard_rows_max(m, world.size())}) {
      tile_rows =
          std::max(tile_rows, TileGrid(rows, plan_.max.n, plan_.tile_m, plan_.tile_n).tile_rows());
    }
    MK_ASSIGN_OR_RETURN(
        arguments_.product,
        cuda::make_product(
            {kOp, plan_.dtype, b_layout_, plan_.max.n, plan_.max.k, a_shard, lda, shard_rows,
             static_cast<std::uint32_t>(round_up_to(tile_rows, 8)), b, ldb},
            kernel_->b_box));
    MK_RETURN_IF_ERROR(make_maps(world, c, ldc, m));
    if (shard_rows == 0) arguments_.product.a = arguments_.gathered;  // nothing is loaded by it
    arguments_.launch.m = m;
    arguments_.launch.mode = mode == Mode::kAuto ? Mode::kFused : mode;  // no estimate yet
    arguments_.launch.shard =
        GatherSource::of(a_shard, lda * kElementBytes, plan_.gather.row_bytes, shard_rows);
    arguments_.launch.gathered = static_cast<std::byte*>(gathered);
    arguments_.c = c;
    arguments_.ldc = ldc;
    return frame_.check(kernel_->launch(arguments_, stream), "the launch was refused");
  }

  Status status() const { return frame_.status(); }
  Result<LaunchStats> finish(cudaStream_t stream) {
    return frame_.finish(stream, arguments_.launch);
  }
  const AgGemmPlan& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  std::string progress() const { return frame_.progress(arguments_.launch); }

 private:
  Status make_maps(const World& world, void* c, std::uint64_t ldc, std::uint32_t m) {
    const auto type = cuda::cuda_type(plan_.dtype);
    const auto stride = static_cast<std::int64_t>(ldc);
    const GatherGeometry& gather = plan_.gather;
    MK_ASSIGN_OR_RETURN(arguments_.c_tile,
                        cuda::make_tensor_map("C", type, c, m, plan_.max.n, stride, 64, 64));
    MK_ASSIGN_OR_RETURN(arguments_.c_eight,
                        cuda::make_tensor_map("C", type, c, m, plan_.max.n, stride, 8, 64));
    if (world.size() == 1) {
      arguments_.gathered = arguments_.product.a;
      return {};
    }
    const std::byte* slots = arguments_.launch.context.workspaces[world.local] +
                             gather.layout.slots + kGatherHeaderBytes;
    MK_ASSIGN_OR_RETURN(
        arguments_.gathered,
        cuda::make_slots_map("gathered A", type, slots, std::int64_t{gather.banks} * world.size(),
                             static_cast<std::int64_t>(gather.layout.slot_bytes), gather.rows_max,
                             plan_.max.k, arguments_.product.a_box_rows, cuda::kBlockK));
    return {};
  }

  const AgGemmPlan plan_;
  const kernels::BLayout b_layout_;
  cuda::OperatorFrame frame_;
  const cuda::AgGemmKernel* kernel_ = nullptr;
  cuda::AgGemmArguments arguments_;
};

AgGemmCuda::AgGemmCuda(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AgGemmCuda::~AgGemmCuda() = default;

Result<std::unique_ptr<AgGemmCuda>> AgGemmCuda::create(const AgGemmPlan& plan,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  MK_RETURN_IF_ERROR(check_context(kOp, plan.nodes, plan.locals, plan.flag_count(),
                                   std::max(1u, options.send_groups), context));
  MK_RETURN_IF_ERROR(cuda::check_shape(kOp, plan.tile_m, plan.tile_n, plan.max.n, plan.max.k));
  auto impl = std::make_unique<Impl>(plan, options.b_layout);
  MK_RETURN_IF_ERROR(impl->start(context, options));
  return std::unique_ptr<AgGemmCuda>(new AgGemmCuda(std::move(impl)));
}

Status AgGemmCuda::launch(cudaStream_t stream, const void* a_shard, std::uint64_t lda,
                          const void* b, std::uint64_t ldb, void* c, std::uint64_t ldc,
                          std::uint32_t m, Mode mode, void* gathered) {
  return impl_->launch(stream, a_shard, lda, b, ldb, c, ldc, m, mode, gathered);
}
Status AgGemmCuda::status() const { return impl_->status(); }
Result<LaunchStats> AgGemmCuda::finish(cudaStream_t stream) { return impl_->finish(stream); }
const AgGemmPlan& AgGemmCuda::plan() const { return impl_->plan(); }
const RoleBlocks& AgGemmCuda::blocks() const { return impl_->blocks(); }
std::string AgGemmCuda::progress() const { return impl_->progress(); }

}  // namespace mk::kernels
