/// \file
/// What the engine tells people while it runs. The engine formats no logs and picks no backend: it
/// hands records to whoever hosts it (mkerneld's logger, a test, nobody).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace mk::daemon {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

/// One event: a sentence that stands alone, and the ids in it once more for machines, e.g. {"job",
/// "train"},
/// {"rank", "3"}.
struct LogRecord {
  LogLevel level = LogLevel::kInfo;
  std::string message;
  std::vector<std::pair<std::string, std::string>> fields;
};

/// Called on the control thread; must not block for long. May be empty.
using LogSink = std::function<void(const LogRecord&)>;

}  // namespace mk::daemon
