#include "tests/gpu/race.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "tests/gpu/gemm_reference.h"

namespace mk::test {

double RaceTiming::median() const {
  std::vector<double> sorted = us;
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}
double RaceTiming::min() const { return *std::min_element(us.begin(), us.end()); }
double RaceTiming::max() const { return *std::max_element(us.begin(), us.end()); }

std::vector<RaceTiming> race(const std::vector<Launch>& sides, int sets, double flops,
                             double seconds) {
  constexpr double kSampleUs = 4000;
  const double guess_us = flops / 650e6 + 4;
  const int reps = std::max(2, static_cast<int>(kSampleUs / guess_us));
  const int samples = std::clamp(static_cast<int>(seconds * 1e6 / (reps * guess_us)), 7, 101);
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<RaceTiming> timings(sides.size());
  int set = 0;
  constexpr int kWarmups = 2;
  for (int sample = -kWarmups; sample < samples; ++sample) {
    for (std::size_t i = 0; i < sides.size(); ++i) {
      const std::size_t side = sample % 2 == 0 ? i : sides.size() - 1 - i;
      sides[side](set);  // keeps the GPU busy while the begin event is queued
      require(cudaEventRecord(begin), "cudaEventRecord");
      for (int r = 0; r < reps; ++r) {
        set = set + 1 == sets ? 0 : set + 1;
        sides[side](set);
      }
      require(cudaEventRecord(end), "cudaEventRecord");
      require(cudaEventSynchronize(end), "timed launches");
      float ms = 0;
      require(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      if (sample >= 0) timings[side].us.push_back(ms * 1000.0 / reps);
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return timings;
}

std::vector<RaceTiming> endure(const std::vector<Launch>& sides, int sets, double flops,
                               double seconds, int rounds) {
  const int reps = std::max(2, static_cast<int>(seconds / 2 * 1e6 / (flops / 650e6 + 4)));
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<RaceTiming> timings(sides.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t side = 0; side < sides.size(); ++side) {
      for (int r = 0; r < 2 * reps; ++r) {
        if (r == reps) require(cudaEventRecord(begin), "cudaEventRecord");
        sides[side](r % sets);
      }
      require(cudaEventRecord(end), "cudaEventRecord");
      require(cudaEventSynchronize(end), "timed launches");
      float ms = 0;
      require(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      timings[side].us.push_back(ms * 1000.0 / reps);
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return timings;
}

}  // namespace mk::test
