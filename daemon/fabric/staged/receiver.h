/// \file
/// Receiving GPU memory: halves of writes become whole, their bytes are copied from the image to
/// the GPU, and only then is the arrival shown. Proxy thread.
#pragma once

#include <vector>

#include "daemon/fabric/staged/region.h"

namespace mk::fabric::staged {

class Receiver {
 public:
  /// `contract`: as the engine has it. Null flags: it is unordered.
  Receiver(GpuCopier& copier, std::shared_ptr<RegionTable> regions,
           std::shared_ptr<FlagTable> flags)
      : copier_(copier), regions_(std::move(regions)), flags_(std::move(flags)), ring_(kDepth) {}

  /// How many halves may arrive before `report` makes room.
  std::size_t room() const { return ring_.size() - (begun_ - shown_); }
  void arrived(std::uint32_t immediate);
  /// Shows what has been copied: by events, or in the flags themselves.
  std::size_t report(std::uint64_t now_ns, std::span<Event> events);
  bool empty() const { return begun_ == shown_; }
  /// Arrivals that named nothing here, or whose buffer was gone.
  std::uint64_t lost() const { return lost_; }
  /// Once the GPUs have stopped: lets go of what they copied.
  void drop_copies();

 private:
  static constexpr std::size_t kDepth = 4096;
  struct Copy {
    std::shared_ptr<Region> region;
    Record record;
    GpuTicket ticket;
  };
  void begin(const std::shared_ptr<Region>& region, std::uint32_t flag_index);

  GpuCopier& copier_;
  const std::shared_ptr<RegionTable> regions_;
  const std::shared_ptr<FlagTable> flags_;
  std::vector<Copy> ring_;
  std::uint64_t begun_ = 0;
  std::uint64_t shown_ = 0;
  std::uint64_t lost_ = 0;
};

}  // namespace mk::fabric::staged
