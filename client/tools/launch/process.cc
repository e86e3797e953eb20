#include "client/tools/launch/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <deque>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

extern "C" char** environ;

namespace mk::tools {
namespace {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t interrupted_by = 0;

Status check_interrupted() {
  if (interrupted_by == 0) return {};
  return fail(ErrorCode::kAborted, "interrupted by signal {}", static_cast<int>(interrupted_by));
}

/// Null-terminated C arrays for execve, pointing into `strings`.
std::vector<char*> c_array(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

/// Runs in the child between fork and exec: only async-signal-safe calls.
[[noreturn]] void become(char* const* arguments, char* const* environment, int output_fd,
                         int report_fd, const std::vector<int>& inherited, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // the parent died before the line above
  if (output_fd >= 0) {
    ::dup2(output_fd, STDOUT_FILENO);
    ::dup2(output_fd, STDERR_FILENO);
  }
  if (report_fd == kReportFd) {
    ::fcntl(report_fd, F_SETFD, 0);
  } else if (report_fd >= 0) {
    ::dup2(report_fd, kReportFd);
  }
  for (const int fd : inherited) ::fcntl(fd, F_SETFD, 0);
  ::execve(arguments[0], arguments, environment);
  ::_exit(127);
}

}  // namespace

Process::Process(ProcessOptions options, pid_t pid, UniqueFd report)
    : options_(std::move(options)), pid_(pid), report_(std::move(report)) {}

Process::Process(Process&& other) noexcept
    : options_(std::move(other.options_)),
      pid_(std::exchange(other.pid_, -1)),
      wait_status_(other.wait_status_),
      reaped_(std::exchange(other.reaped_, true)),
      report_(std::move(other.report_)),
      buffered_(std::move(other.buffered_)) {}

Process::~Process() {
  if (pid_ < 0 || reaped_) return;
  ::kill(pid_, SIGKILL);
  reap(true);
}

Result<Process> Process::start(const ProcessOptions& options) {
  std::vector<std::string> argument_strings = options.arguments;
  std::vector<std::string> environment_strings;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const bool replaced =
        std::any_of(options.environment.begin(), options.environment.end(), [&](const auto& added) {
          return text.starts_with(std::string_view(added).substr(0, added.find('=') + 1));
        });
    if (!replaced) environment_strings.emplace_back(text);
  }
  environment_strings.insert(environment_strings.end(), options.environment.begin(),
                             options.environment.end());
  const std::vector<char*> arguments = c_array(argument_strings);
  const std::vector<char*> environment = c_array(environment_strings);

  UniqueFd output;
  if (!options.output_path.empty()) {
    output.reset(
        ::open(options.output_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (!output.valid())
      return fail_errno(errno, "cannot write {} for {}", options.output_path, options.name);
  }
  UniqueFd read_end;
  UniqueFd write_end;
  if (options.report) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0)
      return fail_errno(errno, "cannot make a pipe for {}", options.name);
    read_end.reset(ends[0]);
    write_end.reset(ends[1]);
  }
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno(errno, "cannot start {}", options.name);
  if (pid == 0) {
    become(arguments.data(), environment.data(), output.get(), write_end.get(), options.inherited,
           parent);
  }
  return Process(options, pid, std::move(read_end));
}

Result<std::optional<std::string>> Process::read_line(Clock::time_point deadline) {
  while (true) {
    if (const auto newline = buffered_.find('\n'); newline != std::string::npos) {
      std::string line = buffered_.substr(0, newline);
      buffered_.erase(0, newline + 1);
      return line;
    }
    if (!report_.valid()) return std::nullopt;
    MK_RETURN_IF_ERROR(check_interrupted());
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0)
      return fail(ErrorCode::kTimeout, "{} (pid {}) reported nothing in time", name(), pid_);
    pollfd waiting{report_.get(), POLLIN, 0};
    const int ready = ::poll(&waiting, 1, static_cast<int>(std::min<long>(left, 1000)));
    if (ready <= 0) continue;
    char chunk[4096];
    const ssize_t got = ::read(report_.get(), chunk, sizeof(chunk));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      report_.reset();
    } else {
      buffered_.append(chunk, static_cast<std::size_t>(got));
    }
  }
}

