// What tiles the operators choose on a whole H200. Host arithmetic: it needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "kernels/cuda/chunk_steps.h"
#include "kernels/ops/ag_gemm/sm90.h"
#include "kernels/ops/gemm_ar/sm90.h"
#include "kernels/ops/gemm_rs/sm90.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kBlocks = 132;

struct Case {
  std::uint32_t nodes, locals;
  Shape max;
  std::uint32_t tile_m, tile_n;
  std::uint32_t blocks = kBlocks;
  double network_bytes_per_s = 0;
};
std::string text(const Case& one) {
  return std::to_string(one.nodes) + "x" + std::to_string(one.locals) + ", " +
         std::to_string(one.max.m) + " x " + std::to_string(one.max.n) + " x " +
         std::to_string(one.max.k);
}

// kernels/cuda/decisions/ag_network_tiles.md says why.
TEST(AgGemmTiling, ShortTilesWhereOnlyTheLastOnesCountWholeOnesWhereThereAreMany) {
  const Case cases[] = {
      // Each of the shortest has an SM.
      {1, 8, {2048, 256, 2048}, 128, 64},
      {1, 2, {2048, 256, 2048}, 128, 64},
      // A few for each SM, of a product that is shorter than its gather.
      {1, 8, {4096, 512, 4096}, 128, 128},
      {1, 8, {8192, 1024, 8192}, 128, 128},
      {1, 2, {8192, 1024, 8192}, 128, 128},
      {1, 2, {7680, 1024, 8192}, 128, 128},  // even where whole ones come out even
      // Many.
      {1, 8, {16384, 2048, 16384}, 128, 256},
      {1, 2, {16384, 2048, 16384}, 128, 256},
      {2, 4, {16384, 2048, 16384}, 128, 256},
      {1, 8, {32768, 4096, 32768}, 128, 256},
      {1, 8, {16384, 7168, 8192}, 128, 256},
      // Many, but two rails of 50 GB/s take four times as long.
      {2, 1, {16384, 2048, 16384}, 128, 128},
      // Few rows over a network that takes more than twice the product's time; not so long.
      {2, 1, {2048, 256, 2048}, 64, 128},
      {2, 4, {4096, 512, 4096}, 64, 128},
      {2, 1, {4096, 2048, 4096}, 64, 128},
      {2, 1, {8192, 1024, 8192}, 64, 128},
      {2, 4, {8192, 1024, 8192}, 128, 128},
      {2, 1, {4096, 3072, 4096}, 128, 128},  // a product that is longer than its gather on one node
      {2, 4, {4096, 1024, 4096}, 128, 128},
      {2, 4, {4096, 2048, 4096}, 128, 128},
      {4, 8, {4096, 512, 4096}, 64, 128},
      // Of a GPU that two nodes' ranks share, a third and a quarter: the product takes longer.
      {2, 1, {4096, 1024, 4096}, 64, 128, 44},
      {2, 1, {4096, 2048, 4096}, 128, 256, 44},
      {2, 2, {2048, 256, 2048}, 64, 128, 33},
      {2, 2, {4096, 512, 4096}, 128, 128, 33},
      // Rails of 100 and of 800 Gb/s.
      {2, 4, {4096, 1024, 4096}, 64, 128, kBlocks, 12.5e9},
      {2, 4, {4096, 512, 4096}, 128, 128, kBlocks, 100e9},
  };
  for (const Case& one : cases) {
    MachineRates rates;
    rates.network_bytes_per_s = one.network_bytes_per_s;
    const Tiling tiling = ag_gemm_cuda_tiling(one.nodes, one.locals, one.max, one.blocks, rates);
    EXPECT_EQ(tiling.tile_m, one.tile_m) << text(one);
    EXPECT_EQ(tiling.tile_n, one.tile_n) << text(one);
  }
}

struct Sharing {
  std::uint32_t nodes, locals;
  Shape max;
  bool by_dma;
};

