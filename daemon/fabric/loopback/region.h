/// \file
/// Memory of the loopback fabric: what an endpoint has registered, and a peer's region as a link
/// writes to it.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/fabric/blob.h"
#include "daemon/fabric/gpu_copier.h"

namespace mk::fabric::loopback {

/// An endpoint's address: its identity, which also names its socket. The magic's last digit is the
/// version of the messages as well.
struct Address {
  static constexpr std::uint64_t kMagic = 0x32'72'64'61'62'6c'6b'6d;  // "mklbadr2"
  std::uint64_t magic = kMagic;
  Token endpoint{};
};

/// A region's key. The token proves that the region's owner gave the key out.
struct Key {
  static constexpr std::uint64_t kMagic = 0x31'79'65'6b'62'6c'6b'6d;  // "mklbkey1"
  std::uint64_t magic = kMagic;
  Token endpoint{};
  Token token{};
  std::uint64_t region = 0;
  std::uint64_t bytes = 0;
  std::uint64_t fd_offset = 0;
};
static_assert(sizeof(Key) <= 256 && sizeof(Address) <= 512);

/// One registration. Links of this process write to it directly, under `lock` held shared, for as
/// long as it is alive.
struct Region {
  std::uint64_t id = 0;
  Token token{};
  MemoryDescriptor memory;
  mutable std::shared_mutex lock;
  bool alive = true;
  // Of a GPU: as a source.
  gpu::View view;
  std::uint32_t gpu_slot = kGpuSlotsMax;
  /// Copies by links of this process into GPU memory that are under way; begun under `lock`.
  mutable std::atomic<std::uint32_t> copies{0};
};

/// What `endpoint` gives out for `region`.
Key key_of(const Region& region, const Token& endpoint);

/// What one endpoint has registered. Used by its control thread, by its service thread and, within
/// one process, by the control threads of its peers.
class RegionTable {
 public:
  std::shared_ptr<Region> add(const MemoryDescriptor& memory, const Token& token);
  std::shared_ptr<Region> add(std::shared_ptr<Region> region, const Token& token);
  /// Waits until nobody reads or writes through the region (at most a second for a GPU), then
  /// forgets it.
  void remove(Region& region);
  /// The region that `key` names, if the key's token, size and offset are the region's own.
  Result<std::shared_ptr<Region>> find(const Key& key) const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Region>> regions_;
  std::uint64_t next_ = 1;
};

/// The region tables of this process by endpoint, so that daemons in one process need no second
/// mapping.
class ProcessRegistry {
 public:
  static ProcessRegistry& instance();
  void add(const Token& endpoint, const std::shared_ptr<RegionTable>& table);
  void remove(const Token& endpoint);
  std::shared_ptr<RegionTable> find(const Token& endpoint) const;

  /// While it lives, its `on_gone` is called when the endpoint is removed: by that thread, and only
  /// once.
  class Watch {
   public:
    ~Watch() { instance().unwatch(*this); }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    friend class ProcessRegistry;
    Watch(std::string endpoint, std::function<void()> on_gone)
        : endpoint_(std::move(endpoint)), on_gone_(std::move(on_gone)) {}
    const std::string endpoint_;
    const std::function<void()> on_gone_;
  };
  /// Null when this process has no such endpoint. `on_gone` must not block, nor come back here.
  std::unique_ptr<Watch> watch(const Token& endpoint, std::function<void()> on_gone);

 private:
  void unwatch(const Watch& watch);

  mutable std::mutex mutex_;
  std::unordered_multimap<std::string, Watch*> watches_;  ///< by endpoint
  std::unordered_map<std::string, std::weak_ptr<RegionTable>> tables_;
};

/// Where a link writes: a region of this process, or a mapping of a peer's memory file.
class Target {
 public:
  /// A region of this process.
  explicit Target(std::shared_ptr<Region> region);
  /// A peer's region, through `mapping`; `address` lies in it.
  Target(boost::interprocess::mapped_region mapping, std::byte* address, std::uint64_t bytes);
  /// A peer's region in another process's GPU memory.
  Target(const gpu::MemoryKey& device, std::uint64_t bytes);

  /// Copies; false when the region has been deregistered.
  bool write(std::uint64_t offset, const std::byte* source, std::size_t bytes) const;
  /// Stores one flag after everything this thread wrote before; false when the region has been
  /// deregistered.
  bool store_flag(std::uint64_t index, std::uint32_t value) const;
  std::uint64_t bytes() const { return bytes_; }
  /// Whether flags can be stored here.
  bool flag_aligned() const {
    return !device_ && reinterpret_cast<std::uintptr_t>(address_) % 4 == 0;
  }

  // -- in a GPU's memory --
  bool on_gpu() const { return device_.has_value(); }
  /// Control thread. Makes it a destination for copies from the slot's device.
  Status open_for(GpuCopier& gpu, std::uint32_t slot);
  /// Proxy thread: hands a copy over. No ticket: the region has been deregistered, or the device
  /// failed. `end_copy` once it is over.
  GpuTicket copy(GpuCopier& gpu, std::uint32_t slot, std::uint64_t offset, const std::byte* source,
                 std::size_t bytes) const;
  void end_copy() const;

 private:
  std::shared_ptr<Region> region_;
  boost::interprocess::mapped_region mapping_;
  std::byte* address_ = nullptr;
  std::uint64_t bytes_;
  std::optional<gpu::MemoryKey> device_;
  std::vector<gpu::View> views_;  ///< control thread
  std::array<std::atomic<std::byte*>, kGpuSlotsMax> seen_by_{};
};

/// Maps the region that `key` describes from its memory file. Refuses a file that could shrink
/// under us, and huge pages.
Result<std::shared_ptr<Target>> map_target(int fd, const Key& key);

class LoopbackLocalRegion final : public LocalRegion {
 public:
  LoopbackLocalRegion(std::shared_ptr<RegionTable> table, std::shared_ptr<Region> region,
                      const Token& endpoint);
  ~LoopbackLocalRegion() override;
  Bytes key() const override;
  const std::shared_ptr<Region>& region() const { return region_; }

 private:
  std::shared_ptr<RegionTable> table_;
  std::shared_ptr<Region> region_;
  Token endpoint_;
};

class LoopbackRemoteRegion final : public RemoteRegion {
 public:
  explicit LoopbackRemoteRegion(std::shared_ptr<Target> target) : target_(std::move(target)) {}
  const std::shared_ptr<Target>& target() const { return target_; }

 private:
  std::shared_ptr<Target> target_;
};

}  // namespace mk::fabric::loopback
