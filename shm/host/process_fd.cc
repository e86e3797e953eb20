#include "shm/host/process_fd.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

namespace mk::shm {

namespace {

// Younger than the headers of some machines that we are built on.
constexpr long kPidfdOpen = 434;
constexpr int kPeerPidfd = 77;
constexpr auto kIdOfPidfd = static_cast<idtype_t>(3);

}  // namespace

Result<UniqueFd> open_process(pid_t pid) {
  UniqueFd fd(static_cast<int>(::syscall(kPidfdOpen, pid, 0)));  // is closed on exec
  if (!fd.valid()) return fail_errno(errno, "cannot open process {}", pid);
  return fd;
}

Result<UniqueFd> peer_process(int socket) {
  int fd = -1;
  socklen_t bytes = sizeof fd;
  if (::getsockopt(socket, SOL_SOCKET, kPeerPidfd, &fd, &bytes) != 0) {
    return fail_errno(errno, "cannot open the peer's process");
  }
  UniqueFd process(fd);
  ::fcntl(process.get(), F_SETFD, FD_CLOEXEC);
  return process;
}

bool is_process(int fd) {
  siginfo_t info{};
  // Of what is no child of ours the kernel says so (ECHILD), of what is no pidfd EBADF.
  return ::waitid(kIdOfPidfd, static_cast<id_t>(fd), &info, WEXITED | WNOHANG | WNOWAIT) == 0 ||
         errno == ECHILD;
}

std::optional<pid_t> pid_of(int process) {
  const UniqueFd file(
      ::open(fmt::format("/proc/self/fdinfo/{}", process).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return std::nullopt;
  char text[1024];
  const ssize_t bytes = ::read(file.get(), text, sizeof text);
  if (bytes <= 0) return std::nullopt;
  const std::string_view lines(text, static_cast<std::size_t>(bytes));
  constexpr std::string_view kField = "\nPid:\t";
  const std::size_t at = lines.find(kField);
  if (at == lines.npos) return std::nullopt;
  const std::string_view value = lines.substr(at + kField.size());
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), pid);
  if (error != std::errc()) return std::nullopt;
  return pid;
}

}  // namespace mk::shm
