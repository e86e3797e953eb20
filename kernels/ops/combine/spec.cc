#include "kernels/ops/combine/spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "kernels/comm/shard.h"
#include "kernels/ops/combine/schedule.h"

namespace mk::kernels {
namespace {

constexpr std::string_view kOp = "gemm_combine";
constexpr std::uint32_t kTopKMax = 1024;
constexpr std::uint32_t kTilesWanted = 16;  ///< of one rank
constexpr std::uint64_t kChunkBytes = 256 * 1024;
constexpr std::uint64_t kChunkBytesMin = 32 * 1024;
constexpr std::uint32_t kChunksWanted = 8;  ///< of a full bank

Status check_shape(const CombineShape& shape, std::uint32_t world) {
  MK_RETURN_IF_ERROR(check_side(kOp, "tokens_max", shape.tokens_max));
  MK_RETURN_IF_ERROR(check_side(kOp, "hidden", shape.hidden));
  MK_RETURN_IF_ERROR(check_side(kOp, "features", shape.features));
  MK_RETURN_IF_ERROR(check_side(kOp, "experts", shape.experts));
  if (shape.hidden % 8 != 0 || shape.features % 8 != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: hidden = {} and features = {} must be multiples of 8", kOp, shape.hidden,
                shape.features);
  }
  if (shape.top_k < 1 || shape.top_k > std::min(shape.experts, kTopKMax)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: a token goes to 1 to {} of {} experts (top_k), not to {}", kOp,
                std::min(shape.experts, kTopKMax), shape.experts, shape.top_k);
  }
  if (shape.partials != CombinePartials::kElement && shape.partials != CombinePartials::kF32) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: partials travel as elements (0) or in fp32 (1), not as {}", kOp,
                static_cast<int>(shape.partials));
  }
  const std::uint64_t most = std::uint64_t{world} * shape.tokens_max;
  // A Divisor takes numbers below 2^31.
  if (most > std::numeric_limits<std::int32_t>::max() / shape.top_k) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} ranks with {} tokens of {} slots each are too many rows; at most {}", kOp,
                world, shape.tokens_max, shape.top_k, std::numeric_limits<std::int32_t>::max());
  }
  return {};
}

Status choose_chunks(CombinePlan& plan, std::uint32_t asked) {
  const std::uint64_t row_bytes = std::uint64_t{plan.shape.hidden} * plan.partial_bytes();
  const std::uint32_t tokens = plan.shape.tokens_max;
  const auto tokens_in = [&](std::uint64_t bytes) {
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(bytes / row_bytes, 1, tokens));
  };
  std::uint64_t bytes = asked != 0 ? asked : kChunkBytes;
  while (asked == 0 && bytes > kChunkBytesMin && div_up(tokens, tokens_in(bytes)) < kChunksWanted)
    bytes /= 2;
  plan.chunk_tokens = tokens_in(bytes);
  const auto chunks = [&] { return 1 + div_up(tokens, plan.chunk_tokens); };
  const auto too_many = [&] {
    const FlagMap flags{plan.nodes, plan.banks, chunks()};
    return flags.count() > kOperatorFlagsMax;
  };
  while (too_many()) plan.chunk_tokens = std::min(2 * plan.chunk_tokens, tokens);
  plan.chunks_max = chunks();
  if (plan.nodes > 1 && plan.chunk_tokens * row_bytes > shm::kCommandPayloadBytesMax / 2) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} tokens of {} bytes over {} nodes need chunks of {} bytes; at most {}", kOp,
                tokens, row_bytes, plan.nodes, plan.chunk_tokens * row_bytes,
                shm::kCommandPayloadBytesMax / 2);
  }
  return {};
}

void choose_tiles(CombinePlan& plan, const Tiling& tiling, std::uint32_t world) {
  const CombineShape& shape = plan.shape;
  const std::uint64_t experts = shard_rows_max(shape.experts, world);
  const std::uint64_t rows = std::uint64_t{shape.tokens_max} * shape.top_k;  // at even routing
  const TileSides sides = choose_tile_sides(tiling, kTilesWanted, [&](const TileSides& tried) {
    const std::uint64_t of_expert = (rows + experts * tried.rows - 1) / (experts * tried.rows);
    return experts * of_expert * div_up(shape.hidden, tried.columns);
  });
  plan.tile_m = sides.rows;
  plan.tile_n = sides.columns;
  plan.row_pad = row_tile_pad(sides.rows);
  plan.rows_max = world * shape.tokens_max * shape.top_k;
  plan.tiles_max = plan.rows_max / plan.tile_m + static_cast<std::uint32_t>(experts);
}