// Many rows: the engines' time for them is more than the time they take to begin. Beside a product
// that takes 0.7 of NVLink's time: 2 n k operations at 665.6 TFLOP/s for 2 k (L - 1) / L bytes at
// 360 GB/s. Over nodes beside one of the network's time, of two ranks to a node of twice that.
TEST(Tilings, DmaEnginesShareManyRowsOfLongProducts) {
  const Sharing cases[] = {
      {1, 2, {16384, 2048, 16384}, true},
      {1, 4, {16384, 2048, 16384}, true},
      {1, 8, {16384, 2048, 16384}, true},
      {1, 8, {32768, 7168, 8192}, true},
      {1, 8, {4096, 7168, 8192}, true},
      {1, 2, {8192, 1024, 8192}, true},
      {1, 4, {8192, 1024, 8192}, true},
      // Fewer than 8 MiB of a rank.
      {1, 8, {4088, 7168, 8192}, false},
      {1, 2, {2048, 2048, 2048}, false},
      // To seven others n is 1133 at least, to three 971, to one 648.
      {1, 8, {16384, 1128, 16384}, false},
      {1, 8, {16384, 1136, 16384}, true},
      {1, 4, {16384, 968, 16384}, false},
      {1, 4, {16384, 976, 16384}, true},
      {1, 2, {16384, 640, 16384}, false},
      {1, 2, {16384, 648, 16384}, true},
      {1, 8, {8192, 1024, 8192}, false},
      {1, 4, {4096, 512, 4096}, false},
      {1, 2, {4096, 512, 4096}, false},
      // Few rows of a wide product, which groups bring rank by rank.
      {1, 2, {2048, 7168, 8192}, false},
      {1, 2, {2056, 7168, 8192}, true},
      // 2 n / 665.6 TFLOP/s for 2 (N - 1) / (N L) / 50 GB/s: from n = 1664 on of two nodes of four;
      // twice that, from 6656 on of two nodes of two.
      {2, 4, {32768, 4096, 32768}, true},
      {2, 4, {16384, 2048, 16384}, true},
      {2, 4, {32768, 1672, 32768}, true},
      {2, 4, {32768, 1656, 32768}, false},
      {2, 2, {32768, 4096, 32768}, false},
      {2, 2, {32768, 6664, 32768}, true},
      {2, 2, {32768, 6648, 32768}, false},
      // Nobody to share with.
      {1, 1, {16384, 2048, 16384}, false},
      {2, 1, {32768, 32768, 32768}, false},
  };
  for (const Sharing& one : cases) {
    SCOPED_TRACE(text({one.nodes, one.locals, one.max, 0, 0}));
    EXPECT_EQ(ag_gemm_shares_by_dma(one.nodes, one.locals, one.max, {}), one.by_dma);
    const Tiling tiling = ag_gemm_cuda_tiling(one.nodes, one.locals, one.max, kBlocksMax, {});
    EXPECT_EQ(tiling.local_banks, one.by_dma ? 1u : 0u);
    EXPECT_EQ(tiling.banks, one.by_dma ? 1u : 0u) << "also of what they pass on";
    // Of ranks that share a GPU it has not been measured.
    EXPECT_EQ(ag_gemm_cuda_tiling(one.nodes, one.locals, one.max, kBlocksMax / 2, {}).local_banks,
              0u);
  }
  MachineRates rates;
  rates.flops_per_s = 2e15;
  EXPECT_FALSE(ag_gemm_shares_by_dma(1, 8, {16384, 2048, 16384}, rates)) << "a product too short";
  rates = {};
  rates.network_bytes_per_s = 200e9;
  EXPECT_TRUE(ag_gemm_shares_by_dma(2, 4, {32768, 1656, 32768}, rates)) << "a network quick enough";
}

