#include "daemon/service/stop_guard.h"

#include <fmt/format.h>

#include <utility>

namespace mk::daemon {

StopGuard::StopGuard(std::chrono::nanoseconds limit, const StopPhase& phase,
                     std::function<void(const std::string&)> end)
    : limit_(limit, "mk-stop-guard", [limit, &phase, end = std::move(end)] {
        end(fmt::format("did not stop within {:.1f} s: it waited for {}; ending at once",
                        std::chrono::duration<double>(limit).count(), phase.load()));
      }) {}

}  // namespace mk::daemon
