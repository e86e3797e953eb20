#include "kernels/ops/ag_gemm/spec.h"

#include "kernels/comm/shard.h"
#include "kernels/gather/plan.h"
#include "kernels/ops/ag_gemm/schedule.h"

namespace mk::kernels {
namespace {

constexpr std::uint64_t kTilesWanted = 16;  ///< of one rank

/// Tiles never straddle shards.
std::uint64_t tile_count(const AgGemmPlan& plan, const TileSides& tile) {
  const std::uint32_t world = plan.nodes * plan.locals;
  const std::uint32_t rows = shard_rows_max(plan.max.m, world);
  return std::uint64_t{world} * div_up(rows, tile.rows) * div_up(plan.max.n, tile.columns);
}

}  // namespace

Result<AgGemmPlan> AgGemmPlan::make(std::uint32_t nodes, std::uint32_t locals, Shape max,
                                    DType dtype, const Tiling& tiling, const Epilogue& epilogue) {
  MK_RETURN_IF_ERROR(check_world("ag_gemm", nodes, locals));
  MK_RETURN_IF_ERROR(check_side("ag_gemm", "m", max.m));
  MK_RETURN_IF_ERROR(check_side("ag_gemm", "n", max.n));
  MK_RETURN_IF_ERROR(check_side("ag_gemm", "k", max.k));
  MK_RETURN_IF_ERROR(check_dtype("ag_gemm", dtype));
  MK_RETURN_IF_ERROR(check_tiling("ag_gemm", tiling));
  MK_RETURN_IF_ERROR(check_result("ag_gemm", {epilogue}, max.n));
  AgGemmPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.max = max;
  plan.dtype = dtype;
  plan.epilogue = epilogue;
  const TileSides sides = choose_tile_sides(
      tiling, kTilesWanted, [&](const TileSides& tile) { return tile_count(plan, tile); });
  plan.tile_m = sides.rows;
  plan.tile_n = static_cast<std::uint32_t>(round_up_to(sides.columns, epilogue.column_step()));
  const GatherShape shape{shard_rows_max(max.m, nodes * locals), max.k * kElementBytes};
  MK_ASSIGN_OR_RETURN(auto gather,
                      GatherPlan::make("ag_gemm", nodes, locals, shape, GatherKind::kBroadcast,
                                       tiling.chunk_bytes, tiling.banks, tiling.local_banks));
  WorkspaceLayout workspace(locals);
  gather.place(workspace, 0);
  workspace.begin_data();
  gather.place_rows(workspace);
  plan.gather = gather;
  plan.workspace = workspace.parts();
  plan.workspace_bytes = plan.workspace.bytes();
  MK_RETURN_IF_ERROR(check_workspace("ag_gemm", plan.workspace_bytes));
  return plan;
}

void AgGemmPlan::move_data(std::uint64_t by) {
  workspace.data_at += by;
  gather.layout.slots += by;
}

std::uint32_t AgGemmPlan::flag_count() const { return GatherPlan{gather}.flag_count(); }

void* AgGemmPlan::input(const RankContext& context) const {
  const World& world = context.world;
  if (world.size() == 1) return nullptr;
  return context.workspaces[world.local] + GatherSchedule(gather, world).own_rows_in_place();
}

Result<bool> AgGemmPlan::in_place(const RankContext& context, const void* shard,
                                  std::uint64_t lda) const {
  const std::byte* const own = context.workspaces[context.world.local];
  const auto* const at = static_cast<const std::byte*>(shard);
  const std::byte* const data = own + workspace.data_at;
  if (at == nullptr || own == nullptr || at < data || at >= data + workspace.data) return false;
  if (at != input(context) || lda != max.k) {
    return fail(ErrorCode::kInvalidArgument,
                "ag_gemm: a lies in the operator's own memory; there it may only begin at input(), "
                "with rows of {} elements and no gaps between them",
                max.k);
  }
  return nodes > 1;
}

LaunchWork AgGemmPlan::work(const World& world, std::uint32_t m) const {
  const AgGemmSchedule schedule(*this, world, m);
  LaunchWork work;
  work.flops = 2.0 * m * max.n * max.k;
  work.local_bytes = static_cast<double>(schedule.local_bytes());
  work.network_bytes = static_cast<double>(schedule.network_bytes());
  work.commands = schedule.commands();
  work.steps =
      nodes > 1 ? work.commands : schedule.gather().chunks(schedule.shard(world.rank()).count);
  return work;
}

std::uint64_t AgGemmPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 1;
  return fingerprint_of({kRules, max.m, max.k, static_cast<std::uint64_t>(dtype),
                         GatherPlan{gather}.fingerprint(), workspace_bytes});
}

}  // namespace mk::kernels
