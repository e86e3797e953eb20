/// \file
/// What the tests of Ring Attention on GPUs have in common: the worlds they run in, and how a
/// launch of all ranks is made and judged.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/devices.h"
#include "tests/gpu/products.h"
#include "tests/gpu/ring_ranks.h"

namespace mk::test {

using kernels::DType;
using kernels::Mode;
using kernels::RingAttentionShape;

/// All ranks and proxies are one process here. With CUDA's 8 connections to a GPU, a proxy's copy
/// may get in line behind launches that wait for it.
[[maybe_unused]] inline const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

struct RingWorld {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  int devices = 1;
};

class RingOnGpus : public testing::TestWithParam<RingWorld> {
 protected:
  void SetUp() override {
    if (device_count() < GetParam().devices)
      GTEST_SKIP() << "needs " << GetParam().devices << " CUDA devices";
  }
  static std::uint32_t world() { return GetParam().nodes * GetParam().locals; }
  static RingSetup setup(const RingAttentionShape& shape) {
    RingSetup setup;
    setup.nodes = GetParam().nodes;
    setup.locals = GetParam().locals;
    setup.devices = GetParam().devices;
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

  void launch_all(RingRanks& ranks, Mode mode, bool late) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      if (late && random_() % 3 == 0) {
        ranks.make_current(r);
        delay(random_() % 200'000, ranks.stream(r));
      }
      const Status launched = ranks.launch(r, mode);
      ASSERT_TRUE(launched) << launched.error().message;
    }
  }
  void finish_all(RingRanks& ranks) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_TRUE(finished) << finished.error().message;
    }
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
  void TearDown() override {
    if (worst_ > 0) RecordProperty("worst_error_over_bound", std::to_string(worst_));
  }

  std::mt19937_64 random_{std::random_device{}()};
  double worst_ = 0;
};

inline constexpr RingWorld kRingWorlds[] = {{1, 1, 1}, {1, 2, 1}, {1, 3, 1}, {1, 4, 1}, {2, 1, 1},
                                            {2, 2, 1}, {2, 4, 1}, {4, 1, 1}, {1, 2, 2}, {1, 4, 4},
                                            {2, 1, 2}, {2, 2, 4}, {4, 1, 4}};

inline std::string name_of_world(const testing::TestParamInfo<RingWorld>& world) {
  return std::to_string(world.param.nodes) + "x" + std::to_string(world.param.locals) + "_on_" +
         std::to_string(world.param.devices);
}

}  // namespace mk::test
