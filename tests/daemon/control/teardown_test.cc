// The end of sessions and jobs: at every step of the conversation, by every cause.
#include <gmock/gmock.h>

#include <functional>

#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// A whole life of a job of 2 nodes with 2 ranks each, one message of one rank at a time.
class Conversation {
 public:
  explicit Conversation(TestCluster& cluster) : cluster_(cluster), clients_(4, 0) {
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { clients_[rank] = node(rank).connect(static_cast<int>(rank) + 100); });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { say(rank, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"}); });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { say(rank, rank_of("job", 2, 2, rank)); });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] {
        if (!gone(rank)) node(rank).register_buffer(clients_[rank]);
      });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { say(rank, shm::AllocFlags{64}); });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { say(rank, shm::Exchange{"t", bytes_of("blob"), 60'000}); });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { say(rank, shm::OpenPeerBuffer{rank % 2, 1}); });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { say(rank, shm::DeregisterBuffer{1}); });
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      add([this, rank] { say(rank, shm::Detach{}); });
    }
  }

  std::size_t size() const { return steps_.size(); }
  void run(std::size_t step) { steps_[step](); }
  TestNode& node(std::uint32_t rank) { return cluster_.node(rank / 2); }
  bool gone(std::uint32_t rank) { return clients_[rank] == 0 || node(rank).closed(clients_[rank]); }
  void hang_up(std::uint32_t rank) {
    if (!gone(rank)) node(rank).hang_up(clients_[rank]);
  }
  ClientId client(std::uint32_t rank) const { return clients_[rank]; }

 private:
  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }
  template <class Message>
  void say(std::uint32_t rank, const Message& message) {
    if (!gone(rank)) node(rank).send(clients_[rank], message);
  }

  TestCluster& cluster_;
  std::vector<ClientId> clients_;
  std::vector<std::function<void()>> steps_;
};

constexpr std::size_t kAttached = 12;  ///< steps after which all ranks are attached
constexpr std::size_t kDetaching = 32;

