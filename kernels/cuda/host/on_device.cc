#include "kernels/cuda/host/on_device.h"

#include <cuda_runtime_api.h>

namespace mk::kernels::cuda {

OnDevice::OnDevice(int device) {
  if (device < 0) return;
  cudaGetDevice(&before_);
  if (before_ != device) cudaSetDevice(device);
  changed_ = before_ != device;
}
OnDevice::~OnDevice() {
  if (changed_) cudaSetDevice(before_);
}

BesidesCaptures::BesidesCaptures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  mode_ = mode;
}
BesidesCaptures::~BesidesCaptures() {
  auto mode = static_cast<cudaStreamCaptureMode>(mode_);
  cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace mk::kernels::cuda
