/// \file
/// Memory of an endpoint that takes GPUs': a GPU buffer with its host memory, the table of them
/// that arrivals look in, and the arrival flags that this endpoint stores itself.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "daemon/fabric/gpu_copier.h"
#include "daemon/fabric/staged/wire.h"
#include "daemon/fabric/striped/pack.h"
#include "shm/host/buffer_file.h"

namespace mk::fabric::staged {

/// A registered GPU buffer. Shared by its owner and by copies under way.
struct Region {
  explicit Region(shm::BufferFile file) : memory(std::move(file)) {}

  std::uint32_t number = 0;
  std::uint64_t bytes = 0;
  int device = 0;  ///< of `view`
  gpu::View view;  ///< none for a dmabuf
  std::uint32_t gpu_slot = kGpuSlotsMax;
  shm::BufferFile memory;  ///< records, then the image; the network reads and writes it
  gpu::PinnedPages pinned;
  std::byte* image = nullptr;         ///< in `memory`, as the GPU sees it
  std::unique_ptr<LocalRegion> host;  ///< `memory` at the second endpoint
  /// The buffer itself, which the NIC reaches; null: by its image.
  std::unique_ptr<LocalRegion> direct;
  std::string path;              ///< how it goes, for users
  std::vector<Bytes> key_parts;  ///< of its key; the second is the second endpoint's address
  std::function<Bytes(Bytes address, PeerNumber peer)> personal;  ///< of that endpoint

  const Record* record(std::uint32_t flag_index) const {
    return reinterpret_cast<const Record*>(memory.data()) + flag_index;
  }

  /// Begins a copy unless the buffer has been deregistered. Proxy thread; `end_copy` once over.
  GpuTicket to_gpu(GpuCopier& copier, std::uint64_t offset, std::uint64_t bytes);
  GpuTicket to_host(GpuCopier& copier, std::uint64_t offset, std::uint64_t bytes);
  void end_copy() { copies.fetch_sub(1, std::memory_order_release); }
  /// The same for what the NIC itself has written and is still to be flushed: it stays registered.
  bool hold();
  bool registered() {
    const std::shared_lock held(lock);
    return alive;
  }

  // -- proxy thread --
  struct Halves {
    std::uint16_t data = 0, record = 0;  ///< kHere | nonce; 0: not there
    std::uint16_t peer = 0;              ///< whose
  };
  static constexpr std::uint16_t kHere = 0x100;
  std::vector<Halves> halves = std::vector<Halves>(shm::kFlagsMax);
  // Direct: how many writes are whole, how many of these the flush under way stands for, and how
  // many the GPU sees.
  std::uint64_t arrived = 0, covered = 0, flushed = 0;
  bool flushing = false;
  std::uint32_t failures = 0;  ///< flushes that failed in a row
  bool unreachable = false;    ///< direct, and the NIC has lost it: nothing is flushed any more
  /// Arrivals that are not shown: the first and the last place in the receiver's list.
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  std::uint32_t first_waiting = kNone, last_waiting = kNone;

  std::shared_mutex lock;
  bool alive = true;
  std::atomic<std::uint32_t> copies{0};
};

/// What an endpoint has registered, by number. Outlives the endpoint as long as regions do.
class RegionTable {
 public:
  /// Gives the region a number that has not been in use for as long as possible.
  Status add(const std::shared_ptr<Region>& region);
  /// Waits until no GPU reads or writes it (a second at most; of several in a row, for the first
  /// that hangs), then forgets it.
  void remove(Region& region);
  /// How the buffers that are there go, each way once: "by dmabuf, staged through host memory".
  std::string paths() const;
  std::shared_ptr<Region> find(std::uint32_t number) const;

 private:
  mutable std::mutex mutex_;
  std::array<std::shared_ptr<Region>, kRegionsMax> regions_;
  std::uint32_t next_ = 0;
  std::chrono::steady_clock::time_point waited_until_{};  ///< without an answer
};

/// Where arrival flags lie, by the digest of their memory's key.
class FlagTable {
 public:
  void add(std::uint64_t digest, const MemoryDescriptor& memory);
  void remove(std::uint64_t digest);
  /// Stores one after everything this thread stored before; false when there is no such flag.
  bool store(std::uint64_t digest, std::uint32_t index, std::uint32_t epoch) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::uint64_t, MemoryDescriptor> flags_;
};

/// A GPU buffer, for the engine.
class StagedLocalRegion final : public LocalRegion {
 public:
  StagedLocalRegion(std::shared_ptr<RegionTable> table, std::shared_ptr<Region> region)
      : table_(std::move(table)), region_(std::move(region)) {
    of_gpu = true;
  }
  ~StagedLocalRegion() override { table_->remove(*region_); }
  Bytes key() const override { return pack(region_->key_parts); }
  Bytes key_for(PeerNumber peer) const override {
    std::vector<Bytes> parts = region_->key_parts;
    parts[1] = region_->personal(std::move(parts[1]), peer);
    return pack(parts);
  }
  const std::shared_ptr<Region>& region() const { return region_; }

 private:
  std::shared_ptr<RegionTable> table_;
  std::shared_ptr<Region> region_;
};

/// Arrival flags of the ordered contract: the network writes them, and so do we.
class FlagsLocalRegion final : public LocalRegion {
 public:
  FlagsLocalRegion(std::shared_ptr<FlagTable> table, std::unique_ptr<LocalRegion> plain,
                   const MemoryDescriptor& memory)
      : table_(std::move(table)), plain_(std::move(plain)), digest_(digest_of(plain_->key())) {
    table_->add(digest_, memory);
  }
  ~FlagsLocalRegion() override { table_->remove(digest_); }
  Bytes key() const override { return plain_->key(); }

 private:
  std::shared_ptr<FlagTable> table_;
  std::unique_ptr<LocalRegion> plain_;
  std::uint64_t digest_;
};

/// A peer's GPU buffer, as one link writes to it.
class StagedRemoteRegion final : public RemoteRegion {
 public:
  StagedRemoteRegion(const KeyHead& head, std::unique_ptr<RemoteRegion> memory,
                     std::unique_ptr<RemoteRegion> direct)
      : head_(head), memory_(std::move(memory)), direct_(std::move(direct)) {
    of_gpu = true;
  }
  std::uint32_t number() const { return static_cast<std::uint32_t>(head_.region); }
  std::uint64_t bytes() const { return head_.bytes; }
  /// Its records, and the image if there is one.
  const RemoteRegion* memory() const { return memory_.get(); }
  const RemoteRegion* direct() const { return direct_.get(); }

 private:
  KeyHead head_;
  std::unique_ptr<RemoteRegion> memory_;
  std::unique_ptr<RemoteRegion> direct_;
};

}  // namespace mk::fabric::staged
