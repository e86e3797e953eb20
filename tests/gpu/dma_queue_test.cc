// Copies that wait for a word in the GPU's memory, beside whatever runs there.
#include "kernels/cuda/transport/dma_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tests/gpu/devices.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {
namespace {

using kernels::CopyJob;
using kernels::cuda::DmaQueue;
using namespace std::chrono_literals;

constexpr std::size_t kWords = 1 << 16;

void expect(const Status& status) { ASSERT_TRUE(status) << status.error().message; }

class DmaQueues : public testing::Test {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "needs a CUDA device";
    for (cudaStream_t* stream : {&stream_, &other_})
      require(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "stream");
    require(cudaMemset(to_->data(), 0, kWords * 4), "memory");
    require(cudaMemset(go_->data(), 0, 4), "memory");
    require(cudaDeviceSynchronize(), "memory");
    expect(queue_.create());
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    let_go();
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
    cudaStreamDestroy(other_);
  }

  std::uint32_t* go() const { return static_cast<std::uint32_t*>(go_->data()); }
  static std::uint32_t* words(const DeviceMemory& of) {
    return static_cast<std::uint32_t*>(of.data());
  }
  /// As a kernel would.
  void let_go() {
    const std::uint32_t one = 1;
    require(cudaMemcpyAsync(go(), &one, sizeof one, cudaMemcpyHostToDevice, other_), "go");
    require(cudaStreamSynchronize(other_), "go");
  }
  std::vector<std::uint32_t> fill_anew() {
    std::vector<std::uint32_t> values(kWords);
    for (auto& value : values) value = static_cast<std::uint32_t>(random_());
    require(
        cudaMemcpyAsync(from_->data(), values.data(), kWords * 4, cudaMemcpyHostToDevice, other_),
        "values");
    require(cudaStreamSynchronize(other_), "values");
    return values;
  }
  std::vector<std::uint32_t> read(const DeviceMemory& from, std::size_t count) {
    std::vector<std::uint32_t> values(count);
    require(cudaMemcpyAsync(values.data(), from.data(), count * 4, cudaMemcpyDeviceToHost, other_),
            "values");
    require(cudaStreamSynchronize(other_), "values");
    return values;
  }
  void queue_all() {
    expect(queue_.mark(stream_));
    expect(queue_.begin(go()));
    expect(queue_.copy(to_->data(), from_->data(), kWords * 4));
    expect(queue_.join(stream_));
  }

  /// What `queue()` puts on the stream, as a graph.
  template <class Queue>
  cudaGraphExec_t captured(Queue&& queue) {
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    queue();
    cudaGraph_t graph = nullptr;
    require(cudaStreamEndCapture(stream_, &graph), "capture");
    cudaGraphExec_t executable = nullptr;
    require(cudaGraphInstantiate(&executable, graph, 0), "graph");
    require(cudaGraphDestroy(graph), "graph");
    return executable;
  }

  std::mt19937_64 random_{std::random_device{}()};
  cudaStream_t stream_ = nullptr, other_ = nullptr;
  std::unique_ptr<DeviceMemory> from_ = std::make_unique<DeviceMemory>(kWords * 4);
  std::unique_ptr<DeviceMemory> to_ = std::make_unique<DeviceMemory>(kWords * 4);
  std::unique_ptr<DeviceMemory> go_ = std::make_unique<DeviceMemory>(4);
  DmaQueue queue_{"test"};
};

TEST_F(DmaQueues, CopiesBeginWhenTheWordIsOneAndTheStreamWaitsForThem) {
  for (int round = 0; round < 3; ++round) {
    const auto values = fill_anew();
    const auto before = read(*to_, kWords);
    queue_all();
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
    EXPECT_EQ(read(*to_, kWords), before) << "nobody has let them go";
    let_go();
    require(cudaStreamSynchronize(stream_), "copies");
    EXPECT_EQ(read(*to_, kWords), values);
    EXPECT_EQ(read(*go_, 1)[0], 0u) << "the next ones wait again";
  }
}

