/// \file
/// A whole job of a collective (kernels/cpu/collective.h) in one process: every rank is a thread
/// with its own operator, over a Cluster's memory. An `Op` says which:
///
///     using Plan;
///     static Result<Plan> plan(const CollectiveOptions&);
///     static Result<std::unique_ptr<CollectiveCpu>> make(const Plan&, const RankContext&,
///                                                        const CpuOptions&);
///     static Bytes input(const CollectiveOptions&, std::uint32_t rank, const CollectiveLaunch&);
///     static std::uint64_t output_bytes(const CollectiveOptions&, std::uint32_t rank,
///                                       std::uint32_t m);
///     static std::uint64_t network_bytes(const Plan&, const World&, std::uint32_t m);
///     static std::string check(const CollectiveOptions&, const CollectiveLaunch&,
///                              const std::vector<Bytes>& outputs, double* worst);
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/comm/epilogue.h"
#include "kernels/comm/shard.h"
#include "kernels/cpu/collective.h"
#include "tests/kernels/support/cluster.h"
#include "tests/kernels/support/or_throw.h"
#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/run_ranks.h"

namespace mk::kernels::testing {

using Bytes = std::vector<std::byte>;

struct CollectiveOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t m_max = 1;
  std::uint32_t n = 1;
  DType dtype = DType::kBf16;
  Partials partials = Partials::kElement;
  Tiling tiling;
  CpuOptions cpu;
  std::uint32_t slot_count_log2 = 5;
  std::uint64_t seed = 1;

  std::uint32_t world() const { return nodes * locals; }
  std::uint64_t row_bytes() const { return std::uint64_t{n} * bytes_of(dtype); }
  std::uint32_t rows_of(std::uint32_t rank, std::uint32_t m) const {
    return shard_of(m, world(), rank).count;
  }
};

/// One launch, the same for all ranks.
struct CollectiveLaunch {
  std::uint32_t m = 0;
  Mode mode = Mode::kFused;
  std::uint64_t inputs = 0;  ///< launches with equal numbers here have equal inputs
  bool in_place = false;     ///< rank by rank, every other one, where the operator has such a place
};

/// Launches of changing m, the first with m_max, in both forms.
inline std::vector<CollectiveLaunch> random_collective_launches(std::uint32_t count,
                                                                std::uint32_t m_max,
                                                                std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<CollectiveLaunch> launches;
  for (std::uint32_t i = 0; i < count; ++i) {
    launches.push_back({i == 0 ? m_max : static_cast<std::uint32_t>(1 + random() % m_max),
                        random() % 3 == 0 ? Mode::kUnfused : Mode::kFused, i, random() % 3 != 0});
  }
  return launches;
}

/// `rows` rows drawn from the job's seed, the launch's number and the rank: a caller
/// can draw them again. Elements within +-1.
inline Bytes drawn_rows(const CollectiveOptions& options, std::uint32_t rank,
                        const CollectiveLaunch& launch, std::uint32_t rows) {
  std::mt19937_64 random(options.seed * 1000003 + launch.inputs * 1009 + rank);
  const std::size_t count = std::size_t{rows} * options.n;
  Bytes bytes(count * bytes_of(options.dtype));
  if (options.dtype == DType::kF32) {
    for (std::size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(random() >> 40) * 0x1p-23f - 1;
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
  } else {
    const auto values = random_values(options.dtype, count, random);
    if (count != 0) std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  return bytes;
}

template <class Op>
class CollectiveJob {
 public:
  struct Outcome {
    Result<LaunchStats> stats = LaunchStats{};
    Bytes output;
  };

  /// Makes plan, memory and operators; throws if it cannot.
  explicit CollectiveJob(const CollectiveOptions& options)
      : options_(options), plan_(or_throw(Op::plan(options))) {
    cluster_ = std::make_unique<Cluster>(
        ClusterShape{options.nodes, options.locals, plan_.workspace_bytes, plan_.flag_count(),
                     options.cpu.blocks.send, options.slot_count_log2});
    for (std::uint32_t rank = 0; rank < options.world(); ++rank)
      ops_.push_back(or_throw(
          Op::make(plan_, cluster_->context(rank), cluster_->with_progress(options.cpu, rank))));
  }

  Cluster& cluster() { return *cluster_; }
  CollectiveCpu& op(std::uint32_t rank) { return *ops_[rank]; }
  std::uint32_t size() const { return cluster_->size(); }
  const CollectiveOptions& options() const { return options_; }
  const typename Op::Plan& plan() const { return plan_; }
  double worst() const { return worst_; }

  /// All ranks run all launches, each at its own pace, with random pauses of at most `pause_max`
  /// before a launch. Answers [launch][rank]; a rank stops at its first failure.
  std::vector<std::vector<Outcome>> run(
      const std::vector<CollectiveLaunch>& launches,
      std::chrono::microseconds pause_max = std::chrono::microseconds(0)) {
    std::vector<std::vector<Outcome>> outcomes(launches.size(), std::vector<Outcome>(size()));
    run_ranks(size(), launches.size(), options_.seed, pause_max,
              [&](std::uint32_t rank, std::size_t i) {
                outcomes[i][rank] = launch(rank, launches[i]);
                return outcomes[i][rank].stats.has_value();
              });
    return outcomes;
  }

  /// One rank, one launch, on the calling thread, the output poisoned and guarded.
  Outcome launch(std::uint32_t rank, const CollectiveLaunch& launch) {
    constexpr std::size_t kGuard = 64;
    const Bytes drawn = Op::input(options_, rank, launch);
    const void* input = drawn.empty() ? nullptr : drawn.data();
    void* const place = ops_[rank]->input();
    if (launch.in_place && place != nullptr && (rank + launch.inputs) % 2 == 0) {
      std::copy(drawn.begin(), drawn.end(), static_cast<std::byte*>(place));
      input = place;
    }
    const std::size_t bytes = Op::output_bytes(options_, rank, launch.m);
    Bytes guarded(bytes + 2 * kGuard, kPoison);
    Outcome outcome;
    outcome.stats = ops_[rank]->launch(input, bytes == 0 ? nullptr : guarded.data() + kGuard,
                                       launch.m, launch.mode);
    const auto poisoned = [](std::byte value) { return value == kPoison; };
    if (!std::all_of(guarded.begin(), guarded.begin() + kGuard, poisoned) ||
        !std::all_of(guarded.end() - kGuard, guarded.end(), poisoned))
      outcome.stats = fail(ErrorCode::kInternal, "written beyond the output");
    outcome.output.assign(guarded.begin() + kGuard, guarded.end() - kGuard);
    return outcome;
  }

  /// Empty, or what is wrong.
  std::string check(const CollectiveLaunch& launch, const std::vector<Outcome>& outcomes) {
    std::vector<Bytes> outputs;
    for (std::uint32_t rank = 0; rank < size(); ++rank) {
      if (!outcomes[rank].stats)
        return fmt::format("rank {}: {}", rank, outcomes[rank].stats.error().message);
      outputs.push_back(outcomes[rank].output);
    }
    return Op::check(options_, launch, outputs, &worst_);
  }

 private:
  static constexpr std::byte kPoison{0xff};

  CollectiveOptions options_;
  typename Op::Plan plan_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::unique_ptr<CollectiveCpu>> ops_;
  double worst_ = 0;
};

}  // namespace mk::kernels::testing
