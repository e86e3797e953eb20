/// \file
/// Copies that GPUs make for one endpoint, between their memories or to and from pinned host
/// memory: a few streams per device, and words in host memory that say how far each stream is.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "shm/gpu/memory.h"

namespace mk::fabric {

/// Devices one endpoint copies with, at most.
inline constexpr std::uint32_t kGpuSlotsMax = 16;
/// Streams of one device. One stream would stand still between a copy and the next for the word
/// that follows it.
inline constexpr std::uint32_t kGpuStreams = 4;

/// One copy that was handed over.
struct GpuTicket {
  std::uint32_t slot = kGpuSlotsMax;  ///< kGpuSlotsMax: none
  std::uint32_t stream = 0;
  std::uint32_t sequence = 0;
  explicit operator bool() const { return slot != kGpuSlotsMax; }
};

class GpuCopier {
 public:
  using LoadDriver = std::function<Result<std::shared_ptr<gpu::Driver>>()>;
  explicit GpuCopier(LoadDriver load) : load_(std::move(load)) {}
  ~GpuCopier() { stop(); }
  GpuCopier(const GpuCopier&) = delete;
  GpuCopier& operator=(const GpuCopier&) = delete;

  // -- control thread --
  /// The driver, loaded when it is first needed; the first failure stays the answer.
  Result<std::shared_ptr<gpu::Driver>> driver();
  /// The slot of a device, whose streams are made when it is new.
  Result<std::uint32_t> use(int device);
  std::uint32_t slots() const { return count_; }
  int device(std::uint32_t slot) const { return owned_[slot]->device; }
  /// Waits until all copies are over; there will be no more. Nobody else may be here.
  void stop();

  // -- proxy thread; never waits --
  /// Between memories as the slot's device sees them. No ticket: the device failed, now or before.
  GpuTicket copy(std::uint32_t slot, std::byte* to, const std::byte* from, std::uint64_t bytes);
  bool failed(std::uint32_t slot) const { return at(slot).failed; }
  /// After some copies: without it they are never seen to be over.
  void mark();
  enum class State : std::uint8_t { kUnderWay, kDone, kFailed };
  /// kDone: the copied bytes are visible to everybody.
  State state(const GpuTicket& ticket, std::uint64_t now_ns);

 private:
  struct Device {
    std::shared_ptr<gpu::Driver> driver;
    int device = 0;
    std::unique_ptr<std::byte[]> room;  ///< holds `page`
    std::byte* page = nullptr;          ///< the words, one for each stream, each on its own line
    gpu::PinnedPages pinned;
    std::array<gpu::Stream, kGpuStreams> streams{};
    std::array<std::uint32_t, kGpuStreams> submitted{};
    std::array<std::uint32_t, kGpuStreams> marked{};
    std::uint32_t next = 0;
    std::uint64_t asked_ns = 0;  ///< when the driver was last asked whether it is well
    bool failed = false;

    ~Device() { end_streams(); }
    void end_streams();
    std::uint32_t* word(std::uint32_t stream) const;
  };
  Device& at(std::uint32_t slot) const { return *slots_[slot].load(std::memory_order_acquire); }

  const LoadDriver load_;
  std::optional<Result<std::shared_ptr<gpu::Driver>>> driver_;
  std::array<std::unique_ptr<Device>, kGpuSlotsMax> owned_;
  std::array<std::atomic<Device*>, kGpuSlotsMax> slots_{};
  std::atomic<std::uint32_t> count_{0};
};

}  // namespace mk::fabric
