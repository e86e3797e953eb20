/// \file
/// The fabric that moves nothing: it takes every write and completes it on the next poll. For
/// benchmarks of what lies above it.
#pragma once

#include <memory>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {

/// Never fails; `config` gives nothing but its rail.
std::unique_ptr<Endpoint> make_null_endpoint(const EndpointConfig& config);

}  // namespace mk::fabric
