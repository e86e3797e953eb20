#include "daemon/service/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "daemon/control/memory_reserve.h"
#include "daemon/fabric/library_signals.h"
#include "shm/files/output_file.h"
#include "shm/host/unique_fd.h"

namespace mk::daemon {
namespace {

constexpr rlim_t kLockedBytesWanted = rlim_t{1} << 30;

sigset_t our_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, signal);
  return set;
}

void leave_at_once(int) {
  constexpr std::string_view kText = "mkerneld: second signal, stopping at once\n";
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(1);
}

}  // namespace

void prepare_process(Logger& logger) {
  ::signal(SIGPIPE, SIG_IGN);

  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &files) != 0) {
      logger.write(LogLevel::kWarning, fmt::format("cannot raise the limit of open files to {}: {}",
                                                   files.rlim_max, errno_text(errno)));
    }
  }
  MemoryReserve::install();
  take_signals_back();
  rlimit locked{};
  if (::getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY &&
      locked.rlim_cur < kLockedBytesWanted && ::geteuid() != 0) {
    logger.write(LogLevel::kWarning,
                 fmt::format("only {} KiB of memory may be locked: RDMA fabrics will refuse larger "
                             "buffers. Raise it with LimitMEMLOCK=infinity in the unit or "
                             "`ulimit -l unlimited`",
                             locked.rlim_cur >> 10));
  }
}

std::uint64_t open_files_max() {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return 0;
  return files.rlim_cur;
}

Signals::Signals() {
  const sigset_t set = our_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

std::optional<int> Signals::wait(std::chrono::nanoseconds patience) {
  const sigset_t set = our_signals();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(patience);
  const timespec timeout{.tv_sec = seconds.count(), .tv_nsec = (patience - seconds).count()};
  const int signal = ::sigtimedwait(&set, nullptr, &timeout);
  if (signal < 0) return std::nullopt;
  return signal;
}

void Signals::end_at_once() {
  struct sigaction action {};
  action.sa_handler = leave_at_once;
  sigset_t set;
  sigemptyset(&set);
  for (const int one : {SIGTERM, SIGINT}) {
    ::sigaction(one, &action, nullptr);
    sigaddset(&set, one);
  }
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

std::string signal_name(int signal) { return fmt::format("SIG{}", ::sigabbrev_np(signal)); }

void notify_systemd(const std::string& lines) { ::sd_notify(0, lines.c_str()); }

std::chrono::nanoseconds watchdog_interval() {
  std::uint64_t microseconds = 0;
  if (::sd_watchdog_enabled(0, &microseconds) <= 0) return std::chrono::nanoseconds(0);
  return std::chrono::microseconds(microseconds);
}

Result<UniqueFd> take_activated_socket(const std::string& path) {
  const int count = ::sd_listen_fds(/*unset_environment=*/1);
  if (count == 0) return UniqueFd();
  if (count < 0) return fail_errno(-count, "cannot take the socket that systemd holds");
  UniqueFd socket(SD_LISTEN_FDS_START);
  // An abstract name begins with a zero byte for the kernel, with '@' for users.
  std::string name = path;
  if (name.front() == '@') name.front() = '\0';
  const std::size_t bytes = path.front() == '@' ? name.size() : 0;
  if (count > 1 || ::sd_is_socket_unix(socket.get(), SOCK_STREAM, 1, name.data(), bytes) <= 0) {
    return fail(ErrorCode::kInvalidArgument,
                "systemd handed over {} sockets, but one that listens at socket.path \"{}\" is "
                "expected: give ListenStream= of mkerneld.socket that path",
                count, path);
  }
  return socket;
}

std::string ready_line(unsigned node, const std::string& listen, const std::string& socket,
                       const std::string& metrics) {
  nlohmann::json line = {
      {"node", node}, {"pid", ::getpid()}, {"listen", listen}, {"socket", socket}};
  if (!metrics.empty()) line["metrics"] = metrics;
  return line.dump() + "\n";
}

Status write_ready_fd(int fd, const std::string& line) {
  const UniqueFd owned(fd);
  if (::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return fail_errno(errno, "cannot write to --ready-fd {}", fd);
  }
  return {};
}

Status write_ready_file(const std::string& path, const std::string& line) {
  OutputRules rules;
  rules.option = "--ready-file";
  rules.overwrite = true;  // one that a daemon left behind, whatever a script made of it
  MK_ASSIGN_OR_RETURN(auto file, OutputFile::create(path, std::move(rules)));
  MK_RETURN_IF_ERROR(file.write(line));
  return file.publish();
}

}  // namespace mk::daemon
