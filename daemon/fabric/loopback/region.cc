#include "daemon/fabric/loopback/region.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "shm/atomic.h"
#include "shm/host/memfd.h"

namespace mk::fabric::loopback {
namespace {

/// A copy takes microseconds; a GPU that hangs holds up nobody for longer.
constexpr std::chrono::seconds kGpuCopiesTimeout{1};

}  // namespace

Key key_of(const Region& region, const Token& endpoint) {
  Key key;
  key.endpoint = endpoint;
  key.token = region.token;
  key.region = region.id;
  key.bytes = region.memory.bytes;
  key.fd_offset = region.memory.fd_offset;
  return key;
}

std::shared_ptr<Region> RegionTable::add(const MemoryDescriptor& memory, const Token& token) {
  auto region = std::make_shared<Region>();
  region->memory = memory;
  return add(std::move(region), token);
}

std::shared_ptr<Region> RegionTable::add(std::shared_ptr<Region> region, const Token& token) {
  region->token = token;
  const std::lock_guard lock(mutex_);
  region->id = next_++;
  regions_.emplace(region->id, region);
  return region;
}

void RegionTable::remove(Region& region) {
  {
    const std::lock_guard lock(mutex_);
    regions_.erase(region.id);
  }
  {
    const std::unique_lock lock(region.lock);
    region.alive = false;
  }
  const auto deadline = std::chrono::steady_clock::now() + kGpuCopiesTimeout;
  while (region.copies.load(std::memory_order_acquire) != 0 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds{50});
  }
}

Result<std::shared_ptr<Region>> RegionTable::find(const Key& key) const {
  std::shared_ptr<Region> region;
  {
    const std::lock_guard lock(mutex_);
    const auto it = regions_.find(key.region);
    if (it != regions_.end()) region = it->second;
  }
  // One answer for all, so that guessing a number learns nothing.
  if (!region || !same_token(region->token, key.token) || region->memory.bytes != key.bytes ||
      region->memory.fd_offset != key.fd_offset) {
    return fail(ErrorCode::kPermission,
                "region {} is not registered under this key: it was deregistered, or the key is "
                "not one we gave out",
                key.region);
  }
  return region;
}

ProcessRegistry& ProcessRegistry::instance() {
  static ProcessRegistry registry;
  return registry;
}

void ProcessRegistry::add(const Token& endpoint, const std::shared_ptr<RegionTable>& table) {
  const std::lock_guard lock(mutex_);
  tables_[token_text(endpoint)] = table;
}

void ProcessRegistry::remove(const Token& endpoint) {
  const std::lock_guard lock(mutex_);
  tables_.erase(token_text(endpoint));
  const auto [begin, end] = watches_.equal_range(token_text(endpoint));
  for (auto watch = begin; watch != end; ++watch) watch->second->on_gone_();
  watches_.erase(begin, end);
}

std::shared_ptr<RegionTable> ProcessRegistry::find(const Token& endpoint) const {
  const std::lock_guard lock(mutex_);
  const auto it = tables_.find(token_text(endpoint));
  return it == tables_.end() ? nullptr : it->second.lock();
}

std::unique_ptr<ProcessRegistry::Watch> ProcessRegistry::watch(const Token& endpoint,
                                                               std::function<void()> on_gone) {
  const std::string text = token_text(endpoint);
  const std::lock_guard lock(mutex_);
  if (!tables_.contains(text)) return nullptr;
  std::unique_ptr<Watch> made(new Watch(text, std::move(on_gone)));
  watches_.emplace(text, made.get());
  return made;
}

void ProcessRegistry::unwatch(const Watch& watch) {
  const std::lock_guard lock(mutex_);
  const auto [begin, end] = watches_.equal_range(watch.endpoint_);
  const auto found =
      std::find_if(begin, end, [&](const auto& entry) { return entry.second == &watch; });
  if (found != end) watches_.erase(found);
}

Target::Target(std::shared_ptr<Region> region)
    : region_(std::move(region)),
      address_(region_->memory.address),
      bytes_(region_->memory.bytes),
      device_(region_->memory.device) {}

