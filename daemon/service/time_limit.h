/// \file
/// Something that is to be over by a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace mk::daemon {

/// If it still lives after `limit`, it calls `late`, once, on a thread of its own. The destructor
/// waits for a `late` that runs.
class TimeLimit {
 public:
  /// `thread`: its name, of at most 15 bytes.
  TimeLimit(std::chrono::nanoseconds limit, const char* thread, std::function<void()> late);
  ~TimeLimit();
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace mk::daemon
