/// \file
/// What this build is.
#pragma once

#include <string>
#include <vector>

namespace mk::daemon {

std::string version_text();                ///< "0.1.0"
std::string build_text();                  ///< compiler and build type, for users
std::vector<std::string> built_fabrics();  ///< names that fabric.name takes in this build

}  // namespace mk::daemon
