#include "kernels/ops/ring/spec.h"

#include <algorithm>

#include "kernels/comm/banks.h"
#include "kernels/comm/plan_tools.h"
#include "kernels/comm/shard.h"
#include "kernels/gather/plan.h"
#include "kernels/ops/ring/schedule.h"

namespace mk::kernels {
namespace {

constexpr std::string_view kOp = "ring_attention";
constexpr std::uint32_t kHeadsMax = 1024;
constexpr std::uint32_t kTileMax = 1024;
constexpr std::uint32_t kQueriesWanted = 128;  ///< of a tile
constexpr std::uint32_t kQueriesMin = 32;
constexpr std::uint32_t kItemsWanted = 8;  ///< of a rank
constexpr std::uint32_t kTileKeys = 128;
constexpr std::uint32_t kBatchMax = 1u << 16;
constexpr std::uint32_t kSequencesMax = 1u << 16;
// A chunk is a key head's K and V; or less, so that several groups bring the first head together.
constexpr std::uint64_t kChunkBytesMin = 32 * 1024;
constexpr std::uint64_t kChunkBytesMax = 256 * 1024;
constexpr std::uint64_t kChunksWanted = 4;  ///< of one rank
// A shard's turn (ChunkOrder), unless the planner names one.
constexpr std::uint32_t kTurnBytes = 1024 * 1024;
constexpr std::uint32_t kTurnChunksMin = 4;
constexpr std::uint32_t kTurnChunksMax = 1u << 16;
constexpr std::uint32_t kRemotePasses = 4;
// A window of heads begins with a wait for its first one, and ends with a last, half empty wave of
// items. In keys and values of 4 GiB there are so many items that neither matters.
constexpr std::uint64_t kWindowBytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kItemsMax = 1u << 29;  // their numbers are ints on a GPU

Status check_shape(std::uint32_t ranks, const RingAttentionShape& shape) {
  MK_RETURN_IF_ERROR(check_dtype(kOp, shape.dtype));
  MK_RETURN_IF_ERROR(check_side(kOp, "seq_max", shape.seq_max));
  const std::uint32_t parts = shape.causal ? 2 * ranks : ranks;
  if (shape.sequences_max > kSequencesMax || (shape.sequences_max != 0 && shape.batch != 1)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} sequences of different lengths in a batch of {} are not possible; at most "
                "{} in a batch of 1 are",
                kOp, shape.sequences_max, shape.batch, kSequencesMax);
  }
  if (shape.sequences_max == 0 && shape.seq_max < parts) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: seq_max = {} is less than one row for each of {} parts ({} ranks{}): take "
                "fewer ranks, or sequences_max = 1, with which a sequence may be shorter",
                kOp, shape.seq_max, parts, ranks,
                shape.causal ? ", two parts each when causal" : "");
  }
  if (shape.key_heads < 1 || shape.query_heads < 1 || shape.query_heads > kHeadsMax ||
      shape.query_heads % shape.key_heads != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} query heads over {} key heads are not possible; query heads are 1 to {} "
                "and a multiple of the key heads",
                kOp, shape.query_heads, shape.key_heads, kHeadsMax);
  }
  if (shape.batch < 1 || shape.batch > kBatchMax) {
    return fail(ErrorCode::kInvalidArgument, "{}: a batch of {} is not possible; 1 to {} are", kOp,
                shape.batch, kBatchMax);
  }
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: a head dimension of {} is not possible; 64 or "
                "128 is",
                kOp, shape.head_dim);
  }
  return {};
}

Status check_ring_tiling(const RingAttentionTiling& tiling) {
  if (tiling.tile_q > kTileMax || tiling.tile_k > kTileMax) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: tiles of {} queries and {} keys are not possible; at most {} each (0: chosen)",
                kOp, tiling.tile_q, tiling.tile_k, kTileMax);
  }
  if (tiling.remote_passes > kRemotePassesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} passes over the remote keys are too many; at most {} (0: chosen)", kOp,
                tiling.remote_passes, kRemotePassesMax);
  }
  if (tiling.turn_chunks > kTurnChunksMax &&
      tiling.turn_chunks != RingAttentionTiling::kWholeShards) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} chunks of a shard in its turn are too many; at most {} (0: chosen)", kOp,
                tiling.turn_chunks, kTurnChunksMax);
  }
  return {};
}

/// `plan`: but for tiles and gather.
Status check_together(const RingAttentionPlan& plan) {
  if (ring_heads_fit(plan.key_heads, plan.heads_together) &&
      (plan.heads_together == 1 || (plan.engines && plan.packing == KeyPacking::kHeads)))
    return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} of {} key heads side by side are not possible; a power of two that divides "
              "the key heads is, with copy engines and keys by heads (0: 1)",
              kOp, plan.heads_together, plan.key_heads);
}

