#include "daemon/fabric/gpu_copier.h"

#include <cstring>
#include <utility>

#include "shm/atomic.h"

namespace mk::fabric {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kWordStride = 64;
/// How long a copy may be under way before the driver is asked whether the GPU still works, which
/// takes about as long as a copy.
constexpr std::uint64_t kAskIntervalNs = 10'000'000;

}  // namespace

void GpuCopier::Device::end_streams() {
  for (gpu::Stream& stream : streams) {
    if (stream != nullptr) driver->end_stream(device, std::exchange(stream, nullptr));
  }
}

std::uint32_t* GpuCopier::Device::word(std::uint32_t stream) const {
  return reinterpret_cast<std::uint32_t*>(page + stream * kWordStride);
}

Result<std::shared_ptr<gpu::Driver>> GpuCopier::driver() {
  if (!driver_) driver_ = load_();
  return *driver_;
}

Result<std::uint32_t> GpuCopier::use(int device) {
  for (std::uint32_t slot = 0; slot < count_; ++slot) {
    if (owned_[slot]->device == device) return slot;
  }
  if (count_ == kGpuSlotsMax) {
    return fail(ErrorCode::kLimitExceeded, "one endpoint copies with at most {} GPUs",
                kGpuSlotsMax);
  }
  auto made = std::make_unique<Device>();
  MK_ASSIGN_OR_RETURN(made->driver, driver());
  made->device = device;
  made->room = std::make_unique<std::byte[]>(2 * kPageBytes);
  const auto at = reinterpret_cast<std::uintptr_t>(made->room.get());
  made->page = made->room.get() + (kPageBytes - at % kPageBytes) % kPageBytes;
  MK_ASSIGN_OR_RETURN(made->pinned,
                      gpu::PinnedPages::pin(made->driver, device, made->page, kPageBytes));
  for (gpu::Stream& stream : made->streams) {
    MK_ASSIGN_OR_RETURN(stream, made->driver->make_stream(device));
  }
  const std::uint32_t slot = count_;
  slots_[slot].store(made.get(), std::memory_order_release);
  owned_[slot] = std::move(made);
  count_.store(slot + 1, std::memory_order_release);
  return slot;
}

void GpuCopier::stop() {
  mark();
  for (const auto& device : owned_) {
    if (device == nullptr) continue;
    device->end_streams();
    device->failed = true;
  }
}

GpuTicket GpuCopier::copy(std::uint32_t slot, std::byte* to, const std::byte* from,
                          std::uint64_t bytes) {
  Device& device = at(slot);
  if (device.failed) return {};
  const std::uint32_t stream = device.next;
  device.next = (stream + 1) % kGpuStreams;
  if (!device.driver->copy(device.device, device.streams[stream], to, from, bytes)) {
    device.failed = true;
    return {};
  }
  return {slot, stream, ++device.submitted[stream]};
}

void GpuCopier::mark() {
  const std::uint32_t count = count_.load(std::memory_order_acquire);
  for (std::uint32_t slot = 0; slot < count; ++slot) {
    Device& device = at(slot);
    for (std::uint32_t stream = 0; stream < kGpuStreams; ++stream) {
      const std::uint32_t sequence = device.submitted[stream];
      if (device.marked[stream] == sequence || device.failed) continue;
      device.marked[stream] = sequence;
      auto* const word = reinterpret_cast<std::byte*>(device.pinned.on_device(device.word(stream)));
      if (!device.driver->write_word(device.device, device.streams[stream], word, sequence))
        device.failed = true;
    }
  }
}

GpuCopier::State GpuCopier::state(const GpuTicket& ticket, std::uint64_t now_ns) {
  Device& device = at(ticket.slot);
  // Acquire: the copied bytes come before the word.
  const std::uint32_t seen = shm::load_acquire(device.word(ticket.stream));
  if (static_cast<std::int32_t>(seen - ticket.sequence) >= 0) {
    device.asked_ns = now_ns;
    return State::kDone;
  }
  if (!device.failed && now_ns - device.asked_ns > kAskIntervalNs) {
    device.asked_ns = now_ns;
    device.failed = !device.driver->idle(device.device, device.streams[ticket.stream]);
  }
  return device.failed ? State::kFailed : State::kUnderWay;
}

}  // namespace mk::fabric
