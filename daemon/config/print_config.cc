#include <iterator>

#include "daemon/config/config.h"
#include "daemon/config/units.h"

namespace mk::daemon {
namespace {

/// A TOML basic string.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// A TOML array of them.
std::string quoted_list(const std::vector<std::string>& texts) {
  std::vector<std::string> all;
  for (const std::string& text : texts) all.push_back(quoted(text));
  return fmt::format("[{}]", fmt::join(all, ", "));
}

std::string auto_size(const std::optional<std::uint64_t>& bytes) {
  return quoted(bytes ? format_size(*bytes) : "auto");
}

template <class T>
std::string auto_count(const std::optional<T>& count) {
  return count ? fmt::format("{}", *count) : quoted("auto");
}

std::string_view name_of(LogFormat format) {
  switch (format) {
    case LogFormat::kAuto:
      return "auto";
    case LogFormat::kText:
      return "text";
    case LogFormat::kJson:
      return "json";
    case LogFormat::kJournald:
      return "journald";
  }
  return "auto";
}

}  // namespace

std::string print_config(const Config& config) {
  std::string text;
  const auto line = [&text]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text), format, std::forward<Args>(args)...);
    text += '\n';
  };
  line("node_id = {}", config.node_id);
  line("listen = {}", quoted(config.listen.text()));
  line("insecure = {}", config.insecure);
  line("\n[socket]");
  line("path = {}", quoted(config.socket.path));
  line("mode = \"{:04o}\"", config.socket.mode);
  for (const auto& [gpu, rail] : config.gpu_rails) {
    line("\n[[gpu]]");
    line("address = {}", quoted(gpu));
    line("rail = {}", rail);
  }
  for (const PeerConfig& peer : config.peers) {
    line("\n[[peer]]");
    line("id = {}", peer.id);
    line("address = {}", quoted(peer.address.text()));
    if (!peer.name.empty()) line("name = {}", quoted(peer.name));
  }
  const auto& etcd = config.discovery.etcd;
  line("\n[discovery]");
  line("kind = {}", quoted(config.discovery.kind));
  line("interval = {}", quoted(format_duration(config.discovery.interval_ns)));
  line("advertise = {}",
       quoted(config.discovery.advertise ? config.discovery.advertise->text() : ""));
  line("node_name = {}", quoted(config.discovery.node_name));
  line("\n[discovery.dns]");
  line("name = {}", quoted(config.discovery.dns.name));
  line("server = {}", quoted(config.discovery.dns.server));
  line("\n[discovery.etcd]");
  line("endpoints = {}", quoted_list(etcd.endpoints));
  line("prefix = {}", quoted(etcd.prefix));
  line("ttl = {}", quoted(format_duration(etcd.ttl_ns)));
  line("cert = {}", quoted(etcd.cert));
  line("key = {}", quoted(etcd.key));
  line("ca = {}", quoted(etcd.ca));
  line("\n[fabric]");
  line("name = {}", quoted(config.fabric.name));
  line("rails = {}",
       config.fabric.rails == kRailsAuto ? "\"auto\"" : fmt::format("{}", config.fabric.rails));
  line("\n[fabric.loopback]");
  line("bandwidth = {}",
       quoted(format_bandwidth(config.fabric.loopback.bandwidth_bytes_per_second)));
  line("latency = {}", quoted(format_duration(config.fabric.loopback.latency_ns)));
  line("\n[fabric.ofi]");
  line("provider = {}", quoted(config.fabric.ofi.provider));
  line("bind = {}", quoted_list(config.fabric.ofi.bind));
  const mk::fabric::VerbsOptions& verbs = config.fabric.verbs;
  line("\n[fabric.verbs]");
  line("devices = {}", quoted_list(verbs.devices));
  line("gid_index = {}", verbs.gid_index);
  line("pkey = {:#06x}", verbs.pkey);
  line("mtu = {}", verbs.mtu_bytes);
  line("queues = {}", verbs.queues);
  line("timeout = {}", verbs.timeout);
  line("retries = {}", verbs.retries);
  line("rnr_retries = {}", verbs.rnr_retries);
  line("service_level = {}", verbs.service_level);
  line("traffic_class = {}", verbs.traffic_class);
  line("relaxed_ordering = {}", verbs.relaxed_ordering);
  line("gpu_direct = {}", verbs.gpu_direct);
  line("arrival = {}", quoted(verbs.arrival));
  line("submission = {}", quoted(verbs.submission));
  line("\n[proxy]");
  line("cpus = [{}]", fmt::join(config.proxy.cpus, ", "));
  line("batch_window = {}", quoted(format_duration(config.proxy.batch_window_ns)));
  line("spin = {}", quoted(config.proxy.spin_ns ? format_duration(*config.proxy.spin_ns) : "auto"));
  line("sleep_max = {}", quoted(format_duration(config.proxy.sleep_max_ns)));
  line("\n[limits]");
  line("sessions = {}", config.limits.sessions);
  line("outstanding = {}", config.limits.outstanding);
  line("registered = {}", auto_size(config.limits.registered_bytes));
  line("user_sessions = {}", auto_count(config.limits.user_sessions));
  line("user_buffers = {}", auto_count(config.limits.user_buffers));
  line("user_rings = {}", auto_count(config.limits.user_rings));
  line("user_registered = {}", auto_size(config.limits.user_registered_bytes));
  line("all_registered = {}", auto_size(config.limits.all_registered_bytes));
  line("user_descriptors = {}", auto_count(config.limits.user_descriptors));
  line("descriptors = {}", auto_count(config.limits.descriptors));
  line("user_connections = {}", config.limits.user_connections);
  line("drain = {}", quoted(format_duration(config.limits.drain_ns)));
  line("ended_jobs = {}", quoted(format_duration(config.limits.ended_jobs_ns)));
  line("\n[admin]");
  line("socket = {}", quoted(config.admin.socket));
  line("mode = \"{:04o}\"", config.admin.mode);
  line("group = {}", quoted(config.admin.group));
  line("writers = {}", quoted_list(config.admin.writers));
  for (const JobConfig& job : config.jobs) {
    line("\n[[job]]");
    line("pattern = {}", quoted(job.pattern));
    line("weight = {}", job.share.weight);
    line("rate = {}", quoted(format_bandwidth(job.share.limit.bytes_per_second)));
    line("commands = {}", static_cast<std::int64_t>(job.share.limit.commands_per_second));
  }
  line("\n[metrics]");
  line("listen = {}", quoted(config.metrics.listen ? config.metrics.listen->text() : ""));
  line("\n[log]");
  line("level = {}", quoted(config.log.level));
  line("format = {}", quoted(name_of(config.log.format)));
  line("\n[tls]");
  line("cert = {}", quoted(config.tls.cert));
  line("key = {}", quoted(config.tls.key));
  line("ca = {}", quoted(config.tls.ca));
  return text;
}

}  // namespace mk::daemon
