#include "daemon/service/log.h"

#include <fmt/chrono.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace mk::daemon {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

constexpr std::size_t kAccountsMax = 256;  ///< users, and callers, with a budget of their own
constexpr std::chrono::minutes kAccountIdleTime(1);
constexpr std::size_t kHeldBackBytesMax = 200;  ///< of a sentence that stands for others
constexpr std::string_view kRefusedKind = "audit";
/// Callers and methods that are counted at a time: who has thousands of uids has a line for each.
constexpr std::size_t kRefusedEntriesMax = 1024;

std::string_view name_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "info";
}

/// syslog's numbers.
int priority_of(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return 7;
    case LogLevel::kInfo:
      return 6;
    case LogLevel::kWarning:
      return 4;
    case LogLevel::kError:
      return 3;
  }
  return 6;
}

std::string time_text(std::uint64_t unix_time_ns) {
  const auto seconds = static_cast<std::time_t>(unix_time_ns / 1'000'000'000);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(seconds),
                     unix_time_ns / 1'000'000 % 1000);
}

std::uint64_t now_unix_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::system_clock::now().time_since_epoch())
                                        .count());
}

/// Text from outside may hold anything; a line must stay one line and valid UTF-8 is not assumed.
std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

/// Bytes of the UTF-8 character at the front of `text`; 0 when it is none.
std::size_t utf8_bytes(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const std::size_t bytes = first < 0x80   ? 1
                            : first < 0xc2 ? 0
                            : first < 0xe0 ? 2
                            : first < 0xf0 ? 3
                            : first < 0xf5 ? 4
                                           : 0;
  if (bytes > text.size()) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  }
  return bytes;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const char c = text[0];
    std::size_t bytes = utf8_bytes(text);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    } else if (bytes == 0) {
      out += "\\ufffd";
    } else {
      out += text.substr(0, bytes);
    }
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return out + '"';
}

LogWriter::Entry journal_entry(const LoggerOptions& options, LogLevel level,
                               std::string_view message, const Fields& fields) {
  LogWriter::Entry entry;
  entry.push_back(fmt::format("MESSAGE={}", message));
  entry.push_back(fmt::format("PRIORITY={}", priority_of(level)));
  entry.push_back(fmt::format("SYSLOG_IDENTIFIER={}", options.name));
  entry.push_back(fmt::format("MKERNEL_NODE={}", options.node));
  for (const auto& [key, value] : fields) {
    std::string name = "MKERNEL_" + key;
    for (char& c : name) {
      c = std::isalnum(static_cast<unsigned char>(c))
              ? static_cast<char>(std::toupper(static_cast<unsigned char>(c)))
              : '_';
    }
    entry.push_back(fmt::format("{}={}", name, value));
  }
  return entry;
}

/// `options.format` is not kAuto.
LogWriter::Entry entry_of(const LoggerOptions& options, LogLevel level, std::string_view message,
                          const Fields& fields) {
  if (options.format == LogFormat::kJournald) return journal_entry(options, level, message, fields);
  std::string line = options.format == LogFormat::kJson
                         ? format_json_line(now_unix_ns(), options, level, message, fields)
                         : format_text_line(now_unix_ns(), options, level, message, fields);
  return {line + '\n'};
}

LogWriter::Options writer_options(const LoggerOptions& options) {
  return {.fd = options.format == LogFormat::kJournald ? -1 : options.fd,
          .bytes_max = options.queue_bytes_max,
          .lost = [options](std::uint64_t dropped, std::uint64_t audits) {
            return entry_of(options, LogLevel::kError,
                            fmt::format("{} log lines are lost, {} of them audits: nothing read "
                                        "the log for so long",
                                        dropped, audits),
                            {{"lost", std::to_string(dropped)}});
          }};
}

LoggerOptions resolved(LoggerOptions options) {
  options.format = resolve_log_format(options.format, options.fd);
  return options;
}

}  // namespace

