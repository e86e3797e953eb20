/// \file
/// Ranks as threads, each at its own pace.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

namespace mk::kernels::testing {

/// Calls `launch(rank, i)` for i = 0 .. launches - 1 on one thread per rank, with random pauses of
/// at most `pause_max` before a call. A rank stops when it answers false.
template <class Launch>
void run_ranks(std::uint32_t ranks, std::size_t launches, std::uint64_t seed,
               std::chrono::microseconds pause_max, Launch&& launch) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937_64 random(seed * 31 + rank);
      for (std::size_t i = 0; i < launches; ++i) {
        if (pause_max.count() > 0 && random() % 2 == 0) {
          std::this_thread::sleep_for(pause_max * (random() % 1000) / 1000);
        }
        if (!launch(rank, i)) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace mk::kernels::testing
