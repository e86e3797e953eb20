/// \file
/// Receiving GPU memory: halves of writes become whole, their bytes are copied from the image to
/// the GPU, or, where the NIC has put them there, flushed. Only then is the arrival shown. Proxy
/// thread.
#pragma once

#include <functional>
#include <vector>

#include "daemon/fabric/staged/region.h"

namespace mk::fabric::staged {

class Receiver {
 public:
  using Flush = std::function<bool(const LocalRegion&, std::uint64_t cookie)>;
  /// Null flags: the contract that the engine sees is the unordered one. `flush`: Endpoint::flush.
  Receiver(GpuCopier& copier, std::shared_ptr<RegionTable> regions,
           std::shared_ptr<FlagTable> flags, Flush flush);

  /// How many halves may arrive before `report` makes room.
  std::size_t room() const { return copies_.size() - waiting_; }
  void arrived(std::uint32_t immediate, PeerNumber peer);
  /// Has the NIC flush what has arrived: one flush of a buffer stands for all that came before it.
  /// A flush that fails may take others with it. So a buffer whose last flush failed is flushed
  /// alone, and given up after kFlushesMax failures, or at the first once it is deregistered.
  void flush();
  /// A flush is over, as kFlushed says.
  void flushed(std::uint64_t cookie, ErrorCode code);
  /// Shows what has been copied or flushed: by events, or in the flags themselves. In the order of
  /// arrival within a buffer; no buffer waits for another.
  std::size_t report(std::uint64_t now_ns, std::span<Event> events);
  bool empty() const { return waiting_ == 0; }
  /// Arrivals that named nothing here, or whose buffer was gone.
  std::uint64_t lost() const { return lost_; }
  /// Once the GPUs have stopped: lets go of what they copied.
  void drop_copies();

 private:
  static constexpr std::uint32_t kDepth = 4096;
  static constexpr std::uint32_t kFlushesMax = 4;
  struct Copy {
    std::shared_ptr<Region> region;
    Record record;
    GpuTicket ticket;
    PeerNumber peer = kAnyPeer;          ///< who wrote
    std::uint64_t arrival = 0;           ///< of a direct buffer: its number there, from 1
    std::uint32_t next = Region::kNone;  ///< of the same buffer, or free
  };
  struct Flushing {
    std::uint64_t cookie = 0;
    std::shared_ptr<Region> region;
  };
  GpuCopier::State state(const Copy& copy, std::uint64_t now_ns);
  void begin(const std::shared_ptr<Region>& region, std::uint32_t flag_index, PeerNumber peer);
  void add(Copy copy);
  void drop_first(Region& region);
  /// Shows what can be shown of one buffer; false where `events` has no more room.
  bool report_of(Region& region, std::uint64_t now_ns, std::span<Event> events, std::size_t& count);

  GpuCopier& copier_;
  const std::shared_ptr<RegionTable> regions_;
  const std::shared_ptr<FlagTable> flags_;
  const Flush flush_;
  std::vector<Copy> copies_;
  std::uint32_t free_ = 0;                         ///< the first free place
  std::size_t waiting_ = 0;                        ///< places that are not free
  std::vector<std::shared_ptr<Region>> showing_;   ///< those with arrivals that are not shown
  std::vector<std::shared_ptr<Region>> to_flush_;  ///< those with arrivals the GPU may not see yet
  std::vector<Flushing> flushing_;
  bool flushing_alone_ = false;
  std::uint64_t flushes_ = 0;
  std::uint64_t lost_ = 0;
};

}  // namespace mk::fabric::staged
