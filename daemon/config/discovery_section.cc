#include "daemon/config/discovery_section.h"

#include <algorithm>

#include "daemon/config/units.h"

namespace mk::daemon {
namespace {

constexpr std::uint64_t kSecondNs = 1'000'000'000;
constexpr std::uint64_t kIntervalMinNs = kSecondNs / 10, kIntervalMaxNs = 3600 * kSecondNs;
constexpr std::uint64_t kTtlMinNs = 2 * kSecondNs, kTtlMaxNs = 3600 * kSecondNs;
constexpr std::size_t kEndpointsMax = 16;
constexpr std::string_view kNodePlace = "{node}";

auto text_of(std::string& into, std::size_t bytes_max) {
  return [&into, bytes_max](std::string_view text) -> Status {
    if (text.size() > bytes_max || text.find_first_of(std::string_view("\0\n", 2)) != text.npos) {
      return fail(ErrorCode::kInvalidArgument, "one line of at most {} bytes is expected",
                  bytes_max);
    }
    into = text;
    return {};
  };
}

auto duration_of(std::uint64_t& into, std::uint64_t min, std::uint64_t max) {
  return [&into, min, max](std::string_view text) -> Status {
    MK_ASSIGN_OR_RETURN(const std::uint64_t value, parse_duration_ns(text));
    if (value < min || value > max) {
      return fail(ErrorCode::kInvalidArgument, "{} to {} is expected", format_duration(min),
                  format_duration(max));
    }
    into = value;
    return {};
  };
}

}  // namespace

void read_discovery(Section discovery, Config& config) {
  auto& into = config.discovery;
  discovery.string("kind", [&](std::string_view text) -> Status {
    if (text != "static" && text != "dns" && text != "etcd") {
      return fail(ErrorCode::kInvalidArgument, "\"{}\" is not one of \"static\", \"dns\", \"etcd\"",
                  text);
    }
    into.kind = text;
    return {};
  });
  discovery.string("interval", duration_of(into.interval_ns, kIntervalMinNs, kIntervalMaxNs));
  discovery.string("advertise",
                   [&](std::string_view text) { return accept_advertise(text, config); });
  discovery.string("node_name", [&](std::string_view text) -> Status {
    if (!text.empty() && text.find(kNodePlace) == text.npos) {
      return fail(ErrorCode::kInvalidArgument,
                  "\"\", or a name with \"{}\" in it, is expected: each node has its own",
                  kNodePlace);
    }
    return text_of(into.node_name, 253)(text);
  });
  Section dns = discovery.section("dns");
  dns.string("name", [&](std::string_view text) -> Status {
    if (!text.empty()) MK_RETURN_IF_ERROR(parse_dns_question(text));
    into.dns.name = text;
    return {};
  });
  dns.string("server", [&](std::string_view text) -> Status {
    const auto address = parse_address(text, false);
    if (!text.empty() && (!address || address->unix_socket)) {
      return fail(ErrorCode::kInvalidArgument, "\"\" or \"IPv4 address:port\" is expected");
    }
    into.dns.server = text;
    return {};
  });
  dns.finish();
  Section etcd = discovery.section("etcd");
  etcd.strings("endpoints", 3, 260, into.etcd.endpoints);
  etcd.string("prefix", text_of(into.etcd.prefix, 256));
  etcd.string("ttl", duration_of(into.etcd.ttl_ns, kTtlMinNs, kTtlMaxNs));
  etcd.string("cert", text_of(into.etcd.cert, 4096));
  etcd.string("key", text_of(into.etcd.key, 4096));
  etcd.string("ca", text_of(into.etcd.ca, 4096));
  etcd.finish();
  discovery.finish();
}

std::string node_name_of(const Config& config, std::uint32_t node) {
  std::string name = config.discovery.node_name;
  if (name.empty() && config.discovery.kind == "dns") {
    std::string domain = parse_dns_question(config.discovery.dns.name).value_or(DnsQuestion{}).name;
    while (domain.starts_with('_')) domain.erase(0, domain.find('.') + 1);
    name = fmt::format("node-{}.{}", kNodePlace, domain);
  }
  for (std::size_t at = name.find(kNodePlace); at != name.npos; at = name.find(kNodePlace)) {
    name.replace(at, kNodePlace.size(), std::to_string(node));
  }
  return name;
}

Status accept_advertise(std::string_view text, Config& config) {
  config.discovery.advertise.reset();
  if (text.empty()) return {};
  MK_ASSIGN_OR_RETURN(config.discovery.advertise, parse_address(text, false));
  return {};
}

bool may_reach(const Config& config, const Address& address) {
  return address.local() || config.tls.enabled() || config.insecure;
}

void check_discovery(const Config& config, Diagnostics& diagnostics) {
  const auto& discovery = config.discovery;
  if (discovery.kind == "dns" && discovery.dns.name.empty()) {
    diagnostics.plain("discovery.dns.name: must be given when discovery.kind is \"dns\"");
  }
  if (discovery.kind != "etcd") return;
  const auto& etcd = discovery.etcd;
  if (etcd.endpoints.empty() || etcd.endpoints.size() > kEndpointsMax) {
    diagnostics.plain(fmt::format("discovery.etcd.endpoints: 1 to {} of \"host:port\" are expected",
                                  kEndpointsMax));
  }
  const bool tls = !etcd.cert.empty() || !etcd.key.empty() || !etcd.ca.empty();
  if (tls && (etcd.cert.empty() || etcd.key.empty() || etcd.ca.empty())) {
    diagnostics.plain("discovery.etcd: cert, key and ca are needed together");
  }
  for (const std::string& endpoint : etcd.endpoints) {
    const auto address = parse_address(endpoint, false);
    if (!address) {
      diagnostics.plain(
          fmt::format("discovery.etcd.endpoints: {}: {}", endpoint, address.error().message));
    } else if (!tls && !config.insecure && !address->local()) {
      diagnostics.plain(fmt::format(
          "discovery.etcd.endpoints: {} is reached over the network: give cert, key and ca, or "
          "insecure = true",
          endpoint));
    }
  }
  if (etcd.prefix.empty()) diagnostics.plain("discovery.etcd.prefix: must not be empty");
  if (discovery.interval_ns > etcd.ttl_ns / 3) {
    diagnostics.plain(fmt::format(
        "discovery.interval is {}: at most a third of discovery.etcd.ttl, since a look renews the "
        "lease",
        format_duration(discovery.interval_ns)));
  }
  const Address& listen = config.listen;
  const bool everywhere = listen.host == "0.0.0.0" || listen.host == "::";
  if (!discovery.advertise && !listen.unix_socket && (everywhere || listen.port == 0)) {
    diagnostics.plain(fmt::format(
        "discovery.advertise: where do the others reach this daemon? \"listen\" ({}) does not say",
        listen.text()));
  }
}

}  // namespace mk::daemon