TEST(Teardown, AHangUpAfterEveryMessageLeavesNothing) {
  const std::size_t descriptors = open_descriptors();
  for (std::uint32_t victim = 0; victim < 4; ++victim) {
    for (std::size_t cut = 0;; ++cut) {
      // Settled before the cut, or with messages and events still on their way.
      bool whole = false;
      for (const bool settled : {true, false}) {
        SCOPED_TRACE(fmt::format("rank {} hangs up after step {}, {}", victim, cut,
                                 settled ? "settled" : "in a hurry"));
        TestCluster cluster(2, {}, cut + 1);
        cluster.connect_all();
        Conversation talk(cluster);
        whole = cut == talk.size();
        for (std::size_t step = 0; step < cut; ++step) {
          talk.run(step);
          if (settled) cluster.settle();
        }
        talk.hang_up(victim);
        cluster.settle();
        if (settled && cut >= kAttached && cut <= kDetaching) {
          for (std::uint32_t rank = 0; rank < 4; ++rank) {
            if (rank == victim) continue;
            const auto failed = talk.node(rank).take<shm::SessionFailed>(talk.client(rank));
            ASSERT_TRUE(failed) << rank;
            EXPECT_EQ(failed->code, ErrorCode::kPeerLost);
            EXPECT_THAT(failed->message, AllOf(HasSubstr(fmt::format("lost rank {} on", victim)),
                                               HasSubstr(fmt::format("pid {}", victim + 100)),
                                               HasSubstr("closed by peer")));
          }
        }
        // The others go on as if they had not noticed: nothing of that may stick.
        for (std::size_t step = cut; step < talk.size(); ++step) {
          talk.run(step);
          if (settled) cluster.settle();
        }
        cluster.settle();
        for (std::uint32_t rank = 0; rank < 4; ++rank) talk.hang_up(rank);
        cluster.settle();
        cluster.expect_nothing_left();
        EXPECT_THAT(cluster.broken, testing::IsEmpty());
      }
      if (whole) break;
    }
  }
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(Teardown, AStreamThatBreaksAfterEveryMessageLeavesNothing) {
  for (std::size_t cut = 0;; ++cut) {
    bool whole = false;
    for (const bool settled : {true, false}) {
      SCOPED_TRACE(fmt::format("after step {}, {}", cut, settled ? "settled" : "in a hurry"));
      TestCluster cluster(2, {}, cut + 1);
      cluster.connect_all();
      Conversation talk(cluster);
      whole = cut == talk.size();
      for (std::size_t step = 0; step < cut; ++step) {
        talk.run(step);
        if (settled) cluster.settle();
      }
      cluster.disconnect(0, 1);
      cluster.settle();
      if (settled && cut >= kAttached && cut <= kDetaching) {
        for (std::uint32_t rank = 0; rank < 4; ++rank) {
          const auto failed = talk.node(rank).take<shm::SessionFailed>(talk.client(rank));
          ASSERT_TRUE(failed) << rank;
          EXPECT_EQ(failed->code, ErrorCode::kPeerLost);
          EXPECT_THAT(failed->message, AllOf(HasSubstr(fmt::format("on node {}", 1 - rank / 2)),
                                             HasSubstr("the wire was cut")));
        }
      }
      for (std::size_t step = cut; step < talk.size(); ++step) talk.run(step);
      cluster.settle();
      for (std::uint32_t rank = 0; rank < 4; ++rank) talk.hang_up(rank);
      cluster.settle();
      cluster.expect_nothing_left();
      // And the daemons find together again.
      cluster.connect(0, 1);
      JobRun job(cluster, "job", 2, 2);
      job.attach_all();
      EXPECT_TRUE(job.all_up());
      job.detach_all();
      cluster.expect_nothing_left();
    }
    if (whole) break;
  }
}

TEST(Teardown, AHangUpBetweenAnyTwoDeliveriesLeavesNothing) {
  // All ranks speak at once; the cut falls after the n-th message between the daemons.
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    for (std::size_t delivered = 0; delivered < 40; ++delivered) {
      SCOPED_TRACE(fmt::format("seed {}, after {} messages", seed, delivered));
      TestCluster cluster(3, {}, seed);
      cluster.connect_all();
      JobRun job(cluster, "job", 3, 1);
      for (std::uint32_t rank = 0; rank < 3; ++rank) {
        job.attach(rank);
        job.node_of(rank).register_buffer(job.client(rank));
        job.send(rank, shm::Exchange{"t", {}, 60'000});
      }
      for (std::size_t i = 0; i < delivered && cluster.deliver_one(); ++i) {
      }
      const std::uint32_t victim = static_cast<std::uint32_t>(seed % 3);
      job.hang_up(victim);
      cluster.settle();
      cluster.wait(6'000);
      for (std::uint32_t rank = 0; rank < 3; ++rank) {
        if (rank == victim) continue;
        EXPECT_TRUE(job.take<shm::SessionFailed>(rank)) << rank;
      }
      job.hang_up_all();
      cluster.expect_nothing_left();
      EXPECT_THAT(cluster.broken, testing::IsEmpty());
      // The name is free for the next run.
      JobRun again(cluster, "job", 3, 1);
      again.attach_all();
      EXPECT_TRUE(again.all_up());
      again.detach_all();
      cluster.expect_nothing_left();
    }
  }
}

TEST(Teardown, TheFailureIsInTheSegmentsToo) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 2);
  job.attach_all();
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

TEST(Teardown, OtherJobsNoticeNothing) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 1), other(cluster, "other", 2, 2);
  job.attach_all();
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

TEST(Teardown, RanksThatDetachOneAfterTheOtherGetNoError) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 2);
  job.attach_all();
  for (const std::uint32_t rank : {2u, 0u, 3u, 1u}) {
    EXPECT_FALSE(job.take<shm::SessionFailed>(rank));
    job.send(rank, shm::Detach{});
    cluster.settle();
    EXPECT_TRUE(job.take<shm::Done>(rank));
    cluster.wait(300);
  }
  cluster.expect_nothing_left();
  EXPECT_TRUE(cluster.node(0).plane->snapshot().recent_failures.empty());
  EXPECT_TRUE(cluster.node(1).plane->snapshot().recent_failures.empty());
}

