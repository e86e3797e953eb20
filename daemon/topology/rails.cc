#include "daemon/topology/rails.h"

#include <algorithm>

namespace mk::topology {
namespace {

bool is_efa(const daemon::Config& config) { return config.fabric.ofi.provider.starts_with("efa"); }

/// Whether a rail's endpoint is one NIC's in particular.
bool chooses(const daemon::Config& config) {
  return config.fabric.name == "verbs" || (config.fabric.name == "ofi" && is_efa(config));
}

bool all_here(const daemon::Config& config) {
  return config.discovery.kind == "static" && config.listen.local() &&
         std::ranges::all_of(config.peers, [](const auto& peer) { return peer.address.local(); });
}

}  // namespace

ResolvedConfig resolve_fabric(const daemon::Config& config,
                              const std::function<fabric::Inventory()>& look) {
  ResolvedConfig resolved{config, {}};
  auto& fabric = resolved.config.fabric;
  if (fabric.name != "auto") return resolved;
  if (all_here(config)) {
    fabric.name = "loopback";
    resolved.why = config.peers.empty()
                       ? "loopback: the configuration names no other daemon, and nobody else can "
                         "reach this one"
                       : "loopback: all daemons of the configuration are on this machine";
    return resolved;
  }
  fabric::FabricChoice choice = fabric::choose_fabric(look());
  fabric.name = std::move(choice.fabric);
  if (!choice.provider.empty()) fabric.ofi.provider = std::move(choice.provider);
  resolved.why = std::move(choice.why);
  return resolved;
}

Result<std::vector<RailChoice>> choose_nics(const Machine& machine, const daemon::Config& asked) {
  const daemon::Config config = resolve_fabric(asked).config;
  if (config.fabric.name == "verbs") {
    return choose_nics(machine, NicKind::kVerbs, config.fabric.rails, config.fabric.verbs.devices);
  }
  const bool efa = config.fabric.name == "ofi" && is_efa(config);
  std::vector<std::string> by_name;
  if (efa && !config.fabric.ofi.bind.empty()) by_name = {config.fabric.ofi.bind};
  return choose_nics(machine, efa ? NicKind::kEfa : NicKind::kInterface, config.fabric.rails,
                     by_name);
}

std::vector<fabric::EndpointConfig> rail_endpoints(const daemon::Config& asked) {
  const daemon::Config config = resolve_fabric(asked).config;
  fabric::EndpointConfig common;
  common.fabric = config.fabric.name;
  common.link_model = {config.fabric.loopback.bandwidth_bytes_per_second,
                       config.fabric.loopback.latency_ns};
  common.provider = config.fabric.ofi.provider;
  common.bind_address = config.fabric.ofi.bind;
  common.verbs = config.fabric.verbs;
  std::vector<fabric::EndpointConfig> rails(config.fabric.rails, common);
  for (std::uint32_t rail = 0; rail < rails.size(); ++rail) rails[rail].rail = rail;
  const bool named = config.fabric.name == "verbs" ? !config.fabric.verbs.devices.empty()
                                                   : !config.fabric.ofi.bind.empty();
  if (!chooses(config) || named) return rails;
  const auto machine = read_machine();
  if (!machine || machine->gpus.empty()) return rails;
  const auto choices = choose_nics(*machine, config);
  if (!choices) return rails;  // opening the endpoint will say what is missing
  for (std::uint32_t rail = 0; rail < rails.size(); ++rail) {
    const std::string names = nic_names(*machine, (*choices)[rail]);
    rails[rail].nic_why = (*choices)[rail].why;
    if (config.fabric.name == "verbs") {
      rails[rail].verbs.devices.assign(1, names);
    } else {
      rails[rail].bind_address = names;
    }
  }
  return rails;
}

}  // namespace mk::topology
