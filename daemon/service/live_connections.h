/// \file
/// The connections that a listener has handed to gRPC and that are still there. gRPC closes them
/// when it likes and tells nobody. So a descriptor counts as long as it is the same socket.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace mk::daemon {

/// Not thread-safe.
class LiveConnections {
 public:
  using Clock = std::chrono::steady_clock;

  /// `youth`: how long one may take until it has proved that it is somebody.
  explicit LiveConnections(Clock::duration youth) : youth_(youth) {}

  struct Counts {
    std::size_t all = 0, of_owner = 0, young = 0, young_of_owner = 0;
  };
  /// Looks at all of them anew. `owner`: the caller, a user or an address.
  Counts count(const std::string& owner);
  /// `remote`: HOST:PORT, of TCP.
  void add(int fd, const std::string& owner, const std::string& remote = "");
  /// Hangs up on the oldest of those that are young still: of `owner`, or of all when that is
  /// empty. False when there is none.
  bool cut_oldest_young(const std::string& owner);
  /// Of the young ones of TCP that are there, those from which bytes have come last: one, but for
  /// others of the same millisecond.
  std::vector<std::string> last_heard() const;

 private:
  struct Entry {
    int fd = -1;
    ino_t socket = 0;
    std::string owner, remote;
    Clock::time_point since;
  };
  bool young(const Entry& entry) const { return Clock::now() - entry.since < youth_; }

  const Clock::duration youth_;
  std::vector<Entry> entries_;  ///< the oldest first
};

}  // namespace mk::daemon
