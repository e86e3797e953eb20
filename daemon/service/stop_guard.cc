#include "daemon/service/stop_guard.h"

#include <fmt/format.h>
#include <pthread.h>

#include <utility>

namespace mk::daemon {

StopGuard::StopGuard(std::chrono::nanoseconds limit, const StopPhase& phase,
                     std::function<void(const std::string&)> end)
    : thread_([this, limit, &phase, end = std::move(end)] {
        ::pthread_setname_np(::pthread_self(), "mk-stop-guard");
        std::unique_lock lock(mutex_);
        if (changed_.wait_for(lock, limit, [this] { return stopped_; })) return;
        end(fmt::format("did not stop within {:.1f} s: it waited for {}; ending at once",
                        std::chrono::duration<double>(limit).count(), phase.load()));
      }) {}

StopGuard::~StopGuard() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace mk::daemon
