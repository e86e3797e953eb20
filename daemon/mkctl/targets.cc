#include "daemon/mkctl/targets.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "daemon/config/config.h"
#include "daemon/config/units.h"

namespace mk::mkctl {
namespace {

constexpr auto kKeepaliveTime = std::chrono::seconds(5);

Result<daemon::Config> read_config(const TargetFlags& flags) {
  std::string path = flags.config;
  if (path.empty() && ::access(kSystemConfig, R_OK) == 0) path = kSystemConfig;
  return daemon::load_config(path, {});
}

Result<daemon::Address> parse(const char* flag, const std::string& text) {
  auto address = daemon::parse_address(text, false);
  if (address) return address;
  return fail(ErrorCode::kInvalidArgument, "{} {}: {}", flag, text, address.error().message);
}

/// The certificate to show, for those targets that want one.
Status add_tls(const TargetFlags& flags, const daemon::Config& config,
               std::vector<Target>& targets) {
  const auto either = [](const std::string& flag, const std::string& configured) {
    return flag.empty() ? configured : flag;
  };
  const auto tls =
      daemon::read_tls(either(flags.tls_cert, config.tls.cert),
                       either(flags.tls_key, config.tls.key), either(flags.tls_ca, config.tls.ca));
  // The key that the configuration names may be for the daemon's eyes only: no obstacle where none
  // is wanted.
  const bool asked = !flags.tls_cert.empty() || !flags.tls_key.empty() || !flags.tls_ca.empty();
  for (Target& target : targets) {
    if (!tls && (asked || !target.address.unix_socket)) return tl::unexpected(tls.error());
    if (tls) target.channel.tls = *tls;
  }
  return {};
}

/// Where the daemon of this configuration answers people of this machine.
Result<daemon::Address> local_address(const daemon::Config& config, const std::string& path) {
  // The Admin service's own socket, for those who may open it: there they may also change things.
  const std::string socket = daemon::admin_socket_path(config);
  if (!socket.empty() && ::access(socket.c_str(), W_OK) == 0) {
    return daemon::Address{.unix_socket = true, .path = socket};
  }
  daemon::Address address = config.listen;
  if (!address.unix_socket && address.port == 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{} has listen = \"{}\", whose port only the running daemon knows: give --address",
                path, address.text());
  }
  // A daemon that listens everywhere also listens here.
  if (address.host == "0.0.0.0") address.host = "127.0.0.1";
  if (address.host == "::") address.host = "::1";
  return address;
}

}  // namespace

std::string with_port(const std::string& host) {
  if (host.starts_with("unix:")) return host;
  const std::size_t colon = host.rfind(':');
  const bool bracketed = host.starts_with('[');
  const bool bare_v6 = !bracketed && colon != host.npos && host.find(':') != colon;
  if (bare_v6) return fmt::format("[{}]:{}", host, kPortDefault);
  if (bracketed ? host.ends_with(']') : colon == host.npos) return host + ":" + kPortDefault;
  return host;
}

Result<std::vector<std::string>> split_hosts(const std::string& hosts) {
  std::string text = hosts;
  const bool file = hosts.starts_with('@');
  if (file) {
    std::ifstream stream(hosts.substr(1));
    if (!stream) return fail_errno(errno, "cannot open {} (--hosts)", hosts.substr(1));
    std::ostringstream all;
    for (std::string line; std::getline(stream, line);) {
      all << line.substr(0, line.find('#')) << '\n';
    }
    text = all.str();
  }
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find_first_of(", \t\r\n", at), text.size());
    if (end > at && seen.insert(text.substr(at, end - at)).second) {
      names.push_back(text.substr(at, end - at));
    }
    at = end + 1;
  }
  if (names.empty()) return fail(ErrorCode::kInvalidArgument, "--hosts {}: no host", hosts);
  if (names.size() > kTargetsMax) {
    return fail(ErrorCode::kInvalidArgument, "--hosts: {} hosts; {} are allowed", names.size(),
                kTargetsMax);
  }
  return names;
}

Result<std::vector<Target>> find_targets(const TargetFlags& flags) {
  Target common;
  const auto timeout = daemon::parse_duration_ns(flags.timeout);
  if (!timeout) return fail(ErrorCode::kInvalidArgument, "--timeout: {}", timeout.error().message);
  common.timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(*timeout));

  MK_ASSIGN_OR_RETURN(const daemon::Config config, read_config(flags));
  common.channel.keepalive_time = kKeepaliveTime;
  common.channel.keepalive_timeout = kKeepaliveTime;

  std::vector<Target> targets;
  const auto add = [&](const char* flag, const std::string& name, const std::string& address) {
    Target& target = targets.emplace_back(common);
    target.name = name;
    auto parsed = parse(flag, address);
    if (parsed) target.address = std::move(*parsed);
    return parsed ? Status{} : Status(tl::unexpected(parsed.error()));
  };
  if (!flags.hosts.empty()) {
    MK_ASSIGN_OR_RETURN(const auto names, split_hosts(flags.hosts));
    for (const std::string& name : names) {
      MK_RETURN_IF_ERROR(add("--hosts", name, with_port(name)));
    }
  } else if (!flags.host.empty()) {
    MK_RETURN_IF_ERROR(add("--host", flags.host, with_port(flags.host)));
  } else if (!flags.address.empty()) {
    MK_RETURN_IF_ERROR(add("--address", flags.address, flags.address));
  } else {
    MK_ASSIGN_OR_RETURN(common.address, local_address(config, flags.config));
    common.name = common.address.text();
    targets.push_back(common);
  }
  MK_RETURN_IF_ERROR(add_tls(flags, config, targets));
  return targets;
}

}  // namespace mk::mkctl