bool Process::reap(bool block) {
  while (!reaped_) {
    const pid_t got = ::waitpid(pid_, &wait_status_, block ? 0 : WNOHANG);
    if (got == 0) return false;
    if (got == pid_ || errno == ECHILD) reaped_ = true;
  }
  return true;
}

bool Process::ended() { return reap(false); }

void Process::signal(int number) const {
  if (!reaped_) ::kill(pid_, number);
}

Status report_line(int fd, const std::string& line) {
  const std::string text = line + "\n";
  std::size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t wrote = ::write(fd, text.data() + sent, text.size() - sent);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return fail_errno(errno, "cannot report to the parent");
    sent += static_cast<std::size_t>(wrote);
  }
  return {};
}

int Process::exit_status() const {
  return reaped_ && WIFEXITED(wait_status_) ? WEXITSTATUS(wait_status_) : -1;
}

std::string Process::describe_end() const {
  std::string end = WIFSIGNALED(wait_status_)
                        ? fmt::format("was killed by signal {} ({})", WTERMSIG(wait_status_),
                                      ::strsignal(WTERMSIG(wait_status_)))
                        : fmt::format("exited with status {}", WEXITSTATUS(wait_status_));
  if (const std::string tail = tail_of(options_.output_path, 15); !tail.empty()) {
    end += fmt::format("; the end of its output:\n{}", tail);
  }
  return end;
}

Status Process::wait(Clock::time_point deadline) {
  while (!reap(false)) {
    MK_RETURN_IF_ERROR(check_interrupted());
    if (Clock::now() >= deadline)
      return fail(ErrorCode::kTimeout, "{} (pid {}) still runs", name(), pid_);
    std::this_thread::sleep_for(std::chrono::milliseconds{2});
  }
  if (WIFEXITED(wait_status_) && WEXITSTATUS(wait_status_) == 0) return {};
  return fail(ErrorCode::kInternal, "{} {}", name(), describe_end());
}

void unwind_on_interrupt() {
  struct sigaction action {};
  action.sa_handler = [](int number) { interrupted_by = number; };
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGALRM, SIGUSR1, SIGUSR2,
                           SIGXCPU, SIGXFSZ, SIGVTALRM, SIGPROF, SIGIO, SIGPWR}) {
    ::sigaction(number, &action, nullptr);
  }
}

std::string program_folder() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
}

Result<std::string> find_program(const std::string& name,
                                 const std::vector<std::string>& relative) {
  std::string looked;
  std::vector<std::string> folders = {"."};
  folders.insert(folders.end(), relative.begin(), relative.end());
  for (const std::string& folder : folders) {
    const auto candidate =
        (std::filesystem::path(program_folder()) / folder / name).lexically_normal();
    if (::access(candidate.c_str(), X_OK) == 0) return candidate.string();
    looked += fmt::format(" {}", candidate.string());
  }
  return fail(ErrorCode::kNotFound, "cannot find {}; looked at{}", name, looked);
}

std::string tail_of(const std::string& path, std::size_t lines) {
  std::ifstream file(path);
  std::deque<std::string> last;
  for (std::string line; std::getline(file, line);) {
    last.push_back(std::move(line));
    if (last.size() > lines) last.pop_front();
  }
  std::string text;
  for (const std::string& line : last) text += fmt::format("  {}\n", line);
  return text;
}

Result<TemporaryFolder> TemporaryFolder::create(const std::string& prefix) {
  std::error_code error;
  std::string pattern =
      (std::filesystem::temp_directory_path(error) / (prefix + ".XXXXXX")).string();
  if (::mkdtemp(pattern.data()) == nullptr)
    return fail_errno(errno, "cannot make a temporary folder {}", pattern);
  return TemporaryFolder(std::move(pattern));
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : path_(std::exchange(other.path_, {})), kept_(other.kept_) {}

TemporaryFolder::~TemporaryFolder() {
  if (path_.empty() || kept_) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace mk::tools
