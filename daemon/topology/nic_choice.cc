#include "daemon/topology/nic_choice.h"

#include <algorithm>
#include <map>

#include "shm/limits.h"

namespace mk::topology {
namespace {

std::string_view kind_text(NicKind kind) {
  switch (kind) {
    case NicKind::kVerbs:
      return "InfiniBand or RoCE";
    case NicKind::kEfa:
      return "EFA";
    case NicKind::kInterface:
      break;
  }
  return "network";
}

std::string list_of(const Machine& machine) {
  if (machine.nics.empty()) return "this machine has no NIC";
  std::string text = "there are: ";
  for (const Nic& nic : machine.nics) {
    if (&nic != &machine.nics.front()) text += ", ";
    text += nic.name();
    if (!nic.active) text += " (no port is up)";
  }
  return text;
}

/// "mlx5_0", also as "mlx5_0:1" (device and port), is NIC mlx5_0.
std::string_view device_of(std::string_view name) { return name.substr(0, name.find(':')); }

Result<RailChoice> choose_by_name(const Machine& machine, const std::string& names) {
  RailChoice choice;
  choice.why = "named by the configuration";
  for (std::size_t at = 0; at <= names.size();) {
    const std::size_t end = std::min(names.find('+', at), names.size());
    const std::string_view name = device_of(std::string_view(names).substr(at, end - at));
    const auto found = std::ranges::find_if(machine.nics, [&](const Nic& nic) {
      return !name.empty() && (nic.rdma == name || nic.interface == name);
    });
    if (found == machine.nics.end()) {
      return fail(ErrorCode::kNotFound, "there is no NIC \"{}\"; {}", name, list_of(machine));
    }
    choice.nics.push_back(static_cast<std::uint32_t>(found - machine.nics.begin()));
    at = end + 1;
  }
  return choice;
}

/// The NICs of `usable_nics` that are nearest to GPU `gpu`, and how near.
std::pair<std::vector<std::uint32_t>, Distance> nearest(const Machine& machine, const Gpu& gpu,
                                                        const std::vector<std::uint32_t>& among) {
  std::vector<std::uint32_t> best;
  Distance least;
  for (const std::uint32_t nic : among) {
    const Distance to = distance(machine, gpu, machine.nics[nic]);
    if (best.empty() || to < least) {
      best.clear();
      least = to;
    }
    if (to == least) best.push_back(nic);
  }
  return {best, least};
}

std::string why_text(const Machine& machine, const Gpu& gpu, const Distance& to, std::size_t nics,
                     std::size_t gpus) {
  std::string text = fmt::format("nearest to {}: {}", gpu.name(), reach_text(to.reach));
  if (to.hops > 0) text += fmt::format(", {} hops", to.hops);
  if (to.reach == Reach::kMachine && to.other_numa) text += ", another NUMA domain";
  if (nics > 1 || gpus > 1) text += fmt::format(" ({} such NICs for {} GPUs)", nics, gpus);
  (void)machine;
  return text;
}

std::vector<RailChoice> choose_by_gpu(const Machine& machine,
                                      const std::vector<std::uint32_t>& among) {
  std::vector<RailChoice> choices(machine.gpus.size());
  std::map<std::vector<std::uint32_t>, std::vector<std::uint32_t>> sharers;  // GPUs by nearest NICs
  for (std::uint32_t gpu = 0; gpu < choices.size(); ++gpu)
    sharers[nearest(machine, machine.gpus[gpu], among).first].push_back(gpu);
  for (const auto& [nics, gpus] : sharers) {
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      const Gpu& gpu = machine.gpus[gpus[i]];
      RailChoice& choice = choices[gpus[i]];
      choice.gpu = gpus[i];
      choice.why =
          why_text(machine, gpu, nearest(machine, gpu, among).second, nics.size(), gpus.size());
      if (nics.size() < gpus.size()) {
        choice.nics = {nics[i % nics.size()]};
      } else {
        choice.nics.assign(
            nics.begin() + static_cast<std::ptrdiff_t>(i * nics.size() / gpus.size()),
            nics.begin() + static_cast<std::ptrdiff_t>((i + 1) * nics.size() / gpus.size()));
      }
    }
  }
  return choices;
}

}  // namespace

bool usable(const Nic& nic, NicKind kind) {
  switch (kind) {
    case NicKind::kVerbs:
      return !nic.rdma.empty() && !nic.efa && nic.active;
    case NicKind::kEfa:
      return nic.efa && nic.active;
    case NicKind::kInterface:
      break;
  }
  return !nic.interface.empty();
}

Result<std::vector<RailChoice>> choose_nics(const Machine& machine, NicKind kind,
                                            std::uint32_t rails,
                                            const std::vector<std::string>& by_name) {
  if (rails == 0)
    rails = std::clamp<std::uint32_t>(static_cast<std::uint32_t>(machine.gpus.size()), 1,
                                      shm::kLocalRanksMax);
  std::vector<std::uint32_t> among;
  for (std::uint32_t i = 0; i < machine.nics.size(); ++i) {
    if (usable(machine.nics[i], kind)) among.push_back(i);
  }
  std::vector<RailChoice> by_gpu;
  if (!among.empty()) by_gpu = choose_by_gpu(machine, among);
  std::vector<RailChoice> choices;
  for (std::uint32_t rail = 0; rail < rails; ++rail) {
    const std::string& name = by_name.empty() ? std::string() : by_name[rail % by_name.size()];
    RailChoice choice;
    if (!name.empty()) {
      MK_ASSIGN_OR_RETURN(choice, choose_by_name(machine, name));
      if (rail < machine.gpus.size()) choice.gpu = rail;
    } else if (among.empty()) {
      return fail(ErrorCode::kUnavailable, "no {} NIC with a port that is up for rail {}; {}",
                  kind_text(kind), rail, list_of(machine));
    } else if (!by_gpu.empty()) {
      choice = by_gpu[rail % by_gpu.size()];
    } else {
      choice.nics = {among[rail % among.size()]};
      choice.why = fmt::format("NIC {} of {}, for rail {} of a machine without GPUs",
                               rail % among.size() + 1, among.size(), rail);
    }
    choices.push_back(std::move(choice));
  }
  return choices;
}

std::string nic_names(const Machine& machine, const RailChoice& choice) {
  std::string text;
  for (const std::uint32_t nic : choice.nics)
    text += (text.empty() ? "" : "+") + machine.nics[nic].name();
  return text;
}

}  // namespace mk::topology
