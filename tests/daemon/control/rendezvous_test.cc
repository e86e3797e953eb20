// How a job comes up, in every order of arrival, and what its ranks hear when it does not.
#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>

#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(Rendezvous, EveryOrderOfArrivalOf2x2) {
  std::vector<std::uint32_t> order(4);
  std::iota(order.begin(), order.end(), 0u);
  do {
    // The stream comes up before, between or after the ranks; messages are delivered at once, or
    // only at the end.
    for (std::size_t connect_at = 0; connect_at <= order.size(); ++connect_at) {
      for (const bool settle_between : {false, true}) {
        SCOPED_TRACE(fmt::format("order {} {} {} {}, stream after {}, settling {}", order[0],
                                 order[1], order[2], order[3], connect_at, settle_between));
        TestCluster cluster(2, {}, connect_at + 1);
        JobRun job(cluster, "job", 2, 2);
        for (std::size_t i = 0; i <= order.size(); ++i) {
          if (i == connect_at) cluster.connect(0, 1);
          if (i < order.size()) job.attach(order[i]);
          if (settle_between) cluster.settle();
        }
        // A part that could not be sent when the job was complete goes with the next hello.
        cluster.settle();
        EXPECT_TRUE(job.all_up());
        EXPECT_THAT(cluster.broken, testing::IsEmpty());
        EXPECT_EQ(cluster.node(0).nic->links, 1);
        job.detach_all();
        cluster.expect_nothing_left();
      }
    }
  } while (std::ranges::next_permutation(order).found);
}

class RendezvousWorlds
    : public testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> {};

TEST_P(RendezvousWorlds, ComesUpAndEndsClean) {
  const auto [nodes, local_size, rails] = GetParam();
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    TestCluster cluster(4, {.rails = rails, .sessions_max = 16}, seed);
    cluster.connect_all();
    JobRun job(cluster, "job", nodes, local_size);
    std::vector<std::uint32_t> order(job.world());
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
    for (const std::uint32_t rank : order) job.attach(rank);
    cluster.settle();
    EXPECT_TRUE(job.all_up());
    // Only rail peers connect.
    const std::uint32_t rails_used = std::min(rails, local_size);
    EXPECT_EQ(cluster.node(0).nic->links, static_cast<int>((nodes - 1) * rails_used));
    job.detach_all();
    cluster.expect_nothing_left();
  }
}

INSTANTIATE_TEST_SUITE_P(SmallWorlds, RendezvousWorlds,
                         testing::Combine(testing::Values(1u, 2u, 3u, 4u),
                                          testing::Values(1u, 2u, 3u, 8u),
                                          testing::Values(1u, 2u)));

