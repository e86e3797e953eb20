/// \file
/// How long a listener pauses after accept() has failed, typically for want of descriptors.
#pragma once

namespace mk::daemon {

inline constexpr int kAcceptPauseMs = 200;

}  // namespace mk::daemon
