/// \file
/// What this build is.
#pragma once

#include <string>
#include <vector>

namespace mk::daemon {

std::string version_text();                ///< "0.1.0", or with a revision (MK_REVISION)
std::string build_text();                  ///< compiler and build type, for users
std::vector<std::string> built_fabrics();  ///< names that fabric.name takes in this build

}  // namespace mk::daemon
