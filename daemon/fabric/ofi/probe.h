/// \file
/// Whether anybody listens at a TCP address.
#pragma once

#include <cstdint>
#include <span>

#include "shm/host/result.h"

namespace mk::fabric::ofi {

/// Connects to the socket address in `name` and hangs up again; waits at most `timeout_ns`.
Status probe_listener(std::span<const char> name, std::uint64_t timeout_ns);

}  // namespace mk::fabric::ofi
