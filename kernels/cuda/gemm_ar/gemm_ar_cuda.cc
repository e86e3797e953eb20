#include "kernels/cuda/gemm_ar/gemm_ar_cuda.h"

#include <algorithm>

#include "kernels/cuda/tensor_map.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_ar";

/// Reduce groups of a rank of one node. Few k: the product is shorter than the sums, and a small
/// result is summed best by groups that have waited for its tiles, a larger one by the compute
/// blocks that have none left.
std::uint32_t reduce_groups(const Shape& max, std::uint32_t k) {
  constexpr std::uint64_t kSmall = 2048 * 2048;
  constexpr std::uint32_t kFewK = 1024;
  if (k > kFewK) return 36;
  return std::uint64_t{max.m} * max.n <= kSmall ? 144 : 12;
}

}  // namespace

Tiling gemm_ar_cuda_tiling(std::uint32_t nodes, Shape max, std::uint32_t blocks) {
  Tiling tiling;
  tiling.tile_m = cuda::kTileRowsMax;
  tiling.tile_n = cuda::best_tile_columns(div_up(max.m, cuda::kTileRowsMax), max.n, blocks,
                                          cuda::half_tile_time(nodes));
  // Within a node a chunk is only what one reduce block does at a time: a tile.
  tiling.chunk_bytes =
      nodes == 1 ? cuda::kTileRowsMax * tiling.tile_n * kElementBytes
                 : cuda::network_chunk_bytes(std::uint64_t{max.m} * max.n / 8 * kElementBytes);
  return tiling;
}

Result<std::unique_ptr<GemmArCuda>> GemmArCuda::create(const GemmArPlan& plan, std::uint32_t k,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  std::unique_ptr<GemmArCuda> made(new GemmArCuda(kOp, plan, k, options.b_layout));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status GemmArCuda::start(const RankContext& context, const CudaOptions& options) {
  const std::uint32_t groups = reduce_groups(plan_.max, k());
  return OperatorBase::start(context, options, cuda::sum_needs(context.world, groups),
                             plan_.flags(), cuda::kGemmArKernels);
}

Status GemmArCuda::launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                          std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                          Mode mode) {
  MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
  if (c != nullptr) MK_RETURN_IF_ERROR(cuda::check_c(kOp, c, ldc, plan_.max.n));
  const cuda::OnDevice on_device(device());
  choose_form(m, mode, plan_.work(world(), m, k()));
  const GemmArSchedule& schedule = arguments_.launch.schedule;
  // Rows of A beyond the tile are not stored into slots; C itself they would overwrite, so there
  // they are computed in full and right.
  const std::uint32_t rows =
      world().size() == 1 ? std::min(m, cuda::kTileRowsMax) : schedule.tile_rows();
  MK_RETURN_IF_ERROR(set_product(a, lda, m, rows, b, ldb));
  MK_RETURN_IF_ERROR(make_places(schedule));
  return enqueue(stream, c, ldc);
}

Status GemmArCuda::make_places(const GemmArSchedule& schedule) {
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto tiles_at = [&](const std::byte* base, std::uint32_t tiles) {
    return cuda::make_tile_planes_map("tiles", type, base, 1, kPage, std::max(1u, tiles),
                                      schedule.tile_rows(), schedule.tile_cols());
  };
  cuda::GemmArPlaceMaps& places = arguments_.places;
  const std::uint32_t n = plan_.max.n;
  if (world().size() == 1) {
    MK_ASSIGN_OR_RETURN(places.out,
                        cuda::make_tensor_map("C", type, output(), schedule.m(), n, n, 64, 64));
  } else if (world().locals == 1) {
    for (std::uint32_t bank = 0; bank < plan_.banks; ++bank) {
      MK_ASSIGN_OR_RETURN(
          places.staging[bank],
          tiles_at(workspace(0) + schedule.staging_bank(bank) + schedule.slot_in_bank(0),
                   schedule.owned(0)));
    }
  } else {
    for (std::uint32_t owner = 0; owner < world().locals; ++owner) {
      MK_ASSIGN_OR_RETURN(
          places.slots[owner],
          tiles_at(workspace(owner) + schedule.slot(world().local, 0), schedule.owned(owner)));
    }
  }
  return {};
}

}  // namespace mk::kernels
