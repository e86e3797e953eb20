/// \file
/// One simulated daemon: the real ControlPlane and the real proxies, without their threads and
/// sockets. What those would do is here: every message between clients, control plane, proxies and
/// peers is handed over as an event of its own, in order per pair and at a time of its own.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/control/control_plane.h"
#include "tests/sim/network.h"
#include "tests/sim/wires.h"
#include "tests/sim/world.h"

namespace mk::sim {

using daemon::ClientId;

struct NodePlan {
  NodeId id = 0;
  std::uint32_t nodes = 2;
  std::uint32_t rails = 1;
  std::uint32_t sessions_max = 64;
  std::uint32_t outstanding_max = 256;
  std::uint64_t heartbeat_interval_ns = 100 * kMillisecond;
  std::uint64_t batch_window_ns = 2 * kMicrosecond;
  /// The slowest hand-off inside the daemon: to the proxies, from them, between two passes.
  std::uint64_t delay_ns_max = 20 * kMicrosecond;
};

/// A client's end of its socket.
class ClientEnd {
 public:
  virtual ~ClientEnd() = default;
  virtual void on_frame(shm::Frame frame) = 0;
  virtual void on_closed() = 0;
};

/// What a node tells the cluster.
class NodeWatch {
 public:
  virtual ~NodeWatch() = default;
  /// A proxy has made a pass: flags and counters may have changed.
  virtual void after_pass(NodeId node) = 0;
};

class Node final : public daemon::ClientPort,
                   public daemon::PeerTransport,
                   public WireEnd,
                   public std::enable_shared_from_this<Node> {
 public:
  /// Starts a daemon. Ended by `kill`, always.
  static std::shared_ptr<Node> start(World& world, Network& network, Wires& wires, NodeWatch& watch,
                                     const NodePlan& plan);
  ~Node() override;

  /// The daemon dies: its memory, its sockets and what it had under way are gone.
  void kill();
  /// Nothing of it runs for a while; its NIC goes on.
  void freeze(std::uint64_t for_ns);
  /// Its clock is ahead from now on.
  void jump_clock(std::uint64_t by_ns) { clock_ahead_ns_ += by_ns; }
  void drain();
  void resume();

  // -- clients
  ClientId connect(const shm::PeerCredentials& credentials, const std::shared_ptr<ClientEnd>& end);
  void send(ClientId client, shm::Frame frame);
  void hang_up(ClientId client);
  /// A client has written to a ring.
  void ring(std::uint32_t rail);

  std::uint64_t clock_ns() const { return world_.now() + clock_ahead_ns_; }
  daemon::ControlCounts counts() const { return plane_->counts(); }
  const NodePlan& plan() const { return plan_; }

  // ClientPort
  void send(ClientId client, std::uint16_t type, std::uint64_t request,
            std::span<const std::byte> payload, std::span<const int> fds) override;
  void close(ClientId client) override;
  Status watch_process(ClientId, UniqueFd) override { return {}; }
  // PeerTransport
  std::vector<NodeId> nodes() const override;
  Status send(NodeId node, const daemon::PeerMessage& message) override;
  std::string describe(NodeId node) const override { return fmt::format("node {}", node); }
  void disconnect(NodeId node, const std::string& reason) override;
  // WireEnd
  void peer_message(NodeId from, const daemon::PeerMessage& message) override;
  void peer_down(NodeId from, const std::string& reason) override;
  daemon::PeerHello hello() const override { return plane_->hello(); }

 private:
  struct Connection {
    std::shared_ptr<ClientEnd> end;
    InOrder to_client, to_daemon;
    bool closed = false;   ///< by the daemon
    bool hung_up = false;  ///< by the client
  };
  struct Rail {
    std::unique_ptr<daemon::Proxy> proxy;
    InOrder events;
    std::uint64_t next_pass_ns = 0;  ///< 0: none is due
    std::uint64_t pause_ns = 0;
  };

  Node(World& world, Network& network, Wires& wires, NodeWatch& watch, const NodePlan& plan);
  void open();
  /// Runs `event` on the control thread, at that time or when the node thaws.
  void control_at(std::uint64_t time_ns, std::function<void(Node&)> event);
  void control(const std::function<void(Node&)>& event);
  void tick();
  void wake(std::uint32_t rail, std::uint64_t delay_ns);
  void pass(std::uint32_t rail);
  std::uint64_t delay() { return world_.random.scaled(100, plan_.delay_ns_max); }

  World& world_;
  Network& network_;
  Wires& wires_;
  NodeWatch& watch_;
  const NodePlan plan_;
  bool dead_ = false;
  std::uint64_t clock_ahead_ns_ = 0;
  std::uint64_t frozen_until_ns_ = 0;
  std::deque<std::function<void(Node&)>> held_;  ///< of the control thread, while frozen
  std::map<ClientId, Connection> connections_;
  ClientId next_client_ = 1;
  std::vector<Rail> rails_;
  std::unique_ptr<daemon::ControlPlane> plane_;  ///< gone before the proxies
};

}  // namespace mk::sim
