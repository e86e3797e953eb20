// Memory is registered and given back apart from the control thread: what happens meanwhile, and
// that nothing is left of it.
#include <fcntl.h>
#include <gmock/gmock.h>

#include <atomic>
#include <latch>
#include <system_error>
#include <thread>

#include "daemon/control/user_workers.h"
#include "shm/gpu/memory.h"
#include "tests/daemon/control/job_run.h"
#include "tests/daemon/control/socket_client.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

class Registration : public testing::Test {
 protected:
  static TestNode make_node(NodeSetup setup = {}) {
    setup.nodes = 1;
    setup.apart = true;
    return TestNode(setup, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  }
  static ClientId attach(TestNode& node, const std::string& job, std::uint32_t uid = 1000) {
    return node.attach(rank_of(job, 1, 1, 0), 0, uid);
  }
  /// Asks for it, and does not wait.
  static void begin(TestNode& node, ClientId client, std::uint64_t bytes = 4096) {
    auto file = shm::BufferFile::create("test", bytes);
    ASSERT_TRUE(file);
    std::vector<UniqueFd> fds;
    fds.emplace_back(::fcntl(file->fd(), F_DUPFD_CLOEXEC, 0));
    node.send(client, shm::RegisterBuffer{bytes, "test"}, std::move(fds));
  }
  static std::uint16_t registered(TestNode& node, ClientId client) {
    const auto reply = node.take<shm::RegisterBufferReply>(client);
    return reply ? reply->handle : shm::kNoHandle;
  }
  static std::uint16_t add(TestNode& node, ClientId client, std::uint64_t bytes = 4096) {
    begin(node, client, bytes);
    EXPECT_TRUE(node.run_apart());
    return registered(node, client);
  }
  static void finish_proxies(TestNode& node) {
    while (node.step()) {
    }
  }
  static void finish(TestNode& node) {
    while (node.step() || node.run_apart()) {
    }
  }
};

TEST_F(Registration, HoldsUpNobodyElse) {
  TestNode node = make_node();
  const ClientId slow = attach(node, "slow"), other = attach(node, "other");
  begin(node, slow);
  EXPECT_EQ(node.apart.front().uid, 1000u);
  EXPECT_TRUE(node.held.contains(slow));
  EXPECT_EQ(node.nic->local_regions, 2) << "of flags";
  node.send(other, shm::AllocFlags{1});
  EXPECT_TRUE(node.take<shm::AllocFlagsReply>(other));
  node.wait(100);
  EXPECT_EQ(registered(node, slow), shm::kNoHandle);
  EXPECT_TRUE(node.run_apart());
  EXPECT_NE(registered(node, slow), shm::kNoHandle);
  EXPECT_FALSE(node.held.contains(slow));
  EXPECT_EQ(node.nic->local_regions, 3);
  for (const ClientId client : {slow, other}) node.hang_up(client);
  finish(node);
  node.expect_nothing_left();
}

TEST_F(Registration, TheMessagesOfASessionKeepTheirOrder) {
  TestNode node = make_node();
  const ClientId client = attach(node, "job");
  begin(node, client);
  node.send(client, shm::AllocFlags{1});
  begin(node, client);
  node.send(client, shm::Detach{});
  EXPECT_FALSE(node.take<shm::AllocFlagsReply>(client));
  EXPECT_TRUE(node.run_apart());
  EXPECT_NE(registered(node, client), shm::kNoHandle);
  EXPECT_TRUE(node.take<shm::AllocFlagsReply>(client));
  EXPECT_EQ(registered(node, client), shm::kNoHandle) << "the second is under way";
  EXPECT_EQ(node.apart.size(), 1u);
  EXPECT_TRUE(node.run_apart());
  EXPECT_NE(registered(node, client), shm::kNoHandle);
  finish(node);
  EXPECT_TRUE(node.take<shm::Done>(client));
  EXPECT_TRUE(node.closed(client));
  node.expect_nothing_left();
}

TEST_F(Registration, AJobThatComesUpMeanwhileHearsOfTheBufferThen) {
  TestCluster cluster(2, {.apart = true});
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 1);
  job.attach(0);
  begin(job.node_of(0), job.client(0));
  job.attach(1);
  cluster.settle();
  ASSERT_TRUE(job.all_up());
  EXPECT_EQ(cluster.node(1).nic->remote_regions, 1) << "the flags";
  EXPECT_TRUE(cluster.node(0).run_apart());
  EXPECT_NE(registered(job.node_of(0), job.client(0)), shm::kNoHandle);
  cluster.settle();
  EXPECT_EQ(cluster.node(1).nic->remote_regions, 2);
  job.detach_all();
  while (cluster.node(0).run_apart()) cluster.settle();
  cluster.expect_nothing_left();
}