Target::Target(boost::interprocess::mapped_region mapping, std::byte* address, std::uint64_t bytes)
    : mapping_(std::move(mapping)), address_(address), bytes_(bytes) {}

Target::Target(const gpu::MemoryKey& device, std::uint64_t bytes)
    : bytes_(bytes), device_(device) {}

Status Target::open_for(GpuCopier& gpu, std::uint32_t slot) {
  if (seen_by_[slot].load(std::memory_order_relaxed) != nullptr) return {};
  MK_ASSIGN_OR_RETURN(auto driver, gpu.driver());
  MK_ASSIGN_OR_RETURN(auto view, gpu::View::open(std::move(driver), gpu.device(slot), *device_));
  if (view.bytes() < bytes_) {
    return fail(ErrorCode::kProtocol, "the peer's region of {} bytes lies in a GPU's {}", bytes_,
                view.bytes());
  }
  seen_by_[slot].store(view.data(), std::memory_order_release);
  views_.push_back(std::move(view));
  return {};
}

GpuTicket Target::copy(GpuCopier& gpu, std::uint32_t slot, std::uint64_t offset,
                       const std::byte* source, std::size_t bytes) const {
  std::byte* const seen = seen_by_[slot].load(std::memory_order_acquire);
  if (seen == nullptr) return {};
  if (!region_) return gpu.copy(slot, seen + offset, source, bytes);
  const std::shared_lock lock(region_->lock);
  if (!region_->alive) return {};
  const GpuTicket ticket = gpu.copy(slot, seen + offset, source, bytes);
  if (ticket) region_->copies.fetch_add(1, std::memory_order_relaxed);
  return ticket;
}

void Target::end_copy() const {
  if (region_) region_->copies.fetch_sub(1, std::memory_order_release);
}

bool Target::write(std::uint64_t offset, const std::byte* source, std::size_t bytes) const {
  if (!region_) {
    std::memcpy(address_ + offset, source, bytes);
    return true;
  }
  const std::shared_lock lock(region_->lock);
  if (!region_->alive) return false;
  std::memcpy(address_ + offset, source, bytes);
  return true;
}

bool Target::store_flag(std::uint64_t index, std::uint32_t value) const {
  auto* flag = reinterpret_cast<std::uint32_t*>(address_ + 4 * index);
  if (!region_) {
    shm::store_release(flag, value);
    return true;
  }
  const std::shared_lock lock(region_->lock);
  if (!region_->alive) return false;
  shm::store_release(flag, value);
  return true;
}

Result<std::shared_ptr<Target>> map_target(int fd, const Key& key) {
  MK_RETURN_IF_ERROR(shm::require_seals(fd, F_SEAL_SHRINK, "the peer's region"));
  MK_RETURN_IF_ERROR(shm::refuse_huge_pages(fd, "the peer's region"));
  MK_ASSIGN_OR_RETURN(const std::uint64_t file, shm::file_bytes(fd, "the peer's region"));
  if (key.bytes == 0 || key.bytes > file || key.fd_offset > file - key.bytes) {
    return fail(ErrorCode::kProtocol,
                "the peer's region {} claims bytes {}..+{} of a memory file of {} bytes",
                key.region, key.fd_offset, key.bytes, file);
  }
  MK_ASSIGN_OR_RETURN(auto mapping,
                      shm::map_shared(fd, key.fd_offset + key.bytes, "the peer's region"));
  shm::exclude_from_dumps(mapping.get_address(), mapping.get_size());
  auto* address = static_cast<std::byte*>(mapping.get_address()) + key.fd_offset;
  return std::make_shared<Target>(std::move(mapping), address, key.bytes);
}

LoopbackLocalRegion::LoopbackLocalRegion(std::shared_ptr<RegionTable> table,
                                         std::shared_ptr<Region> region, const Token& endpoint)
    : table_(std::move(table)), region_(std::move(region)), endpoint_(endpoint) {}

LoopbackLocalRegion::~LoopbackLocalRegion() { table_->remove(*region_); }

Bytes LoopbackLocalRegion::key() const { return to_blob(key_of(*region_, endpoint_)); }

}  // namespace mk::fabric::loopback