/// `plan`: but for tiles and gather.
Status check_items(const RingAttentionPlan& plan) {
  const std::uint64_t items = std::uint64_t{plan.batch} * plan.query_heads * plan.query_tiles_max();
  if (items <= kItemsMax) return {};
  return fail(ErrorCode::kLimitExceeded,
              "{}: batch {} x {} heads x {} rows of a rank are {} tiles of queries; at most {} are "
              "possible: split the batch or the heads into several launches, or take more ranks",
              kOp, plan.batch, plan.query_heads, plan.rows_max(), items, kItemsMax);
}

std::uint32_t choose_tile_q(const RingAttentionPlan& plan) {
  const std::uint32_t part_rows = shard_rows_max(plan.seq_max, plan.parts());
  const auto items = [&](std::uint32_t tile) {
    return div_up(part_rows, tile) * plan.parts_per_rank() * plan.head_pairs();
  };
  std::uint32_t tile = std::max(1u, kQueriesWanted / plan.group());
  while (items(tile) < kItemsWanted && tile > 1 && tile / 2 * plan.group() >= kQueriesMin) {
    tile /= 2;
  }
  return tile;
}

std::uint32_t choose_chunk_bytes(const RingAttentionPlan& plan) {
  const std::uint64_t pair = std::uint64_t{2} * plan.rows_max() * plan.head_bytes();
  const std::uint64_t all = pair * plan.window_pairs;
  const std::uint64_t wanted =
      std::clamp(std::min(pair, all / kChunksWanted), kChunkBytesMin, kChunkBytesMax);
  return static_cast<std::uint32_t>(wanted / plan.head_bytes() * plan.head_bytes());
}

std::uint32_t choose_turn(std::uint32_t wanted, std::uint32_t chunk_bytes) {
  if (wanted == RingAttentionTiling::kWholeShards) return 0;
  return wanted != 0 ? wanted : std::max(kTurnChunksMin, kTurnBytes / chunk_bytes);
}

/// As many as are wanted, or fewer, so that the windows are alike.
std::uint32_t choose_window(const RingAttentionPlan& plan, std::uint32_t wanted,
                            std::uint32_t banks) {
  std::uint64_t pairs = wanted;
  if (wanted == 0 && plan.packing == KeyPacking::kRows) return plan.head_pairs();
  if (wanted == 0) {
    const std::uint64_t slots =
        std::uint64_t{banks != 0 ? banks : kBanksMax} * plan.nodes * plan.locals;
    pairs = kWindowBytes / (slots * 2 * plan.rows_max() * plan.head_bytes());
  }
  const auto evenly = [](std::uint32_t things, std::uint64_t most) {
    const auto at_most = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(most, 1, things));
    return div_up(things, div_up(things, at_most));
  };
  if (pairs >= plan.key_heads || plan.packing == KeyPacking::kRows)
    return evenly(plan.batch, pairs / plan.key_heads) * plan.key_heads;
  return evenly(plan.key_heads, pairs);
}

}  // namespace

Result<RingAttentionPlan> RingAttentionPlan::make(std::uint32_t nodes, std::uint32_t locals,
                                                  const RingAttentionShape& shape,
                                                  const RingAttentionTiling& tiling) {
  MK_RETURN_IF_ERROR(check_world(kOp, nodes, locals));
  MK_RETURN_IF_ERROR(check_shape(nodes * locals, shape));
  MK_RETURN_IF_ERROR(check_ring_tiling(tiling));
  RingAttentionPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.batch = shape.batch;
  plan.seq_max = static_cast<std::uint32_t>(shape.seq_max);
  plan.sequences_max = shape.sequences_max;
  plan.query_heads = shape.query_heads;
  plan.key_heads = shape.key_heads;
  plan.head_dim = shape.head_dim;
  plan.causal = shape.causal;
  plan.dtype = shape.dtype;
  if (tiling.packing == KeyPacking::kHeads) MK_RETURN_IF_ERROR(check_items(plan));
  plan.tile_q = tiling.tile_q != 0 ? tiling.tile_q : choose_tile_q(plan);
  plan.tile_k = tiling.tile_k != 0 ? tiling.tile_k : kTileKeys;
  plan.remote_passes = tiling.remote_passes != 0 ? tiling.remote_passes : kRemotePasses;
  plan.packing = tiling.packing;
  plan.engines = tiling.engines;
  plan.heads_together = std::max(1u, tiling.heads_together);
  MK_RETURN_IF_ERROR(check_together(plan));
  if (plan.engines) MK_RETURN_IF_ERROR(check_ring_engines(nodes, locals, shape));
  const std::uint32_t banks = plan.engines ? 1 : tiling.banks;
  plan.window_pairs = choose_window(plan, tiling.window_pairs, banks);
  if (plan.engines && plan.windows() > 1) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: keys and values of {} of {} heads of all ranks fit into the workspace at a "
                "time; copy engines bring them where all do, warpgroups else",
                kOp, plan.window_pairs, plan.head_pairs());
  }
  const std::uint64_t all_rows =
      std::uint64_t{plan.rows_max()} *
      (plan.packing == KeyPacking::kRows ? plan.window(0).batches : 2 * plan.window_pairs);
  if (all_rows > kGatherRowsMax) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} pairs of K and V of {} rows are {} rows per rank; at most {} are possible",
                kOp, plan.window_pairs, plan.seq_max, all_rows, kGatherRowsMax);
  }
  const GatherShape rows{static_cast<std::uint32_t>(all_rows), plan.gathered_row_bytes()};
  const std::uint32_t chunk_bytes = tiling.chunk_bytes == 0 && plan.packing == KeyPacking::kHeads
                                        ? choose_chunk_bytes(plan)
                                        : tiling.chunk_bytes;
  MK_ASSIGN_OR_RETURN(
      GatherPlan gather,
      GatherPlan::make(kOp, nodes, locals, rows, GatherKind::kBroadcast, chunk_bytes, banks));
  // By heads, an item needs some of every rank's rows; by rows, a pass goes by hops.
  if (plan.packing == KeyPacking::kHeads)
    gather.turn_chunks = choose_turn(tiling.turn_chunks, gather.chunk_bytes);
  WorkspaceLayout workspace(locals);
  gather.place(workspace, 0);
  workspace.begin_data();
  gather.place_rows(workspace);
  plan.gather = gather;
  plan.banks = gather.banks;
  plan.workspace = workspace.parts();
  plan.workspace_bytes = plan.workspace.bytes();
  MK_RETURN_IF_ERROR(check_workspace(kOp, plan.workspace_bytes));
  return plan;
}

