/// \file
/// Which threads of a daemon are gRPC's own: they come and go with its load, and are nobody's leak.
#pragma once

#include <string_view>

namespace mk::test {

/// By the name in /proc/PID/task/TID/comm.
inline bool is_grpc_thread(std::string_view name) {
  for (const std::string_view prefix : {"grpc", "default-exec", "resolver-exec", "event_engine",
                                        "timer_manager", "nexting_thread"}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

}  // namespace mk::test
