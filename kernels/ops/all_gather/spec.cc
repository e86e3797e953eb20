#include "kernels/ops/all_gather/spec.h"

#include <fmt/format.h>

#include "kernels/comm/plan_tools.h"
#include "kernels/gather/plan.h"

namespace mk::kernels {
namespace {

constexpr std::string_view kOp = "all_gather";

}  // namespace

Result<AllGatherPlan> AllGatherPlan::make(std::uint32_t nodes, std::uint32_t locals,
                                          std::uint32_t m_max, std::uint32_t n, DType dtype,
                                          const Tiling& tiling) {
  MK_RETURN_IF_ERROR(check_world(kOp, nodes, locals));
  MK_RETURN_IF_ERROR(check_side(kOp, "m", m_max));
  MK_RETURN_IF_ERROR(check_side(kOp, "n", n));
  AllGatherPlan plan;
  plan.nodes = nodes;
  plan.locals = locals;
  plan.m_max = m_max;
  plan.n = n;
  plan.dtype = dtype;
  const GatherShape shape{shard_rows_max(m_max, nodes * locals), n * bytes_of(dtype)};
  MK_ASSIGN_OR_RETURN(auto gather,
                      GatherPlan::make(kOp, nodes, locals, shape, GatherKind::kBroadcast,
                                       tiling.chunk_bytes, tiling.banks, tiling.local_banks));
  WorkspaceLayout workspace(locals);
  gather.place(workspace, 0);
  workspace.begin_data();
  gather.place_rows(workspace);
  plan.gather = gather;
  plan.workspace = workspace.parts();
  plan.workspace_bytes = plan.workspace.bytes();
  MK_RETURN_IF_ERROR(check_workspace(kOp, plan.workspace_bytes));
  return plan;
}

void AllGatherPlan::move_data(std::uint64_t by) {
  workspace.data_at += by;
  gather.layout.slots += by;
}

std::uint32_t AllGatherPlan::flag_count() const { return GatherPlan{gather}.flag_count(); }

void* AllGatherPlan::input(const RankContext& context) const {
  const World& world = context.world;
  if (world.size() == 1) return nullptr;
  return context.workspaces[world.local] + GatherSchedule(gather, world).own_rows_in_place();
}

Result<bool> AllGatherPlan::in_place(const RankContext& context, const void* rows) const {
  const std::byte* const own = context.workspaces[context.world.local];
  const auto* const at = static_cast<const std::byte*>(rows);
  const std::byte* const data = own + workspace.data_at;
  if (at == nullptr || own == nullptr || at < data || at >= data + workspace.data) return false;
  if (at != input(context)) {
    return fail(ErrorCode::kInvalidArgument,
                "all_gather: the input lies in the operator's own memory; there it may only begin "
                "at input()");
  }
  return nodes > 1;
}

Status AllGatherPlan::bind(const void* input, void* output, std::uint32_t m,
                           AllGatherLaunch& launch) const {
  const World& world = launch.context.world;
  const std::uint32_t rows = shard_of(m, world.size(), world.rank()).count;
  if (input == nullptr && rows != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "all_gather: the input is null, but of {} rows rank {} brings {}", m, world.rank(),
                rows);
  }
  if (output == nullptr) return fail(ErrorCode::kInvalidArgument, "all_gather: the output is null");
  MK_ASSIGN_OR_RETURN(launch.in_place, in_place(launch.context, input));
  launch.rows = GatherSource::of(input, gather.row_bytes, gather.row_bytes, rows);
  launch.all = static_cast<std::byte*>(output);
  return {};
}

LaunchWork AllGatherPlan::work(const World& world, std::uint32_t m) const {
  const GatherSchedule schedule(gather, world);
  const auto rows_of = [&](std::uint32_t rank) { return shard_of(m, world.size(), rank).count; };
  LaunchWork work;
  // The roles' part, and the output, read once and written once.
  work.local_bytes =
      static_cast<double>(schedule.local_bytes(rows_of) + 2 * schedule.data_bytes(m));
  work.network_bytes = static_cast<double>(schedule.network_bytes(rows_of));
  work.commands = schedule.commands(rows_of);
  work.steps = nodes > 1 ? work.commands : schedule.chunks(rows_of(world.rank()));
  return work;
}

std::uint64_t AllGatherPlan::fingerprint() const {
  constexpr std::uint64_t kRules = 1;
  return fingerprint_of({kRules, m_max, n, static_cast<std::uint64_t>(dtype),
                         GatherPlan{gather}.fingerprint(), workspace_bytes});
}

std::string AllGatherPlan::describe() const {
  return fmt::format("m_max={} n={} dtype={} chunk_bytes={} banks={} plan={:016x}", m_max, n,
                     name_of(dtype), gather.chunk_bytes, gather.banks, fingerprint());
}

}  // namespace mk::kernels
