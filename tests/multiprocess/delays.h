/// \file
/// Threads and processes that stand still now and then, wherever they are: what is right only while
/// everybody keeps pace goes wrong.
#pragma once

#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mk::test {

/// While it lives, one thread of this process after the other sleeps inside a signal handler, for a
/// random time of at most `most`, at whatever point the signal finds it.
class ThreadDelays {
 public:
  ThreadDelays(std::chrono::microseconds most, std::uint32_t seed) {
    most_us = most.count();
    struct sigaction action = {};
    action.sa_handler = [](int) {
      // The time of day is random enough, and a handler may ask for it.
      timespec now{};
      ::clock_gettime(CLOCK_MONOTONIC, &now);
      const std::int64_t us = now.tv_nsec / 7 % (most_us + 1);
      const timespec pause{us / 1'000'000, us % 1'000'000 * 1000};
      ::nanosleep(&pause, nullptr);
    };
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGUSR2, &action, nullptr);
    thread_ = std::jthread([seed](const std::stop_token& stop) {
      std::mt19937 random(seed);
      const auto own = ::syscall(SYS_gettid);
      while (!stop.stop_requested()) {
        std::vector<pid_t> threads;
        std::error_code gone;  // threads come and go while we look
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", gone)) {
          const int id = std::atoi(entry.path().filename().c_str());
          if (id != own) threads.push_back(id);
        }
        if (!threads.empty()) {
          ::syscall(SYS_tgkill, ::getpid(), threads[random() % threads.size()], SIGUSR2);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
      }
    });
  }
  ThreadDelays(const ThreadDelays&) = delete;
  ThreadDelays& operator=(const ThreadDelays&) = delete;
  /// The handler stays, as a last signal may be on its way.
  ~ThreadDelays() = default;

 private:
  inline static std::int64_t most_us = 0;
  std::jthread thread_;
};

/// While it lives, one of `processes` after the other is stopped for a random time of at most
/// `most`.
class ProcessDelays {
 public:
  ProcessDelays(std::vector<pid_t> processes, std::chrono::microseconds most, std::uint32_t seed)
      : thread_([processes = std::move(processes), most, seed](const std::stop_token& stop) {
          std::mt19937 random(seed);
          const auto some = [&random](std::chrono::microseconds below) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % below.count()));
          };
          while (!stop.stop_requested()) {
            const pid_t process = processes[random() % processes.size()];
            ::kill(process, SIGSTOP);
            some(most);
            ::kill(process, SIGCONT);
            some(2 * most);
          }
        }) {}

 private:
  std::jthread thread_;
};

}  // namespace mk::test
