// Whole nodes with real threads, sockets and fabrics, in one process.
#include "daemon/control/node.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "daemon/control/local_peer_transport.h"
#include "shm/flag.h"
#include "tests/daemon/control/nodes.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

class NodeFabrics : public testing::TestWithParam<std::string> {};

TEST_P(NodeFabrics, TwoNodesOfTwoRanksMoveDataBothWays) {
  Nodes nodes(2, GetParam());
  std::vector<std::unique_ptr<PairedRank>> ranks;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    ranks.push_back(std::make_unique<PairedRank>(nodes, "job", rank));
    const Status attached = ranks[rank]->attach();
    ASSERT_TRUE(attached) << attached.error().message;
  }
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&rank] {
      ASSERT_NO_FATAL_FAILURE(rank->meet());
      for (std::uint32_t epoch = 1; epoch <= 10; ++epoch) {
        const Status moved = rank->move(epoch);
        ASSERT_TRUE(moved) << moved.error().message;
      }
      const auto done = rank->client.call<shm::Done>(shm::Detach{});
      ASSERT_TRUE(done) << done.error().message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto snapshot = nodes[0].snapshot();
  ASSERT_TRUE(snapshot);
  ASSERT_EQ(snapshot->links.size(), 1u);
  EXPECT_EQ(snapshot->links[0].stats->bytes.value(), 20ull * PairedRank::kBytes);
  EXPECT_TRUE(eventually([&] { return nodes.idle(); }));
  EXPECT_TRUE(nodes[0].snapshot()->recent_failures.empty());
}

INSTANTIATE_TEST_SUITE_P(Real, NodeFabrics, testing::Values("loopback", "ofi"));

TEST(Node, ARankThatVanishesIsNoticedByAllOthers) {
  Nodes nodes(2);
  std::vector<std::unique_ptr<SocketClient>> clients;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    clients.push_back(std::make_unique<SocketClient>(nodes[rank / 2].socket_path()));
    auto attach = rank_of("job", 2, 2, rank);
    attach.timeout_ms = 60'000;
    ASSERT_TRUE(clients[rank]->attach(attach));
  }
  for (auto& client : clients) ASSERT_TRUE(client->await<shm::JobUp>());
  ASSERT_TRUE(clients[1]->add_buffer(4096));
  // As after SIGKILL: the kernel closes the socket, nothing is said.
  clients[1].reset();
  for (const std::uint32_t rank : {0u, 2u, 3u}) {
    ASSERT_TRUE(eventually([&] { return !clients[rank]->segment->failure(); }));
    EXPECT_EQ(clients[rank]->segment->failure().error().code, ErrorCode::kPeerLost);
    const auto failed = clients[rank]->await<shm::SessionFailed>();
    ASSERT_TRUE(failed);
    EXPECT_THAT(failed->message, HasSubstr("lost rank 1 on"));
  }
  clients.clear();
  EXPECT_TRUE(eventually([&] { return nodes.idle(); }));
}

TEST(Node, ABrokenPeerStreamFailsTheJobAndANewOneWorks) {
  Nodes nodes(2);
  for (int round = 0; round < 3; ++round) {
    SocketClient a(nodes[0].socket_path()), b(nodes[1].socket_path());
    auto attach = rank_of("job", 2, 1, 0);
    attach.timeout_ms = 60'000;
    ASSERT_TRUE(a.attach(attach));
    attach = rank_of("job", 2, 1, 1);
    attach.timeout_ms = 60'000;
    ASSERT_TRUE(b.attach(attach));
    ASSERT_TRUE(a.await<shm::JobUp>());
    ASSERT_TRUE(b.await<shm::JobUp>());
    nodes.peers().disconnect(0, 1, "cable pulled");
    for (SocketClient* client : {&a, &b}) {
      const auto failed = client->await<shm::SessionFailed>();
      ASSERT_TRUE(failed);
      EXPECT_EQ(failed->code, ErrorCode::kPeerLost);
      EXPECT_THAT(failed->message, HasSubstr("cable pulled"));
    }
    nodes.peers().connect(0, 1);
  }
}

TEST(Node, StoppingDrainsThenFailsWhoIsLeft) {
  auto nodes = std::make_unique<Nodes>(2);
  SocketClient stays((*nodes)[0].socket_path()), leaves((*nodes)[0].socket_path());
  ASSERT_TRUE(stays.attach(rank_of("stays", 1, 1, 0)));
  ASSERT_TRUE(leaves.attach(rank_of("leaves", 1, 1, 0)));
  ASSERT_TRUE(stays.await<shm::JobUp>());
  (*nodes)[0].drain();
  SocketClient late((*nodes)[0].socket_path());
  const Status refused = late.attach(rank_of("late", 1, 1, 0));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kDraining);
  std::jthread stopping(
      [&] { (*nodes)[0].stop(std::chrono::steady_clock::now() + std::chrono::seconds(2)); });
  ASSERT_TRUE(leaves.call<shm::Done>(shm::Detach{}));
  const auto failed = stays.await<shm::SessionFailed>();
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kDraining);
  stopping.join();
  EXPECT_FALSE(stays.next());
  // Nothing runs on a stopped node, and nobody hangs on it.
  EXPECT_EQ((*nodes)[0].snapshot().error().code, ErrorCode::kUnavailable);
  (*nodes)[0].stop(soon());
  (*nodes)[0].loop().post([](ControlPlane&) { FAIL(); });
}