// Pieces go one by one, in a graph as well, others have turns between, and a word says when all are
// there.
TEST_F(DmaQueues, APieceWaitsForItsNumber) {
  constexpr std::uint32_t kPieces = 4;
  const DeviceMemory pieces(4), ended(4);
  const auto set = [&](const DeviceMemory& word, std::uint32_t value) {
    require(cudaMemcpyAsync(word.data(), &value, 4, cudaMemcpyHostToDevice, other_), "word");
    require(cudaStreamSynchronize(other_), "word");
  };
  const auto queue_pieces = [&] {
    expect(queue_.mark(stream_));
    expect(queue_.begin(go()));
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
      expect(queue_.await(words(pieces), piece + 1));
      const std::size_t at = piece * (kWords / kPieces);
      expect(queue_.copy(words(*to_) + at, words(*from_) + at, kWords / kPieces * 4));
      expect(queue_.yield());
    }
    expect(queue_.write(words(ended), 77));
    expect(queue_.join(stream_));
  };
  const cudaGraphExec_t executable = captured(queue_pieces);
  for (int round = 0; round < 4; ++round) {
    set(pieces, 0);
    set(ended, 0);
    const auto values = fill_anew();
    auto expected = read(*to_, kWords);
    if (round % 2 == 0) {
      queue_pieces();
    } else {
      require(cudaGraphLaunch(executable, stream_), "graph");
    }
    let_go();
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
      std::this_thread::sleep_for(10ms);
      EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
      EXPECT_EQ(read(*to_, kWords), expected) << "piece " << piece << " has not been told of";
      EXPECT_EQ(read(ended, 1)[0], 0u);
      const std::size_t at = piece * (kWords / kPieces);
      std::copy_n(values.begin() + at, kWords / kPieces, expected.begin() + at);
      set(pieces, round == 3 ? 1000 : piece + 1);
      if (round == 3) break;  // all at once, as where a launch has failed
    }
    require(cudaStreamSynchronize(stream_), "copies");
    EXPECT_EQ(read(*to_, kWords), values);
    EXPECT_EQ(read(ended, 1)[0], 77u);
  }
  cudaGraphExecDestroy(executable);
}

TEST_F(DmaQueues, WhatTheCallerHasQueuedComesFirst) {
  const auto values = fill_anew();
  // A copy on the caller's stream that waits for another queue.
  DmaQueue first("test");
  expect(first.create());
  const DeviceMemory first_go(4);
  require(cudaMemset(first_go.data(), 0, 4), "memory");
  require(cudaDeviceSynchronize(), "memory");
  expect(first.mark(stream_));
  expect(first.begin(words(first_go)));
  expect(first.join(stream_));
  let_go();
  queue_all();
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(read(*to_, kWords), std::vector<std::uint32_t>(kWords)) << "before its turn";
  const std::uint32_t one = 1;
  require(cudaMemcpyAsync(first_go.data(), &one, 4, cudaMemcpyHostToDevice, other_), "go");
  require(cudaStreamSynchronize(stream_), "copies");
  EXPECT_EQ(read(*to_, kWords), values);
}

// Rows apart are packed, and what lies between them stays where it is.
TEST_F(DmaQueues, RowsAreCopiedAsTheJobSays) {
  const auto values = fill_anew();
  constexpr std::uint32_t kRows = 37, kRow = 24, kFromStride = 40, kToStride = 28;
  CopyJob job;
  job.source = reinterpret_cast<const std::byte*>(from_->data());
  job.source_stride = kFromStride * 4;
  job.add_target(static_cast<std::byte*>(to_->data()));
  job.target_stride = kToStride * 4;
  job.rows = kRows;
  job.row_bytes = kRow * 4;
  expect(queue_.mark(stream_));
  expect(queue_.begin(go()));
  expect(queue_.copy(job));
  expect(queue_.join(stream_));
  let_go();
  require(cudaStreamSynchronize(stream_), "copies");
  std::vector<std::uint32_t> expected(kWords);
  for (std::uint32_t row = 0; row < kRows; ++row)
    for (std::uint32_t i = 0; i < kRow; ++i)
      expected[row * kToStride + i] = values[row * kFromStride + i];
  EXPECT_EQ(read(*to_, kWords), expected);
}

TEST_F(DmaQueues, AGraphOfThemReplays) {
  const cudaGraphExec_t executable = captured([&] { queue_all(); });
  for (int i = 0; i < 20; ++i) {
    const auto values = fill_anew();
    require(cudaGraphLaunch(executable, stream_), "graph");
    let_go();
    require(cudaStreamSynchronize(stream_), "graph");
    ASSERT_EQ(read(*to_, kWords), values) << "replay " << i;
  }
  cudaGraphExecDestroy(executable);
}

}  // namespace
}  // namespace mk::test