void lay_out(CombinePlan& plan) {
  const std::uint64_t nodes = plan.nodes;
  const std::uint64_t locals = plan.locals;
  const std::uint64_t ranks = nodes * locals;
  const std::uint64_t tokens = plan.shape.tokens_max;
  const std::uint64_t slots = nodes * tokens * plan.shape.top_k;
  const std::uint64_t row_bytes = std::uint64_t{plan.shape.hidden} * plan.partial_bytes();
  constexpr std::uint64_t kLine = 64;
  CombineLayout& layout = plan.layout;
  WorkspaceLayout workspace(plan.locals);
  layout.words = workspace.place(sizeof(CombineWords), kLine);
  layout.tiles = workspace.place(plan.tiles_max * sizeof(CombineTile), kLine);
  layout.order = workspace.place(std::uint64_t{plan.tiles_max} * 4, kLine);
  layout.order_counts = workspace.place(order_count_words(plan.nodes * plan.steps) * 4, kLine);
  layout.tile_parts = workspace.place(std::uint64_t{plan.tiles_max} * 4, kLine);
  layout.block_notes = workspace.place(kBlocksMax * ranks * sizeof(CombineNote), kLine);
  layout.peers = workspace.place(nodes * sizeof(CombinePeer), kLine);
  layout.expected = workspace.place((kBlocksMax + 1) * ranks * 8, kLine);
  layout.counts = workspace.place(
      nodes * CombineSchedule::parts_max(plan.shape.tokens_max) * sizeof(CombineCounts), kLine);
  layout.lists = workspace.place(nodes * tokens * 4, kLine);
  layout.places = workspace.place(nodes * tokens * 4, kLine);
  layout.chunk_reduced = workspace.place(nodes > 1 ? nodes * plan.chunks_max * 4 : 0, kLine);
  layout.indexed = workspace.place(locals * kLine, kLine);
  layout.notes = workspace.place(locals * nodes * sizeof(CombineNote), kLine);
  layout.tile_ready = workspace.place(locals * plan.tiles_max * 4, kLine);
  layout.entries = workspace.place(slots * sizeof(CombineEntry), kLine);
  workspace.begin_data();
  layout.slots = workspace.place(slots * row_bytes, kPage);
  layout.bank_bytes = round_up_to(combine_header_bytes(plan.locals) + tokens * row_bytes, kPage);
  layout.staging = workspace.place(plan.banks * (nodes - 1) * layout.bank_bytes, kPage);
  layout.receive = workspace.place(plan.banks * (nodes - 1) * layout.bank_bytes, kPage);
  plan.workspace = workspace.parts();
  layout.bytes = plan.workspace.bytes();
}

}  // namespace

Result<CombinePlan> CombinePlan::make(std::uint32_t nodes, std::uint32_t locals,
                                      const CombineShape& shape, DType dtype, const Tiling& tiling,
                                      std::uint32_t steps) {
  MK_RETURN_IF_ERROR(check_world(kOp, nodes, locals));
  MK_RETURN_IF_ERROR(check_dtype(kOp, dtype));
  MK_RETURN_IF_ERROR(check_tiling(kOp, tiling));
  MK_RETURN_IF_ERROR(check_row_tiles(kOp, tiling.tile_m));
  const std::uint32_t world = nodes * locals;
  MK_RETURN_IF_ERROR(check_shape(shape, world));
  CombinePlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.shape = shape;
  plan.dtype = dtype;
  plan.banks = tiling.banks != 0 ? tiling.banks : kBanksMax;
  plan.steps = steps;
  choose_tiles(plan, tiling, world);
  if (std::uint64_t{locals} * plan.tiles_max > std::numeric_limits<std::uint32_t>::max()) {
    return fail(ErrorCode::kLimitExceeded, "{}: {} row tiles on each of {} ranks are too many", kOp,
                plan.tiles_max, locals);
  }
  MK_RETURN_IF_ERROR(choose_chunks(plan, tiling.chunk_bytes));
  lay_out(plan);
  MK_RETURN_IF_ERROR(check_workspace(kOp, plan.layout.bytes));
  return plan;
}

void CombinePlan::move_data(std::uint64_t by) {
  workspace.data_at += by;
  layout.slots += by;
  layout.staging += by;
  layout.receive += by;
}

