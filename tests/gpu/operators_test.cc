// The three operators on GPUs, one kernel per rank: every element of the results, with the same
// bits in every run. Launches come without a pause and from graphs. Launches end when a rank is
// missing, disagrees, or is told to stop.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/shard.h"
#include "kernels/ops/ag_gemm/sm90.h"
#include "kernels/ops/gemm_rs/sm90.h"
#include "tests/gpu/graphs.h"
#include "tests/gpu/operators_fixture.h"
#include "tests/gpu/products.h"

namespace mk::test {
namespace {

using kernels::BLayout;
using kernels::DType;
using kernels::Mode;
using testing::HasSubstr;

TEST_P(Operators, EveryElementOfManyShapes) {
  struct Shape {
    std::uint32_t m, n, k;
  };
  for (const Shape& shape :
       {Shape{1024, 1024, 256}, Shape{1000, 1048, 200}, Shape{257, 776, 1096}, Shape{64, 512, 64},
        Shape{7, 8, 8}, Shape{2048, 2048, 512}, Shape{300, 600, kLongK}}) {
    SCOPED_TRACE("n " + std::to_string(shape.n) + ", k " + std::to_string(shape.k));
    JobSetup with = setup(shape.m, shape.n, shape.k);
    for (std::uint32_t r = 0; sums() && r < world(); ++r) with.k[r] += 8 * r;
    if (sums() && shape.k == kLongK) with.k[0] = 40;
    with.gathers = !sums() && random_() % 2 == 0;
    with.options.stream_groups = random_() % 2 * 3;  // who sums a rank's own tiles
    Job job(with);
    if (job.proxy() != nullptr) job.proxy()->dawdle(true);
    check(job, shape.m, Mode::kFused);
    check(job, shape.m, Mode::kUnfused);
    for (int i = 0; i < 6 && !HasFatalFailure(); ++i) {
      const auto m = static_cast<std::uint32_t>(1 + random_() % shape.m);
      check(job, m, random_() % 4 == 0 ? Mode::kUnfused : Mode::kFused);
    }
    if (HasFatalFailure()) return;
  }
}

/// The sizes of the CPU's tests (tests/kernels), with columns and K as the copy engine takes them,
/// and their numbers of rows: fewer than ranks, too, so that some have none.
TEST_P(Operators, EdgesOfEverything) {
  struct Edge {
    std::uint32_t m, n, k;
    kernels::Tiling tiling;
  };
  const Edge edges[] = {{1, 8, 8, {}},
                        {7, 24, 16, {}},
                        {64, 64, 72, {16, 16, 1024, 0}},
                        {65, 72, 64, {16, 16, 1024, 0}},
                        {129, 40, 200, {128, 8, 1, 0}},  // a chunk per tile
                        {33, 104, 136, {8, 32, 3000, 1}},
                        {300, 520, 128, {}},
                        {70, 8, 24, {1, 8, 1, 0}}};  // more chunks than a granule has flags
  for (const Edge& edge : edges) {
    SCOPED_TRACE(std::to_string(edge.m) + " x " + std::to_string(edge.n));
    JobSetup with = setup(edge.m, edge.n, edge.k);
    with.tiling = edge.tiling;
    with.options.stream_groups = random_() % 2 * 3;
    Job job(with);
    for (const std::uint32_t m : {1u, 2u, 3u, 7u, 8u, 16u, 17u, edge.m / 2, edge.m - 1, edge.m}) {
      if (m == 0 || m > edge.m) continue;
      check(job, m, m % 3 == 0 ? Mode::kUnfused : Mode::kFused);
      if (HasFatalFailure()) return;
    }
  }
}

/// Few tiles and all roles: what compute-sanitizer, which slows a kernel a hundredfold, can run.
TEST_P(Operators, SmallShapes) {
  struct Shape {
    std::uint32_t m, n, k;
  };
  for (const Shape& shape :
       {Shape{7, 8, 8}, Shape{130, 264, 72}, Shape{300, 520, 136}, Shape{256, 512, 136}}) {
    SCOPED_TRACE("n " + std::to_string(shape.n) + ", k " + std::to_string(shape.k));
    JobSetup with = setup(shape.m, shape.n, shape.k);
    with.options.wait_timeout = 20s;
    with.gathers = !sums();
    with.options.stream_groups = shape.n == 264 ? 3 : 0;  // both ways to sum
    Job job(with);
    check(job, shape.m, Mode::kFused);
    check(job, shape.m, Mode::kUnfused);
    check(job, static_cast<std::uint32_t>(1 + random_() % shape.m), Mode::kFused);
    if (HasFatalFailure()) return;
  }
}

/// Every activation, with and without a bias, both types of partial sums; f16, too, which has
/// kernels of its own.
TEST_P(Operators, EveryEpilogueOfEveryElement) {
  for (int i = 0; i < 20; ++i) {
    kernels::GemmResult result;
    result.epilogue = {static_cast<kernels::Activation>(i % 5), i / 5 % 2 == 1};
    if (sums() && i >= 10) result.partials = kernels::Partials::kF32;
    SCOPED_TRACE(std::string(name_of(result.epilogue.activation)) + ", partial sums " +
                 name_of(result.partials) + (result.epilogue.bias ? ", bias" : ""));
    const std::uint32_t m = 100 + static_cast<std::uint32_t>(random_() % 400);
    const std::uint32_t n = 16 * (8 + static_cast<std::uint32_t>(random_() % 60));
    JobSetup with = setup(m, n, 264);
    with.result = result;
    with.dtype = random_() % 4 == 0 ? DType::kF16 : DType::kBf16;
    with.options.b_layout = random_() % 2 == 0 ? BLayout::kKN : BLayout::kNK;
    if (random_() % 2 == 0) with.tiling.tile_n = 128;
    Job job(with);
    check(job, m, Mode::kFused);
    check(job, static_cast<std::uint32_t>(1 + random_() % m), Mode::kUnfused);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Operators, BothTypesAndLayoutsAndSizesOfTiles) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    for (const BLayout layout : {BLayout::kNK, BLayout::kKN}) {
      for (const std::uint32_t columns : {64u, 128u, 256u}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + (layout == BLayout::kNK ? " NK " : " KN ") +
                     std::to_string(columns));
        JobSetup with = setup(777, 1016, 264);
        with.dtype = dtype;
        with.options.b_layout = layout;
        with.tiling.tile_m = columns == 64 ? 32 : 128;
        with.tiling.tile_n = columns;
        with.tiling.chunk_bytes = columns == 256 ? 200'000 : 0;  // several tiles
        with.tiling.banks = columns == 128 ? 1 : 2;
        Job job(with);
        check(job, 777, Mode::kFused);
        check(job, 130, Mode::kFused);
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// With tiles of 125 rows and of 128 (GEMM+AR adds up only those as it computes them).
TEST_P(Operators, SameBitsInEveryRun) {
  constexpr std::uint32_t kN = 1024;
  for (const std::uint32_t m : {1500u, 1536u}) {
    SCOPED_TRACE("m " + std::to_string(m));
    Job job(setup(m, kN, 512));
    const std::uint64_t same = seed();
    std::vector<DeviceMemory> first;
    launch_and_keep(job, m, same, Mode::kFused, first);
    for (int run = 1; run < 30 && !HasFatalFailure(); ++run) {
      SCOPED_TRACE("run " + std::to_string(run));
      launch_to_end(job, m, same, run % 5 == 4 ? Mode::kUnfused : Mode::kFused);
      if (!HasFatalFailure()) expect_same_bits(job, m, first);
    }
  }
}

/// The same rows of A in products of other m, made with other m_max, so that tiles and all that is
/// chosen differ; and who owns a row does. With K of 1096 a row's sum has 18 blocks of K.
TEST_P(Operators, ARowsBitsDoNotDependOnM) {
  if (GetParam().op == Op::kGemmRs && GetParam().nodes > 2) GTEST_SKIP() << "refused";
  constexpr std::uint32_t kN = 520, kK = 1096;
  const std::uint64_t same = seed();
  using Row = std::vector<std::uint16_t>;
  std::vector<Row> first;
  for (const std::uint32_t m : {1536u, 1024u, 776u, 520u}) {
    SCOPED_TRACE("m " + std::to_string(m));
    JobSetup with = setup(m, kN, kK);
    with.options.batch_invariant = true;
    with.in_workspace = false;
    with.gap = 0;
    Job job(with);
    launch_to_end(job, m, same, Mode::kFused);
    if (HasFatalFailure()) return;
    const auto row_of = [&](std::uint32_t rank, std::uint32_t row) {
      Row bits(kN);
      const auto* const c = static_cast<const std::uint16_t*>(job.c(rank));
      require(cudaMemcpy(bits.data(), c + std::size_t{row} * kN, kN * 2, cudaMemcpyDefault), "row");
      return bits;
    };
    std::vector<Row> rows;
    if (sums()) {
      for (const std::uint32_t row : {0u, 63u, 300u, 519u}) {
        for (std::uint32_t rank = 0; rank < world(); ++rank) {
          const auto shard = kernels::shard_of(m, world(), rank);
          if (GetParam().op == Op::kGemmAr) {
            rows.push_back(row_of(rank, row));
          } else if (row >= shard.first && row < shard.first + shard.count) {
            rows.push_back(row_of(rank, row - shard.first));
          }
        }
      }
    } else {
      // Row `row` of rank `of`'s shard: the last is there with the least m, too.
      for (const std::uint32_t row : {0u, 1u, 520 / world() - 1}) {
        for (std::uint32_t of = 0; of < world(); ++of)
          rows.push_back(row_of(of, kernels::shard_of(m, world(), of).first + row));
      }
    }
    if (first.empty()) first = rows;
    EXPECT_EQ(rows, first);
  }
}

TEST_P(Operators, ManyLaunchesWithoutAPauseAndWithChangingM) {
  JobSetup with = setup(600, 520, sums() ? 136 : 1096);
  if (sums()) with.k.back() = kLongK;
  launch_without_a_pause(with, 5, 200);
}

/// Blocks without a tile are through with the core before others have begun with it.
TEST_P(Operators, ThousandsOfLaunchesWithBlocksThatHaveNoTile) {
  launch_without_a_pause(setup(160, 264, 72), 20, 150);
}

/// AllGather+GEMM: nearly all tiles are taken by blocks that have shared rows before.
TEST_P(Operators, TwoBlocksWithTilesFromTheStart) {
  for (const bool gathers : {false, true}) {
    JobSetup with = setup(600, 1032, 520);
    with.options.compute_blocks = 2;
    with.gathers = gathers && !sums();
    launch_without_a_pause(with, 3, 40);
    if (HasFatalFailure()) return;
  }
}

/// A quarter of the SMs, or half of a shared GPU's, does nothing but sums or copies.
TEST_P(Operators, ManyStreamGroups) {
  const std::uint32_t sharing = world() / static_cast<std::uint32_t>(GetParam().devices);
  if (sharing > 2) GTEST_SKIP() << "they do not fit";
  JobSetup with = setup(4096, 4096, 1024);
  with.options.stream_groups = 96;
  Job job(with);
  for (int i = 0; i < 20 && !HasFatalFailure(); ++i)
    check(job, static_cast<std::uint32_t>(4096 - random_() % 512 * (i % 2)), Mode::kFused);
}

/// More chunks than groups share in: those between the ends of a launch are summed by one group
/// each (skeleton/chunk_steps.h), of one tile and of several.
TEST_P(Operators, ManyChunks) {
  if (!sums()) GTEST_SKIP() << "sums only";
  for (const std::uint32_t tiles : {1u, 3u}) {
    SCOPED_TRACE("tiles of a chunk: " + std::to_string(tiles));
    JobSetup with = setup(2600, 2056, 136);
    with.tiling.tile_m = 64;
    with.tiling.tile_n = 64;
    with.tiling.chunk_bytes = tiles * 64 * 64 * 2;
    with.k.back() = 1096;
    launch_without_a_pause(with, 3, 12);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Operators, AGraphReplayed200TimesWithChangingInputs) {
  constexpr std::uint32_t kM = 500, kN = 768;
  JobSetup any = setup(kM, kN, 192);
  if (sums()) any.k.back() = kLongK;
  each_way(any, [&](const JobSetup& with) {
    Job job(with);
    Graphs graphs;
    const Status captured =
        graphs.capture_all(job, [&](std::uint32_t r) { return job.launch(r, kM); });
    ASSERT_TRUE(captured) << captured.error().message;
    for (int replay = 0; replay < 200; ++replay) {
      const std::uint64_t inputs = seed();
      for (std::uint32_t r = 0; r < job.world(); ++r) {
        job.fill(r, inputs);
        job.poison(r);
      }
      for (std::uint32_t r = 0; r < job.world(); ++r)
        require(cudaStreamSynchronize(job.stream(r)), "inputs");
      graphs.replay_all(job);
      for (std::uint32_t r = 0; r < job.world(); ++r) {
        auto stats = job.op(r).finish(job.stream(r));
        ASSERT_TRUE(stats) << "replay " << replay << ": " << stats.error().message;
        ASSERT_EQ(stats->epoch, static_cast<std::uint32_t>(replay + 1));
      }
      SCOPED_TRACE("replay " + std::to_string(replay));
      judge(job, kM);
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(Operators, AMissingRankEndsTheLaunchWithinTheDeadline) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  JobSetup any = setup(512, 512, 128);
  any.options.wait_timeout = 200ms;
  each_way(any, [&](const JobSetup& with) {
    Job job(with);
    check(job, 300, Mode::kFused);
    const Status late = miss_last_rank(
        job, name(GetParam().op), [&](std::uint32_t r) { return job.launch(r, 512); }, 2s);
    // Where rows lie in one place, the others may have gone on to write there.
    if (!sums() && GetParam().nodes == 1 && with.local_banks == 1) {
      ASSERT_FALSE(late);
      EXPECT_THAT(late.error().message, HasSubstr("on the same node failed"));
    }
    Job fresh(setup(512, 512, 128));
    check(fresh, 512, Mode::kFused);
  });
}

TEST_P(Operators, DifferentMIsAnErrorWithBothNames) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  JobSetup with = setup(512, 512, 128);
  with.options.wait_timeout = 500ms;
  Job job(with);
  for (std::uint32_t r = 0; r < job.world(); ++r) ASSERT_TRUE(job.launch(r, r == 0 ? 500 : 512));
  bool mismatch = false;
  std::string texts;
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    const Status finished = job.finish(r);
    if (finished) continue;  // a rank that hears of no rank that differs
    mismatch |= finished.error().code == ErrorCode::kShapeMismatch;
    texts += finished.error().message + "\n";
  }
  EXPECT_TRUE(mismatch) << texts;
}

TEST_P(Operators, AnAbortWordInHostMemoryEndsTheLaunch) {
  if (world() == 1) GTEST_SKIP() << "needs several ranks";
  each_way(setup(512, 512, 128), [&](JobSetup with) {
    const auto make = [&](const std::uint32_t* abort) {
      with.abort = abort;
      auto job = std::make_unique<Job>(with);
      check(*job, 512, Mode::kFused);
      return job;
    };
    abort_launches(make, [](Job& job, std::uint32_t r) { return job.launch(r, 512); });
  });
}

/// Blocks wait for each other, so all of them must be resident: what does not fit never starts.
TEST(OperatorLimits, WhatCannotRunIsRefused) {
  if (device_count() == 0) GTEST_SKIP() << "no GPU";
  cudaDeviceProp device;
  require(cudaGetDeviceProperties(&device, 0), "device");
  const auto whole = static_cast<std::uint32_t>(device.multiProcessorCount);
  const kernels::Shape max{512, 512, 0};
  const kernels::Tiling whole_tiles{128, 256, 1 << 16, 0, 0};
  const auto plan = kernels::GemmRsPlan::make(1, 2, max, DType::kBf16, whole_tiles);
  ASSERT_TRUE(plan);
  const DeviceMemory workspace(plan->workspace_bytes());
  kernels::RankContext context;
  context.world = {1, 2, 0, 0};
  context.workspaces[0] = context.workspaces[1] = static_cast<std::byte*>(workspace.data());
  struct Case {
    std::uint32_t ranks, compute, groups;
    bool fits;
  };
  for (const Case& one :
       {Case{1, whole - 32, 96, true}, Case{1, whole - 31, 96, false},
        Case{2, (whole - 1) / 2 - 32, 96, true}, Case{2, (whole - 1) / 2 - 31, 96, false},
        Case{1, 0, 3 * (whole - 1), false}, Case{2, 0, 3 * ((whole - 1) / 2), false},
        Case{1, 0, 3 * 64, true}}) {
    SCOPED_TRACE(std::to_string(one.compute) + " and " + std::to_string(one.groups) + " groups");
    kernels::CudaOptions options;
    options.ranks_per_device = one.ranks;
    options.compute_blocks = one.compute;
    options.stream_groups = one.groups;
    const auto made = kernels::GemmRsCuda::create(*plan, 128, context, options);
    EXPECT_EQ(made.has_value(), one.fits);
    if (made) continue;
    EXPECT_EQ(made.error().code, ErrorCode::kLimitExceeded);
    EXPECT_THAT(made.error().message, HasSubstr("do not fit: this device holds"));
  }
  for (const std::chrono::seconds timeout : {0s, 301s}) {
    kernels::CudaOptions options;
    options.wait_timeout = timeout;
    const auto made = kernels::GemmRsCuda::create(*plan, 128, context, options);
    ASSERT_FALSE(made);
    EXPECT_THAT(made.error().message, HasSubstr("more than zero and at most 300 s"));
  }
  const kernels::Shape all{512, 512, 128};
  const kernels::Tiling tiling{128, 128, 1 << 16, 1, 1};
  const auto gather = kernels::AgGemmPlan::make(1, 2, all, DType::kBf16, tiling);
  ASSERT_TRUE(gather);
  const DeviceMemory rows(gather->workspace_bytes);
  context.workspaces[0] = context.workspaces[1] = static_cast<std::byte*>(rows.data());
  kernels::CudaOptions options;
  options.ranks_per_device = 2;
  EXPECT_TRUE(kernels::AgGemmCuda::create(*gather, context, options)) << "by groups";
  options.dma = true;
  const auto made = kernels::AgGemmCuda::create(*gather, context, options);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(made.error().message, HasSubstr("a GPU each, and local rank 1 has this one's"));
}

TEST(OperatorLimits, AfterACallThatIsRefusedTheLastLaunchIsTheOneBefore) {
  if (device_count() == 0) GTEST_SKIP() << "no GPU";
  for (const Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    SCOPED_TRACE(name(op));
    JobSetup setup;
    setup.op = op;
    setup.locals = 1;
    setup.m = setup.n = 128;
    setup.k = {128};
    Job job(setup);
    job.launch_all(96, fresh_seed(), Mode::kFused);
    const auto* const odd = static_cast<const std::byte*>(job.a(0)) + 2;
    const DeviceMemory c(std::size_t{128} * 128 * 2);
    const Status refused = job.op(0).launch(job.stream(0), odd, job.b(0), c.data(), nullptr,
                                            nullptr, 64, Mode::kUnfused);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    const auto stats = job.op(0).finish(job.stream(0));
    ASSERT_TRUE(stats) << stats.error().message;
    EXPECT_EQ(stats->m, 96u);
    EXPECT_EQ(stats->mode, Mode::kFused);
    EXPECT_TRUE(job.judge_all(96).right());
  }
}

std::vector<World> worlds() {
  std::vector<World> worlds;
  for (const Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (const GpuWorld& world :
         {GpuWorld{1, 1, 1}, {1, 2, 1}, {1, 4, 1}, {1, 8, 1}, {2, 1, 1}, {2, 2, 1},
          {2, 4, 1},         {3, 1, 1}, {3, 2, 1}, {3, 2, 2}, {1, 2, 2}, {1, 4, 2},
          {1, 4, 4},         {1, 8, 8}, {2, 1, 2}, {2, 2, 2}, {2, 2, 4}, {2, 4, 8},
          {1, 3, 1},         {1, 5, 1}, {1, 6, 1}, {1, 7, 1}, {1, 12, 1}})
      worlds.push_back({world, op});
  }
  return worlds;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Operators, testing::ValuesIn(worlds()), [](const auto& world) {
  return std::string(name(world.param.op)) + "_" + name_of_world(world);
});

}  // namespace
}  // namespace mk::test