TEST(Teardown, RanksThatStayAfterOneHasDetachedHearOfIt) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 2);
  job.attach_all();
  job.send(1, shm::Detach{});
  cluster.settle();
  EXPECT_TRUE(job.take<shm::Done>(1));
  cluster.wait(1'900);
  for (const std::uint32_t rank : {0u, 2u, 3u}) EXPECT_FALSE(job.take<shm::SessionFailed>(rank));
  cluster.wait(200);
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

TEST(Teardown, AllRanksOfANodeDetach) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  job.send(0, shm::Detach{});
  cluster.settle();
  EXPECT_TRUE(job.take<shm::Done>(0));
  // What the other still writes has somewhere to go until it is gone, too.
  EXPECT_EQ(cluster.node(0).nic->local_regions, 1);
  cluster.wait(2'100);
  const auto failed = job.take<shm::SessionFailed>(1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("node 0"));
  cluster.settle();
  EXPECT_EQ(cluster.node(0).nic->local_regions, 0);
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(Teardown, DetachBeforeTheJobIsUpFailsTheOthersAtOnce) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 2);
  for (const std::uint32_t rank : {0u, 1u, 2u}) job.attach(rank);
  cluster.settle();
  job.send(0, shm::Detach{});
  cluster.settle();
  EXPECT_TRUE(job.take<shm::Done>(0));
  const auto failed = job.take<shm::SessionFailed>(1);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("detached before"));
  // Node 1 had not said anything yet: it waits for whoever comes.
  EXPECT_FALSE(job.take<shm::SessionFailed>(2));
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(Teardown, WhatWasCommittedBeforeADetachIsStillSent) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
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

TEST(Teardown, ARingThatNeverEmptiesKeepsNobody) {
  TestCluster cluster(1);
  JobRun job(cluster, "job", 1, 1);
  job.attach_all();
  auto segment = job.node_of(0).segment(job.client(0));
  segment.ring(0).control->produced = 77;  // a lie
  job.send(0, shm::Detach{});
  cluster.settle();
  EXPECT_FALSE(job.take<shm::Done>(0));
  cluster.wait(1'000);
  EXPECT_TRUE(job.take<shm::Done>(0));
  cluster.expect_nothing_left();
}

TEST(Teardown, MemoryStaysUntilNothingIsInFlight) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  const std::uint16_t source = job.node_of(0).register_buffer(job.client(0));
  const std::uint16_t target = job.node_of(1).register_buffer(job.client(1));
  cluster.settle();
  auto segment = job.node_of(0).segment(job.client(0));
  cluster.node(0).nic->hold_completions = true;
  shm::RingProducer producer{.ring = segment.ring(0)};
  ASSERT_TRUE(producer.try_push({.opcode = shm::Opcode::kWrite,
                                 .peer = 1,
                                 .src_handle = source,
                                 .dst_handle = target,
                                 .bytes = 8,
                                 .epoch = 1}));
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

TEST(Teardown, MemoryGoesInTheEndEvenIfAPeerNeverAnswers) {
  TestNode node({}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  node.reachable = {1};
  PeerHello hello = node.plane->hello();
  hello.node = 1;
  ASSERT_TRUE(node.plane->on_peer_message(1, hello));
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  ASSERT_TRUE(node.plane->on_peer_message(1, part_of("job", 11, 2, 1, 1)));
  ASSERT_TRUE(node.plane->on_peer_message(1, JobReady{"job", 11}));
  ASSERT_TRUE(node.take<shm::JobUp>(client));
  node.hang_up(client);
  node.step();
  EXPECT_EQ(node.nic->local_regions, 1);
  node.wait(9'900);
  EXPECT_EQ(node.nic->local_regions, 1);
  node.wait(200);
  node.expect_nothing_left();
}

TEST(Teardown, ALinkInErrorFailsTheJobsThatUseItAndComesBack) {
  TestCluster cluster(3, {.rails = 2});
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 2), third(cluster, "third", 3, 1);
  job.attach_all();
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

TEST(Teardown, ALinkTheNetworkBreaks) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 1);
  job.attach_all();
  ASSERT_TRUE(job.all_up());
  cluster.node(0).nic->break_links = {cluster.node(0).nic->connected.back()};
  cluster.settle();
  const auto failed = job.take<shm::SessionFailed>(0);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kLinkDown);
  const auto other = job.take<shm::SessionFailed>(1);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->code, ErrorCode::kPeerLost);
  EXPECT_EQ(cluster.node(0).plane->snapshot().links.front().state, "error");
  job.hang_up_all();
  cluster.expect_nothing_left();
}

TEST(Teardown, ARankMayComeBackBeforeTheOldJobIsAway) {
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

TEST(Teardown, ANewRunMayBeginWhileTheOldOneDetaches) {
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

TEST(Teardown, FailAllTellsEverybody) {
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
