// A control loop with real threads and sockets, and a fabric that misbehaves.
#include "daemon/control/control_loop.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <latch>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

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

/// One other daemon that says nothing.
class SilentPeer final : public PeerTransport {
 public:
  std::vector<NodeId> nodes() const override { return {1}; }
  Status send(NodeId, const PeerMessage&) override { return {}; }
  std::string describe(NodeId node) const override { return fmt::format("node {}", node); }
  void disconnect(NodeId, const std::string&) override {}
};

/// A loop with a network that works, and one other daemon that says nothing.
class LoopTest : public testing::Test {
 protected:
  void start(ControlLoopOptions options) {
    static int count = 0;
    options.socket_path = fmt::format("@mkernel-loop-test-{}-{}", ::getpid(), ++count);
    auto made = ControlLoop::create(options);
    ASSERT_TRUE(made) << made.error().message;
    loop = std::move(*made);
    proxy = std::make_unique<Proxy>(
        std::make_unique<FakeEndpoint>(std::make_shared<FakeMemory>(), nic), ProxyOptions{},
        [this](ProxyEvent event) { loop->proxy_event(0, std::move(event)); });
    ControlOptions control;
    control.heartbeat_interval_ns = 5 * kMillisecond;
    control.log = [this](const LogRecord& record) {
      std::lock_guard lock(mutex);
      logged.push_back(record.message);
    };
    loop->configure(control, {proxy.get()});
    ASSERT_TRUE(proxy->start());
    ASSERT_TRUE(loop->start(peer));
  }
  void TearDown() override {
    if (!loop) return;
    loop->stop(std::chrono::steady_clock::now());
    proxy->stop();
    loop->reset();
  }
  bool attaches(const std::string& job) {
    SocketClient client(loop->socket_path());
    return client.attach(rank_of(job, 1, 1, 0)).has_value() &&
           client.call<shm::Done>(shm::Detach{}).has_value();
  }

  const std::shared_ptr<FakeNic> nic = std::make_shared<FakeNic>();
  SilentPeer peer;
  std::unique_ptr<ControlLoop> loop;
  std::unique_ptr<Proxy> proxy;
  std::mutex mutex;
  std::vector<std::string> logged;
};

TEST_F(LoopTest, ASessionThatHasEndedKeepsNobodysPlace) {
  ControlLoopOptions options;
  options.clients_max = 24;
  options.clients_unattached_max = options.user_unattached_max = 8;
  options.handshake_timeout = std::chrono::milliseconds(300);
  start(options);
  // Ranks of jobs whose others never come: all fail at once, and none of them hangs up.
  std::vector<std::unique_ptr<SocketClient>> left;
  for (int i = 0; i < 3 * 24; ++i) {
    EXPECT_TRUE(eventually([&] {
      auto client = std::make_unique<SocketClient>(loop->socket_path());
      shm::Attach attach = rank_of(fmt::format("job-{}", i), 2, 1, 0);
      attach.timeout_ms = 1;
      const bool attached = client->attach(attach).has_value();
      if (attached) left.push_back(std::move(client));
      return attached;
    })) << "after "
        << left.size();
  }
  // Each has heard why, and then the end.
  EXPECT_EQ(left.front()->await<shm::JobUp>().error().code, ErrorCode::kTimeout);
  EXPECT_TRUE(eventually([&] { return attaches("others"); }));
}

TEST_F(LoopTest, AConnectionBeyondTheUsersShareIsRefusedAndLogged) {
  ControlLoopOptions options;
  options.user_unattached_max = 2;
  start(options);
  const SocketClient first(loop->socket_path()), second(loop->socket_path());
  SocketClient third(loop->socket_path());
  EXPECT_FALSE(third.attach(rank_of("late", 1, 1, 0)));
  EXPECT_TRUE(eventually([&] {
    std::lock_guard lock(mutex);
    return std::ranges::any_of(logged, [](const std::string& line) {
      return line.starts_with(
          fmt::format("turned a connection of process {} away: user {} has 2 "
                      "connections that have not attached",
                      ::getpid(), ::getuid()));
    });
  }));
}

TEST_F(LoopTest, AnswersThatNobodyReadsHoldFewDescriptorsAndHaveADeadline) {
  ControlLoopOptions options;
  options.unread_timeout = std::chrono::milliseconds(500);
  start(options);
  SocketClient client(loop->socket_path());
  ASSERT_TRUE(client.attach(rank_of("job", 1, 1, 0)));
  const auto handle = client.add_buffer(4096);
  ASSERT_TRUE(handle);
  const std::size_t before = open_descriptors();
  // Each answer has a descriptor. Those in the socket are the kernel's; what does not fit is ours.
  std::size_t most = 0, sent = 0;
  for (; sent < 20'000; ++sent) {
    const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    if (!client.try_post(shm::OpenPeerBuffer{0, *handle}, soon)) break;
    if (sent % 64 == 0) most = std::max(most, open_descriptors());
  }
  most = std::max(most, open_descriptors());
  EXPECT_LT(sent, 20'000u) << "requests are still taken";
  EXPECT_LE(most, before + 4) << "after " << sent << " requests";
  EXPECT_TRUE(attaches("others"));
  EXPECT_TRUE(eventually([&] {
    std::lock_guard lock(mutex);
    return std::ranges::any_of(logged, [](const std::string& line) {
      return line.find("does not read") != std::string::npos;
    });
  }));
}

TEST_F(LoopTest, WhoHasNotAttachedSendsSmallFramesOnly) {
  start({});
  for (const bool greeted : {false, true}) {
    SocketClient client(loop->socket_path());
    if (greeted) {
      ASSERT_TRUE(client.call<shm::HelloReply>(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "t"}));
    }
    (void)client.try_post(shm::Exchange{"tag", std::vector<std::byte>(8192), 1}, in_time());
    const auto frame = client.next();
    ASSERT_TRUE(frame) << frame.error().message;
    const auto error = shm::decode_message<shm::ErrorReply>(frame->payload);
    ASSERT_TRUE(error);
    EXPECT_NE(error->message.find("at most 4096"), std::string::npos) << error->message;
  }
}

