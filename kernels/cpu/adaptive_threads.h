/// \file
/// A partition of an operator's threads that adapts from launch to launch: how many of them
/// compute, and how many bring rows and sum. Within a launch each thread keeps its role, which runs
/// unchanged. For operators whose tasks show only while a launch runs, or wait for each other in
/// passes (of others: adaptive_roles.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/comm/launch.h"
#include "kernels/comm/partition_searches.h"
#include "kernels/comm/partition_step.h"

namespace mk::kernels {

/// Not thread-safe.
class AdaptiveThreads {
 public:
  /// Null: not `wanted`, or there is nothing to deal out. `roles`: those whose threads may become
  /// compute threads, or the other way round, of those that the operator has in its world. Each
  /// keeps one thread.
  static std::unique_ptr<AdaptiveThreads> create(bool wanted, const RoleBlocks& blocks,
                                                 std::vector<Workers RoleBlocks::*> roles) {
    std::uint32_t others = 0;
    for (const auto role : roles) others += (blocks.*role).count();
    const std::uint32_t all = blocks.compute.count() + others;
    const auto count = static_cast<std::uint32_t>(roles.size());
    const std::uint32_t least = std::max(count, all > kBlocksMax ? all - kBlocksMax : 0);
    const std::uint32_t most = std::min(all - 1, kBlocksMax);
    if (!wanted || roles.empty() || least >= most) return nullptr;
    return std::unique_ptr<AdaptiveThreads>(
        new AdaptiveThreads(blocks, std::move(roles), all, least, most, others));
  }

  /// Compute threads of a launch, at most.
  std::uint32_t most_compute() const { return all_ - least_; }

  /// Before a launch of `rows`: its blocks. `adapts`: else it has the first one's.
  void choose(std::uint32_t rows, bool adapts, std::uint64_t now_ns, RoleBlocks& blocks) {
    const std::uint32_t target =
        adapts ? searches_.choose(alike_count(rows), true) : searches_.choose_first();
    deal(target, blocks);
    step_ = {now_ns, target, target};
  }
  /// After it.
  void measured(std::uint64_t ns) {
    if (Time* const time = searches_.next_measurement()) time->its_ns = ns;
  }

  PartitionStats stats() const { return searches_.stats(); }
  /// The last launch's.
  const PartitionStep& step() const { return step_; }

 private:
  /// A launch's that has ended.
  struct Time {
    std::uint64_t its_ns = 0;

    static bool is_there() { return true; }
    std::uint64_t ns() const { return its_ns; }
  };

  AdaptiveThreads(const RoleBlocks& blocks, std::vector<Workers RoleBlocks::*> roles,
                  std::uint32_t all, std::uint32_t least, std::uint32_t most, std::uint32_t start)
      : planned_(blocks),
        roles_(std::move(roles)),
        all_(all),
        least_(least),
        searches_(least, most, std::clamp(start, least, most)) {}

  /// The roles have as much of `target` as they have of the planned threads.
  void deal(std::uint32_t target, RoleBlocks& blocks) const {
    blocks.compute = all_ - target;
    std::uint32_t planned = all_ - planned_.compute.count();
    auto behind = static_cast<std::uint32_t>(roles_.size());
    for (const auto role : roles_) {
      --behind;
      const std::uint32_t share = (planned_.*role).count();
      const std::uint32_t part = (2 * target * share + planned) / (2 * planned);
      blocks.*role = std::clamp(part, 1u, target - behind);
      target -= (blocks.*role).count();
      planned -= share;
    }
  }

  const RoleBlocks planned_;
  const std::vector<Workers RoleBlocks::*> roles_;
  const std::uint32_t all_, least_;
  PartitionSearches<Time> searches_;
  PartitionStep step_;
};

/// Compute threads that an operator needs; `adaptive` may be null.
inline std::uint32_t compute_threads(const AdaptiveThreads* adaptive, const RoleBlocks& blocks) {
  return adaptive != nullptr ? adaptive->most_compute() : blocks.compute.count();
}

}  // namespace mk::kernels
