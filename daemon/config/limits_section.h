/// \file
/// The table [limits] of the configuration.
#pragma once

#include "daemon/config/config.h"
#include "daemon/config/reader.h"

namespace mk::daemon {

void read_limits(Section limits, Config& config);

}  // namespace mk::daemon
