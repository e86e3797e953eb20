// A conversation cut after every message, at either end and between the daemons: nothing is left.
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

TEST(Teardown, ItsEndIsToldOverAStreamThatCameBackUnseen) {
  // A busy control thread hears late that a peer's daemon was started again: what it sends takes
  // the new stream already, and that daemon must not keep the part of a job that ends before the
  // rest of the news has come.
  TestNode node{{}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1)};
  node.reachable = {1};
  PeerHello hello = node.plane->hello();
  hello.node = 1;
  ASSERT_TRUE(node.plane->on_peer_message(1, hello));
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  ASSERT_FALSE(node.sent.empty());
  const auto* announced = std::get_if<JobOffer>(&node.sent.back().second);
  ASSERT_NE(announced, nullptr);
  const std::uint64_t part = announced->part_id;
  node.plane->on_peer_down(1, "connection reset");
  node.sent.clear();
  node.hang_up(client);
  node.step();
  ASSERT_FALSE(node.sent.empty());
  for (const auto& [to, message] : node.sent) {
    EXPECT_EQ(to, 1u);
    const auto* left = std::get_if<JobLeft>(&message);
    ASSERT_NE(left, nullptr);
    EXPECT_EQ(left->part_id, part);
  }
  node.expect_nothing_left();
}

TEST(Teardown, WhatAnEarlierRunPutIntoAnExchangeGoesWithItsPart) {
  // The other node's job is up with our part of a run that has ended here, and its ranks exchange.
  // Our next run has taken that part, and hears late that it was not meant.
  TestNode node{{}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1)};
  node.reachable = {1};
  const auto say = [&](PeerMessage message) {
    const auto* part = std::get_if<JobPart>(&message);
    const Status status =
        part != nullptr ? node.play(1, *part) : node.plane->on_peer_message(1, std::move(message));
    EXPECT_TRUE(status) << status.error().message;
    EXPECT_TRUE(node.answer());
  };
  PeerHello hello = node.plane->hello();
  hello.node = 1;
  say(hello);
  say(part_of("job", 11, 2, 1, 1));
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  std::uint64_t own = 0;
  for (const auto& [to, message] : node.sent) {
    if (const auto* part = std::get_if<JobOffer>(&message)) own = part->part_id;
  }
  node.send(client, shm::Exchange{"t", bytes_of("a"), 1'000});
  say(ExchangePart{"job", 11, 1, 0, "t", bytes_of("of an earlier run")});
  EXPECT_FALSE(node.plane->on_peer_message(1, ExchangePart{"job", 11, 1, 2, "t", {}}));
  EXPECT_FALSE(node.take<shm::ExchangeReply>(client));
  say(JobLeft{"job", 11, 1, ErrorCode::kPeerLost, "its run is over", own + 1});
  say(part_of("job", 12, 2, 1, 1));
  // One that is up before us may be ahead.
  say(ExchangePart{"job", 12, 1, 0, "t", bytes_of("b")});
  EXPECT_FALSE(node.take<shm::ExchangeReply>(client));
  say(JobReady{"job", 12, own});
  EXPECT_TRUE(node.take<shm::JobUp>(client));
  const auto reply = node.take<shm::ExchangeReply>(client);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->blobs, (std::vector{bytes_of("a"), bytes_of("b")}));
}

// An immediate names a slot, not a session. One of a lost node may still arrive.
TEST(Teardown, ASlotThatALostNodeMayWriteToRests) {
  const auto job = [](TestNode& node, std::uint64_t part_id, bool lost) {
    PeerHello hello = node.plane->hello();
    hello.node = 1;
    if (lost || part_id == 1) {
      EXPECT_TRUE(node.plane->on_peer_message(1, hello));
    }
    const ClientId client = node.attach(rank_of("job", 2, 1, 0));
    const auto attached = node.take<shm::AttachReply>(client);
    if (!attached) return shm::kSessionsMax;
    EXPECT_TRUE(node.play(1, part_of("job", part_id, 2, 1, 1)));
    std::uint64_t own = 0;
    for (const auto& [to, message] : node.sent) {
      if (const auto* offer = std::get_if<JobOffer>(&message)) own = offer->part_id;
    }
    EXPECT_TRUE(node.plane->on_peer_message(1, JobReady{"job", part_id, own}));
    EXPECT_TRUE(node.take<shm::JobUp>(client));
    if (lost) {
      node.plane->on_peer_down(1, "the wire was cut");
    } else {
      EXPECT_TRUE(node.plane->on_peer_message(1, JobLeft{"job", part_id, 1, ErrorCode::kOk, ""}));
    }
    node.hang_up(client);
    node.step();
    node.expect_nothing_left();
    return attached->session_slot;
  };
  for (const auto contract :
       {fabric::DeliveryContract::kUnordered, fabric::DeliveryContract::kOrdered}) {
    for (const bool lost : {true, false}) {
      SCOPED_TRACE(fmt::format("{} {}", static_cast<int>(contract), lost));
      TestNode node{{.contract = contract, .sessions_max = 1},
                    std::make_shared<FakeMemory>(),
                    std::make_shared<std::uint64_t>(1)};
      node.reachable = {1};
      std::uint64_t part = 0;
      for (std::uint32_t i = 0; i < shm::kSessionsMax; ++i) EXPECT_EQ(job(node, ++part, lost), i);
      if (!lost || contract == fabric::DeliveryContract::kOrdered) {
        EXPECT_EQ(job(node, ++part, lost), 0u);
        continue;
      }
      node.pass(44'900);
      const ClientId early = node.attach(rank_of("job", 2, 1, 0));
      const auto refused = node.take<shm::ErrorReply>(early);
      ASSERT_TRUE(refused);
      EXPECT_EQ(refused->code, ErrorCode::kLimitExceeded);
      EXPECT_THAT(refused->message, HasSubstr("rest, the first for 1 s more"));
      node.hang_up(early);
      node.pass(200);
      EXPECT_EQ(job(node, ++part, lost), 0u);
    }
  }
}

}  // namespace
}  // namespace mk::daemon::test
