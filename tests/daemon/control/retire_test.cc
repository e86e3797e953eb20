// Parts of operators come back: buffers, handles and flags, when no rank can name them any more.
#include <gmock/gmock.h>

#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

/// One rank's part of an operator, as a client has it.
struct Part {
  std::uint16_t handle = 0;
  std::uint32_t flag_base = 0;
};

/// A job whose every rank has a part.
struct JobOfParts {
  JobOfParts(std::uint32_t nodes, std::uint32_t local_size)
      : job(cluster, "job", nodes, local_size) {
    cluster.connect_all();
    job.attach_all();
    EXPECT_TRUE(job.all_up());
    for (std::uint32_t rank = 0; rank < job.world(); ++rank) {
      segments.push_back(job.node_of(rank).segment(job.client(rank)));
      producers.emplace_back();
      producers.back().ring = segments.back().ring(0);
      parts.push_back(make_part(rank));
    }
    cluster.settle();
  }
  Part make_part(std::uint32_t rank) {
    Part part;
    part.handle = job.node_of(rank).register_buffer(job.client(rank));
    job.send(rank, shm::AllocFlags{64});
    const auto flags = job.take<shm::AllocFlagsReply>(rank);
    EXPECT_TRUE(flags);
    part.flag_base = flags ? flags->base : 0;
    return part;
  }
  /// From the rank's part to its peer's, and a flag of it.
  void commit(std::uint32_t rank, std::uint32_t peer, std::uint32_t epoch) {
    const shm::Command command{.opcode = shm::Opcode::kWrite,
                               .peer = static_cast<std::uint16_t>(peer),
                               .src_handle = parts[rank].handle,
                               .dst_handle = parts[peer].handle,
                               .bytes = 8,
                               .flag_index = parts[peer].flag_base,
                               .epoch = epoch};
    ASSERT_TRUE(producers[rank].try_push(command));
  }
  std::uint32_t flag(std::uint32_t rank) const {
    return segments[rank].flags()[parts[rank].flag_base];
  }
  void retire(std::uint32_t rank, const std::vector<std::uint32_t>& others) {
    shm::Retire request{parts[rank].handle, parts[rank].flag_base, {}};
    for (const std::uint32_t other : others) request.peers.push_back({other, parts[other].handle});
    job.send(rank, request);
  }
  void expect_well() {
    for (std::uint32_t rank = 0; rank < job.world(); ++rank)
      EXPECT_FALSE(job.take<shm::SessionFailed>(rank)) << rank;
  }
  int regions(std::uint32_t node) { return cluster.node(node).nic->local_regions; }

  TestCluster cluster{2};
  JobRun job;
  std::vector<shm::Segment> segments;
  std::vector<shm::RingProducer> producers;
  std::vector<Part> parts;
};

// The proxy has not looked at the ring when the buffer goes.
TEST(Retiring, WhatWasCommittedBeforeIsSent) {
  for (const bool deregister : {true, false}) {
    SCOPED_TRACE(deregister ? "deregister" : "retire");
    JobOfParts run(2, 1);
    run.commit(0, 1, 7);
    if (deregister) {
      run.job.send(0, shm::DeregisterBuffer{run.parts[0].handle});
    } else {
      run.retire(0, {});
    }
    run.cluster.settle();
    EXPECT_EQ(run.flag(1), 7u);
    EXPECT_TRUE(run.job.take<shm::Done>(0));
    run.expect_well();
    run.job.detach_all();
    run.cluster.expect_nothing_left();
  }
}

// A rank may have created an operator and given it up again before its neighbour has mapped it.
TEST(Retiring, ALocalRankThatHasNotRetiredMayStillMapTheBuffer) {
  JobOfParts run(1, 3);
  run.retire(0, {1});
  run.cluster.settle();
  run.job.send(1, shm::OpenPeerBuffer{0, run.parts[0].handle});
  EXPECT_TRUE(run.job.take<shm::OpenPeerBufferReply>(1));
  // Whom the owner does not know as a holder, and who has retired, may not.
  run.job.send(2, shm::OpenPeerBuffer{0, run.parts[0].handle});
  EXPECT_FALSE(run.job.take<shm::OpenPeerBufferReply>(2));
  run.retire(1, {0});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(0));
  run.job.send(1, shm::OpenPeerBuffer{0, run.parts[0].handle});
  EXPECT_FALSE(run.job.take<shm::OpenPeerBufferReply>(1));
  run.expect_well();
}

