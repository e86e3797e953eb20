#include "kernels/cuda/gemm_ar/gemm_ar_cuda.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/gemm_ar/launch_arguments.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/gemm_ar/schedule.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_ar";

}  // namespace

GemmArTiling gemm_ar_cuda_tiling(std::uint32_t nodes, Shape max, std::uint32_t blocks) {
  GemmArTiling tiling;
  tiling.tile_m = cuda::kTileRowsMax;
  tiling.tile_n = cuda::best_tile_columns(div_up(max.m, cuda::kTileRowsMax), max.n, blocks);
  // Within a node a chunk is only what one reduce block does at a time: a tile.
  if (nodes == 1) tiling.chunk_bytes = cuda::kTileRowsMax * tiling.tile_n * kElementBytes;
  return tiling;
}

class GemmArCuda::Impl {
 public:
  Impl(const GemmArPlan& plan, std::uint32_t k, kernels::BLayout b_layout)
      : plan_(plan), k_(k), b_layout_(b_layout), frame_(kOp) {
    arguments_.launch.plan = plan;
  }

  Status start(const RankContext& context, const CudaOptions& options) {
    const World& world = context.world;
    cuda::GroupNeeds needs;
    needs.streams = Role::kReduce;
    needs.stream = world.locals > 1;
    needs.send = needs.receive = world.nodes > 1;
    needs.stream_groups = 36;
    needs.receive_groups = 12;  // they also hand out the result
    MK_RETURN_IF_ERROR(frame_.start(context, options, needs, plan_.flag_count(), plan_.banks,
                                    arguments_.launch, arguments_.frame));
    const std::uint32_t columns = GemmArSchedule(plan_, plan_.max.m).tile_cols();
    const auto layout = cuda::cuda_layout(b_layout_);
    kernel_ = &(plan_.dtype == DType::kBf16 ? cuda::gemm_ar_kernel_bf16(layout, columns)
                                            : cuda::gemm_ar_kernel_f16(layout, columns));
    return frame_.check(kernel_->prepare(), "the device refuses the kernel");
  }

  Status launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m, Mode mode) {
    MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
    if (c != nullptr) MK_RETURN_IF_ERROR(cuda::check_c(kOp, c, ldc, plan_.max.n));
    MK_RETURN_IF_ERROR(frame_.status());
    const cuda::OnDevice on_device(frame_.device());
    const GemmArSchedule schedule(plan_, m);
    // Rows of A beyond the tile are not stored into slots; C itself they would overwrite, so there
    // they are computed in full and right.
    const std::uint32_t rows =
        world().size() == 1 ? std::min(m, cuda::kTileRowsMax) : schedule.tile_rows();
    MK_ASSIGN_OR_RETURN(
        arguments_.product,
        cuda::make_product({kOp, plan_.dtype, b_layout_, plan_.max.n, k_, a, lda, m,
                            static_cast<std::uint32_t>(round_up_to(rows, 8)), b, ldb},
                           kernel_->b_box));
    MK_RETURN_IF_ERROR(make_places(schedule));
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
  const GemmArPlan& plan() const { return plan_; }
  const RoleBlocks& blocks() const { return arguments_.launch.blocks; }
  std::string progress() const { return frame_.progress(arguments_.launch); }
  const void* output() const { return workspace(world().local) + plan_.layout.out; }

 private:
  const World& world() const { return arguments_.launch.context.world; }
  std::byte* workspace(std::uint32_t local) const {
    return arguments_.launch.context.workspaces[local];
  }

  Status make_places(const GemmArSchedule& schedule) {
    const auto type = cuda::cuda_type(plan_.dtype);
    const auto tiles_at = [&](const std::byte* base, std::uint32_t tiles) {
      return cuda::make_tile_planes_map("tiles", type, base, 1, kPage, std::max(1u, tiles),
                                        schedule.tile_rows(), schedule.tile_cols());
    };
    const std::uint32_t n = plan_.max.n;
    if (world().size() == 1) {
      MK_ASSIGN_OR_RETURN(arguments_.places.out,
                          cuda::make_tensor_map("C", type, output(), schedule.m(), n, n, 64, 64));
    } else if (world().locals == 1) {
      for (std::uint32_t bank = 0; bank < plan_.banks; ++bank) {
        MK_ASSIGN_OR_RETURN(
            arguments_.places.staging[bank],
            tiles_at(workspace(0) + schedule.staging_bank(bank) + schedule.slot_in_bank(0),
                     schedule.owned(0)));
      }
    } else {
      for (std::uint32_t owner = 0; owner < world().locals; ++owner) {
        MK_ASSIGN_OR_RETURN(
            arguments_.places.slots[owner],
            tiles_at(workspace(owner) + schedule.slot(world().local, 0), schedule.owned(owner)));
      }
    }
    return {};
  }

  const GemmArPlan plan_;
  const std::uint32_t k_;
  const kernels::BLayout b_layout_;
  cuda::OperatorFrame frame_;
  const cuda::GemmArKernel* kernel_ = nullptr;
  cuda::GemmArArguments arguments_;
};

GemmArCuda::GemmArCuda(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GemmArCuda::~GemmArCuda() = default;

Result<std::unique_ptr<GemmArCuda>> GemmArCuda::create(const GemmArPlan& plan, std::uint32_t k,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  MK_RETURN_IF_ERROR(check_context(kOp, plan.nodes, plan.locals, plan.flag_count(),
                                   std::max(1u, options.send_groups), context));
  MK_RETURN_IF_ERROR(cuda::check_shape(kOp, plan.tile_m, plan.tile_n, plan.max.n, k));
  auto impl = std::make_unique<Impl>(plan, k, options.b_layout);
  MK_RETURN_IF_ERROR(impl->start(context, options));
  return std::unique_ptr<GemmArCuda>(new GemmArCuda(std::move(impl)));
}

Status GemmArCuda::launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                          std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                          Mode mode) {
  return impl_->launch(stream, a, lda, b, ldb, c, ldc, m, mode);
}
Status GemmArCuda::status() const { return impl_->status(); }
Result<LaunchStats> GemmArCuda::finish(cudaStream_t stream) { return impl_->finish(stream); }
const void* GemmArCuda::output() const { return impl_->output(); }
const GemmArPlan& GemmArCuda::plan() const { return impl_->plan(); }
const RoleBlocks& GemmArCuda::blocks() const { return impl_->blocks(); }
std::string GemmArCuda::progress() const { return impl_->progress(); }

}  // namespace mk::kernels