// In so many pieces p of a rank's rows that the pieces' own 6.6 us each, (L - 1) p of them, and an
// L p-th of the product, after the last one, are least together; of whole chunks.
TEST(Tilings, DmaEnginesBringAsMuchAtATimeAsTheProductLeavesTimeFor) {
  struct Piece {
    std::uint32_t locals;
    Shape max;
    std::uint32_t pieces;
  };
  for (const Piece& one : {Piece{2, {16384, 2048, 16384}, 11}, Piece{4, {16384, 2048, 16384}, 4},
                           Piece{8, {16384, 2048, 16384}, 2}, Piece{2, {8192, 1024, 8192}, 3},
                           Piece{4, {8192, 1024, 8192}, 1}, Piece{8, {16384, 7168, 8192}, 2},
                           Piece{2, {4096, 2048, 4096}, 2}, Piece{2, {32768, 7168, 8192}, 19}}) {
    SCOPED_TRACE(text({1, one.locals, one.max, 0, 0}));
    const auto plan = AgGemmPlan::make(1, one.locals, one.max, DType::kBf16,
                                       ag_gemm_cuda_tiling(1, one.locals, one.max, kBlocksMax, {}));
    ASSERT_TRUE(plan) << plan.error().message;
    const std::uint32_t bytes = ag_gemm_dma_bytes(*plan, {});
    const std::uint32_t shard = one.max.m / one.locals * one.max.k * kElementBytes;
    EXPECT_EQ(bytes % plan->gather.chunk_bytes, 0u);
    EXPECT_EQ(div_up(shard, bytes), one.pieces);
    // Not one more, and not one less, would be quicker by more than whole chunks make of it.
    const double product = 2.0 * one.max.m * one.max.n * one.max.k / 665.6e12;
    const auto beside = [&](double pieces) {
      return (one.locals - 1) * pieces * 6.6e-6 + product / (one.locals * pieces);
    };
    EXPECT_LE(beside(one.pieces), 1.1 * beside(one.pieces + 1.0));
    if (one.pieces > 1) {
      EXPECT_LE(beside(one.pieces), 1.1 * beside(one.pieces - 1.0));
    }
  }
  // Over nodes whole shards, as others come last.
  const Shape narrow{16384, 2048, 16384};
  const auto over_nodes = AgGemmPlan::make(2, 4, narrow, DType::kBf16,
                                           ag_gemm_cuda_tiling(2, 4, narrow, kBlocksMax, {}));
  ASSERT_TRUE(over_nodes) << over_nodes.error().message;
  EXPECT_EQ(ag_gemm_dma_bytes(*over_nodes, {}), 64u << 20);
  // A shard of 64 GiB, which is not copied at once.
  const auto large =
      AgGemmPlan::make(1, 8, {1 << 19, 8, 1 << 19}, DType::kBf16, Tiling{128, 256, 1 << 29, 1, 1});
  ASSERT_TRUE(large) << large.error().message;
  EXPECT_EQ(ag_gemm_dma_bytes(*large, {}), 1u << 30);
  // Nor is a quarter of one of 16 GiB passed on at once.
  const auto far =
      AgGemmPlan::make(2, 2, {1 << 17, 8, 1 << 18}, DType::kBf16, Tiling{128, 256, 1 << 28, 1, 1});
  ASSERT_TRUE(far) << far.error().message;
  RoleBlocks blocks;
  blocks.receive = 1;
  const GatherSchedule schedule(far->gather, {2, 2, 0, 0});
  EXPECT_EQ(ag_gemm_passing_on(schedule, blocks, 1 << 17, true).dma_chunks, 4u);
}

// Where the product takes longer than the network: 2 k / 665.6 TFLOP/s against 2 (N - 1) / (N L) /
// 50 GB/s, or what the caller says of its machine.
TEST(Tilings, AShardIsSummedOnceWhereTheProductTakesLongerThanTheNetwork) {
  struct Sum {
    std::uint32_t nodes, locals, k;
    double network_bytes_per_s;
    bool once;
  };
  for (const Sum& one :
       {Sum{2, 4, 1024, 0, false}, Sum{2, 4, 1663, 0, false}, Sum{2, 4, 1665, 0, true},
        Sum{2, 4, 2048, 0, true}, Sum{2, 2, 3300, 0, false}, Sum{2, 2, 3400, 0, true},
        Sum{2, 8, 800, 0, false}, Sum{2, 8, 850, 0, true}, Sum{4, 8, 1200, 0, false},
        Sum{4, 8, 1300, 0, true}, Sum{2, 4, 1024, 100e9, true}, Sum{2, 4, 2048, 25e9, false},
        // Nothing is summed twice there.
        Sum{1, 8, 8192, 0, false}, Sum{2, 1, 8192, 0, false}}) {
    SCOPED_TRACE(testing::Message() << one.nodes << " x " << one.locals << ", k " << one.k);
    MachineRates rates;
    rates.network_bytes_per_s = one.network_bytes_per_s;
    const World world{one.nodes, one.locals, 0, 0};
    EXPECT_EQ(gemm_rs_sums_once(world, one.k, 128, rates), one.once);
  }
}

