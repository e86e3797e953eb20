#include "daemon/control/control_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <thread>

#include "daemon/control/connections.h"
#include "daemon/control/source_line.h"
#include "shm/host/segment.h"
#include "shm/host/unique_fd.h"
#include "shm/host/unix_socket.h"

namespace mk::daemon {

using control::Connections;
using control::kListenerToken;
using control::kWakeToken;

namespace {

constexpr std::uint64_t kFailedDrainNs = 2'000'000'000;  ///< for failed sessions at shutdown

}  // namespace

class ControlLoop::Impl {
 public:
  struct Task {
    std::function<void(ControlPlane&)> run;
    std::function<void()> abandoned;  ///< may be empty
  };

  Impl(const ControlLoopOptions& options, shm::FrameListener listener, UniqueFd epoll,
       UniqueFd wake)
      : reserve_(options.reserve),
        socket_path_(listener.path()),
        epoll_(std::move(epoll)),
        wake_(std::move(wake)),
        connections_(options, std::move(listener), epoll_.get()) {}
  ~Impl() { stop(std::chrono::steady_clock::now(), /*drain=*/false); }

  void configure(const ControlOptions& options, std::vector<Proxy*> proxies) {
    control_ = options;
    proxies_ = std::move(proxies);
    hello_ = make_hello(control_, proxies_);
  }

  Status start(PeerTransport& peers) {
    transport_ = &peers;
    plane_ = std::make_unique<ControlPlane>(control_, connections_, peers, proxies_,
                                            shm::monotonic_ns, hello_);
    connections_.use(*plane_, control_.log);
    try {
      heart_ = std::thread([this] { beat(); });
      thread_ = std::thread([this] { loop(); });
    } catch (const std::system_error& error) {
      return fail_errno(error.code().value(), "cannot start the control thread");
    }
    return {};
  }

  void stop(std::chrono::steady_clock::time_point deadline, bool drain) {
    {
      std::lock_guard lock(mutex_);
      stop_asked_ = true;
      stop_drains_ = drain;
      stop_deadline_ = deadline;
    }
    wake();
    if (thread_.joinable()) thread_.join();
    {
      std::lock_guard lock(mutex_);
      heart_stops_ = true;
    }
    heart_stopping_.notify_all();
    if (heart_.joinable()) heart_.join();
    // From here on nobody runs tasks.
    std::vector<Task> left;
    {
      std::lock_guard lock(mutex_);
      accepts_tasks_ = false;
      left.swap(tasks_);
    }
    for (const Task& task : left) {
      if (task.abandoned) task.abandoned();
    }
    connections_.shut();
  }

  void reset() { plane_.reset(); }

  void submit(Task task) {
    std::function<void()> abandoned;
    bool first = false;
    {
      std::lock_guard lock(mutex_);
      if (accepts_tasks_) {
        tasks_.push_back(std::move(task));
        first = tasks_.size() == 1;
      } else {
        abandoned = std::move(task.abandoned);
      }
    }
    if (first) wake();  // an earlier one has woken the loop
    if (abandoned) abandoned();
  }

  void on_peer_message(ControlPlane& plane, NodeId node, PeerMessage message) {
    // After a refused message, the rest of that stream is on its way still.
    if (refused_.contains(node) && !std::holds_alternative<PeerHello>(message)) return;
    refused_.erase(node);
    const bool greeting = std::holds_alternative<PeerHello>(message);
    Status status;
    try {
      status = plane.on_peer_message(node, std::move(message));
    } catch (const std::exception& error) {
      status = fail(ErrorCode::kLimitExceeded, "{}: a message could not be handled: {}",
                    transport_->describe(node), error.what());
    }
    if (status) {
      if (greeting) disconnected_for_.erase(node);
      return;
    }
    // A peer that is refused calls again and again: only what is new is an error.
    std::string& told = disconnected_for_[node];
    log(told == status.error().message ? LogLevel::kDebug : LogLevel::kError,
        "disconnected " + status.error().message);
    told = status.error().message;
    refused_.insert(node);
    transport_->disconnect(node, status.error().message);
    plane.on_peer_down(node, status.error().message);
  }

  void on_peer_down(ControlPlane& plane, NodeId node, const std::string& reason) {
    if (refused_.erase(node) != 0) return;  // told already, with the better reason
    plane.on_peer_down(node, reason);
  }

