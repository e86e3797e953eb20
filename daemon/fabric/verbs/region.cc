#include "daemon/fabric/verbs/region.h"

#include <algorithm>

namespace mk::fabric::verbs {

// The NIC forgets what it must outside the lock: that takes as long as the NIC does.

Status KeyTable::add(const Key& key, std::vector<RegionHandle> pieces) {
  const std::lock_guard lock(mutex_);
  if (device_ == nullptr)
    return fail(ErrorCode::kUnavailable, "the RDMA port was lost meanwhile: register again");
  entries_[key.region] = {key.digest(), std::move(pieces)};
  return {};
}

void KeyTable::remove(const Token& region) {
  Entry removed;
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(region);
  if (found == entries_.end()) return;
  std::swap(removed, found->second);
  entries_.erase(found);
}

bool KeyTable::valid(const Token& region, std::uint64_t digest) const {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(region);
  return found != entries_.end() && found->second.digest == digest;
}

void KeyTable::clear() {
  std::shared_ptr<const Device> device;  // goes after the regions
  std::map<Token, Entry> entries;
  const std::lock_guard lock(mutex_);
  device.swap(device_);
  entries.swap(entries_);
}

Result<std::vector<RegionHandle>> register_pieces(ibv_pd* domain, std::string_view port,
                                                  const MemoryDescriptor& memory,
                                                  std::uint32_t piece_shift, unsigned access) {
  const std::uint64_t piece = std::uint64_t{1} << piece_shift;
  std::vector<RegionHandle> pieces;
  for (std::uint64_t at = 0; at < memory.bytes; at += piece) {
    const std::uint64_t bytes = std::min(piece, memory.bytes - at);
    std::byte* const address = memory.address + at;
    // What the network calls the GPU's memory is what its owner calls it: so the place within a
    // page is the same in the file and on the wire, as the kernel demands.
    RegionHandle region(memory.direct == GpuWindow::kDmabuf
                            ? ::ibv_reg_dmabuf_mr(domain, memory.dmabuf_offset + at, bytes,
                                                  reinterpret_cast<std::uint64_t>(address),
                                                  memory.dmabuf, static_cast<int>(access))
                            : ::ibv_reg_mr(domain, address, bytes, access));
    if (!region) {
      return fail_verb(errno, "RDMA port {} does not register {} bytes of {}", port, bytes,
                       memory.direct == GpuWindow::kNone ? "memory" : "GPU memory");
    }
    pieces.push_back(std::move(region));
  }
  return pieces;
}

}  // namespace mk::fabric::verbs
