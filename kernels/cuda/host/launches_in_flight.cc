#include "kernels/cuda/host/launches_in_flight.h"

#include <algorithm>
#include <mutex>
#include <set>

#include "kernels/cuda/host/on_device.h"

namespace mk::kernels::cuda {
namespace {

struct Known {
  std::mutex mutex;
  std::set<cudaEvent_t> ends;
};
Known& known() {
  static auto* const all = new Known;  // operators may outlive what is static
  return *all;
}

}  // namespace

LaunchInFlight::~LaunchInFlight() {
  if (ended_ == nullptr) return;
  {
    const std::lock_guard lock(known().mutex);
    known().ends.erase(ended_);
  }
  cudaEventDestroy(ended_);
}

cudaError_t LaunchInFlight::start() {
  if (ended_ != nullptr) return cudaSuccess;
  const cudaError_t error = cudaEventCreateWithFlags(&ended_, cudaEventDisableTiming);
  if (error != cudaSuccess) return error;
  const std::lock_guard lock(known().mutex);
  known().ends.insert(ended_);
  return cudaSuccess;
}

void LaunchInFlight::note(cudaStream_t stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
      status == cudaStreamCaptureStatusNone)
    cudaEventRecord(ended_, stream);
  cudaGetLastError();  // the launch itself has been taken
}

bool LaunchInFlight::any() {
  const BesidesCaptures besides;
  const std::lock_guard lock(known().mutex);
  const bool found = std::ranges::any_of(
      known().ends, [](cudaEvent_t end) { return cudaEventQuery(end) == cudaErrorNotReady; });
  cudaGetLastError();
  return found;
}

}  // namespace mk::kernels::cuda
