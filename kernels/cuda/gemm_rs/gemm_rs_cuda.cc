#include "kernels/cuda/gemm_rs/gemm_rs_cuda.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/gemm_rs/launch_arguments.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/gemm_rs/schedule.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_rs";

}  // namespace

Tiling gemm_rs_cuda_tiling(std::uint32_t nodes, std::uint32_t locals, Shape max,
                           std::uint32_t blocks) {
  Tiling tiling;
  tiling.tile_m = cuda::kTileRowsMax;
  const std::uint32_t world = nodes * locals;
  const std::uint64_t row_tiles =
      std::uint64_t{world} * div_up(shard_rows_max(max.m, world), cuda::kTileRowsMax);
  tiling.tile_n = cuda::best_tile_columns(row_tiles, max.n, blocks);
  // Within a node a chunk is only what one group sums at a time: a tile.
  if (nodes == 1) tiling.chunk_bytes = cuda::kTileRowsMax * tiling.tile_n * kElementBytes;
  return tiling;
}

class GemmRsCuda::Impl {
 public:
  Impl(const GemmRsPlan& plan, std::uint32_t k, kernels::BLayout b_layout)
      : plan_(plan), k_(k), b_layout_(b_layout), frame_(kOp) {
    arguments_.launch.plan = plan;
  }

  Status start(const RankContext& context, const CudaOptions& options) {
    const World& world = context.world;
    cuda::GroupNeeds needs;
    needs.streams = Role::kReduce;
    needs.stream = world.locals > 1;
    needs.send = needs.receive = world.nodes > 1;
    needs.stream_groups = 12;
    MK_RETURN_IF_ERROR(frame_.start(context, options, needs, plan_.flag_count(), plan_.banks,
                                    arguments_.launch, arguments_.frame));
    const TileGrid columns(1, plan_.max.n, plan_.tile_m, plan_.tile_n);
    const auto layout = cuda::cuda_layout(b_layout_);
    kernel_ =
        &(plan_.dtype == DType::kBf16 ? cuda::gemm_rs_kernel_bf16(layout, columns.tile_cols())
                                      : cuda::gemm_rs_kernel_f16(layout, columns.tile_cols()));
    return frame_.check(kernel_->prepare(), "the device refuses the kernel");
  }

