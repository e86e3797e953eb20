#include "kernels/ops/ag_gemm/sm90.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/tensor_map.h"
#include "kernels/ops/ag_gemm/schedule.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "ag_gemm";
constexpr std::uint32_t kLocalChunkBytes = 128 * 1024;
constexpr std::uint32_t kNetworkChunkBytes = 256 * 1024;  ///< at least
constexpr std::uint64_t kSmallChunkBytesMin = 32 * 1024;
constexpr std::uint64_t kSmallChunkBytesMax = 64 * 1024;
constexpr std::uint32_t kSmallChunks = 64;       ///< of a rank: a block for each
constexpr std::uint32_t kDmaBytesMax = 1 << 30;  ///< at a time
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

/// Chunks on one node where DMA engines bring them, many at a time: a tile looks at a flag for each
/// of its rows'. A row of tiles.
std::uint32_t dma_chunk_bytes(const Shape& max) {
  constexpr std::uint64_t kMost = 8 << 20;
  const std::uint64_t row = std::uint64_t{cuda::kTileRowsMax} * max.k * kElementBytes;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(row, kLocalChunkBytes, kMost));
}

/// Whether the workspaces of two local ranks are on one GPU, as far as this process can tell.
bool on_one_device(const RankContext& context, std::uint32_t one, std::uint32_t other) {
  cudaPointerAttributes of[2] = {};
  const bool known = cudaPointerGetAttributes(&of[0], context.workspaces[one]) == cudaSuccess &&
                     cudaPointerGetAttributes(&of[1], context.workspaces[other]) == cudaSuccess;
  if (!known) cudaGetLastError();  // clears it: a launch would take it for its own
  return !known || of[0].device == of[1].device;
}

}  // namespace

// The shorter the product beside the gather, the more; but to several peers 12 SMs' bulk stores are
// all that NVLink takes. As measured with two, four and eight ranks (../decisions).
std::uint32_t ag_gemm_share_groups(std::uint32_t nodes, std::uint32_t locals, const Shape& max,
                                   bool shared) {
  constexpr std::uint32_t kMost = 192;  // half of the GPU
  const bool pair = locals == 2;
  if (is_small(max)) {
    if (nodes > 1) return shared ? kMost / 2 : kMost;  // (ranks that share: not measured)
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

// As measured with two, four and eight ranks (../decisions).
bool ag_gemm_shares_by_dma(std::uint32_t nodes, std::uint32_t locals, const Shape& max,
                           const MachineRates& given) {
  constexpr double kLeast = 8 << 20;  // of a rank's rows: each piece takes time besides its bytes
  constexpr double kPart = 0.7;       // of NVLink's time
  if (locals == 1) return false;
  const MachineRates rates = cuda::gpu_rates(given, kBlocksMax);
  const double all = kElementBytes * double{1} * max.m * max.k;
  const double product = double{2} * max.m * max.n * max.k / rates.flops_per_s;
  const double within_node = all / locals * (locals - 1) / cuda::kNvlinkBytesPerS;
  const double network = all * (nodes - 1) / nodes / locals / rates.network_bytes_per_s;
  if (all / (nodes * locals) < kLeast) return false;
  // To one other rank groups pass on in good time, and the loopback's network, which takes the same
  // engines, has as many bytes to bring as they have (../decisions).
  if (nodes > 1) return product >= (locals > 2 ? 1 : 2) * network;
  if (comes_in_turn(nodes, max)) return false;
  return product >= kPart * within_node;
}

// With p pieces of each shard the rows take (L - 1) p times a piece's own time longer, and the
// tiles that are left when the last one has come an L-th of a p-th of the product's: together least
// at this p.
std::uint32_t ag_gemm_dma_bytes(const AgGemmPlan& plan, const MachineRates& rates) {
  constexpr double kPieceSeconds = 6.6e-6;  // of rows and flags, besides the bytes
  const double product =
      2.0 * plan.max.m * plan.max.n * plan.max.k / cuda::gpu_rates(rates, kBlocksMax).flops_per_s;
  const double locals = plan.locals;
  // Over nodes other rows come last: there is time enough for all of these.
  const double best =
      plan.nodes > 1 ? 1
                     : std::sqrt(product / (locals * std::max(1.0, locals - 1) * kPieceSeconds));
  const std::uint32_t chunks = std::max(2u, plan.gather.chunks_max) - 1;  // but the header
  const auto pieces = static_cast<std::uint32_t>(std::clamp<double>(best, 1, chunks));
  const std::uint64_t bytes = std::uint64_t{div_up(chunks, pieces)} * plan.gather.chunk_bytes;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes, kDmaBytesMax));
}

