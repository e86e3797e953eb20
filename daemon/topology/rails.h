/// \file
/// The rails of a configuration on a machine: which NICs, and what each endpoint is opened with.
/// The daemon, `mkctl topology` and the doctor ask here, so that they never disagree.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/fabric/choice.h"
#include "daemon/fabric/fabric.h"
#include "daemon/topology/nic_choice.h"

namespace mk::topology {

/// `config` with the fabric it means. Only "auto" is changed: to loopback where all daemons it
/// knows of are on this machine, else by `fabric::choose_fabric` of what `look` finds.
struct ResolvedConfig {
  daemon::Config config;
  std::string why;  ///< a sentence for the log; empty: the configuration says so itself
};
ResolvedConfig resolve_fabric(
    const daemon::Config& config,
    const std::function<fabric::Inventory()>& look = fabric::read_inventory);

// "auto" is resolved first in all of the following.

/// The NICs of every rail of `config`. Of a fabric that uses none in particular (loopback, tcp) the
/// nearest network interfaces, which are for people only.
Result<std::vector<RailChoice>> choose_nics(const Machine& machine, const daemon::Config& config);

/// By rail. Where the machine's GPUs decide about NICs and the configuration names none, they are
/// named here, several as "a+b"; otherwise the fabric's own rule decides when it is opened.
std::vector<fabric::EndpointConfig> rail_endpoints(const daemon::Config& config);

}  // namespace mk::topology
