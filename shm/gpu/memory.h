/// \file
/// GPU memory by ownership: an allocation, a view of another rank's, pinned host pages. A key tells
/// another process of an allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "shm/gpu/driver.h"

namespace mk::gpu {

/// One process of this host, told from all others, those that had its pid before it included.
struct ProcessId {
  std::uint64_t pid = 0;
  std::uint64_t start_time = 0;  ///< in clock ticks since boot
  std::uint64_t pid_space = 0;   ///< the pid namespace
  friend bool operator==(const ProcessId&, const ProcessId&) = default;
};
ProcessId this_process();

/// An allocation, for another process to use it too. Plain bytes, as sent.
struct MemoryKey {
  IpcHandle handle;
  DeviceUuid device;
  ProcessId process;
  std::uint64_t address = 0;  ///< in `process`; a process cannot open what it has itself
  std::uint64_t bytes = 0;
};
static_assert(sizeof(MemoryKey) == 120);

/// Whole multiples of this are what allocations are made of: a smaller one would share its
/// neighbours, too, when it is opened elsewhere.
inline constexpr std::uint64_t kAllocationGranule = 2ull << 20;

/// Zeroed device memory of this process.
class Allocation {
 public:
  static Result<Allocation> create(std::shared_ptr<Driver> driver, int device, std::uint64_t bytes);
  Allocation(Allocation&&) noexcept = default;
  Allocation& operator=(Allocation&&) noexcept = default;

  std::byte* data() const { return memory_.get(); }
  int device() const { return memory_.get_deleter().device; }
  const MemoryKey& key() const { return key_; }
  /// A file that stands for it, where the driver has such.
  Result<Dmabuf> dmabuf() const { return memory_.get_deleter().driver->dmabuf(device(), data()); }

 private:
  struct Free {
    std::shared_ptr<Driver> driver;
    int device = 0;
    void operator()(std::byte* memory) const { (void)driver->free(device, memory); }
  };
  Allocation(std::unique_ptr<std::byte, Free> memory, const MemoryKey& key)
      : memory_(std::move(memory)), key_(key) {}

  std::unique_ptr<std::byte, Free> memory_;
  MemoryKey key_;
};

/// An allocation as one device of this process uses it, whosever it is.
class View {
 public:
  View() = default;
  /// The owner keeps the allocation until every view of it is gone. kInvalidArgument when it is
  /// smaller than its key says.
  static Result<View> open(std::shared_ptr<Driver> driver, int device, const MemoryKey& key);
  View(View&& other) noexcept { *this = std::move(other); }
  View& operator=(View&& other) noexcept;
  ~View() { reset(); }

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  void reset();

  std::shared_ptr<Driver> driver_;  ///< null: this process's own memory
  int device_ = 0;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// Mapped host memory that the GPUs may read and write, for as long as this lives; the mapping
/// lives longer.
class PinnedPages {
 public:
  PinnedPages() = default;
  /// `pages` and `bytes` are multiples of the page size.
  static Result<PinnedPages> pin(std::shared_ptr<Driver> driver, int device, void* pages,
                                 std::uint64_t bytes);
  PinnedPages(PinnedPages&& other) noexcept { *this = std::move(other); }
  PinnedPages& operator=(PinnedPages&& other) noexcept;
  ~PinnedPages() { reset(); }

  /// Where a device sees `host`, which lies in the pages.
  template <class T>
  T* on_device(T* host) const {
    const auto offset = reinterpret_cast<const std::byte*>(host) - pages_;
    return reinterpret_cast<T*>(on_device_ + offset);
  }

 private:
  void reset();

  std::shared_ptr<Driver> driver_;
  int device_ = 0;
  std::byte* pages_ = nullptr;
  std::byte* on_device_ = nullptr;
};

}  // namespace mk::gpu
