/// \file
/// What the GPU test programs share: shapes, random products, launches that end the program when
/// they are refused.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cuda/core/gemm.h"
#include "kernels/cuda/core/gemm_choice.h"
#include "tests/gpu/gemm_reference.h"

namespace mk::test {

struct Shape {
  int m, n, k;
};

inline constexpr std::array kVariants = {
    kernels::cuda::GemmVariant::k128x64,     kernels::cuda::GemmVariant::k128x128,
    kernels::cuda::GemmVariant::k128x160,    kernels::cuda::GemmVariant::k128x192,
    kernels::cuda::GemmVariant::k128x224,    kernels::cuda::GemmVariant::k128x256,
    kernels::cuda::GemmVariant::k128x256Pair};

inline const char* name(kernels::cuda::DType dtype) {
  return dtype == kernels::cuda::DType::kBf16 ? "bf16" : "f16";
}
inline const char* name(kernels::cuda::BLayout layout) {
  return layout == kernels::cuda::BLayout::kNK ? "NK" : "KN";
}

/// A seed that no earlier call and (but for chance) no earlier run returned.
std::uint64_t fresh_seed();

/// As many sets of A, B, C of one shape as it takes to pass L2 four times over, so that no product
/// finds its inputs there.
class Sets {
 public:
  Sets(Shape shape, kernels::cuda::DType dtype, kernels::cuda::BLayout layout);
  const std::vector<kernels::cuda::GemmProblem>& problems() const { return problems_; }
  int count() const { return static_cast<int>(problems_.size()); }
  void poison_outputs() const;

 private:
  std::vector<DeviceMemory> memory_;
  std::vector<kernels::cuda::GemmProblem> problems_;
};

/// A plan for each set.
std::vector<kernels::cuda::GemmPlan> plans_for(const Sets& sets,
                                               const kernels::cuda::GemmTuning& tuning);

void launch_or_exit(const kernels::cuda::GemmPlan& plan);

/// Judges every variant, type and layout over shapes that fit no tile; prints what is wrong.
struct OddShapes {
  int checked = 0;
  int wrong = 0;
};
OddShapes check_odd_shapes();

}  // namespace mk::test