// A piece of a tile every so often: four in three quarters of a tile's time, which is 2 * 128 * 256
// k at 5.2 TFLOP/s. Not where NVLink takes longer for the tiles, at 360 GB/s, than the product, nor
// where nothing goes to other ranks, or the network waits for it.
TEST(Tilings, TilesGoToTheirOwnersAtAPace) {
  struct Pace {
    std::uint32_t nodes, locals;
    Shape max;
    std::uint32_t k;
    double local_bytes_per_s;
    std::uint32_t piece_ns;
  };
  const Shape square{16384, 16384, 0};
  for (const Pace& one :
       {Pace{1, 4, square, 2048, 0, 4839}, Pace{1, 8, square, 2048, 0, 4839},
        Pace{1, 4, {16384, 8192, 0}, 3584, 0, 8468}, Pace{1, 4, square, 1380, 0, 0},
        Pace{1, 4, square, 1392, 0, 3289}, Pace{1, 8, square, 1600, 0, 0},
        Pace{1, 8, square, 1632, 0, 3856}, Pace{1, 2, square, 920, 0, 0},
        Pace{1, 2, square, 936, 0, 2211}, Pace{1, 8, square, 2048, 200e9, 0},
        Pace{1, 8, square, 1 << 20, 0, 1'000'000}, Pace{1, 1, square, 2048, 0, 0},
        Pace{2, 4, square, 2048, 0, 0}, Pace{2, 1, square, 2048, 0, 0}}) {
    SCOPED_TRACE(testing::Message() << one.nodes << " x " << one.locals << ", k " << one.k);
    const Result<GemmRsPlan> plan =
        GemmRsPlan::make(one.nodes, one.locals, one.max, DType::kBf16, Tiling{128, 256, 1 << 17});
    ASSERT_TRUE(plan) << plan.error().message;
    CudaOptions options;
    options.rates.local_bytes_per_s = one.local_bytes_per_s;
    EXPECT_NEAR(cuda::tile_piece_ns(*plan, one.k, 1, options), one.piece_ns, 1);
    options.ranks_per_device = 2;
    EXPECT_EQ(cuda::tile_piece_ns(*plan, one.k, 1, options), 0u) << "ranks share a GPU";
    options.piece_ns = 1234;
    EXPECT_EQ(cuda::tile_piece_ns(*plan, one.k, 1, options), 1234u) << "as it was said";
  }
}
// GEMM+AllReduce's results take NVLink, too: twice as long.
TEST(Tilings, TilesGoToTheirOwnersAtAPaceWhereResultsTakeNvlinkToo) {
  struct Pace {
    std::uint32_t nodes, locals, k, piece_ns;
  };
  for (const Pace& one :
       {Pace{1, 8, 3232, 0}, Pace{1, 8, 3240, 7656}, Pace{1, 4, 2768, 0}, Pace{1, 4, 2776, 6559},
        Pace{1, 2, 1848, 0}, Pace{1, 2, 1856, 4385}, Pace{1, 1, 8192, 0}, Pace{2, 4, 8192, 0}}) {
    SCOPED_TRACE(testing::Message() << one.nodes << " x " << one.locals << ", k " << one.k);
    const Result<GemmArPlan> plan = GemmArPlan::make(one.nodes, one.locals, {16384, 8192, 0},
                                                     DType::kBf16, Tiling{128, 256, 1 << 17});
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_NEAR(cuda::tile_piece_ns(*plan, one.k, 2, {}), one.piece_ns, 1);
  }
}

struct Groups {
  std::uint32_t nodes, locals;
  Shape max;
  std::uint32_t groups;
};

