#include "daemon/topology/rails.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

namespace mk::topology {
namespace {

bool is_efa(const daemon::Config& config) {
  return config.fabric.name == "ofi" && config.fabric.ofi.provider.starts_with("efa");
}

/// The NICs that a rail of this fabric can be of; nothing where it is no NIC's in particular.
std::optional<NicKind> kind_of(const daemon::Config& config) {
  if (config.fabric.name == "verbs") return NicKind::kVerbs;
  if (is_efa(config)) return NicKind::kEfa;
  return std::nullopt;
}

/// What the configuration names the rails' NICs, in turn.
std::vector<std::string> names_of(const daemon::Config& config) {
  if (config.fabric.name == "verbs") return config.fabric.verbs.devices;
  if (config.fabric.name == "ofi") return config.fabric.ofi.bind;
  return {};
}

std::uint32_t count(const Machine* machine, const daemon::Config& config) {
  if (config.fabric.rails != daemon::kRailsAuto) return config.fabric.rails;
  if (const auto names = names_of(config); !names.empty())
    return static_cast<std::uint32_t>(names.size());
  const auto kind = kind_of(config);
  if (!kind || machine == nullptr) return 1;
  const auto choices = choose_nics(*machine, *kind, 0, {});
  return choices ? static_cast<std::uint32_t>(choices->size()) : 1;
}

/// Those that serve some rail.
std::set<std::uint32_t> nics_of(const std::vector<RailChoice>& choices) {
  std::set<std::uint32_t> nics;
  for (const RailChoice& choice : choices) nics.insert(choice.nics.begin(), choice.nics.end());
  return nics;
}

/// Which NICs stay idle because the configuration has fewer rails than "auto" would be.
std::string unused_nics(const Machine& machine, NicKind kind,
                        const std::vector<RailChoice>& choices) {
  const auto all = choose_nics(machine, kind, 0, {});
  if (machine.gpus.empty() || !all || all->size() <= choices.size()) return {};
  const std::set<std::uint32_t> used = nics_of(choices);
  std::vector<std::string> idle;
  for (const std::uint32_t nic : nics_of(*all)) {
    if (!used.contains(nic)) idle.push_back(machine.nics[nic].name());
  }
  if (idle.empty()) return {};
  return fmt::format(
      "fabric.rails is {}, and {} near this machine's {} GPUs stay{} idle: {}; set fabric.rails = "
      "\"auto\" on all nodes, which is {} here",
      choices.size(), idle.size() == 1 ? "a NIC" : fmt::format("{} NICs", idle.size()),
      machine.gpus.size(), idle.size() == 1 ? "s" : "", fmt::join(idle, ", "), all->size());
}

/// What the configuration lists by rail; its own check cannot know what "auto" is.
Status check_lists(const daemon::Config& config, std::uint32_t rails) {
  for (const auto& [gpu, rail] : config.gpu_rails) {
    if (rail < rails) continue;
    return fail(ErrorCode::kInvalidArgument,
                "gpu {}: rail {}, but this machine has {} (fabric.rails = \"auto\"): 0 to {} are "
                "possible, or set fabric.rails",
                gpu, rail, rails, rails - 1);
  }
  const std::size_t cpus = config.proxy.cpus.size();
  if (cpus == 0 || cpus == rails) return {};
  return fail(ErrorCode::kInvalidArgument,
              "proxy.cpus: {} entries for {} rails (fabric.rails = \"auto\"); one per rail is "
              "expected, or fabric.rails = {}",
              cpus, rails, cpus);
}

bool all_here(const daemon::Config& config) {
  return config.discovery.kind == "static" && config.listen.local() &&
         std::ranges::all_of(config.peers, [](const auto& peer) { return peer.address.local(); });
}

}  // namespace

ResolvedConfig resolve_fabric(const daemon::Config& config,
                              const std::function<fabric::Inventory()>& look) {
  ResolvedConfig resolved{config, {}, {}};
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
  resolved.trouble = std::move(choice.trouble);
  return resolved;
}

std::uint32_t rail_count(const Machine& machine, const daemon::Config& config) {
  return count(&machine, resolve_fabric(config).config);
}

Result<std::vector<RailChoice>> choose_nics(const Machine& machine, const daemon::Config& asked) {
  const daemon::Config config = resolve_fabric(asked).config;
  const std::uint32_t rails = count(&machine, config);
  const auto names = names_of(config);
  if (const auto kind = kind_of(config)) return choose_nics(machine, *kind, rails, names);
  auto choices = choose_nics(machine, NicKind::kInterface, rails, names);
  // Other providers are bound to addresses as well.
  if (!choices && choices.error().code == ErrorCode::kNotFound)
    choices = choose_nics(machine, NicKind::kInterface, rails, {});
  return choices;
}

Result<RailPlan> plan_rails(const daemon::Config& asked,
                            const std::function<Result<Machine>()>& read) {
  const daemon::Config config = resolve_fabric(asked).config;
  const auto names = names_of(config);
  const auto kind = kind_of(config);
  Result<Machine> machine = fail(ErrorCode::kUnavailable, "not looked at");
  if (kind && names.empty()) machine = read();
  const std::uint32_t rails = count(machine ? &*machine : nullptr, config);
  MK_RETURN_IF_ERROR(check_lists(config, rails));

  RailPlan plan;
  fabric::EndpointConfig common;
  common.fabric = config.fabric.name;
  common.link_model = {config.fabric.loopback.bandwidth_bytes_per_second,
                       config.fabric.loopback.latency_ns};
  common.provider = config.fabric.ofi.provider;
  common.verbs = config.fabric.verbs;
  plan.endpoints.assign(rails, common);
  for (std::uint32_t rail = 0; rail < rails; ++rail) {
    fabric::EndpointConfig& endpoint = plan.endpoints[rail];
    endpoint.rail = rail;
    if (config.fabric.name == "ofi" && !names.empty())
      endpoint.bind_address = names[rail % names.size()];
  }
  if (!machine) return plan;
  const auto choices = choose_nics(*machine, *kind, rails, {});
  if (!choices) return plan;  // opening the endpoint will say what is missing
  if (config.fabric.rails == daemon::kRailsAuto) {
    plan.why = machine->gpus.empty()
                   ? fmt::format("fabric.rails \"auto\" is {}: this machine has no GPU", rails)
                   : fmt::format("fabric.rails \"auto\" is {}: one for each GPU", rails);
  } else {
    plan.unused = unused_nics(*machine, *kind, *choices);
  }
  if (machine->gpus.empty() && *kind == NicKind::kVerbs) return plan;
  for (std::uint32_t rail = 0; rail < rails; ++rail) {
    fabric::EndpointConfig& endpoint = plan.endpoints[rail];
    endpoint.nic_why = (*choices)[rail].why;
    std::string nics = nic_names(*machine, (*choices)[rail]);
    if (*kind == NicKind::kVerbs) {
      endpoint.verbs.devices = {std::move(nics)};
    } else {
      endpoint.bind_address = std::move(nics);
    }
  }
  return plan;
}

std::map<std::string, std::vector<std::uint32_t>> rails_by_gpu(const Machine& machine,
                                                               const daemon::Config& config) {
  std::map<std::string, std::vector<std::uint32_t>> near;
  if (!kind_of(resolve_fabric(config).config)) return near;
  const auto choices = choose_nics(machine, config);
  if (!choices) return near;
  for (std::uint32_t number = 0; number < machine.gpus.size(); ++number) {
    const Gpu& gpu = machine.gpus[number];
    std::vector<std::uint32_t>& rails = near[gpu.bus_id];
    std::optional<Distance> least;
    for (std::uint32_t rail = 0; rail < choices->size(); ++rail) {
      const RailChoice& choice = (*choices)[rail];
      // Of GPUs that share NICs, each has a rail of its own.
      if (choice.gpu == number) {
        rails = {rail};
        break;
      }
      for (const std::uint32_t nic : choice.nics) {
        const Distance to = distance(machine, gpu, machine.nics[nic]);
        if (least && *least < to) continue;
        if (!least || to < *least) rails.clear();
        least = to;
        if (rails.empty() || rails.back() != rail) rails.push_back(rail);
      }
    }
  }
  return near;
}

std::map<std::uint32_t, std::vector<std::uint32_t>> rails_by_numa(const Machine& machine,
                                                                  const daemon::Config& config) {
  std::map<std::uint32_t, std::vector<std::uint32_t>> rails;
  if (!kind_of(resolve_fabric(config).config)) return rails;
  const auto choices = choose_nics(machine, config);
  if (!choices) return rails;
  for (std::uint32_t rail = 0; rail < choices->size(); ++rail) {
    const RailChoice& choice = (*choices)[rail];
    if (choice.nics.empty()) continue;
    if (const auto numa = machine.nics[choice.nics.front()].numa) rails[*numa].push_back(rail);
  }
  return rails;
}

std::vector<std::uint32_t> rails_near_cpus(
    const std::map<std::uint32_t, std::uint32_t>& numa_of_cpu,
    const std::map<std::uint32_t, std::vector<std::uint32_t>>& rails,
    const std::vector<std::uint32_t>& cpus) {
  std::map<std::uint32_t, std::size_t> cpus_of_numa;
  for (const std::uint32_t cpu : cpus) {
    const auto found = numa_of_cpu.find(cpu);
    if (found == numa_of_cpu.end()) continue;
    if (++cpus_of_numa[found->second] * 2 <= cpus.size()) continue;
    const auto of_numa = rails.find(found->second);
    return of_numa != rails.end() ? of_numa->second : std::vector<std::uint32_t>{};
  }
  return {};
}

}  // namespace mk::topology