// The other rank is still amid its launch: what it sends arrives, and its launch does not fail.
TEST(Retiring, APeersLaterWritesArriveAndTheBufferStaysUntilThePeerHasRetired) {
  JobOfParts run(2, 1);
  run.retire(0, {1});
  run.cluster.settle();
  EXPECT_FALSE(run.job.take<shm::Done>(0));
  EXPECT_EQ(run.regions(0), 2) << "flags and the buffer";
  run.commit(1, 0, 3);
  run.cluster.settle();
  EXPECT_EQ(run.flag(0), 3u);
  run.expect_well();
  run.commit(1, 0, 4);  // not taken yet when it retires
  run.retire(1, {0});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(0));
  EXPECT_TRUE(run.job.take<shm::Done>(1));
  EXPECT_EQ(run.regions(0), 1);
  EXPECT_EQ(run.regions(1), 1);
  EXPECT_EQ(run.cluster.node(0).nic->remote_regions, 1);
  run.expect_well();
  run.job.detach_all();
  run.cluster.expect_nothing_left();
}

TEST(Retiring, FlagsComeBackAsZeroAndNotBefore) {
  JobOfParts run(2, 1);  // 256 flags, of which each rank has 64
  run.commit(1, 0, 9);
  run.cluster.settle();
  EXPECT_EQ(run.flag(0), 9u);
  run.retire(0, {1});
  run.cluster.settle();
  // 192 are free; the other 64 may still be written.
  run.job.send(0, shm::AllocFlags{192});
  EXPECT_TRUE(run.job.take<shm::AllocFlagsReply>(0));
  run.job.send(0, shm::AllocFlags{1});
  const auto full = run.job.take<shm::ErrorReply>(0);
  ASSERT_TRUE(full);
  EXPECT_EQ(full->code, ErrorCode::kLimitExceeded);
  EXPECT_THAT(full->message, HasSubstr("destroy operators"));
  EXPECT_EQ(run.flag(0), 9u);
  run.retire(1, {0});
  run.cluster.settle();
  EXPECT_EQ(run.flag(0), 0u);
  run.job.send(0, shm::AllocFlags{64});
  const auto again = run.job.take<shm::AllocFlagsReply>(0);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->base, run.parts[0].flag_base);
}

// Completions are late: the flag may be on its way.
TEST(Retiring, FlagsDoNotComeBackWhileAWriteToThemIsInFlight) {
  JobOfParts run(2, 1);
  run.cluster.node(1).nic->hold_completions = true;
  run.commit(1, 0, 5);
  run.cluster.settle();
  run.retire(0, {1});
  run.retire(1, {0});
  run.cluster.settle();
  EXPECT_FALSE(run.job.take<shm::Done>(0));
  EXPECT_FALSE(run.job.take<shm::Done>(1));
  run.cluster.node(1).nic->hold_completions = false;
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(0));
  EXPECT_TRUE(run.job.take<shm::Done>(1));
}

TEST(Retiring, ALocalRankIsWaitedForToo) {
  JobOfParts run(1, 2);
  run.retire(0, {1});
  run.cluster.settle();
  EXPECT_FALSE(run.job.take<shm::Done>(0));
  run.retire(1, {0});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(0));
  EXPECT_TRUE(run.job.take<shm::Done>(1));
  EXPECT_EQ(run.regions(0), 2) << "two ranks' flags";
  // Whom nobody has told of its part waits for nobody.
  run.parts[0] = run.make_part(0);
  run.retire(0, {});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(0));
}

TEST(Retiring, WhoDetachesWithoutRetiringIsNotWaitedFor) {
  for (const std::uint32_t nodes : {1u, 2u}) {
    SCOPED_TRACE(nodes);
    JobOfParts run(nodes, 3 - nodes);
    run.retire(0, {1});
    run.cluster.settle();
    EXPECT_FALSE(run.job.take<shm::Done>(0));
    run.job.send(1, shm::Detach{});
    run.cluster.settle();
    EXPECT_TRUE(run.job.take<shm::Done>(0));
    run.expect_well();
    run.job.send(0, shm::Detach{});
    run.cluster.settle();
    run.cluster.expect_nothing_left();
  }
}

