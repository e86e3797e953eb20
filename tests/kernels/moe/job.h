/// \file
/// A whole MoE Dispatch+GEMM job in one process: every rank is a thread with its own operator,
/// over a Cluster's memory.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "client/tools/numeric/moe_reference.h"
#include "kernels/ops/moe/cpu.h"
#include "tests/kernels/support/routed_job.h"

namespace mk::kernels::testing {

using MoeJobOptions = RoutedJobOptions<MoeDispatchShape, MoeDispatchCpuOptions>;

struct MoeLaunch : RoutedLaunch {
  /// Every third token goes nowhere, and is like the others (kNumbers) or NaN and infinite, its
  /// weights too (kSpecial).
  enum class Unused : std::uint8_t { kAsDrawn, kNumbers, kSpecial } unused = Unused::kAsDrawn;
  bool all_special = false;  ///< every token is NaN and infinite
};

/// What a rank got. `y` has as many rows as there was room for.
struct MoeRankResult {
  Result<LaunchStats> stats = LaunchStats{};
  std::vector<std::uint16_t> y;
  std::vector<MoeRow> rows;
  std::vector<std::uint32_t> offsets;
};

class MoeJob : public RoutedJob<MoeDispatchPlan, MoeDispatchCpu, MoeJobOptions> {
 public:
  /// Makes plan, memory and operators; throws if it cannot.
  explicit MoeJob(const MoeJobOptions& options);

  /// All ranks run all launches, each at its own pace, with random pauses of at most `pause_max`
  /// before a launch. Answers [launch][rank]; a rank stops at its first failure but
  /// kLimitExceeded.
  std::vector<std::vector<MoeRankResult>> run(
      const std::vector<MoeLaunch>& launches,
      std::chrono::microseconds pause_max = std::chrono::microseconds(0));

  /// One rank, one launch, on the calling thread, with room for `capacity` rows, poisoned before.
  MoeRankResult launch(std::uint32_t rank, const MoeLaunch& launch, std::uint32_t capacity);

  /// Every rank's input of a launch.
  std::vector<tools::MoeSource> sources(const MoeLaunch& launch) const;
  /// What a rank must get from them.
  tools::MoeReference reference(std::uint32_t rank,
                                const std::vector<tools::MoeSource>& sources) const;

  /// Empty, or what is wrong: a row that comes from elsewhere, an element out of its bound, or one
  /// written beyond the last row.
  std::string check(const MoeLaunch& launch, const std::vector<MoeRankResult>& results);
  std::string check_rank(std::uint32_t rank, const tools::MoeReference& expected,
                         const MoeRankResult& result);

 private:
  /// [H][F], whatever layout the operator takes.
  std::vector<std::uint16_t> weights_of(std::uint32_t expert) const;
  /// This rank's experts in the operator's layout.
  std::vector<std::uint16_t> weights_at(std::uint32_t rank) const;
  /// If the shape has one.
  std::vector<std::uint16_t> bias_of(std::uint32_t expert) const;

  std::vector<std::vector<std::uint16_t>> weights_;  ///< by rank, as the operator takes them
  std::vector<std::vector<std::uint16_t>> biases_;   ///< likewise
};

}  // namespace mk::kernels::testing
