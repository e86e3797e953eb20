// What one user may have of a daemon, over all sessions; and the share of a job's ranks.
#include <gmock/gmock.h>

#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

class UserLimits : public testing::Test {
 protected:
  static TestNode make_node(NodeSetup setup) {
    setup.nodes = 1;
    return TestNode(setup, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  }
  /// A job of one rank.
  static ClientId attach(TestNode& node, const std::string& job, std::uint32_t uid,
                         std::uint32_t lanes = 1) {
    shm::Attach attach = rank_of(job, 1, 1, 0);
    attach.lane_count = lanes;
    return node.attach(attach, 55, uid);
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
  TestNode node = make_node({.user_max = {.buffers = 3, .registered_bytes = 5 * 4096}});
  const ClientId a = attach(node, "a", 1000), b = attach(node, "b", 1000);
  const ClientId other = attach(node, "c", 1001);
  EXPECT_NE(node.register_buffer(a, 4096), 0);
  const std::uint16_t second = node.register_buffer(b, 4096);
  EXPECT_NE(second, 0);
  EXPECT_EQ(node.register_buffer(b, 4 * 4096), shm::kNoHandle);
  expect_refused(node, b, "would exceed the 20480 bytes that user 1000 may register");
  EXPECT_NE(node.register_buffer(b, 2 * 4096), 0);
  EXPECT_EQ(node.register_buffer(a, 4096), shm::kNoHandle);
  expect_refused(node, a, "user 1000 has 3 registered buffers");
  EXPECT_NE(node.register_buffer(other, 5 * 4096), 0);
  node.send(b, shm::DeregisterBuffer{second});
  node.step();
  EXPECT_NE(node.register_buffer(a, 4096), 0) << "what is given back counts no more";
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