  const PeerHello& hello() const { return hello_; }
  PeerHello hello_for(NodeId node) const {
    PeerHello hello = hello_;
    for (std::size_t rail = 0; rail < proxies_.size(); ++rail) {
      Bytes& address = hello.rail_addresses[rail];
      address = proxies_[rail]->endpoint().personal(std::move(address), node);
    }
    return hello;
  }
  const std::string& socket_path() const { return socket_path_; }

 private:
  void wake() const {
    const std::uint64_t one = 1;
    // Full means that it is awake already.
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  }

  void loop() {
    ::pthread_setname_np(::pthread_self(), "mk-control");
    next_tick_ns_ = shm::monotonic_ns();
    epoll_event events[64];
    while (!finished()) {
      const std::uint64_t now = shm::monotonic_ns();
      const std::uint64_t left_ms =
          now >= next_tick_ns_ ? 0 : (next_tick_ns_ - now) / 1'000'000 + 1;
      const int count = ::epoll_wait(epoll_.get(), events, std::size(events),
                                     static_cast<int>(std::min<std::uint64_t>(left_ms, 1000)));
      for (int i = 0; i < count; ++i) {
        const std::uint64_t token = events[i].data.u64;
        if (token == kWakeToken) {
          contain("events of other threads", [this] { run_tasks(); });
        } else if (token == kListenerToken) {
          contain("a new connection", [this] { connections_.accept(); });
        } else if ((token & control::kProcessToken) != 0) {
          contain("the end of a process",
                  [&] { connections_.process_ended(token & ~control::kProcessToken); });
        } else {
          contain("a client", [&] { connections_.serve(token, events[i].events); });
        }
      }
      if (shm::monotonic_ns() >= next_tick_ns_) contain("the tick", [this] { tick(); });
      contain("a client's end", [this] { connections_.sweep(); });
      if (reserve_ != nullptr && reserve_->spent()) {
        contain("want of memory", [this] { make_room(); });
      }
    }
    contain("the last answers", [this] { connections_.flush(); });
  }

  /// Runs one step of the loop: what it throws, for want of memory, costs that step and not the
  /// daemon.
  template <class Step>
  void contain(const char* what, Step&& step) noexcept {
    try {
      step();
    } catch (const std::exception& error) {
      complain(what, error.what());
    }
  }

  void complain(const char* what, const char* error) const noexcept {
    try {
      log(LogLevel::kError, fmt::format("could not handle {}: {}", what, error));
    } catch (const std::exception&) {
      // Nothing is left even for that.
    }
  }

  void make_room() {
    log(LogLevel::kError,
        "memory has run out: the reserve is in use, and clients without a session are turned away");
    connections_.shed();
    connections_.sweep();
    reserve_->restore();
  }

  /// Runs on a thread of its own: the control thread may wait for a peer that does not answer.
  void beat() {
    ::pthread_setname_np(::pthread_self(), "mk-heartbeat");
    const std::chrono::nanoseconds interval(control_.heartbeat_interval_ns);
    std::unique_lock lock(mutex_);
    while (!heart_stopping_.wait_for(lock, interval, [this] { return heart_stops_; })) {
      lock.unlock();
      plane_->beat();
      lock.lock();
    }
  }

  void run_tasks() {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
    std::vector<Task> tasks;
    {
      std::lock_guard lock(mutex_);
      tasks.swap(tasks_);
    }
    for (const Task& task : tasks) {
      try {
        task.run(*plane_);
      } catch (const std::exception& error) {
        complain("an event of another thread", error.what());
        if (task.abandoned) task.abandoned();
      }
    }
  }

  void tick() {
    const std::uint64_t now = shm::monotonic_ns();
    next_tick_ns_ = now + control_.heartbeat_interval_ns;
    plane_->on_tick();
    connections_.tick(now);
  }

  /// Whether the loop is to end; takes the shutdown a step further when one was asked for.
  bool finished() {
    bool drains = false;
    std::chrono::steady_clock::time_point deadline;
    {
      std::lock_guard lock(mutex_);
      if (!stop_asked_) return false;
      drains = stop_drains_;
      deadline = stop_deadline_;
    }
    if (!drains) return true;
    plane_->drain();
    if (!failed_rest_at_ns_) {
      if (plane_->idle()) return true;
      if (std::chrono::steady_clock::now() < deadline) return false;
      failed_rest_at_ns_ = shm::monotonic_ns();
      plane_->fail_all(ErrorCode::kDraining, "the daemon is shutting down");
      connections_.sweep();
    }
    return plane_->idle() || shm::monotonic_ns() >= *failed_rest_at_ns_ + kFailedDrainNs;
  }

