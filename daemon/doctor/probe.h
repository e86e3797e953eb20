/// \file
/// Looks at this machine: fills Facts by really trying. Takes up to some seconds where a peer or a
/// port does not answer; leaves nothing behind.
#pragma once

#include "daemon/config/config.h"
#include "daemon/doctor/facts.h"

namespace mk::doctor {

Facts gather(const daemon::Config& config, const std::string& version);

// -- its parts, each of which fills its own fields --
void probe_host(Facts& facts);
void probe_verbs(const daemon::Config& config, Facts& facts);
void probe_ofi(Facts& facts);
void probe_topology(const daemon::Config& config, Facts& facts);
void probe_daemon(const daemon::Config& config, Facts& facts);
void probe_peers(const daemon::Config& config, Facts& facts);
void probe_write(const daemon::Config& config, Facts& facts);

}  // namespace mk::doctor
