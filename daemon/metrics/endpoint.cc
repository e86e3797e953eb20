#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <prometheus/text_serializer.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "daemon/metrics/metrics.h"
#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::daemon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kRequestBytesMax = 8192;
constexpr auto kPatience = std::chrono::seconds(2);  ///< for one request and its answer
constexpr std::string_view kContentType = "text/plain; version=0.0.4; charset=utf-8";

std::string answer(std::string_view status, std::string_view type, std::string_view body,
                   bool with_body) {
  return fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
      status, type, body.size(), with_body ? body : "");
}

Result<UniqueFd> listen_at(const Address& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (const int error = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found);
      error != 0) {
    return fail(ErrorCode::kInvalidArgument, "{}", ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, ::freeaddrinfo);
  UniqueFd fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!fd.valid() || ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(fd.get(), 16) != 0) {
    return fail_errno(errno, "socket");
  }
  return fd;
}

std::uint16_t port_of(int fd) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return 0;
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(name).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(name).sin_port);
}

}  // namespace

/// One thread, one connection at a time: nobody but a scraper comes here, and one that dawdles is
/// cut off.
class MetricsEndpoint::Impl {
 public:
  Impl(UniqueFd listener, UniqueFd stop, const Address& address,
       std::function<MetricsSample()> sample)
      : listener_(std::move(listener)),
        stop_(std::move(stop)),
        sample_(std::move(sample)),
        address_(address),
        thread_([this] { run(); }) {}
  ~Impl() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
    thread_.join();
  }
  const Address& address() const { return address_; }

 private:
  void run() {
    ::pthread_setname_np(::pthread_self(), "mk-metrics");
    while (wait(listener_.get(), POLLIN, Clock::time_point::max())) {
      const UniqueFd peer(
          ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (peer.valid()) {
        serve(peer.get());
      } else if (errno == EMFILE || errno == ENFILE) {
        wait(-1, 0, Clock::now() + kPatience);  // no descriptor is left: later, perhaps
      }
    }
  }

  void serve(int peer) const {
    const auto until = Clock::now() + kPatience;
    std::string request;
    while (request.find("\r\n\r\n") == std::string::npos) {
      if (request.size() > kRequestBytesMax || !wait(peer, POLLIN, until)) return;
      char bytes[1024];
      const ssize_t count = ::recv(peer, bytes, sizeof bytes, 0);
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return;
      if (count > 0) request.append(bytes, static_cast<std::size_t>(count));
    }
    const std::string reply = reply_to(std::string_view(request).substr(0, request.find('\r')));
    for (std::size_t sent = 0; sent < reply.size() && wait(peer, POLLOUT, until);) {
      const ssize_t count = ::send(peer, reply.data() + sent, reply.size() - sent, MSG_NOSIGNAL);
      if (count < 0 && errno != EAGAIN && errno != EINTR) return;
      if (count > 0) sent += static_cast<std::size_t>(count);
    }
  }

  std::string reply_to(std::string_view line) const {
    const std::size_t space = line.find(' ');
    const std::string_view method = line.substr(0, space);
    std::string_view path = space == line.npos ? "" : line.substr(space + 1);
    path = path.substr(0, path.find_first_of(" ?"));
    if (method != "GET" && method != "HEAD") {
      return answer("405 Method Not Allowed", "text/plain", "GET /metrics\n", true);
    }
    if (path != "/metrics") return answer("404 Not Found", "text/plain", "GET /metrics\n", true);
    std::ostringstream body;
    prometheus::TextSerializer().Serialize(body, to_families(sample_()));
    return answer("200 OK", kContentType, body.str(), method == "GET");
  }

  /// Until `fd` is ready; false at the time-out, and when the endpoint is to end.
  bool wait(int fd, short events, Clock::time_point until) const {
    while (true) {
      int timeout_ms = -1;
      if (until != Clock::time_point::max()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        if (left.count() <= 0) return false;
        timeout_ms = static_cast<int>(left.count());
      }
      pollfd fds[] = {{stop_.get(), POLLIN, 0}, {fd, events, 0}};
      if (::poll(fds, 2, timeout_ms) < 0 && errno != EINTR) return false;
      if (fds[0].revents != 0) return false;
      if (fds[1].revents != 0) return true;
    }
  }

  const UniqueFd listener_;
  const UniqueFd stop_;
  const std::function<MetricsSample()> sample_;
  const Address address_;
  std::thread thread_;
};

Result<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::listen(
    const Address& address, std::function<MetricsSample()> sample) {
  auto listener = listen_at(address);
  if (!listener) {
    return fail(ErrorCode::kUnavailable, "cannot serve metrics on {} (metrics.listen): {}",
                address.text(), listener.error().message);
  }
  UniqueFd stop(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return fail_errno(errno, "cannot create an eventfd");
  Address bound = address;
  bound.port = port_of(listener->get());
  return std::unique_ptr<MetricsEndpoint>(new MetricsEndpoint(
      std::make_unique<Impl>(std::move(*listener), std::move(stop), bound, std::move(sample))));
}

MetricsEndpoint::MetricsEndpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsEndpoint::~MetricsEndpoint() = default;
const Address& MetricsEndpoint::address() const { return impl_->address(); }

}  // namespace mk::daemon
