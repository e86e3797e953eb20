#include "daemon/fabric/verbs/selection.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <vector>

namespace mk::fabric::verbs {
namespace {

bool usable(const PortEntry& port) {
  return port.trouble.empty() && port.state == IBV_PORT_ACTIVE && !port.iwarp;
}

std::string_view trouble_of(const PortEntry& port) {
  if (!port.trouble.empty()) return port.trouble;
  if (port.iwarp) return "iWARP, which this fabric does not speak";
  return port.state == IBV_PORT_ACTIVE ? "active" : "not active";
}

std::string list_of(std::span<const PortEntry> ports) {
  if (ports.empty()) return "this machine has no RDMA device";
  std::string text = "there are: ";
  for (std::size_t i = 0; i < ports.size(); ++i)
    text += fmt::format("{}{} ({})", i == 0 ? "" : ", ", ports[i].name(), trouble_of(ports[i]));
  return text;
}

/// A clause about those that cannot be looked at; empty: there are none.
std::string without(std::span<const PortEntry> ports) {
  std::string text;
  for (const PortEntry& port : ports) {
    if (port.trouble.empty()) continue;
    text += fmt::format("{}{} {}", text.empty() ? "; without " : ", ", port.name(), port.trouble);
  }
  return text;
}

Result<Choice> choose_named_port(std::span<const PortEntry> ports, const std::string& wanted) {
  const std::size_t colon = wanted.find(':');
  const std::string device = wanted.substr(0, colon);
  const PortEntry* found = nullptr;
  for (const PortEntry& port : ports) {
    if (port.device != device) continue;
    if (colon != std::string::npos && port.port != 0 &&
        wanted.substr(colon + 1) != std::to_string(port.port))
      continue;
    if (found == nullptr || (!usable(*found) && usable(port))) found = &port;
  }
  if (found == nullptr) {
    return fail(ErrorCode::kNotFound, "there is no RDMA device and port \"{}\"; {}", wanted,
                list_of(ports));
  }
  if (!found->trouble.empty()) {
    return fail(ErrorCode::kUnavailable, "RDMA device {}, which is asked for, {}; {}",
                found->name(), found->trouble, list_of(ports));
  }
  if (!usable(*found)) {
    return fail(ErrorCode::kUnavailable, "port {}, which the configuration names, is {}; {}",
                found->name(), trouble_of(*found), list_of(ports));
  }
  return Choice{static_cast<std::size_t>(found - ports.data()), "named by the configuration"};
}

enum class Scope { kMappedIpv4, kRoutableIpv6, kLinkLocal };

Scope scope_of(const ibv_gid& gid) {
  static constexpr std::array<std::uint8_t, 12> kMapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::memcmp(gid.raw, kMapped.data(), kMapped.size()) == 0) return Scope::kMappedIpv4;
  return link_local(gid) ? Scope::kLinkLocal : Scope::kRoutableIpv6;
}

std::string_view scope_text(Scope scope) {
  switch (scope) {
    case Scope::kMappedIpv4:
      return "an IPv4 address";
    case Scope::kRoutableIpv6:
      return "a routable IPv6 address, since none maps an IPv4 address";
    case Scope::kLinkLocal:
      break;
  }
  return "a link-local address, since there is no other: peers behind a router are out of reach";
}

std::string table_text(std::span<const ibv_gid_entry> table) {
  std::string text;
  for (const ibv_gid_entry& entry : table) {
    text += fmt::format("{}{} = {} ({})", text.empty() ? "" : ", ", entry.gid_index,
                        gid_text(entry.gid), gid_type_text(entry.gid_type));
  }
  return text.empty() ? "empty" : text;
}

}  // namespace

Result<Choice> choose_port(std::span<const PortEntry> ports, const std::string& wanted,
                           std::uint32_t rail) {
  if (!wanted.empty()) return choose_named_port(ports, wanted);
  std::vector<std::size_t> candidates;
  for (std::size_t i = 0; i < ports.size(); ++i) {
    if (usable(ports[i])) candidates.push_back(i);
  }
  if (candidates.empty()) {
    return fail(ErrorCode::kUnavailable, "no active RDMA port for rail {}; {}", rail,
                list_of(ports));
  }
  std::sort(candidates.begin(), candidates.end(), [&](std::size_t a, std::size_t b) {
    const int order = ::strverscmp(ports[a].device.c_str(), ports[b].device.c_str());
    return order != 0 ? order < 0 : ports[a].port < ports[b].port;
  });
  const std::size_t place = rail % candidates.size();
  return Choice{candidates[place], fmt::format("active port {} of {}, for rail {}{}", place + 1,
                                               candidates.size(), rail, without(ports))};
}

