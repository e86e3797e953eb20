#include "kernels/ops/gemm_ar/sm90.h"

#include <algorithm>

#include "kernels/cuda/core/tensor_map.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_ar";

/// Tiles that compute blocks add up go to C in pieces of 64 rows and 64 columns, which must not
/// reach into the next tile.
bool whole_pieces(const GemmArSchedule& schedule, std::uint32_t n) {
  return schedule.tile_rows() % 64 == 0 &&
         (schedule.tile_cols() >= n || schedule.tile_cols() % 64 == 0);
}

}  // namespace

Result<std::unique_ptr<GemmArCuda>> GemmArCuda::create(const GemmArPlan& plan, std::uint32_t k,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  std::unique_ptr<GemmArCuda> made(new GemmArCuda(kOp, plan, k, options.b_layout));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status GemmArCuda::start(const RankContext& context, const CudaOptions& options) {
  MK_RETURN_IF_ERROR(plan_with(plan::Op::kGemmAr, context, options, plan_.chunk_bytes, plan_.banks,
                               /*local_banks=*/0));
  accumulates_own_ = planned_.candidate.sums == plan::Sums::kOwn;
  MK_RETURN_IF_ERROR(OperatorBase::start(context, options, plan_.flags(), cuda::kGemmArKernels));
  arguments_.frame.piece_ns = options.piece_ns.value_or(
      plan::tile_pace_ns(planned_.problem, planned_.machine, planned_.candidate));
  return {};
}

Status GemmArCuda::launch(cudaStream_t stream, const GemmMatrices& of, std::uint32_t m, Mode mode) {
  MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
  if (of.c != nullptr)
    MK_RETURN_IF_ERROR(cuda::check_summed_c(kOp, of.c, of.ldc, m, plan_.result_columns()));
  MK_RETURN_IF_ERROR(cuda::check_bias(kOp, plan_.epilogue, of.bias));
  const cuda::OnDevice on_device(device());
  choose_form(stream, m, mode);
  const GemmArSchedule& schedule = arguments_.launch.schedule;
  arguments_.launch.accumulates_own = accumulates_own_ && whole_pieces(schedule, plan_.max.n);
  // Rows of A beyond the tile are not stored into slots; C itself they would overwrite, so there
  // they are computed in full and right.
  const std::uint32_t rows =
      world().size() == 1 ? std::min(m, cuda::kTileRowsMax) : schedule.tile_rows();
  MK_RETURN_IF_ERROR(set_product(of.a, of.lda, m, rows, of.b, of.ldb));
  MK_RETURN_IF_ERROR(make_places(schedule));
  set_epilogue(of.bias);
  if (world().size() == 1) arguments_.numbered = schedule.grid();
  return enqueue(stream, of);
}

Status GemmArCuda::make_places(const GemmArSchedule& schedule) {
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto planes_at = [&](const std::byte* base, std::uint32_t planes, std::uint64_t plane_bytes,
                             std::uint32_t tiles) {
    return cuda::make_tile_planes_map("tiles", type, base, planes,
                                      static_cast<std::int64_t>(plane_bytes), std::max(1u, tiles),
                                      schedule.tile_rows(), schedule.tile_cols(), plan_.partials);
  };
  cuda::GemmArPlaceMaps& places = arguments_.places;
  const std::uint32_t n = plan_.result_columns();
  const auto out_of = [&](std::uint32_t local) {
    return cuda::make_tensor_map("C", type, workspace(local) + plan_.layout.out, schedule.m(), n, n,
                                 64, 64);
  };
  if (arguments_.launch.accumulates_own_tiles()) {
    for (std::uint32_t local = 0; local < world().locals; ++local) {
      MK_ASSIGN_OR_RETURN(places.out[local], out_of(local));
    }
    MK_ASSIGN_OR_RETURN(
        arguments_.partials,
        cuda::make_tile_planes_map(
            "partials", type, workspace(world().local) + schedule.slot(0, 0), world().locals,
            static_cast<std::int64_t>(plan_.layout.slot_region_bytes),
            schedule.owned(world().local), schedule.tile_rows(), schedule.tile_cols()));
  }
  if (world().size() == 1) {
    MK_ASSIGN_OR_RETURN(places.out[0], out_of(0));
  } else if (world().locals == 1) {
    // Two-shot, node 0 has the largest piece.
    const std::uint32_t tiles =
        plan_.two_shot ? schedule.pieces(0).piece_tiles(0) : schedule.owned(0);
    for (std::uint32_t bank = 0; bank < plan_.banks; ++bank) {
      MK_ASSIGN_OR_RETURN(
          places.staging[bank],
          planes_at(workspace(0) + schedule.staging_bank(bank) + schedule.slot_in_bank(0),
                    plan_.planes(), plan_.layout.bank_bytes, tiles));
    }
  } else {
    for (std::uint32_t owner = 0; owner < world().locals; ++owner) {
      MK_ASSIGN_OR_RETURN(places.slots[owner],
                          planes_at(workspace(owner) + schedule.slot(world().local, 0), 1, kPage,
                                    schedule.owned(owner)));
    }
  }
  return {};
}

}  // namespace mk::kernels
