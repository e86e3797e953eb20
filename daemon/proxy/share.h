/// \file
/// A job's share of the network, and the pacing of one that is limited. No dependencies: the
/// configuration uses it as well.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mk::daemon {

/// 0: not limited.
struct RateLimit {
  double bytes_per_second = 0;
  double commands_per_second = 0;

  friend bool operator==(const RateLimit&, const RateLimit&) = default;
};

/// Beside other jobs on a full link, and by itself at most.
struct JobShare {
  std::uint32_t weight = 1;
  RateLimit limit;  ///< of the job's ranks on one node together

  friend bool operator==(const JobShare&, const JobShare&) = default;
};

/// Lets commands pass at a limited rate (the generic cell rate algorithm of ITU-T I.371, once for
/// bytes and once for commands). Each moves the time at which the limit is caught up with by its
/// cost. The next one passes when that time is at most kBurstNs ahead. So a command of any size
/// passes at once after a rest, and pays afterwards.
class Pacer {
 public:
  static constexpr std::uint64_t kBurstNs = 5'000'000;

  void set(const RateLimit& limit) {
    ns_per_byte_ = limit.bytes_per_second > 0 ? 1e9 / limit.bytes_per_second : 0;
    ns_per_command_ = limit.commands_per_second > 0 ? 1e9 / limit.commands_per_second : 0;
    caught_up_ns_[0] = caught_up_ns_[1] = 0;
  }
  bool limited() const { return ns_per_byte_ > 0 || ns_per_command_ > 0; }
  bool admits(std::uint64_t now_ns) const { return now_ns >= due_ns(); }
  /// When the next command may pass.
  std::uint64_t due_ns() const {
    const double later = std::max(caught_up_ns_[0], caught_up_ns_[1]);
    return later > kBurstNs ? static_cast<std::uint64_t>(later) - kBurstNs : 0;
  }
  void take(std::uint64_t now_ns, std::uint64_t bytes) {
    const double now = static_cast<double>(now_ns);
    caught_up_ns_[0] = std::max(caught_up_ns_[0], now) + static_cast<double>(bytes) * ns_per_byte_;
    caught_up_ns_[1] = std::max(caught_up_ns_[1], now) + ns_per_command_;
  }

 private:
  double ns_per_byte_ = 0;
  double ns_per_command_ = 0;
  double caught_up_ns_[2] = {0, 0};  ///< by bytes, by commands
};

}  // namespace mk::daemon
