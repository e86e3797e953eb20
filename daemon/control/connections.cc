#include "daemon/control/connections.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "shm/host/segment.h"
#include "shm/limits.h"

namespace mk::daemon::control {

namespace {

constexpr int kFramesPerTurn = 16;  ///< of one client, before the others have their turn
constexpr int kAcceptsPerTurn = 16;
constexpr std::uint64_t kAcceptPauseNs = 200'000'000;     ///< after accept has failed
constexpr std::uint64_t kCloseTimeoutNs = 2'000'000'000;  ///< to read what we sent before closing

std::uint64_t after(std::chrono::milliseconds time) {
  return shm::monotonic_ns() + static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count());
}

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
    connection.socket.limit_received(shm::kRequestBytesMax);
  } else if (type == static_cast<std::uint16_t>(shm::MessageType::kSessionFailed)) {
    // What is left is to read this; a session that is over keeps nobody's place.
    connection.attached = false;
    connection.ended = true;
    connection.deadline_ns = after(options_.handshake_timeout);
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
  connection.user = credentials->uid;
  if (const Status room = check_room(connection.user); !room) {
    log(LogLevel::kWarning,
        fmt::format("turned a connection of process {} away: {}", credentials->pid,
                    room.error().message),
        connection.user);
    say(connection, room.error().code, room.error().message);
    return;
  }
  const ClientId id = next_client_++;
  const int fd = connection.socket.fd();
  connection.socket.limit_received(shm::kHandshakeBytesMax);
  connection.deadline_ns = after(options_.handshake_timeout);
  connection.interest = EPOLLIN;
  if (!watch(EPOLL_CTL_ADD, fd, id, EPOLLIN)) return;
  connections_.emplace(id, std::move(connection));
  plane_->on_client_connected(id, *credentials);
}

Status Connections::check_room(uid_t user) {
  struct Held {
    std::uint32_t unattached = 0;
    std::optional<ClientId> oldest;
  };
  std::map<uid_t, Held> users;
  std::uint32_t unattached = 0, all = 0;
  for (const auto& [id, connection] : connections_) {
    if (connection.broken) continue;
    ++all;
    if (connection.attached) continue;
    ++unattached;
    Held& held = users[connection.user];
    ++held.unattached;
    if (!held.oldest && !connection.closing) held.oldest = id;
  }
  if (options_.reserve != nullptr && options_.reserve->spent()) {
    return fail(ErrorCode::kLimitExceeded,
                "the daemon has no memory left for another client; see its log");
  }
  const std::uint32_t of_user = users[user].unattached;
  if (of_user >= options_.user_unattached_max) {
    return fail(ErrorCode::kLimitExceeded,
                "user {} has {} connections that have not attached, the most one user may have "
                "(limits.user_connections); at most {} ms pass until one ends",
                user, of_user, options_.handshake_timeout.count());
  }
  MK_RETURN_IF_ERROR(check_descriptors(user));
  if (all < options_.clients_max && unattached < options_.clients_unattached_max) return {};
  const auto greediest = std::ranges::max_element(
      users, {}, [](const auto& entry) { return entry.second.unattached; });
  if (greediest->second.unattached > of_user + 1 && greediest->second.oldest) {
    const ClientId id = *greediest->second.oldest;
    say(connections_.at(id), ErrorCode::kLimitExceeded,
        fmt::format("user {} has the most connections that have not attached, {}; one makes room "
                    "for another user",
                    greediest->first, greediest->second.unattached));
    break_connection(id, "it made room for another user");
    return {};
  }
  return fail(ErrorCode::kLimitExceeded,
              "the daemon has {} connections, {} of them not attached; at most {} and {}", all,
              unattached, options_.clients_max, options_.clients_unattached_max);
}

Status Connections::check_descriptors(uid_t user) const {
  const auto has_room = [this](std::optional<std::uint32_t> whose, std::uint64_t most) {
    return most == 0 || plane_->descriptors(whose) + descriptors(whose) < most;
  };
  if (!has_room(user, options_.user_descriptors_max)) {
    return fail(ErrorCode::kLimitExceeded,
                "user {} holds {} descriptors of this daemon, the most one user may hold "
                "(limits.user_descriptors); deregister buffers or detach",
                user, options_.user_descriptors_max);
  }
  if (!has_room({}, options_.descriptors_max)) {
    return fail(ErrorCode::kLimitExceeded,
                "clients hold {} descriptors of this daemon, the most that all may hold "
                "(limits.descriptors; systemd: LimitNOFILE); come back later",
                options_.descriptors_max);
  }
  return {};
}

