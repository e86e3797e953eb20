/// \file
/// The verbs fabric: reliable connections over InfiniBand or RoCE, by libibverbs. The ordered
/// contract, or with `verbs.arrival = "immediate"` the unordered one. See README.md.
#pragma once

#include <memory>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {

Result<std::unique_ptr<Endpoint>> make_verbs_endpoint(const EndpointConfig& config);

}  // namespace mk::fabric
