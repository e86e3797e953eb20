#include "kernels/ops/gemm_ar/sm90.h"

#include <algorithm>

#include "kernels/cuda/tensor_map.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "gemm_ar";

/// Whether the compute blocks add up their rank's own tiles: where the copy engine can do it, with
/// one addition (cuda/late_adds.cuh), and that is quicker, unless the caller wants groups for it.
bool accumulates_own(const GemmArPlan& plan, const CudaOptions& options) {
  if (plan.nodes != 1 || plan.locals != cuda::kSumsOwnLocals || options.stream_groups != 0)
    return false;
  return GemmArSchedule(plan, plan.max.m).tiles() <= cuda::kFewTiles;
}
/// Such tiles go to C in pieces of 64 rows and 64 columns, which must not reach into the next tile.
bool whole_pieces(const GemmArSchedule& schedule, std::uint32_t n) {
  return schedule.tile_rows() % 64 == 0 &&
         (schedule.tile_cols() >= n || schedule.tile_cols() % 64 == 0);
}

/// Bytes that a rank sends over the network for each element of C.
double gemm_ar_sent(const World& world) {
  return kElementBytes * (world.nodes - 1.0) / world.locals;
}

}  // namespace

// The shorter the product beside the sums, the more, and of many ranks more than of few, as their
// sums go to all of them. Few k: the product is shorter than the sums, and a small result is summed
// best by groups that have waited for its tiles, a larger one by the compute blocks that have none
// left; but of several ranks by groups, too, as sums for all of them take the links so long that
// they had best begin early.
std::uint32_t gemm_ar_reduce_groups(std::uint32_t gpus, const Shape& max, std::uint32_t k) {
  constexpr std::uint32_t kPair = 2;
  constexpr std::uint32_t kFew = 4;
  constexpr std::uint64_t kSmall = 2048 * 2048;
  constexpr std::uint32_t kFewK = 1024;
  constexpr std::uint32_t kMuchK = 3072;
  const std::uint64_t result = std::uint64_t{max.m} * max.n;
  if (k >= kMuchK) return 36;
  if (k > kFewK) return gpus > kFew ? 72 : 60;
  if (result <= kSmall || gpus > kFew) return 144;
  return gpus > kPair ? 60 : 12;
}

// What they store on the node's other GPUs takes NVLink as long as the product, and must begin with
// it; the more where the network takes longest, who must not wait for them.
std::uint32_t gemm_ar_receive_groups(const World& world, std::uint32_t gpus, std::uint32_t k,
                                     std::uint32_t blocks, const MachineRates& rates) {
  constexpr std::uint32_t kBesideProduct = 24;
  constexpr std::uint32_t kBesideNetwork = 48;
  if (world.locals == 1) return cuda::kFewReceiveGroups;
  const bool product =
      cuda::product_outlasts_network(k, gemm_ar_sent(world), cuda::gpu_rates(rates, blocks));
  return product || gpus <= 2 ? kBesideProduct : kBesideNetwork;
}

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
  accumulates_own_ = accumulates_own(plan_, options);
  const World& of = context.world;
  const std::uint32_t gpus = cuda::gpus_of_node(of, options);
  cuda::SumGroups groups;
  if (of.nodes == 1) {
    groups.reduce = accumulates_own_ ? 1 : gemm_ar_reduce_groups(gpus, plan_.max, k());
  } else {
    groups.receive = gemm_ar_receive_groups(of, gpus, k(), kBlocksMax, options.rates);
    groups = cuda::sums_over_nodes(of, options, k(), gemm_ar_sent(of), groups);
  }
  MK_RETURN_IF_ERROR(OperatorBase::start(context, options, cuda::sum_needs(of, groups),
                                         plan_.flags(), cuda::kGemmArKernels));
  arguments_.frame.piece_ns = cuda::tile_piece_ns(plan_, k(), 2, options);
  return {};
}

Status GemmArCuda::launch(cudaStream_t stream, const void* a, std::uint64_t lda, const void* b,
                          std::uint64_t ldb, void* c, std::uint64_t ldc, std::uint32_t m,
                          Mode mode) {
  MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
  if (c != nullptr) MK_RETURN_IF_ERROR(cuda::check_c(kOp, c, ldc, plan_.max.n));
  const cuda::OnDevice on_device(device());
  choose_form(m, mode, plan_.work(world(), m, k()));
  const GemmArSchedule& schedule = arguments_.launch.schedule;
  arguments_.launch.accumulates_own = accumulates_own_ && whole_pieces(schedule, plan_.max.n);
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