// The most where the gather is all there is; but to several peers a twelfth of the SMs, no more,
// as more of them only get into each other's way. Beside wide products few are enough.
TEST(Tilings, GroupsThatShareRowsAreAsManyAsTheLinksTake) {
  const Groups cases[] = {
      {1, 2, {2048, 256, 2048}, 192},   {1, 8, {2048, 256, 2048}, 192},
      {1, 2, {4096, 512, 4096}, 96},    {1, 4, {4096, 512, 4096}, 48},
      {1, 8, {4096, 2048, 4096}, 48},   {1, 2, {8192, 1024, 8192}, 72},
      {1, 8, {8192, 1024, 8192}, 36},   {1, 2, {16384, 1024, 16384}, 48},
      {1, 8, {16384, 2048, 16384}, 36}, {1, 8, {2048, 7168, 8192}, 60},
      {1, 8, {4096, 7168, 8192}, 24},   {1, 8, {8192, 7168, 8192}, 18},
      {1, 8, {16384, 7168, 8192}, 12},  {1, 2, {32768, 4096, 32768}, 24},
      {2, 4, {2048, 256, 2048}, 192},   {2, 1, {4096, 1024, 4096}, 192},
      {2, 4, {8192, 1024, 8192}, 48},   {2, 4, {32768, 4096, 32768}, 24},
  };
  for (const Groups& one : cases) {
    EXPECT_EQ(ag_gemm_share_groups(one.nodes, one.locals, one.max, false), one.groups)
        << text({one.nodes, one.locals, one.max, 0, 0});
  }
  EXPECT_EQ(ag_gemm_share_groups(2, 2, {2048, 256, 2048}, true), 96u);
}

// The more the shorter the product beside the sums; of several ranks more than of two, whose sums
// go to one other.
TEST(Tilings, GroupsThatSumAreTheMoreTheShorterTheProduct) {
  for (const std::uint32_t k : {8u, 256u, 257u, 512u, 513u, 1024u, 3584u, 8192u}) {
    for (const std::uint32_t gpus : {1u, 2u}) EXPECT_EQ(gemm_rs_reduce_groups(gpus, k), 12u);
    for (const std::uint32_t gpus : {3u, 4u})
      EXPECT_EQ(gemm_rs_reduce_groups(gpus, k), k <= 256 ? 144u : 12u) << k;
    for (const std::uint32_t gpus : {5u, 8u, 16u})
      EXPECT_EQ(gemm_rs_reduce_groups(gpus, k), k <= 512 ? 144u : 12u) << k;
  }
  struct Sums {
    std::uint32_t gpus;
    std::uint32_t m, n, k;
    std::uint32_t groups;
  };
  for (const Sums& one : {
           Sums{1, 2048, 2048, 256, 144},
           Sums{4, 2048, 2048, 256, 144},
           Sums{8, 2048, 2048, 256, 144},
           Sums{2, 4096, 4096, 512, 12},
           Sums{3, 4096, 4096, 512, 60},
           Sums{4, 4096, 4096, 512, 60},
           Sums{5, 4096, 4096, 512, 144},
           Sums{4, 8192, 8192, 1024, 60},
           Sums{8, 8192, 8192, 1024, 144},
           Sums{2, 16384, 16384, 2048, 60},
           Sums{4, 16384, 16384, 2048, 60},
           Sums{8, 16384, 16384, 2048, 72},
           Sums{8, 2048, 8192, 3584, 36},
           Sums{8, 16384, 8192, 3584, 36},
           Sums{4, 32768, 8192, 3584, 36},
           Sums{8, 32768, 32768, 4096, 36},
           Sums{2, 8192, 8192, 3584, 36},
       }) {
    EXPECT_EQ(gemm_ar_reduce_groups(one.gpus, {one.m, one.n, 0}, one.k), one.groups)
        << one.gpus << " " << one.m << " " << one.n << " " << one.k;
  }
}

