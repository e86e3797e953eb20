/// \file
/// What the tests of operators on GPUs have in common, in whichever world they run: launches of all
/// ranks, and launches that end because a rank is missing or the session is told to stop.
#pragma once

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "shm/atomic.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/placed_ranks.h"
#include "tests/gpu/products.h"
#include "tests/gpu/summed_reference.h"

namespace mk::test {

using namespace std::chrono_literals;

/// All ranks and proxies are one process here. With CUDA's 8 connections to a GPU, a proxy's copy
/// may get in line behind launches that wait for it.
[[maybe_unused]] inline const int kConnections = ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

struct GpuWorld {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  int devices = 1;
};

template <class World>
std::string name_of_world(const testing::TestParamInfo<World>& world) {
  return std::to_string(world.param.nodes) + "x" + std::to_string(world.param.locals) + "_on_" +
         std::to_string(world.param.devices);
}

/// `World`: a GpuWorld, or what has the same members. `Ranks`, below: PlacedRanks.
template <class World>
class OnGpus : public testing::TestWithParam<World> {
 protected:
  void SetUp() override {
    if (device_count() < this->GetParam().devices)
      GTEST_SKIP() << "needs " << this->GetParam().devices << " CUDA devices";
  }
  void TearDown() override {
    if (worst_ > 0) this->RecordProperty("worst_error_over_bound", std::to_string(worst_));
  }
  static std::uint32_t world() { return OnGpus::GetParam().nodes * OnGpus::GetParam().locals; }
  /// A job's setup in this world.
  template <class Setup>
  static Setup placed() {
    Setup setup;
    setup.nodes = OnGpus::GetParam().nodes;
    setup.locals = OnGpus::GetParam().locals;
    setup.devices = OnGpus::GetParam().devices;
    return setup;
  }

  /// `late`: some ranks' streams are busy before.
  template <class Ranks>
  void launch_all(Ranks& ranks, kernels::Mode mode, bool late, std::uint32_t set = 0) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      if (late && random_() % 3 == 0) {
        ranks.make_current(r);
        delay(random_() % 200'000, ranks.stream(r));
      }
      Status launched;
      if constexpr (requires { ranks.launch(r, mode, set); }) {
        launched = ranks.launch(r, mode, set);
      } else {
        launched = ranks.launch(r, mode);
      }
      ASSERT_TRUE(launched) << launched.error().message;
    }
  }
  template <class Ranks>
  void finish_all(Ranks& ranks) {
    for (std::uint32_t r = 0; r < ranks.world(); ++r) {
      const Status finished = ranks.finish(r);
      ASSERT_TRUE(finished) << finished.error().message << "\n" << ranks.op(r).progress();
    }
  }
  /// The ranks have launched once. Now `launch(rank)` of all but the last one fails within `limit`,
  /// on each, for good, and one of them at least names that rank. Then it comes, too: its launch
  /// ends in any case. Answers how.
  template <class Ranks, class Launch>
  static Status miss_last_rank(Ranks& ranks, const std::string& operation, Launch&& launch,
                               std::chrono::seconds limit = 5s) {
    const std::uint32_t missing = ranks.world() - 1;
    const auto begin = std::chrono::steady_clock::now();
    for (std::uint32_t r = 0; r < missing; ++r) EXPECT_TRUE(launch(r));
    std::string texts;
    for (std::uint32_t r = 0; r < missing; ++r) {
      const Status finished = ranks.finish(r);
      if (finished) {
        ADD_FAILURE() << "rank " << r << " ended without rank " << missing;
        continue;
      }
      const std::string& text = finished.error().message;
      texts += text + "\n";
      // Of another node's ranks nobody hears here why they are late.
      if (finished.error().code != ErrorCode::kTimeout) {
        EXPECT_EQ(finished.error().code, ErrorCode::kAborted) << text;
      }
      EXPECT_THAT(text, testing::HasSubstr(operation + " launch 2 on rank " + std::to_string(r)));
      const Status again = launch(r);
      EXPECT_TRUE(!again && again.error().message == text) << text;
    }
    EXPECT_THAT(texts, testing::HasSubstr("for rank " + std::to_string(missing)));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, limit);
    EXPECT_TRUE(launch(missing));
    return ranks.finish(missing);
  }
  /// `make(abort)` answers ranks that heed that word and have launched. Then `launch(ranks, rank)`
  /// of all but rank 0 ends within a second of the word.
  template <class Make, class Launch>
  static void abort_launches(Make&& make, Launch&& launch) {
    void* word = nullptr;
    require(cudaHostAlloc(&word, 64, cudaHostAllocMapped | cudaHostAllocPortable), "abort word");
    auto* const abort = static_cast<std::uint32_t*>(word);
    *abort = 0;
    {
      const auto ranks = make(abort);
      for (std::uint32_t r = 1; r < ranks->world(); ++r) EXPECT_TRUE(launch(*ranks, r));
      std::this_thread::sleep_for(50ms);
      const auto begin = std::chrono::steady_clock::now();
      shm::store_release(abort, 1u);
      for (std::uint32_t r = 1; r < ranks->world(); ++r) {
        const Status finished = ranks->finish(r);
        EXPECT_TRUE(!finished && finished.error().code == ErrorCode::kAborted)
            << "rank " << r << (finished ? "" : finished.error().message);
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begin, 1s);
    }
    require(cudaFreeHost(word), "abort word");
  }

  std::mt19937_64 random_{std::random_device{}()};
  double worst_ = 0;
};

}  // namespace mk::test
