/// \file
/// Payload memory on the host: a sealed memfd that its owner, its daemon, its local peers and
/// (loopback) the daemon of a rail peer map at the same time.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::shm {

/// A mapped buffer. Movable; unmaps and closes itself.
class BufferFile {
 public:
  /// A new zeroed memfd of `bytes` (rounded up to whole pages), sealed against shrinking and,
  /// unless it `may_grow`, growing. `name` shows in /proc/PID/fd.
  static Result<BufferFile> create(std::string_view name, std::uint64_t bytes,
                                   bool may_grow = false);

  /// The same file with `bytes`, not fewer than it has, mapped once more: what is mapped already
  /// stays so, and has its own lifetime. Of a file that may grow.
  Result<BufferFile> grown(std::uint64_t bytes) const;

  /// Maps a received descriptor. Refuses one that could still shrink under us (no F_SEAL_SHRINK),
  /// is smaller than `bytes`, or is made of huge pages (kUnsupported: not accepted yet). Core dumps
  /// leave it out.
  static Result<BufferFile> map(UniqueFd fd, std::uint64_t bytes);

  std::byte* data() const { return static_cast<std::byte*>(region_.get_address()); }
  std::uint64_t bytes() const { return region_.get_size(); }
  int fd() const { return fd_.get(); }

 private:
  BufferFile(UniqueFd fd, boost::interprocess::mapped_region region);

  UniqueFd fd_;
  boost::interprocess::mapped_region region_;
};

}  // namespace mk::shm
