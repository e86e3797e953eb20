/// \file
/// Which device CUDA's calls are about.
#pragma once

namespace mk::kernels::cuda {

/// Makes a device current while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace mk::kernels::cuda
