#include "shm/gpu/memory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "shm/layout.h"

namespace mk::gpu {

ProcessId this_process() {
  ProcessId id;
  id.pid = static_cast<std::uint64_t>(::getpid());
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  // The second field is the program's name in parentheses, whatever it contains; the start is the
  // 22nd.
  std::size_t at = text.rfind(')');
  for (int field = 2; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  if (at != std::string::npos) id.start_time = std::strtoull(text.c_str() + at, nullptr, 10);
  struct stat space {};
  if (::stat("/proc/self/ns/pid", &space) == 0) id.pid_space = space.st_ino;
  return id;
}

Result<Allocation> Allocation::create(std::shared_ptr<Driver> driver, int device,
                                      std::uint64_t bytes) {
  const std::uint64_t whole = shm::round_up(bytes, kAllocationGranule);
  MK_ASSIGN_OR_RETURN(std::byte* const memory, driver->allocate(device, whole));
  std::unique_ptr<std::byte, Free> owned(memory, Free{driver, device});
  MemoryKey key;
  MK_ASSIGN_OR_RETURN(key.handle, driver->share(device, memory));
  MK_ASSIGN_OR_RETURN(key.device, driver->uuid_of(device));
  key.process = this_process();
  key.address = reinterpret_cast<std::uintptr_t>(memory);
  key.bytes = whole;
  return Allocation(std::move(owned), key);
}

Result<View> View::open(std::shared_ptr<Driver> driver, int device, const MemoryKey& key) {
  View view;
  view.device_ = device;
  view.bytes_ = key.bytes;
  if (key.process == this_process()) {
    MK_ASSIGN_OR_RETURN(const int owner, driver->device_of(key.device));
    if (owner != device) MK_RETURN_IF_ERROR(driver->reach(device, owner));
    view.data_ = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(key.address));
    return view;
  }
  MK_ASSIGN_OR_RETURN(view.data_, driver->open(device, key.handle));
  view.driver_ = std::move(driver);
  MK_ASSIGN_OR_RETURN(const std::uint64_t bytes, view.driver_->bytes_of(device, view.data_));
  if (bytes < key.bytes) {
    return fail(ErrorCode::kInvalidArgument,
                "another process's GPU memory has {} bytes where {} were announced", bytes,
                key.bytes);
  }
  return view;
}

View& View::operator=(View&& other) noexcept {
  if (this == &other) return *this;
  reset();
  driver_ = std::move(other.driver_);
  device_ = other.device_;
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void View::reset() {
  if (driver_ != nullptr && data_ != nullptr) (void)driver_->close(device_, data_);
  driver_.reset();
  data_ = nullptr;
}

Result<PinnedPages> PinnedPages::pin(std::shared_ptr<Driver> driver, int device, void* pages,
                                     std::uint64_t bytes) {
  PinnedPages pinned;
  MK_ASSIGN_OR_RETURN(pinned.on_device_, driver->pin(device, pages, bytes));
  pinned.driver_ = std::move(driver);
  pinned.device_ = device;
  pinned.pages_ = static_cast<std::byte*>(pages);
  return pinned;
}

PinnedPages& PinnedPages::operator=(PinnedPages&& other) noexcept {
  if (this == &other) return *this;
  reset();
  driver_ = std::move(other.driver_);
  device_ = other.device_;
  pages_ = std::exchange(other.pages_, nullptr);
  on_device_ = std::exchange(other.on_device_, nullptr);
  return *this;
}

void PinnedPages::reset() {
  if (driver_ != nullptr && pages_ != nullptr) (void)driver_->unpin(device_, pages_);
  driver_.reset();
  pages_ = nullptr;
}

}  // namespace mk::gpu
