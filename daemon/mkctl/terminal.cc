#include "daemon/mkctl/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <utility>

namespace mk::mkctl {
namespace {

constexpr std::string_view kEnter = "\x1b[?1049h\x1b[?25l";  // another screen, no cursor
constexpr std::string_view kLeave = "\x1b[?25h\x1b[?1049l";

termios saved_settings;
int signal_pipe[2] = {-1, -1};
constexpr std::array kSignals{SIGWINCH, SIGINT, SIGTERM, SIGHUP};
struct sigaction saved_actions[kSignals.size()];

void on_signal(int number) {
  const int saved = errno;
  const char byte = number == SIGWINCH ? 'w' : 'e';
  [[maybe_unused]] const ssize_t written = ::write(signal_pipe[1], &byte, 1);
  errno = saved;
}

void put(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written < 0 && errno != EINTR && errno != EAGAIN) return;
    if (written > 0) text.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace

std::vector<int> parse_keys(std::string& bytes, bool all) {
  static constexpr std::pair<std::string_view, int> kSequences[] = {
      {"\x1b[A", kKeyUp},   {"\x1b[B", kKeyDown},    {"\x1bOA", kKeyUp},
      {"\x1bOB", kKeyDown}, {"\x1b[5~", kKeyPageUp}, {"\x1b[6~", kKeyPageDown},
  };
  std::vector<int> keys;
  while (!bytes.empty()) {
    if (bytes[0] != '\x1b') {
      keys.push_back(static_cast<unsigned char>(bytes[0]));
      bytes.erase(0, 1);
      continue;
    }
    const auto* known = std::find_if(std::begin(kSequences), std::end(kSequences),
                                     [&](const auto& one) { return bytes.starts_with(one.first); });
    if (known != std::end(kSequences)) {
      keys.push_back(known->second);
      bytes.erase(0, known->first.size());
      continue;
    }
    if (bytes.size() == 1 && !all) break;
    if (bytes.size() == 1 || (bytes[1] != '[' && bytes[1] != 'O')) {
      keys.push_back(kKeyEscape);
      bytes.erase(0, 1);
      continue;
    }
    // Some other sequence: up to its final letter, and no key of ours.
    std::size_t end = 2;
    while (end < bytes.size() && (bytes[end] < 0x40 || bytes[end] > 0x7e)) ++end;
    if (end == bytes.size()) {
      if (!all) break;
      bytes.clear();
    } else {
      bytes.erase(0, end + 1);
    }
  }
  return keys;
}

Result<Terminal> Terminal::open() {
  if (::isatty(STDIN_FILENO) == 0 || ::isatty(STDOUT_FILENO) == 0) {
    return fail(ErrorCode::kUnsupported,
                "this needs a terminal; for scripts: --json, or mkctl stats");
  }
  if (::tcgetattr(STDIN_FILENO, &saved_settings) != 0) return fail_errno(errno, "tcgetattr");
  if (::pipe2(signal_pipe, O_CLOEXEC | O_NONBLOCK) != 0) return fail_errno(errno, "pipe2");
  struct sigaction action {};
  action.sa_handler = on_signal;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &action, &saved_actions[i]);
  }
  termios raw = saved_settings;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  raw.c_iflag &= ~static_cast<tcflag_t>(IXON | ICRNL);
  raw.c_cc[VMIN] = 0;
  raw.c_cc[VTIME] = 0;
  ::tcsetattr(STDIN_FILENO, TCSAFLUSH, &raw);
  put(kEnter);
  Terminal terminal;
  terminal.owns_ = true;
  return terminal;
}

Terminal::Terminal(Terminal&& other) noexcept
    : owns_(std::exchange(other.owns_, false)), pending_(std::move(other.pending_)) {}

Terminal::~Terminal() {
  if (!owns_) return;
  put(kLeave);
  ::tcsetattr(STDIN_FILENO, TCSAFLUSH, &saved_settings);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &saved_actions[i], nullptr);
  }
  for (int& fd : signal_pipe) ::close(std::exchange(fd, -1));
}

ScreenSize Terminal::size() const {
  winsize window{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_row == 0) return {};
  return {window.ws_row, window.ws_col};
}

void Terminal::show(const std::vector<std::string>& lines) {
  // Line by line over what is there, each to its end: nothing flickers.
  std::string text = "\x1b[H";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    text += (i == 0 ? "" : "\r\n") + lines[i] + "\x1b[K";
  }
  text += "\x1b[J";
  put(text);
}

Terminal::Event Terminal::wait(int wake_fd, std::chrono::milliseconds patience) {
  Event event;
  pollfd fds[] = {{STDIN_FILENO, POLLIN, 0}, {signal_pipe[0], POLLIN, 0}, {wake_fd, POLLIN, 0}};
  // What may be the beginning of a longer key waits for the rest of it only for a moment.
  constexpr int kRestOfKeyMs = 50;
  const int timeout_ms = pending_.empty() ? static_cast<int>(patience.count()) : kRestOfKeyMs;
  const int ready = ::poll(fds, 3, timeout_ms);
  if (ready <= 0) {
    event.keys = parse_keys(pending_, true);
    return event;
  }
  char bytes[64];
  if ((fds[0].revents & POLLIN) != 0) {
    const ssize_t count = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (count == 0) event.ended = true;
    if (count > 0) pending_.append(bytes, static_cast<std::size_t>(count));
    event.keys = parse_keys(pending_, false);
  } else if ((fds[0].revents & (POLLHUP | POLLERR)) != 0) {
    event.ended = true;
  }
  if (fds[1].revents != 0) {
    const ssize_t count = ::read(signal_pipe[0], bytes, sizeof bytes);
    for (ssize_t i = 0; i < count; ++i) event.ended = event.ended || bytes[i] == 'e';
  }
  event.woken = fds[2].revents != 0;
  return event;
}

}  // namespace mk::mkctl
