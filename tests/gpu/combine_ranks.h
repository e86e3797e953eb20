/// \file
/// All ranks of a GEMM+Combine in one process; as MoeRanks (moe_ranks.h), over handles that the
/// test makes from the definition alone, or that a MoeRanks has left.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/combine/sm90.h"
#include "tests/gpu/combine_reference.h"
#include "tests/gpu/moe_ranks.h"

namespace mk::test {

struct CombineSetup : PlacedSetup {
  kernels::CombineShape shape;
  kernels::DType dtype = kernels::DType::kBf16;
  std::uint32_t chunk_bytes = 0;  ///< 0: the plan's
  std::uint32_t sets = 1;         ///< of inputs that lie ready

  /// Whether this build has the kernel.
  bool has_kernel() const;
};

struct CombineSet {
  std::unique_ptr<DeviceMemory> y, rows, offsets, ids, residual;
  kernels::CombineDeviceInput input;
};
struct CombineRank : PlacedRank<kernels::CombineCuda> {
  std::unique_ptr<DeviceMemory> expert_weights, out;
  std::vector<CombineSet> sets;
};

class CombineRanks : public PlacedRanks<CombineRank> {
 public:
  explicit CombineRanks(const CombineSetup& setup);

  const kernels::CombinePlan& plan() const { return plan_; }

  /// Another routing, handles for it, and fresh rows and weights, for launches with this set;
  /// poisons all outputs; waits.
  void fill(const JobRouting& routing, std::uint64_t seed, bool residual = false,
            std::uint32_t set = 0);
  /// What a rank's launches with the set get.
  kernels::CombineDeviceInput& input(std::uint32_t rank, std::uint32_t set = 0) {
    return ranks_[rank].sets[set].input;
  }
  /// From now on the set's rows are those that MoeRanks leave, whose launches came of `routing`.
  void take(MoeRanks& from, const JobRouting& routing, std::uint32_t set = 0);
  /// Their next routing, with as many tokens of each rank; poisons all outputs.
  void renew_ids(const JobRouting& routing, std::uint32_t set = 0);
  /// Makes one row's first element NaN: of a token of that rank, whose number this answers.
  std::uint32_t spoil_row(std::uint32_t rank, std::uint32_t set = 0);
  Status launch(std::uint32_t rank, kernels::Mode mode = kernels::Mode::kFused,
                std::uint32_t set = 0, cudaStream_t stream = nullptr);

  /// Every element after a launch with that set; what is behind the tokens must be poisoned still,
  /// unless launches before have been `behind` them. Empty, or what is wrong.
  std::string judge(std::uint32_t rank, std::uint32_t set = 0, bool behind = false);
  void poison_output(std::uint32_t rank);
  /// Whether a launch has stored nothing in the rank's output.
  bool untouched(std::uint32_t rank);
  /// The rank's output, all there is room for.
  std::vector<std::uint16_t> output(std::uint32_t rank) const;
  /// The largest error over its bound so far.
  double worst() const { return worst_; }

 private:
  std::int64_t output_elements() const {
    return std::int64_t{plan_.shape.tokens_max} * plan_.shape.hidden;
  }
  /// Of each rank's handle in the set: where every token's slots are, as the rows on the device
  /// say.
  std::vector<CombineSlot> slots_of(std::uint32_t rank, std::uint32_t set) const;

  CombineSetup setup_;
  kernels::CombinePlan plan_;
  std::vector<JobRouting> routing_;  ///< by set
  double worst_ = 0;
};

}  // namespace mk::test
