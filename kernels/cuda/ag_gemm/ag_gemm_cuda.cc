#include "kernels/cuda/ag_gemm/ag_gemm_cuda.h"

#include <algorithm>

#include "kernels/ag_gemm/schedule.h"
#include "kernels/cuda/tensor_map.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "ag_gemm";
constexpr std::uint32_t kLocalChunkBytes = 128 * 1024;
constexpr std::uint32_t kNetworkChunkBytes = 256 * 1024;  ///< at least
constexpr std::uint64_t kSmallChunkBytesMin = 32 * 1024;
constexpr std::uint64_t kSmallChunkBytesMax = 64 * 1024;
constexpr std::uint32_t kSmallChunks = 64;  ///< of a rank: a block for each
constexpr std::uint32_t kFewRows = 2048;
constexpr std::uint32_t kNarrow =
    3072;  ///< columns, below which a product is shorter than the gather
constexpr std::uint32_t kWide = 6144;  ///< columns, from which a product of few rows is long

/// Whether the node's rows come rank by rank: where a rank's own rows are done with before rows of
/// everybody could have come, and there is enough to compute to hide those of the last.
bool comes_in_turn(std::uint32_t nodes, const Shape& max) {
  return max.n >= kWide && max.m <= (nodes == 1 ? kFewRows : 2 * kFewRows);
}

/// A narrow product of few rows: the gather is nearly all of it.
bool is_small(const Shape& max) { return max.n < kNarrow && max.m <= 2 * kFewRows; }

/// Whether the gather takes so long, whatever the product, that only its last tiles count: a rank
/// sends all but one of its rail's shards over the network, and that takes more than twice the time
/// of its product. (Both times are of m k elements of A.)
bool network_bound(std::uint32_t nodes, std::uint32_t locals, std::uint32_t n,
                   const MachineRates& rates) {
  const double network = kElementBytes * (nodes - 1.0) / (nodes * locals);
  const double product = 2.0 * n;
  return network * rates.flops_per_s > 2 * product * rates.network_bytes_per_s;
}

constexpr std::uint32_t kShortest = cuda::kTileColumnsMax / 4;

/// The last rows come when little else is left to compute: short tiles then end sooner, as a tile's
/// time is what its SM reads from L2. Where even the shortest have an SM each, those. But where
/// there are many tiles the last ones are little of them, and whole ones read a quarter less.
/// `waits`: it is network_bound.
std::uint32_t tile_columns(const Shape& max, std::uint64_t row_tiles, std::uint32_t blocks,
                           bool waits) {
  constexpr std::uint32_t kMany = 4;  // of each block
  const bool many = row_tiles * div_up(max.n, cuda::kTileColumnsMax) >= kMany * blocks;
  if (max.n >= kNarrow || (many && !waits))
    return cuda::best_tile_columns(row_tiles, max.n, blocks, cuda::kHalfTileTime);
  return row_tiles * div_up(max.n, kShortest) <= blocks ? kShortest : cuda::kTileColumnsMax / 2;
}

/// Chunks on one node: the sooner rows are there, the more blocks find tiles; but each is a flag
/// for every local rank.
std::uint32_t local_chunk_bytes(std::uint32_t locals, const Shape& max, std::uint64_t sent) {
  if (is_small(max))
    return static_cast<std::uint32_t>(
        std::clamp(sent / kSmallChunks, kSmallChunkBytesMin, kSmallChunkBytesMax));
  if (comes_in_turn(1, max)) return kLocalChunkBytes;
  if (max.m <= 2 * kFewRows) return kLocalChunkBytes / 2;
  if (max.n < kNarrow && max.m <= 4 * kFewRows)
    return locals > 4 ? kLocalChunkBytes / 4 : kLocalChunkBytes / 2;
  // So many that each has a place for its parts.
  if (max.n < kWide && sent / kLocalChunkBytes >= cuda::kPartPlaces / 2)
    return 2 * kLocalChunkBytes;
  return kLocalChunkBytes;
}

/// Chunks on one node where spare warps share: a tile that waits for a band of rows looks at a flag
/// for each, and these come long before. A quarter of a row of tiles.
std::uint32_t spare_chunk_bytes(const Shape& max) {
  constexpr std::uint64_t kMost = 8 * kLocalChunkBytes;
  const std::uint64_t quarter = std::uint64_t{cuda::kTileRowsMax} / 4 * max.k * kElementBytes;
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(quarter / 1024 * 1024, kLocalChunkBytes, kMost));
}

