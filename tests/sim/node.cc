#include "tests/sim/node.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

namespace mk::sim {

namespace {

/// How seldom a proxy without anything to do looks at its rings, in the end.
constexpr std::uint64_t kPauseNsMax = 20 * kMillisecond;
constexpr std::uint64_t kPauseNsMin = 5 * kMicrosecond;

}  // namespace

std::shared_ptr<Node> Node::start(World& world, Network& network, Wires& wires, NodeWatch& watch,
                                  const NodePlan& plan) {
  std::shared_ptr<Node> node(new Node(world, network, wires, watch, plan));
  node->open();
  wires.join(plan.id, node);
  return node;
}

Node::Node(World& world, Network& network, Wires& wires, NodeWatch& watch, const NodePlan& plan)
    : world_(world), network_(network), wires_(wires), watch_(watch), plan_(plan) {}

Node::~Node() { kill(); }

void Node::open() {
  std::vector<daemon::Proxy*> proxies;
  rails_.resize(plan_.rails);
  for (std::uint32_t rail = 0; rail < plan_.rails; ++rail) {
    daemon::ProxyOptions options;
    options.rail = rail;
    options.batch_window_ns = plan_.batch_window_ns;
    options.clock_ns = [this] { return clock_ns(); };
    rails_[rail].proxy = std::make_unique<daemon::Proxy>(
        network_.open(plan_.id, rail, [this, rail] { wake(rail, delay()); }), options,
        [this, rail](daemon::ProxyEvent event) {
          const std::uint64_t when = rails_[rail].events.arrival(world_.now(), delay());
          control_at(when, [rail, event = std::move(event)](Node& node) {
            node.plane_->on_proxy_event(rail, event);
          });
        });
    proxies.push_back(rails_[rail].proxy.get());
  }
  daemon::ControlOptions options;
  options.node = plan_.id;
  options.version = "sim";
  options.generation = world_.random.next() | 1;
  options.random_seed = world_.random.next() | 1;
  options.sessions_max = plan_.sessions_max;
  options.outstanding_max = plan_.outstanding_max;
  options.heartbeat_interval_ns = plan_.heartbeat_interval_ns;
  options.log = [this](const daemon::LogRecord& record) {
    world_.trace([&] { return fmt::format("node {}: {}", plan_.id, record.message); });
  };
  plane_ = std::make_unique<daemon::ControlPlane>(options, *this, *this, proxies,
                                                  [this] { return clock_ns(); });
  tick();
}

void Node::kill() {
  if (std::exchange(dead_, true)) return;
  network_.kill(plan_.id);
  wires_.leave(plan_.id);
  for (auto& [id, connection] : connections_) {
    if (connection.closed || connection.hung_up) continue;
    world_.at(connection.to_client.arrival(world_.now(), delay()), connection.end,
              [](ClientEnd& end) { end.on_closed(); });
  }
  connections_.clear();
  plane_.reset();
  rails_.clear();
}

// -- the control thread
// ----------------------------------------------------------------------------------------------

void Node::control_at(std::uint64_t time_ns, std::function<void(Node&)> event) {
  world_.at(time_ns, shared_from_this(),
            [event = std::move(event)](Node& node) { node.control(event); });
}

void Node::control(const std::function<void(Node&)>& event) {
  if (dead_) return;
  if (world_.now() < frozen_until_ns_ || !held_.empty()) {
    held_.push_back(event);
    return;
  }
  event(*this);
  for (std::uint32_t rail = 0; rail < plan_.rails; ++rail) wake(rail, delay());
}

void Node::freeze(std::uint64_t for_ns) {
  frozen_until_ns_ = std::max(frozen_until_ns_, world_.now() + for_ns);
  world_.at(frozen_until_ns_, shared_from_this(), [](Node& node) {
    if (node.world_.now() < node.frozen_until_ns_) return;
    for (const auto& event : std::exchange(node.held_, {})) node.control(event);
  });
}

void Node::tick() {
  const std::uint64_t next = plan_.heartbeat_interval_ns + world_.random.below(kMillisecond);
  world_.at(world_.now() + next, weak_from_this().lock(), [](Node& node) {
    node.control([](Node& self) { self.plane_->on_tick(); });
    if (!node.dead_) node.tick();
  });
}

void Node::drain() {
  control([](Node& node) { node.plane_->drain("is being drained by the simulator"); });
}

void Node::resume() {
  control([](Node& node) { node.plane_->resume(); });
}

// -- proxies
// ----------------------------------------------------------------------------------------------

void Node::ring(std::uint32_t rail) { wake(rail, delay()); }

void Node::wake(std::uint32_t rail, std::uint64_t delay_ns) {
  if (dead_) return;
  Rail& woken = rails_[rail];
  const std::uint64_t when = std::max(world_.now() + delay_ns, frozen_until_ns_);
  if (woken.next_pass_ns != 0 && woken.next_pass_ns <= when) return;
  woken.next_pass_ns = when;
  world_.at(when, shared_from_this(), [rail, when](Node& node) {
    if (!node.dead_ && node.rails_[rail].next_pass_ns == when) node.pass(rail);
  });
}

void Node::pass(std::uint32_t rail) {
  Rail& own = rails_[rail];
  own.next_pass_ns = 0;
  if (world_.now() < frozen_until_ns_) return wake(rail, frozen_until_ns_ - world_.now());
  const bool worked = own.proxy->step();
  watch_.after_pass(plan_.id);
  if (worked) {
    own.pause_ns = kPauseNsMin;
    wake(rail, delay());
  } else if (plane_->counts().sessions != 0) {
    wake(rail, own.pause_ns);
    own.pause_ns = std::min(2 * own.pause_ns + kPauseNsMin, kPauseNsMax);
  }
}

// -- clients
// ----------------------------------------------------------------------------------------------

ClientId Node::connect(const shm::PeerCredentials& credentials,
                       const std::shared_ptr<ClientEnd>& end) {
  const ClientId id = next_client_++;
  Connection& connection = connections_[id];
  connection.end = end;
  control_at(connection.to_daemon.arrival(world_.now(), delay()),
             [id, credentials](Node& node) { node.plane_->on_client_connected(id, credentials); });
  return id;
}

void Node::send(ClientId id, shm::Frame frame) {
  if (dead_) return;
  Connection& connection = connections_.at(id);
  if (connection.hung_up) return;
  // A std::function is copied; a frame with descriptors is not.
  auto sent = std::make_shared<shm::Frame>(std::move(frame));
  control_at(connection.to_daemon.arrival(world_.now(), delay()), [id, sent](Node& node) {
    if (!node.connections_.at(id).closed) node.plane_->on_client_frame(id, std::move(*sent));
  });
}

void Node::hang_up(ClientId id) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || std::exchange(found->second.hung_up, true)) return;
  control_at(found->second.to_daemon.arrival(world_.now(), delay()), [id](Node& node) {
    if (std::exchange(node.connections_.at(id).closed, true)) return;
    node.plane_->on_client_closed(id, "closed by the simulator");
  });
}

