/// \file
/// What daemons keep and tell each other of a job's secret: a digest, from which nobody gets the
/// secret back, so that neither a daemon's memory nor its peers' streams hold it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "daemon/control/peer_transport.h"

namespace mk::daemon {

inline constexpr std::size_t kDigestBytes = 32;

/// SHA-256 (FIPS 180-4) of `message`, 32 bytes.
Bytes sha256(std::span<const std::byte> message);

/// SHA-256 over the job's name and secret, the name's end marked; empty when `secret` is.
Bytes job_secret_digest(std::string_view job, std::string_view secret);

}  // namespace mk::daemon
