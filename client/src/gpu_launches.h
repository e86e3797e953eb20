/// \file
/// Whether this process has launches under way on GPUs, of whichever session.
#pragma once

#include <cstdint>
#include <mutex>
#include <shared_mutex>

namespace mk::client {

/// A session's count of launches begun and ended, which is odd while one is under way, told to all
/// of this process while this lives. Freeing GPU memory, or memory of the host that GPUs reach,
/// waits for kernels, on all GPUs perhaps, and other threads cannot use the driver meanwhile: those
/// that such a kernel waits for among them. So a thread that frees holds launches back and asks.
class GpuLaunches {
 public:
  /// `launches` outlives this.
  explicit GpuLaunches(const std::uint64_t* launches);
  ~GpuLaunches();
  GpuLaunches(const GpuLaunches&) = delete;
  GpuLaunches& operator=(const GpuLaunches&) = delete;

  /// Who puts a launch on a stream, with all that it needs of the driver, has this meanwhile.
  static std::shared_lock<std::shared_mutex> begin();
  /// While it is kept no launch of this process is put on a stream.
  static std::unique_lock<std::shared_mutex> hold_back();
  /// Of any session of this process that has told, or by what `ask_also` named. Certain while
  /// launches are held back.
  static bool under_way();
  /// `any`: whether launches are on streams that have not ended, perhaps not even begun.
  static void ask_also(bool (*any)());

 private:
  const std::uint64_t* const launches_;
};

}  // namespace mk::client
