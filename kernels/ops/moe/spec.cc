#include "kernels/ops/moe/spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>

#include "kernels/comm/shard.h"
#include "kernels/ops/moe/routing_plan.h"
#include "kernels/ops/moe/schedule.h"

namespace mk::kernels {
namespace {

constexpr std::string_view kOp = "moe_dispatch";
constexpr std::uint32_t kTopKMax = 1024;
constexpr std::uint32_t kTilesWanted = 16;  ///< of one rank

/// Copy engines.
Status check_engines(std::uint32_t locals, const MoeDispatchWay& way) {
  if (!way.engines) return {};
  const auto refused = [](std::string_view why) -> Status {
    return fail(ErrorCode::kInvalidArgument, "{}: copy engines bring no tokens here: {}", kOp, why);
  };
  if (locals == 1) return refused("a rank that is alone on its node has nobody to bring them to");
  if (way.kind != GatherKind::kBroadcast)
    return refused("ranks pull them from where they landed; a broadcast can have engines");
  return {};
}

Status check_shape(const MoeDispatchShape& shape, std::uint32_t world) {
  MK_RETURN_IF_ERROR(check_side(kOp, "tokens_max", shape.tokens_max));
  MK_RETURN_IF_ERROR(check_side(kOp, "hidden", shape.hidden));
  MK_RETURN_IF_ERROR(check_side(kOp, "features", shape.features));
  MK_RETURN_IF_ERROR(check_side(kOp, "experts", shape.experts));
  if (shape.hidden % 8 != 0 || shape.features % 8 != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: hidden = {} and features = {} must be multiples of 8", kOp, shape.hidden,
                shape.features);
  }
  if (shape.epilogue > MoeEpilogue::kGatedSiluInterleaved) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: there is no epilogue {}; 0 is none, 1 gated SiLU, 2 the same interleaved", kOp,
                static_cast<int>(shape.epilogue));
  }
  if (shape.top_k < 1 || shape.top_k > std::min(shape.experts, kTopKMax)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: a token goes to 1 to {} of {} experts (top_k), not to {}", kOp,
                std::min(shape.experts, kTopKMax), shape.experts, shape.top_k);
  }
  const std::uint64_t most = std::uint64_t{world} * shape.tokens_max;
  if (most > std::numeric_limits<std::uint32_t>::max() / shape.top_k) {
    return fail(ErrorCode::kLimitExceeded,
                "{}: {} ranks with {} tokens of {} slots each are too many rows; at most {}", kOp,
                world, shape.tokens_max, shape.top_k, std::numeric_limits<std::uint32_t>::max());
  }
  if (shape.rows_max > most * shape.top_k) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: rows_max = {} is more than the {} rows that all tokens can give", kOp,
                shape.rows_max, most * shape.top_k);
  }
  return {};
}

void choose_tiles(MoeDispatchPlan& plan, const Tiling& tiling, std::uint32_t world) {
  const MoeDispatchShape& shape = plan.shape;
  const std::uint64_t experts = shard_rows_max(shape.experts, world);
  const std::uint64_t rows = std::uint64_t{shape.tokens_max} * shape.top_k;  // at even routing
  const TileSides sides = choose_tile_sides(tiling, kTilesWanted, [&](const TileSides& tried) {
    const std::uint64_t of_expert = (rows + experts * tried.rows - 1) / (experts * tried.rows);
    return experts * of_expert * div_up(shape.features, tried.columns);
  });
  plan.tile_m = sides.rows;
  plan.tile_n = sides.columns;
  plan.row_pad = row_tile_pad(sides.rows);
}

