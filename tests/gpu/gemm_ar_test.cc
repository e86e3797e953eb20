// GEMM + AllReduce as one kernel per rank: results, every element; the same bits on every rank and
// in every run; graphs; and the ways in which a launch ends when a rank is missing, disagrees, or
// is told to stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shm/atomic.h"
#include "tests/gpu/gemm_ar_ranks.h"

namespace mk::test {
namespace {

using kernels::BLayout;
using kernels::DType;
using kernels::Mode;
using testing::HasSubstr;
using namespace std::chrono_literals;

/// A rank with so long a product is late with every tile: who does not wait reads the last
/// launch's.
constexpr std::uint32_t kLongK = 8192;

struct World {
  std::uint32_t locals;
  int devices;
};

class GemmAr : public testing::TestWithParam<World> {
 protected:
  void SetUp() override {
    if (device_count() < GetParam().devices)
      GTEST_SKIP() << "needs " << GetParam().devices << " CUDA devices";
  }
  GemmArSetup setup(std::uint32_t m, std::uint32_t n, std::uint32_t k) const {
    return gemm_ar_setup(GetParam().locals, GetParam().devices, m, n, k);
  }
  std::uint64_t seed() { return random_() >> 16; }

  /// One launch with fresh inputs, checked.
  void check(GemmArRanks& ranks, std::uint32_t m, bool to_c, Mode mode) {
    SCOPED_TRACE("m " + std::to_string(m) + (to_c ? ", to c" : ", in the workspace"));
    ranks.launch_all(m, seed(), to_c, mode);
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_TRUE(finished) << finished.error().message;
    }
    const Verdict verdict = ranks.judge_all(m, to_c);
    worst_ = std::max(worst_, verdict.worst);
    ASSERT_TRUE(verdict.right()) << verdict.bad << " elements wrong, first " << verdict.first_bad;
  }
  void TearDown() override {
    if (worst_ > 0) RecordProperty("worst_error_over_bound", std::to_string(worst_));
  }

