#include "daemon/service/log_writer.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/uio.h>
#define SD_JOURNAL_SUPPRESS_LOCATION
#include <systemd/sd-journal.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "shm/host/unique_fd.h"

namespace mk::daemon {
namespace {

constexpr auto kLastLinesTime = std::chrono::seconds(2);

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nowhere left to complain
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

void send_to_journal(LogWriter::Entry& entry) {
  std::vector<iovec> parts;
  for (std::string& part : entry) parts.push_back({part.data(), part.size()});
  ::sd_journal_sendv(parts.data(), static_cast<int>(parts.size()));
}

std::size_t bytes_of(const LogWriter::Entry& entry) {
  std::size_t bytes = 0;
  for (const std::string& part : entry) bytes += sizeof(std::string) + part.size();
  return bytes;
}

}  // namespace

struct LogWriter::State {
  Options options;
  UniqueFd fd;  ///< of our own: the caller may close its, and another file get that number
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Entry> waiting;
  std::size_t bytes = 0;
  std::uint64_t dropped = 0, dropped_audits = 0;  ///< not told yet
  bool writing = false;
  bool ending = false;    ///< nothing more comes
  bool given_up = false;  ///< nothing more is written

  bool idle() const { return waiting.empty() && dropped == 0 && !writing; }
  void add(Entry entry) {
    bytes += bytes_of(entry);
    waiting.push_back(std::move(entry));
  }
  void tell_dropped() {
    if (dropped == 0) return;
    add(options.lost(std::exchange(dropped, 0), std::exchange(dropped_audits, 0)));
  }
};

LogWriter::LogWriter(Options options) : state_(std::make_shared<State>()) {
  state_->options = std::move(options);
  if (state_->options.fd >= 0)
    state_->fd.reset(::fcntl(state_->options.fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  // Not joined: a pipe that nobody reads keeps it for ever. It owns what it uses.
  std::thread([state = state_] { run(state); }).detach();
}

LogWriter::~LogWriter() {
  std::unique_lock lock(state_->mutex);
  state_->ending = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kLastLinesTime, [this] { return state_->idle(); });
  state_->given_up = true;
}

void LogWriter::push(Entry entry, bool audit) {
  std::lock_guard lock(state_->mutex);
  const std::size_t room = state_->options.bytes_max * (audit ? 2 : 1);
  if (state_->bytes + bytes_of(entry) > room) {
    ++state_->dropped;
    state_->dropped_audits += audit ? 1 : 0;
    return;
  }
  state_->tell_dropped();
  state_->add(std::move(entry));
  state_->changed.notify_all();
}

bool LogWriter::flush(std::chrono::nanoseconds patience) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, patience, [this] { return state_->idle(); });
}

void LogWriter::run(const std::shared_ptr<State>& state) {
  ::pthread_setname_np(::pthread_self(), "mk-log");
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&state] { return !state->waiting.empty() || state->ending; });
    if (state->waiting.empty() || state->given_up) return;
    Entry entry = std::move(state->waiting.front());
    state->waiting.pop_front();
    state->bytes -= bytes_of(entry);
    if (state->waiting.empty()) state->tell_dropped();
    state->writing = true;
    lock.unlock();
    if (state->options.fd < 0) {
      send_to_journal(entry);
    } else {
      write_all(state->fd.get(), entry.front());  // one write: a line stays whole
    }
    lock.lock();
    state->writing = false;
    state->changed.notify_all();
  }
}

}  // namespace mk::daemon
