#include "kernels/ops/ag_gemm/sm90.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/core/tensor_map.h"
#include "kernels/cuda/transport/dma_rows.h"
#include "kernels/gather/engine_steps.h"
#include "kernels/ops/ag_gemm/schedule.h"

namespace mk::kernels {
namespace {

constexpr char kOp[] = "ag_gemm";
constexpr std::uint32_t kDmaBytesMax = 1 << 30;  ///< at a time

/// Whether the workspaces of two local ranks are on one GPU, as far as this process can tell.
bool on_one_device(const RankContext& context, std::uint32_t one, std::uint32_t other) {
  cudaPointerAttributes of[2] = {};
  const bool known = cudaPointerGetAttributes(&of[0], context.workspaces[one]) == cudaSuccess &&
                     cudaPointerGetAttributes(&of[1], context.workspaces[other]) == cudaSuccess;
  if (!known) cudaGetLastError();  // clears it: a launch would take it for its own
  return !known || of[0].device == of[1].device;
}

}  // namespace

// With p pieces of each shard the rows take (L - 1) p times a piece's own time longer. The tiles
// that are left when the last one has come take an L-th of a p-th of the product's. Together that
// is least at this p.
std::uint32_t ag_gemm_dma_bytes(const AgGemmPlan& plan, double product_us) {
  constexpr double kPieceUs = 6.6;  // of rows and flags, besides the bytes
  const double locals = plan.locals;
  // Over nodes other rows come last: there is time enough for all of these.
  const double best =
      plan.nodes > 1 ? 1 : std::sqrt(product_us / (locals * std::max(1.0, locals - 1) * kPieceUs));
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

std::uint32_t ag_gemm_collect_parts(const GatherSchedule& schedule, const RoleBlocks& blocks,
                                    std::uint32_t m) {
  const std::uint32_t world = schedule.world().size();
  // (All but the header's.)
  const std::uint32_t chunks = world * (schedule.chunks(shard_rows_max(m, world)) - 1);
  return cuda::copy_parts(chunks, schedule.geometry().chunk_bytes, blocks.compute,
                          /*onward=*/false, /*targets=*/1);
}

Result<std::unique_ptr<AgGemmCuda>> AgGemmCuda::create(const AgGemmPlan& plan,
                                                       const RankContext& context,
                                                       const CudaOptions& options) {
  std::unique_ptr<AgGemmCuda> made(new AgGemmCuda(kOp, plan, options.b_layout));
  MK_RETURN_IF_ERROR(made->start(context, options));
  return made;
}

Status AgGemmCuda::plan_with(const RankContext& context, const CudaOptions& options) {
  const GatherGeometry& gather = plan_.gather;
  return OperatorBase::plan_with(plan::Op::kAgGemm, context, options, gather.chunk_bytes,
                                 gather.banks, gather.local_banks);
}

Status AgGemmCuda::start(const RankContext& context, const CudaOptions& options) {
  const World& of = context.world;
  spans_ = options.spans;
  MK_RETURN_IF_ERROR(check_dma(context, options));
  MK_RETURN_IF_ERROR(plan_with(context, options));
  if (planned_.candidate.engines) {
    MK_RETURN_IF_ERROR(create_engines(options));
    if (!engines_.used()) {
      CudaOptions without = options;
      without.dma = false;
      MK_RETURN_IF_ERROR(plan_with(context, without));
    }
  }
  const bool by_dma = engines_.used();
  if (by_dma) {
    arguments_.launch.arrival = Arrival::kInTurn;
  } else if (ag_gemm_comes_in_turn(of.nodes, plan_.max)) {
    arguments_.launch.arrival = Arrival::kSoonInTurn;
  }
  const FlagMap flags{of.nodes, plan_.gather.banks, plan_.gather.chunks_max};
  MK_RETURN_IF_ERROR(OperatorBase::start(context, options, flags, cuda::kAgGemmKernels));
  arguments_.frame.by_dma = by_dma;
  arguments_.frame.heeds_peers = of.locals > 1 && plan_.gather.local_banks == 1;
  return {};
}

Status AgGemmCuda::check_dma(const RankContext& context, const CudaOptions& options) const {
  const World& world = context.world;
  if (options.dma != true || world.locals == 1) return {};
  // (Ranks of different nodes may share one, as in tests.)
  if (options.ranks_per_device > 1) {
    for (std::uint32_t local = 0; local < world.locals; ++local) {
      if (local == world.local || !on_one_device(context, local, world.local)) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "{}: DMA engines share rows of a node's ranks with a GPU each, and local rank {} "
                  "has this one's; leave it to be chosen (CudaOptions::dma)",
                  kOp, local);
    }
  }
  if (plan_.gather.local_banks == 1) return {};
  return fail(
      ErrorCode::kInvalidArgument,
      "{}: for DMA engines a plan has one local bank (Tiling::local_banks); this one has {}", kOp,
      plan_.gather.local_banks);
}

Status AgGemmCuda::create_engines(const CudaOptions& options) {
  MK_RETURN_IF_ERROR(engines_.create(options.dma));
  const double product =
      plan::predict(planned_.problem, planned_.machine, planned_.candidate).compute;
  dma_bytes_ = options.dma_bytes != 0 ? options.dma_bytes : ag_gemm_dma_bytes(plan_, product);
  return {};
}

Status AgGemmCuda::launch(cudaStream_t stream, const GemmMatrices& of, std::uint32_t m, Mode mode) {
  MK_RETURN_IF_ERROR(cuda::check_m(kOp, m, plan_.max.m));
  MK_RETURN_IF_ERROR(cuda::check_c(kOp, of.c, of.ldc, plan_.result_columns()));
  MK_RETURN_IF_ERROR(cuda::check_bias(kOp, plan_.epilogue, of.bias));
  if (reinterpret_cast<std::uintptr_t>(of.gathered) % 16 != 0)
    return fail(ErrorCode::kInvalidArgument, "{}: gathered must lie at a multiple of 16 bytes",
                kOp);
  MK_ASSIGN_OR_RETURN(const bool in_place, plan_.in_place(arguments_.launch.context, of.a, of.lda));
  const cuda::OnDevice on_device(device());
  planned_.problem.in_place = in_place;
  arguments_.launch.spans = spans(m);
  choose_form(stream, m, mode);
  const AgGemmSchedule& schedule = arguments_.launch.schedule;
  const std::uint32_t shard_rows = schedule.shard(world().rank()).count;
  // Shards of one row more may have lower tiles.
  const std::uint32_t tile_rows = schedule.spans() ? schedule.span_step()
                                                   : std::max(schedule.small_grid().tile_rows(),
                                                              schedule.large_grid().tile_rows());
  MK_RETURN_IF_ERROR(set_product(of.a, of.lda, shard_rows, tile_rows, of.b, of.ldb));
  MK_RETURN_IF_ERROR(make_maps(of.c, of.ldc, m));
  // A tile that spans all shards has a box of each.
  if (schedule.spans()) arguments_.product.a_box_rows *= static_cast<int>(world().size());
  set_epilogue(of.bias);
  if (shard_rows == 0) arguments_.product.a = arguments_.gathered;  // nothing is loaded by it
  arguments_.launch.shard =
      GatherSource::of(of.a, of.lda * kElementBytes, plan_.gather.row_bytes, shard_rows);
  arguments_.launch.in_place = in_place;
  arguments_.launch.sharing =
      ag_gemm_sharing(schedule.gather(), blocks(), shard_rows, engines_.used());
  arguments_.launch.onward = ag_gemm_passing_on(schedule.gather(), blocks(), m, passes_on_by_dma());
  arguments_.launch.gathered = static_cast<std::byte*>(of.gathered);
  arguments_.launch.collect_parts = ag_gemm_collect_parts(schedule.gather(), blocks(), m);
  return engines_.launch(
      stream, *arguments_.frame.state, [&] { return enqueue(stream, of); },
      [this](cuda::DmaQueue& queue) { return bring(queue); });
}

bool AgGemmCuda::spans(std::uint32_t m) const {
  if (!AgGemmSchedule::may_span(plan_.nodes, plan_.locals, m, plan_.tile_m)) return false;
  return spans_ ? *spans_ : planned_.spans(m);
}

/// This rank's rows to each of the node's others, as gather::share_in_turn has them: so each has
/// all rows of its next one first. Then what comes over the network (gather::pass_on_by_dma). The
/// kernel has written where they are shown (start_dma in gather/roles.h, CopyLeader).
Status AgGemmCuda::bring(cuda::DmaQueue& queue) const {
  cuda::DeviceState* const state = arguments_.frame.state;
  const AgGemmSchedule& schedule = arguments_.launch.schedule;
  const GatherSchedule& gather = schedule.gather();
  const std::uint32_t chunk_bytes = gather.geometry().chunk_bytes;
  const std::uint32_t at_once = std::max(1u, dma_bytes_ / chunk_bytes);
  const cuda::DmaSharing sharing{queue, gather, *state, arguments_.launch.context,
                                 arguments_.launch.shard};
  MK_RETURN_IF_ERROR(gather::bring_rows(gather, arguments_.launch.shard.rows,
                                        std::uint64_t{at_once} * chunk_bytes,
                                        gather::PieceOrder::kRankByRank, sharing));
  if (!passes_on_by_dma()) return {};
  const std::uint32_t of_piece = arguments_.launch.onward.dma_chunks;
  std::uint32_t pieces = 0;
  for (std::uint32_t hops = 1; hops < world().nodes; ++hops) {
    const std::uint32_t origin = world().rail_peer(gather.node_at(hops));
    const std::uint32_t rows = schedule.shard(origin).count;
    const std::uint32_t chunks = gather.chunks(rows);
    for (std::uint32_t chunk = 1; chunk < chunks; chunk += of_piece) {
      const ChunkRange piece{chunk, std::min(chunks, chunk + of_piece)};
      const ByteRange range = gather.chunks_range(rows, piece.begin, piece.end - piece.begin);
      const std::uint64_t place = gather.slot(0, origin) + range.begin;
      MK_RETURN_IF_ERROR(queue.await(&state->dma_pieces, ++pieces));
      for (std::uint32_t turn = 1; turn < world().locals; ++turn) {
        const cuda::DmaRows to = sharing.to(turn);
        MK_RETURN_IF_ERROR(
            queue.copy(to.workspace + place, workspace(world().local) + place, range.bytes));
        MK_RETURN_IF_ERROR(to.show(origin, piece));
      }
    }
  }
  return queue.write(&state->dma_passed_on, 1);
}

Status AgGemmCuda::make_maps(void* c, std::uint64_t ldc, std::uint32_t m) {
  const auto type = cuda::cuda_type(plan_.dtype);
  const auto stride = static_cast<std::int64_t>(ldc);
  const GatherGeometry& gather = plan_.gather;
  MK_ASSIGN_OR_RETURN(
      arguments_.c_tile,
      cuda::make_tensor_map("C", type, c, m, plan_.result_columns(), stride, 64, 64));
  MK_ASSIGN_OR_RETURN(
      arguments_.c_eight,
      cuda::make_tensor_map("C", type, c, m, plan_.result_columns(), stride, 8, 64));
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