TEST_F(Registration, ASessionThatGoesMeanwhileLeavesNothing) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    const std::uint64_t segment = segment_bytes_of(rank_of("job", 1, 1, 0));
    TestNode node = make_node({.user_max = {.memory_bytes = 2 * segment + 4096}});
    const ClientId gone = attach(node, "job");
    begin(node, gone);
    node.hang_up(gone);
    finish_proxies(node);
    EXPECT_EQ(node.plane->counts().sessions, 1u) << "its memory is still in use";
    EXPECT_EQ(node.plane->counts().slots_used, 1u);
    const ClientId next = attach(node, "job");
    begin(node, next);
    const auto refused = node.take<shm::ErrorReply>(next);
    ASSERT_TRUE(refused);
    EXPECT_THAT(refused->message, HasSubstr("limits.user_registered"));
    node.nic->refuse_register = fails ? "no" : "";
    EXPECT_TRUE(node.run_apart());
    node.nic->refuse_register = "";
    // Memory that was registered is given back apart as well.
    EXPECT_EQ(node.nic->local_regions, fails ? 1 : 3);
    EXPECT_EQ(node.run_apart(), !fails);
    EXPECT_EQ(node.plane->counts().sessions, 1u) << "the next one's";
    EXPECT_NE(add(node, next), shm::kNoHandle);
    node.hang_up(next);
    finish(node);
    node.expect_nothing_left();
  }
}

TEST_F(Registration, AJobThatFailsMeanwhileAnswersTheRequestFirst) {
  TestNode node = make_node();
  std::vector<ClientId> ranks;
  for (std::uint32_t rank = 0; rank < 2; ++rank)
    ranks.push_back(node.attach(rank_of("job", 1, 2, rank)));
  begin(node, ranks[0]);
  // A handle that another rank has guessed is none yet.
  node.send(ranks[1], shm::OpenPeerBuffer{0, 1});
  EXPECT_EQ(node.take<shm::ErrorReply>(ranks[1])->code, ErrorCode::kNotFound);
  node.hang_up(ranks[1]);
  const auto refused = node.take<shm::ErrorReply>(ranks[0]);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, ErrorCode::kPeerLost);
  EXPECT_TRUE(node.take<shm::SessionFailed>(ranks[0]));
  EXPECT_FALSE(node.held.contains(ranks[0]));
  node.send(ranks[0], shm::Detach{});
  EXPECT_TRUE(node.take<shm::Done>(ranks[0]));
  finish(node);
  node.expect_nothing_left();
}

TEST_F(Registration, WhatFailsIsSaidAndCountsNoMore) {
  const std::uint64_t segment = segment_bytes_of(rank_of("job", 1, 1, 0));
  TestNode node = make_node({.user_max = {.buffers = 1, .memory_bytes = segment + 4096}});
  const ClientId client = attach(node, "job");
  node.nic->refuse_register = "the NIC is full";
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(add(node, client), shm::kNoHandle);
    EXPECT_THAT(node.take<shm::ErrorReply>(client)->message, HasSubstr("the NIC is full"));
  }
  node.nic->refuse_register = "";
  EXPECT_NE(add(node, client), shm::kNoHandle);
  node.hang_up(client);
  finish(node);
  node.expect_nothing_left();
}

TEST_F(Registration, AnExceptionEndsTheSession) {
  TestNode node = make_node();
  const ClientId client = attach(node, "job");
  begin(node, client);
  node.nic->on_register = [] { throw std::bad_alloc(); };
  EXPECT_TRUE(node.run_apart());
  EXPECT_TRUE(node.take<shm::ErrorReply>(client));
  EXPECT_TRUE(node.take<shm::SessionFailed>(client));
  node.hang_up(client);
  finish(node);
  node.expect_nothing_left();
}

