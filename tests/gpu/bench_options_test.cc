#include "tests/gpu/bench_options.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "tests/gpu/exchange.h"

namespace mk::test {
namespace {

using Taken = BenchOptions::Taken;

TEST(BenchOptions, WhatIsSaidIsTaken) {
  BenchOptions options;
  const std::pair<const char*, const char*> said[] = {
      {"--op", "gemm_rs"},       {"--ranks", "8"},        {"--nodes", "2"},
      {"--mkerneld", "./d"},     {"--shape", "64x32x16"}, {"--launches", "3"},
      {"--streams", "12"},       {"--streams", "24"},     {"--chunk", "65536"},
      {"--receive", "6"},        {"--compute", "100"},    {"--dma", "off"},
      {"--check-up-to", "4096"}, {"--json", "f.json"},    {"--link-bandwidth", "25GB/s"},
      {"--sums-once", "on"},     {"--piece-ns", "4500"},  {"--dma-bytes", "65536"},
  };
  for (const auto& [argument, value] : said)
    EXPECT_EQ(options.take(argument, value), Taken::kYes) << argument;
  ASSERT_TRUE(options.settle());
  EXPECT_EQ(options.ops, std::vector{Op::kGemmRs});
  EXPECT_EQ(options.locals(), 4u);
  EXPECT_EQ(options.mkerneld, "./d");
  ASSERT_EQ(options.shapes.size(), 1u);
  EXPECT_EQ(std::tuple(options.shapes[0].m, options.shapes[0].n, options.shapes[0].k),
            std::tuple(64, 32, 16));
  EXPECT_EQ(options.launches, 3);
  EXPECT_EQ(options.streams, (std::vector{12u, 24u}));
  EXPECT_EQ(options.chunks, std::vector{65536u});
  EXPECT_EQ(options.receives, std::vector{6u});
  EXPECT_EQ(options.cuda.compute_blocks, 100u);
  EXPECT_EQ(options.cuda.dma, false);
  EXPECT_EQ(options.cuda.dma_bytes, 65536u);
  EXPECT_EQ(options.cuda.sums_once, true);
  EXPECT_EQ(options.cuda.piece_ns, 4500u);
  EXPECT_EQ(options.check_up_to, 4096);
  EXPECT_EQ(options.json, "f.json");
  EXPECT_EQ(options.link_bytes_per_s, 25e9);
}

TEST(BenchOptions, WhatIsLeftOpenIsEverythingByTheOperatorsOwnChoice) {
  BenchOptions options;
  ASSERT_TRUE(options.settle());
  EXPECT_EQ(options.ops, (std::vector{Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}));
  for (const auto& list : {options.streams, options.chunks, options.receives})
    EXPECT_EQ(list, std::vector{0u});
  EXPECT_EQ(options.link_bytes_per_s, 50e9);
}

TEST(BenchOptions, WhatMakesNoSenseIsRefused) {
  BenchOptions options;
  EXPECT_EQ(options.take("--devices", "2"), Taken::kUnknown);
  EXPECT_EQ(options.take("--op", "ring_attention"), Taken::kWrong);
  EXPECT_EQ(options.take("--shape", "64x32"), Taken::kWrong);
  EXPECT_EQ(options.take("--dma", "yes"), Taken::kWrong);
  EXPECT_EQ(options.take("--link-bandwidth", "fast"), Taken::kYes);
  EXPECT_FALSE(options.settle());
}

TEST(BenchOptions, EveryRunIsMadeAlsoAfterAWrongOne) {
  BenchOptions options;
  for (const char* groups : {"1", "2"}) options.take("--streams", groups);
  for (const char* chunk : {"16", "32"}) options.take("--chunk", chunk);
  options.take("--op", "gemm_ar");
  for (const char* shape : {"64x32x16", "8x8x8"}) options.take("--shape", shape);
  ASSERT_TRUE(options.settle());
  std::vector<std::tuple<int, std::uint32_t, std::uint32_t, bool>> made;
  const bool right = run_all(options, [&](const BenchRun& run) {
    EXPECT_EQ(run.op, Op::kGemmAr);
    made.emplace_back(run.shape.m, run.streams, run.chunk_bytes, run.first);
    return made.size() != 2;
  });
  EXPECT_FALSE(right);
  const decltype(made) wanted = {{64, 1, 16, true},  {64, 1, 32, false}, {64, 2, 16, false},
                                 {64, 2, 32, false}, {8, 1, 16, true},   {8, 1, 32, false},
                                 {8, 2, 16, false},  {8, 2, 32, false}};
  EXPECT_EQ(made, wanted);
  EXPECT_TRUE(run_all(options, [](const BenchRun&) { return true; }));
}

TEST(BenchOptions, ARunSaysWhatTheJobIs) {
  BenchOptions options;
  options.take("--ranks", "8");
  options.take("--nodes", "2");
  ASSERT_TRUE(options.settle());
  const JobSetup setup = setup_of(options, {Op::kGemmRs, {64, 32, 16}, 12, 4096, 6, true});
  EXPECT_EQ(std::tuple(setup.nodes, setup.locals, setup.m, setup.n), std::tuple(2u, 4u, 64u, 32u));
  EXPECT_EQ(setup.k, std::vector<std::uint32_t>(8, 16));
  EXPECT_EQ(setup.options.stream_groups, 12u);
  EXPECT_EQ(setup.options.receive_groups, 6u);
  EXPECT_EQ(setup.chunk_bytes, 4096u);
  EXPECT_EQ(network_of(options, "beside it"),
            "loopback, GPU memory, 50GB/s per rail, daemons beside it");
  options.nodes = 1;
  EXPECT_EQ(network_of(options, "beside it"), "none");
}

TEST(BenchOptions, TimesAndEndsAreSummedUp) {
  const auto json = summary_of({3, 1, 2, 9, 4});
  EXPECT_EQ(json["median"], 3.0);
  EXPECT_EQ(json["min"], 1.0);
  EXPECT_EQ(json["max"], 9.0);
  kernels::LaunchStats stats;
  stats.roles[static_cast<std::uint32_t>(kernels::Role::kReduce)] = {2, 45'678, 0, 0};
  EXPECT_EQ(role_ends(stats), " reduce 45");
}

TEST(BenchOptions, AFileThatCannotBeWrittenIsSaidSo) {
  BenchOptions options;
  EXPECT_TRUE(write(options, {{"rows", 1}}));
  options.json = testing::TempDir() + "/bench_options_test.json";
  EXPECT_TRUE(write(options, {{"rows", 1}}));
  std::ifstream file(options.json);
  EXPECT_EQ(nlohmann::ordered_json::parse(file)["rows"], 1);
  options.json = testing::TempDir() + "/there is no such folder/f.json";
  EXPECT_FALSE(write(options, {{"rows", 1}}));
}

// Two tensors of 96K rows, 16 heads and 16 batches over two ranks would be 1536 commands of 4 MiB.
TEST(ParcelChunks, AllOfThemFitIntoARing) {
  constexpr std::uint32_t kLeast = 4 << 20;
  for (const std::uint64_t rows : {6u << 10, 48u << 10, 96u << 10, 192u << 10}) {
    for (const std::uint32_t parcels : {2u, 32u, 64u}) {
      const std::uint64_t bytes = 2 * 16 * rows / 2 * 16 * 128 * 2 / parcels;
      const std::uint32_t chunk = parcel_chunk_bytes(parcels * bytes, parcels, kLeast);
      EXPECT_LE(parcels * chunks_of(bytes, chunk), 1024u) << rows << " rows, " << parcels;
      EXPECT_EQ(chunk, rows > 48 << 10 ? rows / (48 << 10) * kLeast : kLeast);
    }
  }
}

}  // namespace
}  // namespace mk::test