// What is summed for a whole node takes its links as long as the product: it is not left to its
// end, and where the network takes longest (2 k / 665.6 TFLOP/s against 2 (N - 1) / L / 50 GB/s, or
// what the caller says of its machine) it has the more groups.
TEST(Tilings, MoreGroupsSumWhatGoesToTheWholeNode) {
  struct Receive {
    std::uint32_t nodes, locals;
    std::uint32_t gpus;
    std::uint32_t k;
    double network_bytes_per_s;
    std::uint32_t groups;
  };
  for (const Receive& one :
       {Receive{2, 4, 4, 256, 0, 48}, Receive{2, 4, 4, 2048, 0, 48}, Receive{2, 4, 4, 3300, 0, 48},
        Receive{2, 4, 4, 3400, 0, 24}, Receive{2, 4, 4, 2048, 100e9, 24},
        Receive{2, 4, 1, 2048, 0, 24}, Receive{2, 8, 8, 1600, 0, 48}, Receive{2, 8, 8, 1700, 0, 24},
        Receive{4, 8, 8, 4900, 0, 48}, Receive{4, 8, 8, 5000, 0, 24}, Receive{2, 2, 2, 256, 0, 24},
        Receive{2, 1, 1, 256, 0, 7}, Receive{2, 1, 1, 8192, 0, 7}}) {
    MachineRates rates;
    rates.network_bytes_per_s = one.network_bytes_per_s;
    const World world{one.nodes, one.locals, 0, 0};
    EXPECT_EQ(gemm_ar_receive_groups(world, one.gpus, one.k, 128, rates), one.groups)
        << one.nodes << " x " << one.locals << ", k " << one.k;
  }
}

// Groups show rows in pieces that leave nobody waiting long, the smaller the more ranks wait for
// them. DMA engines bring many at a time: a row of tiles each.
TEST(Tilings, ChunksWithinANodeAreSmallWhereGroupsGather) {
  const auto chunk_kib = [](std::uint32_t locals, const Shape& max, std::uint32_t blocks) {
    return ag_gemm_cuda_tiling(1, locals, max, blocks, {}).chunk_bytes / 1024;
  };
  constexpr std::uint32_t kGroups = kBlocksMax - 1;
  EXPECT_EQ(chunk_kib(8, {2048, 256, 2048}, kBlocksMax), 32u);
  EXPECT_EQ(chunk_kib(8, {4096, 512, 4096}, kGroups), 64u);
  EXPECT_EQ(chunk_kib(2, {8192, 1024, 8192}, kGroups), 64u);
  EXPECT_EQ(chunk_kib(8, {8192, 1024, 8192}, kGroups), 32u);
  EXPECT_EQ(chunk_kib(8, {16384, 2048, 16384}, kGroups), 128u);
  EXPECT_EQ(chunk_kib(2, {16384, 2048, 16384}, kGroups), 256u);
  EXPECT_EQ(chunk_kib(8, {2048, 7168, 8192}, kGroups), 128u);
  EXPECT_EQ(chunk_kib(8, {4096, 7168, 8192}, kGroups), 64u);
  EXPECT_EQ(chunk_kib(8, {16384, 7168, 8192}, kGroups), 128u);
  EXPECT_EQ(chunk_kib(2, {4096, 1024, 4096}, kBlocksMax), 1024u);
  EXPECT_EQ(chunk_kib(8, {4096, 7168, 8192}, kBlocksMax), 2048u);
  EXPECT_EQ(chunk_kib(8, {16384, 2048, 16384}, kBlocksMax), 4096u);
  EXPECT_EQ(chunk_kib(8, {32768, 4096, 32768}, kBlocksMax), 8192u);
  EXPECT_EQ(chunk_kib(8, {65536, 4096, 65536}, kBlocksMax), 8192u);
  EXPECT_EQ(chunk_kib(2, {1 << 18, 4096, 256}, kBlocksMax), 128u);
}

