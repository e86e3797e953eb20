#include "daemon/fabric/staged/region.h"

#include <fmt/ranges.h>

#include <set>
#include <thread>

#include "shm/atomic.h"

namespace mk::fabric::staged {
namespace {

/// A copy takes microseconds; a GPU that hangs holds up nobody for longer.
constexpr std::chrono::seconds kCopiesTimeout{1};

}  // namespace

GpuTicket Region::to_gpu(GpuCopier& copier, std::uint64_t offset, std::uint64_t count) {
  const std::shared_lock held(lock);
  if (!alive) return {};
  const GpuTicket ticket = copier.copy(gpu_slot, view.data() + offset, image + offset, count);
  if (ticket) copies.fetch_add(1, std::memory_order_relaxed);
  return ticket;
}

GpuTicket Region::to_host(GpuCopier& copier, std::uint64_t offset, std::uint64_t count) {
  const std::shared_lock held(lock);
  if (!alive) return {};
  const GpuTicket ticket = copier.copy(gpu_slot, image + offset, view.data() + offset, count);
  if (ticket) copies.fetch_add(1, std::memory_order_relaxed);
  return ticket;
}

bool Region::hold() {
  const std::shared_lock held(lock);
  if (alive) copies.fetch_add(1, std::memory_order_relaxed);
  return alive;
}

Status RegionTable::add(const std::shared_ptr<Region>& region) {
  const std::lock_guard held(mutex_);
  for (std::uint32_t tries = 0; tries < kRegionsMax; ++tries) {
    const std::uint32_t number = next_++ % kRegionsMax;
    if (regions_[number] != nullptr) continue;
    region->number = number;
    regions_[number] = region;
    return {};
  }
  return fail(ErrorCode::kLimitExceeded,
              "one rail takes at most {} GPU buffers: deregister some, or use fewer and larger "
              "ones",
              kRegionsMax);
}

void RegionTable::remove(Region& region) {
  {
    const std::unique_lock held(region.lock);
    region.alive = false;
  }
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  std::unique_lock held(mutex_);
  const bool in_vain = begin < waited_until_ + kCopiesTimeout;
  held.unlock();
  const Clock::time_point deadline = in_vain ? begin : begin + kCopiesTimeout;
  while (region.copies.load(std::memory_order_acquire) != 0 && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::microseconds{50});
  held.lock();
  if (region.copies.load(std::memory_order_acquire) != 0) waited_until_ = Clock::now();
  regions_[region.number].reset();
}

std::string RegionTable::paths() const {
  const std::lock_guard held(mutex_);
  std::set<std::string> all;
  for (const auto& region : regions_) {
    if (region != nullptr) all.insert(region->path);
  }
  return fmt::format("{}", fmt::join(all, ", "));
}

std::shared_ptr<Region> RegionTable::find(std::uint32_t number) const {
  const std::lock_guard held(mutex_);
  return regions_[number];
}

void FlagTable::add(std::uint64_t digest, const MemoryDescriptor& memory) {
  const std::lock_guard held(mutex_);
  flags_[digest] = memory;
}

void FlagTable::remove(std::uint64_t digest) {
  const std::lock_guard held(mutex_);
  flags_.erase(digest);
}

bool FlagTable::store(std::uint64_t digest, std::uint32_t index, std::uint32_t epoch) const {
  const std::lock_guard held(mutex_);
  const auto found = flags_.find(digest);
  if (found == flags_.end() || (std::uint64_t{index} + 1) * 4 > found->second.bytes) return false;
  shm::store_release(reinterpret_cast<std::uint32_t*>(found->second.address) + index, epoch);
  return true;
}

}  // namespace mk::fabric::staged
