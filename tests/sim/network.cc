#include "tests/sim/network.h"

#include <sys/stat.h>

#include "tests/sim/network_impl.h"

namespace mk::sim {

FileId file_of(int fd) {
  struct stat status {};
  return fd >= 0 && ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}

Network::Network(World& world, const NetworkPlan& plan, NetworkWatch& watch)
    : impl_(std::make_unique<Impl>(world, plan, watch)) {}
Network::~Network() = default;

std::unique_ptr<fabric::Endpoint> Network::open(NodeId node, std::uint32_t rail,
                                                std::function<void()> wake) {
  return std::make_unique<SimEndpoint>(*impl_, node, rail, std::move(wake));
}

void Network::kill(NodeId node) {
  for (const auto& [number, endpoint] : impl_->endpoints) {
    if (endpoint->node == node) endpoint->kill();
  }
}

void Network::break_links(NodeId a, NodeId b) {
  impl_->watch.on_trouble(a, b, 0);
  for (const auto& [number, endpoint] : impl_->endpoints) {
    if (endpoint->node == a) endpoint->fail_links_to_node(b, "the simulator broke it");
    if (endpoint->node == b) endpoint->fail_links_to_node(a, "the simulator broke it");
  }
}

void Network::flap(NodeId node, std::uint32_t rail, std::uint64_t for_ns) {
  for (const auto& [number, port] : impl_->endpoints) {
    if (port->node != node || port->rail != rail) continue;
    port->flaps_until_ns = impl_->world.now() + for_ns;
    for (const auto& [other_number, other] : impl_->endpoints) {
      if (other == port) continue;
      impl_->watch.on_trouble(node, other->node, for_ns);
      other->fail_links_to(number, "the port at the other end is down");
      port->fail_links_to(other_number, "the port is down");
    }
  }
}

void Network::storm(NodeId node, std::uint64_t for_ns) {
  for (const auto& [number, endpoint] : impl_->endpoints) {
    if (endpoint->node == node) endpoint->storms_until_ns = impl_->world.now() + for_ns;
  }
}

Network::Counts Network::counts(NodeId node) const {
  Counts counts;
  for (const auto& [number, endpoint] : impl_->endpoints) {
    if (endpoint->node != node) continue;
    counts.local_regions += endpoint->local_regions;
    counts.remote_regions += endpoint->remote_regions;
    counts.links += endpoint->link_count();
    counts.writes += endpoint->flight_count();
  }
  return counts;
}

}  // namespace mk::sim
