/// \file
/// A line of our own source: where a record was made. As std::source_location, which Clang 14 does
/// not have with GCC 12's library.
#pragma once

#include <cstdint>

namespace mk::daemon {

class SourceLine {
 public:
  constexpr SourceLine() = default;
  /// Of the caller, where it is a default argument or a default member initialiser.
  static constexpr SourceLine current(
      const char* file = __builtin_FILE(),
      std::uint32_t line = static_cast<std::uint32_t>(__builtin_LINE())) {
    return SourceLine(file, line);
  }
  /// Lives for ever.
  constexpr const char* file_name() const { return file_; }
  constexpr std::uint32_t line() const { return line_; }

 private:
  constexpr SourceLine(const char* file, std::uint32_t line) : file_(file), line_(line) {}

  const char* file_ = "";
  std::uint32_t line_ = 0;
};

}  // namespace mk::daemon
