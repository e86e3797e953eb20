#include "kernels/cpu/collective.h"
#include "kernels/cpu/copy_rows.h"
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

  static std::vector<RoleThread> threads(const RoleBlocks& blocks, const World& world) {
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCollect, blocks.compute);
    if (world.size() > 1) add_role(threads, Role::kShare, blocks.share);
    if (world.nodes > 1) add_role(threads, Role::kSend, blocks.send);
    if (world.nodes > 1 && world.locals > 1) add_role(threads, Role::kReceive, blocks.receive);
    return threads;
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