TEST(Rendezvous, TwoJobsShareTheLinks) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun first(cluster, "first", 2, 2), second(cluster, "second", 2, 1);
  first.attach_all();
  second.attach_all();
  EXPECT_TRUE(first.all_up());
  EXPECT_TRUE(second.all_up());
  EXPECT_EQ(cluster.node(0).nic->connects, 1);
  first.detach_all();
  // The link stays for the next job.
  EXPECT_EQ(cluster.node(0).nic->links, 1);
  JobRun third(cluster, "third", 2, 1);
  third.attach_all();
  EXPECT_TRUE(third.all_up());
  EXPECT_EQ(cluster.node(0).nic->connects, 1);
  second.detach_all();
  third.detach_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, ASingleNodeJobNeedsNoPeers) {
  TestCluster cluster(3);
  JobRun job(cluster, "job", 1, 3);
  job.attach_all();
  EXPECT_TRUE(job.all_up());
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, MissingRanksAreListedByNode) {
  TestCluster cluster(3, {.sessions_max = 16});
  cluster.connect_all();
  JobRun job(cluster, "job", 3, 4);
  for (const std::uint32_t rank : {0u, 2u, 8u, 9u, 10u, 11u}) job.attach(rank);
  cluster.settle();
  cluster.wait(4'900);
  EXPECT_FALSE(job.take<shm::SessionFailed>(0));
  cluster.wait(200);
  // Node 0 misses two of its own and all of node 1; node 2 misses what it has not heard of.
  const auto at_0 = job.take<shm::SessionFailed>(0);
  ASSERT_TRUE(at_0);
  EXPECT_EQ(at_0->code, ErrorCode::kTimeout);
  EXPECT_THAT(at_0->message, AllOf(HasSubstr("'job'"), HasSubstr("5000 ms"),
                                   HasSubstr("ranks 1, 3 (node rank 0), ranks 4-7 (node rank 1)"),
                                   Not(HasSubstr("not reachable"))));
  EXPECT_TRUE(job.take<shm::SessionFailed>(2));
  const auto at_2 = job.take<shm::SessionFailed>(9);
  ASSERT_TRUE(at_2);
  EXPECT_EQ(at_2->code, ErrorCode::kTimeout);
  EXPECT_THAT(at_2->message, HasSubstr("ranks 0-3 (node rank 0), ranks 4-7 (node rank 1)"));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, TheDeadlineIsTheEarliestRanks) {
  TestCluster cluster(1);
  auto first = rank_of("job", 1, 3, 0);
  first.timeout_ms = 1'000;
  auto second = rank_of("job", 1, 3, 1);
  second.timeout_ms = 60'000;
  const ClientId a = cluster.node(0).attach(first);
  cluster.wait(900);
  const ClientId b = cluster.node(0).attach(second);
  cluster.wait(100);
  EXPECT_TRUE(cluster.node(0).take<shm::SessionFailed>(a));
  EXPECT_TRUE(cluster.node(0).take<shm::SessionFailed>(b));
}

TEST(Rendezvous, UnreachableDaemonsAreNamed) {
  TestCluster cluster(3);
  cluster.connect(0, 1);
  JobRun job(cluster, "job", 3, 1);
  job.attach(0);
  job.attach(1);
  cluster.settle();
  cluster.disconnect(0, 1);
  cluster.wait(5'100);
  const auto failed = job.take<shm::SessionFailed>(0);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kTimeout);
  EXPECT_THAT(failed->message, AllOf(HasSubstr("node 1 is not reachable: the wire was cut"),
                                     HasSubstr("node 2 is not reachable: never seen"),
                                     HasSubstr("rank 1 (node rank 1), rank 2 (node rank 2)")));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, LinksThatDoNotComeUpAreNamed) {
  TestCluster cluster(2);
  cluster.connect_all();
  cluster.node(0).nic->refuse_connect = true;
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  EXPECT_FALSE(job.take<shm::JobUp>(0));
  EXPECT_FALSE(job.take<shm::JobUp>(1));
  cluster.wait(5'100);
  const auto failed = job.take<shm::SessionFailed>(0);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("rail 0 to node 1 is not connected: no route to"));
  // With backoff: 100, 200, 400, 800, 1600, 3200 ms.
  EXPECT_GE(cluster.node(0).nic->connects, 4);
  EXPECT_LE(cluster.node(0).nic->connects, 7);
  EXPECT_EQ(job.take<shm::SessionFailed>(1)->code, ErrorCode::kTimeout);
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, ALinkThatComesUpLateIsFine) {
  TestCluster cluster(2);
  cluster.connect_all();
  cluster.node(1).nic->refuse_connect = true;
  JobRun job(cluster, "job", 2, 2);
  job.attach_all();
  cluster.wait(1'000);
  cluster.node(1).nic->refuse_connect = false;
  cluster.wait(2'000);
  EXPECT_TRUE(job.all_up());
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, APeerMayComeBackBeforeTheDeadline) {
  TestCluster cluster(3);
  cluster.connect_all();
  JobRun job(cluster, "job", 3, 1);
  job.attach(0);
  job.attach(1);
  cluster.settle();
  cluster.disconnect(0, 1);
  cluster.wait(1'000);
  cluster.connect(0, 1);
  cluster.settle();
  job.attach(2);
  cluster.settle();
  EXPECT_TRUE(job.all_up());
  job.detach_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, ANodeRankClaimedByTwoDaemonsFailsBoth) {
  TestCluster cluster(3);
  cluster.connect_all();
  TestNode &one = cluster.node(1), &two = cluster.node(2);
  // Both say that they are node rank 1; node 0 is another witness.
  const ClientId zero = cluster.node(0).attach(rank_of("job", 3, 1, 0));
  const ClientId a = one.attach(rank_of("job", 3, 1, 1));
  const ClientId b = two.attach(rank_of("job", 3, 1, 1));
  cluster.settle();
  const auto at_a = one.take<shm::SessionFailed>(a);
  const auto at_b = two.take<shm::SessionFailed>(b);
  ASSERT_TRUE(at_a);
  ASSERT_TRUE(at_b);
  EXPECT_EQ(at_a->code, ErrorCode::kAlreadyExists);
  EXPECT_EQ(at_b->code, ErrorCode::kAlreadyExists);
  EXPECT_THAT(at_a->message, AllOf(HasSubstr("node 2"), HasSubstr("node rank 1")));
  EXPECT_TRUE(cluster.node(0).take<shm::SessionFailed>(zero));
  EXPECT_THAT(cluster.broken, testing::IsEmpty());
  cluster.node(0).hang_up(zero);
  one.hang_up(a);
  two.hang_up(b);
  cluster.settle();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, LayoutsThatDisagreeAcrossNodesFailBoth) {
  TestCluster cluster(2);
  cluster.connect_all();
  const ClientId a = cluster.node(0).attach(rank_of("job", 2, 1, 0));
  const ClientId b = cluster.node(1).attach(rank_of("job", 2, 2, 2));
  const ClientId c = cluster.node(1).attach(rank_of("job", 2, 2, 3));
  cluster.settle();
  for (const auto& failed :
       {cluster.node(0).take<shm::SessionFailed>(a), cluster.node(1).take<shm::SessionFailed>(b),
        cluster.node(1).take<shm::SessionFailed>(c)}) {
    ASSERT_TRUE(failed);
    EXPECT_EQ(failed->code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(failed->message, AllOf(HasSubstr("2 nodes of 1"), HasSubstr("2 nodes of 2")));
  }
}

TEST(Rendezvous, LayoutsThatDisagreeWhileRanksAreMissing) {
  TestCluster cluster(2);
  cluster.connect_all();
  const ClientId here = cluster.node(0).attach(rank_of("job", 2, 2, 0));
  const ClientId there = cluster.node(1).attach(rank_of("job", 2, 1, 1));
  cluster.settle();
  EXPECT_FALSE(cluster.node(0).take<shm::SessionFailed>(here));
  cluster.wait(5'100);
  const auto failed = cluster.node(0).take<shm::SessionFailed>(here);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kTimeout);
  EXPECT_THAT(failed->message,
              AllOf(HasSubstr("rank 1 (node rank 0)"), HasSubstr("node 1 disagrees"),
                    HasSubstr("2 nodes of 1"), HasSubstr("2 nodes of 2")));
  cluster.node(0).hang_up(here);
  cluster.node(1).hang_up(there);
  cluster.settle();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, APeersFlagsOutOfReachFailTheJob) {
  TestCluster cluster(2);
  cluster.connect_all();
  cluster.node(0).nic->refuse_import = true;
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  const auto failed = job.take<shm::SessionFailed>(0);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("arrival flags of node 1"));
  EXPECT_TRUE(job.take<shm::SessionFailed>(1));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(Rendezvous, UnorderedFabricsImportNoFlags) {
  TestCluster cluster(2, {.contract = fabric::DeliveryContract::kUnordered});
  JobRun job = attached_job(cluster, 2, 1);
  EXPECT_TRUE(job.all_up());
  EXPECT_EQ(cluster.node(0).nic->remote_regions, 0);
  job.detach_all();
  cluster.expect_nothing_left();
}

// Peers that answer just in time, many of them. In between, other jobs' requests are served.
TEST(Rendezvous, AnEventWaitsForOnePeerThatIsSlowNotForAll) {
  constexpr std::uint32_t kNodes = 17;
  auto clock = std::make_shared<std::uint64_t>(1'000'000'000);
  TestNode node({.nodes = kNodes}, std::make_shared<FakeMemory>(), clock);
  for (NodeId other = 1; other < kNodes; ++other) {
    node.reachable.insert(other);
    PeerHello hello = node.plane->hello();
    hello.node = other;
    hello.generation = other;
    ASSERT_TRUE(node.plane->on_peer_message(other, hello));
  }
  auto attach = rank_of("job", kNodes, 1, 0);
  attach.timeout_ms = 600'000;
  const ClientId client = node.attach(attach);
  // Another job of this node, with the first of those peers.
  auto small = rank_of("small", 2, 1, 0);
  small.timeout_ms = 600'000;
  const ClientId other = node.attach(small);
  int imports = 0;
  node.nic->on_connect = [&] { node.pass(1'900); };
  node.nic->on_import = [&] { node.pass(1'900), ++imports; };
  std::uint64_t longest_ms = 0;
  const auto event = [&](auto happens) {
    const std::uint64_t begin = *clock;
    happens();
    longest_ms = std::max(longest_ms, (*clock - begin) / kMillisecond);
  };
  const auto tick = [&] { event([&] { node.plane->on_tick(); }); };
  for (NodeId from = 1; from < kNodes; ++from)
    event([&] { ASSERT_TRUE(node.play(from, part_of("job", from, kNodes, 1, from))); });
  event([&] { ASSERT_TRUE(node.play(1, part_of("small", 99, 2, 1, 1))); });
  const auto ready_sent = [&](const std::string& job) {
    return std::ranges::count_if(node.sent, [&](const auto& one) {
      const auto* ready = std::get_if<JobReady>(&one.second);
      return ready != nullptr && ready->job == job;
    });
  };
  // A connect and an import of each, and the small job's import.
  int ticks = 0;
  while (ready_sent("job") != kNodes - 1 && ticks++ < 100) tick();
  EXPECT_EQ(ready_sent("job"), kNodes - 1);
  while (ready_sent("small") != 1 && ticks++ < 100) tick();
  EXPECT_EQ(ready_sent("small"), 1);
  EXPECT_LE(ticks, 40) << "what was reached is kept";
  EXPECT_EQ(node.nic->connects, static_cast<int>(kNodes - 1));
  EXPECT_EQ(imports, static_cast<int>(kNodes));

  // Buffers that were announced before the job is up, and a blob behind them.
  const Bytes key(sizeof(std::uint64_t), std::byte{1});
  std::uint64_t part_id = 0;
  for (const auto& [to, message] : node.sent) {
    if (const auto* offer = std::get_if<JobOffer>(&message); offer && offer->job == "job")
      part_id = offer->part_id;
  }
  for (std::uint16_t handle = 1; handle <= 5; ++handle)
    ASSERT_TRUE(node.plane->on_peer_message(1, RegionAnnounce{"job", 1, 1, handle, 4096, key}));
  ExchangePart blob;
  blob.job = "job";
  blob.part_id = 1;
  blob.rank = 1;
  ASSERT_TRUE(node.plane->on_peer_message(1, blob));
  for (NodeId from = 1; from < kNodes; ++from) {
    event([&] { ASSERT_TRUE(node.plane->on_peer_message(from, JobReady{"job", from, part_id})); });
  }
  EXPECT_TRUE(node.take<shm::JobUp>(client));
  EXPECT_EQ(imports, static_cast<int>(kNodes) + 1);
  // One that comes now goes behind those.
  ASSERT_TRUE(node.plane->on_peer_message(1, RegionAnnounce{"job", 1, 1, 6, 4096, key}));
  for (int i = 2; i <= 6; ++i) {
    tick();
    EXPECT_EQ(imports, static_cast<int>(kNodes) + i);
  }
  tick();
  EXPECT_EQ(imports, static_cast<int>(kNodes) + 6);
  EXPECT_LE(longest_ms, 2'100u);
  EXPECT_FALSE(node.take<shm::SessionFailed>(client));
  EXPECT_FALSE(node.take<shm::SessionFailed>(other));
}

}  // namespace
}  // namespace mk::daemon::test
