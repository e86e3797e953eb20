#include "client/src/retired_memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "client/src/gpu_launches.h"

namespace mk::client {
namespace {

/// How often to look whether a GPU is done.
constexpr std::chrono::milliseconds kLookInterval{1};

}  // namespace

RetiredMemory::~RetiredMemory() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t RetiredMemory::add(std::optional<gpu::Allocation> memory, std::function<bool()> quiet,
                                 std::shared_ptr<void> rest) {
  const std::lock_guard lock(mutex_);
  // Not from the monitor thread, which must not wait for a GPU: it is what ends waits there.
  if (memory && !thread_.joinable()) thread_ = std::thread([this] { reclaim(); });
  outstanding_[next_] = {std::move(memory), std::move(quiet), std::move(rest)};
  return next_++;
}

void RetiredMemory::answered(std::uint64_t number, bool ok) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = outstanding_.find(number);
    if (found == outstanding_.end()) return;
    Kept kept = std::move(found->second);
    outstanding_.erase(found);
    ++answers_;
    if (kept.memory && ok) {
      free_.push_back(std::move(kept));
    } else if (kept.memory) {
      parked_.push_back(std::move(kept));
    }
  }
  changed_.notify_all();
}

std::uint64_t RetiredMemory::answers() const {
  const std::lock_guard lock(mutex_);
  return answers_;
}

bool RetiredMemory::await_answer(std::uint64_t seen, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  // Memory that the thread has not freed yet counts as outstanding.
  const auto changed = [&] {
    return free_.empty() && freeing_ == 0 && (answers_ != seen || outstanding_.empty());
  };
  return changed_.wait_until(lock, deadline, changed) && answers_ != seen;
}

void RetiredMemory::await_quiet(const std::function<bool()>& well, Clock::time_point deadline) {
  const auto all_quiet = [&] {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, kept] : outstanding_) {
      if (kept.memory && kept.quiet && !kept.quiet()) return false;
    }
    return true;
  };
  while (well() && Clock::now() < deadline && !all_quiet())
    std::this_thread::sleep_for(kLookInterval);
}

void RetiredMemory::await_idle(Clock::time_point deadline) const {
  const auto kept = [&] {
    const std::lock_guard lock(mutex_);
    return thread_.joinable() &&
           (freeing_ != 0 || !free_.empty() || !parked_.empty() || !outstanding_.empty());
  };
  while (kept() && busy_() && Clock::now() < deadline) std::this_thread::sleep_for(kLookInterval);
}

void RetiredMemory::reclaim() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (free_.empty()) {
      changed_.wait(lock, [&] { return stop_ || !free_.empty(); });
      continue;
    }
    freeing_ = static_cast<std::uint32_t>(free_.size());
    std::vector<Kept> now = std::exchange(free_, {});
    lock.unlock();
    {
      const auto none_begins = GpuLaunches::hold_back();
      if (!busy_()) now.clear();
    }
    lock.lock();
    freeing_ = 0;
    if (now.empty()) {
      changed_.notify_all();
      continue;
    }
    std::ranges::move(now, std::back_inserter(free_));
    changed_.wait_for(lock, kLookInterval, [&] { return stop_; });
  }
}

}  // namespace mk::client
