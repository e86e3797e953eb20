/// \file
/// A check of numbers on the command line that says what is allowed: CLI::PositiveNumber names the
/// limits of double, with 309 digits.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>
#include <string>

namespace mk::bench {

inline CLI::Validator at_least_one() {
  return {[](std::string& text) {
            return std::strtod(text.c_str(), nullptr) >= 1 ? std::string{}
                                                           : std::string{"must be at least 1"};
          },
          "AT LEAST 1"};
}

inline CLI::Validator more_than_0() {
  return {[](std::string& text) {
            const double value = std::strtod(text.c_str(), nullptr);
            return value > 0 && std::isfinite(value) ? std::string{}
                                                     : std::string{"must be more than 0"};
          },
          "MORE THAN 0"};
}

inline CLI::Validator at_least_0() {
  return {[](std::string& text) {
            const double value = std::strtod(text.c_str(), nullptr);
            return value >= 0 && std::isfinite(value) ? std::string{}
                                                      : std::string{"must be at least 0"};
          },
          "AT LEAST 0"};
}

/// An option whose value, a number, is at least 1.
template <class Number>
void add_positive(CLI::App& command, const char* flag, Number& value, const char* text) {
  command.add_option(flag, value, text)->check(at_least_one())->capture_default_str();
}

}  // namespace mk::bench