void Node::send(ClientId id, std::uint16_t type, std::uint64_t request,
                std::span<const std::byte> payload, std::span<const int> fds) {
  Connection& connection = connections_.at(id);
  if (connection.closed) {
    world_.violate(fmt::format("node {} sent {} to a client that is gone", plan_.id,
                               shm::message_type_name(type)));
    return;
  }
  auto frame = std::make_shared<shm::Frame>();
  frame->type = type;
  frame->request = request;
  frame->payload.assign(payload.begin(), payload.end());
  for (const int fd : fds) frame->fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  world_.at(connection.to_client.arrival(world_.now(), delay()), connection.end,
            [frame](ClientEnd& end) { end.on_frame(std::move(*frame)); });
}

void Node::close(ClientId id) {
  Connection& connection = connections_.at(id);
  if (std::exchange(connection.closed, true)) {
    world_.violate(fmt::format("node {} closed a client twice", plan_.id));
    return;
  }
  world_.at(connection.to_client.arrival(world_.now(), delay()), connection.end,
            [](ClientEnd& end) { end.on_closed(); });
}

// -- peers
// ----------------------------------------------------------------------------------------------

std::vector<NodeId> Node::nodes() const {
  std::vector<NodeId> others;
  for (NodeId node = 0; node < plan_.nodes; ++node) {
    if (node != plan_.id) others.push_back(node);
  }
  return others;
}

Status Node::send(NodeId node, const daemon::PeerMessage& message) {
  return wires_.send(plan_.id, node, message);
}

void Node::disconnect(NodeId node, const std::string& reason) {
  wires_.cut(plan_.id, node, reason, 0);
}

void Node::peer_message(NodeId from, const daemon::PeerMessage& message) {
  control([from, message](Node& node) {
    const Status status = node.plane_->on_peer_message(from, message);
    // Daemons of one build have no reason ever to refuse each other's messages.
    if (!status) {
      node.world_.violate(fmt::format("node {} refused a message of node {}: {}", node.plan_.id,
                                      from, status.error().message));
    }
  });
}

void Node::peer_down(NodeId from, const std::string& reason) {
  control([from, reason](Node& node) { node.plane_->on_peer_down(from, reason); });
}

}  // namespace mk::sim
