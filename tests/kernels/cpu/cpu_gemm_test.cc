// Tiles: right on all paths, for odd shapes, both layouts of B, and any leading dimensions; on the
// ordered path with bits that depend on nothing but the row and the column.
#include "kernels/cpu/cpu_gemm.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "tests/kernels/support/reference.h"

namespace mk::kernels::testing {
namespace {

struct Tile {
  CpuGemm::TileShape shape;
  std::uint32_t k = 0;
  std::uint64_t lda = 0;
  std::uint64_t ldb = 0;
  std::vector<std::uint16_t> a;
  std::vector<std::uint16_t> b;
};

Tile draw(DType dtype, BLayout layout, CpuGemm::TileShape shape, std::uint32_t k, std::uint32_t pad,
          std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Tile tile;
  tile.shape = shape;
  tile.k = k;
  tile.lda = k + pad;
  tile.ldb = (layout == BLayout::kKN ? shape.columns : k) + pad;
  tile.a = random_values(dtype, shape.rows * tile.lda, random);
  tile.b = random_values(dtype, (layout == BLayout::kKN ? k : shape.columns) * tile.ldb, random);
  poison_gaps(tile.a, tile.lda, pad);
  poison_gaps(tile.b, tile.ldb, pad);
  return tile;
}

void expect_right(DType dtype, BLayout layout, const Tile& tile, const std::vector<float>& got) {
  for (std::uint32_t i = 0; i < tile.shape.rows; ++i) {
    for (std::uint32_t j = 0; j < tile.shape.columns; ++j) {
      double sum = 0;
      double magnitude = 0;
      for (std::uint32_t l = 0; l < tile.k; ++l) {
        const double product = to_double(dtype, tile.a[i * tile.lda + l]) *
                               to_double(dtype, layout == BLayout::kKN ? tile.b[l * tile.ldb + j]
                                                                       : tile.b[j * tile.ldb + l]);
        sum += product;
        magnitude += std::abs(product);
      }
      const double bound =
          tile.k * 0x1p-24 / (1 - tile.k * 0x1p-24) * magnitude + tile.k * 0x1p-126;
      ASSERT_LE(std::abs(static_cast<double>(got[i * tile.shape.columns + j]) - sum), bound)
          << i << " " << j;
    }
  }
}

TEST(CpuGemm, AllPathsTypesAndLayouts) {
  for (DType dtype : {DType::kBf16, DType::kF16}) {
    for (BLayout layout : {BLayout::kKN, BLayout::kNK}) {
      for (GemmPath path : {GemmPath::kAuto, GemmPath::kThroughF32, GemmPath::kOrdered}) {
        for (std::uint32_t k : {1u, 7u, 64u, 1024u, 1025u, 2500u}) {
          const CpuGemm::TileShape largest{16, 24};
          auto gemm = CpuGemm::create(1, largest, k, dtype, layout, path);
          ASSERT_TRUE(gemm) << gemm.error().message;
          for (CpuGemm::TileShape shape : {largest, CpuGemm::TileShape{1, 1}, {5, 24}, {16, 3}}) {
            for (std::uint32_t pad : {0u, 3u}) {
              SCOPED_TRACE(fmt::format("{} {} {} x {} x {} pad {}", name_of(dtype),
                                       name_of((*gemm)->path()), shape.rows, shape.columns, k,
                                       pad));
              const Tile tile = draw(dtype, layout, shape, k, pad, k);
              ASSERT_TRUE((*gemm)->prepare({&shape, 1}, {&tile.lda, 1}, tile.ldb));
              std::vector<float> got(shape.rows * shape.columns + 1, 42.0f);
              ASSERT_TRUE(
                  (*gemm)->multiply(0, shape, tile.a.data(), tile.lda, tile.b.data(), got.data()));
              expect_right(dtype, layout, tile, got);
              EXPECT_EQ(got.back(), 42.0f) << "nothing beyond the tile";
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(CpuGemm, ManyShapesDoNotPileUp) {
  auto gemm = CpuGemm::create(1, {64, 64}, 8, DType::kBf16, BLayout::kKN, GemmPath::kThroughF32);
  ASSERT_TRUE(gemm);
  for (std::uint32_t rows = 1; rows <= 64; ++rows) {
    for (std::uint32_t columns = 1; columns <= 64; columns += 7) {
      const CpuGemm::TileShape shape{rows, columns};
      const Tile tile = draw(DType::kBf16, BLayout::kKN, shape, 8, 0, rows * 64 + columns);
      ASSERT_TRUE((*gemm)->prepare({&shape, 1}, {&tile.lda, 1}, tile.ldb));
      std::vector<float> got(rows * columns);
      ASSERT_TRUE((*gemm)->multiply(0, shape, tile.a.data(), tile.lda, tile.b.data(), got.data()));
      expect_right(DType::kBf16, BLayout::kKN, tile, got);
    }
  }
}

TEST(CpuGemm, BlocksMultiplyAtTheSameTimeAndGetTheSameBits) {
  constexpr std::uint32_t kBlocks = 3;
  const CpuGemm::TileShape shape{32, 48};
  auto gemm = CpuGemm::create(kBlocks, shape, 777, DType::kBf16, BLayout::kNK);
  ASSERT_TRUE(gemm);
  const Tile tile = draw(DType::kBf16, BLayout::kNK, shape, 777, 0, 4);
  ASSERT_TRUE((*gemm)->prepare({&shape, 1}, {&tile.lda, 1}, tile.ldb));
  std::vector<std::vector<float>> got(kBlocks, std::vector<float>(shape.rows * shape.columns));
  std::vector<std::thread> threads;
  for (std::uint32_t block = 0; block < kBlocks; ++block) {
    threads.emplace_back([&, block] {
      for (int i = 0; i < 20; ++i) {
        ASSERT_TRUE((*gemm)->multiply(block, shape, tile.a.data(), tile.lda, tile.b.data(),
                                      got[block].data()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_right(DType::kBf16, BLayout::kNK, tile, got[0]);
  for (const auto& other : got) EXPECT_EQ(other, got[0]);
}

/// Every element of tiles of all heights and many widths, at any place of the matrix, against the
/// same element of the whole product.
TEST(CpuGemm, OrderedBitsDependOnRowAndColumnAlone) {
  constexpr std::uint32_t kRows = 37, kColumns = 75;
  for (BLayout layout : {BLayout::kKN, BLayout::kNK}) {
    for (std::uint32_t k : {1u, 100u, 1030u}) {
      const Tile all = draw(DType::kBf16, layout, {kRows, kColumns}, k, 3, k);
      auto gemm = CpuGemm::create(1, all.shape, k, DType::kBf16, layout, GemmPath::kOrdered);
      ASSERT_TRUE(gemm) << gemm.error().message;
      EXPECT_EQ((*gemm)->path(), GemmPath::kOrdered);
      ASSERT_TRUE((*gemm)->prepare({&all.shape, 1}, {&all.lda, 1}, all.ldb));
      std::vector<float> whole(kRows * kColumns);
      ASSERT_TRUE(
          (*gemm)->multiply(0, all.shape, all.a.data(), all.lda, all.b.data(), whole.data()));
      std::mt19937_64 random(k);
      for (std::uint32_t rows = 1; rows <= kRows; ++rows) {
        const CpuGemm::TileShape shape{rows, static_cast<std::uint32_t>(1 + random() % kColumns)};
        const std::size_t row = random() % (kRows - rows + 1);
        const std::size_t column = random() % (kColumns - shape.columns + 1);
        const std::uint16_t* const b =
            all.b.data() + (layout == BLayout::kKN ? column : column * all.ldb);
        std::vector<float> got(rows * shape.columns);
        ASSERT_TRUE(
            (*gemm)->multiply(0, shape, all.a.data() + row * all.lda, all.lda, b, got.data()));
        for (std::uint32_t i = 0; i < rows; ++i) {
          for (std::uint32_t j = 0; j < shape.columns; ++j) {
            ASSERT_EQ(got[i * shape.columns + j], whole[(row + i) * kColumns + column + j])
                << rows << " x " << shape.columns << " at " << row << ", " << column << ": " << i
                << " " << j;
          }
        }
      }
    }
  }
}

TEST(CpuGemm, F16IsNotNative) {
  const auto gemm = CpuGemm::create(1, {16, 16}, 16, DType::kF16, BLayout::kKN, GemmPath::kNative);
  ASSERT_FALSE(gemm);
  EXPECT_EQ(gemm.error().code, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace mk::kernels::testing
