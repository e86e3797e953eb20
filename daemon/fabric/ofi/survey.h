/// \file
/// What libfabric offers on this machine, for users, and which versions of it will do. Needs no
/// libfabric itself.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mk::fabric::ofi {

/// As FI_VERSION makes it.
constexpr std::uint32_t libfabric_version(std::uint32_t major, std::uint32_t minor) {
  return major << 16 | minor;
}
/// The least that the ofi fabric works with.
inline constexpr std::uint32_t kLibfabricFloor = libfabric_version(1, 17);
/// Before this, provider efa emulates remote writes.
inline constexpr std::uint32_t kEfaFloor = libfabric_version(1, 20);

struct Survey {
  std::string version;               ///< of libfabric: "1.17"
  std::uint32_t version_number = 0;  ///< as FI_VERSION makes it
  /// Name and version of each provider that can do what the ofi fabric needs, best first.
  std::vector<std::pair<std::string, std::string>> providers;
};
Survey survey();

}  // namespace mk::fabric::ofi
