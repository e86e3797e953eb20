#include "daemon/control/control_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <system_error>
#include <thread>

#include "shm/host/segment.h"
#include "shm/host/unique_fd.h"
#include "shm/host/unix_socket.h"

namespace mk::daemon {

namespace {

constexpr std::uint64_t kWakeToken = 0;
constexpr std::uint64_t kListenerToken = 1;
constexpr ClientId kFirstClient = 2;  ///< tokens of clients are their ids

constexpr int kFramesPerTurn = 16;  ///< of one client, before the others have their turn
constexpr int kAcceptsPerTurn = 16;
constexpr std::uint64_t kAcceptPauseNs = 200'000'000;     ///< after accept has failed
constexpr std::uint64_t kCloseTimeoutNs = 2'000'000'000;  ///< to read what we sent before closing
constexpr std::uint64_t kFailedDrainNs = 2'000'000'000;   ///< for failed sessions at shutdown

struct Connection {
  shm::FrameSocket socket;
  bool attached = false;
  bool closing = false;           ///< no more frames are taken; goes when all is sent
  bool broken = false;            ///< goes at the end of this turn
  std::string reason;             ///< why
  std::uint64_t deadline_ns = 0;  ///< of the handshake, then of closing
  std::uint32_t interest = 0;     ///< epoll events asked for
};

struct Task {
  std::function<void(ControlPlane&)> run;
  std::function<void()> abandoned;  ///< may be empty
};

}  // namespace

class ControlLoop::Impl final : public ClientPort {
 public:
  Impl(const ControlLoopOptions& options, shm::FrameListener listener, UniqueFd epoll,
       UniqueFd wake)
      : options_(options),
        listener_(std::move(listener)),
        socket_path_(listener_->path()),
        epoll_(std::move(epoll)),
        wake_(std::move(wake)) {}
  ~Impl() override { stop(std::chrono::steady_clock::now(), /*drain=*/false); }

  void configure(const ControlOptions& options, std::vector<Proxy*> proxies) {
    control_ = options;
    proxies_ = std::move(proxies);
    hello_ = make_hello(control_, proxies_);
    control_.generation = hello_.generation;
  }