gather::Sharing ag_gemm_sharing(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                std::uint32_t rows, bool by_dma) {
  const World& world = schedule.world();
  const bool onward = world.nodes > 1;
  const std::uint32_t chunks = schedule.chunks(rows);
  gather::Sharing sharing;
  sharing.by_dma = by_dma;
  sharing.parts = cuda::copy_parts(chunks, schedule.geometry().chunk_bytes, blocks.share, onward,
                                   by_dma ? 1 : world.locals - 1);
  if (onward) sharing.network_first = cuda::network_first(chunks, sharing.parts);
  // Over nodes groups are not equally quick: those that receive begin late with it.
  sharing.taken = onward && chunks > cuda::kFewChunks;
  return sharing;
}

gather::PassingOn ag_gemm_passing_on(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                     std::uint32_t m, bool by_dma) {
  // The fewer pieces, the later tiles have the first rows, and the longer they wait for the last;
  // but each costs time (../decisions).
  constexpr std::uint32_t kDmaPieces = 4;
  const World& world = schedule.world();
  // None has more chunks than the largest.
  const std::uint32_t chunks = schedule.chunks(shard_rows_max(m, world.size()));
  gather::PassingOn onward;
  onward.parts = cuda::copy_parts(chunks * (world.nodes - 1), schedule.geometry().chunk_bytes,
                                  blocks.receive, true, world.locals - 1);
  onward.taken = chunks > cuda::kFewChunks;
  if (by_dma) {
    const std::uint32_t most = kDmaBytesMax / schedule.geometry().chunk_bytes;
    onward.dma_chunks = std::max(1u, std::min(most, div_up(chunks - 1, kDmaPieces)));
  }
  return onward;
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
  const bool by_dma = blocks >= kBlocksMax && ag_gemm_shares_by_dma(nodes, locals, max, rates);
  if (nodes > 1) {
    tiling.chunk_bytes = std::max(kNetworkChunkBytes, cuda::network_chunk_bytes(sent));
  } else {
    tiling.chunk_bytes = by_dma ? dma_chunk_bytes(max) : local_chunk_bytes(locals, max, sent);
  }
  if (by_dma) tiling.local_banks = tiling.banks = 1;
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
  MK_RETURN_IF_ERROR(create_dma(context, options));
  const bool by_dma = dma_ != nullptr;
  if (by_dma) {
    arguments_.launch.arrival = Arrival::kInTurn;
  } else if (comes_in_turn(of.nodes, plan_.max)) {
    arguments_.launch.arrival = Arrival::kSoonInTurn;
  }
  cuda::GroupNeeds needs;
  needs.streams = Role::kShare;
  needs.stream = of.size() > 1;
  needs.send = of.nodes > 1;
  needs.receive = of.nodes > 1 && of.locals > 1;
  const std::uint32_t groups =
      ag_gemm_share_groups(of.nodes, of.locals, plan_.max, options.ranks_per_device > 1);
  // Where the product takes longer than the rail, it needs the SMs.
  needs.stream_least = of.nodes > 1 && plan_.max.n < kNarrow ? cuda::kGroupsOfRail : 0;
  // What comes is passed on to the node's others when the rank's own rows are, which are needed
  // first: half of the groups that share those do it then.
  needs.receivers_stream = true;
  needs.receive_groups = groups / 2;
  needs.stream_groups = needs.receive ? groups - needs.receive_groups : groups;
  needs.few_groups = by_dma;
  const FlagMap flags{of.nodes, plan_.gather.banks, plan_.gather.chunks_max};
  MK_RETURN_IF_ERROR(OperatorBase::start(context, options, needs, flags, cuda::kAgGemmKernels));
  arguments_.frame.by_dma = by_dma;
  arguments_.frame.heeds_peers = of.locals > 1 && plan_.gather.local_banks == 1;
  return {};
}

