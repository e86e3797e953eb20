/// \file
/// What clients may hold of a daemon: the configuration's limits, with those that it leaves open
/// worked out from the machine.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/config/config.h"

namespace mk::daemon {

/// What there is to share.
struct MachineLimits {
  std::uint64_t memory_bytes = 0;  ///< of the machine, or of the daemon's control group; 0: unknown
  std::uint64_t descriptors = 0;   ///< that the process may have open; 0: unknown
};

/// 0 stands for no limit, throughout.
struct ClientLimits {
  std::uint64_t session_memory_bytes = 0;
  struct {
    std::uint32_t sessions = 0, buffers = 0, rings = 0;
    std::uint64_t memory_bytes = 0, descriptors = 0;
  } user;  ///< all sessions of one user together
  struct {
    std::uint64_t memory_bytes = 0, descriptors = 0;
  } all;
};

/// "auto" in the configuration is, of host memory, 80% of the machine's for all clients; three
/// quarters of that for one user, and half of it for one session. Of descriptors, all but a
/// quarter, at most 2048, which stays the daemon's own; three quarters of the rest for one user. Of
/// sessions, rings and buffers, three quarters of those there are for one user.
ClientLimits client_limits(const Config& config, const MachineLimits& machine);

/// A sentence for the log and the doctor.
std::string describe(const ClientLimits& limits, const MachineLimits& machine);

}  // namespace mk::daemon
