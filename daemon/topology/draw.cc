#include "daemon/topology/draw.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

namespace mk::topology {
namespace {

std::string rails_text(const std::vector<std::uint32_t>& rails) {
  if (rails.empty()) return {};
  return fmt::format("  [rail {}]", fmt::join(rails, ", "));
}

/// What stands beside each leaf: by place.
std::map<std::uint32_t, std::string> leaves(const Machine& machine,
                                            const std::vector<RailChoice>& choices,
                                            const GpuRails& configured) {
  std::map<std::uint32_t, std::vector<std::uint32_t>> rails;
  for (std::uint32_t rail = 0; rail < choices.size(); ++rail) {
    if (choices[rail].gpu) rails[machine.gpus[*choices[rail].gpu].place].push_back(rail);
    for (const std::uint32_t nic : choices[rail].nics)
      rails[machine.nics[nic].place].push_back(rail);
  }
  for (const Gpu& gpu : machine.gpus) {
    const auto found = configured.find(gpu.bus_id);
    if (found != configured.end()) rails[gpu.place] = {found->second};
  }
  std::map<std::uint32_t, std::string> text;
  const auto describe = [&](const PciDevice& device, std::string name) {
    if (!device.model.empty()) name += fmt::format(", {}", device.model);
    text[device.place] = name + rails_text(rails[device.place]);
  };
  for (std::size_t i = 0; i < machine.gpus.size(); ++i)
    describe(machine.gpus[i], fmt::format("GPU {} {}", i, machine.gpus[i].bus_id));
  for (const Nic& nic : machine.nics) {
    std::string name = fmt::format("NIC {}", nic.name());
    if (!nic.rdma.empty() && !nic.interface.empty()) name += fmt::format(" ({})", nic.interface);
    if (!nic.bus_id.empty()) name += " " + nic.bus_id;
    if (nic.rdma.empty()) name += ", no RDMA";
    if (!nic.active) name += ", no port is up";
    describe(nic, name);
  }
  return text;
}

void draw_below(const Machine& machine, const std::map<std::uint32_t, std::string>& text,
                std::uint32_t at, const std::string& indent, std::string& out) {
  const std::vector<std::uint32_t>& children = machine.tree[at].children;
  for (std::size_t i = 0; i < children.size(); ++i) {
    const bool last = i + 1 == children.size();
    const auto leaf = text.find(children[i]);
    out += indent + (last ? "`-- " : "|-- ") +
           (leaf == text.end() ? machine.tree[children[i]].label : leaf->second) + "\n";
    draw_below(machine, text, children[i], indent + (last ? "    " : "|   "), out);
  }
}

}  // namespace

std::string draw(const Machine& machine, const std::vector<RailChoice>& choices,
                 const std::vector<PlacedRank>& ranks, const GpuRails& configured) {
  std::string out = machine.tree.front().label + "\n";
  draw_below(machine, leaves(machine, choices, configured), 0, "", out);
  if (machine.gpus.empty()) out += "no GPU\n";
  if (machine.nics.empty()) out += "no NIC\n";
  if (!choices.empty()) out += "\n";
  for (std::size_t rail = 0; rail < choices.size(); ++rail) {
    out += fmt::format("rail {}: {} ({})\n", rail, nic_names(machine, choices[rail]),
                       choices[rail].why);
  }
  for (const auto& [gpu, rail] : configured)
    out += fmt::format("GPU {}: rail {} (configured)\n", gpu, rail);
  if (!ranks.empty()) out += "\n";
  for (const PlacedRank& one : ranks) {
    out += fmt::format("rank {} of {}: rail {} ({})\n", one.rank, one.job, one.rail, one.why);
  }
  return out;
}

std::string to_json(const Machine& machine, const std::vector<RailChoice>& choices,
                    const std::vector<PlacedRank>& ranks, const GpuRails& configured) {
  using nlohmann::ordered_json;
  const auto device = [](const PciDevice& of) {
    ordered_json json{{"bus_id", of.bus_id}, {"model", of.model}};
    json["numa"] = of.numa ? ordered_json(*of.numa) : ordered_json(nullptr);
    return json;
  };
  ordered_json json{{"machine", machine.name}};
  json["gpus"] = ordered_json::array();
  for (const Gpu& gpu : machine.gpus) json["gpus"].push_back(device(gpu));
  json["nics"] = ordered_json::array();
  for (const Nic& nic : machine.nics) {
    ordered_json one = device(nic);
    one.update({{"name", nic.name()},
                {"rdma", nic.rdma},
                {"interface", nic.interface},
                {"efa", nic.efa},
                {"active", nic.active}});
    json["nics"].push_back(std::move(one));
  }
  json["rails"] = ordered_json::array();
  for (const RailChoice& choice : choices) {
    ordered_json one{{"nics", ordered_json::array()}, {"why", choice.why}};
    for (const std::uint32_t nic : choice.nics) one["nics"].push_back(machine.nics[nic].name());
    one["gpu"] =
        choice.gpu ? ordered_json(machine.gpus[*choice.gpu].bus_id) : ordered_json(nullptr);
    json["rails"].push_back(std::move(one));
  }
  json["configured"] = ordered_json::array();
  for (const auto& [gpu, rail] : configured)
    json["configured"].push_back({{"gpu", gpu}, {"rail", rail}});
  json["ranks"] = ordered_json::array();
  for (const PlacedRank& one : ranks) {
    json["ranks"].push_back({{"job", one.job},
                             {"rank", one.rank},
                             {"rail", one.rail},
                             {"gpu", one.gpu},
                             {"cpus", one.cpus},
                             {"why", one.why}});
  }
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace mk::topology