TEST(Node, StoppingAnIdleNodeTakesNoTime) {
  const auto begin = std::chrono::steady_clock::now();
  Nodes nodes(1);
  nodes[0].stop(begin + std::chrono::hours(1));
}

TEST(Node, ASilentConnectionIsClosedWithAReason) {
  Nodes nodes(1, "loopback", [](NodeOptions& options) {
    options.loop.handshake_timeout = std::chrono::milliseconds(50);
  });
  SocketClient silent(nodes[0].socket_path());
  const auto word = silent.await<shm::ErrorReply>();
  ASSERT_TRUE(word);
  EXPECT_EQ(word->code, ErrorCode::kTimeout);
  EXPECT_THAT(word->message, HasSubstr("no attach within 50 ms"));
  EXPECT_FALSE(silent.next());
  EXPECT_TRUE(eventually([&] { return nodes.idle(); }));
}

TEST(Node, ConnectionsAreLimited) {
  Nodes nodes(1, "loopback", [](NodeOptions& options) {
    options.loop.clients_max = 4;
    options.loop.clients_unattached_max = 2;
  });
  const std::string& path = nodes[0].socket_path();
  SocketClient one(path), two(path);
  {
    SocketClient three(path);
    const auto word = three.await<shm::ErrorReply>();
    ASSERT_TRUE(word);
    EXPECT_EQ(word->code, ErrorCode::kLimitExceeded);
  }
  ASSERT_TRUE(one.attach(rank_of("one", 1, 1, 0)));
  ASSERT_TRUE(two.attach(rank_of("two", 1, 1, 0)));
  {
    SocketClient three(path), four(path);
    ASSERT_TRUE(three.attach(rank_of("three", 1, 1, 0)));
    ASSERT_TRUE(four.attach(rank_of("four", 1, 1, 0)));
    SocketClient five(path);
    EXPECT_EQ(five.await<shm::ErrorReply>()->code, ErrorCode::kLimitExceeded);
    EXPECT_FALSE(five.next());
    EXPECT_FALSE(five.attach(rank_of("five", 1, 1, 0)));
  }
  EXPECT_TRUE(
      eventually([&] { return SocketClient(path).attach(rank_of("x", 1, 1, 0)).has_value(); }));
}

TEST(Node, GarbageOnTheSocketEndsThatConnectionOnly) {
  Nodes nodes(1);
  SocketClient good(nodes[0].socket_path());
  ASSERT_TRUE(good.attach(rank_of("good", 1, 1, 0)));
  auto raw = shm::FrameSocket::connect(nodes[0].socket_path(), std::chrono::seconds(60));
  ASSERT_TRUE(raw);
  const std::string junk(4096, '\xee');
  ASSERT_EQ(::write(raw->fd(), junk.data(), junk.size()), 4096);
  const auto word = raw->receive(in_time());
  if (word) {
    EXPECT_EQ(shm::decode_message<shm::ErrorReply>(word->payload)->code, ErrorCode::kProtocol);
    EXPECT_FALSE(raw->receive(in_time()));
  }
  EXPECT_TRUE(good.call<shm::AllocFlagsReply>(shm::AllocFlags{1}));
}