// Over nodes the first rows come long before the last, however large their chunks are: what is on
// its way at one time, a part for each group, is a few rows of tiles at most. Within a node, where
// chunks are small, as they are. The network gets the first two dozen chunks first.
TEST(Tilings, RowsAreHandedOutInTheOrderInWhichTheyAreNeeded) {
  RoleBlocks blocks;
  blocks.share = 49;
  blocks.receive = 24;
  for (const std::uint32_t m : {2048u, 4096u, 8192u, 16384u, 32768u}) {
    for (const std::uint32_t locals : {2u, 4u, 8u}) {
      SCOPED_TRACE(testing::Message() << m << " rows, " << locals << " ranks in each of two nodes");
      const Shape max{m, m / 8, m};
      const Tiling tiling = ag_gemm_cuda_tiling(2, locals, max, kBlocks, {});
      const auto plan = AgGemmPlan::make(2, locals, max, DType::kBf16, tiling);
      ASSERT_TRUE(plan) << plan.error().message;
      const GatherSchedule schedule(plan->gather, {2, locals, 0, 0});
      const std::uint32_t rows = m / (2 * locals);
      const std::uint32_t chunks = schedule.chunks(rows);
      const gather::Sharing sharing = ag_gemm_sharing(schedule, blocks, rows, false);
      const std::uint32_t of_chunk = plan->gather.chunk_bytes / sharing.parts;
      const std::uint32_t most = (locals == 2 ? 256 : 64) * 1024;
      EXPECT_LE(of_chunk, most);
      EXPECT_EQ(sharing.network_first, std::min(chunks, 24u));
      EXPECT_EQ(sharing.taken, chunks > 128) << "of few chunks each group has a few from the start";
      const gather::PassingOn onward = ag_gemm_passing_on(schedule, blocks, m, false);
      EXPECT_LE(plan->gather.chunk_bytes / onward.parts, most);
      EXPECT_EQ(onward.taken, sharing.taken);
      EXPECT_EQ(onward.dma_chunks, 0u);
      // A header, and four pieces.
      EXPECT_EQ(ag_gemm_passing_on(schedule, blocks, m, true).dma_chunks, div_up(chunks - 1, 4));
    }
  }
  // Within one node in their order; where DMA engines bring them, groups have nothing to do.
  const Shape max{16384, 2048, 16384};
  const auto plan =
      AgGemmPlan::make(1, 8, max, DType::kBf16, ag_gemm_cuda_tiling(1, 8, max, kBlocksMax / 2, {}));
  ASSERT_TRUE(plan) << plan.error().message;
  const GatherSchedule schedule(plan->gather, {1, 8, 0, 0});
  const gather::Sharing sharing = ag_gemm_sharing(schedule, blocks, 2048, false);
  EXPECT_EQ(sharing.parts, 1u);
  EXPECT_EQ(sharing.network_first, 0u) << "there is no network";
  EXPECT_FALSE(sharing.taken);
  EXPECT_FALSE(sharing.by_dma);
  EXPECT_TRUE(ag_gemm_sharing(schedule, blocks, 2048, true).by_dma);
}

// A kernel is compiled for each of these widths, for 64 columns only of AllGather + GEMM; and what
// is chosen makes a plan.
TEST(Tilings, AreWhatKernelsAreCompiledForAndPlansTake) {
  for (std::uint32_t nodes = 1; nodes <= 4; ++nodes) {
    for (std::uint32_t locals = 1; locals <= 8; ++locals) {
      for (const std::uint32_t m : {1u, 100u, 2048u, 5000u, 65536u}) {
        for (const std::uint32_t n : {8u, 64u, 200u, 1024u, 2048u, 7168u, 16384u}) {
          for (const std::uint32_t blocks : {4u, 33u, 132u}) {
            const Shape max{m, n, 512};
            SCOPED_TRACE(text({nodes, locals, max, 0, 0}));
            const Tiling ag = ag_gemm_cuda_tiling(nodes, locals, max, blocks, {});
            EXPECT_TRUE(ag.tile_n == 64 || ag.tile_n == 128 || ag.tile_n == 256) << ag.tile_n;
            EXPECT_TRUE(ag.tile_m == 64 || ag.tile_m == 128) << ag.tile_m;
            EXPECT_TRUE(AgGemmPlan::make(nodes, locals, max, DType::kBf16, ag));
            const Tiling rs = gemm_rs_cuda_tiling(nodes, locals, max, blocks);
            EXPECT_TRUE(rs.tile_m == 128 && (rs.tile_n == 128 || rs.tile_n == 256)) << rs.tile_n;
            EXPECT_TRUE(GemmRsPlan::make(nodes, locals, max, DType::kBf16, rs));
            const Tiling ar = gemm_ar_cuda_tiling(nodes, max, blocks);
            EXPECT_TRUE(ar.tile_m == 128 && (ar.tile_n == 128 || ar.tile_n == 256)) << ar.tile_n;
            EXPECT_TRUE(GemmArPlan::make(nodes, locals, max, DType::kBf16, ar));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels
