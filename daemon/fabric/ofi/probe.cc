#include "daemon/fabric/ofi/probe.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "shm/host/unique_fd.h"

namespace mk::fabric::ofi {

Status probe_listener(std::span<const char> name, std::uint64_t timeout_ns) {
  sockaddr_storage address{};
  if (name.size() < sizeof(address.ss_family) || name.size() > sizeof(address)) {
    return fail(ErrorCode::kProtocol, "the address of {} bytes is none of a socket", name.size());
  }
  std::memcpy(&address, name.data(), name.size());
  const UniqueFd fd(::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return fail_errno(errno, "cannot create a socket");
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                static_cast<socklen_t>(name.size())) == 0)
    return {};
  if (errno != EINPROGRESS) return fail(ErrorCode::kUnavailable, "{}", errno_text(errno));

  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd waiting{fd.get(), POLLOUT, 0};
    const int ready = left.count() <= 0 ? 0 : ::poll(&waiting, 1, static_cast<int>(left.count()));
    if (ready == 0) {
      return fail(ErrorCode::kTimeout, "nobody answered within {} s",
                  static_cast<double>(timeout_ns) / 1e9);
    }
    if (ready > 0) break;
    if (errno != EINTR) return fail_errno(errno, "cannot wait for a connection");
  }
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return fail(ErrorCode::kUnavailable, "{}", errno_text(error));
  return {};
}

}  // namespace mk::fabric::ofi
