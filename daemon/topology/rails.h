/// \file
/// The rails of a configuration on a machine: how many, which NICs, and what each endpoint is
/// opened with. The daemon, `mkctl topology` and the doctor ask here, so that they never disagree.
#pragma once

#include <functional>
#include <map>
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
  std::string why;        ///< a sentence for the log; empty: the configuration says so itself
  std::string trouble{};  ///< a sentence to warn of; empty: nothing
};
ResolvedConfig resolve_fabric(
    const daemon::Config& config,
    const std::function<fabric::Inventory()>& look = fabric::read_inventory);

// "auto" is resolved first in all of the following.

/// How many rails `config` has on `machine`. "auto" is one per entry where the configuration names
/// NICs; else, where a rail is some NIC's (verbs, EFA) and the machine has one, one per GPU;
/// else 1.
std::uint32_t rail_count(const Machine& machine, const daemon::Config& config);

/// The NICs of every rail of `config`. Of a fabric that uses none in particular (loopback, tcp) the
/// nearest network interfaces, which are for users only.
Result<std::vector<RailChoice>> choose_nics(const Machine& machine, const daemon::Config& config);

/// What a daemon opens.
struct RailPlan {
  /// By rail. NICs that the configuration does not name are named here, several as "a+b". Over
  /// verbs without GPUs, and where hwloc sees no NIC, the fabric's own rule decides when an
  /// endpoint is opened.
  std::vector<fabric::EndpointConfig> endpoints;
  std::string why;     ///< so many, for the log; empty: the configuration or the fabric says so
  std::string unused;  ///< NICs near GPUs that too few rails leave idle, for a warning; empty: none
};
/// kInvalidArgument: what the configuration lists by rail does not fit their number. The machine is
/// looked at only where it matters.
Result<RailPlan> plan_rails(
    const daemon::Config& config,
    const std::function<Result<Machine>()>& read = [] { return read_machine(); });

/// Of each GPU, by its bus id, the rails on the NICs nearest to it. Nothing of a fabric whose rails
/// are no NICs in particular, and of a machine without GPUs.
std::map<std::string, std::vector<std::uint32_t>> rails_by_gpu(const Machine& machine,
                                                               const daemon::Config& config);

/// By NUMA domain, the rails whose first NIC is there; else as above.
std::map<std::uint32_t, std::vector<std::uint32_t>> rails_by_numa(const Machine& machine,
                                                                  const daemon::Config& config);
/// The rails of the domain in which most of `cpus` are. None where that is not more than half of
/// them, or the machine says nothing.
std::vector<std::uint32_t> rails_near_cpus(
    const std::map<std::uint32_t, std::uint32_t>& numa_of_cpu,
    const std::map<std::uint32_t, std::vector<std::uint32_t>>& rails,
    const std::vector<std::uint32_t>& cpus);

}  // namespace mk::topology