  Status start(PeerTransport& peers) {
    transport_ = &peers;
    plane_ = std::make_unique<ControlPlane>(control_, *this, peers, proxies_, shm::monotonic_ns);
    try {
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
    connections_.clear();
    listener_.reset();
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
    if (first) wake();  // whoever put an earlier one has woken the loop
    if (abandoned) abandoned();
  }

  void on_peer_message(ControlPlane& plane, NodeId node, PeerMessage message) {
    // After a refused message, the rest of that stream is on its way still.
    if (refused_.contains(node) && !std::holds_alternative<PeerHello>(message)) return;
    refused_.erase(node);
    const Status status = plane.on_peer_message(node, std::move(message));
    if (status) return;
    log(LogLevel::kError, fmt::format("broke the stream of a peer: {}", status.error().message));
    refused_.insert(node);
    transport_->disconnect(node, status.error().message);
    plane.on_peer_down(node, status.error().message);
  }

  void on_peer_down(ControlPlane& plane, NodeId node, const std::string& reason) {
    if (refused_.erase(node) != 0) return;  // told already, with the better reason
    plane.on_peer_down(node, reason);
  }

  // ClientPort
  void send(ClientId id, std::uint16_t type, std::uint64_t request,
            std::span<const std::byte> payload, std::span<const int> fds) override {
    const auto found = connections_.find(id);
    if (found == connections_.end() || found->second.broken) return;
    Connection& connection = found->second;
    if (type == static_cast<std::uint16_t>(shm::MessageType::kAttachReply)) {
      connection.attached = true;
    }
    const Status sent = connection.socket.queue_send(type, request, payload, fds);
    if (!sent) {
      break_connection(id, sent.error().message);
    } else {
      update_interest(id, connection);
    }
  }
  void close(ClientId id) override {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& connection = found->second;
    connection.closing = true;
    connection.deadline_ns = shm::monotonic_ns() + kCloseTimeoutNs;
    if (connection.socket.has_queued()) {
      update_interest(id, connection);
    } else {
      break_connection(id, "closed");
    }
  }

  const PeerHello& hello() const { return hello_; }
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
          run_tasks();
        } else if (token == kListenerToken) {
          accept_clients();
        } else {
          serve(token, events[i].events);
        }
      }
      if (shm::monotonic_ns() >= next_tick_ns_) tick();
      sweep();
    }
    for (auto& [id, connection] : connections_) (void)connection.socket.flush();
  }

  void run_tasks() {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
    std::vector<Task> tasks;
    {
      std::lock_guard lock(mutex_);
      tasks.swap(tasks_);
    }
    for (const Task& task : tasks) task.run(*plane_);
  }

  void tick() {
    const std::uint64_t now = shm::monotonic_ns();
    next_tick_ns_ = now + control_.heartbeat_interval_ns;
    plane_->on_tick();
    if (accept_paused_until_ns_ != 0 && now >= accept_paused_until_ns_) {
      accept_paused_until_ns_ = 0;
      watch(EPOLL_CTL_ADD, listener_->fd(), kListenerToken, EPOLLIN);
    }
    for (auto& [id, connection] : connections_) {
      if (connection.broken || now < connection.deadline_ns) continue;
      if (connection.closing) {
        break_connection(id, "it did not read what was sent");
      } else if (!connection.attached) {
        say(connection, ErrorCode::kTimeout,
            fmt::format("no attach within {} ms of connecting",
                        options_.handshake_timeout.count()));
        break_connection(id, "it did not attach in time");
      }
    }
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
      sweep();
    }
    return plane_->idle() || shm::monotonic_ns() >= *failed_rest_at_ns_ + kFailedDrainNs;
  }

  void accept_clients() {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      auto accepted = listener_->try_accept();
      if (!accepted) {
        // Typically out of descriptors. The connection stays in the queue and the listener
        // readable: look away for a while instead of spinning.
        if (!accept_failing_) log(LogLevel::kError, accepted.error().message);
        accept_failing_ = true;
        accept_paused_until_ns_ = shm::monotonic_ns() + kAcceptPauseNs;
        watch(EPOLL_CTL_DEL, listener_->fd(), kListenerToken, 0);
        return;
      }
      accept_failing_ = false;
      if (!*accepted) return;
      admit(std::move(**accepted));
    }
  }

  void admit(shm::FrameSocket socket) {
    Connection connection{.socket = std::move(socket)};
    const auto credentials = connection.socket.credentials();
    if (!credentials) {
      log(LogLevel::kWarning, credentials.error().message);
      return;
    }
    const auto unattached = static_cast<std::uint32_t>(std::ranges::count_if(
        connections_, [](const auto& entry) { return !entry.second.attached; }));
    if (connections_.size() >= options_.clients_max ||
        unattached >= options_.clients_unattached_max) {
      say(connection, ErrorCode::kLimitExceeded,
          fmt::format("the daemon has {} connections, {} of them not attached; at most {} and {}",
                      connections_.size(), unattached, options_.clients_max,
                      options_.clients_unattached_max));
      return;
    }
    const ClientId id = next_client_++;
    const int fd = connection.socket.fd();
    connection.deadline_ns =
        shm::monotonic_ns() +
        static_cast<std::uint64_t>(std::chrono::nanoseconds(options_.handshake_timeout).count());
    connection.interest = EPOLLIN;
    if (!watch(EPOLL_CTL_ADD, fd, id, EPOLLIN)) return;
    connections_.emplace(id, std::move(connection));
    plane_->on_client_connected(id, *credentials);
  }

  void serve(ClientId id, std::uint32_t events) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& connection = found->second;
    if (connection.broken) return;
    if ((events & EPOLLOUT) != 0) {
      if (const Status flushed = connection.socket.flush(); !flushed) {
        break_connection(id, flushed.error().message);
        return;
      }
      update_interest(id, connection);
    }
    if (connection.closing) {
      if (!connection.socket.has_queued() || (events & (EPOLLHUP | EPOLLERR)) != 0) {
        break_connection(id, "closed");
      }
      return;
    }
    for (int i = 0; i < kFramesPerTurn && !connection.closing && !connection.broken; ++i) {
      auto frame = connection.socket.try_receive();
      if (!frame) {
        if (frame.error().code == ErrorCode::kProtocol) {
          say(connection, frame.error().code, frame.error().message);
        }
        break_connection(id, frame.error().message);
        return;
      }
      if (!*frame) return;
      plane_->on_client_frame(id, std::move(**frame));
    }
  }

  /// A last word to a client that the control plane does not know of (any more).
  static void say(Connection& connection, ErrorCode code, const std::string& message) {
    const shm::ErrorReply error{code, message};
    (void)connection.socket.queue_send(static_cast<std::uint16_t>(error.kType), 0,
                                       shm::encode_message(error), {});
  }

  /// The connection goes at the end of this turn: the control plane may be in the middle of an
  /// event that still names it.
  void break_connection(ClientId id, const std::string& reason) {
    Connection& connection = connections_.at(id);
    if (connection.broken) return;
    connection.broken = true;
    connection.reason = reason;
    broken_.push_back(id);
  }

  void sweep() {
    while (!broken_.empty()) {
      const ClientId id = broken_.back();
      broken_.pop_back();
      auto node = connections_.extract(id);
      // Closing means that the control plane has forgotten it.
      if (!node.mapped().closing) plane_->on_client_closed(id, node.mapped().reason);
    }
  }

  void update_interest(ClientId id, Connection& connection) {
    std::uint32_t interest = connection.closing ? 0u : EPOLLIN;
    if (connection.socket.has_queued()) interest |= EPOLLOUT;
    if (interest == connection.interest) return;
    connection.interest = interest;
    watch(EPOLL_CTL_MOD, connection.socket.fd(), id, interest);
  }

  bool watch(int operation, int fd, std::uint64_t token, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = token;
    if (::epoll_ctl(epoll_.get(), operation, fd, &event) == 0) return true;
    log(LogLevel::kError, fmt::format("epoll_ctl: {}", errno_text(errno)));
    return false;
  }

  void log(LogLevel level, std::string message) const {
    if (control_.log) control_.log({level, std::move(message), {}});
  }

  const ControlLoopOptions options_;
  std::optional<shm::FrameListener> listener_;
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

  // Set before the thread starts, then its own.
  ControlOptions control_;
  std::vector<Proxy*> proxies_;
  PeerHello hello_;
  PeerTransport* transport_ = nullptr;
  std::unique_ptr<ControlPlane> plane_;

  // The control thread's.
  std::map<ClientId, Connection> connections_;
  std::vector<ClientId> broken_;
  std::set<NodeId> refused_;
  ClientId next_client_ = kFirstClient;
  std::uint64_t next_tick_ns_ = 0;
  std::uint64_t accept_paused_until_ns_ = 0;
  bool accept_failing_ = false;
  std::optional<std::uint64_t> failed_rest_at_ns_;
};

Result<std::unique_ptr<ControlLoop>> ControlLoop::create(const ControlLoopOptions& options) {
  MK_ASSIGN_OR_RETURN(
      auto listener,
      shm::FrameListener::listen(options.socket_path, static_cast<mode_t>(options.socket_mode)));
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

void ControlLoop::peer_message(NodeId node, PeerMessage message) {
  post([impl = impl_.get(), node, message = std::move(message)](ControlPlane& plane) mutable {
    impl->on_peer_message(plane, node, std::move(message));
  });
}

void ControlLoop::peer_down(NodeId node, std::string reason) {
  post([impl = impl_.get(), node, reason = std::move(reason)](ControlPlane& plane) {
    impl->on_peer_down(plane, node, reason);
  });
}

const PeerHello& ControlLoop::hello() const { return impl_->hello(); }
const std::string& ControlLoop::socket_path() const { return impl_->socket_path(); }

}  // namespace mk::daemon
