/// \file
/// [[gpu]] of the configuration: rails of GPUs.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "daemon/config/reader.h"

namespace mk::daemon {

/// Reads all of them; see Config::gpu_rails.
void read_gpus(Section& root, std::map<std::string, std::uint32_t>& into);

}  // namespace mk::daemon