  Status launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m, Mode mode) {
    MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
    const GemmRsSchedule schedule(plan_, m);
    if (schedule.rows(world().rank()).count != 0)
      MK_RETURN_IF_ERROR(cuda::check_c(kOp, c, ldc, plan_.max.n));
    MK_RETURN_IF_ERROR(frame_.status());
    const cuda::OnDevice on_device(frame_.device());
    // As in GemmArCuda: C itself must not be overwritten with anything but what is right.
    const std::uint32_t rows =
        world().size() == 1 ? std::min(m, cuda::kTileRowsMax) : schedule.large_grid().tile_rows();
    const std::uint32_t others = world().size() == 1 ? 0 : schedule.small_grid().tile_rows();
    MK_ASSIGN_OR_RETURN(
        arguments_.product,
        cuda::make_product(
            {kOp, plan_.dtype, b_layout_, plan_.max.n, k_, a, lda, m,
             static_cast<std::uint32_t>(round_up_to(std::max(rows, others), 8)), b, ldb},
            kernel_->b_box));
    MK_RETURN_IF_ERROR(make_places(schedule, c, ldc));
    arguments_.launch.m = m;
    arguments_.launch.mode = mode == Mode::kAuto ? Mode::kFused : mode;  // no estimate yet
    arguments_.c = c;
    arguments_.ldc = ldc;
    return frame_.check(kernel_->launch(arguments_, stream), "the launch was refused");
  }

  Status status() const { return frame_.status(); }
  Result<LaunchStats> finish(cudaStream_t stream) {
    return frame_.finish(stream, arguments_.launch);
  }
  const GemmRsPlan& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  std::string progress() const { return frame_.progress(arguments_.launch); }

 private:
  const World& world() const { return arguments_.launch.context.world; }
  std::byte* workspace(std::uint32_t local) const {
    return arguments_.launch.context.workspaces[local];
  }

  Status make_places(const GemmRsSchedule& schedule, void* c, std::uint64_t ldc) {
    const auto type = cuda::cuda_type(plan_.dtype);
    cuda::GemmRsPlaceMaps& places = arguments_.places;
    if (world().size() == 1) {
      MK_ASSIGN_OR_RETURN(places.out,
                          cuda::make_tensor_map("C", type, c, schedule.m(), plan_.max.n,
                                                static_cast<std::int64_t>(ldc), 64, 64));
      return {};
    }
    const TileGrid* const grids[cuda::kGemmRsGrids] = {&schedule.large_grid(),
                                                       &schedule.small_grid()};
    for (std::uint32_t which = 0; which < cuda::kGemmRsGrids; ++which) {
      const TileGrid& grid = *grids[which];
      if (grid.tiles() == 0) continue;
      const auto planes_at = [&](const std::byte* base, std::uint32_t planes,
                                 std::uint64_t plane_bytes) {
        return cuda::make_tile_planes_map("tiles", type, base, std::max(1u, planes),
                                          static_cast<std::int64_t>(plane_bytes), grid.tiles(),
                                          grid.tile_rows(), grid.tile_cols());
      };
      if (world().locals > 1) {
        for (std::uint32_t owner = 0; owner < world().locals; ++owner) {
          MK_ASSIGN_OR_RETURN(places.slots[owner][which],
                              planes_at(workspace(owner) + schedule.slots(world().local, 0),
                                        world().nodes, plan_.layout.region_bytes));
        }
        continue;
      }
      MK_ASSIGN_OR_RETURN(places.kept[which], planes_at(workspace(0) + schedule.kept(), 1, kPage));
      for (std::uint32_t bank = 0; bank < plan_.banks; ++bank) {
        const std::uint64_t first = plan_.layout.staging + std::uint64_t{bank} * (plan_.nodes - 1) *
                                                               plan_.layout.bank_bytes;
        MK_ASSIGN_OR_RETURN(places.staging[bank][which],
                            planes_at(workspace(0) + first + kBankHeaderBytes, plan_.nodes - 1,
                                      plan_.layout.bank_bytes));
      }
    }
    return {};
  }

  const GemmRsPlan plan_;
  const std::uint32_t k_;
  const kernels::BLayout b_layout_;
  cuda::OperatorFrame frame_;
  const cuda::GemmRsKernel* kernel_ = nullptr;
  cuda::GemmRsArguments arguments_;
};

GemmRsCuda::GemmRsCuda(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmRsCuda::~GemmRsCuda() = default;

Result<std::unique_ptr<GemmRsCuda>> GemmRsCuda::create(const GemmRsPlan& plan, std::uint32_t k,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  MK_RETURN_IF_ERROR(check_context(kOp, plan.nodes, plan.locals, plan.flag_count(),
                                   std::max(1u, options.send_groups), context));
  MK_RETURN_IF_ERROR(cuda::check_shape(kOp, plan.tile_m, plan.tile_n, plan.max.n, k));
  auto impl = std::make_unique<Impl>(plan, k, options.b_layout);
  MK_RETURN_IF_ERROR(impl->start(context, options));
  return std::unique_ptr<GemmRsCuda>(new GemmRsCuda(std::move(impl)));
}

Status GemmRsCuda::launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                          std::uint64_t ldb, void* c_shard, std::uint64_t ldc, std::uint32_t m,
                          Mode mode) {
  return impl_->launch(stream, a, lda, b, ldb, c_shard, ldc, m, mode);
}
Status GemmRsCuda::status() const { return impl_->status(); }
Result<LaunchStats> GemmRsCuda::finish(cudaStream_t stream) { return impl_->finish(stream); }
const GemmRsPlan& GemmRsCuda::plan() const { return impl_->plan(); }
const RoleBlocks& GemmRsCuda::blocks() const { return impl_->blocks(); }
std::string GemmRsCuda::progress() const { return impl_->progress(); }

}  // namespace mk::kernels
