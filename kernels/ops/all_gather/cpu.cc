#include "kernels/cpu/collective.h"
#include "kernels/cpu/copy_rows.h"
#include "kernels/cpu/gather_tasks.h"
#include "kernels/cpu/pacer.h"
#include "kernels/ops/all_gather/spec.h"

namespace mk::kernels {
namespace {

struct AllGather {
  static constexpr const char* kName = "all_gather";
  using Plan = AllGatherPlan;
  using Launch = AllGatherLaunch;

  /// Stores and loads are this thread's own plain ones, so flags order them without further ado.
  struct Executor : CpuPacer {
    explicit Executor(const Launch&) {}
    static void copy(const CopyJob& job) { copy_rows(job); }
    void stores_done() {}
    void loads_begin() {}
  };

  static const AllGatherGeometry& geometry(const Plan& plan) { return plan; }
  static std::vector<RoleThread> threads(const RoleBlocks& blocks, const World& world) {
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCollect, blocks.compute);
    if (world.size() > 1) add_role(threads, Role::kShare, blocks.share);
    if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
    if (world.nodes > 1 && world.locals > 1) add_role(threads, Role::kReceive, blocks.receive);
    return threads;
  }

  static Status bind(const Plan& plan, const void* input, void* output, std::uint32_t m,
                     Launch& launch) {
    const World& world = launch.context.world;
    const std::uint32_t rows = shard_of(m, world.size(), world.rank()).count;
    if (input == nullptr && rows != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "all_gather: the input is null, but of {} rows rank {} brings {}", m,
                  world.rank(), rows);
    }
    if (output == nullptr)
      return fail(ErrorCode::kInvalidArgument, "all_gather: the output is null");
    MK_ASSIGN_OR_RETURN(launch.in_place, plan.in_place(launch.context, input));
    launch.rows = GatherSource::of(input, plan.gather.row_bytes, plan.gather.row_bytes, rows);
    launch.all = static_cast<std::byte*>(output);
    return {};
  }

  static std::uint32_t chunks_sent(const Launch& launch) {
    return gather_chunks_sent(
        launch.schedule, [&launch](std::uint32_t rank) { return launch.shards.of(rank).count; });
  }

  static std::array<std::uint32_t, shm::kProgressSizes> sizes(const Plan& plan) {
    return {plan.gather.row_bytes};
  }

  static bool run_role(Executor& executor, const Launch& launch, Role role, std::uint32_t index,
                       BlockTotals& totals) {
    AllGatherBlock<Executor> block(executor, launch, role, index, totals);
    return all_gather::run_role(block);
  }
};

}  // namespace

Result<std::unique_ptr<CollectiveCpu>> make_all_gather_cpu(const AllGatherPlan& plan,
                                                           const RankContext& context,
                                                           const CpuOptions& options) {
  return CollectiveRunner<AllGather>::create(plan, context, options);
}

}  // namespace mk::kernels
