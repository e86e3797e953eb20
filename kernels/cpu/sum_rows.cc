#include "kernels/cpu/sum_rows.h"

#include <cassert>
#include <cstring>

namespace mk::kernels {

void sum_rows(const RowMath& math, const SumJob& job, NonfiniteCounter* counter) {
  assert(job.columns <= kTileSideMax && job.source_count >= 1 && job.target_count >= 1);
  float sums[kTileSideMax];
  for (std::uint32_t row = 0; row < job.rows; ++row) {
    const std::uint64_t from = row * job.source_stride;
    const auto source = [&](std::uint32_t i) {
      return static_cast<const std::uint16_t*>(job.sources[i]) + from;
    };
    const std::uint64_t to = row * job.target_stride;
    auto* first = static_cast<std::uint16_t*>(job.targets[0]) + to;
    for (std::uint32_t i = 0; counter != nullptr && i < job.source_count; ++i) {
      counter->add(source(i), job.columns);
    }
    math.widen(source(0), sums, job.columns);
    for (std::uint32_t i = 1; i < job.source_count; ++i) {
      if (i == job.rounded_sources) {
        math.narrow(sums, first, job.columns);
        if (counter != nullptr) counter->add(first, job.columns);
        math.widen(first, sums, job.columns);
      }
      math.add(source(i), sums, job.columns);
    }
    math.narrow(sums, first, job.columns);
    for (std::uint32_t i = 1; i < job.target_count; ++i) {
      std::memcpy(static_cast<std::uint16_t*>(job.targets[i]) + to, first,
                  std::size_t{job.columns} * kElementBytes);
    }
  }
}

void accumulate_rows(const RowMath& math, const AccumulateJob& job, NonfiniteCounter* counter) {
  assert(job.columns <= kTileSideMax);
  float sums[kTileSideMax];
  for (std::uint32_t row = 0; row < job.rows; ++row) {
    auto* target = static_cast<std::uint16_t*>(job.target) + row * job.target_stride;
    const auto* partial = static_cast<const std::uint16_t*>(job.partial) + row * job.partial_stride;
    if (counter != nullptr) {
      counter->add(target, job.columns);
      counter->add(partial, job.columns);
    }
    math.widen(target, sums, job.columns);
    math.add(partial, sums, job.columns);
    math.narrow(sums, target, job.columns);
    for (std::uint32_t i = 0; i < job.copy_count; ++i) {
      std::memcpy(static_cast<std::uint16_t*>(job.copies[i]) + row * job.target_stride, target,
                  std::size_t{job.columns} * kElementBytes);
    }
  }
}

}  // namespace mk::kernels
