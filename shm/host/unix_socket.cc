#include "shm/host/unix_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "shm/host/unix_address.h"
#include "shm/limits.h"

namespace mk::shm {

namespace {

using Deadline = std::chrono::steady_clock::time_point;

/// A peer that announces a large frame costs us no more memory than it has sent, plus this.
constexpr std::size_t kReadBytesMax = 256 * 1024;
constexpr std::size_t kQueuedBytesMax = 2 * kMessageBytesMax;

Result<PeerCredentials> peer_credentials(int fd) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return fail_errno(errno, "cannot read the peer's credentials");
  }
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

std::string peer_name(int fd) {
  const auto credentials = peer_credentials(fd);
  return credentials ? fmt::format("process {}", credentials->pid) : "the peer";
}

/// Waits for `events` or an error on `fd`; false when the deadline came first.
Result<bool> wait_for(int fd, short events, Deadline deadline) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd entry{fd, events, 0};
    const int ready =
        ::poll(&entry, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 3'600'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return fail_errno(errno, "cannot wait for {}", peer_name(fd));
  }
}

FrameHeader make_header(std::uint16_t type, std::uint64_t request, std::size_t payload_bytes) {
  return FrameHeader{static_cast<std::uint32_t>(payload_bytes), type, 0, request};
}

Status check_outgoing(std::size_t payload_bytes, std::size_t fd_count) {
  if (payload_bytes > kMessageBytesMax) {
    return fail(ErrorCode::kLimitExceeded, "a message of {} bytes exceeds the limit of {}",
                payload_bytes, kMessageBytesMax);
  }
  if (fd_count > kFrameFdsMax) {
    return fail(ErrorCode::kInvalidArgument, "a message carries at most {} descriptors, not {}",
                kFrameFdsMax, fd_count);
  }
  return {};
}

/// Sends as much of `first` and then `second` as goes without blocking, `fds` with the first byte.
/// Returns the bytes sent; 0 when the peer's buffer is full.
Result<std::size_t> send_some(int fd, std::span<const std::byte> first,
                              std::span<const std::byte> second, std::span<const int> fds) {
  iovec parts[2] = {{const_cast<std::byte*>(first.data()), first.size()},
                    {const_cast<std::byte*>(second.data()), second.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFrameFdsMax)] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* entry = CMSG_FIRSTHDR(&message);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type = SCM_RIGHTS;
    entry->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(entry), fds.data(), fds.size_bytes());
  }
  while (true) {
    const ssize_t sent = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return 0;
    if (errno == EPIPE || errno == ECONNRESET) {
      return fail(ErrorCode::kUnavailable, "the connection to {} was closed by peer",
                  peer_name(fd));
    }
    return fail_errno(errno, "cannot send to {}", peer_name(fd));
  }
}

/// Moves the descriptors of a received message into `fds`, whatever their number: they are ours to
/// close from here on.
void take_fds(msghdr& message, std::vector<UniqueFd>& fds) {
  for (cmsghdr* entry = CMSG_FIRSTHDR(&message); entry != nullptr;
       entry = CMSG_NXTHDR(&message, entry)) {
    if (entry->cmsg_level != SOL_SOCKET || entry->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (entry->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(entry) + i * sizeof fd, sizeof fd);
      fds.emplace_back(fd);
    }
  }
}

}  // namespace

FrameSocket::FrameSocket(UniqueFd fd) : fd_(std::move(fd)), in_bytes_max_(kMessageBytesMax) {}

Result<FrameSocket> FrameSocket::connect(const std::string& path,
                                         std::chrono::milliseconds timeout) {
  MK_ASSIGN_OR_RETURN(const UnixAddress address, unix_address(path));
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return fail_errno(errno, "cannot make a socket for '{}'", path);
  const Deadline deadline = std::chrono::steady_clock::now() + timeout;
  while (::connect(fd.get(), address.get(), address.bytes) != 0) {
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:  // its queue of new connections is full, which poll cannot wait for
        if (std::chrono::steady_clock::now() >= deadline) {
          return fail(
              ErrorCode::kTimeout,
              "the program that listens at '{}' took no connection within {} ms: is it hung?", path,
              timeout.count());
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      case ENOENT:
      case ENOTDIR:
        return fail(ErrorCode::kUnavailable,
                    "there is no socket '{}': is mkerneld running, and is this its socket?", path);
      case ECONNREFUSED:
        return fail(ErrorCode::kUnavailable,
                    "nobody listens at '{}' (stale socket): start mkerneld", path);
      case EACCES:
      case EPERM:
        return fail(ErrorCode::kPermission,
                    "no permission to connect to '{}': see the socket's mode and group", path);
      default:
        return fail_errno(errno, "cannot connect to '{}'", path);
    }
  }
  return FrameSocket(std::move(fd));
}

