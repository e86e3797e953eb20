#include "tests/daemon/control/rig.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

namespace mk::daemon::test {

TestNode::TestNode(const NodeSetup& node_setup, std::shared_ptr<FakeMemory> memory,
                   std::shared_ptr<std::uint64_t> clock)
    : setup(node_setup), nic(std::make_shared<FakeNic>()), clock_(std::move(clock)) {
  nic->contract = setup.contract;
  nic->device_memory = setup.device_memory;
  nic->gpu_regions_max = setup.gpu_regions_max;
  std::vector<Proxy*> raw;
  for (std::uint32_t rail = 0; rail < setup.rails; ++rail) {
    ProxyOptions options;
    options.rail = rail;
    options.batch_window_ns = 0;
    options.clock_ns = [this] { return *clock_; };
    proxies.push_back(std::make_unique<Proxy>(
        std::make_unique<FakeEndpoint>(memory, nic), options,
        [this, rail](ProxyEvent event) { events_.emplace_back(rail, std::move(event)); }));
    raw.push_back(proxies.back().get());
  }
  ControlOptions options;
  options.node = setup.id;
  options.version = "test";
  options.sessions_max = setup.sessions_max;
  options.session_memory_bytes_max = setup.session_memory_bytes_max;
  options.user_max = setup.user_max;
  options.all_max = setup.all_max;
  options.job_share = setup.job_share;
  options.rails_near = setup.rails_near;
  options.gpu_rails = setup.gpu_rails;
  options.place_of = setup.place_of;
  options.log = [this](const LogRecord& record) { logged.push_back(record.message); };
  plane = std::make_unique<ControlPlane>(options, *this, *this, raw, [this] { return *clock_; });
}

TestNode::~TestNode() = default;

ClientId TestNode::connect(std::int32_t pid, std::uint32_t uid) {
  const ClientId client = next_client_++;
  plane->on_client_connected(client, {pid, uid, uid});
  return client;
}

std::uint64_t TestNode::send_raw(ClientId client, std::uint16_t type,
                                 std::vector<std::byte> payload, std::vector<UniqueFd> fds) {
  shm::Frame frame;
  frame.type = type;
  frame.request = next_request_++;
  frame.payload = std::move(payload);
  frame.fds = std::move(fds);
  const std::uint64_t request = frame.request;
  if (!closed(client)) plane->on_client_frame(client, std::move(frame));
  EXPECT_TRUE(answer());
  return request;
}

void TestNode::hang_up(ClientId client) {
  if (closed(client)) return;
  closed_.insert(client);
  plane->on_client_closed(client, "closed by peer");
}

std::optional<Received> TestNode::take(ClientId client, shm::MessageType type) {
  auto& inbox = inbox_[client];
  const auto found = std::ranges::find(inbox, type, &Received::type);
  if (found == inbox.end()) return std::nullopt;
  Received received = std::move(*found);
  inbox.erase(found);
  return received;
}

ClientId TestNode::attach(const shm::Attach& attach, std::int32_t pid, std::uint32_t uid) {
  const ClientId client =
      connect(pid != 0 ? pid : 100 + static_cast<std::int32_t>(attach.rank), uid);
  send(client, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
  EXPECT_TRUE(take<shm::HelloReply>(client));
  send(client, attach);
  return client;
}

shm::Segment TestNode::segment(ClientId client) {
  auto reply = take(client, shm::MessageType::kAttachReply);
  EXPECT_TRUE(reply);
  auto segment = shm::Segment::map(std::move(reply->fds.at(0)));
  EXPECT_TRUE(segment) << segment.error().message;
  return std::move(*segment);
}

std::uint16_t TestNode::register_buffer(ClientId client, std::uint64_t bytes) {
  auto file = shm::BufferFile::create("test", bytes);
  EXPECT_TRUE(file);
  std::vector<UniqueFd> fds;
  fds.emplace_back(::fcntl(file->fd(), F_DUPFD_CLOEXEC, 0));
  send(client, shm::RegisterBuffer{bytes, "test"}, std::move(fds));
  const auto reply = take<shm::RegisterBufferReply>(client);
  return reply ? reply->handle : shm::kNoHandle;
}

bool TestNode::step() {
  bool any = false;
  for (bool worked = true; worked;) {
    worked = false;
    for (const auto& proxy : proxies) worked = proxy->step() || worked;
    while (!events_.empty()) {
      auto [rail, event] = std::move(events_.front());
      events_.pop_front();
      plane->on_proxy_event(rail, std::move(event));
      worked = true;
    }
    any = any || worked;
  }
  EXPECT_TRUE(answer());
  return any;
}

void TestNode::wait(std::uint64_t ms) {
  *clock_ += ms * kMillisecond;
  plane->on_tick();
  EXPECT_TRUE(answer());
}

Status TestNode::play(NodeId from, const JobPart& part, std::uint32_t uid,
                      const std::string& secret) {
  PlayedPeer& peer = played_.try_emplace(from, from, setup.id).first->second;
  MK_RETURN_IF_ERROR(answer());  // what it has heard by now
  for (PeerMessage& message : peer.play(part, uid, secret)) {
    MK_RETURN_IF_ERROR(plane->on_peer_message(from, std::move(message)));
  }
  return answer();
}

Status TestNode::answer() {
  while (!unanswered_.empty()) {
    const auto [to, said] = std::move(unanswered_.front());
    unanswered_.pop_front();
    PlayedPeer& peer = played_.try_emplace(to, to, setup.id).first->second;
    for (PeerMessage& message : peer.answer(said)) {
      MK_RETURN_IF_ERROR(plane->on_peer_message(to, std::move(message)));
    }
  }
  return {};
}

void TestNode::expect_nothing_left() const {
  ControlCounts counts = plane->counts();
  counts.links_up = 0;
  EXPECT_EQ(counts, ControlCounts{})
      << "node " << setup.id << ": " << counts.clients << " clients, " << counts.sessions
      << " sessions, " << counts.jobs << " jobs, " << counts.early_parts << " parts, "
      << counts.slots_used << " slots";
  EXPECT_TRUE(plane->idle());
  EXPECT_EQ(nic->local_regions, 0);
  EXPECT_EQ(nic->remote_regions, 0);
  EXPECT_EQ(nic->links, static_cast<int>(plane->counts().links_up));
}

void TestNode::send(ClientId client, std::uint16_t type, std::uint64_t request,
                    std::span<const std::byte> payload, std::span<const int> fds) {
  EXPECT_FALSE(closed(client)) << "a frame after the end: " << shm::message_type_name(type);
  Received received{static_cast<shm::MessageType>(type), request, {}, {}};
  received.payload.assign(payload.begin(), payload.end());
  for (const int fd : fds) received.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  inbox_[client].push_back(std::move(received));
}

void TestNode::close(ClientId client) {
  EXPECT_FALSE(closed(client));
  closed_.insert(client);
}

std::vector<NodeId> TestNode::nodes() const {
  std::vector<NodeId> others;
  for (NodeId node = 0; node < setup.nodes; ++node) {
    if (node != setup.id) others.push_back(node);
  }
  return others;
}

Status TestNode::send(NodeId node, const PeerMessage& message) {
  if (!reachable.contains(node)) return fail(ErrorCode::kUnavailable, "no stream");
  if (route) {
    route(node, message);
  } else {
    sent.emplace_back(node, message);
    unanswered_.emplace_back(node, message);
  }
  return {};
}

TestCluster::TestCluster(std::uint32_t nodes, NodeSetup setup, std::uint64_t seed) : random_(seed) {
  setup.nodes = nodes;
  for (NodeId id = 0; id < nodes; ++id) {
    setup.id = id;
    nodes_.push_back(std::make_unique<TestNode>(setup, memory_, clock_));
    nodes_.back()->route = [this, id](NodeId to, const PeerMessage& message) {
      wires_[{id, to}].push_back(message);
    };
  }
}

void TestCluster::connect(NodeId a, NodeId b) {
  for (const auto& [from, to] : {std::pair{a, b}, std::pair{b, a}}) {
    node(from).reachable.insert(to);
    wires_[{from, to}].push_back(node(from).plane->hello());
  }
}

void TestCluster::connect_all() {
  for (NodeId a = 0; a < nodes_.size(); ++a) {
    for (NodeId b = a + 1; b < nodes_.size(); ++b) connect(a, b);
  }
}

void TestCluster::disconnect(NodeId a, NodeId b) {
  for (const auto& [from, to] : {std::pair{a, b}, std::pair{b, a}}) {
    node(from).reachable.erase(to);
    wires_.erase({from, to});
  }
  node(a).plane->on_peer_down(b, "the wire was cut");
  node(b).plane->on_peer_down(a, "the wire was cut");
}

bool TestCluster::deliver_one() {
  std::vector<std::pair<NodeId, NodeId>> pending;
  for (const auto& [pair, queue] : wires_) {
    if (!queue.empty()) pending.push_back(pair);
  }
  if (pending.empty()) return false;
  const auto [from, to] = pending[random_() % pending.size()];
  auto& queue = wires_[{from, to}];
  PeerMessage message = std::move(queue.front());
  queue.pop_front();
  const Status status = node(to).plane->on_peer_message(from, std::move(message));
  if (!status) {
    broken.push_back(status.error().message);
    disconnect(from, to);
  }
  return true;
}

void TestCluster::settle() {
  for (bool any = true; any;) {
    any = deliver_one();
    for (const auto& node : nodes_) any = node->step() || any;
  }
}

void TestCluster::wait(std::uint64_t ms) {
  // In ticks as a daemon makes them, so that nothing happens at once that would not.
  for (std::uint64_t passed = 0; passed < ms; passed += 100) {
    *clock_ += std::min<std::uint64_t>(100, ms - passed) * kMillisecond;
    for (const auto& node : nodes_) node->plane->on_tick();
    settle();
  }
}

void TestCluster::expect_nothing_left() {
  for (const auto& node : nodes_) node->expect_nothing_left();
  EXPECT_TRUE(memory_->ranges.empty());
}

std::uint64_t segment_bytes_of(const shm::Attach& attach) {
  return shm::layout_of({attach.lane_count, attach.slot_count_log2, attach.flag_count})
      .segment_bytes;
}

shm::Attach rank_of(const std::string& job, std::uint32_t nodes, std::uint32_t local_size,
                    std::uint32_t rank) {
  shm::Attach attach;
  attach.job = job;
  attach.rank = rank;
  attach.world = nodes * local_size;
  attach.node_rank = rank / local_size;
  attach.nodes = nodes;
  attach.local_rank = rank % local_size;
  attach.local_size = local_size;
  attach.slot_count_log2 = 5;
  attach.flag_count = 256;
  attach.timeout_ms = 5'000;
  return attach;
}

JobPart part_of(const std::string& job, std::uint64_t part_id, std::uint32_t nodes,
                std::uint32_t local_size, std::uint32_t node_rank) {
  JobPart part;
  part.job = job;
  part.part_id = part_id;
  part.node_rank = node_rank;
  part.nodes = nodes;
  part.local_size = local_size;
  for (std::uint32_t local = 0; local < local_size; ++local) {
    part.sessions.push_back({node_rank * local_size + local, local, 256, Bytes(8)});
  }
  return part;
}

std::size_t open_descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

}  // namespace mk::daemon::test
