/// \file
/// Whom do others wait for? Judged from two looks at the daemons, a while apart.
///
/// What daemons see: which launch each rank is in and since when, and whether it works or waits
/// there (the client's own words), whether its process runs, what its rings hold, and what the
/// links have outstanding. A rank that works is named when others spend their time waiting, one
/// that says nothing of itself when others are ahead of it, and a link when nothing completes on
/// it.
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
  /// "peer-down", "link-down", "link-stalled", "rank-stopped", "link-slow", "rank-holds",
  /// "rank-behind", "rank-missing", "ring-stuck", "launch-long", "rank-slower"; in this order of
  /// weight.
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
  /// No rank that was seen was in a launch at either look, nor began one between them. They wait or
  /// work outside of mkernel.
  bool idle = false;
};

struct Slowness {
  std::vector<Finding> findings;  ///< the worst first
  std::vector<Motion> jobs;       ///< by name
};

Slowness find_slow(const std::vector<Look>& looks);

std::string render(const Slowness& slowness);
Json json_of(const Slowness& slowness);

}  // namespace mk::mkctl
