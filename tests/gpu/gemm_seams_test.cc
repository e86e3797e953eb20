// The three policies of the GEMM core at work in one launch: A arrives chunk by chunk from a kernel
// running beside the product, finished tiles leave slot by slot to another. A chunk that never
// comes ends in an incident, not in a hang.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/core/tensor_map.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/gemm_seams.h"

namespace mk::test {
namespace {

using kernels::cuda::DType;
using kernels::cuda::make_tensor_map;

constexpr int kRowsMax = 1500;
constexpr int kColumns = 1000;
constexpr int kDepthMax = 1096;
constexpr int kRowBlocksMax = (kRowsMax + kSeamBlockM - 1) / kSeamBlockM;
constexpr int kTileColumns = (kColumns + kSeamBlockN - 1) / kSeamBlockN;
constexpr std::int64_t kSlots = std::int64_t{kRowBlocksMax} * kTileColumns;
constexpr int kFlagsMax = 4096;
constexpr int kBlocks = 40;  // several tiles each, and room beside them for the two helpers
constexpr std::uint64_t kPlentyNs = 5'000'000'000;

/// The parameter is the device that the tiles go to: this one, or a peer over NVLink.
class GemmSeams : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    if (devices <= GetParam()) GTEST_SKIP() << "needs " << GetParam() + 1 << " CUDA devices";
    if (GetParam() != 0) {
      allow_access(0, GetParam());
      allow_access(GetParam(), 0);
    }
    require(cudaSetDevice(GetParam()), "cudaSetDevice");
    require(cudaStreamCreateWithFlags(&departures_, cudaStreamNonBlocking), "stream");
    require(prepare_seams(), "prepare_seams");
    require(cudaSetDevice(0), "cudaSetDevice");
    require(cudaStreamCreateWithFlags(&arrivals_, cudaStreamNonBlocking), "stream");
    require(cudaStreamCreateWithFlags(&product_, cudaStreamNonBlocking), "stream");
    require(prepare_seams(), "prepare_seams");

    const auto bytes = [](std::int64_t elements) { return static_cast<std::size_t>(elements) * 2; };
    constexpr std::int64_t kSlotElements = std::int64_t{kSeamBlockM} * kSeamBlockN;
    memory_.emplace_back(bytes(std::int64_t{kRowsMax} * kDepthMax));             // source
    memory_.emplace_back(bytes(std::int64_t{kRowsMax} * kDepthMax));             // a
    memory_.emplace_back(bytes(std::int64_t{kColumns} * kDepthMax));             // b
    memory_.emplace_back(bytes(kSlots * kSlotElements), GetParam());             // slots
    memory_.emplace_back(bytes(std::int64_t{kRowsMax} * kColumns), GetParam());  // c
    memory_.emplace_back(std::size_t{kFlagsMax * 4});                            // chunk_flags
    memory_.emplace_back(std::size_t{kFlagsMax * 4}, GetParam());                // tile_flags
    memory_.emplace_back(sizeof(Incident));                                      // incident
    require(cudaMemset(chunk_flags(), 0, kFlagsMax * 4), "flags");
    require(cudaMemset(tile_flags(), 0, kFlagsMax * 4), "flags");
    clear_incident();
  }
  void TearDown() override {
    for (auto* stream : {arrivals_, product_, departures_}) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  }

  /// Waits for both devices.
  void finish(const char* what) {
    require(cudaStreamSynchronize(departures_), what);
    require(cudaDeviceSynchronize(), what);
  }

  void* source() { return memory_[0].data(); }
  void* a() { return memory_[1].data(); }
  void* b() { return memory_[2].data(); }
  void* slots() { return memory_[3].data(); }
  void* c() { return memory_[4].data(); }
  std::uint32_t* chunk_flags() { return static_cast<std::uint32_t*>(memory_[5].data()); }
  std::uint32_t* tile_flags() { return static_cast<std::uint32_t*>(memory_[6].data()); }
  Incident* incident() { return static_cast<Incident*>(memory_[7].data()); }

  void clear_incident() {
    const Incident none;
    require(cudaMemcpy(incident(), &none, sizeof none, cudaMemcpyHostToDevice), "incident");
  }
  Incident read_incident() {
    Incident read;
    require(cudaMemcpy(&read, incident(), sizeof read, cudaMemcpyDeviceToHost), "incident");
    return read;
  }

