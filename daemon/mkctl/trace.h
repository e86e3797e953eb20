/// \file
/// What proxies did, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.
#pragma once

#include <string>
#include <vector>

#include "daemon/mkctl/json.h"
#include "proto/mkernel/v1/admin.pb.h"

namespace mk::mkctl {

namespace v1 = ::mkernel::v1;

/// One daemon's recording.
struct Recording {
  std::string host;  ///< empty: the only one
  std::vector<v1::TraceChunk> chunks;
};

struct TraceSummary {
  std::uint64_t writes = 0, failed = 0, arrivals = 0, submissions = 0;
  std::uint64_t unfinished = 0;  ///< posted, but their end was not recorded
  std::uint64_t dropped = 0;
};

/// What a recording says, first of all, made it.
inline constexpr const char* kTraceTool = "mkctl trace record";

/// In the Trace Event Format: a process per daemon; per link a track of its submissions and one of
/// writes, each from its posting to its completion, and a counter of outstanding writes; per rail a
/// track of arrivals. A write's slice says of which
/// launch it is: operator, m, epoch and the caller's tag. Times are microseconds since the first
/// event, over all daemons by their wall clocks.
Json perfetto(const std::vector<Recording>& recordings, TraceSummary& summary);

}  // namespace mk::mkctl
