/// \file
/// The ofi fabric: any libfabric provider with remote writes and remote CQ data. Unordered
/// contract. See README.md.
#pragma once

#include <memory>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {

Result<std::unique_ptr<Endpoint>> make_ofi_endpoint(const EndpointConfig& config);

}  // namespace mk::fabric
