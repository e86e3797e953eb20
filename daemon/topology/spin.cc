#include "daemon/topology/spin.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace mk::topology {
namespace {

/// Whether each of the rails' threads is pinned to a CPU that no other one has.
bool own_cpus(const daemon::Config& config, std::size_t rails) {
  const auto& named = config.proxy.cpus;
  const std::set<std::int64_t> different(named.begin(), named.end());
  return different.size() == rails && *different.begin() >= 0;
}

}  // namespace

Spin choose_spin(const daemon::Config& config, std::size_t rails,
                 std::optional<std::uint32_t> cpus) {
  constexpr std::size_t kCpusOfRail = 4;
  if (config.proxy.spin_ns) return {*config.proxy.spin_ns, {}};
  if (!cpus) return {kSpinAmongOthersNs, "how many CPUs it may use is not known"};
  if (own_cpus(config, rails) && *cpus >= rails) return {kSpinOverPausesNs, "each rail has a CPU"};
  const auto others = static_cast<std::size_t>(std::ranges::count_if(
      config.peers, [](const daemon::PeerConfig& peer) { return peer.address.local(); }));
  std::string why = fmt::format("{} CPUs for {} rail{}", *cpus, rails, rails == 1 ? "" : "s");
  if (others != 0)
    why += fmt::format(" here and the rails of {} other daemon{} on this machine", others,
                       others == 1 ? "" : "s");
  const bool enough = *cpus >= kCpusOfRail * rails * (1 + others);
  return {enough ? kSpinOverPausesNs : kSpinAmongOthersNs, std::move(why)};
}

}  // namespace mk::topology
