#include "daemon/control/memory_reserve.h"

#include <sys/mman.h>

#include <atomic>
#include <new>

namespace mk::daemon {

namespace {

std::atomic<bool> is_installed{false};
std::atomic<void*> block{nullptr};

void* take(std::size_t bytes) {
  void* const taken = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  return taken == MAP_FAILED ? nullptr : taken;
}

/// operator new calls it, and then tries again.
void give_away() {
  void* const kept = block.exchange(nullptr);
  if (kept == nullptr) throw std::bad_alloc();
  ::munmap(kept, MemoryReserve::kBytes);
}

}  // namespace

void MemoryReserve::install() {
  if (is_installed.exchange(true)) return;
  block.store(take(kBytes));
  std::set_new_handler(give_away);
}

MemoryReserve* MemoryReserve::installed() {
  static MemoryReserve reserve;
  return is_installed.load() ? &reserve : nullptr;
}

bool MemoryReserve::spent() const { return block.load() == nullptr; }

bool MemoryReserve::restore() {
  if (!spent()) return true;
  void* const taken = take(2 * kBytes);
  if (taken == nullptr) return false;
  ::munmap(static_cast<std::byte*>(taken) + kBytes, kBytes);
  void* none = nullptr;
  if (!block.compare_exchange_strong(none, taken)) ::munmap(taken, kBytes);
  return true;
}

}  // namespace mk::daemon
