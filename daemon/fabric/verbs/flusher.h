/// \file
/// Makes what this NIC has written into a GPU's memory visible to the GPU. A flag in host memory
/// does not order such writes: over PCIe a store to the host may be seen while an earlier one to
/// the GPU is still under way. But no read overtakes a write on its way to the same device. A read
/// is answered only then. So the NIC itself reads one byte back, over a queue pair that is
/// connected to itself. What had been reported before is there when the byte is.
#pragma once

#include <array>
#include <atomic>
#include <memory>

#include "daemon/fabric/verbs/region.h"

namespace mk::fabric::verbs {

/// The queue's data path: reads in, ends out. Proxy thread; knows not how the queue came to be.
class FlushQueue {
 public:
  /// Reads under way at once.
  static constexpr std::uint32_t kDepth = 128;

  /// One byte of registered host memory that nobody looks at.
  struct Sink {
    std::uint64_t address = 0;
    std::uint32_t key = 0;
  };
  FlushQueue(ibv_qp* queue, ibv_cq* completions, const Sink& sink)
      : queue_(queue), completions_(completions), sink_(sink) {}

  /// False: no room, or broken.
  bool flush(const VerbsLocalRegion& region, std::uint64_t cookie);
  /// kFlushed of what ended. Reads end in order; the first that fails breaks the queue, and it and
  /// all others are reported as failed.
  std::size_t poll(std::span<Event> events);
  bool broken() const { return broken_; }
  /// The device is gone: all that is under way has failed.
  void give_up() { broken_ = true; }
  bool empty() const { return first_ == next_; }

 private:
  std::uint64_t& cookie(std::uint64_t number) { return cookies_[number % kDepth]; }

  ibv_qp* const queue_;
  ibv_cq* const completions_;
  const Sink sink_;
  std::array<std::uint64_t, kDepth> cookies_{};
  std::uint64_t first_ = 0, done_ = 0, next_ = 0;  ///< reported, completed, posted
  bool broken_ = false;
};

class Flusher {
 public:
  static Result<std::unique_ptr<Flusher>> open(std::shared_ptr<const Device> device);

  // -- proxy thread --
  bool flush(const VerbsLocalRegion& region, std::uint64_t cookie);
  std::size_t poll(std::span<Event> events);
  /// Reports no more than failures, and whether there are none left.
  bool give_up();

  // -- one other thread, now and then --
  /// Makes a queue that broke (its port went down, its address changed) anew; until that works,
  /// nothing is flushed.
  void mend();

 private:
  explicit Flusher(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  Status make_queue();

  const std::shared_ptr<const Device> device_;
  std::unique_ptr<std::array<std::byte, 64>> sink_;
  RegionHandle sink_region_;
  CompletionQueueHandle completions_;
  QueuePairHandle handle_;
  std::unique_ptr<FlushQueue> queue_;
  /// Whose the queue is: the proxy's, until it has seen it break; then the mender's.
  std::atomic<bool> in_use_{false};
};

}  // namespace mk::fabric::verbs
