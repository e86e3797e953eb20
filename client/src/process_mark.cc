#include "client/src/process_mark.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace mk::client {

namespace {

/// What children of fork() need; never destroyed, for a child may end in any of its parent's
/// states.
struct Shared {
  std::atomic<std::uint64_t> forks{0};  ///< between the first process and this one
  std::mutex mutex;
  std::vector<int> to_close;
  std::vector<void*> kept;

  Shared() {
    // Without memory for this, a child keeps the sockets until it ends; nothing else changes.
    (void)::pthread_atfork([] { shared().mutex.lock(); }, [] { shared().mutex.unlock(); },
                           [] { shared().after_fork(); });
  }
  static Shared& shared() {
    static auto* const all = new Shared;
    return *all;
  }
  void after_fork() {
    forks.fetch_add(1, std::memory_order_relaxed);
    for (const int fd : to_close) ::close(fd);
    to_close.clear();
    mutex.unlock();
  }
};

Shared& shared() { return Shared::shared(); }

}  // namespace

// The pid alone may be the same: that of the first process of a pid namespace is 1 in each. The
// count alone misses what is cloned without fork().
ProcessMark::ProcessMark()
    : pid_(::getpid()), forks_(shared().forks.load(std::memory_order_relaxed)) {}

bool ProcessMark::is_here() const {
  return forks_ == shared().forks.load(std::memory_order_relaxed) && pid_ == ::getpid();
}

Status ProcessMark::check() const {
  if (is_here()) return {};
  return fail(ErrorCode::kUnsupported,
              "this session belongs to process {}, of which this one (pid {}) is a fork; a forked "
              "child attaches a session of its own, or leaves the work to its parent",
              pid_, ::getpid());
}

ClosedInChildren::ClosedInChildren(int fd) : fd_(fd) {
  std::lock_guard lock(shared().mutex);
  shared().to_close.push_back(fd);
}

ClosedInChildren::~ClosedInChildren() {
  std::lock_guard lock(shared().mutex);
  std::erase(shared().to_close, fd_);
}

void keep_for_ever(void* object) {
  std::lock_guard lock(shared().mutex);
  shared().kept.push_back(object);
}

}  // namespace mk::client
