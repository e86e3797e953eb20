#include "daemon/control/connections.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "shm/host/segment.h"

namespace mk::daemon::control {

namespace {

constexpr int kFramesPerTurn = 16;  ///< of one client, before the others have their turn
constexpr int kAcceptsPerTurn = 16;
constexpr std::uint64_t kAcceptPauseNs = 200'000'000;     ///< after accept has failed
constexpr std::uint64_t kCloseTimeoutNs = 2'000'000'000;  ///< to read what we sent before closing

}  // namespace

Connections::Connections(const ControlLoopOptions& options, shm::FrameListener listener, int epoll)
    : options_(options), listener_(std::move(listener)), epoll_(epoll) {}

void Connections::use(ControlPlane& plane, LogSink log) {
  plane_ = &plane;
  log_ = std::move(log);
}

void Connections::send(ClientId id, std::uint16_t type, std::uint64_t request,
                       std::span<const std::byte> payload, std::span<const int> fds) {
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

void Connections::close(ClientId id) {
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

Status Connections::watch_process(ClientId id, UniqueFd told) {
  Connection& connection = connections_.at(id);
  connection.process.reset();
  auto watch = ProcessWatch::start(connection.socket, std::move(told), epoll_, id | kProcessToken);
  if (!watch) return propagate(watch);
  connection.process = std::move(*watch);
  return {};
}

void Connections::process_ended(ClientId id) {
  serve(id, EPOLLIN);  // what it sent before counts
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  break_connection(id, found->second.closing
                           ? "closed"
                           : "its process has ended, and another one holds its socket");
}

void Connections::accept() {
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

void Connections::admit(shm::FrameSocket socket) {
  Connection connection{.socket = std::move(socket)};
  const auto credentials = connection.socket.credentials();
  if (!credentials) {
    log(LogLevel::kWarning, credentials.error().message);
    return;
  }
  if (options_.same_user_only && credentials->uid != ::getuid()) {
    say(connection, ErrorCode::kPermission,
        fmt::format("this daemon serves user {} only, and you are user {}", ::getuid(),
                    credentials->uid));
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
  connection.user = credentials->uid;
  const auto of_user =
      static_cast<std::uint32_t>(std::ranges::count_if(connections_, [&](const auto& entry) {
        return !entry.second.attached && entry.second.user == connection.user;
      }));
  if (of_user >= options_.user_unattached_max) {
    say(connection, ErrorCode::kLimitExceeded,
        fmt::format("user {} has {} connections that have not attached, the most one user may have "
                    "(limits.user_connections); at most {} ms pass until one ends",
                    connection.user, of_user, options_.handshake_timeout.count()));
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

void Connections::serve(ClientId id, std::uint32_t events) {
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
void Connections::say(Connection& connection, ErrorCode code, const std::string& message) {
  const shm::ErrorReply error{code, message};
  (void)connection.socket.queue_send(static_cast<std::uint16_t>(error.kType), 0,
                                     shm::encode_message(error), {});
}

/// The connection goes at the end of this turn: the control plane may be in the middle of an
/// event that still names it.
void Connections::break_connection(ClientId id, const std::string& reason) {
  Connection& connection = connections_.at(id);
  if (connection.broken) return;
  connection.broken = true;
  connection.reason = reason;
  broken_.push_back(id);
}

void Connections::sweep() {
  while (!broken_.empty()) {
    const ClientId id = broken_.back();
    broken_.pop_back();
    auto node = connections_.extract(id);
    // Closing means that the control plane has forgotten it.
    if (!node.mapped().closing) plane_->on_client_closed(id, node.mapped().reason);
  }
}

void Connections::update_interest(ClientId id, Connection& connection) {
  std::uint32_t interest = connection.closing ? 0u : EPOLLIN;
  if (connection.socket.has_queued()) interest |= EPOLLOUT;
  if (interest == connection.interest) return;
  connection.interest = interest;
  watch(EPOLL_CTL_MOD, connection.socket.fd(), id, interest);
}

bool Connections::watch(int operation, int fd, std::uint64_t token, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  if (::epoll_ctl(epoll_, operation, fd, &event) == 0) return true;
  log(LogLevel::kError, fmt::format("epoll_ctl: {}", errno_text(errno)));
  return false;
}

void Connections::tick(std::uint64_t now_ns) {
  if (accept_paused_until_ns_ != 0 && now_ns >= accept_paused_until_ns_) {
    accept_paused_until_ns_ = 0;
    watch(EPOLL_CTL_ADD, listener_->fd(), kListenerToken, EPOLLIN);
  }
  for (auto& [id, connection] : connections_) {
    if (connection.broken || now_ns < connection.deadline_ns) continue;
    if (connection.closing) {
      break_connection(id, "it did not read what was sent");
    } else if (!connection.attached) {
      say(connection, ErrorCode::kTimeout,
          fmt::format("no attach within {} ms of connecting", options_.handshake_timeout.count()));
      break_connection(id, "it did not attach in time");
    }
  }
}

void Connections::flush() {
  for (auto& [id, connection] : connections_) (void)connection.socket.flush();
}

void Connections::shut() {
  connections_.clear();
  listener_.reset();
}

void Connections::log(LogLevel level, std::string message) const {
  if (log_) log_({level, std::move(message), {}});
}

}  // namespace mk::daemon::control