TEST_F(LoopTest, WhoHasAttachedSendsRequestsAndNoLargerFrames) {
  start({});
  SocketClient client(loop->socket_path());
  ASSERT_TRUE(client.attach(rank_of("large", 1, 1, 0)));
  const std::vector<std::byte> largest(shm::kExchangeBlobBytesMax);
  const auto taken = client.call<shm::ExchangeReply>(shm::Exchange{"tag", largest, 1});
  EXPECT_TRUE(taken) << taken.error().message;
  const std::vector<std::byte> larger(shm::kRequestBytesMax);
  (void)client.try_post(shm::Exchange{"tag", larger, 1}, in_time());
  const auto refused = client.await<shm::ErrorReply>();
  const std::string said = refused ? refused->message : refused.error().message;
  EXPECT_NE(said.find("at most 131072"), std::string::npos) << said;
}

TEST_F(LoopTest, AnExceptionCostsTheClientThatCausedItAndNobodyElse) {
  start({});
  SocketClient other(loop->socket_path()), guilty(loop->socket_path());
  ASSERT_TRUE(other.attach(rank_of("other", 1, 1, 0)));
  ASSERT_TRUE(guilty.attach(rank_of("guilty", 1, 1, 0)));
  nic->on_register = [] { throw std::bad_alloc(); };
  const auto refused = guilty.add_buffer(4096);
  ASSERT_FALSE(refused);
  nic->on_register = {};
  EXPECT_TRUE(eventually([&] { return attaches("guilty"); })) << "its name is free again";
  EXPECT_TRUE(other.call<shm::AllocFlagsReply>(shm::AllocFlags{1}));
  EXPECT_TRUE(other.add_buffer(4096));
}

TEST_F(LoopTest, OneWhoHasMostConnectionsMakesRoomForAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  ControlLoopOptions options;
  options.clients_unattached_max = options.user_unattached_max = 8;
  options.handshake_timeout = std::chrono::minutes(10);
  start(options);
  int ready[2];
  ASSERT_EQ(0, ::pipe(ready));
  const pid_t greedy = ::fork();
  if (greedy == 0) {
    // Only calls that a child of threads may make; the sockets stay open until it is killed.
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string& path = loop->socket_path();
    std::memcpy(address.sun_path + 1, path.data() + 1, path.size() - 1);
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
    if (::setresuid(65534, 65534, 65534) != 0) ::_exit(1);
    for (int i = 0; i < 8; ++i) {
      const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
      if (::connect(fd, reinterpret_cast<sockaddr*>(&address), bytes) != 0) ::_exit(2);
    }
    if (::write(ready[1], "x", 1) != 1) ::_exit(3);
    ::pause();
  }
  char byte;
  ASSERT_EQ(1, ::read(ready[0], &byte, 1));
  EXPECT_TRUE(eventually([&] { return attaches("mine"); }));
  ::kill(greedy, SIGKILL);
  ::waitpid(greedy, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(MemoryReserve, IsGivenAwayWhenNothingIsLeftAndTakenAgain) {
#ifdef MK_SANITIZED
  GTEST_SKIP() << "a sanitizer's shadow needs all of the address space";
#endif
  const pid_t child = ::fork();
  if (child == 0) {
    MemoryReserve::install();
    MemoryReserve& reserve = *MemoryReserve::installed();
    if (reserve.spent()) ::_exit(1);
    // No more address space than there is.
    rlimit all{};
    std::uint64_t pages = 0;
    if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
      if (std::fscanf(file, "%lu", &pages) != 1) ::_exit(2);
      std::fclose(file);
    }
    constexpr std::size_t kBytes = 8u << 20;
    all.rlim_cur = all.rlim_max =
        pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + 4 * kBytes;
    if (::setrlimit(RLIMIT_AS, &all) != 0) ::_exit(3);
    std::vector<std::unique_ptr<char[]>> taken;
    taken.reserve(1000);
    try {
      while (!reserve.spent()) taken.push_back(std::make_unique_for_overwrite<char[]>(kBytes));
    } catch (const std::bad_alloc&) {
      ::_exit(4);  // the reserve was there for this one
    }
    if (reserve.restore()) ::_exit(5);  // others still have it all
    taken.clear();
    ::_exit(reserve.restore() && !reserve.spent() ? 0 : 6);
  }
  int status = 0;
  ASSERT_EQ(child, ::waitpid(child, &status, 0));
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(0, WEXITSTATUS(status));
}

}  // namespace
}  // namespace mk::daemon::test