  void log(LogLevel level, std::string message, SourceLine where = SourceLine::current()) const {
    if (control_.log) control_.log({level, std::move(message), {}, std::nullopt, where});
  }

  MemoryReserve* const reserve_;
  const std::string socket_path_;
  const UniqueFd epoll_;
  const UniqueFd wake_;

  std::mutex mutex_;
  std::vector<Task> tasks_;
  bool accepts_tasks_ = true;
  bool stop_asked_ = false;
  bool stop_drains_ = false;
  std::chrono::steady_clock::time_point stop_deadline_;

  std::thread thread_;
  std::thread heart_;
  std::condition_variable heart_stopping_;
  bool heart_stops_ = false;  ///< under mutex_

  // Set before the thread starts, then its own.
  ControlOptions control_;
  std::vector<Proxy*> proxies_;
  PeerHello hello_;
  PeerTransport* transport_ = nullptr;
  std::unique_ptr<ControlPlane> plane_;

  // The control thread's.
  Connections connections_;
  std::set<NodeId> refused_;
  /// The reason in the log's last such line; until the next good hello.
  std::map<NodeId, std::string> disconnected_for_;
  std::uint64_t next_tick_ns_ = 0;
  std::optional<std::uint64_t> failed_rest_at_ns_;
};

Result<std::unique_ptr<ControlLoop>> ControlLoop::create(const ControlLoopOptions& options) {
  MK_ASSIGN_OR_RETURN(
      auto listener,
      options.listening_fd >= 0
          ? shm::FrameListener::adopt(UniqueFd(options.listening_fd), options.socket_path)
          : shm::FrameListener::listen(options.socket_path,
                                       static_cast<mode_t>(options.socket_mode)));
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return fail_errno(errno, "cannot create an epoll instance");
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return fail_errno(errno, "cannot create an eventfd");
  const std::pair<int, std::uint64_t> sources[] = {{wake.get(), kWakeToken},
                                                   {listener.fd(), kListenerToken}};
  for (const auto& [fd, token] : sources) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = token;
    if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return fail_errno(errno, "cannot watch the client socket {}", options.socket_path);
    }
  }
  return std::unique_ptr<ControlLoop>(new ControlLoop(
      std::make_unique<Impl>(options, std::move(listener), std::move(epoll), std::move(wake))));
}

ControlLoop::ControlLoop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ControlLoop::~ControlLoop() = default;

void ControlLoop::configure(const ControlOptions& options, std::vector<Proxy*> proxies) {
  impl_->configure(options, std::move(proxies));
}

Status ControlLoop::start(PeerTransport& peers) { return impl_->start(peers); }

void ControlLoop::stop(std::chrono::steady_clock::time_point deadline) {
  impl_->stop(deadline, /*drain=*/true);
}

void ControlLoop::reset() { impl_->reset(); }

void ControlLoop::post(std::function<void(ControlPlane&)> fn) { submit(std::move(fn), {}); }

void ControlLoop::submit(std::function<void(ControlPlane&)> fn, std::function<void()> abandoned) {
  impl_->submit({std::move(fn), std::move(abandoned)});
}

void ControlLoop::proxy_event(std::uint32_t rail, ProxyEvent event) {
  post(
      [rail, event = std::move(event)](ControlPlane& plane) { plane.on_proxy_event(rail, event); });
}

void ControlLoop::peer_message(NodeId node, PeerMessage message, Taken taken) {
  post([impl = impl_.get(), node, message = std::move(message),
        taken = std::move(taken)](ControlPlane& plane) mutable {
    impl->on_peer_message(plane, node, std::move(message));
    if (taken) taken();
  });
}

void ControlLoop::peer_down(NodeId node, std::string reason) {
  post([impl = impl_.get(), node, reason = std::move(reason)](ControlPlane& plane) {
    impl->on_peer_down(plane, node, reason);
  });
}

void ControlLoop::peers_changed() {
  post([](ControlPlane& plane) { plane.on_peers_changed(); });
}

const PeerHello& ControlLoop::hello() const { return impl_->hello(); }
PeerHello ControlLoop::hello_for(NodeId node) const { return impl_->hello_for(node); }
const std::string& ControlLoop::socket_path() const { return impl_->socket_path(); }

}  // namespace mk::daemon
