/// \file
/// Where the Admin service listens on its own, and who may connect there.
#pragma once

#include <sys/types.h>

#include <optional>

#include "daemon/config/config.h"
#include "daemon/service/grpc_server.h"
#include "daemon/service/log.h"

namespace mk::daemon {

/// The group of admin.group, none where that is empty. kNotFound when this machine has no such one.
Result<std::optional<gid_t>> admin_group(const Config& config);

/// For the Admin service's own socket, without services; its address is empty where there is none.
/// `book` and `logger` outlive the listener. kNotFound when the machine lacks admin.group.
Result<GrpcListenOptions> admin_options(const Config& config, ConnectionBook& book, Logger& logger);

/// Makes the folder of an "auto" socket unless it is there. Listening says what is wrong with it.
void make_admin_folder(const Config& config);

}  // namespace mk::daemon