/// What of a plan says how its rows are shared.
struct Gathered {
  std::uint32_t nodes;
  std::uint32_t locals;
  Shape max;

  /// Bytes that a rank writes to the node's others in a launch of max.m rows: of its rail its own
  /// rows, and those of the other nodes, which it passes on.
  double bytes_within_node() const {
    return kElementBytes * double{1} * max.m * max.k / locals * (locals - 1);
  }
  /// The time of its product on as many compute blocks as there may be.
  double product_seconds(const MachineRates& rates) const {
    return 2.0 * max.m * max.n * max.k / cuda::gpu_rates(rates, kBlocksMax).flops_per_s;
  }
  double network_seconds(const MachineRates& rates) const {
    return kElementBytes * (nodes - 1.0) / nodes / locals * max.m * max.k /
           cuda::gpu_rates(rates, kBlocksMax).network_bytes_per_s;
  }
  /// What the spare warps and the groups beside them are to write per second, at most; over nodes
  /// less, as the loopback's network goes by NVLink, too. To one peer they cannot do more.
  double spare_bytes_per_s(const MachineRates& rates) const {
    const double most = locals == 2 ? 210e9 : nodes > 1 ? 310e9 : cuda::kNvlinkBytesPerS;
    return rates.local_bytes_per_s > 0 ? std::min(most, rates.local_bytes_per_s) : most;
  }
  /// See ag_gemm_spare_warps_share.
  bool by_spare_warps(std::uint32_t tile_n, const MachineRates& rates) const {
    const bool pair = locals == 2;
    if (locals == 1 || (nodes > 1 && pair)) return false;
    // To one peer, groups are a little quicker beside wider products, and beside short ones by far.
    if (max.n >= (pair ? kNarrow : kWide) || tile_n != cuda::kTileColumnsMax) return false;
    const std::uint64_t tiles =
        std::uint64_t{cuda::sharded_row_tiles(max.m, nodes * locals)} * div_up(max.n, tile_n);
    if (tiles <= cuda::kFewTiles) return false;
    // The rows are to be there before the last tiles; to several peers long before, as they slow
    // the tiles down where they have to hurry, the more the more there are, and over nodes, where
    // they come in two hops.
    const double part = pair ? 0.9 : nodes == 1 && locals <= 4 ? 0.7 : 0.6;
    const double within = part * product_seconds(rates);
    return bytes_within_node() / spare_bytes_per_s(rates) <= within &&
           network_seconds(rates) <= within;
  }
};

/// Parts of a chunk that spare warps take: small ones, as each takes long for its own.
std::uint32_t spare_parts(std::uint32_t chunks, std::uint32_t chunk_bytes, std::uint32_t locals) {
  const std::uint32_t part_bytes = (locals == 2 ? 64 : 16) * 1024;
  return chunks > cuda::kPartPlaces ? 1 : std::max(1u, chunk_bytes / part_bytes);
}

}  // namespace

// The shorter the product beside the gather, the more; but to several peers 12 SMs' bulk stores are
// all that NVLink takes. As measured with two, four and eight ranks (EXPERIMENTS.md).
std::uint32_t ag_gemm_share_groups(std::uint32_t nodes, std::uint32_t locals, const Shape& max) {
  constexpr std::uint32_t kMost = 192;  // half of the GPU
  const bool pair = locals == 2;
  if (is_small(max)) {
    if (nodes > 1) return kMost / 2;
    if (max.m <= kFewRows) return kMost;
    return pair ? kMost / 2 : 48;
  }
  if (nodes > 1) {
    if (max.n < kNarrow || (max.m <= kFewRows && max.n >= kWide)) return 48;
  } else {
    if (max.n < kNarrow) return pair && max.m <= 4 * kFewRows ? 72 : pair ? 48 : 36;
    if (comes_in_turn(nodes, max)) return 60;
  }
  if (max.n < kWide) return 24;
  if (max.m <= 2 * kFewRows) return nodes > 1 ? 36 : 24;
  return max.m <= 4 * kFewRows ? 18 : 12;
}

bool ag_gemm_spare_warps_share(const AgGemmPlan& plan, const MachineRates& rates) {
  return Gathered{plan.nodes, plan.locals, plan.max}.by_spare_warps(plan.tile_n, rates);
}

