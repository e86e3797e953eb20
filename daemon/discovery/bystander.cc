#include "daemon/discovery/bystander.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "daemon/config/discovery_section.h"
#include "daemon/discovery/dns_source.h"
#include "daemon/discovery/etcd_source.h"

namespace mk::daemon {
namespace {

using Clock = std::chrono::steady_clock;

/// For daemons behind DNS that have not said who they are yet.
constexpr auto kPatience = std::chrono::seconds(3);
constexpr auto kPause = std::chrono::milliseconds(100);
/// No node's number: this node's own daemon is then one among the others.
constexpr std::uint32_t kNobody = UINT32_MAX;

Result<std::vector<Sighting>> look_in_dns(const Config& config) {
  MK_ASSIGN_OR_RETURN(const TlsTexts tls, read_tls(config.tls.cert, config.tls.key, config.tls.ca));
  DnsSource source(config, DiscoverySelf{kNobody, 0, {}}, tls);
  const auto deadline = Clock::now() + kPatience;
  while (true) {
    MK_ASSIGN_OR_RETURN(const auto nodes, source.look());
    const std::vector<Address> silent = source.silent();
    if (!silent.empty() && Clock::now() < deadline) {
      std::this_thread::sleep_for(kPause);
      continue;
    }
    std::vector<Sighting> seen;
    for (const PeerConfig& node : nodes) seen.push_back({node.id, node.address});
    for (const Address& address : silent) seen.push_back({std::nullopt, address});
    return seen;
  }
}

Result<std::vector<Sighting>> look_in_etcd(const Config& config) {
  const auto& etcd = config.discovery.etcd;
  MK_ASSIGN_OR_RETURN(const TlsTexts tls, read_tls(etcd.cert, etcd.key, etcd.ca, "discovery.etcd"));
  EtcdSource source(config, DiscoverySelf{config.node_id, 0, config.listen}, tls);
  MK_ASSIGN_OR_RETURN(const auto nodes, source.list());
  std::vector<Sighting> seen;
  for (const PeerConfig& node : nodes) seen.push_back({node.id, node.address});
  return seen;
}

}  // namespace

Result<std::vector<Sighting>> find_nodes(const Config& config) {
  std::vector<Sighting> nodes, found;
  for (const PeerConfig& peer : config.peers) nodes.push_back({peer.id, peer.address});
  if (config.discovery.kind == "dns") {
    MK_ASSIGN_OR_RETURN(found, look_in_dns(config));
  } else if (config.discovery.kind == "etcd") {
    MK_ASSIGN_OR_RETURN(found, look_in_etcd(config));
  }
  for (Sighting& one : found) {
    const bool known = std::ranges::any_of(config.peers, [&](const PeerConfig& peer) {
      return peer.id == one.node || peer.address.text() == one.address.text();
    });
    if (known || one.node == config.node_id) continue;
    if (!may_reach(config, one.address))
      one.trouble = "beyond this machine, which takes [tls] or insecure = true";
    nodes.push_back(std::move(one));
  }
  return nodes;
}

}  // namespace mk::daemon
