/// \file
/// A grouped product with memory of its own, for tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/core/grouped_gemm.h"
#include "tests/gpu/grouped_reference.h"

namespace mk::test {

/// What a case is made from. `counts`: the rows of each expert.
struct GroupedShape {
  std::vector<std::uint32_t> counts;
  int n = 0;
  int k = 0;
  kernels::cuda::DType dtype = kernels::cuda::DType::kBf16;
  kernels::cuda::BLayout layout = kernels::cuda::BLayout::kNK;
  kernels::cuda::GroupedActivation activation = kernels::cuda::GroupedActivation::kNone;
  bool bias = false;
  bool scale = false;
  int gap = 0;         ///< rows of nobody before each expert's; then counts are given, too
  int rows_spare = 0;  ///< rows_max beyond the last expert's rows
  std::string text() const;
};

/// Inputs, outputs and offsets in device memory. Behind C there are kGuardRows more, poisoned.
class GroupedCase {
 public:
  static constexpr std::int64_t kGuardRows = 70;

  GroupedCase(const GroupedShape& shape, std::uint64_t seed);

  const kernels::cuda::GroupedGemmProblem& problem() const { return problem_; }
  std::int64_t c_columns() const;
  /// Fresh inputs, poisoned output.
  void fill(std::uint64_t seed, cudaStream_t stream) const;
  void poison_output(cudaStream_t stream) const;
  /// Other counts of as many experts, whose rows fit into rows_max.
  void set_counts(const std::vector<std::uint32_t>& counts, cudaStream_t stream);
  GroupedVerdict judge(cudaStream_t stream) const;
  /// C with its guard.
  std::vector<std::uint16_t> output(cudaStream_t stream) const;
  std::uint16_t* element_of_a(std::int64_t row, std::int64_t column) const;
  std::uint32_t first_row(std::size_t expert) const { return offsets_[expert]; }

 private:
  void* take(std::int64_t bytes);

  GroupedShape shape_;
  std::vector<DeviceMemory> memory_;
  std::vector<std::uint32_t> offsets_;
  kernels::cuda::GroupedGemmProblem problem_;
};

}  // namespace mk::test