  std::mt19937_64 random_{std::random_device{}()};
  double worst_ = 0;
};

TEST_P(GemmAr, EveryElementOfManyShapes) {
  struct Shape {
    std::uint32_t m, n, k;
  };
  for (const Shape& shape :
       {Shape{1024, 1024, 256}, Shape{1000, 1048, 200}, Shape{257, 776, 1096}, Shape{64, 512, 64},
        Shape{7, 8, 8}, Shape{2048, 2048, 512}, Shape{300, 600, kLongK}}) {
    SCOPED_TRACE("n " + std::to_string(shape.n) + ", k " + std::to_string(shape.k));
    GemmArSetup with = setup(shape.m, shape.n, shape.k);
    for (std::uint32_t r = 0; r < with.locals; ++r) with.k[r] += 8 * r;
    if (shape.k == kLongK) with.k[0] = 40;
    GemmArRanks ranks(with);
    check(ranks, shape.m, true, Mode::kFused);
    check(ranks, shape.m, false, Mode::kUnfused);
    for (int i = 0; i < 6; ++i) {
      const auto m = static_cast<std::uint32_t>(1 + random_() % shape.m);
      check(ranks, m, random_() % 2 == 0, random_() % 4 == 0 ? Mode::kUnfused : Mode::kFused);
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(GemmAr, BothTypesAndLayoutsAndSizesOfTiles) {
  for (DType dtype : {DType::kBf16, DType::kF16}) {
    for (BLayout layout : {BLayout::kNK, BLayout::kKN}) {
      for (std::uint32_t columns : {64u, 128u, 256u}) {
        GemmArSetup with = setup(777, 1016, 264);
        with.dtype = dtype;
        with.b_layout = layout;
        with.tiling.tile_m = columns == 64 ? 32 : 128;
        with.tiling.tile_n = columns;
        with.tiling.chunk_bytes = columns == 256 ? 200'000 : 0;  // several tiles
        GemmArRanks ranks(with);
        check(ranks, 777, true, Mode::kFused);
        check(ranks, 130, false, Mode::kFused);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(GemmAr, SameBitsInEveryRun) {
  constexpr std::uint32_t kM = 1500, kN = 1024;
  GemmArRanks ranks(setup(kM, kN, 512));
  const std::uint64_t same = seed();
  DeviceMemory first(std::size_t{kM} * kN * 2);
  for (int run = 0; run < 30; ++run) {
    ranks.launch_all(kM, same, true, run % 5 == 4 ? Mode::kUnfused : Mode::kFused);
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) ASSERT_TRUE(ranks.finish(r));
    ranks.make_current(0);
    if (run == 0) {
      require(cudaMemcpy(first.data(), ranks.result(0, true), std::size_t{kM} * kN * 2,
                         cudaMemcpyDefault),
              "copy");
    }
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      ASSERT_EQ(count_different(first.data(), ranks.result(r, true), std::int64_t{kM} * kN,
                                ranks.stream(0)),
                0)
          << "rank " << r << ", run " << run;
    }
  }
}

TEST_P(GemmAr, ManyLaunchesWithoutAPauseAndWithChangingM) {
  constexpr std::uint32_t kM = 600;
  GemmArSetup with = setup(kM, 520, 136);
  with.k.back() = kLongK;
  GemmArRanks ranks(with);
  for (int round = 0; round < 5; ++round) {
    const std::uint64_t inputs = seed();
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      ranks.fill(r, inputs);
      ranks.poison(r);
      require(cudaStreamSynchronize(ranks.stream(r)), "inputs");
    }
    std::uint32_t m = 0;
    for (int i = 0; i < 200; ++i) {
      m = static_cast<std::uint32_t>(1 + random_() % kM);
      for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
        ranks.make_current(r);
        ASSERT_TRUE(ranks.launch(r, m));
      }
    }
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_TRUE(finished) << finished.error().message;
    }
    const Verdict verdict = ranks.judge_all(m, true);
    ASSERT_TRUE(verdict.right()) << "round " << round << ": " << verdict.bad << " elements wrong";
  }
}

TEST_P(GemmAr, AGraphReplayed200TimesWithChangingInputs) {
  constexpr std::uint32_t kM = 500, kN = 768;
  GemmArSetup with = setup(kM, kN, 192);
  with.k.back() = kLongK;
  GemmArRanks ranks(with);
  std::vector<cudaGraphExec_t> graphs(ranks.locals());
  for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
    ranks.make_current(r);
    cudaGraph_t graph = nullptr;
    require(cudaStreamBeginCapture(ranks.stream(r), cudaStreamCaptureModeThreadLocal), "capture");
    const Status launched = ranks.launch(r, kM);
    require(cudaStreamEndCapture(ranks.stream(r), &graph), "capture");
    ASSERT_TRUE(launched) << launched.error().message;
    require(cudaGraphInstantiate(&graphs[r], graph, 0), "instantiate");
    require(cudaGraphUpload(graphs[r], ranks.stream(r)), "upload");
    require(cudaStreamSynchronize(ranks.stream(r)), "upload");
    require(cudaGraphDestroy(graph), "graph");
  }
  for (int replay = 0; replay < 200; ++replay) {
    const std::uint64_t inputs = seed();
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      ranks.fill(r, inputs);
      ranks.poison(r);
      require(cudaStreamSynchronize(ranks.stream(r)), "inputs");
    }
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      ranks.make_current(r);
      require(cudaGraphLaunch(graphs[r], ranks.stream(r)), "replay");
    }
    for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
      auto stats = ranks.op(r).finish(ranks.stream(r));
      ASSERT_TRUE(stats) << stats.error().message;
      ASSERT_EQ(stats->epoch, static_cast<std::uint32_t>(replay + 1));
    }
    const Verdict verdict = ranks.judge_all(kM, true);
    ASSERT_TRUE(verdict.right()) << "replay " << replay << ": " << verdict.bad << " wrong";
  }
  for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
}

TEST_P(GemmAr, AMissingRankIsNamedWithinTheDeadline) {
  if (GetParam().locals == 1) GTEST_SKIP() << "needs several ranks";
  GemmArSetup with = setup(512, 512, 128);
  with.timeout = 200ms;
  GemmArRanks ranks(with);
  check(ranks, 300, true, Mode::kFused);
  const std::uint32_t missing = ranks.locals() - 1;
  for (std::uint32_t r = 0; r < missing; ++r) ASSERT_TRUE(ranks.launch(r, 512));
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint32_t r = 0; r < missing; ++r) {
    const Status finished = ranks.finish(r);
    ASSERT_FALSE(finished);
    const std::string& text = finished.error().message;
    if (finished.error().code == ErrorCode::kTimeout) {
      EXPECT_THAT(text, HasSubstr("for rank " + std::to_string(missing)));
    } else {
      EXPECT_EQ(finished.error().code, ErrorCode::kAborted) << text;  // it heard of another's
    }
    EXPECT_THAT(text, HasSubstr("gemm_ar launch 2 on rank " + std::to_string(r)));
    const Status again = ranks.launch(r, 512);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.error().message, text);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 2s);
  // The late one comes to a broken job, and the GPU is as usable as before.
  ASSERT_TRUE(ranks.launch(missing, 512));
  EXPECT_FALSE(ranks.finish(missing));
  GemmArRanks fresh(setup(512, 512, 128));
  check(fresh, 512, true, Mode::kFused);
}

