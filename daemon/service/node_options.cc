#include "daemon/service/node_options.h"

#include <algorithm>
#include <optional>

#include "daemon/config/client_limits.h"
#include "daemon/config/units.h"
#include "daemon/proxy/idle_backoff.h"
#include "daemon/service/process.h"
#include "daemon/service/version.h"
#include "daemon/topology/machine.h"
#include "daemon/topology/rails.h"
#include "daemon/topology/spin.h"
#include "daemon/topology/usable_cpus.h"
#include "daemon/topology/usable_memory.h"

namespace mk::daemon {

static_assert(IdleBackoff::kLongSleeps * kSleepMostNs <= 200'000'000,
              "an idle rail answers in a tenth of the time that its peers wait for it");

Result<NodeOptions> node_options(const Config& config, const LiveConfig& live, Logger& logger,
                                 bool says) {
  const auto say = [&](LogLevel level, const std::string& text,
                       const std::vector<std::pair<std::string, std::string>>& fields = {}) {
    if (says) logger.write(level, text, fields);
  };
  NodeOptions options;
  options.control.node = config.node_id;
  options.control.version = version_text();
  options.control.sessions_max = config.limits.sessions;
  options.control.ended_jobs_keep_ns = config.limits.ended_jobs_ns;
  options.control.outstanding_max = config.limits.outstanding;
  const MachineLimits machine{topology::usable_memory_bytes(), open_files_max()};
  const ClientLimits limits = client_limits(config, machine);
  say(LogLevel::kInfo, describe(limits, machine));
  options.control.session_memory_bytes_max = limits.session_memory_bytes;
  options.control.user_max = {limits.user.sessions, limits.user.buffers, limits.user.rings,
                              limits.user.memory_bytes, limits.user.descriptors};
  options.control.all_max = {limits.all.memory_bytes, limits.all.descriptors};
  options.loop.descriptors_max = limits.all.descriptors;
  options.loop.user_descriptors_max = limits.user.descriptors;
  options.loop.reserve = MemoryReserve::installed();
  options.control.job_share = [&live](const std::string& job) { return live.share_of(job); };
  options.control.log = logger.sink();
  options.loop.socket_path = config.socket.path;
  options.loop.socket_mode = config.socket.mode;
  options.loop.user_unattached_max = config.limits.user_connections;
  const topology::ResolvedConfig resolved = topology::resolve_fabric(config);
  if (!resolved.why.empty()) {
    say(LogLevel::kInfo, "fabric \"auto\" is " + resolved.why,
        {{"fabric", resolved.config.fabric.name}});
  }
  if (!resolved.trouble.empty()) say(LogLevel::kWarning, resolved.trouble);
  std::optional<Result<topology::Machine>> seen;
  const auto read_once = [&seen] {
    if (!seen) seen = topology::read_machine();
    return *seen;
  };
  MK_ASSIGN_OR_RETURN(const topology::RailPlan plan,
                      topology::plan_rails(resolved.config, read_once));
  if (!plan.why.empty()) say(LogLevel::kInfo, plan.why);
  if (!plan.unused.empty()) say(LogLevel::kWarning, plan.unused);
  options.control.gpu_rails = config.gpu_rails;
  std::map<std::uint32_t, std::vector<std::uint32_t>> rails_by_numa;
  std::map<std::uint32_t, std::uint32_t> numa_of_cpu;
  if (plan.endpoints.size() > 1) {
    if (const auto here = read_once()) {
      options.control.rails_near =
          [near = topology::rails_by_gpu(*here, resolved.config)](const std::string& gpu) {
            const auto found = near.find(gpu);
            return found != near.end() ? found->second : std::vector<std::uint32_t>{};
          };
      for (const auto& [gpu, rail] : config.gpu_rails) {
        if (std::ranges::find(here->gpus, gpu, &topology::Gpu::bus_id) != here->gpus.end())
          continue;
        say(LogLevel::kWarning, fmt::format("[[gpu]] {}: this machine has no such GPU; `mkctl "
                                            "topology` shows those there are",
                                            gpu));
      }
      rails_by_numa = topology::rails_by_numa(*here, resolved.config);
      numa_of_cpu = here->numa_of_cpu;
    }
  }
  options.control.place_of = [rails = std::move(rails_by_numa),
                              numa = std::move(numa_of_cpu)](std::int32_t pid) {
    const std::vector<std::uint32_t> cpus = topology::affinity_of(pid);
    return ControlOptions::ProcessPlace{topology::cpu_list(cpus),
                                        topology::rails_near_cpus(numa, rails, cpus)};
  };
  options.rails.clear();
  const topology::Spin spin =
      topology::choose_spin(resolved.config, plan.endpoints.size(), topology::usable_cpus());
  if (!spin.why.empty()) {
    say(LogLevel::kInfo,
        fmt::format("rail threads sleep after {} without work: {} (proxy.spin \"auto\")",
                    format_duration(spin.ns), spin.why));
  }
  for (std::uint32_t rail = 0; rail < plan.endpoints.size(); ++rail) {
    RailOptions one;
    one.endpoint = plan.endpoints[rail];
    one.proxy.rail = rail;
    if (!config.proxy.cpus.empty()) one.proxy.cpu = static_cast<int>(config.proxy.cpus[rail]);
    one.proxy.batch_window_ns = config.proxy.batch_window_ns;
    one.proxy.spin_ns = spin.ns;
    one.proxy.sleep_ns_max = config.proxy.sleep_max_ns;
    options.rails.push_back(std::move(one));
  }
  return options;
}

}  // namespace mk::daemon
