/// \file
/// What the blocks of one Ring Attention launch share.
#pragma once

#include "kernels/comm/launch.h"
#include "kernels/ops/ring/geometry.h"
#include "kernels/ops/ring/key_source.h"
#include "kernels/ops/ring/packed_sequences.h"

namespace mk::kernels {

/// Launch::m is the length of the whole sequence; of a packed launch, PackedTables::digest.
struct RingAttentionLaunch : Launch {
  RingAttentionGeometry plan;
  KeySource keys_values;  ///< this rank's, in the caller's memory
  /// Copy engines bring this rank's keys to the node's others, not share blocks.
  bool by_dma = false;
  PackedSequences packed;
};

}  // namespace mk::kernels
