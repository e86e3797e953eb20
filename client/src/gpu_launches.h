/// \file
/// Which GPUs of this process have a launch under way, of whichever session.
#pragma once

#include <cstdint>

namespace mk::client {

/// A session's count of launches begun and ended, which is odd while one is under way, told to all
/// of this process while this lives. Freeing GPU memory waits for kernels, and other threads cannot
/// use the driver meanwhile. So a thread that frees asks first. Another session's kernel may wait
/// for what a thread of this process has yet to do.
class GpuLaunches {
 public:
  /// `launches` outlives this.
  GpuLaunches(int device, const std::uint64_t* launches);
  ~GpuLaunches();
  GpuLaunches(const GpuLaunches&) = delete;
  GpuLaunches& operator=(const GpuLaunches&) = delete;

  /// Of any session of this process that has told. A launch may begin right after the answer.
  static bool under_way(int device);

 private:
  const std::uint64_t* const launches_;
};

}  // namespace mk::client
