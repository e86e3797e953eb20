/// \file
/// Whom do others wait for? Judged from two looks at the daemons, a while apart.
///
/// What daemons see: which launch each rank is in and since when (the client's own count), whether
/// its process runs, what its rings hold, and what the links have outstanding. What they do not
/// see: which tile or chunk a kernel waits for, and whether a rank computes or waits. So a rank is
/// only named when others are ahead of it, and a link only when nothing completes on it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/mkctl/json.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::mkctl {

namespace v1 = ::mkernel::v1;

/// Two samples of one daemon.
struct Look {
  std::string host;
  v1::StatsSample before, after;
};

struct Finding {
  /// "peer-down", "link-down", "link-stalled", "rank-stopped", "rank-behind", "rank-missing",
  /// "ring-stuck", "launch-long"; in this order of weight.
  std::string kind;
  std::string job;  ///< empty: all of the node
  std::string who;
  std::string why;
  std::int64_t rank = -1;  ///< -1: not a rank
  std::uint32_t node = 0;  ///< where it was seen
  std::uint64_t for_ns = 0;
};

/// A job that is up, as far as the daemons that were asked see it.
struct Motion {
  std::string job;
  std::uint32_t world = 0, ranks_seen = 0;
  double launches_per_second = 0;  ///< of the slowest rank
  double commands_per_second = 0;  ///< of all ranks
};

struct Slowness {
  std::vector<Finding> findings;  ///< the worst first
  std::vector<Motion> jobs;       ///< by name
};

Slowness find_slow(const std::vector<Look>& looks);

std::string render(const Slowness& slowness);
Json json_of(const Slowness& slowness);

}  // namespace mk::mkctl
