/// \file
/// Launches that this process has put on streams and that have not ended, begun or not.
#pragma once

#include <cuda_runtime_api.h>

namespace mk::kernels::cuda {

/// The last one of an operator; those before it end before. Any thread.
class LaunchInFlight {
 public:
  LaunchInFlight() = default;
  ~LaunchInFlight();
  LaunchInFlight(const LaunchInFlight&) = delete;
  LaunchInFlight& operator=(const LaunchInFlight&) = delete;

  /// For launches on the current device.
  cudaError_t start();
  /// A launch is on the stream now. Nothing is known of one that is captured: a graph puts it and
  /// all that belongs to it on a stream at once.
  void note(cudaStream_t stream) const;

  /// Whether any operator of this process has one.
  static bool any();

 private:
  cudaEvent_t ended_ = nullptr;
};

}  // namespace mk::kernels::cuda
