/// \file
/// CopyJob on the CPU.
#pragma once

#include <cstring>

#include "kernels/gather/copy_job.h"

namespace mk::kernels {

/// Does the job on the calling thread.
inline void copy_rows(const CopyJob& job) {
  std::uint64_t rows = job.rows;
  std::uint64_t bytes = job.row_bytes;
  if (rows > 1 && job.source_stride == bytes && job.target_stride == bytes) {
    bytes *= rows;
    rows = 1;
  }
  // A row is read once from far and then from the cache.
  for (std::uint64_t row = 0; row < rows; ++row) {
    for (std::uint32_t i = 0; i < job.target_count; ++i) {
      std::memcpy(job.targets[i] + row * job.target_stride, job.source + row * job.source_stride,
                  bytes);
    }
  }
}

}  // namespace mk::kernels
