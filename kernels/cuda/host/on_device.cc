#include "kernels/cuda/host/on_device.h"

#include <cuda_runtime_api.h>

namespace mk::kernels::cuda {

OnDevice::OnDevice(int device) {
  cudaGetDevice(&before_);
  if (before_ != device) cudaSetDevice(device);
  changed_ = before_ != device;
}
OnDevice::~OnDevice() {
  if (changed_) cudaSetDevice(before_);
}

}  // namespace mk::kernels::cuda
