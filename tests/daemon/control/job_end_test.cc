// How jobs end: by failures, by detaching, by links and daemons that go, and what remains
// meanwhile.
#include <gmock/gmock.h>

#include <map>

#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// A write of rank 0's memory into rank 1's. Both have registered buffers for it.
struct Write {
  Write(TestCluster& cluster, JobRun& job)
      : command{.opcode = shm::Opcode::kWrite,
                .peer = 1,
                .src_handle = job.node_of(0).register_buffer(job.client(0)),
                .dst_handle = job.node_of(1).register_buffer(job.client(1)),
                .bytes = 64,
                .epoch = 1},
        segment(job.node_of(0).segment(job.client(0))),
        producer{.ring = segment.ring(0)} {
    cluster.settle();
  }
  shm::Command command;
  shm::Segment segment;
  shm::RingProducer producer;
};

TEST(JobEnd, TheFailureIsInTheSegmentsToo) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 2);
  std::vector<shm::Segment> segments;
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    segments.push_back(job.node_of(rank).segment(job.client(rank)));
  }
  job.hang_up(3);
  // The local ranks know within the event itself.
  EXPECT_EQ(segments[2].failure().error().code, ErrorCode::kPeerLost);
  EXPECT_NE(segments[2].header().abort_flag, 0u);
  EXPECT_TRUE(segments[0].failure());
  cluster.settle();
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    const Status failure = segments[rank].failure();
    ASSERT_FALSE(failure);
    EXPECT_EQ(failure.error().code, ErrorCode::kPeerLost);
    EXPECT_THAT(failure.error().message, HasSubstr("rank 3"));
  }
  // A failed session answers its failure until its client goes.
  job.send(0, shm::AllocFlags{64});
  EXPECT_EQ(job.take<shm::ErrorReply>(0)->code, ErrorCode::kPeerLost);
  job.send(0, shm::Detach{});
  EXPECT_TRUE(job.take<shm::Done>(0));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, OtherJobsNoticeNothing) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1), other(cluster, "other", 2, 2);
  other.attach_all();
  job.hang_up(0);
  cluster.settle();
  EXPECT_TRUE(job.take<shm::SessionFailed>(1));
  cluster.wait(10'000);
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_FALSE(other.take<shm::SessionFailed>(rank));
  }
  other.detach_all();
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, RanksThatDetachOneAfterTheOtherGetNoError) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 2);
  for (const std::uint32_t rank : {2u, 0u, 3u, 1u}) {
    EXPECT_FALSE(job.take<shm::SessionFailed>(rank));
    job.detach(rank);
    cluster.wait(300);
  }
  cluster.expect_nothing_left();
  EXPECT_TRUE(cluster.node(0).plane->snapshot().recent_failures.empty());
  EXPECT_TRUE(cluster.node(1).plane->snapshot().recent_failures.empty());
}

