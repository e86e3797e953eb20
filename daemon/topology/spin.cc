#include "daemon/topology/spin.h"

#include <fmt/format.h>

#include <algorithm>

namespace mk::topology {

Spin choose_spin(const daemon::Config& config, std::size_t rails, std::uint32_t cpus) {
  constexpr std::size_t kCpusOfRail = 4;
  if (config.proxy.spin_ns) return {*config.proxy.spin_ns, {}};
  const auto& named = config.proxy.cpus;
  const bool own_cpus =
      !named.empty() && std::all_of(named.begin(), named.end(), [](auto cpu) { return cpu >= 0; });
  if (own_cpus) return {kSpinOverPausesNs, "each rail has a CPU"};
  return {cpus >= kCpusOfRail * rails ? kSpinOverPausesNs : kSpinAmongOthersNs,
          fmt::format("{} CPUs for {} rail{}", cpus, rails, rails == 1 ? "" : "s")};
}

}  // namespace mk::topology
