#include <fmt/format.h>

#include <algorithm>

#include "tests/gpu/products.h"

namespace mk::test {

using kernels::cuda::BLayout;
using kernels::cuda::DType;
using kernels::cuda::GemmPlan;
using kernels::cuda::GemmProblem;
using kernels::cuda::GemmTuning;
using kernels::cuda::GemmVariant;

OddShapes check_odd_shapes() {
  constexpr std::array kShapes = {
      Shape{1, 8, 8},         Shape{1, 4096, 4096},  Shape{7, 264, 72},    Shape{63, 128, 64},
      Shape{64, 136, 200},    Shape{65, 520, 1000},  Shape{127, 256, 64},  Shape{129, 248, 136},
      Shape{200, 1000, 320},  Shape{255, 2056, 512}, Shape{257, 24, 4096}, Shape{1000, 1000, 1000},
      Shape{1531, 3080, 712}, Shape{4097, 520, 264}};
  int checked = 0, wrong = 0;
  for (DType dtype : {DType::kBf16, DType::kF16}) {
    for (BLayout layout : {BLayout::kNK, BLayout::kKN}) {
      for (const Shape& shape : kShapes) {
        for (GemmVariant variant : kVariants) {
          const std::int64_t a = std::int64_t{shape.m} * shape.k;
          const std::int64_t b = std::int64_t{shape.n} * shape.k;
          const std::int64_t c = std::int64_t{shape.m} * shape.n;
          constexpr std::int64_t kGuard = 4096;  // elements after C that must stay poisoned
          DeviceMemory memory_a(2 * static_cast<std::size_t>(a)),
              memory_b(2 * static_cast<std::size_t>(b)),
              memory_c(2 * static_cast<std::size_t>(c + kGuard));
          fill_normal(memory_a.data(), dtype, a, fresh_seed(), nullptr);
          fill_normal(memory_b.data(), dtype, b, fresh_seed(), nullptr);
          poison(memory_c.data(), c + kGuard, nullptr);
          GemmProblem problem{dtype,   layout,          shape.m,         shape.n,
                              shape.k, memory_a.data(), memory_b.data(), memory_c.data()};
          GemmTuning tuning;
          tuning.variant = variant;
          tuning.band_rows = 512;
          const int k_blocks = (shape.k + kernels::cuda::kBlockK - 1) / kernels::cuda::kBlockK;
          tuning.splits = 1 + checked / 3 % kernels::cuda::splits_max(variant, k_blocks);
          tuning.blocks_max = checked % 3 == 0 ? 4 : 0;  // several tiles per block
          auto plan = GemmPlan::create(problem, tuning);
          if (!plan) {
            fmt::print("{}\n", plan.error().message);
            ++wrong;
            continue;
          }
          launch_or_exit(*plan);
          const auto verdict = judge(problem, 0, shape.m, nullptr);
          std::vector<std::uint16_t> guard(kGuard);
          require(cudaMemcpy(guard.data(), static_cast<char*>(memory_c.data()) + 2 * c, 2 * kGuard,
                             cudaMemcpyDeviceToHost),
                  "guard");
          const bool intact =
              std::all_of(guard.begin(), guard.end(), [](auto v) { return v == 0xffff; });
          ++checked;
          if (!verdict.right() || !intact) {
            ++wrong;
            fmt::print("WRONG {} {} {}/{} m {} n {} k {}: {} elements, first {}, worst {:.3g}{}\n",
                       name(dtype), name(layout), kernels::cuda::gemm_variant_name(variant),
                       tuning.splits, shape.m, shape.n, shape.k, verdict.bad, verdict.first_bad,
                       verdict.worst, intact ? "" : ", wrote behind C");
          }
        }
      }
    }
  }
  fmt::print("odd shapes: {} products checked, {} wrong\n", checked, wrong);
  return {checked, wrong};
}

}  // namespace mk::test
