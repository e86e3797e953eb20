/// \file
/// One control plane, or several that talk to each other, driven step by step: fake clients, a fake
/// clock, a fake network, and real proxies whose passes the test makes.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/control/control_plane.h"
#include "shm/host/buffer_file.h"
#include "shm/host/protocol.h"
#include "shm/layout.h"
#include "shm/ring.h"
#include "tests/daemon/control/fake_network.h"
#include "tests/daemon/control/played_peer.h"

namespace mk::daemon::test {

inline constexpr std::uint64_t kMillisecond = 1'000'000;

struct Received {
  shm::MessageType type;
  std::uint64_t request = 0;
  std::vector<std::byte> payload;
  std::vector<UniqueFd> fds;
};

struct NodeSetup {
  NodeId id = 0;
  std::uint32_t nodes = 2;  ///< of the cluster, this one included
  std::uint32_t rails = 1;
  fabric::DeliveryContract contract = fabric::DeliveryContract::kOrdered;
  std::uint32_t sessions_max = 8;
  std::uint64_t session_memory_bytes_max = 0;
  decltype(ControlOptions::user_max) user_max{};
  decltype(ControlOptions::all_max) all_max{};
  std::function<JobShare(const std::string&)> job_share{};
  decltype(ControlOptions::rails_near) rails_near{};
  decltype(ControlOptions::gpu_rails) gpu_rails{};
  decltype(ControlOptions::place_of) place_of{};
  bool device_memory = false;         ///< the network reaches GPUs,
  std::uint32_t gpu_regions_max = 0;  ///< and takes so many buffers of theirs; 0: no bound
};

/// One daemon's control plane.
class TestNode final : public ClientPort, public PeerTransport {
 public:
  TestNode(const NodeSetup& setup, std::shared_ptr<FakeMemory> memory,
           std::shared_ptr<std::uint64_t> clock);
  ~TestNode() override;

  // -- clients
  ClientId connect(std::int32_t pid = 100, std::uint32_t uid = 1000);
  /// Sends a request and returns its number. `fds` are given away.
  template <class Message>
  std::uint64_t send(ClientId client, const Message& message, std::vector<UniqueFd>&& fds = {}) {
    return send_raw(client, static_cast<std::uint16_t>(Message::kType),
                    shm::encode_message(message), std::move(fds));
  }
  std::uint64_t send_raw(ClientId client, std::uint16_t type, std::vector<std::byte> payload,
                         std::vector<UniqueFd> fds = {});
  void hang_up(ClientId client);
  /// The next message of this type that the client has not looked at; those before it stay.
  std::optional<Received> take(ClientId client, shm::MessageType type);
  template <class Message>
  std::optional<Message> take(ClientId client) {
    auto received = take(client, Message::kType);
    if (!received) return std::nullopt;
    auto message = shm::decode_message<Message>(received->payload);
    EXPECT_TRUE(message) << message.error().message;
    return message ? std::optional<Message>(*message) : std::nullopt;
  }
  bool closed(ClientId client) const { return closed_.contains(client); }
  /// Connects, says hello and attaches; the job need not come up.
  ClientId attach(const shm::Attach& attach, std::int32_t pid = 0, std::uint32_t uid = 1000);
  /// The segment that came with the AttachReply of `client`.
  shm::Segment segment(ClientId client);
  /// Registers a new buffer of `bytes` and returns its handle; 0 when it was refused.
  std::uint16_t register_buffer(ClientId client, std::uint64_t bytes = 4096);

  // -- time and proxies
  /// Lets the proxies work and their events arrive, until nothing happens any more.
  bool step();
  /// Lets time pass, then ticks.
  void wait(std::uint64_t ms);
  /// Lets time pass.
  void pass(std::uint64_t ms) { *clock_ += ms * kMillisecond; }

  // -- other nodes, played
  /// Has node `from` offer the part, and answer with proof and part as it should. An error: of
  /// the first message that was refused.
  Status play(NodeId from, const JobPart& part, std::uint32_t uid = 1000,
              const std::string& secret = "");
  /// Has the played nodes answer what they were told; also at the end of all calls above.
  Status answer();

  // -- what is left
  /// Nobody and nothing is held, except links.
  void expect_nothing_left() const;

  // ClientPort
  void send(ClientId client, std::uint16_t type, std::uint64_t request,
            std::span<const std::byte> payload, std::span<const int> fds) override;
  void close(ClientId client) override;
  Status watch_process(ClientId, UniqueFd) override { return {}; }
  // PeerTransport
  std::vector<NodeId> nodes() const override;
  Status send(NodeId node, const PeerMessage& message) override;
  std::string describe(NodeId node) const override { return fmt::format("node {}", node); }
  void disconnect(NodeId, const std::string&) override {}

  const NodeSetup setup;
  std::shared_ptr<FakeNic> nic;
  std::set<NodeId> reachable;                             ///< peers that `send` reaches
  std::vector<std::pair<NodeId, PeerMessage>> sent;       ///< to peers, unless routed
  std::function<void(NodeId, const PeerMessage&)> route;  ///< takes messages instead of `sent`
  std::vector<std::unique_ptr<Proxy>> proxies;
  std::unique_ptr<ControlPlane> plane;
  std::vector<std::string> logged;

 private:
  std::shared_ptr<std::uint64_t> clock_;
  std::deque<std::pair<std::uint32_t, ProxyEvent>> events_;
  ClientId next_client_ = 10;
  std::uint64_t next_request_ = 1000;
  std::map<ClientId, std::deque<Received>> inbox_;
  std::set<ClientId> closed_;
  std::map<NodeId, PlayedPeer> played_;
  std::deque<std::pair<NodeId, PeerMessage>> unanswered_;
};

/// Several nodes. Messages between two nodes keep their order; which pair is next is drawn by the
/// seed.
class TestCluster {
 public:
  explicit TestCluster(std::uint32_t nodes, NodeSetup setup = {}, std::uint64_t seed = 1);

  TestNode& node(std::uint32_t id) { return *nodes_[id]; }
  /// Brings streams up, or down.
  void connect(NodeId a, NodeId b);
  void connect_all();
  void disconnect(NodeId a, NodeId b);
  /// Delivers and steps until nothing happens any more.
  void settle();
  /// Delivers one message; false when there is none.
  bool deliver_one();
  void wait(std::uint64_t ms);
  void expect_nothing_left();
  /// Breaks of streams that a control plane asked for.
  std::vector<std::string> broken;

 private:
  std::shared_ptr<FakeMemory> memory_ = std::make_shared<FakeMemory>();
  std::shared_ptr<std::uint64_t> clock_ = std::make_shared<std::uint64_t>(1'000'000'000);
  std::vector<std::unique_ptr<TestNode>> nodes_;
  std::map<std::pair<NodeId, NodeId>, std::deque<PeerMessage>> wires_;
  std::mt19937_64 random_;
};

/// Rank `rank` of a job of `nodes` x `local_size`.
shm::Attach rank_of(const std::string& job, std::uint32_t nodes, std::uint32_t local_size,
                    std::uint32_t rank);

/// The host memory that its session takes before it has a buffer.
std::uint64_t segment_bytes_of(const shm::Attach& attach);

/// The part a scripted peer would send for `node_rank`: `flags_key` names no memory.
JobPart part_of(const std::string& job, std::uint64_t part_id, std::uint32_t nodes,
                std::uint32_t local_size, std::uint32_t node_rank);

/// The descriptors this process has open.
std::size_t open_descriptors();

std::vector<std::byte> bytes_of(const std::string& text);

}  // namespace mk::daemon::test
