/// \file
/// Quantities as people write them: "5us", "2GB/s", "16GiB". Parsing and printing are inverse.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shm/host/result.h"

namespace mk::daemon {

inline constexpr std::uint64_t kDayNs = 86'400'000'000'000;

/// A duration in ns: a number and ns, us, ms or s; a bare 0 is allowed. Fractions are rounded to
/// whole nanoseconds. Errors (kInvalidArgument) say what is allowed, without naming a key.
Result<std::uint64_t> parse_duration_ns(std::string_view text, std::uint64_t most_ns = kDayNs);
/// Bytes per second: a number and B/s, KB/s, MB/s, GB/s (powers of ten), or Kbit/s, Mbit/s, Gbit/s;
/// "unlimited" is 0.
Result<double> parse_bandwidth(std::string_view text);
/// A size in bytes: a number and B, KiB, MiB, GiB, TiB or KB, MB, GB, TB; "unlimited" is 0.
Result<std::uint64_t> parse_size_bytes(std::string_view text);

std::string format_duration(std::uint64_t ns);
std::string format_bandwidth(double bytes_per_second);
std::string format_size(std::uint64_t bytes);

}  // namespace mk::daemon