Result<std::pair<FrameSocket, FrameSocket>> FrameSocket::pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
    return fail_errno(errno, "cannot make a pair of sockets");
  }
  return std::pair(FrameSocket(UniqueFd(fds[0])), FrameSocket(UniqueFd(fds[1])));
}

Status FrameSocket::send(std::uint16_t type, std::uint64_t request,
                         std::span<const std::byte> payload, std::span<const int> fds,
                         Deadline deadline) {
  MK_RETURN_IF_ERROR(check_outgoing(payload.size(), fds.size()));
  MK_RETURN_IF_ERROR(flush_until(deadline));
  const FrameHeader header = make_header(type, request, payload.size());
  auto first = std::as_bytes(std::span(&header, 1));
  while (!first.empty() || !payload.empty()) {
    MK_ASSIGN_OR_RETURN(const std::size_t sent, send_some(fd(), first, payload, fds));
    const std::size_t of_first = std::min(sent, first.size());
    first = first.subspan(of_first);
    payload = payload.subspan(sent - of_first);
    if (sent > 0) {
      fds = {};
      continue;
    }
    MK_ASSIGN_OR_RETURN(const bool writable, wait_for(fd(), POLLOUT, deadline));
    if (writable) continue;
    if (first.size() < sizeof header) shutdown();
    return fail(ErrorCode::kTimeout, "{} did not read in time", peer_name(fd()));
  }
  return {};
}

Result<Frame> FrameSocket::receive(Deadline deadline) {
  while (true) {
    MK_ASSIGN_OR_RETURN(const Step step, receive_step());
    if (step == Step::kWhole) return take_frame();
    if (step == Step::kPart) continue;
    MK_ASSIGN_OR_RETURN(const bool readable, wait_for(fd(), POLLIN, deadline));
    if (!readable) return fail(ErrorCode::kTimeout, "no message from {} in time", peer_name(fd()));
  }
}

Result<std::optional<Frame>> FrameSocket::try_receive() {
  while (true) {
    MK_ASSIGN_OR_RETURN(const Step step, receive_step());
    if (step == Step::kWhole) return take_frame();
    if (step == Step::kNothing) return std::nullopt;
  }
}

Result<FrameSocket::Step> FrameSocket::receive_step() {
  if (in_error_) return tl::unexpected<Error>(*in_error_);
  // Never beyond the end of the frame: descriptors that come with these bytes are this frame's.
  iovec part;
  if (in_bytes_ < sizeof in_header_) {
    part = {reinterpret_cast<std::byte*>(&in_header_) + in_bytes_, sizeof in_header_ - in_bytes_};
  } else {
    const std::size_t have = in_bytes_ - sizeof in_header_;
    const std::size_t want = std::min(in_header_.payload_bytes - have, kReadBytesMax);
    in_.payload.resize(have + want);
    part = {in_.payload.data() + have, want};
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFrameFdsMax)];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(fd(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    if (errno == EINTR) return Step::kPart;
    if (errno == EAGAIN) return Step::kNothing;
    if (errno != ECONNRESET)
      return out_of_step(fail_errno(errno, "cannot receive from {}", peer_name(fd())));
  }
  if (got <= 0) {
    return out_of_step(fail(ErrorCode::kUnavailable, "the connection to {} was closed by peer{}",
                            peer_name(fd()), in_bytes_ == 0 ? "" : " in the middle of a message"));
  }
  take_fds(message, in_.fds);
  if ((message.msg_flags & MSG_CTRUNC) != 0 || in_.fds.size() > kFrameFdsMax) {
    return out_of_step(fail(
        ErrorCode::kProtocol,
        "{} sent more than {} descriptors in one message, or this process may open no more files",
        peer_name(fd()), kFrameFdsMax));
  }
  in_bytes_ += static_cast<std::size_t>(got);
  if (in_bytes_ < sizeof in_header_) return Step::kPart;
  if (in_header_.payload_bytes > in_bytes_max_ || in_header_.reserved != 0) {
    return out_of_step(
        fail(ErrorCode::kProtocol,
             "{} sent a malformed header: {} payload bytes (at most {}), reserved {:#x}",
             peer_name(fd()), in_header_.payload_bytes, in_bytes_max_, in_header_.reserved));
  }
  return in_bytes_ == sizeof in_header_ + in_header_.payload_bytes ? Step::kWhole : Step::kPart;
}

