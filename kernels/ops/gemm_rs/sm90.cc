#include "kernels/ops/gemm_rs/sm90.h"

#include <algorithm>

#include "kernels/cuda/core/tensor_map.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_rs";

}  // namespace

Result<std::unique_ptr<GemmRsCuda>> GemmRsCuda::create(const GemmRsPlan& plan, std::uint32_t k,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  std::unique_ptr<GemmRsCuda> made(new GemmRsCuda(kOp, plan, k, options.b_layout));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status GemmRsCuda::start(const RankContext& context, const CudaOptions& options) {
  MK_RETURN_IF_ERROR(plan_with(plan::Op::kGemmRs, context, options, plan_.chunk_bytes, plan_.banks,
                               /*local_banks=*/0));
  GemmRsLaunch& launch = arguments_.launch;
  launch.accumulates_own = planned_.candidate.sums == plan::Sums::kOwn;
  launch.sums_once = planned_.candidate.sums == plan::Sums::kOnce;
  launch.in_node_order = options.batch_invariant && !launch.sums_once;
  MK_RETURN_IF_ERROR(OperatorBase::start(context, options, plan_.flags(), cuda::kGemmRsKernels));
  arguments_.frame.piece_ns = options.piece_ns.value_or(
      plan::tile_pace_ns(planned_.problem, planned_.machine, planned_.candidate));
  return {};
}

Status GemmRsCuda::launch(cudaStream_t stream, const GemmMatrices& of, std::uint32_t m, Mode mode) {
  MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
  const std::uint32_t own = shard_of(m, world().size(), world().rank()).count;
  if (own != 0)
    MK_RETURN_IF_ERROR(cuda::check_summed_c(kOp, of.c, of.ldc, own, plan_.result_columns()));
  MK_RETURN_IF_ERROR(cuda::check_bias(kOp, plan_.epilogue, of.bias));
  const cuda::OnDevice on_device(device());
  choose_form(stream, m, mode);
  const GemmRsSchedule& schedule = arguments_.launch.schedule;
  // As in GemmArCuda: C itself must not be overwritten with anything but what is right.
  const bool alone = world().size() == 1;
  const std::uint32_t rows =
      alone ? std::min(m, cuda::kTileRowsMax)
            : std::max(schedule.large_grid().tile_rows(), schedule.small_grid().tile_rows());
  MK_RETURN_IF_ERROR(set_product(of.a, of.lda, m, rows, of.b, of.ldb));
  MK_RETURN_IF_ERROR(make_places(schedule, of.c, of.ldc));
  set_epilogue(of.bias);
  if (alone) arguments_.numbered = schedule.grid(0);
  return enqueue(stream, of);
}

Status GemmRsCuda::make_places(const GemmRsSchedule& schedule, void* c, std::uint64_t ldc) {
  const auto type = cuda::cuda_type(plan_.dtype);
  cuda::GemmRsPlaceMaps& places = arguments_.places;
  if (world().size() == 1) {
    MK_ASSIGN_OR_RETURN(places.out,
                        cuda::make_tensor_map("C", type, c, schedule.m(), plan_.result_columns(),
                                              static_cast<std::int64_t>(ldc), 64, 64));
    return {};
  }
  const TileGrid& own = schedule.grid(world().rank());
  if (arguments_.launch.accumulates_own_tiles() && own.tiles() != 0) {
    const auto columns = static_cast<std::int64_t>(plan_.max.n);
    const auto row = static_cast<std::int64_t>(ldc);
    MK_ASSIGN_OR_RETURN(places.out,
                        cuda::make_tensor_map("C", type, c, own.rows(), columns, row, 64, 64));
    MK_ASSIGN_OR_RETURN(places.out_rows,
                        cuda::make_row_tiles_map("C", type, c, std::max(2u, own.tiles_m()) - 1,
                                                 own.tile_rows(), columns, row));
    MK_ASSIGN_OR_RETURN(arguments_.partials,
                        cuda::make_tile_planes_map(
                            "partials", type, workspace(world().local) + schedule.slots(0, 0),
                            world().locals, static_cast<std::int64_t>(plan_.layout.region_bytes),
                            own.tiles(), own.tile_rows(), own.tile_cols()));
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
                                        grid.tile_rows(), grid.tile_cols(), plan_.partials);
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
      const std::uint64_t first =
          plan_.layout.staging + std::uint64_t{bank} * (plan_.nodes - 1) * plan_.layout.bank_bytes;
      MK_ASSIGN_OR_RETURN(places.staging[bank][which],
                          planes_at(workspace(0) + first + kBankHeaderBytes, plan_.nodes - 1,
                                    plan_.layout.bank_bytes));
    }
  }
  return {};
}

}  // namespace mk::kernels
