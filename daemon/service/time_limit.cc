#include "daemon/service/time_limit.h"

#include <pthread.h>

#include <utility>

namespace mk::daemon {

TimeLimit::TimeLimit(std::chrono::nanoseconds limit, const char* thread, std::function<void()> late)
    : thread_([this, limit, thread, late = std::move(late)] {
        ::pthread_setname_np(::pthread_self(), thread);
        std::unique_lock lock(mutex_);
        if (!changed_.wait_for(lock, limit, [this] { return over_; })) late();
      }) {}

TimeLimit::~TimeLimit() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace mk::daemon