Frame FrameSocket::take_frame() {
  in_.type = in_header_.type;
  in_.request = in_header_.request;
  in_bytes_ = 0;
  return std::exchange(in_, Frame{});
}

tl::unexpected<Error> FrameSocket::out_of_step(tl::unexpected<Error> error) {
  in_ = Frame{};
  in_error_ = error.value();
  return error;
}

Status FrameSocket::queue_send(std::uint16_t type, std::uint64_t request,
                               std::span<const std::byte> payload, std::span<const int> fds) {
  MK_RETURN_IF_ERROR(check_outgoing(payload.size(), fds.size()));
  if (out_bytes_ + sizeof(FrameHeader) + payload.size() > kQueuedBytesMax) {
    MK_RETURN_IF_ERROR(flush());
    if (out_bytes_ + sizeof(FrameHeader) + payload.size() > kQueuedBytesMax) {
      return fail(ErrorCode::kLimitExceeded, "{} does not read: {} bytes are queued for it",
                  peer_name(fd()), out_bytes_);
    }
  }
  Queued queued;
  for (const int fd : fds) {
    queued.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!queued.fds.back().valid())
      return fail_errno(errno, "cannot keep descriptor {} for sending", fd);
  }
  const FrameHeader header = make_header(type, request, payload.size());
  const auto first = std::as_bytes(std::span(&header, 1));
  queued.bytes.reserve(first.size() + payload.size());
  queued.bytes.assign(first.begin(), first.end());
  queued.bytes.insert(queued.bytes.end(), payload.begin(), payload.end());
  out_bytes_ += queued.bytes.size();
  out_.push_back(std::move(queued));
  return flush();
}

Status FrameSocket::flush() {
  while (!out_.empty()) {
    Queued& queued = out_.front();
    int fds[kFrameFdsMax];
    const std::size_t fd_count = queued.fds.size();
    for (std::size_t i = 0; i < fd_count; ++i) fds[i] = queued.fds[i].get();
    const auto sent = send_some(fd(), std::span(queued.bytes).subspan(queued.sent), {},
                                std::span(fds).first(fd_count));
    if (!sent) {
      out_.clear();
      out_bytes_ = 0;
      return propagate(sent);
    }
    if (*sent == 0) return {};
    queued.fds.clear();
    queued.sent += *sent;
    out_bytes_ -= *sent;
    if (queued.sent == queued.bytes.size()) out_.pop_front();
  }
  return {};
}

Status FrameSocket::flush_until(Deadline deadline) {
  while (true) {
    MK_RETURN_IF_ERROR(flush());
    if (!has_queued()) return {};
    MK_ASSIGN_OR_RETURN(const bool writable, wait_for(fd(), POLLOUT, deadline));
    if (!writable) return fail(ErrorCode::kTimeout, "{} did not read in time", peer_name(fd()));
  }
}

bool FrameSocket::has_queued() const { return !out_.empty(); }

std::size_t FrameSocket::queued_fds() const {
  std::size_t count = 0;
  for (const Queued& queued : out_) count += queued.fds.size();
  return count;
}

Result<PeerCredentials> FrameSocket::credentials() const { return peer_credentials(fd()); }

void FrameSocket::shutdown() { ::shutdown(fd(), SHUT_RDWR); }

}  // namespace mk::shm
