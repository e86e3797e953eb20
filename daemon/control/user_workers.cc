#include "daemon/control/user_workers.h"

#include <pthread.h>

#include <system_error>
#include <utility>

namespace mk::daemon::control {

void UserWorkers::run(std::uint32_t user, std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  // They do no more than return.
  std::erase_if(workers_, [](Worker& worker) {
    if (worker.ended) worker.thread.join();
    return worker.ended;
  });
  User& own = users_[user];
  own.waiting.push_back(std::move(task));
  if (own.threads == kAtOnceMax) return;
  try {
    Worker& worker = workers_.emplace_back();
    worker.thread = std::thread([this, user, &worker] { work(user, worker); });
    ++own.threads;
  } catch (const std::exception&) {
    if (!workers_.empty() && !workers_.back().thread.joinable()) workers_.pop_back();
    if (own.threads != 0) return;  // one of those gets to it
    users_.erase(user);
    throw;
  }
}

void UserWorkers::work(std::uint32_t user, Worker& worker) {
  ::pthread_setname_np(::pthread_self(), "mk-memory");
  std::unique_lock lock(mutex_);
  User& own = users_.at(user);
  while (!own.waiting.empty()) {
    std::function<void()> task = std::move(own.waiting.front());
    own.waiting.pop_front();
    lock.unlock();
    task();
    task = {};  // with what it holds
    lock.lock();
  }
  if (--own.threads == 0) users_.erase(user);
  worker.ended = true;
}

void UserWorkers::stop() {
  std::list<Worker> workers;
  std::deque<std::function<void()>> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    for (auto& [user, own] : users_) {
      for (auto& task : own.waiting) dropped.push_back(std::move(task));
      own.waiting.clear();
    }
    workers.swap(workers_);
  }
  dropped.clear();
  for (Worker& worker : workers) worker.thread.join();
}

}  // namespace mk::daemon::control
