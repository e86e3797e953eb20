/// \file
/// Where log lines go, on a thread of their own: a pipe that nobody reads, or a journal that hangs,
/// holds up nobody who logs.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mk::daemon {

/// Thread-safe.
class LogWriter {
 public:
  /// An entry of journald, part by part; otherwise the one part is the line.
  using Entry = std::vector<std::string>;
  struct Options {
    int fd = 2;  ///< of lines; -1: entries go to journald
    /// Waiting entries have as many bytes at most, and as many more are for audits alone.
    std::size_t bytes_max = 1 << 20;
    /// Makes the line for when there is room again: so many were dropped, so many of them audits.
    /// On any thread, also when the owner has gone.
    std::function<Entry(std::uint64_t dropped, std::uint64_t audits)> lost;
  };

  explicit LogWriter(Options options);
  /// Flushes for at most two seconds. What is left then is not written.
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  /// Never blocks. An entry that finds no room is dropped, and counted.
  void push(Entry entry, bool audit);
  /// Whether all that was pushed is written; waits at most so long for it.
  bool flush(std::chrono::nanoseconds patience);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  const std::shared_ptr<State> state_;
};

}  // namespace mk::daemon
