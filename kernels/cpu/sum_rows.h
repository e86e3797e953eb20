/// \file
/// SumJob and AccumulateJob on the CPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/comm/sum_job.h"
#include "kernels/comm/tile_worker.h"
#include "kernels/cpu/row_math.h"

namespace mk::kernels {

/// Counts elements that are NaN or infinite.
class NonfiniteCounter {
 public:
  explicit NonfiniteCounter(DType dtype) : exponent_(dtype == DType::kBf16 ? 0x7f80 : 0x7c00) {}
  void add(const std::uint16_t* row, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) count_ += (row[i] & exponent_) == exponent_ ? 1u : 0u;
  }
  void add(const float* row, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) count_ += std::isfinite(row[i]) ? 0u : 1u;
  }
  std::uint64_t count() const { return count_; }

 private:
  const unsigned exponent_;
  std::uint64_t count_ = 0;
};

/// Does the job on the calling thread. `job.columns` ≤ kTileSideMax. `counter`, unless null, counts
/// in what is added: the sources, and the sum of the first ones where that is rounded.
void sum_rows(const RowMath& math, const SumJob& job, NonfiniteCounter* counter = nullptr);
/// The same for an AccumulateJob: counts in the tile at the target and in the partial.
void accumulate_rows(const RowMath& math, const AccumulateJob& job,
                     NonfiniteCounter* counter = nullptr);

}  // namespace mk::kernels
