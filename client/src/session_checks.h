/// \file
/// What callers may say: every length, character set and time that goes over a wire is checked
/// here, before anything is sent, by the limits that mkernel.h states. (The daemon ends the session
/// of a client that says more.)
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "mkernel/session.h"
#include "shm/host/result.h"

namespace mk {

/// What attach takes: names, the place, sizes, times. kInvalidArgument or kLimitExceeded.
Status check_options(const AttachOptions& options);
/// A buffer's name or an exchange's tag; `what` says which.
Status check_name(std::string_view what, std::string_view name);
/// A rank's part of an exchange.
Status check_blob(std::size_t bytes, std::uint32_t world);
/// A positive time, of which more than a day counts as a day: sums with it do not overflow, here
/// or on the wire. `what` says which.
Result<std::chrono::milliseconds> checked_timeout(std::string_view what,
                                                  std::chrono::milliseconds timeout);

}  // namespace mk
