/// \file
/// The largest worlds that operators' plans describe. A session holds less today (shm/limits.h):
/// a larger world can be planned and simulated, not run.
#pragma once

#include <cstdint>

#include "kernels/comm/sum_job.h"
#include "shm/limits.h"

namespace mk::kernels {

inline constexpr std::uint32_t kPlanNodesMax = 1024;
inline constexpr std::uint32_t kPlanRanksMax = 8 * kPlanNodesMax;

static_assert(kPlanNodesMax >= shm::kNodesMax && kPlanRanksMax >= shm::kWorldMax);
static_assert(kSumSourcesMax >= kPlanNodesMax, "operators that sum add up all nodes at once");
static_assert(kPlanRanksMax < 1u << 16, "a command names its peer in 16 bits");

}  // namespace mk::kernels
