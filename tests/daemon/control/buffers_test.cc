// Buffers and flags: registering, announcing, lending, withdrawing, and their limits.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

class Buffers : public testing::Test {
 protected:
  Buffers() { cluster.connect_all(); }

  /// Pushes one command into lane 0 of the client's segment.
  static void push(shm::Segment& segment, shm::RingProducer& producer,
                   const shm::Command& command) {
    producer.ring = segment.ring(0);
    ASSERT_TRUE(producer.try_push(command));
  }
  std::byte* map(TestNode& node, ClientId client, std::uint32_t local_rank, std::uint16_t handle,
                 std::vector<shm::BufferFile>& keep) {
    node.send(client, shm::OpenPeerBuffer{local_rank, handle});
    auto reply = node.take(client, shm::MessageType::kOpenPeerBufferReply);
    EXPECT_TRUE(reply);
    const auto content = shm::decode_message<shm::OpenPeerBufferReply>(reply->payload);
    auto file = shm::BufferFile::map(std::move(reply->fds.at(0)), content->bytes);
    EXPECT_TRUE(file);
    keep.push_back(std::move(*file));
    return keep.back().data();
  }

  TestCluster cluster{2};
};

TEST_F(Buffers, DataAndFlagArriveAtTheRailPeer) {
  JobRun job(cluster, "job", 2, 2);
  job.attach_all();
  ASSERT_TRUE(job.all_up());
  std::vector<shm::Segment> segments;
  std::vector<std::uint16_t> handles;
  std::vector<std::byte*> data;
  std::vector<shm::BufferFile> keep;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    segments.push_back(job.node_of(rank).segment(job.client(rank)));
    handles.push_back(job.node_of(rank).register_buffer(job.client(rank), 4096));
    data.push_back(map(job.node_of(rank), job.client(rank), rank % 2, handles[rank], keep));
  }
  cluster.settle();
  std::vector<shm::RingProducer> producers(4);
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    const std::uint32_t peer = (rank + 2) % 4;
    std::memset(data[rank], static_cast<int>(rank) + 1, 100);
    shm::Command command;
    command.opcode = shm::Opcode::kWrite;
    command.peer = static_cast<std::uint16_t>(peer);
    command.src_handle = handles[rank];
    command.dst_handle = handles[peer];
    command.dst_offset = 1000;
    command.bytes = 100;
    command.flag_index = 64 + rank;
    command.epoch = 9;
    push(segments[rank], producers[rank], command);
  }
  cluster.settle();
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    const std::uint32_t peer = (rank + 2) % 4;
    EXPECT_EQ(segments[rank].flags()[64 + peer], 9u) << rank;
    EXPECT_EQ(data[rank][1000], static_cast<std::byte>(peer + 1));
    EXPECT_EQ(data[rank][1099], static_cast<std::byte>(peer + 1));
    EXPECT_EQ(producers[rank].completed(), 1u);
  }
  const auto links = cluster.node(0).plane->snapshot().links;
  ASSERT_EQ(links.size(), 1u);
  EXPECT_EQ(links[0].state, "up");
  EXPECT_EQ(links[0].stats->bytes.value(), 200u);
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST_F(Buffers, ACommandToTheLocalPeerIsNoRailPeers) {
  JobRun job(cluster, "job", 2, 2);
  job.attach_all();
  auto segment = job.node_of(0).segment(job.client(0));
  shm::RingProducer producer;
  shm::Command command;
  command.opcode = shm::Opcode::kWriteFlag;
  command.peer = 1;
  command.epoch = 1;
  push(segment, producer, command);
  cluster.settle();
  const auto own = job.take<shm::SessionFailed>(0);
  ASSERT_TRUE(own);
  EXPECT_EQ(own->code, ErrorCode::kBadCommand);
  EXPECT_EQ(segment.failure().error().code, ErrorCode::kBadCommand);
  for (std::uint32_t rank = 1; rank < 4; ++rank) {
    const auto other = job.take<shm::SessionFailed>(rank);
    ASSERT_TRUE(other) << rank;
    EXPECT_EQ(other->code, ErrorCode::kPeerLost);
    EXPECT_THAT(other->message, HasSubstr("lost rank 0 on"));
  }
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST_F(Buffers, RegisteredBeforeTheJobIsUpAreAnnouncedWhenItIs) {
  JobRun job(cluster, "job", 2, 1);
  job.attach(0);
  const std::uint16_t early = job.node_of(0).register_buffer(job.client(0));
  ASSERT_NE(early, shm::kNoHandle);
  // One that is gone again before is never announced.
  const std::uint16_t gone = job.node_of(0).register_buffer(job.client(0));
  job.send(0, shm::DeregisterBuffer{gone});
  cluster.settle();
  EXPECT_TRUE(job.take<shm::Done>(0));
  job.attach(1);
  cluster.settle();
  ASSERT_TRUE(job.all_up());
  // Flags and the one buffer.
  EXPECT_EQ(cluster.node(1).nic->remote_regions, 2);
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST_F(Buffers, DeregisterWaitsForTheRailPeers) {
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  const std::uint16_t handle = job.node_of(0).register_buffer(job.client(0));
  cluster.settle();
  EXPECT_EQ(cluster.node(0).nic->local_regions, 2);
  EXPECT_EQ(cluster.node(1).nic->remote_regions, 2);
  job.send(0, shm::DeregisterBuffer{handle});
  cluster.node(0).step();
  // Our proxy is done, but the peer's has not been asked yet.
  EXPECT_FALSE(job.take<shm::Done>(0));
  EXPECT_EQ(cluster.node(0).nic->local_regions, 2);
  job.send(0, shm::DeregisterBuffer{handle});
  EXPECT_EQ(job.take<shm::ErrorReply>(0)->code, ErrorCode::kNotFound);
  job.send(0, shm::OpenPeerBuffer{0, handle});
  EXPECT_EQ(job.take<shm::ErrorReply>(0)->code, ErrorCode::kNotFound);
  cluster.settle();
  EXPECT_TRUE(job.take<shm::Done>(0));
  EXPECT_EQ(cluster.node(0).nic->local_regions, 1);
  EXPECT_EQ(cluster.node(1).nic->remote_regions, 1);
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST_F(Buffers, DeregisterWaitsForTransfersInFlightAndNamesWhoHasThem) {
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  std::uint16_t handles[2];
  for (const std::uint32_t rank : {0u, 1u}) {
    handles[rank] = job.node_of(rank).register_buffer(job.client(rank));
  }
  cluster.settle();
  auto segment = job.node_of(1).segment(job.client(1));
  cluster.node(1).nic->hold_completions = true;
  shm::RingProducer producer;
  shm::Command command{.opcode = shm::Opcode::kWrite,
                       .peer = 0,
                       .src_handle = handles[1],
                       .dst_handle = handles[0],
                       .bytes = 8,
                       .epoch = 1};
  push(segment, producer, command);
  cluster.settle();
  job.send(0, shm::DeregisterBuffer{handles[0]});
  job.send(1, shm::DeregisterBuffer{handles[1]});
  cluster.settle();
  EXPECT_FALSE(job.take<shm::Done>(0));
  EXPECT_FALSE(job.take<shm::Done>(1));
  cluster.wait(30'100);
  const auto zero = job.take<shm::ErrorReply>(0);
  const auto one = job.take<shm::ErrorReply>(1);
  ASSERT_TRUE(zero);
  ASSERT_TRUE(one);
  EXPECT_EQ(zero->code, ErrorCode::kTimeout);
  EXPECT_THAT(zero->message, HasSubstr("in use by: node 1"));
  EXPECT_THAT(one->message, HasSubstr("our own transfers"));
  EXPECT_EQ(cluster.node(0).nic->local_regions, 2);
  // The memory goes when it may, the answer having been given.
  cluster.node(1).nic->hold_completions = false;
  cluster.settle();
  EXPECT_FALSE(job.take<shm::Done>(0));
  EXPECT_EQ(cluster.node(0).nic->local_regions, 1);
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST(BuffersAtTheEnd, DeregisterDoesNotWaitForARailPeerThatHasDetached) {
  for (const bool detached_first : {true, false}) {
    TestCluster cluster(2);
    JobRun job = attached_job(cluster, 2, 1);
    const std::uint16_t handle = cluster.node(0).register_buffer(job.client(0));
    cluster.settle();
    job.send(1, shm::Detach{});
    if (detached_first) cluster.settle();
    job.send(0, shm::DeregisterBuffer{handle});
    cluster.settle();
    EXPECT_TRUE(job.take<shm::Done>(0));
    job.detach(0);
    cluster.expect_nothing_left();
  }
}

TEST_F(Buffers, AHandleIsReusedAsLateAsPossible) {
  JobRun job(cluster, "job", 1, 1);
  job.attach_all();
  TestNode& node = cluster.node(0);
  const std::uint16_t first = node.register_buffer(job.client(0));
  job.send(0, shm::DeregisterBuffer{first});
  cluster.settle();
  EXPECT_TRUE(job.take<shm::Done>(0));
  EXPECT_EQ(first, 1);
  EXPECT_EQ(node.register_buffer(job.client(0)), 2);
}

TEST_F(Buffers, HandlesRunOut) {
  const std::size_t before = open_descriptors();
  {
    JobRun job(cluster, "job", 1, 1);
    job.attach_all();
    TestNode& node = cluster.node(0);
    node.segment(job.client(0));  // or its descriptor stays in the inbox
    // Half a thousand descriptors are always allowed; the rest of the handles needs more.
    for (std::uint32_t i = 0; i < shm::kBuffersMax; ++i) {
      const std::uint16_t handle = node.register_buffer(job.client(0));
      if (handle == shm::kNoHandle) GTEST_SKIP() << "too few descriptors allowed";
      ASSERT_EQ(handle, i + 1);
    }
    EXPECT_EQ(node.register_buffer(job.client(0)), shm::kNoHandle);
    const auto error = job.take<shm::ErrorReply>(0);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::kLimitExceeded);
    EXPECT_THAT(error->message, HasSubstr("1024 registered buffers"));
    job.send(0, shm::DeregisterBuffer{500});
    cluster.settle();
    EXPECT_EQ(node.register_buffer(job.client(0)), 500);
    job.detach_all();
  }
  cluster.expect_nothing_left();
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(Buffers, WhatMayNotBeRegistered) {
  const std::uint64_t most = segment_bytes_of(rank_of("job", 1, 1, 0)) + 3 * 4096;
  TestNode node({.nodes = 1, .session_memory_bytes_max = most}, std::make_shared<FakeMemory>(),
                std::make_shared<std::uint64_t>(1));
  const ClientId client = node.attach(rank_of("job", 1, 1, 0));
  const auto refusal = [&](std::uint64_t bytes, int fd) {
    std::vector<UniqueFd> fds;
    fds.emplace_back(fd);
    node.send(client, shm::RegisterBuffer{bytes, "mine"}, std::move(fds));
    EXPECT_FALSE(node.closed(client));
    const auto error = node.take<shm::ErrorReply>(client);
    EXPECT_TRUE(error) << bytes;
    return error.value_or(shm::ErrorReply{});
  };
  const auto sealed = [](std::uint64_t bytes) {
    return ::dup(shm::BufferFile::create("test", bytes)->fd());
  };
  EXPECT_EQ(refusal(0, sealed(4096)).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(shm::kBufferBytesMax + 1, sealed(4096)).code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refusal(4097, sealed(4096)).message, HasSubstr("'mine'"));
  // Not sealed: its owner could take the memory away under us.
  const int loose = ::memfd_create("loose", MFD_ALLOW_SEALING);
  ASSERT_EQ(::ftruncate(loose, 4096), 0);
  EXPECT_THAT(refusal(4096, loose).message, HasSubstr("'mine'"));
  refusal(4096, ::open("/dev/null", O_RDWR));
  refusal(4096, ::open("/proc/self/exe", O_RDONLY));
  EXPECT_EQ(node.register_buffer(client, 8192), 1);
  const auto full = refusal(8192, sealed(8192));
  EXPECT_EQ(full.code, ErrorCode::kLimitExceeded);
  EXPECT_THAT(full.message, HasSubstr(fmt::format("the {} bytes", most)));
  node.nic->refuse_register = "cannot pin: Cannot allocate memory (ENOMEM)";
  const auto memlock = refusal(1024, sealed(4096));
  EXPECT_EQ(memlock.code, ErrorCode::kSystem);
  EXPECT_THAT(memlock.message, HasSubstr("LimitMEMLOCK"));
  node.nic->refuse_register.clear();
  EXPECT_EQ(node.plane->snapshot().sessions.front().buffers, 1u);
  node.hang_up(client);
  node.step();
  node.expect_nothing_left();
}

TEST_F(Buffers, FlagsAreHandedOutInGranulesAndNotTwice) {
  JobRun job(cluster, "job", 1, 1);
  job.attach_all();  // 256 flags
  std::vector<std::uint32_t> bases;
  for (const std::uint32_t count : {1u, 64u, 65u}) {
    job.send(0, shm::AllocFlags{count});
    bases.push_back(job.take<shm::AllocFlagsReply>(0)->base);
  }
  EXPECT_EQ(bases, (std::vector<std::uint32_t>{0, 64, 128}));
  job.send(0, shm::AllocFlags{1});
  const auto full = job.take<shm::ErrorReply>(0);
  ASSERT_TRUE(full);
  EXPECT_EQ(full->code, ErrorCode::kLimitExceeded);
  EXPECT_THAT(full->message, HasSubstr("0 of its 256 are free"));
  job.send(0, shm::AllocFlags{0});
  EXPECT_EQ(job.take<shm::ErrorReply>(0)->code, ErrorCode::kInvalidArgument);
  job.send(0, shm::AllocFlags{0xffffffff});
  EXPECT_EQ(job.take<shm::ErrorReply>(0)->code, ErrorCode::kLimitExceeded);
}

TEST_F(Buffers, ALocalRanksBufferIsLentWithinItsJobAndNodeOnly) {
  JobRun job(cluster, "job", 2, 2), other(cluster, "other", 1, 2);
  job.attach_all();
  other.attach_all();
  const std::uint16_t handle = job.node_of(1).register_buffer(job.client(1), 4096);
  std::vector<shm::BufferFile> keep;
  EXPECT_NE(map(job.node_of(0), job.client(0), 1, handle, keep), nullptr);
  EXPECT_EQ(keep.back().bytes(), 4096u);
  // Another job, a rank of another node, a rank or handle that is not there.
  other.send(0, shm::OpenPeerBuffer{1, handle});
  EXPECT_EQ(other.take<shm::ErrorReply>(0)->code, ErrorCode::kNotFound);
  job.send(2, shm::OpenPeerBuffer{1, handle});
  EXPECT_EQ(job.take<shm::ErrorReply>(2)->code, ErrorCode::kNotFound);
  for (const std::uint32_t rank : {2u, 99u, 0xffffffffu}) {
    job.send(0, shm::OpenPeerBuffer{rank, handle});
    EXPECT_THAT(job.take<shm::ErrorReply>(0)->message, HasSubstr("no local rank"));
  }
  for (const int bad : {0, handle + 1, 0xffff}) {
    job.send(0, shm::OpenPeerBuffer{1, static_cast<std::uint16_t>(bad)});
    EXPECT_THAT(job.take<shm::ErrorReply>(0)->message, HasSubstr("no buffer"));
  }
}

TEST_F(Buffers, APeersBufferOutOfReachFailsTheJob) {
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  ASSERT_TRUE(job.all_up());
  cluster.node(1).nic->refuse_import = true;
  job.node_of(0).register_buffer(job.client(0));
  cluster.settle();
  const auto failed = job.take<shm::SessionFailed>(1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("cannot reach buffer 1 of rank 0 on node 0"));
  EXPECT_TRUE(job.take<shm::SessionFailed>(0));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

}  // namespace
}  // namespace mk::daemon::test
