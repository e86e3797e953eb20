#include "daemon/config/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <span>

namespace mk::daemon {
namespace {

struct Unit {
  std::string_view name;
  double scale;
};

constexpr std::array<Unit, 4> kDurations{{{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}}};
constexpr std::array<Unit, 7> kBandwidths{{{"B/s", 1},
                                           {"KB/s", 1e3},
                                           {"MB/s", 1e6},
                                           {"GB/s", 1e9},
                                           {"Kbit/s", 125},
                                           {"Mbit/s", 125e3},
                                           {"Gbit/s", 125e6}}};
constexpr std::array<Unit, 9> kSizes{{{"B", 1},
                                      {"KiB", 0x1p10},
                                      {"MiB", 0x1p20},
                                      {"GiB", 0x1p30},
                                      {"TiB", 0x1p40},
                                      {"KB", 1e3},
                                      {"MB", 1e6},
                                      {"GB", 1e9},
                                      {"TB", 1e12}}};

constexpr double kBandwidthMax = 1e15;
constexpr double kSizeMax = 0x1p50;

/// The number before the unit times its scale; the error is only `allowed`.
Result<double> parse(std::string_view text, std::span<const Unit> units, std::string_view allowed,
                     double max) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || !std::isfinite(number) || number < 0 || std::signbit(number)) {
    return fail(ErrorCode::kInvalidArgument, "{}", allowed);
  }
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (unit.empty() && number == 0) return 0.0;
  for (const Unit& known : units) {
    if (known.name != unit) continue;
    const double value = number * known.scale;
    if (value > max) break;
    return value;
  }
  return fail(ErrorCode::kInvalidArgument, "{}", allowed);
}

/// The largest unit that prints `value` as a whole number.
std::string print(double value, std::span<const Unit> units) {
  const Unit* best = &units[0];
  for (const Unit& unit : units) {
    if (unit.scale > best->scale && std::fmod(value, unit.scale) == 0) best = &unit;
  }
  return fmt::format("{}{}", value / best->scale, best->name);
}

}  // namespace

Result<std::uint64_t> parse_duration_ns(std::string_view text, std::uint64_t most_ns) {
  const auto value =
      parse(text, kDurations,
            fmt::format(
                "a duration such as \"5us\" is expected: a number and ns, us, ms or s, at most {}",
                most_ns == kDayNs ? "a day" : format_duration(most_ns)),
            static_cast<double>(most_ns));
  if (!value) return propagate(value);
  return static_cast<std::uint64_t>(std::llround(*value));
}

Result<double> parse_bandwidth(std::string_view text) {
  if (text == "unlimited") return 0.0;
  return parse(text, kBandwidths,
               "a bandwidth such as \"2GB/s\" is expected: a number and B/s, KB/s, MB/s, GB/s, "
               "Kbit/s, Mbit/s or Gbit/s, or \"unlimited\"",
               kBandwidthMax);
}

Result<std::uint64_t> parse_size_bytes(std::string_view text) {
  if (text == "unlimited") return std::uint64_t{0};
  const auto value = parse(text, kSizes,
                           "a size such as \"16GiB\" is expected: a number and B, KiB, MiB, GiB, "
                           "TiB, KB, MB, GB or TB, or \"unlimited\"",
                           kSizeMax);
  if (!value) return propagate(value);
  return static_cast<std::uint64_t>(std::llround(*value));
}

std::string format_duration(std::uint64_t ns) { return print(static_cast<double>(ns), kDurations); }

std::string format_bandwidth(double bytes_per_second) {
  if (bytes_per_second == 0) return "unlimited";
  return print(bytes_per_second, std::span(kBandwidths).first(4));
}

std::string format_size(std::uint64_t bytes) {
  if (bytes == 0) return "unlimited";
  return print(static_cast<double>(bytes), std::span(kSizes).first(5));
}

}  // namespace mk::daemon
