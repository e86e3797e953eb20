/// \file
/// The session segment on the host: the daemon creates, sizes, seals and initialises it; the client
/// maps what it was handed, after checking it.
#pragma once

#include <atomic>
#include <boost/interprocess/mapped_region.hpp>
#include <cstdint>
#include <memory>
#include <string_view>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"
#include "shm/layout.h"
#include "shm/ring.h"

namespace mk::shm {

/// A mapped segment. Movable; unmaps itself. The descriptor stays open as long as the object lives.
class Segment {
 public:
  /// Daemon: a new memfd of `shape`, zeroed, header written, sealed against shrinking, growing and
  /// further seals.
  static Result<Segment> create(const SegmentShape& shape, std::uint64_t generation,
                                std::uint32_t session_id, std::uint32_t session_slot,
                                std::uint64_t features);

  /// Client: maps a received descriptor. Refuses one that is not sealed, too small, of another
  /// magic or ABI major (both versions named), or whose header points outside it.
  static Result<Segment> map(UniqueFd fd);

  SegmentHeader& header() const { return *static_cast<SegmentHeader*>(region_.get_address()); }
  /// The lane's ring; `lane` < header().lane_count. The offsets are those validated at create/map,
  /// so that a peer that rewrites the header later changes nothing here.
  RingView ring(std::uint32_t lane) const;
  /// The arrival flags, `shape().flag_count` words.
  std::uint32_t* flags() const;
  const SegmentShape& shape() const { return shape_; }
  const SegmentLayout& layout() const { return layout_; }
  int fd() const { return fd_.get(); }
  std::uint64_t bytes() const { return region_.get_size(); }

  /// Daemon: records the session's first failure (reason, then error word, then abort flag); later
  /// ones are ignored. From any thread. A reason too long for the header is cut at a character.
  void publish_failure(ErrorCode code, std::string_view reason) const;
  /// Client: the published failure, or ok.
  Status failure() const;

 private:
  Segment(UniqueFd fd, boost::interprocess::mapped_region region, const SegmentShape& shape,
          const SegmentLayout& layout);

  UniqueFd fd_;
  boost::interprocess::mapped_region region_;
  SegmentShape shape_;
  SegmentLayout layout_;
  std::unique_ptr<std::atomic_flag>
      failed_;  ///< publish_failure was called; by pointer, so that we can be moved
};

/// CLOCK_MONOTONIC in nanoseconds: the one clock of heartbeats, commit times and deadlines.
std::uint64_t monotonic_ns();

}  // namespace mk::shm