std::uint32_t CombinePlan::flag_count() const { return flags().count(); }

LaunchWork CombinePlan::work(std::uint32_t rows, std::uint32_t tokens) const {
  const CombineSchedule schedule(*this, World{nodes, locals, 0, 0});
  const double row_bytes = static_cast<double>(schedule.row_bytes());
  // Of a token's slots, those on one given node; and whether there is any.
  const double here = static_cast<double>(shape.top_k) / nodes;
  const double any = 1 - std::pow(1 - 1.0 / nodes, shape.top_k);
  const double sums = tokens * any * (nodes - 1);
  LaunchWork work;
  work.flops = 2.0 * rows * shape.hidden * shape.features;
  // Rows are written and read once, sums for others too, and what comes is read.
  work.local_bytes = (2 * tokens * here * nodes + 3 * sums + tokens) * row_bytes;
  work.network_bytes =
      nodes > 1 ? sums * row_bytes + (nodes - 1.0) * static_cast<double>(schedule.header_bytes())
                : 0;
  const auto sums_each = static_cast<std::uint32_t>(tokens * any);
  const std::uint32_t chunks = schedule.chunks(sums_each);
  work.steps = std::max(1u, (chunks - 1) * std::max(1u, nodes - 1));
  if (nodes > 1) work.commands = (nodes - 1) * (chunks + (flags().has_releases() ? 1 : 0));
  return work;
}

Error CombinePlan::refusal(const World& world, std::uint32_t tokens,
                           const CombineRefusals& refusals) const {
  const std::string launch =
      fmt::format("{} launch {} on rank {}", kOp, refusals.epoch, world.rank());
  const auto wrong = [&](const std::string& words) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("{}: {}", launch, words)};
  };
  const CombineFault& fault = refusals.fault;
  const std::uint32_t rank = refusals.verdict.bad_rank - 1;
  if (fault.in_ids()) {
    return wrong(fmt::format(
        "token {}, slot {} goes to expert {}; allowed are 0 to {}, and -1 for none",
        fault.slot / shape.top_k, fault.slot % shape.top_k, refusals.id, shape.experts - 1));
  }
  if (rank == world.rank() && fault.expert != CombineFault::kNone) {
    return wrong(fmt::format(
        "the rows of expert {} (of this rank's) do not begin where those before it end, or reach "
        "behind the last row; expert offsets begin at 0 and never fall: give those of the dispatch",
        fault.expert));
  }
  if (rank == world.rank() && fault.row != CombineFault::kNone) {
    const MoeRow& row = refusals.row;
    return wrong(fmt::format(
        "row {} is of rank {}, token {}, slot {}; there are {} ranks of at most {} tokens with {} "
        "slots: give the rows of the dispatch",
        fault.row, row.rank, row.token, row.slot, world.size(), shape.tokens_max, shape.top_k));
  }
  if (refusals.verdict.incomplete != 0 && rank == world.rank()) {
    if (refusals.rows == RoutingPlan::kNoRows) {
      return {ErrorCode::kLimitExceeded,
              fmt::format("{}: this rank's dispatch was refused, so there is nothing to combine; "
                          "its own error says why",
                          launch)};
    }
    return {ErrorCode::kLimitExceeded,
            fmt::format("{}: this rank's dispatch had no room for its {} rows, so there is nothing "
                        "to combine; dispatch again with more room on this rank",
                        launch, refusals.rows)};
  }
  if (refusals.verdict.incomplete != 0) {
    return {ErrorCode::kLimitExceeded,
            fmt::format("{}: rank {} has no rows to combine, because its dispatch had no room for "
                        "them or was refused, or because its handle makes no sense; its own error "
                        "says which. Dispatch again, with more room there",
                        launch, rank)};
  }
  return wrong(fmt::format(
      "the rows that rank {} combines are not those of this rank's {} tokens; give every rank the "
      "rows, offsets and ids of the same dispatch",
      rank, tokens));
}

std::uint64_t CombinePlan::fingerprint() const {
  constexpr std::uint64_t kRules = 2;
  return fingerprint_of({flags().rules(kRules), nodes, locals, shape.tokens_max, shape.hidden,
                         shape.features, shape.experts, shape.top_k,
                         static_cast<std::uint64_t>(shape.partials),
                         static_cast<std::uint64_t>(dtype), tile_m, tile_n, steps, chunk_tokens,
                         banks, layout.bytes});
}

}  // namespace mk::kernels