std::uint32_t ag_gemm_spare_ns_per_kib(const AgGemmPlan& plan, const MachineRates& rates,
                                       std::uint32_t warps, std::uint32_t groups) {
  // No more than has to be: tiles lose by it.
  constexpr double kAhead = 1.5;
  constexpr double kGroupBytes = 6e9;  // per second, of what a group writes beside them
  const Gathered gathered{plan.nodes, plan.locals, plan.max};
  const double wanted = kAhead * gathered.bytes_within_node() / gathered.product_seconds(rates);
  const double all = std::min(gathered.spare_bytes_per_s(rates), wanted);
  const double by_warps = std::max(all - groups * kGroupBytes, all / 2);
  // Of products that are so long that it does not matter: a piece's time has to fit into 32 bits.
  constexpr double kSlowest = 1 << 16;
  return static_cast<std::uint32_t>(std::min(1024 * warps / by_warps * 1e9, kSlowest)) + 1;
}

gather::Sharing ag_gemm_sharing(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                std::uint32_t rows, bool by_spare_warps) {
  const World& world = schedule.world();
  const bool onward = world.nodes > 1;
  const std::uint32_t chunks = schedule.chunks(rows);
  const std::uint32_t chunk_bytes = schedule.geometry().chunk_bytes;
  gather::Sharing sharing;
  sharing.parts = by_spare_warps ? spare_parts(chunks, chunk_bytes, world.locals)
                                 : cuda::copy_parts(chunks, chunk_bytes, blocks.share, onward,
                                                    world.locals - 1);
  if (onward) sharing.network_first = cuda::network_first(chunks, sharing.parts);
  // Over nodes groups are not equally quick, either: those that receive begin late with it.
  sharing.taken = by_spare_warps || (onward && chunks > cuda::kFewChunks);
  return sharing;
}

std::uint32_t ag_gemm_received_parts(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                     std::uint32_t m, bool by_spare_warps) {
  const World& world = schedule.world();
  // Of all shards that come over the network; none has more chunks than the largest.
  const std::uint32_t rows = shard_rows_max(m, world.size());
  const std::uint32_t chunks = schedule.chunks(rows) * (world.nodes - 1);
  const std::uint32_t chunk_bytes = schedule.geometry().chunk_bytes;
  if (by_spare_warps) return spare_parts(chunks, chunk_bytes, world.locals);
  return cuda::copy_parts(chunks, chunk_bytes, blocks.receive, true, world.locals - 1);
}

Tiling ag_gemm_cuda_tiling(std::uint32_t nodes, std::uint32_t locals, Shape max,
                           std::uint32_t blocks, const MachineRates& rates) {
  const bool waits = network_bound(nodes, locals, max.n, cuda::gpu_rates(rates, blocks));
  Tiling tiling;
  if (waits && max.n < kNarrow && max.m <= 4 * kFewRows) {
    // The network leaves time for tiles that read half as much again, all but the last ones.
    tiling.tile_m = cuda::kTileRowsMax / 2;
    tiling.tile_n = cuda::kTileColumnsMax / 2;
  } else {
    tiling.tile_m = cuda::kTileRowsMax;
    tiling.tile_n =
        tile_columns(max, cuda::sharded_row_tiles(max.m, nodes * locals), blocks, waits);
  }
  const std::uint64_t sent =
      std::uint64_t{shard_rows_max(max.m, nodes * locals)} * max.k * kElementBytes;
  if (nodes > 1) {
    tiling.chunk_bytes = std::max(kNetworkChunkBytes, cuda::network_chunk_bytes(sent));
  } else if (locals > 2 && blocks >= kBlocksMax &&
             Gathered{nodes, locals, max}.by_spare_warps(tiling.tile_n, rates)) {
    tiling.chunk_bytes = spare_chunk_bytes(max);
  } else {
    tiling.chunk_bytes = local_chunk_bytes(locals, max, sent);
  }
  return tiling;
}