void lay_out(MoeDispatchPlan& plan, WorkspaceLayout& workspace) {
  const RoutingShape shape = routing_shape(plan, World{plan.nodes, plan.locals, 0, 0});
  const std::uint64_t experts = shape.experts_here_max();
  constexpr std::uint64_t kLine = 64;
  MoeDispatchLayout& layout = plan.layout;
  layout.words = workspace.place(sizeof(MoePlanWords), kLine);
  layout.counts = workspace.place(shape.count_words() * 4, kLine);
  layout.places = workspace.place(shape.place_words() * 4, kLine);
  layout.offsets = workspace.place((experts + 1) * 4, kLine);
  layout.tiles = workspace.place(shape.tiles_max() * sizeof(RowTile), kLine);
  layout.rows = workspace.place(std::uint64_t{shape.rows_max} * sizeof(MoeRow), kLine);
  layout.rows_packed = workspace.place(shape.tiles_max() * 4, kLine);
  workspace.begin_data();
  layout.packed =
      workspace.place(shape.packed_rows_max() * plan.shape.hidden * kElementBytes, kPage);
}

}  // namespace

void MoeDispatchPlan::move_data(std::uint64_t by) {
  workspace.data_at += by;
  layout.packed += by;
  routing.layout.slots += by;
  tokens.layout.slots += by;
}

Error MoeDispatchPlan::refusal(const World& world, std::uint32_t epoch, std::uint32_t capacity,
                               const PlanSummary& summary) const {
  const std::string launch = fmt::format("{} launch {} on rank {}", kOp, epoch, world.rank());
  const RoutingFault& fault = summary.fault;
  if (!fault.any()) {
    return {ErrorCode::kLimitExceeded,
            fmt::format("{}: the routing sends {} rows to this rank's experts, the output has room "
                        "for {}; give it more (this operator can take {})",
                        launch, summary.rows, capacity, shape.rows_max)};
  }
  const std::string slot =
      fmt::format("rank {}'s token {}, slot {}", fault.rank, fault.token, fault.slot);
  if (fault.id >= 0 && static_cast<std::uint32_t>(fault.id) < shape.experts) {
    return {ErrorCode::kInvalidArgument,
            fmt::format("{}: the weight of {} is not a number; no rank computed anything", launch,
                        slot)};
  }
  return {ErrorCode::kInvalidArgument,
          fmt::format("{}: {} goes to expert {}; allowed are 0 to {}, and -1 for none; no rank "
                      "computed anything",
                      launch, slot, fault.id, shape.experts - 1)};
}

Status MoeDispatchPlan::check_bias(const World& world, const MoeDispatchInput& input) const {
  if (shape.bias && input.bias == nullptr && experts_of(shape.experts, world).count > 0)
    return fail(ErrorCode::kInvalidArgument, "{}: bias is null; the operator was made for one",
                kOp);
  if (!shape.bias && input.bias != nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: there is a bias; the operator was made without (its shape says so)", kOp);
  }
  return {};
}

MoeDispatchWay moe_dispatch_cuda_way(std::uint32_t nodes) {
  // Over nodes tokens come for long: a guess.
  constexpr std::uint32_t kStepsOverNodes = 2;
  return {GatherKind::kBroadcast, nodes > 1 ? kStepsOverNodes : 1};
}

std::uint32_t moe_dispatch_plan_groups(std::uint32_t streams, std::uint32_t nodes,
                                       std::uint32_t locals, bool by_dma) {
  // Nobody shares where there is one rank, and little where copy engines bring all tokens. Else all
  // can pull when tokens come, and until then routing is all that there is to work on.
  const bool shares = nodes > 1 || (locals > 1 && !by_dma);
  return std::clamp(shares ? streams / 2 : streams, 1u, kBlocksMax);
}

std::uint64_t moe_dispatch_dma_bytes(std::uint64_t bytes) {
  // The first tiles wait for nearly all tokens, and each piece costs time.
  constexpr std::uint64_t kPieces = 4;
  constexpr std::uint64_t kLeast = 8 << 20;
  constexpr std::uint64_t kMost = 1 << 30;  // a copy's
  return std::clamp((bytes + kPieces - 1) / kPieces, kLeast, kMost);
}

