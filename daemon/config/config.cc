#include "daemon/config/config.h"

#include <bit>
#include <charconv>
#include <fstream>
#include <iterator>
#include <set>

#include "daemon/config/discovery_section.h"
#include "daemon/config/gpu_section.h"
#include "daemon/config/limits_section.h"
#include "daemon/config/reader.h"
#include "daemon/config/units.h"

namespace mk::daemon {
namespace {

constexpr std::size_t kSocketPathBytesMax = 107;
constexpr std::size_t kFileBytesMax = 1 << 20;
constexpr std::int64_t kJobCommandsMax = 1'000'000'000;

constexpr std::pair<std::string_view, LogFormat> kLogFormats[] = {
    {"auto", LogFormat::kAuto},
    {"text", LogFormat::kText},
    {"json", LogFormat::kJson},
    {"journald", LogFormat::kJournald}};

// -- one value each; the errors say only what is allowed --------------------------------------

template <class T, class Parse>
auto take(T& into, Parse&& parse) {
  return [&into, parse](std::string_view text) -> Status {
    auto value = parse(text);
    if (!value) return propagate(value);
    into = std::move(*value);
    return {};
  };
}

auto take_duration(std::uint64_t& into, std::uint64_t most_ns = kDayNs) {
  return take(into, [most_ns](std::string_view text) { return parse_duration_ns(text, most_ns); });
}
auto take_bandwidth(double& into) { return take(into, parse_bandwidth); }
auto take_text(std::string& into, std::size_t bytes_max = 4096) {
  return [&into, bytes_max](std::string_view text) -> Status {
    if (text.size() > bytes_max || text.find_first_of(std::string_view("\0\n", 2)) != text.npos) {
      return fail(ErrorCode::kInvalidArgument, "one line of at most {} bytes is expected",
                  bytes_max);
    }
    into = text;
    return {};
  };
}

auto take_one_of(std::string& into, std::vector<std::string> allowed) {
  return [&into, allowed = std::move(allowed)](std::string_view text) -> Status {
    if (std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
      return fail(ErrorCode::kInvalidArgument, "\"{}\" is not one of \"{}\"", text,
                  fmt::join(allowed, "\", \""));
    }
    into = text;
    return {};
  };
}

auto take_spin(std::optional<std::uint64_t>& into) {
  return [&into](std::string_view text) -> Status {
    if (text == "auto") {
      into.reset();
      return {};
    }
    const auto spin = parse_duration_ns(text);
    if (!spin) return fail(spin.error().code, "{}, or \"auto\"", spin.error().message);
    into = *spin;
    return {};
  };
}

auto take_listen(Address& into) {
  return take(into, [](std::string_view text) { return parse_address(text, true); });
}
auto take_peer_address(Address& into) {
  return take(into, [](std::string_view text) { return parse_address(text, false); });
}

Status accept_socket(std::string_view text, std::string& into) {
  if (text.size() < 2 || text.size() > kSocketPathBytesMax || (text[0] != '/' && text[0] != '@')) {
    return fail(ErrorCode::kInvalidArgument,
                "an absolute path, or \"@name\", of at most {} bytes is expected",
                kSocketPathBytesMax);
  }
  into = text;
  return {};
}

Status accept_mode(std::string_view text, std::uint32_t& into) {
  std::uint32_t mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  if (error != std::errc{} || end != text.data() + text.size() || mode > 0777) {
    return fail(ErrorCode::kInvalidArgument, "an octal mode such as \"0660\" is expected");
  }
  into = mode;
  return {};
}

Status accept_metrics_listen(std::string_view text, std::optional<Address>& into) {
  into.reset();
  if (text.empty()) return {};
  const auto address = parse_address(text, true);
  if (!address || address->unix_socket || !address->local()) {
    return fail(ErrorCode::kInvalidArgument,
                "\"\" or a loopback address such as \"127.0.0.1:9464\" is expected");
  }
  into = *address;
  return {};
}

Status accept_log_format(std::string_view text, LogFormat& into) {
  for (const auto& [name, format] : kLogFormats) {
    if (name != text) continue;
    into = format;
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "\"{}\" is not one of \"auto\", \"text\", \"json\", \"journald\"", text);
}

const std::vector<std::string>& fabric_names() {
  static const std::vector<std::string> names{"auto", "loopback", "ofi", "verbs", "null"};
  return names;
}
const std::vector<std::string>& log_levels() {
  static const std::vector<std::string> levels{"debug", "info", "warning", "error"};
  return levels;
}

Status accept_number(std::string_view text, const char* what, std::uint32_t min, std::uint32_t max,
                     std::uint32_t& into) {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < min || number > max) {
    return fail(ErrorCode::kInvalidArgument, "{} from {} to {} is expected", what, min, max);
  }
  into = number;
  return {};
}

Status accept_node_id(std::string_view text, std::uint32_t& into) {
  return accept_number(text, "a node id", 0, shm::kNodesMax - 1, into);
}

// -- the file ---------------------------------------------------------------------------------

void read_verbs(Section verbs, mk::fabric::VerbsOptions& options) {
  verbs.strings("devices", 1, 80, options.devices);
  verbs.integer("gid_index", -1, 255, options.gid_index);
  verbs.integer("pkey", 0, 0xffff, options.pkey);
  verbs.integer("mtu", 0, 4096, options.mtu_bytes);
  verbs.integer("queues", 1, mk::fabric::kVerbsQueuesMax, options.queues);
  verbs.integer("timeout", 0, 31, options.timeout);
  verbs.integer("retries", 0, 7, options.retries);
  verbs.integer("rnr_retries", 0, 7, options.rnr_retries);
  verbs.integer("service_level", 0, 15, options.service_level);
  verbs.integer("traffic_class", 0, 255, options.traffic_class);
  verbs.boolean("relaxed_ordering", options.relaxed_ordering);
  verbs.boolean("gpu_direct", options.gpu_direct);
  verbs.string("arrival", take_one_of(options.arrival, {"flag", "immediate"}));
  verbs.string("submission", take_one_of(options.submission, {"auto", "extended", "classic"}));
  verbs.finish();
}

void read_fabric(Section fabric, Config& config) {
  fabric.string("name", take_one_of(config.fabric.name, fabric_names()));
  fabric.integer_or("rails", 1, kRailsMax, "auto", kRailsAuto, config.fabric.rails);
  Section loopback = fabric.section("loopback");
  loopback.string("bandwidth", take_bandwidth(config.fabric.loopback.bandwidth_bytes_per_second));
  loopback.string("latency", take_duration(config.fabric.loopback.latency_ns));
  loopback.finish();
  Section ofi = fabric.section("ofi");
  ofi.string("provider", take_text(config.fabric.ofi.provider, 64));
  ofi.string_or_strings("bind", 256, config.fabric.ofi.bind);
  ofi.finish();
  read_verbs(fabric.section("verbs"), config.fabric.verbs);
  fabric.finish();
}

void read_proxy(Section proxy, Config& config) {
  proxy.integers("cpus", -1, 4095, config.proxy.cpus);
  proxy.string("batch_window", take_duration(config.proxy.batch_window_ns));
  proxy.string("spin", take_spin(config.proxy.spin_ns));
  proxy.string("sleep_max", take_duration(config.proxy.sleep_max_ns, kSleepMostNs));
  proxy.finish();
}

void read_admin(Section admin, Config& config) {
  admin.string("socket", [&](std::string_view text) -> Status {
    if (text.empty() || text == "auto") {
      config.admin.socket = text;
      return {};
    }
    Status status = accept_socket(text, config.admin.socket);
    if (status && text[0] == '/') return status;
    return fail(ErrorCode::kInvalidArgument,
                "\"\", \"auto\" or an absolute path of at most {} bytes is expected",
                kSocketPathBytesMax);
  });
  admin.string("mode", [&](std::string_view text) { return accept_mode(text, config.admin.mode); });
  admin.string("group", take_text(config.admin.group, 64));
  admin.strings("writers", 1, 253, config.admin.writers);
  admin.finish();
}

void read_root(Section root, Config& config) {
  root.integer("node_id", 0, shm::kNodesMax - 1, config.node_id);
  root.string("listen", take_listen(config.listen));
  root.boolean("insecure", config.insecure);
  Section socket = root.section("socket");
  socket.string("path",
                [&](std::string_view text) { return accept_socket(text, config.socket.path); });
  socket.string("mode",
                [&](std::string_view text) { return accept_mode(text, config.socket.mode); });
  socket.finish();
  root.each("peer", [&](Section& section) {
    PeerConfig peer;
    section.require("id");
    section.require("address");
    section.integer("id", 0, shm::kNodesMax - 1, peer.id);
    section.string("address", take_peer_address(peer.address));
    section.string("name", take_text(peer.name, 253));
    section.finish();
    for (const PeerConfig& other : config.peers) {
      if (other.id == peer.id) {
        section.refuse_table(fmt::format("node id {} is given to two peers", peer.id));
      }
    }
    config.peers.push_back(std::move(peer));
  });
  read_discovery(root.section("discovery"), config);
  read_fabric(root.section("fabric"), config);
  read_proxy(root.section("proxy"), config);
  read_limits(root.section("limits"), config);
  read_admin(root.section("admin"), config);
  root.each("job", [&](Section& section) {
    JobConfig job;
    section.require("pattern");
    section.string("pattern", take_text(job.pattern, shm::kJobNameBytesMax));
    section.integer("weight", 1, kJobWeightMax, job.share.weight);
    section.string("rate", take_bandwidth(job.share.limit.bytes_per_second));
    section.integer("commands", 0, kJobCommandsMax, job.share.limit.commands_per_second);
    section.finish();
    config.jobs.push_back(std::move(job));
  });
  read_gpus(root, config.gpu_rails);
  Section metrics = root.section("metrics");
  metrics.string("listen", [&](std::string_view text) {
    return accept_metrics_listen(text, config.metrics.listen);
  });
  metrics.finish();
  Section log = root.section("log");
  log.string("level", take_one_of(config.log.level, log_levels()));
  log.string("format",
             [&](std::string_view text) { return accept_log_format(text, config.log.format); });
  log.finish();
  Section tls = root.section("tls");
  tls.string("cert", take_text(config.tls.cert));
  tls.string("key", take_text(config.tls.key));
  tls.string("ca", take_text(config.tls.ca));
  tls.finish();
  root.finish();
}

// -- the command line -------------------------------------------------------------------------

template <class Accept>
void override_with(const std::optional<std::string>& value, std::string_view flag,
                   Diagnostics& diagnostics, Accept&& accept) {
  if (!value) return;
  const Status status = accept(std::string_view(*value));
  if (!status) {
    diagnostics.plain(fmt::format("--{} {}: {}", flag, *value, status.error().message));
  }
}

/// `given`: the ids of the flags before this one.
void override_peer(const std::string& text, std::set<std::uint32_t>& given, Config& config,
                   Diagnostics& diagnostics) {
  const std::size_t equals = text.find('=');
  PeerConfig peer;
  Status status = equals == std::string::npos
                      ? Status(fail(ErrorCode::kInvalidArgument,
                                    "ID=ADDRESS is expected, such as 1=unix:/run/mkernel/1.sock"))
                      : accept_node_id(std::string_view(text).substr(0, equals), peer.id);
  if (status) status = take_peer_address(peer.address)(std::string_view(text).substr(equals + 1));
  if (!status) {
    return diagnostics.plain(fmt::format("--peer {}: {}", text, status.error().message));
  }
  if (!given.insert(peer.id).second) {
    return diagnostics.plain(
        fmt::format("--peer {}: another --peer has given node {} an address", text, peer.id));
  }
  for (PeerConfig& known : config.peers) {
    if (known.id != peer.id) continue;
    known = std::move(peer);
    return;
  }
  config.peers.push_back(std::move(peer));
}

void apply(const ConfigOverrides& overrides, Config& config, Diagnostics& diagnostics) {
  override_with(overrides.node_id, "node-id", diagnostics,
                [&](std::string_view text) { return accept_node_id(text, config.node_id); });
  override_with(overrides.listen, "listen", diagnostics, take_listen(config.listen));
  override_with(overrides.advertise, "advertise", diagnostics,
                [&](std::string_view text) { return accept_advertise(text, config); });
  override_with(overrides.socket, "socket", diagnostics,
                [&](std::string_view text) { return accept_socket(text, config.socket.path); });
  override_with(overrides.fabric, "fabric", diagnostics,
                take_one_of(config.fabric.name, fabric_names()));
  override_with(overrides.rails, "rails", diagnostics, [&](std::string_view text) {
    if (text != "auto")
      return accept_number(text, "\"auto\" or a number", 1, kRailsMax, config.fabric.rails);
    config.fabric.rails = kRailsAuto;
    return Status();
  });
  override_with(overrides.link_bandwidth, "link-bandwidth", diagnostics,
                take_bandwidth(config.fabric.loopback.bandwidth_bytes_per_second));
  override_with(overrides.link_latency, "link-latency", diagnostics,
                take_duration(config.fabric.loopback.latency_ns));
  override_with(overrides.log_level, "log-level", diagnostics,
                take_one_of(config.log.level, log_levels()));
  override_with(overrides.log_format, "log-format", diagnostics,
                [&](std::string_view text) { return accept_log_format(text, config.log.format); });
  if (overrides.insecure) config.insecure = true;
  std::set<std::uint32_t> given;
  for (const std::string& peer : overrides.peers) override_peer(peer, given, config, diagnostics);
}

// -- what needs all of it ---------------------------------------------------------------------

void check_security(const Config& config, Diagnostics& diagnostics) {
  const int tls_files = !config.tls.cert.empty() + !config.tls.key.empty() + !config.tls.ca.empty();
  if (tls_files != 0 && tls_files != 3) {
    diagnostics.plain("tls: cert, key and ca are needed together (mutual TLS)");
  }
  if (tls_files == 3 || config.insecure) return;
  const auto refuse = [&](const std::string& what) {
    diagnostics.plain(what +
                      " is reached over the network: give [tls] cert, key and ca; with "
                      "insecure = true instead, anybody on that network can speak to the daemon");
  };
  if (!config.listen.local()) refuse("listen " + config.listen.text());
  for (const PeerConfig& peer : config.peers) {
    if (!peer.address.local()) refuse(fmt::format("peer {} {}", peer.id, peer.address.text()));
  }
}

/// The lists by rail. How many rails "auto" is, is known only on the machine: topology::plan_rails.
void check_rails(const Config& config, Diagnostics& diagnostics) {
  const std::uint32_t rails = config.fabric.rails;
  const std::size_t cpus = config.proxy.cpus.size();
  if (rails != kRailsAuto && cpus != 0 && cpus != rails) {
    diagnostics.plain(
        fmt::format("proxy.cpus: {} entries for {} rails; one per rail is expected", cpus, rails));
  }
  const auto check_names = [&](std::string_view key, std::size_t names) {
    if (names > kRailsMax) {
      diagnostics.plain(
          fmt::format("{}: {} entries; there are at most {} rails, and a rail of "
                      "several NICs is one entry, \"a+b\"",
                      key, names, kRailsMax));
    } else if (rails != kRailsAuto && names != 0 && rails % names != 0) {
      // Taken by the rails in turn, some would not be used, or oftener than others.
      diagnostics.plain(
          fmt::format("{}: {} entries for {} rails; one for all, one per rail, or a "
                      "number that divides the rails is expected (of several NICs "
                      "for one rail, \"a+b\" is one entry)",
                      key, names, rails));
    }
  };
  for (const auto& [gpu, rail] : config.gpu_rails) {
    if (rails != kRailsAuto && rail >= rails) {
      diagnostics.plain(fmt::format("gpu {}: rail {}, but fabric.rails is {}: 0 to {} are possible",
                                    gpu, rail, rails, rails - 1));
    }
  }
  check_names("fabric.verbs.devices", config.fabric.verbs.devices.size());
  check_names("fabric.ofi.bind", config.fabric.ofi.bind.size());
}

/// Whether who calls `address` on this machine reaches this daemon itself.
bool is_own(const Config& config, const Address& address) {
  const auto reaches = [&address](const Address& listen) {
    if (listen.unix_socket || address.unix_socket) return listen.text() == address.text();
    const bool everywhere = listen.host == "0.0.0.0" || listen.host == "::";
    const auto named = [](const std::string& host) {  // other addresses of 127/8 are others' places
      return host == "127.0.0.1" || host == "::1" ? "localhost" : host;
    };
    return listen.port == address.port &&
           (named(listen.host) == named(address.host) || (everywhere && address.local()));
  };
  const auto& advertise = config.discovery.advertise;
  return reaches(config.listen) || (advertise && advertise->text() == address.text());
}

void check(const Config& config, Diagnostics& diagnostics) {
  std::set<std::string> addresses;
  for (const PeerConfig& peer : config.peers) {
    if (peer.id == config.node_id) {
      diagnostics.plain(
          fmt::format("peer {}: this daemon has node id {} itself", peer.id, config.node_id));
    }
    if (is_own(config, peer.address)) {
      diagnostics.plain(
          fmt::format("peer {}: {} is this daemon's own address: name the one of node {}", peer.id,
                      peer.address.text(), peer.id));
    }
    if (!addresses.insert(peer.address.text()).second) {
      diagnostics.plain(
          fmt::format("peer {}: another peer has address {}", peer.id, peer.address.text()));
    }
  }
  check_rails(config, diagnostics);
  const std::uint32_t mtu = config.fabric.verbs.mtu_bytes;
  if (mtu != 0 && (mtu < 256 || !std::has_single_bit(mtu))) {
    diagnostics.plain(
        fmt::format("fabric.verbs.mtu: {} is not one of 0, 256, 512, 1024, 2048, 4096", mtu));
  }
  if (config.fabric.name == "ofi" && config.fabric.ofi.provider.empty()) {
    diagnostics.plain("fabric.ofi.provider: must be named when fabric.name is \"ofi\"");
  }
  if (config.listen.unix_socket && config.listen.path == config.socket.path) {
    diagnostics.plain("listen and socket.path must not be the same socket");
  }
  const std::string admin = admin_socket_path(config);
  if (!admin.empty() && (admin == config.socket.path || admin == config.listen.path)) {
    diagnostics.plain("admin.socket must not be the socket of socket.path or listen");
  }
  if (!config.admin.writers.empty() && config.tls.cert.empty()) {
    diagnostics.plain("admin.writers: names of certificates need [tls] cert, key and ca");
  }
  check_discovery(config, diagnostics);
  check_security(config, diagnostics);
}

}  // namespace

