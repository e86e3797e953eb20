/// \file
/// How long a rail's thread polls at full speed after its last work, before it begins to sleep. The
/// daemon and the doctor ask here, so that they never disagree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "daemon/config/config.h"

namespace mk::topology {

/// Where CPUs are to spare: longer than the pauses between the launches of a job.
inline constexpr std::uint64_t kSpinOverPausesNs = 20'000'000;
/// Where others want the CPUs.
inline constexpr std::uint64_t kSpinAmongOthersNs = 50'000;

struct Spin {
  std::uint64_t ns = kSpinAmongOthersNs;
  std::string why;  ///< "2 CPUs for 1 rail"; empty: the configuration says so itself
};

/// What `proxy.spin` says; "auto" is by who misses the CPU. A thread that sleeps when a launch
/// begins makes it later, by up to an eighth of the pause before it, within the limits of
/// proxy/idle_backoff.h. So it stays awake over pauses where the process has `cpus` enough, one for
/// each of its `rails`. Each rail's thread has one of its own (`proxy.cpus`), or there are four for
/// each rail: of this daemon, and of those that `config` says are on this machine, too. `cpus`:
/// usable_cpus().
Spin choose_spin(const daemon::Config& config, std::size_t rails,
                 std::optional<std::uint32_t> cpus);

}  // namespace mk::topology
