// Any text as a configuration: an error with a place and a sentence, or values that print as text
// that parses to the same.
#include <cstdlib>
#include <string_view>

#include "daemon/config/config.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using mk::daemon::parse_config;
  using mk::daemon::print_config;
  const auto config =
      parse_config(std::string_view(reinterpret_cast<const char*>(data), bytes), "fuzz.toml", {});
  if (!config) {
    if (config.error().message.empty()) std::abort();
    return 0;
  }
  const std::string printed = print_config(*config);
  const auto again = parse_config(printed, "printed.toml", {});
  if (!again || print_config(*again) != printed) std::abort();
  return 0;
}
