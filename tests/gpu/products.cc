#include "tests/gpu/products.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace mk::test {

using kernels::cuda::BLayout;
using kernels::cuda::DType;
using kernels::cuda::GemmPlan;
using kernels::cuda::GemmProblem;
using kernels::cuda::GemmTuning;

std::uint64_t fresh_seed() {
  static std::uint64_t seed = [] {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::uint64_t>(now.tv_nsec) ^ static_cast<std::uint64_t>(now.tv_sec) << 30;
  }();
  return ++seed;
}

Sets::Sets(Shape shape, DType dtype, BLayout layout) {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const std::int64_t a = std::int64_t{shape.m} * shape.k;
  const std::int64_t b = std::int64_t{shape.n} * shape.k;
  const std::int64_t c = std::int64_t{shape.m} * shape.n;
  const std::int64_t bytes = 2 * (a + b + c);
  const std::int64_t wanted = (4 * std::int64_t{properties.l2CacheSize} + bytes - 1) / bytes;
  const int count = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, 32));
  for (int i = 0; i < count; ++i) {
    for (std::int64_t elements : {a, b, c})
      memory_.emplace_back(static_cast<std::size_t>(elements) * 2);
    GemmProblem problem;
    problem.dtype = dtype;
    problem.b_layout = layout;
    problem.m = shape.m;
    problem.n = shape.n;
    problem.k = shape.k;
    problem.a = memory_[memory_.size() - 3].data();
    problem.b = memory_[memory_.size() - 2].data();
    problem.c = memory_[memory_.size() - 1].data();
    problems_.push_back(problem);
    fill_normal(const_cast<void*>(problem.a), dtype, a, fresh_seed(), nullptr);
    fill_normal(const_cast<void*>(problem.b), dtype, b, fresh_seed(), nullptr);
  }
}
void Sets::poison_outputs() const {
  for (const auto& p : problems_) poison(p.c, std::int64_t{p.m} * p.n, nullptr);
}

std::vector<GemmPlan> plans_for(const Sets& sets, const GemmTuning& tuning) {
  std::vector<GemmPlan> plans;
  for (const auto& problem : sets.problems()) {
    auto plan = GemmPlan::create(problem, tuning);
    if (!plan) {
      fmt::print(stderr, "{}\n", plan.error().message);
      std::exit(1);
    }
    plans.push_back(*plan);
  }
  return plans;
}

void launch_or_exit(const GemmPlan& plan) {
  if (auto status = plan.launch(nullptr); !status) {
    fmt::print(stderr, "{}\n", status.error().message);
    std::exit(1);
  }
}

}  // namespace mk::test
