/// \file
/// Threads for what may take half a minute, such as pinning memory: apart for each user, so that no
/// user waits for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <thread>

namespace mk::daemon::control {

/// Thread-safe. A thread lives while its user has tasks.
class UserWorkers {
 public:
  /// Tasks of one user that run at once; more wait in their order.
  static constexpr std::size_t kAtOnceMax = 4;

  UserWorkers() = default;
  ~UserWorkers() { stop(); }
  UserWorkers(const UserWorkers&) = delete;
  UserWorkers& operator=(const UserWorkers&) = delete;

  /// Runs `task`, which does not throw. When this throws, the task never runs.
  void run(std::uint32_t user, std::function<void()> task);
  /// Drops the tasks that wait, and returns when those that run have ended. Nothing runs later.
  void stop();

 private:
  struct User {
    std::deque<std::function<void()>> waiting;
    std::size_t threads = 0;
  };
  struct Worker {
    std::thread thread;
    bool ended = false;
  };
  void work(std::uint32_t user, Worker& own);

  std::mutex mutex_;
  std::map<std::uint32_t, User> users_;  ///< that have threads
  std::list<Worker> workers_;
  bool stopped_ = false;
};

}  // namespace mk::daemon::control
