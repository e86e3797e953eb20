#include "daemon/proxy/proxy.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "daemon/proxy/engine.h"
#include "daemon/proxy/idle_backoff.h"

namespace mk::daemon {

namespace {

/// A yield costs more than ten polls even when nobody takes it up. A thread with a CPU of its own
/// would lose its latency to them.
constexpr std::uint64_t kYieldIntervalNs = 2'000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Status pin(pthread_t thread, int cpu, std::uint32_t rail) {
  if (cpu >= CPU_SETSIZE) {
    return fail(ErrorCode::kInvalidArgument,
                "proxy of rail {}: CPU {} is out of range, 0 to {} are allowed", rail, cpu,
                CPU_SETSIZE - 1);
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(static_cast<std::size_t>(cpu), &cpus);
  const int error = ::pthread_setaffinity_np(thread, sizeof cpus, &cpus);
  if (error != 0) {
    return fail_errno(
        error, "cannot pin the proxy of rail {} to CPU {} (choose one this process may run on)",
        rail, cpu);
  }
  return {};
}

}  // namespace

class Proxy::Core {
 public:
  Core(std::unique_ptr<fabric::Endpoint> endpoint, const ProxyOptions& options,
       std::function<void(ProxyEvent)> on_event)
      : options_(options),
        endpoint_(std::move(endpoint)),
        engine_(*endpoint_, options, std::move(on_event)) {}
  ~Core() { stop(); }

  Status start() {
    if (thread_.joinable()) {
      return fail(ErrorCode::kAlreadyExists, "the proxy of rail {} is already running",
                  options_.rail);
    }
    stopping_.store(false, std::memory_order_relaxed);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      return fail_errno(error.code().value(), "cannot start the proxy thread of rail {}",
                        options_.rail);
    }
    if (options_.cpu < 0) return {};
    Status pinned = pin(thread_.native_handle(), options_.cpu, options_.rail);
    if (!pinned) stop();
    return pinned;
  }

  void stop() {
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_release);
    engine_.wake();
    thread_.join();
  }

  Engine& engine() { return engine_; }
  fabric::Endpoint& endpoint() { return *endpoint_; }

 private:
  void run() noexcept {
    ::pthread_setname_np(::pthread_self(),
                         fmt::format("mk-proxy/{}", options_.rail).substr(0, 15).c_str());
    // The default slack of 50 µs would more than double a short sleep.
    ::prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    IdleBackoff backoff(options_.spin_ns, options_.sleep_ns_max);
    std::uint64_t yielded_ns = 0;
    while (!stopping_.load(std::memory_order_acquire)) {
      if (engine_.pass()) {
        backoff.on_work(engine_.now_ns());
        continue;
      }
      const std::uint64_t sleep_ns = backoff.sleep_ns(engine_.now_ns(), engine_.next_due_ns());
      if (sleep_ns != 0) {
        engine_.stats().sleeps.add(1);
        engine_.sleep(sleep_ns);
      } else if (options_.cpu >= 0 || engine_.now_ns() - yielded_ns < kYieldIntervalNs) {
        relax();
      } else {
        // Not pinned, so not alone on this CPU for all we know: other threads go first.
        ::sched_yield();
        yielded_ns = engine_.now_ns();
      }
    }
  }

  const ProxyOptions options_;
  std::unique_ptr<fabric::Endpoint> endpoint_;
  Engine engine_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

Proxy::Proxy(std::unique_ptr<fabric::Endpoint> endpoint, const ProxyOptions& options,
             std::function<void(ProxyEvent)> on_event)
    : core_(std::make_unique<Core>(std::move(endpoint), options, std::move(on_event))) {}
Proxy::~Proxy() = default;

Status Proxy::start() { return core_->start(); }
void Proxy::stop() { core_->stop(); }
void Proxy::apply(ProxyCommand command) { core_->engine().apply(command); }
bool Proxy::step() { return core_->engine().pass(); }
fabric::Endpoint& Proxy::endpoint() { return core_->endpoint(); }
const ProxyStats& Proxy::stats() const { return core_->engine().stats(); }
TraceBuffer& Proxy::trace() { return core_->engine().trace(); }

}  // namespace mk::daemon