Status AgGemmCuda::create_dma(const RankContext& context, const CudaOptions& options) {
  const World& world = context.world;
  if (world.locals == 1) return {};
  const bool asked = options.dma == true;
  // (Ranks of different nodes may share one, as in tests.)
  if (asked && options.ranks_per_device > 1) {
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      if (local == world.local || !on_one_device(context, local, world.local)) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "{}: DMA engines share rows of a node's ranks with a GPU each, and local rank {} "
                  "has this one's; leave it to be chosen (CudaOptions::dma)",
                  kOp, local);
    }
  }
  const bool one_bank = plan_.gather.local_banks == 1;
  if (asked && !one_bank) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: for DMA engines a plan has one local bank (Tiling::local_banks); this one has "
                "{}",
                kOp, plan_.gather.local_banks);
  }
  // Of ranks that share a GPU one has sometimes waited for another's copies until its deadline (as
  // if CUDA could not queue the first ones within a GPU while kernels run there). And who names
  // groups wants groups.
  const bool chosen = one_bank && options.ranks_per_device == 1 && options.stream_groups == 0;
  if (!options.dma.value_or(chosen)) return {};
  dma_ = std::make_unique<cuda::DmaQueue>(kOp);
  if (const Status created = dma_->create(); !created) {
    dma_.reset();
    const bool matters = asked || created.error().code != ErrorCode::kUnsupported;
    return matters ? created : Status{};
  }
  dma_bytes_ = options.dma_bytes != 0 ? options.dma_bytes : ag_gemm_dma_bytes(plan_, options.rates);
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
      ag_gemm_sharing(schedule.gather(), blocks(), shard_rows, dma_ != nullptr);
  arguments_.launch.onward = ag_gemm_passing_on(schedule.gather(), blocks(), m, passes_on_by_dma());
  arguments_.launch.gathered = static_cast<std::byte*>(gathered);
  if (!dma_) return enqueue(stream, c, ldc);
  if (!dma_status_) return dma_status_;
  MK_RETURN_IF_ERROR(dma_->mark(stream));
  MK_RETURN_IF_ERROR(enqueue(stream, c, ldc));
  dma_status_ = queue_dma();
  if (const Status joined = dma_->join(stream); dma_status_) dma_status_ = joined;
  return dma_status_;
}

/// This rank's rows to each of the node's others, as gather::share_in_turn has them: so each has
/// all rows of its next one first. Then what comes over the network (gather::pass_on_by_dma). The
/// kernel has written where they are shown (start_dma in gather/roles.h, CopyLeader).
Status AgGemmCuda::queue_dma() {
  cuda::DeviceState* const state = arguments_.frame.state;
  MK_RETURN_IF_ERROR(dma_->begin(&state->dma_go));
  const AgGemmSchedule& schedule = arguments_.launch.schedule;
  const GatherSchedule& gather = schedule.gather();
  const std::uint32_t rows = arguments_.launch.shard.rows;
  const std::uint32_t chunks = gather.chunks(rows);
  const std::uint32_t at_once = std::max(1u, dma_bytes_ / gather.geometry().chunk_bytes);
  for (std::uint32_t turn = 1; turn < world().locals; ++turn) {
    for (std::uint32_t chunk = 1; chunk < chunks; chunk += at_once) {
      MK_RETURN_IF_ERROR(
          queue_chunks(turn, world().rank(), rows, {chunk, std::min(chunks, chunk + at_once)}));
      // The loopback's network copies with the same engine.
      if (world().nodes > 1) MK_RETURN_IF_ERROR(dma_->yield());
    }
  }
  if (!passes_on_by_dma()) return {};
  const std::uint32_t of_piece = arguments_.launch.onward.dma_chunks;
  std::uint32_t pieces = 0;
  for (std::uint32_t hops = 1; hops < world().nodes; ++hops) {
    const std::uint32_t origin = world().rail_peer(gather.node_at(hops));
    const std::uint32_t its_rows = schedule.shard(origin).count;
    const std::uint32_t its_chunks = gather.chunks(its_rows);
    for (std::uint32_t chunk = 1; chunk < its_chunks; chunk += of_piece) {
      MK_RETURN_IF_ERROR(dma_->await(&state->dma_pieces, ++pieces));
      for (std::uint32_t turn = 1; turn < world().locals; ++turn) {
        MK_RETURN_IF_ERROR(
            queue_chunks(turn, origin, its_rows, {chunk, std::min(its_chunks, chunk + of_piece)}));
      }
    }
  }
  return dma_->write(&state->dma_passed_on, 1);
}

/// Chunks of the origin's `rows` rows to the local rank `turn` before this one, then their flags.
Status AgGemmCuda::queue_chunks(std::uint32_t turn, std::uint32_t origin, std::uint32_t rows,
                                ChunkRange chunks) {
  const GatherSchedule& gather = arguments_.launch.schedule.gather();
  std::byte* const to = workspace((world().local + world().locals - turn) % world().locals);
  const ByteRange range = gather.chunks_range(rows, chunks.begin, chunks.end - chunks.begin);
  std::byte* const place = to + gather.slot(0, origin) + range.begin;
  if (origin == world().rank()) {
    const std::uint64_t begin = range.begin - kGatherHeaderBytes;
    CopyJob job;
    job.add_target(place);
    Status copied;
    arguments_.launch.shard.copy_packed(begin, begin + range.bytes, job, [&](const CopyJob& part) {
      if (copied) copied = dma_->copy(part);
    });
    if (!copied) return copied;
  } else {
    const std::byte* const from = workspace(world().local) + gather.slot(0, origin) + range.begin;
    MK_RETURN_IF_ERROR(dma_->copy(place, from, range.bytes));
  }
  return dma_->copy(to + gather.ready(origin, chunks.begin),
                    &arguments_.frame.state->dma_flags[chunks.begin],
                    (chunks.end - chunks.begin) * sizeof(std::uint32_t));
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