LaunchWork MoeDispatchPlan::work(const World& world, std::uint32_t count) const {
  const MoeDispatchSchedule schedule(*this, world);
  const auto everywhere = [count](std::uint32_t) { return count; };
  const double rows = static_cast<double>(count) * world.size() * shape.top_k *
                      experts_of(shape.experts, world).count / shape.experts;
  const double token_bytes = schedule.token_bytes();
  LaunchWork work;
  work.flops = 2 * rows * shape.hidden * shape.weight_columns();
  work.local_bytes = 2 * rows * token_bytes;  // pulled
  if (world.size() > 1)
    work.local_bytes += 2.0 * count * (token_bytes + shape.top_k * kRoutingBytes);  // shared
  work.network_bytes = static_cast<double>(schedule.network_bytes(everywhere));
  // Tokens come chunk by chunk, over each of the links between the nodes.
  const std::uint32_t chunks = schedule.tokens().chunks(count);
  work.steps = std::max(1u, (chunks - 1) * std::max(1u, nodes - 1));
  if (nodes > 1) {
    const std::uint32_t releases = schedule.routing().flags().has_releases() ? 2 : 0;
    work.commands = (nodes - 1) * (schedule.routing().chunks(count) + chunks) + releases;
  }
  return work;
}

Result<MoeDispatchPlan> MoeDispatchPlan::make(std::uint32_t nodes, std::uint32_t locals,
                                              const MoeDispatchShape& shape, DType dtype,
                                              const Tiling& tiling, const MoeDispatchWay& way) {
  MK_RETURN_IF_ERROR(check_world(kOp, nodes, locals));
  MK_RETURN_IF_ERROR(check_dtype(kOp, dtype));
  MK_RETURN_IF_ERROR(check_tiling(kOp, tiling));
  MK_RETURN_IF_ERROR(check_row_tiles(kOp, tiling.tile_m));
  const std::uint32_t world = nodes * locals;
  MK_RETURN_IF_ERROR(check_shape(shape, world));
  MK_RETURN_IF_ERROR(check_engines(locals, way));
  MoeDispatchPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.shape = shape;
  plan.dtype = dtype;
  plan.banks = tiling.banks != 0 ? tiling.banks : kBanksMax;
  plan.steps = way.steps;
  plan.engines = way.engines;
  // Whatever the experts of a rank: a token may name one of them in all its slots.
  if (shape.rows_max == 0) plan.shape.rows_max = world * shape.tokens_max * shape.top_k;
  choose_tiles(plan, tiling, world);

  // With many nodes both gathers together have as many as any operator takes.
  const std::uint32_t flags_max =
      FlagMap{nodes, plan.banks}.shares_granules() ? kOperatorFlagsMax / 2 : kOperatorFlagsMax;
  const auto gather = [&](std::uint32_t row_bytes, std::uint32_t local_banks) {
    return GatherPlan::make(kOp, nodes, locals, {shape.tokens_max, row_bytes, flags_max}, way.kind,
                            tiling.chunk_bytes, plan.banks, local_banks);
  };
  MK_ASSIGN_OR_RETURN(GatherPlan routing, gather(shape.top_k * kRoutingBytes, plan.banks));
  MK_ASSIGN_OR_RETURN(GatherPlan tokens,
                      gather(shape.hidden * kElementBytes, way.engines ? 1 : plan.banks));
  WorkspaceLayout workspace(locals);
  routing.place(workspace, 0);
  tokens.place(workspace, routing.flag_count());
  lay_out(plan, workspace);
  routing.place_rows(workspace);
  tokens.place_rows(workspace);
  plan.routing = routing;
  plan.tokens = tokens;
  plan.workspace = workspace.parts();
  plan.layout.bytes = plan.workspace.bytes();
  MK_RETURN_IF_ERROR(check_workspace(kOp, plan.layout.bytes));

  constexpr std::uint64_t kRules = 4;
  plan.flags = routing.flag_count() + tokens.flag_count();
  plan.print = fingerprint_of(
      {kRules, routing.fingerprint(), tokens.fingerprint(), shape.experts, shape.top_k,
       shape.features, plan.shape.rows_max, static_cast<std::uint64_t>(dtype),
       static_cast<std::uint64_t>(shape.epilogue), shape.bias ? 1u : 0u, plan.tile_m, plan.tile_n,
       plan.steps, plan.engines ? 1u : 0u, plan.layout.bytes});
  return plan;
}

}  // namespace mk::kernels