std::string present_name(std::span<const PortEntry> ports, const PortEntry& known) {
  const auto same = std::find_if(ports.begin(), ports.end(), [&](const PortEntry& port) {
    return known.guid != 0 && port.guid == known.guid && port.port == known.port;
  });
  return same == ports.end() ? known.name() : same->name();
}

Result<Choice> choose_gid(std::span<const ibv_gid_entry> table, std::int32_t wanted,
                          const std::string& port) {
  if (wanted >= 0) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (table[i].gid_index == static_cast<std::uint32_t>(wanted))
        return Choice{i, "named by the configuration"};
    }
    return fail(ErrorCode::kNotFound,
                "GID index {}, which the configuration names, is not in the table of port {}: {}",
                wanted, port, table_text(table));
  }
  const ibv_gid_entry* best = nullptr;
  for (const ibv_gid_entry& entry : table) {
    if (entry.gid_type == IBV_GID_TYPE_ROCE_V1) continue;
    const auto rank = [](const ibv_gid_entry& of) {
      const Scope scope = of.gid_type == IBV_GID_TYPE_IB ? Scope::kMappedIpv4 : scope_of(of.gid);
      return std::pair(scope, of.gid_index);
    };
    if (best == nullptr || rank(entry) < rank(*best)) best = &entry;
  }
  if (best == nullptr) {
    return fail(ErrorCode::kUnavailable,
                "the GID table of port {} has no RoCE v2 entry: give its network interface an "
                "address; the table: {}",
                port, table_text(table));
  }
  const auto index = static_cast<std::size_t>(best - table.data());
  if (best->gid_type == IBV_GID_TYPE_IB) return Choice{index, "the port's own on InfiniBand"};
  return Choice{index, fmt::format("the first RoCE v2 entry with {}; the table: {}",
                                   scope_text(scope_of(best->gid)), table_text(table))};
}

Result<std::uint16_t> choose_pkey(std::span<const std::uint16_t> table, std::uint32_t wanted,
                                  const std::string& port) {
  constexpr std::uint32_t kMembership = 0x8000;
  if (wanted == 0) {
    if (table.empty() || (table.front() & ~kMembership) != 0) return std::uint16_t{0};
    return fail(ErrorCode::kNotFound,
                "port {} is in no partition: the first entry of its table is empty; the subnet "
                "manager gives them out",
                port);
  }
  std::size_t found = table.size();
  for (std::size_t i = 0; i < table.size(); ++i) {
    if ((table[i] & ~kMembership) != (wanted & ~kMembership)) continue;
    const bool full = (table[i] & kMembership) != 0;
    if (found == table.size() || (full && (table[found] & kMembership) == 0)) found = i;
  }
  if (found == table.size()) {
    return fail(ErrorCode::kNotFound,
                "partition key {:#06x} is not in the table of port {} ({} entries); the subnet "
                "manager gives them out",
                wanted, port, table.size());
  }
  return static_cast<std::uint16_t>(found);
}

Result<ibv_mtu> choose_mtu(ibv_mtu active, std::uint32_t wanted_bytes, const std::string& port) {
  if (wanted_bytes == 0) return active;
  for (const ibv_mtu mtu : {IBV_MTU_256, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096}) {
    if (mtu_bytes(mtu) == wanted_bytes && mtu <= active) return mtu;
  }
  return fail(ErrorCode::kInvalidArgument,
              "an MTU of {} bytes is asked for, but port {} has {}: 256, 512, 1024, 2048 and 4096 "
              "up to that are possible",
              wanted_bytes, port, mtu_bytes(active));
}

std::uint32_t mtu_bytes(ibv_mtu mtu) { return 128u << static_cast<unsigned>(mtu); }

bool link_local(const ibv_gid& gid) { return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80; }

std::string gid_text(const ibv_gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const bool mapped = scope_of(gid) == Scope::kMappedIpv4;
  ::inet_ntop(mapped ? AF_INET : AF_INET6, gid.raw + (mapped ? 12 : 0), text.data(), text.size());
  return text.data();
}

std::string_view gid_type_text(std::uint32_t type) {
  switch (type) {
    case IBV_GID_TYPE_IB:
      return "InfiniBand";
    case IBV_GID_TYPE_ROCE_V1:
      return "RoCE v1";
    case IBV_GID_TYPE_ROCE_V2:
      return "RoCE v2";
    default:
      return "unknown type";
  }
}

}  // namespace mk::fabric::verbs