TEST(Retiring, WhoDetachesAmidItsPeersLaunchLeavesNothingBehind) {
  JobOfParts run(2, 1);
  run.commit(0, 1, 1);
  run.retire(0, {1});
  run.job.send(0, shm::Detach{});
  run.cluster.settle();
  run.cluster.wait(100);
  EXPECT_EQ(run.flag(1), 1u) << "what it had committed was sent";
  run.commit(1, 0, 1);
  run.retire(1, {0});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(1));
  EXPECT_FALSE(run.job.take<shm::SessionFailed>(1));
  run.job.send(1, shm::Detach{});
  run.cluster.settle();
  run.cluster.wait(100);
  run.cluster.expect_nothing_left();
}

// Its client says nothing of what it will not name, so what it has committed is the last.
TEST(RetiringFromOld, AClientOfAnOlderVersionIsNotWaitedFor) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun job(cluster, "job", 2, 1);
  job.attach(0);
  const ClientId old = cluster.node(1).connect();
  cluster.node(1).send(old, shm::Hello{shm::kAbiMajor, shm::kRetireAbiMinor - 1, "old"});
  cluster.node(1).send(old, rank_of("job", 2, 1, 1));
  cluster.settle();
  ASSERT_TRUE(cluster.node(1).take<shm::JobUp>(old));
  const std::uint16_t handle = cluster.node(0).register_buffer(job.client(0));
  cluster.settle();
  job.send(0, shm::Retire{handle, shm::kNoFlags, {{1, 1}}});
  cluster.settle();
  EXPECT_TRUE(job.take<shm::Done>(0));
}

TEST(Retiring, WhatMakesNoSenseIsRefusedAndChangesNothing) {
  JobOfParts run(2, 1);
  const auto refused = [&](const shm::Retire& request) {
    run.job.send(0, request);
    const auto error = run.job.take<shm::ErrorReply>(0);
    return error && error->code == ErrorCode::kNotFound;
  };
  EXPECT_TRUE(refused({0, shm::kNoFlags, {}}));
  EXPECT_TRUE(refused({99, shm::kNoFlags, {}}));
  for (const std::uint32_t base : {1u, 64u, 65536u, 0xfffffffeu}) {
    EXPECT_TRUE(refused({run.parts[0].handle, base, {}})) << base;
  }
  // Ranks and handles that are not there, and its own, are of no consequence.
  run.job.send(0, shm::Retire{run.parts[0].handle,
                              run.parts[0].flag_base,
                              {{0, run.parts[0].handle}, {7, 1}, {0xffffffff, 2}, {1, 999}}});
  EXPECT_TRUE(refused({run.parts[0].handle, run.parts[0].flag_base, {}})) << "twice";
  run.retire(1, {0});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(0));
  EXPECT_FALSE(run.job.take<shm::Done>(1)) << "rank 0 may still name it";
  run.job.send(0, shm::Detach{});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(1));
  run.expect_well();
}

// What counts is what the ring holds.
TEST(Retiring, AClientThatLiesAboutItsRingsHoldsUpNobody) {
  JobOfParts run(2, 1);
  run.cluster.node(1).nic->hold_completions = true;
  run.commit(1, 0, 1);
  run.segments[1].ring(0).control->produced = 0;
  run.retire(1, {});
  run.cluster.settle();
  EXPECT_FALSE(run.job.take<shm::Done>(1)) << "the network still has it";
  run.cluster.node(1).nic->hold_completions = false;
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(1));
  run.segments[0].ring(0).control->produced = 1'000'000;
  run.retire(0, {});
  run.cluster.settle();
  EXPECT_TRUE(run.job.take<shm::Done>(0));
  run.expect_well();
}

