/// \file
/// What a launch's account on the GPU (LaunchAccount) says, for an operator that keeps accounts of
/// several launches.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_stats.h"
#include "kernels/cuda/skeleton/launch_state.h"

namespace mk::kernels::cuda {

/// DeviceState::accounts, kept of a launch that others followed.
struct LaunchAccounts {
  LaunchAccount of[2];
};

/// All of the statistics but m, form and estimate.
LaunchStats stats_of(const LaunchAccount& account, std::uint32_t epoch);

}  // namespace mk::kernels::cuda
