#include "kernels/ops/gemm_rs/sm90.h"

#include <algorithm>

#include "kernels/cuda/tensor_map.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_rs";

/// Whether the compute blocks add up their rank's own tiles: where the copy engine can do it, with
/// one addition (cuda/late_adds.cuh), unless the caller wants groups for them, or a few groups are
/// through with them beside the product (../decisions/deferred_accumulate.md). Such tiles go to C
/// in pieces of 64 columns, which must not reach into the next tile.
bool accumulates_own(const GemmRsPlan& plan, std::uint32_t k, const CudaOptions& options) {
  constexpr std::uint32_t kMuchK = 4096;
  if (plan.nodes != 1 || plan.locals != 2 || options.stream_groups != 0) return false;
  const TileGrid columns(1, plan.max.n, plan.tile_m, plan.tile_n);
  if (columns.tiles_n() > 1 && columns.tile_cols() % 64 != 0) return false;
  return k < kMuchK || GemmRsSchedule(plan, plan.max.m).tiles() <= cuda::kFewTiles;
}

/// Bytes that a rank sends over the network for each element of C.
double gemm_rs_sent(const World& world) {
  return kElementBytes * (world.nodes - 1.0) / world.size();
}

}  // namespace

// Of several ranks that have so little to compute that NVLink takes most of the time, the more the
// sooner: they have waited for the tiles when those come.
std::uint32_t gemm_rs_reduce_groups(std::uint32_t gpus, std::uint32_t k) {
  constexpr std::uint32_t kPair = 2;
  constexpr std::uint32_t kFew = 4;
  const std::uint32_t few_k = gpus > kFew ? 512 : 256;
  return gpus > kPair && k <= few_k ? 144 : 12;
}

bool gemm_rs_sums_once(const World& world, std::uint32_t k, std::uint32_t blocks,
                       const MachineRates& rates) {
  if (world.nodes == 1 || world.locals == 1) return false;
  return cuda::product_outlasts_network(k, gemm_rs_sent(world), cuda::gpu_rates(rates, blocks));
}

Tiling gemm_rs_cuda_tiling(std::uint32_t nodes, std::uint32_t locals, Shape max,
                           std::uint32_t blocks) {
  Tiling tiling;
  tiling.tile_m = cuda::kTileRowsMax;
  tiling.tile_n = cuda::best_tile_columns(cuda::sharded_row_tiles(max.m, nodes * locals), max.n,
                                          blocks, cuda::half_tile_time(nodes));
  // Within a node a chunk is only what one group sums at a time: a tile.
  if (nodes == 1) {
    tiling.chunk_bytes = cuda::kTileRowsMax * tiling.tile_n * kElementBytes;
  } else {
    const std::uint64_t shard = shard_rows_max(max.m, nodes * locals);
    tiling.chunk_bytes = cuda::network_chunk_bytes((nodes - 1) * shard * max.n * kElementBytes);
  }
  return tiling;
}

Result<std::unique_ptr<GemmRsCuda>> GemmRsCuda::create(const GemmRsPlan& plan, std::uint32_t k,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  std::unique_ptr<GemmRsCuda> made(new GemmRsCuda(kOp, plan, k, options.b_layout));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status GemmRsCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  GemmRsLaunch& launch = arguments_.launch;
  launch.accumulates_own = accumulates_own(plan_, k(), options);
  const std::uint32_t blocks = kBlocksMax / std::max(1u, options.ranks_per_device);
  launch.sums_once = options.sums_once.value_or(gemm_rs_sums_once(of, k(), blocks, options.rates));
  cuda::SumGroups groups;
  if (of.nodes == 1) {
    const std::uint32_t gpus = cuda::gpus_of_node(of, options);
    groups.reduce = launch.accumulates_own ? 1 : gemm_rs_reduce_groups(gpus, k());
  } else if (launch.sums_shard_once()) {
    groups.receive = 1;  // all groups that reduce join it when they have no more to do
  } else {
    groups = cuda::sums_over_nodes(of, options, k(), gemm_rs_sent(of), groups);
  }
  MK_RETURN_IF_ERROR(OperatorBase::start(context, options, cuda::sum_needs(of, groups),
                                         plan_.flags(), cuda::kGemmRsKernels));
  arguments_.frame.piece_ns = cuda::tile_piece_ns(plan_, k(), 1, options);
  return {};
}

Status GemmRsCuda::launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                          std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                          Mode mode) {
  MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
  if (shard_of(m, world().size(), world().rank()).count != 0)
    MK_RETURN_IF_ERROR(cuda::check_c(kOp, c, ldc, plan_.max.n));
  const cuda::OnDevice on_device(device());
  choose_form(m, mode, plan_.work(world(), m, k(), arguments_.launch.sums_shard_once()));
  const GemmRsSchedule& schedule = arguments_.launch.schedule;
  // As in GemmArCuda: C itself must not be overwritten with anything but what is right.
  const bool alone = world().size() == 1;
  const std::uint32_t rows =
      alone ? std::min(m, cuda::kTileRowsMax)
            : std::max(schedule.large_grid().tile_rows(), schedule.small_grid().tile_rows());
  MK_RETURN_IF_ERROR(set_product(a, lda, m, rows, b, ldb));
  MK_RETURN_IF_ERROR(make_places(schedule, c, ldc));
  return enqueue(stream, c, ldc);
}

Status GemmRsCuda::make_places(const GemmRsSchedule& schedule, void* c, std::uint64_t ldc) {
  const auto type = cuda::cuda_type(plan_.dtype);
  cuda::GemmRsPlaceMaps& places = arguments_.places;
  if (world().size() == 1) {
    MK_ASSIGN_OR_RETURN(places.out, cuda::make_tensor_map("C", type, c, schedule.m(), plan_.max.n,
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
