// What one user may have of a daemon, over all sessions; and the share of a job's ranks.
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstring>

#include "shm/gpu/memory.h"
#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

class UserLimits : public testing::Test {
 protected:
  /// What a session of one ring takes.
  const std::uint64_t kSegment = segment_bytes_of(one_ring("a", 1));
  static shm::Attach one_ring(const std::string& job, std::uint32_t lanes) {
    shm::Attach attach = rank_of(job, 1, 1, 0);
    attach.lane_count = lanes;
    return attach;
  }
  static TestNode make_node(NodeSetup setup) {
    setup.nodes = 1;
    return TestNode(setup, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  }
  /// A job of one rank.
  static ClientId attach(TestNode& node, const std::string& job, std::uint32_t uid,
                         std::uint32_t lanes = 1) {
    return node.attach(one_ring(job, lanes), 55, uid);
  }
  static void expect_refused(TestNode& node, ClientId client, const std::string& says) {
    const auto error = node.take<shm::ErrorReply>(client);
    ASSERT_TRUE(error) << says;
    EXPECT_EQ(error->code, ErrorCode::kLimitExceeded);
    EXPECT_THAT(error->message, HasSubstr(says));
  }
};

TEST_F(UserLimits, Sessions) {
  TestNode node = make_node({.user_max = {.sessions = 2}});
  const ClientId first = attach(node, "a", 1000);
  attach(node, "b", 1000);
  expect_refused(node, attach(node, "c", 1000), "user 1000 has 2 sessions");
  EXPECT_TRUE(node.take<shm::JobUp>(attach(node, "d", 1001))) << "others have their own";
  node.hang_up(first);
  node.step();
  EXPECT_TRUE(node.take<shm::JobUp>(attach(node, "e", 1000))) << "places come back";
}

TEST_F(UserLimits, Rings) {
  TestNode node = make_node({.user_max = {.rings = 5}});
  attach(node, "a", 1000, 3);
  expect_refused(node, attach(node, "b", 1000, 3), "limits.user_rings");
  EXPECT_TRUE(node.take<shm::JobUp>(attach(node, "c", 1000, 2)));
  EXPECT_TRUE(node.take<shm::JobUp>(attach(node, "d", 1001, 5)));
}

TEST_F(UserLimits, BuffersAndTheirBytesOverAllSessions) {
  const std::uint64_t most = 2 * kSegment + 5 * 4096;
  TestNode node = make_node({.user_max = {.buffers = 3, .memory_bytes = most}});
  const ClientId a = attach(node, "a", 1000), b = attach(node, "b", 1000);
  const ClientId other = attach(node, "c", 1001);
  EXPECT_NE(node.register_buffer(a, 4096), 0);
  const std::uint16_t second = node.register_buffer(b, 4096);
  EXPECT_NE(second, 0);
  EXPECT_EQ(node.register_buffer(b, 4 * 4096), shm::kNoHandle);
  expect_refused(
      node, b,
      fmt::format("would exceed the {} bytes of host memory that user 1000 may hold", most));
  EXPECT_NE(node.register_buffer(b, 2 * 4096), 0);
  EXPECT_EQ(node.register_buffer(a, 4096), shm::kNoHandle);
  expect_refused(node, a, "would exceed the 3 registered buffers that user 1000 may hold");
  EXPECT_NE(node.register_buffer(other, 5 * 4096), 0);
  node.send(b, shm::DeregisterBuffer{second});
  node.step();
  EXPECT_NE(node.register_buffer(a, 4096), 0) << "what is given back counts no more";
}

TEST_F(UserLimits, RingsAndFlagsAreMemoryToo) {
  TestNode node = make_node({.user_max = {.memory_bytes = 2 * kSegment}});
  attach(node, "a", 1000);
  expect_refused(node, attach(node, "b", 1000, 16), "limits.user_registered");
  attach(node, "c", 1000);
  expect_refused(node, attach(node, "d", 1000), "limits.user_registered");
  EXPECT_TRUE(node.take<shm::JobUp>(attach(node, "e", 1001)));
  TestNode small = make_node({.session_memory_bytes_max = kSegment - 1});
  expect_refused(small, attach(small, "a", 1000), "limits.registered");
}

TEST_F(UserLimits, AllUsersTogetherHaveABoundAsWell) {
  TestNode node = make_node({.all_max = {.memory_bytes = 2 * kSegment + 3 * 4096}});
  const ClientId a = attach(node, "a", 1000), b = attach(node, "b", 1001);
  const std::uint16_t first = node.register_buffer(a, 2 * 4096);
  EXPECT_NE(first, 0);
  EXPECT_EQ(node.register_buffer(b, 2 * 4096), shm::kNoHandle);
  expect_refused(node, b, "limits.all_registered");
  EXPECT_NE(node.register_buffer(b, 4096), 0);
  node.hang_up(a);
  node.step();
  EXPECT_NE(node.register_buffer(b, 2 * 4096), 0);
}

TEST_F(UserLimits, ASparseFileCountsByItsSizeBeforeAnythingIsPinned) {
  TestNode node = make_node({.session_memory_bytes_max = kSegment + (1 << 20)});
  const ClientId client = attach(node, "a", 1000);
  bool pinned = false;
  node.nic->on_register = [&] { pinned = true; };
  for (const std::uint64_t announced : {std::uint64_t{4096}, std::uint64_t{1} << 36}) {
    // 64 GiB of which no page is there, and of which little is announced.
    const auto file = shm::BufferFile::create("sparse", std::uint64_t{1} << 36);
    ASSERT_TRUE(file) << file.error().message;
    std::vector<UniqueFd> fds;
    fds.emplace_back(::dup(file->fd()));
    node.send(client, shm::RegisterBuffer{announced, "sparse"}, std::move(fds));
    expect_refused(node, client, "in a file of 68719476736 bytes");
  }
  EXPECT_FALSE(pinned) << "a NIC's driver asks nobody's limit of locked memory but the daemon's";
  EXPECT_NE(node.register_buffer(client, 1 << 20), 0);
}

TEST_F(UserLimits, Descriptors) {
  // A session's own, and one for each buffer.
  TestNode node = make_node({.user_max = {.descriptors = 5}, .all_max = {.descriptors = 7}});
  const ClientId a = attach(node, "a", 1000);
  for (int i = 0; i < 3; ++i) EXPECT_NE(node.register_buffer(a), 0);
  expect_refused(node, attach(node, "b", 1000), "limits.user_descriptors");
  const std::uint16_t last = node.register_buffer(a);
  EXPECT_NE(last, 0);
  EXPECT_EQ(node.register_buffer(a), shm::kNoHandle);
  expect_refused(node, a, "limits.user_descriptors");
  node.send(a, shm::OpenPeerBuffer{0, last});
  expect_refused(node, a, "limits.user_descriptors");
  const ClientId other = attach(node, "c", 1001);
  EXPECT_NE(node.register_buffer(other), 0);
  EXPECT_EQ(node.register_buffer(other), shm::kNoHandle);
  expect_refused(node, other, "limits.descriptors");
  node.send(a, shm::DeregisterBuffer{last});
  node.step();
  EXPECT_NE(node.register_buffer(other), 0) << "what is given back counts no more";
}

// A NIC has places for few; the job need not even come up.
TEST_F(UserLimits, GpuBuffersOfARail) {
  TestNode node({.rails = 2, .device_memory = true, .gpu_regions_max = 128},
                std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  const auto on_rail = [&](const std::string& job, std::uint32_t uid, std::uint32_t rail) {
    shm::Attach attach = rank_of(job, 2, 1, 0);
    attach.rail = rail;
    return node.attach(attach, 55, uid);
  };
  const auto registers = [&](ClientId client) -> std::uint16_t {
    gpu::MemoryKey key;
    key.process.pid = 1234;
    key.bytes = 4096;
    std::vector<std::byte> blob(sizeof key);
    std::memcpy(blob.data(), &key, sizeof key);
    node.send(client, shm::RegisterDeviceBuffer{4096, "small", blob});
    const auto reply = node.take<shm::RegisterBufferReply>(client);
    return reply ? reply->handle : shm::kNoHandle;
  };
  const ClientId a = on_rail("a", 1000, 0), same = on_rail("b", 1000, 0);
  for (int i = 0; i < 95; ++i) ASSERT_NE(registers(a), 0) << i;
  const std::uint16_t last = registers(same);
  ASSERT_NE(last, 0);
  const std::string says = "would exceed the 96 GPU buffers of rail 0 that user 1000 may hold";
  for (const ClientId client : {a, same}) {
    EXPECT_EQ(registers(client), shm::kNoHandle);
    expect_refused(node, client, says);
  }
  EXPECT_NE(node.register_buffer(a), 0) << "host memory has no such bound";
  const ClientId other = on_rail("c", 1001, 0);
  for (int i = 0; i < 32; ++i) EXPECT_NE(registers(other), 0) << i;
  EXPECT_NE(registers(on_rail("d", 1000, 1)), 0) << "each rail has its own NICs";
  node.send(same, shm::DeregisterBuffer{last});
  node.step();
  EXPECT_NE(registers(a), 0) << "what is given back counts no more";
}

TEST_F(UserLimits, AJobsLimitIsSplitOverItsRanksHere) {
  // Seen through what the proxies let pass is the proxies' test; here, that a change reaches them
  // and names the job's sessions.
  JobShare share{.weight = 2, .limit = {.bytes_per_second = 8e9}};
  TestNode node = make_node(
      {.job_share = [&](const std::string& job) { return job == "named" ? share : JobShare{}; }});
  for (std::uint32_t rank = 0; rank < 2; ++rank) node.attach(rank_of("named", 1, 2, rank));
  attach(node, "other", 1000);
  const ControlSnapshot before = node.plane->snapshot();
  const auto of = [](const ControlSnapshot& snapshot, const std::string& job) {
    return std::ranges::find(snapshot.jobs, job, &JobInfo::name);
  };
  EXPECT_EQ(of(before, "named")->weight, 2u);
  EXPECT_EQ(of(before, "named")->limit.bytes_per_second, 8e9);
  EXPECT_EQ(of(before, "other")->weight, 1u);
  share.weight = 5;
  EXPECT_EQ(node.plane->refresh_shares("named"), 2u);
  EXPECT_EQ(node.plane->refresh_shares("nobody"), 0u);
  const ControlSnapshot after = node.plane->snapshot();
  EXPECT_EQ(of(after, "named")->weight, 5u);
  node.step();
}

}  // namespace
}  // namespace mk::daemon::test