TEST(Node, ASlowReaderIsClosedAndNobodyElseWaits) {
  Nodes nodes(1);
  auto slow = shm::FrameSocket::connect(nodes[0].socket_path(), std::chrono::seconds(60));
  SocketClient good(nodes[0].socket_path());
  ASSERT_TRUE(good.attach(rank_of("good", 1, 1, 0)));
  // Asks and asks and never reads an answer, until the daemon has had enough.
  const auto junk = shm::encode_message(shm::AllocFlags{1});
  const auto hello = shm::encode_message(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
  ASSERT_TRUE(
      slow->send(static_cast<std::uint16_t>(shm::MessageType::kHello), 1, hello, {}, in_time()));
  std::uint64_t asked = 0;
  while (slow->send(static_cast<std::uint16_t>(shm::MessageType::kAllocFlags), ++asked, junk, {},
                    in_time())) {
    ASSERT_LT(asked, 2'000'000u);
  }
  EXPECT_TRUE(good.call<shm::AllocFlagsReply>(shm::AllocFlags{1}));
}

TEST(Node, RunningOutOfDescriptorsIsSurvived) {
  std::atomic<int> complaints{0};
  Nodes nodes(1, "loopback", [&](NodeOptions& options) {
    options.control.log = [&](const LogRecord& record) {
      if (record.level == LogLevel::kError) ++complaints;
    };
  });
  const std::string path = nodes[0].socket_path();
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &old_limit), 0);
  UniqueFd client(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, path.data() + 1, path.size() - 1);
  // The lowest free descriptor becomes the first forbidden one: accept has none.
  UniqueFd probe(::fcntl(0, F_DUPFD_CLOEXEC, 0));
  rlimit low = old_limit;
  low.rlim_cur = static_cast<rlim_t>(probe.get());
  probe.reset();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const int connected =
      ::connect(client.get(), reinterpret_cast<const sockaddr*>(&address),
                static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size()));
  // The loop lives on, tries now and then, and complains once.
  const bool complained = eventually([&] { return complaints > 0; });
  const bool alive = nodes[0].snapshot().has_value();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const int complaints_later = complaints;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &old_limit), 0);
  ASSERT_EQ(connected, 0);
  EXPECT_TRUE(complained);
  EXPECT_TRUE(alive);
  EXPECT_EQ(complaints_later, 1);
  // The connection was kept, and is served when there is room again.
  shm::FrameSocket socket(std::move(client));
  const auto hello = shm::encode_message(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
  ASSERT_TRUE(
      socket.send(static_cast<std::uint16_t>(shm::MessageType::kHello), 1, hello, {}, in_time()));
  EXPECT_TRUE(socket.receive(in_time()));
}

TEST(Node, AnotherUserIsRefusedWhereNoFileModeProtects) {
  for (const bool same_user_only : {true, false}) {
    Nodes nodes(1, "loopback",
                [&](NodeOptions& options) { options.loop.same_user_only = same_user_only; });
    bool changed = false;
    std::string answer;
    std::thread([&] {
      // The bare system call: of this thread only.
      changed = ::syscall(SYS_setresuid, -1, 65'534, -1) == 0;
      if (!changed) return;
      SocketClient client(nodes[0].socket_path());
      if (same_user_only) {
        const auto refused = client.await<shm::ErrorReply>();
        answer = refused ? refused->message : refused.error().message;
      } else {
        EXPECT_TRUE(client.attach(rank_of("x", 1, 1, 0)));
      }
    }).join();
    if (!changed) GTEST_SKIP() << "needs the right to be another user";
    if (same_user_only) {
      EXPECT_THAT(answer, HasSubstr("you are user 65534"));
    }
    EXPECT_TRUE(SocketClient(nodes[0].socket_path()).attach(rank_of("y", 1, 1, 0)));
  }
}

TEST(Node, ASecondOneOnTheSameSocketSaysWhoHoldsIt) {
  Nodes nodes(1);
  NodeOptions options;
  options.loop.socket_path = nodes[0].socket_path();
  const auto second = Node::create(options);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kAlreadyExists);
  EXPECT_THAT(second.error().message, HasSubstr(fmt::format("{}", ::getpid())));
}

TEST(Node, AFabricThatDoesNotExist) {
  NodeOptions options;
  options.loop.socket_path = unique_socket();
  options.rails[0].endpoint.fabric = "pigeons";
  const auto node = Node::create(options);
  ASSERT_FALSE(node);
  EXPECT_THAT(node.error().message, HasSubstr("rail 0"));
  options.rails.clear();
  EXPECT_EQ(Node::create(options).error().code, ErrorCode::kInvalidArgument);
}

TEST(Node, ManyShortJobsFromManyThreads) {
  Nodes nodes(2);
  std::vector<std::thread> threads;
  for (std::uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 10; ++round) {
        const std::string job = fmt::format("job-{}", thread / 2);
        // The two ranks of a job meet again and again under the same name; the next run may begin
        // while the last one ends.
        SocketClient client(nodes[thread % 2].socket_path());
        auto attach = rank_of(job, 2, 1, thread % 2);
        attach.timeout_ms = 60'000;
        ASSERT_TRUE(client.attach(attach));
        ASSERT_TRUE(client.await<shm::JobUp>());
        const auto all = client.call<shm::ExchangeReply>(
            shm::Exchange{"round", bytes_of(fmt::format("{}", round)), 60'000});
        ASSERT_TRUE(all) << all.error().message;
        EXPECT_EQ(all->blobs[0], all->blobs[1]);
        ASSERT_TRUE(client.call<shm::Done>(shm::Detach{}));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return nodes.idle(); }));
}

}  // namespace
}  // namespace mk::daemon::test
