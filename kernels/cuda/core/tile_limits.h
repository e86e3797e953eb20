/// \file
/// The tiles of the compiled kernels, at most. Plain C++.
#pragma once

#include <cstdint>

#include "kernels/comm/launch.h"

namespace mk::kernels::cuda {

inline constexpr std::uint32_t kTileRowsMax = 128;
inline constexpr std::uint32_t kTileColumnsMax = 256;

/// Tiles of a launch that are few: four turns of the SMs.
inline constexpr std::uint32_t kFewTiles = 4 * kBlocksMax;

}  // namespace mk::kernels::cuda
