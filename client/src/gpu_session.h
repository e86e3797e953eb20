/// \file
/// A session as one GPU sees it: the segment and the words that end waits at device addresses, and
/// the lanes' producers in device memory, where kernels keep them between launches.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shm/gpu/memory.h"
#include "shm/host/segment.h"
#include "shm/ring.h"

namespace mk {

class __attribute__((visibility("hidden"))) GpuSession {
 public:
  /// For the calling thread's GPU. What it is given outlives it. `abort_page`: a whole page.
  static Result<std::unique_ptr<GpuSession>> create(std::shared_ptr<gpu::Driver> driver,
                                                    const shm::Segment& segment,
                                                    const std::uint32_t* abort_page,
                                                    std::span<const shm::RingProducer> lanes);

  const std::shared_ptr<gpu::Driver>& driver() const { return driver_; }
  int device() const { return device_; }

  // -- at device addresses --
  shm::RingProducer* lanes() const;
  std::uint32_t* flags() const { return flags_; }
  const std::uint32_t* session_abort() const { return session_abort_; }
  const std::uint32_t* process_abort() const { return process_abort_; }
  std::uint64_t* launches() const { return launches_; }
  shm::Progress* progress() const { return progress_; }  ///< null: the daemon does not read it

  /// Multiprocessors that operators of this session go by, once its ranks have agreed on them
  /// (cuda/share_device.cc); 0: not yet.
  std::uint32_t agreed_blocks = 0;
  std::uint32_t agreed_most_ranks = 1;  ///< of those that share a GPU

 private:
  GpuSession(std::shared_ptr<gpu::Driver> driver, int device, gpu::Allocation lanes)
      : driver_(std::move(driver)), device_(device), lanes_(std::move(lanes)) {}

  const std::shared_ptr<gpu::Driver> driver_;
  const int device_;
  gpu::Allocation lanes_;  ///< of shm::RingProducer
  gpu::PinnedPages segment_;
  gpu::PinnedPages abort_page_;
  std::uint32_t* flags_ = nullptr;
  const std::uint32_t* session_abort_ = nullptr;
  const std::uint32_t* process_abort_ = nullptr;
  std::uint64_t* launches_ = nullptr;
  shm::Progress* progress_ = nullptr;
};

}  // namespace mk