LogFormat resolve_log_format(LogFormat format, int fd) {
  if (format != LogFormat::kAuto) return format;
  if (const char* stream = std::getenv("JOURNAL_STREAM")) {
    // "device:inode" of the socket that systemd gave us as stderr; a redirected fd does not match.
    struct stat status {};
    unsigned long long device = 0, inode = 0;
    if (::fstat(fd, &status) == 0 && std::sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
        device == status.st_dev && inode == status.st_ino) {
      return LogFormat::kJournald;
    }
  }
  return ::isatty(fd) ? LogFormat::kText : LogFormat::kJson;
}

LogLevel log_level_of(std::string_view name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

std::string format_text_line(std::uint64_t unix_time_ns, const LoggerOptions& options,
                             LogLevel level, std::string_view message, const Fields& fields) {
  std::string line = fmt::format("{} {:<7} {}[{}] {}", time_text(unix_time_ns), name_of(level),
                                 options.name, options.node, printable(message));
  for (const auto& [key, value] : fields) {
    // What the sentence says already is not repeated for users.
    if (message.find(value) != std::string_view::npos) continue;
    line += fmt::format(" {}={}", key, printable(value));
  }
  return line;
}

std::string format_json_line(std::uint64_t unix_time_ns, const LoggerOptions& options,
                             LogLevel level, std::string_view message, const Fields& fields) {
  std::string line = fmt::format(
      R"({{"time":"{}","level":"{}","program":{},"node":{},"message":{})", time_text(unix_time_ns),
      name_of(level), json_string(options.name), options.node, json_string(message));
  if (!fields.empty()) {
    line += ",\"fields\":{";
    for (std::size_t i = 0; i < fields.size(); ++i) {
      line += fmt::format("{}{}:{}", i ? "," : "", json_string(fields[i].first),
                          json_string(fields[i].second));
    }
    line += '}';
  }
  return line + '}';
}

Logger::Logger(LoggerOptions options)
    : options_(resolved(std::move(options))),
      level_(options_.level),
      writer_(writer_options(options_)) {}

Logger::~Logger() { tell_refused(); }

void Logger::write(LogLevel level, std::string_view message, const Fields& fields) {
  if (level >= level_.load(std::memory_order_relaxed)) emit(level, message, fields);
}

void Logger::write_limited(LogKind kind, LogLevel level, std::string_view message,
                           const Fields& fields) {
  if (level < level_.load(std::memory_order_relaxed)) return;
  std::uint64_t held_back = 0;
  {
    std::lock_guard lock(mutex_);
    if (!admit(account_of(users_, ""), false, {kind.name(), 0, kind.burst(), kind.refill()}, level,
               message, held_back)) {
      return;
    }
  }
  emit_admitted(level, message, fields, held_back);
}

void Logger::audit_refused(const std::string& caller, std::string_view method,
                           std::string_view message, const Fields& fields) {
  bool full = false;
  {
    std::lock_guard lock(mutex_);
    std::uint64_t held_back = 0;
    Account& account = account_of(callers_, caller);
    if (!admit(account, true, {kRefusedKind}, LogLevel::kWarning, message, held_back)) {
      // They are told by the ledger, which forgets nothing, and not by the account.
      account.kinds[{kRefusedKind, 0}].held_back = 0;
      Refused& entry = refused_[{caller, std::string(method)}];
      entry.last_unix_ns = now_unix_ns();
      if (entry.count++ == 0) entry.first_unix_ns = entry.last_unix_ns;
      if (refused_.size() < kRefusedEntriesMax) return;
      full = true;
    }
  }
  if (full) return tell_refused();
  emit(LogLevel::kWarning, message, fields, true);
}

void Logger::tell_refused() {
  decltype(refused_) told;
  {
    std::lock_guard lock(mutex_);
    told.swap(refused_);
  }
  for (const auto& [who, entry] : told) {
    const auto& [caller, method] = who;
    const std::string first = time_text(entry.first_unix_ns), last = time_text(entry.last_unix_ns);
    emit(LogLevel::kWarning,
         fmt::format("audit: refused {} to {}, {} more times from {} to {}", method, caller,
                     entry.count, first, last),
         {{"audit", method},
          {"who", caller},
          {"result", "refused"},
          {"count", std::to_string(entry.count)},
          {"first", first},
          {"last", last}},
         true);
  }
}

LogSink Logger::sink() {
  return [this](const LogRecord& record) {
    if (record.level < level_.load(std::memory_order_relaxed)) return;
    const std::string user = record.user ? std::to_string(*record.user) : "";
    std::uint64_t held_back = 0;
    {
      std::lock_guard lock(mutex_);
      if (!admit(account_of(users_, user), record.user.has_value(),
                 {record.where.file_name(), record.where.line()}, record.level, record.message,
                 held_back)) {
        return;
      }
    }
    emit_admitted(record.level, record.message, record.fields, held_back);
  };
}

void Logger::tell_held_back() {
  tell_refused();
  struct Line {
    LogLevel level;
    std::string text;
  };
  std::vector<Line> lines;
  {
    const auto now = std::chrono::steady_clock::now();
    std::lock_guard lock(mutex_);
    for (auto& [owner, account] : users_) {
      for (auto& [kind, budget] : account.kinds) {
        budget.refill(now, budget.burst, budget.per_token);
        if (budget.held_back == 0 || budget.tokens < 1) continue;
        budget.tokens -= 1;
        lines.push_back({budget.level, fmt::format("{} events were not logged, the last: {}",
                                                   std::exchange(budget.held_back, 0),
                                                   std::exchange(budget.last, {}))});
      }
    }
  }
  for (const Line& line : lines) emit(line.level, line.text, {});
}

void Logger::Bucket::refill(std::chrono::steady_clock::time_point now, double burst,
                            std::chrono::milliseconds per_token) {
  using Seconds = std::chrono::duration<double>;
  tokens = filled == std::chrono::steady_clock::time_point{}
               ? burst
               : std::min(burst, tokens + Seconds(now - filled) / Seconds(per_token));
  filled = now;
}

Logger::Account& Logger::account_of(Accounts& accounts, const std::string& owner) {
  if (const auto found = accounts.find(owner); found != accounts.end()) return found->second;
  if (accounts.size() >= kAccountsMax) {
    const auto now = std::chrono::steady_clock::now();
    std::erase_if(accounts, [now](const auto& entry) {
      return now - entry.second.all.filled > kAccountIdleTime &&
             std::ranges::all_of(entry.second.kinds,
                                 [](const auto& kind) { return kind.second.held_back == 0; });
    });
  }
  // One who has thousands of uids (a user namespace) does not have thousands of budgets.
  return accounts[accounts.size() >= kAccountsMax ? "others" : owner];
}

bool Logger::admit(Account& account, bool bounded_in_all, const Kind& kind, LogLevel level,
                   std::string_view message, std::uint64_t& held_back) {
  const auto now = std::chrono::steady_clock::now();
  Budget& budget = account.kinds[{kind.name, kind.line}];
  budget.burst = kind.burst != 0 ? kind.burst : options_.burst;
  budget.per_token = kind.burst != 0 ? kind.refill : options_.refill;
  budget.refill(now, budget.burst, budget.per_token);
  account.all.refill(now, options_.user_burst, options_.user_refill);
  if (budget.tokens < 1 || (bounded_in_all && account.all.tokens < 1)) {
    ++budget.held_back;
    budget.level = level;
    budget.last = message.substr(0, kHeldBackBytesMax);
    return false;
  }
  budget.tokens -= 1;
  if (bounded_in_all) account.all.tokens -= 1;
  held_back = std::exchange(budget.held_back, 0);
  return true;
}

void Logger::emit_admitted(LogLevel level, std::string_view message, const Fields& fields,
                           std::uint64_t held_back) {
  if (held_back == 0) return emit(level, message, fields);
  Fields more = fields;
  more.emplace_back("held_back", std::to_string(held_back));
  emit(level, fmt::format("{} ({} like it were not logged)", message, held_back), more);
}

void Logger::emit(LogLevel level, std::string_view message, const Fields& fields, bool audit) {
  writer_.push(entry_of(options_, level, message, fields), audit);
}

}  // namespace mk::daemon
