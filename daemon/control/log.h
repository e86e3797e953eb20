/// \file
/// What the engine tells people while it runs. The engine formats no logs and picks no backend: it
/// hands records to its host (mkerneld's logger, a test, nobody).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/control/source_line.h"

namespace mk::daemon {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

/// One event: a sentence that stands alone, and the ids in it once more for machines, e.g. {"job",
/// "train"},
/// {"rank", "3"}.
struct LogRecord {
  LogLevel level = LogLevel::kInfo;
  std::string message;
  std::vector<std::pair<std::string, std::string>> fields;
  /// The user whose client caused it: each user has a budget of lines. None: the daemon itself.
  std::optional<std::uint32_t> user = std::nullopt;
  /// The line of code that says it, which is its kind: a constant that no client can choose.
  SourceLine where = SourceLine::current();
};

/// Called on the control thread; must not block for long. May be empty.
using LogSink = std::function<void(const LogRecord&)>;

}  // namespace mk::daemon
