/// \file
/// Structured logs: one event is a sentence and fields. Written as text for people, as JSON lines,
/// or to journald by its native protocol. Thread-safe; a writer waits at most for another's line.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/control/log.h"

namespace mk::daemon {

/// What each event carries besides its own fields: whose it is.
struct LoggerOptions {
  LogLevel level = LogLevel::kInfo;     ///< events below are dropped; see set_level
  LogFormat format = LogFormat::kText;  ///< kAuto: see resolve_log_format
  int fd = 2;                           ///< for text and JSON; stays the caller's
  std::string name = "mkerneld";
  std::uint32_t node = 0;
  std::uint32_t burst = 20;               ///< events of one kind in a row before they are held back
  std::chrono::milliseconds refill{500};  ///< then one more per this time
};

/// kAuto becomes journald when the fd is systemd's journal stream (JOURNAL_STREAM), text when it is
/// a terminal, JSON otherwise; the rest stays.
LogFormat resolve_log_format(LogFormat format, int fd);
LogLevel log_level_of(std::string_view name);  ///< of Config::log.level

class Logger {
 public:
  explicit Logger(LoggerOptions options);
  ~Logger();

  void set_level(LogLevel level) { level_.store(level, std::memory_order_relaxed); }

  void write(LogLevel level, std::string_view message,
             const std::vector<std::pair<std::string, std::string>>& fields = {});
  /// The same, but events of one `kind` (a constant of the caller's) are limited in rate: what a
  /// client or a peer can cause at will. How many were held back is said with the next one.
  void write_limited(std::string_view kind, LogLevel level, std::string_view message,
                     const std::vector<std::pair<std::string, std::string>>& fields = {});
  /// Who changed what: written whatever the level, and never held back.
  void audit(std::string_view message,
             const std::vector<std::pair<std::string, std::string>>& fields) {
    emit(LogLevel::kInfo, message, fields);
  }
  /// For the engine: limited by the sentence with its digits left out, since clients cause most of
  /// it.
  LogSink sink();

 private:
  struct Bucket {
    double tokens = 0;
    std::chrono::steady_clock::time_point filled;
    std::uint64_t held_back = 0;
  };
  /// Whether one more of `kind` may be written; `held_back` is how many were not, before it.
  bool admit(std::string_view kind, std::uint64_t& held_back);
  void emit(LogLevel level, std::string_view message,
            const std::vector<std::pair<std::string, std::string>>& fields);

  const LoggerOptions options_;
  const LogFormat format_;
  std::atomic<LogLevel> level_;
  std::mutex mutex_;
  std::unordered_map<std::string, Bucket> buckets_;
};

/// One line of each format, without the newline; time in ns of CLOCK_REALTIME. For the logger and
/// its tests.
std::string format_text_line(std::uint64_t unix_time_ns, const LoggerOptions& options,
                             LogLevel level, std::string_view message,
                             const std::vector<std::pair<std::string, std::string>>& fields);
std::string format_json_line(std::uint64_t unix_time_ns, const LoggerOptions& options,
                             LogLevel level, std::string_view message,
                             const std::vector<std::pair<std::string, std::string>>& fields);

}  // namespace mk::daemon
