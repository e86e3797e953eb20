/// \file
/// Which device a thread's CUDA calls are about, and what captures they may end.
#pragma once

namespace mk::kernels::cuda {

/// Makes a device current while it lives; below 0: none.
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

/// While it lives, this thread may allocate, free and query although the user's threads capture.
/// CUDA else refuses that, and ends their captures.
class BesidesCaptures {
 public:
  BesidesCaptures();
  ~BesidesCaptures();
  BesidesCaptures(const BesidesCaptures&) = delete;
  BesidesCaptures& operator=(const BesidesCaptures&) = delete;

 private:
  int mode_;  ///< the one to come back to
};

}  // namespace mk::kernels::cuda