TEST_F(Registration, WithoutAThreadItHappensAtOnce) {
  TestNode node = make_node();
  const ClientId client = attach(node, "job");
  node.on_apart = [] { throw std::system_error(EAGAIN, std::generic_category(), "no thread"); };
  begin(node, client);
  const std::uint16_t handle = registered(node, client);
  EXPECT_NE(handle, shm::kNoHandle);
  EXPECT_FALSE(node.held.contains(client));
  node.send(client, shm::DeregisterBuffer{handle});
  node.step();
  EXPECT_TRUE(node.take<shm::Done>(client));
  EXPECT_NE((begin(node, client), registered(node, client)), shm::kNoHandle);
  node.hang_up(client);
  node.step();
  node.expect_nothing_left();
}

TEST_F(Registration, GpuBuffersUnderWayCount) {
  TestCluster cluster(2, {.device_memory = true, .gpu_regions_max = 4, .apart = true});
  cluster.connect_all();
  TestNode& node = cluster.node(0);
  gpu::MemoryKey key;
  key.process.pid = 1234;
  key.bytes = 4096;
  std::vector<std::byte> blob(sizeof key);
  std::memcpy(blob.data(), &key, sizeof key);
  std::vector<ClientId> clients;
  for (int i = 0; i < 4; ++i) {
    clients.push_back(node.attach(rank_of("job" + std::to_string(i), 2, 1, 0)));
    node.send(clients[i], shm::RegisterDeviceBuffer{4096, "workspace", blob});
    const auto refused = node.take<shm::ErrorReply>(clients[i]);
    EXPECT_EQ(refused.has_value(), i == 3);
    if (refused) {
      EXPECT_THAT(refused->message, HasSubstr("3 GPU buffers of rail 0"));
    }
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(node.run_apart());
    EXPECT_NE(registered(node, clients[i]), shm::kNoHandle);
  }
  for (const ClientId client : clients) node.hang_up(client);
  do {
    cluster.settle();
  } while (node.run_apart());
  cluster.expect_nothing_left();
}

class Deregistration : public Registration {};

TEST_F(Deregistration, IsAnsweredWhenTheMemoryIsGivenBack) {
  TestNode node = make_node({.user_max = {.buffers = 1}});
  const ClientId client = attach(node, "job"), other = attach(node, "other", 1001);
  const std::uint16_t handle = add(node, client);
  node.send(client, shm::DeregisterBuffer{handle});
  node.step();
  EXPECT_FALSE(node.take<shm::Done>(client));
  EXPECT_FALSE(node.held.contains(client)) << "the proxy's part may last";
  node.send(other, shm::AllocFlags{1});
  EXPECT_TRUE(node.take<shm::AllocFlagsReply>(other));
  for (const char* again : {"deregister", "open", "register"}) {
    SCOPED_TRACE(again);
    if (again[0] == 'd') node.send(client, shm::DeregisterBuffer{handle});
    if (again[0] == 'o') node.send(client, shm::OpenPeerBuffer{0, handle});
    if (again[0] == 'r') begin(node, client);
    EXPECT_TRUE(node.take<shm::ErrorReply>(client));
  }
  EXPECT_TRUE(node.run_apart());
  EXPECT_TRUE(node.take<shm::Done>(client));
  EXPECT_NE(add(node, client), shm::kNoHandle);
  for (const ClientId one : {client, other}) node.hang_up(one);
  finish(node);
  node.expect_nothing_left();
}

