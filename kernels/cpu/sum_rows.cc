#include "kernels/cpu/sum_rows.h"

#include <cassert>
#include <cstring>

#include "kernels/cpu/finish_row.h"

namespace mk::kernels {

void sum_rows(const RowMath& math, const SumJob& job, NonfiniteCounter* counter) {
  if (job.source_count == 1) counter = nullptr;  // a copy: nothing is added
  assert(job.columns <= kTileSideMax && job.source_count >= 1 && job.target_count >= 1);
  const bool f32 = job.source_type == Partials::kF32;
  const RowFinish finish{job.target_type, job.activation, job.bias};
  float sums[kTileSideMax];
  std::uint16_t rounded[kTileSideMax];
  // Adds a source's row to the sums, of which it may be the first.
  const auto add = [&](const std::byte* source, bool begins) {
    if (f32) {
      const auto* from = reinterpret_cast<const float*>(source);
      if (counter != nullptr) counter->add(from, job.columns);
      for (std::uint32_t c = 0; c < job.columns; ++c)
        sums[c] = begins ? from[c] : sums[c] + from[c];
      return;
    }
    const auto* from = reinterpret_cast<const std::uint16_t*>(source);
    if (counter != nullptr) counter->add(from, job.columns);
    (begins ? math.widen : math.add)(from, sums, job.columns);
  };
  const std::uint64_t source_bytes = job.source_stride * bytes_of(job.source_type);
  const std::uint64_t target_bytes = job.target_stride * bytes_of(job.target_type);
  for (std::uint32_t row = 0; row < job.rows; ++row) {
    for (std::uint32_t i = 0; i < job.source_count; ++i) {
      if (i != 0 && i == job.rounded_sources) {
        math.narrow(sums, rounded, job.columns);
        if (counter != nullptr) counter->add(rounded, job.columns);
        math.widen(rounded, sums, job.columns);
      }
      add(static_cast<const std::byte*>(job.source(i)) + row * source_bytes, i == 0);
    }
    auto* const first = static_cast<std::byte*>(job.targets[0]) + row * target_bytes;
    const std::size_t bytes = finish_row(math, finish, sums, first, job.columns);
    for (std::uint32_t i = 1; i < job.target_count; ++i)
      std::memcpy(static_cast<std::byte*>(job.targets[i]) + row * target_bytes, first, bytes);
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
