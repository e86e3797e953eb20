// Which rail a session gets from its daemon, and between which rails two nodes then link.
#include <gmock/gmock.h>

#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// The rails of the node's sessions, in the order of attaching.
std::vector<std::uint32_t> rails_of(TestNode& node) {
  std::vector<std::uint32_t> rails;
  for (const SessionInfo& session : node.plane->snapshot().sessions) rails.push_back(session.rail);
  return rails;
}
TestNode node_with_rails(NodeSetup setup = {}) {
  setup.nodes = 1;
  setup.rails = 4;
  return TestNode(setup, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
}
shm::Attach with_gpu(shm::Attach attach, const std::string& gpu) {
  attach.gpu = gpu;
  return attach;
}

TEST(RailsOfSessions, OfTwoJobsAreApart) {
  TestNode node = node_with_rails();
  for (const char* job : {"first", "second"})
    for (std::uint32_t rank = 0; rank < 2; ++rank) node.attach(rank_of(job, 1, 2, rank));
  EXPECT_THAT(rails_of(node), ElementsAre(0, 1, 2, 3));
}

TEST(RailsOfSessions, ComeBackWhenAJobEnds) {
  TestNode node = node_with_rails();
  const ClientId first = node.attach(rank_of("first", 1, 1, 0));
  node.attach(rank_of("second", 1, 1, 0));
  node.hang_up(first);
  node.step();
  node.attach(rank_of("third", 1, 1, 0));
  EXPECT_THAT(rails_of(node), ElementsAre(1, 0));
}

TEST(RailsOfSessions, AreThoseTheyAskFor) {
  TestNode node = node_with_rails();
  shm::Attach attach = rank_of("job", 1, 1, 0);
  attach.rail = 3;
  node.attach(attach);
  EXPECT_THAT(rails_of(node), ElementsAre(3));
  EXPECT_EQ("asked for", node.plane->snapshot().sessions[0].rail_why);
  attach.job = "other";
  attach.rail = 4;
  const auto error = node.take<shm::ErrorReply>(node.attach(attach));
  ASSERT_TRUE(error);
  EXPECT_EQ(ErrorCode::kInvalidArgument, error->code);
  EXPECT_THAT(error->message, HasSubstr("wants rail 4, but this node has 4"));
}

TEST(RailsOfSessions, AreTheLeastLoadedNearTheirGpus) {
  TestNode node = node_with_rails({.rails_near = [](const std::string& gpu) {
    if (gpu == "0000:1b:00.0") return std::vector<std::uint32_t>{2};
    if (gpu == "0000:43:00.0") return std::vector<std::uint32_t>{1, 2};
    return std::vector<std::uint32_t>{};
  }});
  node.attach(with_gpu(rank_of("a", 1, 1, 0), "0000:1b:00.0"));
  node.attach(with_gpu(rank_of("b", 1, 1, 0), "0000:43:00.0"));
  node.attach(with_gpu(rank_of("c", 1, 1, 0), "0000:43:00.0"));
  node.attach(with_gpu(rank_of("d", 1, 1, 0), "0000:9d:00.0"));
  EXPECT_THAT(rails_of(node), ElementsAre(2, 1, 1, 0)) << "the last one's GPU is near no rail";
  const auto sessions = node.plane->snapshot().sessions;
  EXPECT_EQ("0000:1b:00.0", sessions[0].gpu);
  EXPECT_EQ("nearest to GPU 0000:1b:00.0", sessions[0].rail_why);
  EXPECT_EQ("in turn", sessions[3].rail_why);
}

TEST(RailsOfSessions, AreThoseThatTheConfigurationGivesTheirGpus) {
  TestNode node = node_with_rails(
      {.rails_near = [](const std::string&) { return std::vector<std::uint32_t>{0}; },
       .gpu_rails = {{"0000:1b:00.0", 3}}});
  node.attach(with_gpu(rank_of("a", 1, 2, 0), "0000:1b:00.0"));
  node.attach(with_gpu(rank_of("a", 1, 2, 1), "0000:43:00.0"));
  shm::Attach asks = with_gpu(rank_of("b", 1, 1, 0), "0000:1b:00.0");
  asks.rail = 1;
  node.attach(asks);
  EXPECT_THAT(rails_of(node), ElementsAre(3, 0, 1)) << "a rank's own word comes first";
  EXPECT_EQ("configured for GPU 0000:1b:00.0", node.plane->snapshot().sessions[0].rail_why);
}

TEST(RailsOfSessions, WithoutGpusAreTheLeastLoadedNearTheirCpus) {
  TestNode node = node_with_rails(
      {.rails_near = [](const std::string&) { return std::vector<std::uint32_t>{0}; },
       .place_of =
           [](std::int32_t pid) {
             EXPECT_GT(pid, 0);
             return ControlOptions::ProcessPlace{"8-15", {2, 3}};
           }});
  node.attach(rank_of("a", 1, 1, 0), 77);
  node.attach(rank_of("b", 1, 1, 0), 77);
  node.attach(rank_of("c", 1, 1, 0), 77);
  node.attach(with_gpu(rank_of("d", 1, 1, 0), "0000:9d:00.0"));
  EXPECT_THAT(rails_of(node), ElementsAre(2, 3, 2, 0)) << "a GPU says more than CPUs";
  EXPECT_EQ("8-15", node.plane->snapshot().sessions[0].cpus);
  EXPECT_EQ("nearest to CPUs 8-15", node.plane->snapshot().sessions[0].rail_why);
}

TEST(RailsOfSessions, NeedAGpuThatIsAPciAddress) {
  TestNode node = node_with_rails();
  const auto error =
      node.take<shm::ErrorReply>(node.attach(with_gpu(rank_of("job", 1, 1, 0), "../../etc")));
  ASSERT_TRUE(error);
  EXPECT_THAT(error->message, HasSubstr("0000:1b:00.0"));
}

// One rank on each of two nodes: the link of each goes from its rail to the other's.
TEST(RailsOfSessions, AreLinkedAcross) {
  TestCluster cluster(2, {.rails = 3});
  cluster.connect_all();
  const std::uint32_t rails[] = {0, 2};
  for (std::uint32_t node = 0; node < 2; ++node) {
    shm::Attach attach = rank_of("job", 2, 1, node);
    attach.rail = rails[node];
    cluster.node(node).attach(attach);
  }
  cluster.settle();
  for (std::uint32_t node = 0; node < 2; ++node) {
    const ControlSnapshot snapshot = cluster.node(node).plane->snapshot();
    ASSERT_EQ(1u, snapshot.jobs.size());
    EXPECT_EQ("up", snapshot.jobs[0].state);
    ASSERT_EQ(1u, snapshot.links.size());
    EXPECT_EQ(rails[node], snapshot.links[0].rail);
    EXPECT_EQ(rails[1 - node], snapshot.links[0].peer_rail);
    EXPECT_EQ("up", snapshot.links[0].state);
  }
}

// The number comes from a peer.
TEST(RailsOfSessions, OfAPeerAreRailsThatThereAre) {
  TestNode node({.nodes = 2, .rails = 2}, std::make_shared<FakeMemory>(),
                std::make_shared<std::uint64_t>(1));
  node.reachable = {1};
  PeerHello hello = node.plane->hello();
  hello.node = 1;
  ASSERT_TRUE(node.plane->on_peer_message(1, hello));
  node.attach(rank_of("job", 2, 1, 0));
  JobPart part = part_of("job", 7, 2, 1, 1);
  part.sessions[0].rail = 2;
  const Status played = node.play(1, part);
  ASSERT_FALSE(played);
  EXPECT_EQ(ErrorCode::kProtocol, played.error().code);
  EXPECT_THAT(played.error().message, HasSubstr("rail 2 of 2"));
}

}  // namespace
}  // namespace mk::daemon::test