TEST_F(Deregistration, HasADeadlineThatSaysWhatItWaitsFor) {
  TestNode node = make_node();
  const ClientId client = attach(node, "job");
  const std::uint16_t handle = add(node, client);
  node.send(client, shm::DeregisterBuffer{handle});
  node.step();
  node.wait(31'000);
  const auto late = node.take<shm::ErrorReply>(client);
  ASSERT_TRUE(late);
  EXPECT_EQ(late->code, ErrorCode::kTimeout);
  EXPECT_THAT(late->message, HasSubstr("the network, which still deregisters it"));
  EXPECT_TRUE(node.run_apart());
  EXPECT_FALSE(node.take<shm::Done>(client)) << "it has its answer";
  node.hang_up(client);
  finish(node);
  node.expect_nothing_left();
}

TEST_F(Deregistration, ASessionThatGoesMeanwhileLeavesNothing) {
  TestNode node = make_node();
  const ClientId client = attach(node, "job");
  const std::uint16_t handle = add(node, client);
  EXPECT_NE(add(node, client), shm::kNoHandle);
  node.send(client, shm::DeregisterBuffer{handle});
  node.step();
  node.hang_up(client);
  finish_proxies(node);
  EXPECT_EQ(node.plane->counts().sessions, 1u);
  finish(node);
  node.expect_nothing_left();
}

// The flags of an operator come back after its memory, or before, as the network needs it.
TEST_F(Deregistration, OfAnOperatorsPartGivesItsFlagsBackAsWell) {
  for (const auto contract :
       {fabric::DeliveryContract::kOrdered, fabric::DeliveryContract::kUnordered}) {
    TestCluster cluster(2, {.contract = contract, .apart = true});
    JobRun job = attached_job(cluster, 2, 1);
    ASSERT_TRUE(job.all_up());
    const std::uint16_t handle = add(job.node_of(0), job.client(0));
    job.send(0, shm::AllocFlags{64});
    const auto flags = job.take<shm::AllocFlagsReply>(0);
    ASSERT_TRUE(flags);
    cluster.settle();
    auto segment = job.node_of(0).segment(job.client(0));
    segment.flags()[flags->base] = 5;
    job.send(0, shm::Retire{handle, flags->base, {}});
    cluster.settle();
    EXPECT_FALSE(job.take<shm::Done>(0));
    EXPECT_EQ(segment.flags()[flags->base],
              contract == fabric::DeliveryContract::kOrdered ? 5u : 0u);
    EXPECT_TRUE(cluster.node(0).run_apart());
    cluster.settle();
    EXPECT_TRUE(job.take<shm::Done>(0));
    EXPECT_EQ(segment.flags()[flags->base], 0u);
    job.detach_all();
    cluster.expect_nothing_left();
  }
}

// -- the threads ----------------------------------------------------------------------------------

TEST(UserWorkers, SoManyOfAUserRunAtOnceAndOthersBeside) {
  constexpr auto kMost = static_cast<int>(control::UserWorkers::kAtOnceMax);
  control::UserWorkers workers;
  std::latch let_go(1);
  std::atomic<int> begun{0}, ended{0};
  for (int i = 0; i < kMost + 3; ++i) {
    workers.run(1000, [&] {
      ++begun;
      let_go.wait();
      ++ended;
    });
  }
  EXPECT_TRUE(eventually([&] { return begun == kMost; }));
  std::atomic<bool> other{false};
  workers.run(1001, [&] { other = true; });
  EXPECT_TRUE(eventually([&] { return other.load(); }));
  EXPECT_EQ(begun, kMost);
  let_go.count_down();
  EXPECT_TRUE(eventually([&] { return ended == kMost + 3; }));
  // Threads that have ended make room for others.
  for (int i = 0; i < 100; ++i) {
    workers.run(1000, [&] { ++ended; });
    EXPECT_TRUE(eventually([&] { return ended == kMost + 4 + i; }));
  }
}

TEST(UserWorkers, WhatWaitsIsDroppedAtTheEnd) {
  control::UserWorkers workers;
  std::latch running(static_cast<std::ptrdiff_t>(control::UserWorkers::kAtOnceMax)), let_go(1);
  const auto held = std::make_shared<int>(0);
  std::atomic<int> ran{0};
  for (std::size_t i = 0; i < control::UserWorkers::kAtOnceMax; ++i) {
    workers.run(1, [&] {
      running.count_down();
      let_go.wait();
      ++ran;
    });
  }
  running.wait();
  for (int i = 0; i < 5; ++i) workers.run(1, [&ran, held] { ran += 100; });
  std::thread stopper([&] { workers.stop(); });
  // Waiting tasks are dropped before those that run are waited for.
  EXPECT_TRUE(eventually([&] { return held.use_count() == 1; }));
  let_go.count_down();
  stopper.join();
  EXPECT_EQ(ran, static_cast<int>(control::UserWorkers::kAtOnceMax));
  workers.run(1, [&] { ran += 100; });
  workers.stop();
  EXPECT_EQ(ran, static_cast<int>(control::UserWorkers::kAtOnceMax));
}

}  // namespace
}  // namespace mk::daemon::test
