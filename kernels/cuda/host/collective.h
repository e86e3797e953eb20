/// \file
/// Operators that compute nothing but what communication needs, on a GPU, as their callers see
/// them. Host only, without CUDA's headers.
#pragma once

#include <cstdint>

#include "kernels/comm/launch_stats.h"
#include "kernels/comm/types.h"
#include "kernels/cuda/host/cuda_options.h"
#include "shm/host/result.h"

struct CUstream_st;

namespace mk::kernels {

/// One rank's operator, on the device that was current at creation. Each operator's spec.h makes it
/// of a plan. Not thread-safe, except that `status()` may be asked from any thread.
class CollectiveCuda {
 public:
  virtual ~CollectiveCuda() = default;

  /// Puts a launch on the stream, without waiting; see CollectiveCpu::launch. Both matrices are in
  /// the GPU's memory, at multiples of 16 bytes. kAuto is kFused. It may be captured into a graph.
  virtual Status launch(CUstream_st* stream, const void* input, void* output, std::uint32_t m,
                        Mode mode) = 0;
  /// The first failure among the launches that have ended. Does not wait.
  virtual Status status() const = 0;
  /// Waits for the stream, then answers what the last launch did, or the first failure.
  virtual Result<LaunchStats> finish(CUstream_st* stream) = 0;
  /// The next launches show it with them: Progress::tag.
  virtual void set_tag(std::uint64_t tag) = 0;
  /// See CollectiveCpu::input.
  virtual void* input() const = 0;
};

}  // namespace mk::kernels