Result<Config> parse_config(std::string_view text, const std::string& file_name,
                            const ConfigOverrides& overrides) {
  Diagnostics diagnostics(file_name);
  refuse_beyond_ascii(text, diagnostics);
  if (!diagnostics.empty()) return fail(ErrorCode::kInvalidArgument, "{}", diagnostics.text());
  const toml::parse_result parsed = toml::parse(text, file_name);
  if (!parsed) {
    // What follows a syntax error is not to be judged.
    diagnostics.at(parsed.error().source(), std::string(parsed.error().description()));
    return fail(ErrorCode::kInvalidArgument, "{}", diagnostics.text());
  }
  Config config;
  read_root(Section(&parsed.table(), "", diagnostics), config);
  apply(overrides, config, diagnostics);
  if (diagnostics.empty()) check(config, diagnostics);
  if (!diagnostics.empty()) return fail(ErrorCode::kInvalidArgument, "{}", diagnostics.text());
  return config;
}

Result<Config> load_config(const std::string& path, const ConfigOverrides& overrides) {
  if (path.empty()) return parse_config("", "(no file)", overrides);
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    const int error = errno;
    if (error == ENOENT) return fail(ErrorCode::kNotFound, "config file {} does not exist", path);
    return fail_errno(error, "cannot open config file {}", path);
  }
  std::string text(kFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return fail_errno(errno, "cannot read config file {}", path);
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kFileBytesMax) {
    return fail(ErrorCode::kLimitExceeded, "config file {} is larger than {} bytes", path,
                kFileBytesMax);
  }
  return parse_config(text, path, overrides);
}

std::string admin_socket_path(const Config& config) {
  constexpr std::string_view kEnding = ".sock", kMark = "-admin";
  constexpr std::string_view kClients = "/run/mkernel/", kAdmins = "/run/mkernel-admin/";
  std::string path = config.admin.socket;
  if (path != "auto") return path;
  path = config.socket.path;
  if (path.starts_with(kClients) &&
      path.size() - kClients.size() + kAdmins.size() <= kSocketPathBytesMax)
    return path.replace(0, kClients.size(), kAdmins);
  if (path.starts_with('@') || path.size() + kMark.size() > kSocketPathBytesMax) return "";
  path.insert(path.ends_with(kEnding) ? path.size() - kEnding.size() : path.size(), kMark);
  return path;
}

}  // namespace mk::daemon
