/// \file
/// What the tests of Ring Attention on GPUs have in common: the worlds they run in, and how a
/// launch of all ranks is made and judged.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/gpu/on_gpus.h"
#include "tests/gpu/ring_ranks.h"

namespace mk::test {

using kernels::DType;
using kernels::Mode;
using kernels::RingAttentionShape;

class RingOnGpus : public OnGpus<GpuWorld> {
 protected:
  static RingSetup setup(const RingAttentionShape& shape) {
    auto setup = placed<RingSetup>();
    setup.shape = shape;
    return setup;
  }
  static std::string shape_text(const RingSetup& setup, std::uint32_t seq) {
    const RingAttentionShape& shape = setup.shape;
    return std::to_string(seq) + " rows, batch " + std::to_string(shape.batch) + ", heads " +
           std::to_string(shape.query_heads) + ":" + std::to_string(shape.key_heads) + ", dim " +
           std::to_string(shape.head_dim) + (shape.causal ? ", causal" : "") +
           (setup.layout == HeadLayout::kRowsFirst ? "" : ", heads first");
  }

  void judge(RingRanks& ranks) {
    const AttentionVerdict verdict = ranks.judge();
    worst_ = std::max({worst_, verdict.o.worst, verdict.lse.worst});
    ASSERT_TRUE(verdict.right()) << "O: " << verdict.o.bad << " wrong, the first "
                                 << verdict.o.first_bad << ", worst " << verdict.o.worst
                                 << " of its bound; LSE: " << verdict.lse.bad << ", "
                                 << verdict.lse.first_bad << ", " << verdict.lse.worst;
  }
  void check(RingRanks& ranks, std::uint32_t seq, Mode mode, RingInputs inputs = {}) {
    SCOPED_TRACE(shape_text(ranks.setup(), seq));
    inputs.seed = fresh_seed();
    ranks.fill(seq, inputs);
    check_filled(ranks, mode);
  }
  /// Of a shape with sequences_max: sequences of these lengths.
  void check_packed(RingRanks& ranks, const std::vector<std::uint32_t>& lengths, Mode mode,
                    RingInputs inputs = {}) {
    SCOPED_TRACE("lengths " + testing::PrintToString(lengths));
    inputs.seed = fresh_seed();
    ranks.fill_packed(lengths, inputs);
    check_filled(ranks, mode);
  }
  void check_filled(RingRanks& ranks, Mode mode) {
    launch_all(ranks, mode, true);
    if (HasFatalFailure()) return;
    finish_all(ranks);
    if (!HasFatalFailure()) judge(ranks);
  }
};

inline constexpr GpuWorld kRingWorlds[] = {{1, 1, 1}, {1, 2, 1}, {1, 3, 1}, {1, 4, 1}, {2, 1, 1},
                                           {2, 2, 1}, {2, 4, 1}, {4, 1, 1}, {1, 2, 2}, {1, 4, 4},
                                           {2, 1, 2}, {2, 2, 4}, {4, 1, 4}, {1, 8, 8}, {2, 4, 8}};

}  // namespace mk::test
