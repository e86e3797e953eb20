/// \file
/// A whole GEMM+Combine job in one process: every rank is a thread with its own operator, over a
/// Cluster's memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops/combine/cpu.h"
#include "tests/kernels/combine/handles.h"
#include "tests/kernels/support/routed_job.h"

namespace mk::kernels::testing {

using CombineJobOptions = RoutedJobOptions<CombineShape, CombineCpuOptions>;

struct CombineLaunchCase : RoutedLaunch {
  bool residual = false;
  bool nan = false;  ///< each rank's first token has a NaN in one of its rows
};

/// One rank's input of a launch.
struct CombineRankInput {
  RankRouting routing;
  Handle handle;
  std::vector<std::uint16_t> y;         ///< [rows][I]
  std::vector<std::uint16_t> residual;  ///< [tokens][H]
};

struct CombineRankResult {
  Result<LaunchStats> stats = LaunchStats{};
  std::vector<std::uint16_t> out;
};

class CombineJob : public RoutedJob<CombinePlan, CombineCpu, CombineJobOptions> {
 public:
  /// Makes plan, memory and operators; throws if it cannot.
  explicit CombineJob(const CombineJobOptions& options);

  /// Every rank's input.
  std::vector<CombineRankInput> inputs(const CombineLaunchCase& launch) const;
  /// This rank's experts in the operator's layout.
  const std::vector<std::uint16_t>& weights(std::uint32_t rank) const { return weights_[rank]; }
  /// One rank, one launch, on the calling thread; its output is poisoned before.
  CombineRankResult launch(std::uint32_t rank, const CombineRankInput& input, bool residual,
                           Mode mode);

  /// All ranks run all launches, each at its own pace, with random pauses of at most `pause_max`
  /// before a launch. Answers [launch][rank]; a rank stops at its first failure.
  std::vector<std::vector<CombineRankResult>> run(
      const std::vector<CombineLaunchCase>& launches,
      std::chrono::microseconds pause_max = std::chrono::microseconds(0));

  /// Empty, or what is wrong.
  std::string check(const CombineLaunchCase& launch, const std::vector<CombineRankInput>& inputs,
                    const std::vector<CombineRankResult>& results);
  std::string check(const CombineLaunchCase& launch,
                    const std::vector<CombineRankResult>& results) {
    return check(launch, inputs(launch), results);
  }

 private:
  /// [I][H], whatever layout the operator takes.
  std::vector<std::uint16_t> weights_of(std::uint32_t expert) const;

  std::vector<std::vector<std::uint16_t>> weights_;    ///< by rank, as the operator takes them
  std::vector<std::vector<std::uint16_t>> by_expert_;  ///< weights_of
};

}  // namespace mk::kernels::testing