  /// Fresh inputs, everything the launch writes poisoned.
  SeamProduct make_product(int m, int k, std::uint32_t epoch) {
    fill_normal(source(), DType::kBf16, std::int64_t{m} * k, random_(), nullptr);
    fill_normal(b(), DType::kBf16, std::int64_t{kColumns} * k, random_(), nullptr);
    poison(a(), std::int64_t{kRowsMax} * kDepthMax, nullptr);
    poison(slots(), std::int64_t{kRowBlocksMax} * kTileColumns * kSeamBlockM * kSeamBlockN,
           nullptr);
    poison(c(), std::int64_t{m} * kColumns, nullptr);
    require(cudaDeviceSynchronize(), "inputs");
    SeamProduct product;
    product.pair = random_() % 2 == 0;
    product.staged = random_() % 2 == 0;
    product.jitter_ns = random_() % 2 == 0 ? 0 : 20'000;
    product.m = m;
    product.n = kColumns;
    product.k = k;
    product.a = *make_tensor_map("A", DType::kBf16, a(), m, k, k, kSeamBlockM, 64);
    product.b = *make_tensor_map("B", DType::kBf16, b(), kColumns, k, k, product.b_box_rows(), 64);
    product.slots = *make_tensor_map("slots", DType::kBf16, slots(),
                                     std::int64_t{kRowBlocksMax} * kTileColumns * kSeamBlockM,
                                     kSeamBlockN, kSeamBlockN, 64, 64);
    product.first_m = static_cast<int>(random_() % static_cast<unsigned>(product.worker_rows()));
    product.range_k_blocks = 1 + static_cast<int>(random_() % 20);
    product.epoch = epoch;
    product.deadline_ns = kPlentyNs;
    product.chunk_flags = chunk_flags();
    product.tile_flags = tile_flags();
    product.incident = incident();
    return product;
  }

  /// Launches the three kernels, in an order drawn at random.
  void run(const SeamProduct& product, int skip) {
    std::vector<int> order = {0, 1, 2};
    std::shuffle(order.begin(), order.end(), random_);
    for (int which : order) {
      if (which == 0) {
        require(launch_arrivals(product, source(), a(), skip,
                                static_cast<std::uint32_t>(random_() % 1000000), arrivals_),
                "arrivals");
      } else if (which == 1) {
        require(launch_seam_product(product, kBlocks, product_), "product");
      } else {
        require(cudaSetDevice(GetParam()), "cudaSetDevice");
        require(launch_departures(product, slots(), c(), departures_), "departures");
        require(cudaSetDevice(0), "cudaSetDevice");
      }
    }
    finish("launch");
  }

  Verdict judge_product(const SeamProduct& product) {
    kernels::cuda::GemmProblem problem;
    problem.m = product.m;
    problem.n = product.n;
    problem.k = product.k;
    problem.a = source();
    problem.b = b();
    problem.c = c();
    return judge(problem, 0, product.m, nullptr);
  }

  std::mt19937_64 random_{std::random_device{}()};

 private:
  std::vector<DeviceMemory> memory_;
  cudaStream_t arrivals_ = nullptr, product_ = nullptr, departures_ = nullptr;
};

TEST_P(GemmSeams, ProductRunsWhileItsInputArrivesAndItsTilesLeave) {
  for (std::uint32_t epoch = 1; epoch <= 60; ++epoch) {
    const int m = 1 + static_cast<int>(random_() % kRowsMax);
    const int k = 8 * (1 + static_cast<int>(random_() % (kDepthMax / 8)));
    const SeamProduct product = make_product(m, k, epoch);
    run(product, -1);
    ASSERT_EQ(read_incident().code, 0u);
    const Verdict verdict = judge_product(product);
    ASSERT_TRUE(verdict.right()) << "epoch " << epoch << ", m " << m << ", k " << k << ": "
                                 << verdict.bad << " elements wrong, first " << verdict.first_bad;
  }
}

TEST_P(GemmSeams, MissingChunkEndsInAnIncidentThatNamesIt) {
  // Flags never chosen above: kRowsMax rows, one range, so flag indices are row blocks.
  for (std::uint32_t epoch = 100; epoch < 104; ++epoch) {
    SeamProduct product = make_product(kRowsMax, 512, epoch);
    product.range_k_blocks = 8;
    product.deadline_ns = 20'000'000;
    const int missing = static_cast<int>(random_() % static_cast<unsigned>(product.row_blocks()));
    run(product, missing);
    const Incident incident = read_incident();
    EXPECT_EQ(incident.code, Incident::kTimeout);
    EXPECT_EQ(incident.row_block, missing);
    EXPECT_EQ(incident.range, 0);
    EXPECT_EQ(incident.expected, epoch);
    EXPECT_NE(incident.seen, epoch);
    std::vector<std::uint32_t> flags(static_cast<std::size_t>(kFlagsMax));
    require(cudaMemcpy(flags.data(), tile_flags(), kFlagsMax * 4, cudaMemcpyDeviceToHost), "flags");
    for (int n = 0; n < kTileColumns; ++n) {
      EXPECT_NE(flags[static_cast<std::size_t>(missing * kTileColumns + n)], epoch)
          << "a tile of garbage was announced";
    }
    clear_incident();
  }
  // The GPU is as usable as before.
  const SeamProduct product = make_product(kRowsMax, kDepthMax, 200);
  run(product, -1);
  EXPECT_EQ(read_incident().code, 0u);
  EXPECT_TRUE(judge_product(product).right());
}

INSTANTIATE_TEST_SUITE_P(TilesTo, GemmSeams, testing::Values(0, 1), [](const auto& which) {
  return which.param == 0 ? std::string("ThisDevice") : std::string("APeer");
});

}  // namespace
}  // namespace mk::test
