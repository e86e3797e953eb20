/// \file
/// Descriptors of processes (pidfds): poll finds one readable once its process has ended with all
/// of its threads, even if others hold the process's sockets, and whatever pid namespace the looker
/// is in.
#pragma once

#include <sys/types.h>

#include <optional>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::shm {

/// Of a process in this pid namespace. kSystem where the kernel (before 5.3) or a sandbox refuses.
Result<UniqueFd> open_process(pid_t pid);
/// Of the process that connected the Unix socket `socket`, by SO_PEERPIDFD. kSystem where the
/// kernel (before 6.5) has no such option, or the process has been reaped.
Result<UniqueFd> peer_process(int socket);

/// Whether `fd` is a pidfd. Asks nothing of the file itself, so a foreign descriptor can't hold the
/// caller up.
bool is_process(int fd);
/// The pid of a pidfd's process as this process's /proc numbers it: 0 when the process is in
/// another pid namespace, -1 when it has been reaped; nullopt when /proc does not say.
std::optional<pid_t> pid_of(int process);

}  // namespace mk::shm
