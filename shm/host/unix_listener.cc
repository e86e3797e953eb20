#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "shm/host/unix_address.h"
#include "shm/host/unix_socket.h"

namespace mk::shm {

namespace {

std::string lock_path(const std::string& path) { return path + ".lock"; }

/// Who listens at `address`: a process id, 0 when it cannot be known, -1 when nobody does.
pid_t listener_pid(const UnixAddress& address) {
  const FrameSocket probe(
      UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
  if (::connect(probe.fd(), address.get(), address.bytes) != 0) {
    return errno == ECONNREFUSED || errno == ENOENT ? -1 : 0;
  }
  const auto credentials = probe.credentials();
  return credentials ? credentials->pid : 0;
}

tl::unexpected<Error> held_by(const std::string& path, pid_t pid) {
  return fail(ErrorCode::kAlreadyExists, "'{}' is held by {}: stop it, or choose another socket",
              path, pid > 0 ? fmt::format("process {}", pid) : "another process");
}

/// The process id that the holder of a lock file wrote into it, 0 if it has not yet.
pid_t pid_in(int fd) {
  char text[32] = {};
  return ::pread(fd, text, sizeof text - 1, 0) > 0
             ? static_cast<pid_t>(std::strtol(text, nullptr, 10))
             : 0;
}

}  // namespace

Result<FrameListener> FrameListener::listen(const std::string& path, mode_t mode) {
  MK_ASSIGN_OR_RETURN(const UnixAddress address, unix_address(path));
  FrameListener listener(path);  // whatever fails below, it removes what it made
  if (!is_abstract(path)) {
    MK_RETURN_IF_ERROR(listener.lock());
    MK_RETURN_IF_ERROR(listener.replace_stale_file());
  }
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return fail_errno(errno, "cannot make a socket for '{}'", path);
  if (::bind(fd.get(), address.get(), address.bytes) != 0) {
    if (errno == EADDRINUSE) return held_by(path, listener_pid(address));
    return fail_errno(errno, "cannot bind '{}'", path);
  }
  if (!is_abstract(path)) {
    struct stat status;
    if (::lstat(path.c_str(), &status) != 0)
      return fail_errno(errno, "cannot find '{}' again", path);
    listener.inode_ = status.st_ino;
    // Before listen: until then nobody can connect, so no one slips in under the umask's mode.
    if (::chmod(path.c_str(), mode) != 0)
      return fail_errno(errno, "cannot set the mode of '{}'", path);
  }
  if (::listen(fd.get(), SOMAXCONN) != 0) return fail_errno(errno, "cannot listen at '{}'", path);
  listener.fd_ = std::move(fd);
  return listener;
}

Result<FrameListener> FrameListener::adopt(UniqueFd socket, const std::string& path) {
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0 ||
      ::fcntl(socket.get(), F_SETFD, FD_CLOEXEC) != 0) {
    return fail_errno(errno, "cannot take over the socket at '{}'", path);
  }
  FrameListener listener(path);
  listener.fd_ = std::move(socket);
  return listener;
}

Status FrameListener::lock() {
  const std::string file = lock_path(path_);
  for (int attempt = 0; attempt < 100; ++attempt) {
    UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.valid()) {
      return fail_errno(errno,
                        "cannot open '{}', which guards the socket: does its folder exist, and may "
                        "you write there",
                        file);
    }
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno == EWOULDBLOCK) return held_by(path_, pid_in(fd.get()));
      return fail_errno(errno, "cannot lock '{}'", file);
    }
    // The last holder removes the file before it lets go; a lock on a removed file guards nothing.
    struct stat ours;
    struct stat there;
    if (::fstat(fd.get(), &ours) != 0 || ::stat(file.c_str(), &there) != 0 ||
        ours.st_ino != there.st_ino)
      continue;
    lock_ = std::move(fd);
    const std::string pid = fmt::format("{}\n", ::getpid());
    if (::ftruncate(lock_.get(), 0) != 0 || ::pwrite(lock_.get(), pid.data(), pid.size(), 0) < 0) {
      return fail_errno(errno, "cannot write '{}'", file);
    }
    return {};
  }
  return fail(ErrorCode::kUnavailable,
              "'{}' is removed each time it is locked: are several daemons starting?", file);
}

Status FrameListener::replace_stale_file() {
  struct stat status;
  if (::lstat(path_.c_str(), &status) != 0) {
    if (errno == ENOENT) return {};
    return fail_errno(errno, "cannot look at '{}'", path_);
  }
  if (!S_ISSOCK(status.st_mode)) {
    return fail(ErrorCode::kAlreadyExists,
                "'{}' exists and is no socket: remove it, or choose another path", path_);
  }
  MK_ASSIGN_OR_RETURN(const UnixAddress address, unix_address(path_));
  if (const pid_t pid = listener_pid(address); pid >= 0) return held_by(path_, pid);
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT)
    return fail_errno(errno, "cannot remove stale '{}'", path_);
  return {};
}

FrameListener::FrameListener(FrameListener&& other) noexcept
    : fd_(std::move(other.fd_)),
      lock_(std::move(other.lock_)),
      path_(std::move(other.path_)),
      inode_(std::exchange(other.inode_, 0)) {}

FrameListener& FrameListener::operator=(FrameListener&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::move(other.fd_);
    lock_ = std::move(other.lock_);
    path_ = std::move(other.path_);
    inode_ = std::exchange(other.inode_, 0);
  }
  return *this;
}

FrameListener::~FrameListener() { close(); }

void FrameListener::close() {
  struct stat status;
  if (inode_ != 0 && ::lstat(path_.c_str(), &status) == 0 && status.st_ino == inode_)
    ::unlink(path_.c_str());
  inode_ = 0;
  fd_.reset();
  // The lock goes last, and its file before it: see lock().
  if (lock_.valid()) ::unlink(lock_path(path_).c_str());
  lock_.reset();
}

Result<std::optional<FrameSocket>> FrameListener::try_accept() {
  while (true) {
    const int fd = ::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) return FrameSocket(UniqueFd(fd));
    if (errno == EAGAIN) return std::nullopt;
    if (errno == EMFILE || errno == ENFILE) {
      return fail(ErrorCode::kLimitExceeded,
                  "no descriptor left for a connection at '{}': raise LimitNOFILE", path_);
    }
    if (errno != EINTR && errno != ECONNABORTED)
      return fail_errno(errno, "cannot accept at '{}'", path_);
  }
}

}  // namespace mk::shm