std::uint64_t Connections::descriptors(std::optional<std::uint32_t> uid) const {
  std::uint64_t count = 0;
  for (const auto& [id, connection] : connections_) {
    if (uid && connection.user != *uid) continue;
    count += 1 + (connection.process ? 1 : 0) + connection.socket.queued_fds();
  }
  return count;
}

void Connections::serve(ClientId id, std::uint32_t events) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  if (connection.broken) return;
  const bool hung_up = (events & (EPOLLHUP | EPOLLERR)) != 0;
  if ((events & EPOLLOUT) != 0 || (hung_up && connection.socket.has_queued())) {
    if (const Status flushed = connection.socket.flush(); !flushed) {
      break_connection(id, flushed.error().message);
      return;
    }
    update_interest(id, connection);
  }
  if (connection.closing) {
    if (!connection.socket.has_queued() || hung_up) break_connection(id, "closed");
    return;
  }
  if (hung_up && connection.socket.has_queued()) {
    break_connection(id, "it closed the connection before it read its answers");
    return;
  }
  try {
    receive(id, connection);
  } catch (const std::exception& error) {
    give_up(id, error.what());
  }
}

void Connections::receive(ClientId id, Connection& connection) {
  for (int i = 0; i < kFramesPerTurn && !connection.closing && !connection.broken; ++i) {
    // One who does not read what was sent is not asked for more: what waits for him stays bounded
    // by the largest reply.
    if (connection.socket.has_queued()) return;
    auto frame = connection.socket.try_receive();
    if (!frame) {
      if (frame.error().code == ErrorCode::kProtocol) {
        say(connection, frame.error().code, frame.error().message);
      }
      // The system says this of a process that has ended, too.
      break_connection(
          id, frame.error().code == ErrorCode::kUnavailable
                  ? "its process exited, was killed or closed the connection, without detaching"
                  : frame.error().message);
      return;
    }
    if (!*frame) return;
    plane_->on_client_frame(id, std::move(**frame));
  }
}

void Connections::give_up(ClientId id, const char* what) noexcept {
  try {
    Connection& connection = connections_.at(id);
    if (!connection.closing) {
      say(connection, ErrorCode::kLimitExceeded,
          fmt::format("the daemon could not serve a request ({}); it has little memory left",
                      what));
    }
    log(LogLevel::kError, fmt::format("ended a client's connection: {}", what), connection.user);
    connection.closing = false;  // the control plane may know of it, and then has to hear
    break_connection(id, fmt::format("the daemon could not serve it: {}", what));
  } catch (const std::exception&) {
    // Its deadline, or its next event, ends it.
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
    const auto found = connections_.find(id);
    // Closing means that the control plane has forgotten it. When this throws, the connection stays
    // for the next turn.
    if (!found->second.closing) plane_->on_client_closed(id, found->second.reason);
    broken_.erase(std::ranges::find(broken_, id));
    connections_.erase(found);
  }
}

void Connections::shed() {
  for (auto& [id, connection] : connections_) {
    if (connection.attached || connection.closing || connection.broken) continue;
    break_connection(id, "the daemon has no memory left for clients without a session");
  }
}

void Connections::update_interest(ClientId id, Connection& connection) {
  const std::size_t queued = connection.socket.queued_bytes();
  if (queued == 0) {
    connection.unread_since_ns = 0;
  } else if (connection.unread_since_ns == 0 || queued < connection.unread_bytes) {
    connection.unread_since_ns = shm::monotonic_ns();
  }
  connection.unread_bytes = queued;
  const std::uint32_t interest = queued != 0 ? EPOLLOUT : connection.closing ? 0u : EPOLLIN;
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
  const auto unread_ns =
      static_cast<std::uint64_t>(std::chrono::nanoseconds(options_.unread_timeout).count());
  for (auto& [id, connection] : connections_) {
    if (connection.broken) continue;
    if (connection.unread_since_ns != 0 && now_ns >= connection.unread_since_ns + unread_ns) {
      break_connection(id, fmt::format("it does not read: {} bytes have waited for it for {} ms",
                                       connection.unread_bytes, options_.unread_timeout.count()));
      continue;
    }
    if (now_ns < connection.deadline_ns) continue;
    if (connection.closing) {
      break_connection(id, "it did not read its answers");
    } else if (connection.ended) {
      break_connection(id, "its session has ended");
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

void Connections::log(LogLevel level, std::string message, std::optional<std::uint32_t> user,
                      SourceLine where) const {
  if (log_) log_({level, std::move(message), {}, user, where});
}

}  // namespace mk::daemon::control
