/// \file
/// Who listens at the socket that this process connects to. A process that gets an Attach learns
/// the job's secret and can map its buffers, so it must be the daemon.
#pragma once

#include <string>

#include "shm/host/result.h"
#include "shm/host/unix_socket.h"

namespace mk::client {

/// Refuses (kPermission) a listener that is neither root (systemd holds the socket, or the daemon
/// is root), nor this process's own user, nor the user "mkernel", nor the one of
/// MKERNEL_DAEMON_UID, which replaces "mkernel".
Status check_listener(const shm::FrameSocket& socket, const std::string& path);

}  // namespace mk::client
