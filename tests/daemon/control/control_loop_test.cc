// A control loop with real threads and sockets, and a fabric that misbehaves.
#include "daemon/control/control_loop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <latch>

#include "shm/atomic.h"
#include "tests/daemon/control/fake_network.h"
#include "tests/daemon/control/rig.h"
#include "tests/daemon/control/socket_client.h"

namespace mk::daemon::test {
namespace {

/// One other daemon that meets a job of ours, and says nothing else.
class MeetingPeer final : public PeerTransport {
 public:
  MeetingPeer(PeerSink& sink, const JobPart& part) : sink_(sink) {
    say(peer_.play(part, ::getuid()));
  }
  std::vector<NodeId> nodes() const override { return {1}; }
  Status send(NodeId, const PeerMessage& message) override {
    say(peer_.answer(message));
    return {};
  }
  std::string describe(NodeId node) const override { return fmt::format("node {}", node); }
  void disconnect(NodeId, const std::string&) override {}

 private:
  void say(std::vector<PeerMessage> messages) {
    for (PeerMessage& message : messages) sink_.peer_message(1, std::move(message), {});
  }
  PeerSink& sink_;
  PlayedPeer peer_{1, 0};
};

TEST(ControlLoop, AHungPeerLeavesOtherJobsTheirHeartbeat) {
  auto nic = std::make_shared<FakeNic>();
  std::atomic<bool> importing{false};
  std::latch answered(1);
  nic->on_import = [&] {
    importing = true;
    answered.wait();
  };
  auto loop =
      ControlLoop::create({.socket_path = fmt::format("@mkernel-loop-test-{}", ::getpid())});
  ASSERT_TRUE(loop) << loop.error().message;
  ControlLoop* raw = loop->get();
  Proxy proxy(std::make_unique<FakeEndpoint>(std::make_shared<FakeMemory>(), nic), {},
              [raw](ProxyEvent event) { raw->proxy_event(0, std::move(event)); });
  ControlOptions options;
  options.heartbeat_interval_ns = 5 * kMillisecond;
  raw->configure(options, {&proxy});
  PeerHello hello = raw->hello();
  hello.node = 1;
  raw->peer_message(1, hello, {});
  MeetingPeer peer(*raw, part_of("stuck", 77, 2, 1, 1));
  ASSERT_TRUE(proxy.start());
  ASSERT_TRUE(raw->start(peer));
  {
    SocketClient other(raw->socket_path()), stuck(raw->socket_path());
    ASSERT_TRUE(other.attach(rank_of("other", 1, 1, 0)));
    auto attach = rank_of("stuck", 2, 1, 0);
    attach.timeout_ms = 60'000;
    ASSERT_TRUE(stuck.attach(attach));
    EXPECT_TRUE(eventually([&] { return importing.load(); }));
    // Nothing that the control thread does can be seen now, but the beats go on.
    for (int beat = 0; beat < 20; ++beat) {
      const std::uint64_t last = shm::load_relaxed(&other.segment->header().heartbeat_ns);
      EXPECT_TRUE(eventually([&] {
        return shm::load_relaxed(&other.segment->header().heartbeat_ns) > last &&
               shm::load_relaxed(&stuck.segment->header().heartbeat_ns) > last;
      }));
    }
    answered.count_down();
    raw->peer_message(1, JobLeft{"stuck", 77, 1, ErrorCode::kOk, ""}, {});
    EXPECT_TRUE(other.call<shm::AllocFlagsReply>(shm::AllocFlags{1}));
  }
  raw->stop(std::chrono::steady_clock::now());
  proxy.stop();
  raw->reset();
}

}  // namespace
}  // namespace mk::daemon::test