TEST_P(GemmAr, DifferentMIsAnErrorWithBothNames) {
  if (GetParam().locals == 1) GTEST_SKIP() << "needs several ranks";
  GemmArRanks ranks(setup(512, 512, 128));
  for (std::uint32_t r = 0; r < ranks.locals(); ++r)
    ASSERT_TRUE(ranks.launch(r, r == 0 ? 500 : 512));
  const Status first = ranks.finish(0);
  ASSERT_FALSE(first);
  bool mismatch = false;
  for (std::uint32_t r = 0; r < ranks.locals(); ++r) {
    const Status finished = ranks.finish(r);
    ASSERT_FALSE(finished);
    mismatch |= finished.error().code == ErrorCode::kShapeMismatch;
  }
  EXPECT_TRUE(mismatch) << first.error().message;
}

TEST_P(GemmAr, AnAbortWordInHostMemoryEndsTheLaunch) {
  if (GetParam().locals == 1) GTEST_SKIP() << "needs several ranks";
  void* word = nullptr;
  require(cudaHostAlloc(&word, 64, cudaHostAllocMapped | cudaHostAllocPortable), "abort word");
  auto* abort = static_cast<std::uint32_t*>(word);
  *abort = 0;
  {
    GemmArSetup with = setup(512, 512, 128);
    with.abort = abort;
    GemmArRanks ranks(with);
    check(ranks, 512, false, Mode::kFused);
    for (std::uint32_t r = 1; r < ranks.locals(); ++r) ASSERT_TRUE(ranks.launch(r, 512));
    std::this_thread::sleep_for(50ms);
    const auto begin = std::chrono::steady_clock::now();
    shm::store_release(abort, 1u);
    for (std::uint32_t r = 1; r < ranks.locals(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_FALSE(finished);
      EXPECT_EQ(finished.error().code, ErrorCode::kAborted) << finished.error().message;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 1s);
  }
  require(cudaFreeHost(word), "abort word");
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, GemmAr, testing::Values(World{1, 1}, World{2, 1}, World{4, 1}, World{2, 2}, World{4, 2}),
    [](const auto& world) {
      return std::to_string(world.param.locals) + "On" + std::to_string(world.param.devices);
    });

class GemmArArguments : public testing::Test {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "needs a CUDA device";
  }
  static Status create(std::uint32_t nodes, std::uint32_t k,
                       const kernels::GemmArCudaOptions& options) {
    auto plan = kernels::GemmArPlan::make(nodes, 2, {256, 256, 0}, DType::kBf16,
                                          kernels::gemm_ar_cuda_tiling(nodes, {256, 256, 0}, 8));
    if (!plan) return propagate(plan);
    DeviceMemory memory(64);
    kernels::RankContext context;
    context.world = {nodes, 2, 0, 1};
    context.workspaces[0] = context.workspaces[1] = static_cast<std::byte*>(memory.data());
    auto op = kernels::GemmArCuda::create(*plan, k, context, options);
    if (!op) return propagate(op);
    return {};
  }
};

TEST_F(GemmArArguments, WhatItCannotDoIsRefusedWithTheReason) {
  EXPECT_TRUE(create(1, 64, {}));
  const Status nodes = create(2, 64, {});
  ASSERT_FALSE(nodes);
  EXPECT_EQ(nodes.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(nodes.error().message, HasSubstr("2 nodes"));

  kernels::GemmArCudaOptions crowded;
  crowded.ranks_per_device = 4;
  crowded.compute_blocks = 32;
  crowded.reduce_blocks = 8;
  const Status blocks = create(1, 64, crowded);
  ASSERT_FALSE(blocks);
  EXPECT_EQ(blocks.error().code, ErrorCode::kLimitExceeded);
  EXPECT_THAT(blocks.error().message, HasSubstr("4 ranks share it"));

  const Status k = create(1, 60, {});
  ASSERT_FALSE(k);
  EXPECT_EQ(k.error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mk::test
