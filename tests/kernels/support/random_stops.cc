#include "tests/kernels/support/random_stops.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <random>
#include <vector>

namespace mk::kernels::testing {
namespace {

constexpr std::int64_t kMicrosecond = 1000;
constexpr std::int64_t kSecond = 1'000'000'000;

/// For as many microseconds as the signal says. Only what a signal handler may do.
void stop_here(int, siginfo_t* info, void*) {
  const int before = errno;
  const std::int64_t ns = info->si_value.sival_int * kMicrosecond;
  timespec left{ns / kSecond, ns % kSecond};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
  errno = before;
}

pid_t own_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

/// False: the thread has ended.
bool stop_thread(pid_t thread, int microseconds) {
  siginfo_t info{};
  info.si_code = SI_QUEUE;
  info.si_pid = getpid();
  info.si_uid = getuid();
  info.si_value.sival_int = microseconds;
  return syscall(SYS_rt_tgsigqueueinfo, getpid(), thread, SIGUSR2, &info) == 0;
}

std::vector<pid_t> other_threads() {
  std::vector<pid_t> threads;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    const auto thread = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
    if (thread != own_thread()) threads.push_back(thread);
  }
  return threads;
}

}  // namespace

RandomStops::RandomStops(std::uint64_t seed) {
  // For good: a signal may still be on its way when the last of these has ended.
  struct sigaction action {};
  action.sa_sigaction = stop_here;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
  thread_ = std::thread([this, seed] { run(seed); });
}

RandomStops::~RandomStops() {
  quit_.store(true);
  thread_.join();
}

void RandomStops::run(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto between = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  while (!quit_.load()) {
    const bool is_long = random() % 256 == 0;
    const int microseconds = is_long ? between(100'000, 1'000'000) : between(0, 3'000);
    const std::vector<pid_t> threads = other_threads();
    if (!threads.empty() && stop_thread(threads[random() % threads.size()], microseconds)) {
      ++stops_;
      if (is_long) ++long_stops_;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(between(0, 2'000)));
  }
}

}  // namespace mk::kernels::testing
