/// \file
/// One plan per job: all ranks of an operator go by rank 0's machine file and tuned.json, and by
/// one shape, so that they choose alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/comm/launch_work.h"
#include "kernels/comm/types.h"
#include "kernels/plan/job_plan.h"
#include "mkernel/types.h"

namespace mk {

/// What a session knows of its network.
struct NetworkSeen {
  std::string_view fabric;
  double bytes_per_s = 0;  ///< of its links, as the daemon has it; 0: nothing is known
};

/// This rank's machine: what `tuning` names, else $MKERNEL_MACHINE (a file or the name of a shipped
/// machine), else `here`; with the network's own rate. On CPUs the variable may name a GPU, which
/// is of no effect. kNotFound, kInvalidArgument.
Result<kernels::plan::Machine> own_machine(const NetworkSeen& network, const Tuning& tuning,
                                           const kernels::plan::Machine& here);

/// What this rank would plan by: own_machine(), with the caller's rates, and the file of choices
/// that `tuning` names, else $MKERNEL_TUNED, else the shipped ones. Of choices those for the world.
/// kNotFound, kInvalidArgument.
Result<kernels::plan::JobPlan> own_plan(std::uint32_t nodes, std::uint32_t locals,
                                        const NetworkSeen& network, const Tuning& tuning,
                                        const kernels::MachineRates& rates,
                                        const kernels::plan::Machine& machine);

/// What all ranks plan by, and the texts' hashes by which they agreed on it.
struct JobPlanSeen {
  std::vector<std::uint64_t> hashes;
  std::shared_ptr<const kernels::plan::JobPlan> job;
};

/// How the ranks of a session hear of each other.
struct PlanExchange {
  /// Every rank's blob, by rank. `kind` is the same on all ranks; `refuses`: this rank does not
  /// wait for the others.
  std::function<Result<std::vector<std::vector<std::byte>>>(
      std::string_view kind, std::span<const std::byte> blob, bool refuses)>
      exchange;
  std::uint32_t world = 1;
  bool is_first = false;  ///< rank 0
};

struct AgreedPlan {
  std::shared_ptr<const kernels::plan::JobPlan> job;
  kernels::Shape shape;  ///< the largest n and k of all ranks
};
/// Collective: what all ranks plan by, the slower machine where they have several. Texts go round
/// only where they are others than those `seen`. `own` may be an error, which all ranks then
/// answer. Rank 0 says on stderr, once for a plan, which ranks have another machine or another
/// file.
Result<AgreedPlan> agree_plan(const PlanExchange& ranks, JobPlanSeen& seen,
                              const kernels::Shape& shape,
                              const Result<kernels::plan::JobPlan>& own);
/// Not collective: what that answered last, or `own`.
Result<AgreedPlan> expected_plan(const JobPlanSeen& seen, const kernels::Shape& shape,
                                 const Result<kernels::plan::JobPlan>& own);

}  // namespace mk
