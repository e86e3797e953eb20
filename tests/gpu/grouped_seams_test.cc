// The grouped product as operators use it. Rows arrive while it runs, tiles come in the order of a
// list made on the device, and rows are stored where a table says. Rows that never come end in a
// failed wait, not in a hang.
#include "tests/gpu/grouped_seams.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/core/tensor_map.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/grouped_case.h"
#include "tests/gpu/products.h"

namespace mk::test {
namespace {

using kernels::cuda::BLayout;
using kernels::cuda::DType;
using kernels::cuda::GroupedTile;
using kernels::cuda::make_expert_weights_map;
using kernels::cuda::make_row_window_map;
using kernels::cuda::make_tensor_map;

constexpr int kBlocks = 40;  // several tiles each, and room beside them for the arrivals
constexpr std::uint64_t kPlentyNs = 5'000'000'000;

class GroupedSeams : public testing::Test {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "no CUDA device";
    require(cudaStreamCreateWithFlags(&arrivals_, cudaStreamNonBlocking), "stream");
    require(cudaStreamCreateWithFlags(&product_, cudaStreamNonBlocking), "stream");
    require(prepare_grouped_seams(), "prepare_grouped_seams");
  }
  void TearDown() override {
    for (auto* stream : {arrivals_, product_}) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }

  /// A launch whose rows arrive while it runs, chunk `skip` excepted; whether all waits ended well.
  bool run(const GroupedCase& from, const std::vector<std::uint32_t>& to, int skip,
           std::uint64_t deadline_ns, std::uint64_t seed) {
    const auto& problem = from.problem();
    const int rows = problem.rows_max;
    const auto bytes = [](std::int64_t elements) { return static_cast<std::size_t>(elements) * 2; };
    const DeviceMemory a(bytes(std::int64_t{rows} * problem.k));
    const DeviceMemory table(4 * to.size());
    const DeviceMemory tiles(sizeof(GroupedTile) *
                             static_cast<std::size_t>(rows / 128 + problem.experts));
    const int chunks = rows / GroupedSeamProduct::kChunkRows + 1;
    const DeviceMemory words(4 * static_cast<std::size_t>(GroupedSeamProduct::kWords + chunks));
    poison(a.data(), std::int64_t{rows} * problem.k, nullptr);
    require(cudaMemcpy(table.data(), to.data(), 4 * to.size(), cudaMemcpyHostToDevice), "table");
    require(cudaMemset(words.data(), 0,
                       4 * static_cast<std::size_t>(GroupedSeamProduct::kWords + chunks)),
            "words");
    GroupedSeamProduct product;
    product.experts = problem.experts;
    product.rows = rows;
    product.n = problem.n;
    product.k = problem.k;
    product.to = static_cast<const std::uint32_t*>(table.data());
    product.offsets = problem.offsets;
    product.tiles = static_cast<GroupedTile*>(tiles.data());
    product.words = static_cast<std::uint32_t*>(words.data());
    product.arrived = product.words + GroupedSeamProduct::kWords;
    product.epoch = 7;
    product.deadline_ns = deadline_ns;
    const GroupedSeamMaps maps{
        *make_row_window_map("A", DType::kBf16, a.data(), rows, problem.k, 128, 64),
        *make_row_window_map("A", DType::kBf16, a.data(), rows, problem.k, 64, 64),
        *make_expert_weights_map("B", DType::kBf16, BLayout::kNK, problem.b, problem.experts,
                                 problem.n, problem.k, 1, 256),
        *make_tensor_map("C", DType::kBf16, problem.c, rows, problem.n, problem.n, 1, 64)};
    require(cudaDeviceSynchronize(), "inputs");
    require(launch_grouped_seam_product(maps, product, kBlocks, product_), "product");
    require(launch_row_arrivals(product, problem.a, a.data(), skip,
                                static_cast<std::uint32_t>(seed % 1000000), arrivals_),
            "arrivals");
    require(cudaDeviceSynchronize(), "launch");
    std::uint32_t failed = 0;
    require(cudaMemcpy(&failed, product.words + 2, 4, cudaMemcpyDeviceToHost), "words");
    return failed == 0;
  }

  cudaStream_t arrivals_ = nullptr;
  cudaStream_t product_ = nullptr;
};

/// A number below `end`.
std::uint32_t draw(std::mt19937& random, std::uint32_t end) {
  return static_cast<std::uint32_t>(random() % end);
}

/// Some experts without rows.
GroupedShape drawn_shape(std::mt19937& random) {
  GroupedShape shape;
  shape.counts.resize(1 + draw(random, 12));
  for (auto& count : shape.counts) count = draw(random, 4) == 0 ? 0 : draw(random, 400);
  shape.counts[0] = 100;
  shape.n = 520;
  shape.k = 8 * static_cast<int>(1 + draw(random, 120));
  return shape;
}

TEST_F(GroupedSeams, RowsArriveWhileItRunsAndAreStoredElsewhere) {
  std::mt19937 random(static_cast<unsigned>(fresh_seed()));
  for (int launch = 0; launch < 60; ++launch) {
    const GroupedShape shape = drawn_shape(random);
    const GroupedCase product(shape, fresh_seed());
    std::vector<std::uint32_t> to(static_cast<std::size_t>(product.problem().rows_max));
    std::iota(to.begin(), to.end(), 0u);
    std::shuffle(to.begin(), to.end(), random);
    ASSERT_TRUE(run(product, to, -1, kPlentyNs, random()));
    // Back where the reference looks for them; the guard stays.
    const auto scattered = product.output(nullptr);
    auto sorted = scattered;
    for (std::size_t row = 0; row < to.size(); ++row) {
      const auto n = static_cast<std::size_t>(shape.n);
      std::copy_n(scattered.begin() + static_cast<std::ptrdiff_t>(to[row] * n), n,
                  sorted.begin() + static_cast<std::ptrdiff_t>(row * n));
    }
    require(
        cudaMemcpy(product.problem().c, sorted.data(), 2 * sorted.size(), cudaMemcpyHostToDevice),
        "sorted");
    const GroupedVerdict verdict = product.judge(nullptr);
    ASSERT_TRUE(verdict.right()) << shape.text() << ": " << verdict.rows.bad << " wrong, "
                                 << verdict.touched << " touched";
  }
}

TEST_F(GroupedSeams, RowsThatNeverComeEndTheLaunch) {
  GroupedShape shape{{300, 0, 200}, 520, 256};
  const GroupedCase product(shape, fresh_seed());
  std::vector<std::uint32_t> to(500);
  std::iota(to.begin(), to.end(), 0u);
  EXPECT_FALSE(run(product, to, 4, 50'000'000, 1));
  product.poison_output(nullptr);
  EXPECT_TRUE(run(product, to, -1, kPlentyNs, 1));
  EXPECT_TRUE(product.judge(nullptr).right());
}

}  // namespace
}  // namespace mk::test
