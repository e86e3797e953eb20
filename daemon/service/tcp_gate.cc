#include "daemon/service/tcp_gate.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/service/accept_pause.h"

namespace mk::daemon {
namespace {

constexpr int kBacklog = 128;

std::uint16_t port_of(int fd) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return 0;
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(name).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(name).sin_port);
}

/// Listens at one address; `port` replaces its own unless 0. Invalid when it cannot: `error` is
/// why.
UniqueFd listen_at(const sockaddr* name, socklen_t bytes, std::uint16_t port, int& error) {
  sockaddr_storage at{};
  std::memcpy(&at, name, bytes);
  if (port != 0 && at.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(at).sin6_port = htons(port);
  } else if (port != 0) {
    reinterpret_cast<sockaddr_in&>(at).sin_port = htons(port);
  }
  UniqueFd fd(::socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!fd.valid() || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(fd.get(), reinterpret_cast<sockaddr*>(&at), bytes) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    error = errno;
    return {};
  }
  return fd;
}

/// All of the machine's addresses, of both families, as gRPC takes "0.0.0.0".
UniqueFd listen_everywhere(std::uint16_t port) {
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_addr = in6addr_any;
  any.sin6_port = htons(port);
  int error = 0;
  return listen_at(reinterpret_cast<sockaddr*>(&any), sizeof any, 0, error);
}

tl::unexpected<Error> explain(const Address& address, int error) {
  if (error == EADDRNOTAVAIL) {
    return fail(ErrorCode::kUnavailable,
                "cannot listen on {}: no interface of this machine has that address now; give one "
                "that address, or choose another --listen",
                address.text());
  }
  if (error != EADDRINUSE) return fail_errno(error, "cannot listen on {}", address.text());
  return fail(ErrorCode::kAlreadyExists,
              "cannot listen on {}: another process holds the port; stop it or choose another "
              "--listen (port 0: any free one)",
              address.text());
}

/// Host and port.
std::pair<std::string, std::string> remote_of(int fd) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "?";
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&name), &bytes) == 0) {
    ::getnameinfo(reinterpret_cast<sockaddr*>(&name), bytes, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV);
  }
  return {host, port};
}

}  // namespace

Result<std::unique_ptr<TcpGate>> TcpGate::open(const Address& address,
                                               const TcpGateLimits& limits) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port_text = std::to_string(address.port);
  if (const int error = ::getaddrinfo(address.host.c_str(), port_text.c_str(), &hints, &found)) {
    return fail(ErrorCode::kNotFound, "cannot listen on {}: {}", address.text(),
                ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  std::vector<UniqueFd> listeners;
  if (address.host == "0.0.0.0") {
    UniqueFd both = listen_everywhere(address.port);
    if (both.valid()) listeners.push_back(std::move(both));
  }
  std::uint16_t port = listeners.empty() ? 0 : port_of(listeners.front().get());
  int error = 0;
  for (const addrinfo* one = found; one != nullptr && port == 0; one = one->ai_next) {
    UniqueFd listener = listen_at(one->ai_addr, one->ai_addrlen, 0, error);
    if (!listener.valid()) continue;
    port = port_of(listener.get());
    listeners.push_back(std::move(listener));
    // The host's other addresses, such as ::1 beside 127.0.0.1: where that port is free there.
    for (const addrinfo* other = one->ai_next; other != nullptr; other = other->ai_next) {
      UniqueFd more = listen_at(other->ai_addr, other->ai_addrlen, port, error);
      if (more.valid()) listeners.push_back(std::move(more));
    }
  }
  if (listeners.empty()) return explain(address, error);
  return std::unique_ptr<TcpGate>(new TcpGate(std::move(listeners), port, limits));
}

TcpGate::TcpGate(std::vector<UniqueFd> listeners, std::uint16_t port, const TcpGateLimits& limits)
    : listeners_(std::move(listeners)),
      port_(port),
      limits_(limits),
      live_(limits.handshake),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

TcpGate::~TcpGate() {
  const std::uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

void TcpGate::start(Deliver deliver, Refused refused) {
  deliver_ = std::move(deliver);
  refused_ = std::move(refused);
  thread_ = std::thread([this] { run(); });
}

void TcpGate::run() {
  ::pthread_setname_np(::pthread_self(), "mk-tcp-gate");
  std::vector<pollfd> watched{{stop_.get(), POLLIN, 0}};
  for (const UniqueFd& listener : listeners_) watched.push_back({listener.get(), POLLIN, 0});
  while (true) {
    if (::poll(watched.data(), watched.size(), -1) < 0 && errno != EINTR) return;
    if (watched[0].revents != 0) return;
    for (std::size_t i = 1; i < watched.size(); ++i) {
      if (watched[i].revents == 0) continue;
      UniqueFd connection(::accept4(watched[i].fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (connection.valid()) {
        admit(std::move(connection), watched[i].fd);
      } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        ::poll(watched.data(), 1, kAcceptPauseMs);
      }
    }
  }
}

void TcpGate::admit(UniqueFd connection, int listener) {
  const auto [host, port] = remote_of(connection.get());
  std::unique_lock lock(live_mutex_);
  const LiveConnections::Counts counts = live_.count(host);
  const bool too_many_of_host =
      counts.of_owner >= limits_.of_address || counts.young_of_owner >= limits_.unproved_of_address;
  const bool too_many = counts.all >= limits_.connections || counts.young >= limits_.unproved;
  if ((too_many_of_host && !live_.cut_oldest_young(host)) ||
      (too_many && !too_many_of_host && !live_.cut_oldest_young(""))) {
    lock.unlock();
    refused_(
        fmt::format("turned a connection of {} away: there are {} connections, {} of this "
                    "address; at most {} and {}",
                    host, counts.all, counts.of_owner, limits_.connections, limits_.of_address));
    return;
  }
  const int on = 1;
  ::setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  live_.add(connection.get(), host, fmt::format("{}:{}", host, port));
  lock.unlock();
  deliver_(std::move(connection), listener);
}

}  // namespace mk::daemon