Status check_ring_engines(std::uint32_t nodes, std::uint32_t locals,
                          const RingAttentionShape& shape) {
  const auto refused = [](std::string_view why) -> Status {
    return fail(ErrorCode::kInvalidArgument, "{}: copy engines bring no keys here: {}", kOp, why);
  };
  if (locals == 1) return refused("a rank that is alone on its node has nobody to bring them to");
  if (nodes > 1) return refused("over nodes share warpgroups read them for the network anyway");
  if (shape.sequences_max != 0)
    return refused("the host, which queues the copies, does not know packed sequences' lengths");
  return {};
}

RingAttentionTiling ring_attention_cuda_tiling(const RingAttentionShape& shape) {
  RingAttentionTiling tiling;
  tiling.packing = KeyPacking::kHeads;
  tiling.tile_q = ring_tile_queries(shape.head_dim);
  tiling.tile_k = ring_tile_keys(shape.head_dim);
  tiling.remote_passes = 1;
  return tiling;
}

Status RingAttentionPlan::check_seq(std::uint64_t seq) const {
  if (seq >= parts() && seq <= seq_max) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: a sequence of {} rows is not possible; {} (one for each of the ranks' parts) to "
              "{}, which the operator was made for, are; with sequences_max = 1 it may be shorter",
              kOp, seq, parts(), seq_max);
}

std::uint64_t RingAttentionPlan::query_tiles_max() const {
  return div_up(rows_max(), ring_tile_queries(head_dim)) +
         std::uint64_t{std::max(1u, sequences_max)} * parts_per_rank();
}

void RingAttentionPlan::move_data(std::uint64_t by) {
  workspace.data_at += by;
  gather.layout.slots += by;
}

std::uint32_t RingAttentionPlan::flag_count() const { return GatherPlan{gather}.flag_count(); }

LaunchWork RingAttentionPlan::work(const World& world, std::uint32_t seq) const {
  const RingAttentionSchedule schedule(*this, world, seq, Mode::kFused);
  LaunchWork work;
  work.flops = 4.0 * head_dim * query_heads * batch * static_cast<double>(schedule.pairs());
  work.local_bytes = static_cast<double>(schedule.local_bytes());
  work.network_bytes = static_cast<double>(schedule.network_bytes());
  work.commands = schedule.commands();
  // Passes: what has arrived during one is computed with in the next.
  work.steps = nodes > 1 ? schedule.passes() : locals;
  return work;
}

std::uint64_t RingAttentionPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 5;
  return fingerprint_of({kRules,
                         nodes,
                         locals,
                         batch,
                         seq_max,
                         sequences_max,
                         query_heads,
                         key_heads,
                         head_dim,
                         causal ? 1u : 0u,
                         static_cast<std::uint64_t>(packing),
                         static_cast<std::uint64_t>(dtype),
                         tile_q,
                         tile_k,
                         remote_passes,
                         workspace_bytes,
                         window_pairs,
                         heads_together,
                         engines ? 1u : 0u,
                         GatherPlan{gather}.fingerprint()});
}

}  // namespace mk::kernels
