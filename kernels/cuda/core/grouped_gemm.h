/// \file
/// The grouped matrix product on one GPU: rows sorted by expert, each expert with weights of its
/// own; which rows are whose is known to the device alone.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/cuda/core/grouped_types.h"
#include "shm/host/result.h"

namespace mk::kernels::cuda {

const char* grouped_variant_name(GroupedVariant variant);

/// What may be set by hand; 0 and kAuto leave the choice to the plan.
struct GroupedGemmTuning {
  GroupedVariant variant = GroupedVariant::kAuto;
  int band_rows = 0;   ///< rows of an expert in one band of the tile order
  int blocks_max = 0;  ///< thread blocks to use, at most one per SM: leaves the other SMs to others
};

/// A grouped product ready to launch any number of times on the device that was current at
/// creation. It keeps the addresses, not the memory. Launches are asynchronous, never wait for the
/// host, and may be captured into a graph. Those of one plan (copies of it included) must follow
/// each other: they share two words of device memory.
class GroupedGemmPlan {
 public:
  /// kInvalidArgument names the size or address that does not fit; kUnsupported: the device is no
  /// Hopper.
  static Result<GroupedGemmPlan> create(const GroupedGemmProblem& problem,
                                        const GroupedGemmTuning& tuning = {});

  /// kSystem with CUDA's reason if the launch was refused.
  Status launch(cudaStream_t stream) const;

  GroupedVariant variant() const { return variant_; }
  int blocks() const;

 private:
  struct Parts;
  GroupedGemmPlan() = default;
  std::shared_ptr<const Parts> parts_;
  GroupedVariant variant_ = GroupedVariant::kAuto;
};

}  // namespace mk::kernels::cuda
