/// \file
/// A GPU driver over host memory: allocations and IPC handles that are counted and checked, and
/// streams whose work happens when the test says so. "Processes" are drivers that share a
/// `FakeMachine`.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "shm/gpu/driver.h"

namespace mk::gpu::test {

/// What all processes of a host have in common.
struct FakeMachine {
  /// Whole pages of a memory file, which is the memory's dmabuf, too. At `place`; null: anywhere.
  struct Block {
    Block(std::size_t size, std::byte* place)
        : file(::memfd_create("fake-gpu-memory", MFD_CLOEXEC)), length(pages_of(size)) {
      const int flags = MAP_SHARED | (place != nullptr ? MAP_FIXED : 0);
      void* const mapped =
          ::ftruncate(file.get(), static_cast<off_t>(length)) != 0
              ? MAP_FAILED
              : ::mmap(place, length, PROT_READ | PROT_WRITE, flags, file.get(), 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      bytes = {static_cast<std::byte*>(mapped), size};
    }
    ~Block() { ::munmap(bytes.data(), length); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    UniqueFd file;
    std::size_t length;
    std::span<std::byte> bytes;
    int views = 0;
    bool freed = false;
  };
  static std::size_t pages_of(std::size_t size) { return (size + 4095) / 4096 * 4096; }
  ~FakeMachine() {
    if (arena != nullptr) ::munmap(arena, kArenaBytes);
  }
  /// The next block: one directly behind the other, as CUDA places them.
  std::shared_ptr<Block> make_block(std::size_t size) {
    if (arena == nullptr) {
      void* const mapped = ::mmap(nullptr, kArenaBytes, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      arena = static_cast<std::byte*>(mapped);
    }
    if (pages_of(size) > kArenaBytes - used) return std::make_shared<Block>(size, nullptr);
    std::byte* const place = arena + used;
    used += pages_of(size);
    return std::make_shared<Block>(size, place);
  }

  static constexpr std::size_t kArenaBytes = std::size_t{1} << 30;
  std::byte* arena = nullptr;
  std::size_t used = 0;
  std::mutex mutex;
  int devices = 2;
  std::uint64_t next_handle = 1;
  std::map<std::uint64_t, std::shared_ptr<Block>> by_handle;

  static DeviceUuid uuid(int device) {
    DeviceUuid uuid;
    uuid.bytes[15] = static_cast<std::byte>(device + 1);
    return uuid;
  }
};

class FakeDriver final : public Driver {
 public:
  explicit FakeDriver(std::shared_ptr<FakeMachine> machine) : machine_(std::move(machine)) {}

  // -- what the test does and sees --
  int device = 0;     ///< of the calling thread
  bool hold = false;  ///< streams do their work only by `run`
  bool fail_copies = false;
  bool fail_open = false;
  std::atomic<std::thread::id> fail_stores_of{};  ///< of that thread
  bool exports_dmabufs = true;
  MemoryRoom free_memory{1ull << 40, 1ull << 40};
  /// Does up to `count` pieces of work, over all streams in turn; how many there were.
  std::size_t run(std::size_t count = SIZE_MAX) {
    const std::lock_guard lock(machine_->mutex);
    std::size_t done = 0;
    bool any = true;
    while (any && done < count) {
      any = false;
      for (auto& stream : streams_) {
        if (stream->empty() || done == count) continue;
        perform(stream->front());
        stream->pop_front();
        ++done;
        any = true;
      }
    }
    return done;
  }
  std::size_t allocations() const {
    return locked([&] { return allocations_.size(); });
  }
  std::uint64_t allocated_bytes() const {
    return locked([&] {
      std::uint64_t sum = 0;
      for (const auto& [memory, block] : allocations_) sum += block->bytes.size();
      return sum;
    });
  }
  std::size_t views() const {
    return locked([&] { return views_.size(); });
  }
  std::size_t pinned() const {
    return locked([&] { return pinned_.size(); });
  }
  std::size_t copies() const {
    return locked([&] { return copies_; });
  }
  std::size_t word_writes() const {
    return locked([&] { return word_writes_; });
  }

  // -- Driver --
  Result<int> device_of(const DeviceUuid& uuid) override {
    for (int i = 0; i < machine_->devices; ++i) {
      if (FakeMachine::uuid(i) == uuid) return i;
    }
    return fail(ErrorCode::kNotFound, "{} is not here", text_of(uuid));
  }
  Result<DeviceUuid> uuid_of(int number) override { return FakeMachine::uuid(number); }
  int devices() override { return machine_->devices; }
  Status choose_device(int number) override {
    device = number;
    return {};
  }
  Result<int> current_device() override { return device; }

  Result<std::byte*> allocate(int, std::uint64_t bytes) override {
    const std::lock_guard lock(machine_->mutex);
    auto block = machine_->make_block(bytes);
    std::byte* const memory = block->bytes.data();
    allocations_.emplace(memory, std::move(block));
    return memory;
  }
  Result<MemoryRoom> room(int) override { return free_memory; }
  Status free(int, std::byte* memory) override {
    const std::lock_guard lock(machine_->mutex);
    const auto found = allocations_.find(memory);
    if (found == allocations_.end()) return fail(ErrorCode::kInvalidArgument, "freed twice");
    found->second->freed = true;
    std::erase_if(machine_->by_handle,
                  [&](const auto& entry) { return entry.second == found->second; });
    allocations_.erase(found);
    return {};
  }
  Result<IpcHandle> share(int, std::byte* memory) override {
    const std::lock_guard lock(machine_->mutex);
    const std::uint64_t number = machine_->next_handle++;
    machine_->by_handle[number] = allocations_.at(memory);
    IpcHandle handle;
    std::memcpy(handle.bytes.data(), &number, sizeof number);
    return handle;
  }
  Result<Dmabuf> dmabuf(int, std::byte* memory) override {
    const std::lock_guard lock(machine_->mutex);
    if (!exports_dmabufs || !allocations_.contains(memory))
      return fail(ErrorCode::kUnsupported, "the fake driver exports no dmabuf");
    return Dmabuf{UniqueFd(::dup(allocations_.at(memory)->file.get())), 0};
  }
  Result<std::byte*> open(int, const IpcHandle& handle) override {
    const std::lock_guard lock(machine_->mutex);
    std::uint64_t number = 0;
    std::memcpy(&number, handle.bytes.data(), sizeof number);
    const auto found = machine_->by_handle.find(number);
    if (fail_open || found == machine_->by_handle.end())
      return fail(ErrorCode::kSystem, "the fake driver cannot open the handle");
    ++found->second->views;
    views_.emplace(found->second->bytes.data(), found->second);
    return found->second->bytes.data();
  }
  Status close(int, std::byte* memory) override {
    const std::lock_guard lock(machine_->mutex);
    const auto found = views_.find(memory);
    if (found == views_.end()) return fail(ErrorCode::kInvalidArgument, "closed twice");
    --found->second->views;
    views_.erase(found);
    return {};
  }
  Result<std::uint64_t> bytes_of(int, std::byte* memory) override {
    const std::lock_guard lock(machine_->mutex);
    const auto found = views_.find(memory);
    if (found == views_.end()) return fail(ErrorCode::kNotFound, "not opened here");
    return found->second->bytes.size();
  }
  Status reach(int, int) override { return {}; }
  Result<std::byte*> pin(int, void* pages, std::uint64_t) override {
    const std::lock_guard lock(machine_->mutex);
    if (!pinned_.insert(pages).second)
      return fail(ErrorCode::kAlreadyExists, "these pages are pinned already");
    return static_cast<std::byte*>(pages);
  }
  Status unpin(int, void* pages) override {
    const std::lock_guard lock(machine_->mutex);
    if (pinned_.erase(pages) == 0) return fail(ErrorCode::kNotFound, "not pinned");
    return {};
  }
  Status fetch(int, void* to, const std::byte* from, std::uint64_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status store(int, std::byte* to, const void* from, std::uint64_t bytes) override {
    if (fail_stores_of.load() == std::this_thread::get_id())
      return fail(ErrorCode::kSystem, "the fake driver stores nothing");
    std::memcpy(to, from, bytes);
    return {};
  }

  Result<Stream> make_stream(int) override {
    const std::lock_guard lock(machine_->mutex);
    streams_.push_back(std::make_unique<std::deque<Work>>());
    return reinterpret_cast<Stream>(streams_.back().get());
  }
  void end_stream(int, Stream stream) override {
    const std::lock_guard lock(machine_->mutex);
    std::erase_if(streams_, [&](const auto& owned) {
      if (reinterpret_cast<Stream>(owned.get()) != stream) return false;
      for (const Work& work : *owned) {
        if (!broken) perform(work);
      }
      return true;
    });
  }
  Status copy(int, Stream stream, std::byte* to, const std::byte* from,
              std::uint64_t bytes) override {
    const std::lock_guard lock(machine_->mutex);
    if (fail_copies) return fail(ErrorCode::kSystem, "the fake driver copies nothing");
    if (leaves_its_memory(from, bytes) || leaves_its_memory(to, bytes))
      return fail(ErrorCode::kSystem, "CUDA_ERROR_INVALID_VALUE");
    ++copies_;
    return submit(stream, {to, from, bytes, 0});
  }
  Status write_word(int, Stream stream, std::byte* word, std::uint32_t value) override {
    const std::lock_guard lock(machine_->mutex);
    ++word_writes_;
    return submit(stream, {word, nullptr, 0, value});
  }
  Result<bool> idle(int, Stream stream) override {
    const std::lock_guard lock(machine_->mutex);
    if (broken) return fail(ErrorCode::kSystem, "the fake GPU fell off the bus");
    return reinterpret_cast<std::deque<Work>*>(stream)->empty();
  }
  bool broken = false;  ///< streams answer an error, and do nothing more

 private:
  struct Work {
    std::byte* to;
    const std::byte* from;  ///< null: a word
    std::uint64_t bytes;
    std::uint32_t value;
  };
  template <class F>
  std::size_t locked(F&& f) const {
    const std::lock_guard lock(machine_->mutex);
    return f();
  }
  /// Whether the range begins in an allocation, and ends beyond it: as CUDA sees it.
  bool leaves_its_memory(const std::byte* begin, std::uint64_t bytes) const {
    const auto leaves = [&](const auto& blocks) {
      auto found = blocks.upper_bound(const_cast<std::byte*>(begin));
      if (found == blocks.begin()) return false;
      const FakeMachine::Block& block = *(--found)->second;
      const auto at = static_cast<std::uint64_t>(begin - block.bytes.data());
      return at < block.length && bytes > block.length - at;
    };
    return leaves(allocations_) || leaves(views_);
  }
  Status submit(Stream stream, const Work& work) {
    if (hold) {
      reinterpret_cast<std::deque<Work>*>(stream)->push_back(work);
    } else {
      perform(work);
    }
    return {};
  }
  static void perform(const Work& work) {
    if (work.from != nullptr) {
      std::memcpy(work.to, work.from, work.bytes);
    } else {
      __atomic_store_n(reinterpret_cast<std::uint32_t*>(work.to), work.value, __ATOMIC_RELEASE);
    }
  }

  const std::shared_ptr<FakeMachine> machine_;
  std::map<std::byte*, std::shared_ptr<FakeMachine::Block>> allocations_;
  std::multimap<std::byte*, std::shared_ptr<FakeMachine::Block>> views_;
  std::set<void*> pinned_;
  std::vector<std::unique_ptr<std::deque<Work>>> streams_;
  std::size_t copies_ = 0;
  std::size_t word_writes_ = 0;
};

}  // namespace mk::gpu::test
