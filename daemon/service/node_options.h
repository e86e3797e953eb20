/// \file
/// From a configuration and a machine to the engine's options.
#pragma once

#include "daemon/config/config.h"
#include "daemon/control/node.h"
#include "daemon/service/live_config.h"
#include "daemon/service/log.h"

namespace mk::daemon {

/// `logger` and `live` outlive the node. With `says`, it writes what it chose to the log.
Result<NodeOptions> node_options(const Config& config, const LiveConfig& live, Logger& logger,
                                 bool says);

}  // namespace mk::daemon