Result<std::unique_ptr<AgGemmCuda>> AgGemmCuda::create(const AgGemmPlan& plan,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  std::unique_ptr<AgGemmCuda> made(new AgGemmCuda(kOp, plan, plan.max.k, options.b_layout));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status AgGemmCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  arguments_.launch.in_turn = comes_in_turn(of.nodes, plan_.max);
  cuda::GroupNeeds needs;
  needs.streams = Role::kShare;
  needs.stream = of.size() > 1;
  needs.send = of.nodes > 1;
  needs.receive = of.nodes > 1 && of.locals > 1;
  const std::uint32_t groups = ag_gemm_share_groups(of.nodes, of.locals, plan_.max);
  // Where the product takes longer than the rail, it needs the SMs.
  needs.stream_least = of.nodes > 1 && plan_.max.n < kNarrow ? cuda::kGroupsOfRail : 0;
  // What comes is passed on to the node's others when the rank's own rows are, which are needed
  // first: half of the groups that share those do it then.
  needs.receivers_stream = true;
  needs.receive_groups = groups / 2;
  needs.stream_groups = needs.receive ? groups - needs.receive_groups : groups;
  // Of ranks that share a GPU it has not been measured; and who names groups wants groups.
  const bool spare = options.ranks_per_device == 1 && options.stream_groups == 0 &&
                     options.receive_groups == 0 && ag_gemm_spare_warps_share(plan_, options.rates);
  needs.spare_streams = of.locals > 1 && options.spare_warps.value_or(spare);
  const FlagMap flags{of.nodes, plan_.gather.banks, plan_.gather.chunks_max};
  MK_RETURN_IF_ERROR(OperatorBase::start(context, options, needs, flags, cuda::kAgGemmKernels));
  if (spare_sharers() != 0)
    arguments_.frame.spare_ns_per_kib = ag_gemm_spare_ns_per_kib(
        plan_, options.rates, spare_sharers(), blocks().share - spare_sharers());
  return {};
}

Status AgGemmCuda::launch(cudaStream_t stream, const void* a_shard, std::uint64_t lda,
                          const void* b, std::uint64_t ldb, void* c, std::uint64_t ldc,
                          std::uint32_t m, Mode mode, void* gathered) {
  MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
  MK_RETURN_IF_ERROR(cuda::check_c(kOp, c, ldc, plan_.max.n));
  if (reinterpret_cast<std::uintptr_t>(gathered) % 16 != 0)
    return fail(ErrorCode::kInvalidArgument, "{}: gathered must lie at a multiple of 16 bytes",
                kOp);
  MK_ASSIGN_OR_RETURN(const bool in_place, plan_.in_place(arguments_.launch.context, a_shard, lda));
  const cuda::OnDevice on_device(device());
  choose_form(m, mode, plan_.work(world(), m));
  const AgGemmSchedule& schedule = arguments_.launch.schedule;
  const std::uint32_t shard_rows = schedule.shard(world().rank()).count;
  // Shards of one row more may have lower tiles.
  const std::uint32_t tile_rows =
      std::max(schedule.small_grid().tile_rows(), schedule.large_grid().tile_rows());
  MK_RETURN_IF_ERROR(set_product(a_shard, lda, shard_rows, tile_rows, b, ldb));
  MK_RETURN_IF_ERROR(make_maps(c, ldc, m));
  if (shard_rows == 0) arguments_.product.a = arguments_.gathered;  // nothing is loaded by it
  arguments_.launch.shard =
      GatherSource::of(a_shard, lda * kElementBytes, plan_.gather.row_bytes, shard_rows);
  arguments_.launch.in_place = in_place;
  arguments_.launch.sharing =
      ag_gemm_sharing(schedule.gather(), blocks(), shard_rows, spare_sharers() != 0);
  arguments_.launch.received_parts =
      ag_gemm_received_parts(schedule.gather(), blocks(), m, spare_sharers() != 0);
  arguments_.launch.gathered = static_cast<std::byte*>(gathered);
  return enqueue(stream, c, ldc);
}

Status AgGemmCuda::make_maps(void* c, std::uint64_t ldc, std::uint32_t m) {
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto stride = static_cast<std::int64_t>(ldc);
  const GatherGeometry& gather = plan_.gather;
  MK_ASSIGN_OR_RETURN(arguments_.c_tile,
                      cuda::make_tensor_map("C", type, c, m, plan_.max.n, stride, 64, 64));
  MK_ASSIGN_OR_RETURN(arguments_.c_eight,
                      cuda::make_tensor_map("C", type, c, m, plan_.max.n, stride, 8, 64));
  if (world().size() == 1) {
    arguments_.gathered = arguments_.product.a;
    return {};
  }
  const std::byte* const slots =
      workspace(world().local) + gather.layout.slots + kGatherHeaderBytes;
  MK_ASSIGN_OR_RETURN(
      arguments_.gathered,
      cuda::make_slots_map("gathered A", type, slots, std::int64_t{gather.banks} * world().size(),
                           static_cast<std::int64_t>(gather.layout.slot_bytes), gather.rows_max,
                           plan_.max.k, arguments_.product.a_box_rows, cuda::kBlockK));
  return {};
}

}  // namespace mk::kernels
