/// \file
/// Standard output of a program for users. Printing never throws and never stops a program; that
/// something could not be written is told at the end, by the exit status.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace mk {

void print_out(std::string_view text);
template <class... Args>
void print_out(fmt::format_string<Args...> format, Args&&... args) {
  print_out(std::string_view(fmt::format(format, std::forward<Args>(args)...)));
}

/// Hands on what was printed so far. False: something of it could not be written, now or before, so
/// that a program that prints without end should stop.
bool flush_output();

/// The exit status of `main`: `code`, or 1 where that is 0 and something could not be written. Says
/// so on standard error, as `program`.
int finish_output(const char* program, int code);

}  // namespace mk
