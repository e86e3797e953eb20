/// \file
/// What the blocks of one Ring Attention launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/gather/copy_job.h"
#include "kernels/ring_attention/geometry.h"

namespace mk::kernels {

/// Launch::m is the length of the whole sequence.
struct RingAttentionLaunch : Launch {
  RingAttentionGeometry plan;
  GatherSource keys_values;  ///< this rank's rows, in the caller's memory: pieces K and V
};

}  // namespace mk::kernels
