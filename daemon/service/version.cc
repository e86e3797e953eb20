#include "daemon/service/version.h"

#include <fmt/format.h>

#include "mk_version.h"

namespace mk::daemon {

std::string version_text() { return MK_VERSION; }

std::string build_text() { return fmt::format("GCC {}, {}", __VERSION__, MK_BUILD_TYPE); }

std::vector<std::string> built_fabrics() {
  std::vector<std::string> names{"loopback", "null"};
#if MK_HAVE_OFI
  names.emplace_back("ofi");
#endif
  return names;
}

}  // namespace mk::daemon
