/// \file
/// Looks at this machine: fills Facts by really trying. Takes up to some seconds where a peer or a
/// port does not answer; leaves nothing behind.
#pragma once

#include <sys/types.h>

#include <functional>

#include "daemon/config/config.h"
#include "daemon/discovery/bystander.h"
#include "daemon/doctor/facts.h"

namespace mk::doctor {

/// Who the other nodes are: daemon::find_nodes, which brings gRPC with it. Empty: [[peer]] alone.
using FindNodes = std::function<Result<std::vector<daemon::Sighting>>(const daemon::Config&)>;

Facts gather(const daemon::Config& config, const std::string& version, const FindNodes& find);

// -- its parts, each of which fills its own fields --
void probe_host(Facts& facts);
void probe_verbs(const daemon::Config& config, Facts& facts);
void probe_ofi(Facts& facts);
void probe_topology(const daemon::Config& config, Facts& facts);
void probe_daemon(const daemon::Config& config, Facts& facts);
/// After probe_daemon: of the daemon that runs, else of this process.
void probe_memlock(const daemon::Config& config, Facts& facts);
/// After probe_memlock: of the same process.
void probe_client_limits(const daemon::Config& config, Facts& facts);
/// The same.
void probe_spin(const daemon::Config& config, Facts& facts);
void probe_tls(const daemon::Config& config, Facts& facts);
void probe_peers(const daemon::Config& config, const FindNodes& find, Facts& facts);
void probe_write(const daemon::Config& config, Facts& facts);

/// How much a process may lock, in bytes; UINT64_MAX: unlimited.
Result<std::uint64_t> memlock_of(pid_t pid);
/// Whether a process may lock memory whatever that limit says, by CAP_IPC_LOCK. Its `status` and
/// `uid_map` of proc(5).
bool locks_without_limit(const std::string& status, const std::string& uid_map);
/// The same of open files.
Result<std::uint64_t> open_files_of(pid_t pid);

}  // namespace mk::doctor
