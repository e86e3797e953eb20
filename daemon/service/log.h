/// \file
/// Structured logs: one event is a sentence and fields. Written as text for users, as JSON lines,
/// or to journald by its native protocol. Thread-safe; nobody waits for those who read the log.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/control/log.h"
#include "daemon/service/log_writer.h"

namespace mk::daemon {

/// What each event carries besides its own fields: whose it is.
struct LoggerOptions {
  LogLevel level = LogLevel::kInfo;       ///< events below are dropped; see set_level
  LogFormat format = LogFormat::kText;    ///< kAuto: see resolve_log_format
  int fd = 2;                             ///< for text and JSON; stays the caller's
  std::size_t queue_bytes_max = 1 << 20;  ///< lines that are not written yet; more are dropped
  std::string name = "mkerneld";
  std::uint32_t node = 0;
  /// Of one kind that one user causes: so many in a row, then one more per `refill`.
  std::uint32_t burst = 20;
  std::chrono::milliseconds refill{500};
  /// Of all kinds together that one user causes.
  std::uint32_t user_burst = 100;
  std::chrono::milliseconds user_refill{100};
};

/// What limited events are told apart by. Only a constant becomes one, so that nothing that a
/// client or a peer says can make kinds of its own.
class LogKind {
 public:
  consteval LogKind(const char* name) : name_(name) {}  // NOLINT: a literal is meant to convert
  /// With a limit of its own, for what repeats itself by itself: so many in a row, then one more
  /// per `refill`.
  consteval LogKind(const char* name, std::uint32_t burst, std::chrono::milliseconds refill)
      : name_(name), burst_(burst), refill_(refill) {}
  std::string_view name() const { return name_; }
  std::uint32_t burst() const { return burst_; }  ///< 0: LoggerOptions say
  std::chrono::milliseconds refill() const { return refill_; }

 private:
  std::string_view name_;
  std::uint32_t burst_ = 0;
  std::chrono::milliseconds refill_{0};
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
  /// The same, but events of one `kind` are limited in rate: what a client or a peer can cause at
  /// will. How many were held back is said with the next one, or by `tell_held_back`.
  void write_limited(LogKind kind, LogLevel level, std::string_view message,
                     const std::vector<std::pair<std::string, std::string>>& fields = {});
  /// Who changed what: written whatever the level, and never held back.
  void audit(std::string_view message,
             const std::vector<std::pair<std::string, std::string>>& fields) {
    emit(LogLevel::kInfo, message, fields, true);
  }
  /// Who tried to change what, and may not: whatever the level, too. Each `caller` has a budget of
  /// lines that nothing else uses. No attempt goes unsaid: those beyond the budget are counted by
  /// caller and `method`. One line says how many there were, whose, and from when to when.
  void audit_refused(const std::string& caller, std::string_view method, std::string_view message,
                     const std::vector<std::pair<std::string, std::string>>& fields);
  /// For the engine: each line of code that logs is a kind, and each user has a budget.
  LogSink sink();
  /// Writes how many events were held back since something was last said of them, where nothing
  /// like them has been written since; and all refused changes that have no line yet. Call it every
  /// few seconds; the destructor tells the last of these.
  void tell_held_back();
  /// Waits until all is written, at most so long. The destructor waits two seconds.
  bool flush(std::chrono::nanoseconds patience) { return writer_.flush(patience); }

 private:
  struct Bucket {
    double tokens = 0;
    std::chrono::steady_clock::time_point filled;

    void refill(std::chrono::steady_clock::time_point now, double burst,
                std::chrono::milliseconds per_token);
  };
  /// Of one kind.
  struct Budget : Bucket {
    std::uint32_t burst = 0;
    std::chrono::milliseconds per_token{0};
    std::uint64_t held_back = 0;
    LogLevel level = LogLevel::kInfo;
    std::string last;  ///< the beginning of the last one that was held back
  };
  /// Of one user, of one caller of the Admin service, or of the daemon itself.
  struct Account {
    Bucket all;
    std::map<std::pair<std::string_view, std::uint32_t>, Budget> kinds;  ///< by constant and line
  };
  using Accounts = std::map<std::string, Account>;
  /// Refused changes of one caller and method that have no line of their own.
  struct Refused {
    std::uint64_t count = 0, first_unix_ns = 0, last_unix_ns = 0;
  };
  struct Kind {
    std::string_view name;
    std::uint32_t line = 0;
    std::uint32_t burst = 0;  ///< 0: the options say
    std::chrono::milliseconds refill{0};
  };

  /// The account of `owner`; a common one when there are too many.
  static Account& account_of(Accounts& accounts, const std::string& owner);
  /// Whether one more may be written; `held_back` is how many were not, before it.
  bool admit(Account& account, bool bounded_in_all, const Kind& kind, LogLevel level,
             std::string_view message, std::uint64_t& held_back);
  void tell_refused();
  void emit_admitted(LogLevel level, std::string_view message,
                     const std::vector<std::pair<std::string, std::string>>& fields,
                     std::uint64_t held_back);
  void emit(LogLevel level, std::string_view message,
            const std::vector<std::pair<std::string, std::string>>& fields, bool audit = false);

  const LoggerOptions options_;  ///< with the format that kAuto stands for
  std::atomic<LogLevel> level_;
  std::mutex mutex_;
  Accounts users_;    ///< by uid; "": the daemon itself
  Accounts callers_;  ///< of the Admin service, for refused changes
  std::map<std::pair<std::string, std::string>, Refused> refused_;  ///< by caller and method
  LogWriter writer_;
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
