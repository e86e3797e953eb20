/// \file
/// What the blocks of one Ring Attention launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/ops/ring/geometry.h"
#include "kernels/ops/ring/key_source.h"

namespace mk::kernels {

/// Launch::m is the length of the whole sequence.
struct RingAttentionLaunch : Launch {
  RingAttentionGeometry plan;
  KeySource keys_values;  ///< this rank's, in the caller's memory
};

}  // namespace mk::kernels
