/// \file
/// What libfabric offers on this machine, for people.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace mk::fabric::ofi {

struct Survey {
  std::string version;               ///< of libfabric: "1.17"
  std::uint32_t version_number = 0;  ///< as FI_VERSION makes it
  /// Name and version of each provider that can do what the ofi fabric needs, best first.
  std::vector<std::pair<std::string, std::string>> providers;
};
Survey survey();

}  // namespace mk::fabric::ofi