// Nothing of one part may be mistaken for the next one's, however often they come and go.
TEST(Retiring, ThousandsOfPartsLeaveNothingBehind) {
  JobOfParts run(2, 1);
  const int local = run.regions(0);
  const int remote = run.cluster.node(0).nic->remote_regions;
  for (std::uint32_t round = 1; round <= 3000; ++round) {
    for (const std::uint32_t rank : {0u, 1u}) ASSERT_EQ(run.flag(rank), 0u) << round;
    run.commit(0, 1, round % 5 + 1);
    run.commit(1, 0, round % 5 + 1);
    if (round % 2 == 0) run.cluster.settle();
    run.retire(round % 2, {1 - round % 2});
    if (round % 3 == 0) run.cluster.settle();
    run.retire(1 - round % 2, {round % 2});
    run.cluster.settle();
    for (const std::uint32_t rank : {0u, 1u}) {
      ASSERT_TRUE(run.job.take<shm::Done>(rank)) << round;
      run.parts[rank] = run.make_part(rank);
    }
    run.cluster.settle();
    ASSERT_EQ(run.regions(0), local);
    ASSERT_EQ(run.cluster.node(0).nic->remote_regions, remote);
  }
  run.expect_well();
}

// Where the daemon raises the flags: a write may arrive after its sender says that it is completed.
TEST(RetiringUnordered, FlagsAreUsedAgainOnlyOnceAllThatWasSentToThemIsHere) {
  for (const bool left : {false, true}) {
    SCOPED_TRACE(left ? "one rank has left" : "all are here");
    TestNode node({.nodes = 3, .contract = fabric::DeliveryContract::kUnordered},
                  std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
    node.reachable = {1, 2};
    const auto say = [&](NodeId from, const PeerMessage& message) {
      const Status status = node.plane->on_peer_message(from, message);
      EXPECT_TRUE(status) << status.error().message;
      EXPECT_TRUE(node.answer());
    };
    const ClientId client = node.attach(rank_of("job", 3, 1, 0));
    const auto attached = node.take<shm::AttachReply>(client);
    ASSERT_TRUE(attached);
    for (const NodeId from : {1u, 2u}) {
      PeerHello hello = node.plane->hello();
      hello.node = from;
      hello.generation = from;
      say(from, hello);
      ASSERT_TRUE(node.play(from, part_of("job", from, 3, 1, from)));
    }
    std::uint64_t own_part = 0;
    for (const auto& [to, message] : node.sent) {
      if (const auto* offer = std::get_if<JobOffer>(&message)) own_part = offer->part_id;
    }
    for (const NodeId from : {1u, 2u}) say(from, JobReady{"job", from, own_part});
    ASSERT_TRUE(node.take<shm::JobUp>(client));
    const std::uint16_t handle = node.register_buffer(client);
    node.send(client, shm::AllocFlags{64});
    const auto flags = node.take<shm::AllocFlagsReply>(client);
    ASSERT_TRUE(flags);
    const auto arrives = [&] {
      node.nic->arrivals.push_back(shm::make_immediate(attached->session_slot, flags->base, 9));
      node.step();
    };
    arrives();  // of rank 2
    if (left) say(2, JobLeft{"job", 2, 2, ErrorCode::kOk, ""});
    node.send(client, shm::Retire{handle, flags->base, {}});
    node.step();
    for (const NodeId from : {1u, 2u}) {
      if (left && from == 2) continue;
      say(from, RegionWithdraw{.job = "job",
                               .part_id = own_part,
                               .rank = 0,
                               .handle = handle,
                               .flag_base = flags->base,
                               .flag_count = 64,
                               .arrivals = 1});
    }
    node.step();
    node.send(client, shm::AllocFlags{192});
    EXPECT_TRUE(node.take<shm::AllocFlagsReply>(client));
    node.send(client, shm::AllocFlags{64});
    EXPECT_FALSE(node.take<shm::AllocFlagsReply>(client)) << "what rank 1 has sent is not here yet";
    arrives();
    node.send(client, shm::AllocFlags{64});
    const auto again = node.take<shm::AllocFlagsReply>(client);
    EXPECT_EQ(again.has_value(), !left);
    if (again) {
      EXPECT_EQ(again->base, flags->base);
    }
    EXPECT_TRUE(node.take<shm::Done>(client));
  }
}

}  // namespace
}  // namespace mk::daemon::test
