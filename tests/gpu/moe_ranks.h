/// \file
/// All ranks of a MoE Dispatch+GEMM in one process. They are on one GPU, each with a stream and a
/// share of the SMs, or spread over GPUs with peer access. They are one node, or several that a
/// HostProxy joins.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/tools/numeric/moe_reference.h"
#include "kernels/ops/moe/sm90.h"
#include "tests/gpu/grouped_reference.h"
#include "tests/gpu/placed_ranks.h"
#include "tests/kernels/moe/routing_cases.h"

namespace mk::test {

using JobRouting = std::vector<kernels::testing::RankRouting>;

struct MoeSetup : PlacedSetup {
  kernels::MoeDispatchShape shape;
  kernels::DType dtype = kernels::DType::kBf16;
  kernels::GatherKind kind = kernels::GatherKind::kBroadcast;
  std::uint32_t chunk_bytes = 0;  ///< 0: the plan's
  std::uint32_t banks = 0;        ///< likewise
  /// Copy engines may bring tokens within a node; the options' `dma` says so of each rank.
  bool engines = false;
  std::uint32_t sets = 1;  ///< of inputs that lie ready

  /// Whether this build has the kernel.
  bool has_kernel() const;
};

struct MoeSet {
  std::unique_ptr<DeviceMemory> tokens, ids, weights;
};
struct MoeRank : PlacedRank<kernels::MoeDispatchCuda> {
  std::unique_ptr<DeviceMemory> expert_weights, bias, y;
  std::vector<MoeSet> sets;
};

class MoeRanks : public PlacedRanks<MoeRank> {
 public:
  explicit MoeRanks(const MoeSetup& setup);

  const MoeSetup& setup() const { return setup_; }
  const kernels::MoeDispatchPlan& plan() const { return plan_; }

  /// Another routing, and fresh tokens and weights, for launches with this set; poisons all
  /// outputs; waits. A captured launch takes what is there when it runs.
  void fill(const JobRouting& routing, std::uint64_t seed, std::uint32_t set = 0);
  /// Makes a token NaN, in the set that was filled last.
  void spoil_token(std::uint32_t rank, std::uint32_t token);
  /// With room for `capacity` rows; by default for as many as the plan has.
  Status launch(std::uint32_t rank, kernels::Mode mode = kernels::Mode::kFused,
                std::uint32_t set = 0, std::uint32_t capacity = ~0u);

  /// Rows that a rank gets of the set's routing.
  std::uint32_t rows(std::uint32_t rank, std::uint32_t set = 0) const;
  /// Rows that the operator says its last launch has stored.
  std::uint32_t told_rows(std::uint32_t rank) const { return ranks_[rank].op->rows(); }
  /// Offsets, rows and every element of y after a launch with that set. What is behind the rows
  /// must be poisoned still, unless launches before have been `behind` them. Empty, or what is
  /// wrong.
  std::string judge(std::uint32_t rank, std::uint32_t set = 0, bool behind = false);
  /// Whether a launch has stored nothing in the rank's y.
  bool untouched(std::uint32_t rank);
  /// The rank's output, all there is room for.
  std::vector<std::uint16_t> output(std::uint32_t rank) const;
  /// That output on the device.
  const void* y(std::uint32_t rank) const { return ranks_[rank].y->data(); }
  /// The largest error over its bound so far.
  double worst() const { return worst_; }

 private:
  static constexpr std::uint32_t kGuardRows = 70;
  std::int64_t output_elements() const {
    return (std::int64_t{plan_.shape.rows_max} + kGuardRows) * plan_.shape.features;
  }
  tools::MoeReference reference(std::uint32_t rank, std::uint32_t set) const;
  std::vector<std::uint16_t> tokens_of(std::uint32_t rank, std::uint32_t set) const;

  MoeSetup setup_;
  kernels::MoeDispatchPlan plan_;
  std::vector<JobRouting> routing_;                     ///< by set
  std::vector<std::vector<tools::MoeSource>> sources_;  ///< by set, then rank; without values
  std::uint32_t last_set_ = 0;
  double worst_ = 0;
};

}  // namespace mk::test