TEST(JobEnd, RanksMayStayAfterOneHasDetached) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 2);
  std::map<std::uint32_t, shm::Segment> segments;
  for (const std::uint32_t rank : {0u, 2u, 3u})
    segments.emplace(rank, job.node_of(rank).segment(job.client(rank)));
  const auto set_launches = [&](std::uint32_t rank, std::uint64_t value) {
    shm::store_relaxed(&segments.at(rank).header().launches, value);
  };
  set_launches(2, 6);  // none under way
  set_launches(0, 7);  // one that needs nobody, and ends
  job.detach(1);
  cluster.wait(100);
  cluster.wait(9'000);
  set_launches(0, 9);  // the next one
  cluster.wait(9'000);
  set_launches(0, 10);
  cluster.wait(60'000);
  for (const std::uint32_t rank : {0u, 2u, 3u}) {
    EXPECT_FALSE(job.take<shm::SessionFailed>(rank)) << rank;
    job.detach(rank);
  }
  cluster.expect_nothing_left();
  EXPECT_TRUE(cluster.node(0).plane->snapshot().recent_failures.empty());
}

TEST(JobEnd, ALaunchThatGoesOnAfterOneHasDetachedFailsAll) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 2);
  // All ranks of a job launch together; the leaver's node is the one that knows.
  const shm::Segment segment = job.node_of(0).segment(job.client(0));
  shm::store_relaxed(&segment.header().launches, std::uint64_t{1});
  job.detach(1);
  cluster.wait(100);
  cluster.wait(9'800);
  for (const std::uint32_t rank : {0u, 2u, 3u}) EXPECT_FALSE(job.take<shm::SessionFailed>(rank));
  cluster.wait(200);
  cluster.settle();
  for (const std::uint32_t rank : {0u, 2u, 3u}) {
    const auto failed = job.take<shm::SessionFailed>(rank);
    ASSERT_TRUE(failed) << rank;
    EXPECT_EQ(failed->code, ErrorCode::kPeerLost);
    EXPECT_THAT(failed->message, AllOf(HasSubstr("lost rank 1 on"), HasSubstr("detached")));
    // Its own detach is no error for that.
    job.send(rank, shm::Detach{});
    EXPECT_TRUE(job.take<shm::Done>(rank));
    EXPECT_TRUE(job.node_of(rank).closed(job.client(rank)));
  }
  cluster.settle();
  cluster.expect_nothing_left();
}

TEST(JobEnd, AnExchangeThatADetachedRankCannotJoinFailsAtOnce) {
  // The one that waits is on the leaver's node, on the other; has begun before, begins after.
  for (const std::uint32_t waits : {0u, 2u}) {
    for (const bool before : {true, false}) {
      SCOPED_TRACE(fmt::format("rank {}, {}", waits, before));
      TestCluster cluster(2);
      JobRun job = attached_job(cluster, 2, 2);
      const auto exchange = [&] {
        job.send(waits, shm::Exchange{"checkpoint", bytes_of("blob"), 60'000});
        cluster.settle();
      };
      if (before) exchange();
      job.detach(1);
      if (!before) exchange();
      const auto reply = job.take<shm::ErrorReply>(waits);
      ASSERT_TRUE(reply);
      EXPECT_EQ(reply->code, ErrorCode::kPeerLost);
      EXPECT_THAT(reply->message, AllOf(HasSubstr("lost rank 1 on"), HasSubstr("'checkpoint'")));
      job.hang_up_all();
      cluster.expect_nothing_left();
    }
  }
}

TEST(JobEnd, AnExchangeThatIsCompleteWithTheLeaversBlobIsAnswered) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  job.send(0, shm::Exchange{"last", bytes_of("blob"), 60'000});
  job.send(0, shm::Detach{});  // gives up waiting, but has put
  cluster.settle();
  job.send(1, shm::Exchange{"last", bytes_of("blob"), 60'000});
  cluster.settle();
  EXPECT_TRUE(job.take<shm::ExchangeReply>(1));
  job.detach(1);
  cluster.expect_nothing_left();
}

TEST(JobEnd, AllRanksOfANodeDetach) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  const shm::Segment segment = job.node_of(1).segment(job.client(1));
  shm::store_relaxed(&segment.header().launches, std::uint64_t{1});
  job.detach(0);
  // What the other still writes has somewhere to go until it is gone, too.
  EXPECT_EQ(cluster.node(0).nic->local_regions, 1);
  cluster.wait(100);
  cluster.wait(10'000);
  const auto failed = job.take<shm::SessionFailed>(1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("node 0"));
  cluster.settle();
  EXPECT_EQ(cluster.node(0).nic->local_regions, 0);
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, DetachBeforeTheJobIsUpFailsTheOthersAtOnce) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 2);
  for (const std::uint32_t rank : {0u, 1u, 2u}) job.attach(rank);
  cluster.settle();
  job.detach(0);
  const auto failed = job.take<shm::SessionFailed>(1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("detached before"));
  // Node 1 had not said anything yet: it waits for any rank.
  EXPECT_FALSE(job.take<shm::SessionFailed>(2));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, WhatWasCommittedBeforeADetachIsStillSent) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  auto from = job.node_of(0).segment(job.client(0));
  auto to = job.node_of(1).segment(job.client(1));
  shm::RingProducer producer{.ring = from.ring(0)};
  ASSERT_TRUE(producer.try_push(
      {.opcode = shm::Opcode::kWriteFlag, .peer = 1, .flag_index = 5, .epoch = 3}));
  job.send(0, shm::Detach{});
  EXPECT_FALSE(job.take<shm::Done>(0));
  cluster.settle();
  cluster.wait(100);
  EXPECT_EQ(to.flags()[5], 3u);
  EXPECT_TRUE(job.take<shm::Done>(0));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, ARingThatNeverEmptiesKeepsNobody) {
  TestCluster cluster(1);
  JobRun job(cluster, "job", 1, 1);
  job.attach_all();
  auto segment = job.node_of(0).segment(job.client(0));
  segment.ring(0).control->produced = 77;  // a lie
  job.send(0, shm::Detach{});
  cluster.settle();
  EXPECT_FALSE(job.take<shm::Done>(0));
  cluster.wait(4'000);
  EXPECT_TRUE(job.take<shm::Done>(0));
  cluster.expect_nothing_left();
}

TEST(JobEnd, WhatIsSentToThoseWhoLeftGoesNowhere) {
  // Their memory may be gone: on most networks a write to it would take the link down, and with it
  // every other job that uses the link.
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  Write write(cluster, job);
  job.send(1, shm::Detach{});
  cluster.settle();
  const int writes = cluster.node(0).nic->writes;
  ASSERT_TRUE(write.producer.try_push(write.command));
  ASSERT_TRUE(write.producer.try_push({.opcode = shm::Opcode::kWriteFlag, .peer = 1, .epoch = 1}));
  cluster.settle();
  EXPECT_EQ(write.producer.completed(), 2u);
  EXPECT_EQ(cluster.node(0).nic->writes, writes);
  EXPECT_FALSE(job.take<shm::SessionFailed>(0));
  job.detach(0);
  cluster.expect_nothing_left();
}

TEST(JobEnd, MemoryStaysUntilNothingIsInFlight) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  Write write(cluster, job);
  cluster.node(0).nic->hold_completions = true;
  ASSERT_TRUE(write.producer.try_push(write.command));
  cluster.settle();
  job.hang_up(0);
  cluster.settle();
  EXPECT_TRUE(job.take<shm::SessionFailed>(1));
  // Neither end may go while the write is out: the source is read, the target written.
  EXPECT_EQ(cluster.node(0).nic->local_regions, 2);
  EXPECT_EQ(cluster.node(1).nic->local_regions, 2);
  EXPECT_EQ(cluster.node(0).plane->counts().slots_used, 1u);
  cluster.node(0).nic->hold_completions = false;
  cluster.settle();
  EXPECT_EQ(cluster.node(0).nic->local_regions, 0);
  EXPECT_EQ(cluster.node(1).nic->local_regions, 0);
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, MemoryGoesInTheEndEvenIfAPeerNeverAnswers) {
  TestNode node({}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  node.reachable = {1};
  PeerHello hello = node.plane->hello();
  hello.node = 1;
  ASSERT_TRUE(node.plane->on_peer_message(1, hello));
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  const std::uint64_t own = std::get<JobOffer>(node.sent.back().second).part_id;
  ASSERT_TRUE(node.play(1, part_of("job", 11, 2, 1, 1)));
  ASSERT_TRUE(node.plane->on_peer_message(1, JobReady{"job", 11, own}));
  ASSERT_TRUE(node.take<shm::JobUp>(client));
  node.hang_up(client);
  node.step();
  EXPECT_EQ(node.nic->local_regions, 1);
  node.wait(9'900);
  EXPECT_EQ(node.nic->local_regions, 1);
  node.wait(200);
  node.expect_nothing_left();
}

TEST(JobEnd, ALinkInErrorFailsTheJobsThatUseItAndComesBack) {
  TestCluster cluster(3, {.rails = 2});
  JobRun job = attached_job(cluster, 2, 2), third(cluster, "third", 3, 1);
  third.attach_all();
  ASSERT_TRUE(job.all_up());
  ASSERT_TRUE(third.all_up());
  // Rail 1 of node 0: only `job` has a rank there.
  ASSERT_EQ(cluster.node(0).nic->connected.size(), 3u);
  cluster.node(0).plane->on_proxy_event(1, LinkDown{1, ErrorCode::kLinkDown});
  cluster.settle();
  for (const std::uint32_t rank : {0u, 1u}) {
    const auto failed = job.take<shm::SessionFailed>(rank);
    ASSERT_TRUE(failed);
    EXPECT_EQ(failed->code, ErrorCode::kLinkDown);
    EXPECT_THAT(failed->message, HasSubstr("link of rail 1 to node 1"));
  }
  EXPECT_EQ(job.take<shm::SessionFailed>(2)->code, ErrorCode::kPeerLost);
  EXPECT_FALSE(third.take<shm::SessionFailed>(0));
  job.hang_up_all();
  // The next job connects it anew, with a pause.
  JobRun again(cluster, "job", 2, 2);
  again.attach_all();
  EXPECT_FALSE(again.all_up());
  cluster.wait(200);
  EXPECT_TRUE(again.all_up());
  EXPECT_EQ(cluster.node(0).nic->links, 3);
  again.detach_all();
  third.detach_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, LinksComeBackWithTheDaemonAtTheOtherEndAndByThemselves) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  ASSERT_TRUE(job.all_up());
  const auto states = [&] {
    return cluster.node(0).plane->snapshot().links.front().state + " " +
           cluster.node(1).plane->snapshot().links.front().state;
  };
  cluster.disconnect(0, 1);
  job.hang_up_all();
  cluster.wait(1'000);
  EXPECT_EQ(states(), "error error");  // nobody to connect to
  cluster.connect(0, 1);
  cluster.settle();
  cluster.wait(200);
  EXPECT_EQ(states(), "up up");
  // The network alone, the daemons stay: a while later, and with growing pauses.
  cluster.node(0).nic->refuse_connect = true;
  cluster.node(0).nic->break_links = {cluster.node(0).nic->connected.back()};
  cluster.node(0).nic->connects = 0;
  cluster.settle();
  cluster.wait(60'000);
  EXPECT_EQ(states(), "error up");
  EXPECT_GE(cluster.node(0).nic->connects, 4);
  EXPECT_LE(cluster.node(0).nic->connects, 10);
  cluster.node(0).nic->refuse_connect = false;
  cluster.wait(31'000);
  EXPECT_EQ(states(), "up up");
  cluster.expect_nothing_left();
}

TEST(JobEnd, ALinkTheNetworkBreaks) {
  TestCluster cluster(2);
  JobRun job = attached_job(cluster, 2, 1);
  ASSERT_TRUE(job.all_up());
  cluster.node(0).nic->break_links = {cluster.node(0).nic->connected.back()};
  cluster.settle();
  const auto failed = job.take<shm::SessionFailed>(0);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kLinkDown);
  EXPECT_THAT(failed->message, HasSubstr("rank 1 is on node 1"));
  const auto other = job.take<shm::SessionFailed>(1);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->code, ErrorCode::kPeerLost);
  EXPECT_EQ(cluster.node(0).plane->snapshot().links.front().state, "error");
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, ARankMayComeBackBeforeTheOldJobIsAway) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun old_run(cluster, "job", 2, 2);
  old_run.attach_all();
  ASSERT_TRUE(old_run.all_up());
  old_run.hang_up(0);
  cluster.settle();
  // The launcher starts all ranks anew while processes of the old run still linger.
  JobRun new_run(cluster, "job", 2, 2);
  new_run.attach_all();
  EXPECT_TRUE(new_run.all_up());
  old_run.hang_up_all();
  cluster.wait(3'000);
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_FALSE(new_run.take<shm::SessionFailed>(rank));
  }
  new_run.detach_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, ANewRunMayBeginWhileTheOldOneDetaches) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun old_run(cluster, "job", 2, 1), new_run(cluster, "job", 2, 1);
  old_run.attach_all();
  old_run.send(0, shm::Detach{});
  cluster.settle();
  new_run.attach(0);
  cluster.settle();
  old_run.send(1, shm::Detach{});
  cluster.settle();
  new_run.attach(1);
  cluster.settle();
  EXPECT_TRUE(new_run.all_up());
  EXPECT_FALSE(old_run.take<shm::SessionFailed>(1));
  new_run.detach_all();
  cluster.expect_nothing_left();
}

TEST(JobEnd, FailAllTellsEverybody) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun up(cluster, "up", 2, 1), waiting(cluster, "waiting", 2, 1);
  up.attach_all();
  waiting.attach(0);
  cluster.node(0).plane->fail_all(ErrorCode::kDraining, "the daemon is shutting down");
  for (JobRun* job : {&up, &waiting}) {
    const auto failed = job->take<shm::SessionFailed>(0);
    ASSERT_TRUE(failed);
    EXPECT_EQ(failed->code, ErrorCode::kDraining);
    EXPECT_THAT(failed->message, HasSubstr("shutting down"));
  }
  cluster.settle();
  EXPECT_TRUE(cluster.node(0).plane->idle());
  const auto other = up.take<shm::SessionFailed>(1);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->code, ErrorCode::kPeerLost);
  EXPECT_THAT(other->message, AllOf(HasSubstr("node 0"), HasSubstr("shutting down")));
  up.hang_up_all();
  waiting.hang_up_all();
  cluster.expect_nothing_left();
}

}  // namespace
}  // namespace mk::daemon::test
