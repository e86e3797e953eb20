// Who may attach: every rule, and what the refusal says.
#include <gmock/gmock.h>

#include "shm/atomic.h"
#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

class Attach : public testing::Test {
 protected:
  TestNode make_node(std::uint32_t nodes = 2, std::uint32_t sessions_max = 8) {
    return TestNode({.nodes = nodes, .sessions_max = sessions_max}, std::make_shared<FakeMemory>(),
                    std::make_shared<std::uint64_t>(1));
  }

  /// The error that the attach gets; the connection stays open for another try.
  shm::ErrorReply refusal(TestNode& node, const shm::Attach& attach, std::int32_t pid = 55,
                          std::uint32_t uid = 1000) {
    const ControlCounts before = node.plane->counts();
    const ClientId client = node.attach(attach, pid, uid);
    EXPECT_FALSE(node.closed(client));
    const auto error = node.take<shm::ErrorReply>(client);
    EXPECT_TRUE(error);
    node.hang_up(client);
    EXPECT_EQ(node.plane->counts(), before);
    return error.value_or(shm::ErrorReply{});
  }

  void expect_invalid(const shm::Attach& attach, const std::string& says) {
    TestNode node = make_node();
    const auto error = refusal(node, attach);
    EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.message, HasSubstr(says));
    node.expect_nothing_left();
  }
};

TEST_F(Attach, JobNamesArePrintable) {
  for (const std::string& name :
       {std::string(), std::string("two words"), std::string("a\nb"), std::string("tab\t"),
        std::string("\x7f"), std::string("nul\0x", 5), std::string("caf\xc3\xa9")}) {
    expect_invalid(rank_of(name, 1, 1, 0), "printable");
  }
}

TEST_F(Attach, ShapesOfTheWorld) {
  auto with = [](auto change) {
    shm::Attach attach = rank_of("job", 2, 2, 1);
    change(attach);
    return attach;
  };
  expect_invalid(with([](auto& a) { a.nodes = 0; }), "0 nodes");
  expect_invalid(with([](auto& a) { a.nodes = shm::kNodesMax + 1; }), "1025 nodes");
  expect_invalid(with([](auto& a) { a.local_size = 0; }), "0 ranks per node");
  expect_invalid(with([](auto& a) { a.local_size = shm::kLocalRanksMax + 1; }), "17 ranks");
  expect_invalid(with([](auto& a) { a.world = 5; }), "world size 5");
  expect_invalid(with([](auto& a) { a.world = 0; }), "world size 0");
  expect_invalid(with([](auto& a) { a.nodes = 1024, a.local_size = 16, a.world = 16384; }), "8192");
  expect_invalid(with([](auto& a) { a.node_rank = 2; }), "node rank 2");
  expect_invalid(with([](auto& a) { a.local_rank = 2; }), "local rank 2");
  expect_invalid(with([](auto& a) { a.rank = 2; }), "rank 2 is not");
  expect_invalid(with([](auto& a) { a.rank = 0xffffffff; }), "rank 4294967295");
  expect_invalid(with([](auto& a) { a.timeout_ms = 0; }), "timeout of 0 ms");
  expect_invalid(with([](auto& a) { a.timeout_ms = 0xffffffff; }), "timeout of 4294967295 ms");
}

TEST_F(Attach, ShapesOfTheSegment) {
  auto with = [](auto change) {
    shm::Attach attach = rank_of("job", 1, 1, 0);
    change(attach);
    return attach;
  };
  expect_invalid(with([](auto& a) { a.lane_count = 0; }), "0 lanes");
  expect_invalid(with([](auto& a) { a.lane_count = shm::kLanesMax + 1; }), "17 lanes");
  expect_invalid(with([](auto& a) { a.slot_count_log2 = 3; }), "2^3 slots");
  expect_invalid(with([](auto& a) { a.slot_count_log2 = 17; }), "2^17 slots");
  expect_invalid(with([](auto& a) { a.slot_count_log2 = 64; }), "2^64 slots");
  expect_invalid(with([](auto& a) { a.flag_count = 0; }), "0 flags");
  expect_invalid(with([](auto& a) { a.flag_count = 65; }), "65 flags");
  expect_invalid(with([](auto& a) { a.flag_count = shm::kFlagsMax + 64; }), "65600 flags");
}

TEST_F(Attach, MoreNodesThanDaemonsAreConfigured) {
  expect_invalid(rank_of("job", 3, 1, 0), "1 other daemons");
}

TEST_F(Attach, TheReplyCarriesASealedSegmentOfTheShapeAskedFor) {
  TestNode node = make_node();
  shm::Attach attach = rank_of("job", 2, 4, 2);
  attach.lane_count = 3;
  const ClientId client = node.attach(attach);
  auto reply = node.take(client, shm::MessageType::kAttachReply);
  ASSERT_TRUE(reply);
  const auto content = shm::decode_message<shm::AttachReply>(reply->payload);
  EXPECT_EQ(content->fabric, "fake");
  const auto segment = shm::Segment::map(std::move(reply->fds.at(0)));
  ASSERT_TRUE(segment) << segment.error().message;
  EXPECT_EQ(segment->shape(), (shm::SegmentShape{3, 5, 256}));
  EXPECT_EQ(segment->bytes(), content->segment_bytes);
  EXPECT_EQ(segment->header().session_id, content->session_id);
  EXPECT_EQ(segment->header().session_slot, content->session_slot);
  EXPECT_EQ(segment->header().generation, node.plane->hello().generation);
}

TEST_F(Attach, ADuplicateRankHearsWhoHoldsIt) {
  TestNode node = make_node();
  const ClientId holder = node.attach(rank_of("job", 1, 2, 1), 4242);
  const auto error = refusal(node, rank_of("job", 1, 2, 1), 4343);
  EXPECT_EQ(error.code, ErrorCode::kAlreadyExists);
  EXPECT_THAT(error.message, HasSubstr("process 4242"));
  // The holder is not disturbed, and the job still comes up.
  node.attach(rank_of("job", 1, 2, 0));
  EXPECT_TRUE(node.take<shm::JobUp>(holder));
  EXPECT_EQ(refusal(node, rank_of("job", 1, 2, 1)).code, ErrorCode::kAlreadyExists);
}

TEST_F(Attach, ASecondJobOfTheSameName) {
  TestNode node = make_node();
  node.attach(rank_of("job", 2, 2, 0), 77, 1000);
  auto error = refusal(node, rank_of("job", 2, 2, 1), 78, 1001);
  EXPECT_EQ(error.code, ErrorCode::kPermission);
  EXPECT_THAT(error.message, HasSubstr("user 1000"));
  EXPECT_THAT(error.message, HasSubstr("user 1001"));
  error = refusal(node, rank_of("job", 2, 4, 1));
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message, HasSubstr("2 nodes of 4"));
  EXPECT_THAT(error.message, HasSubstr("rank 0 (node rank 0, pid 77) says 2 nodes of 2"));
  EXPECT_EQ(refusal(node, rank_of("job", 1, 2, 1)).code, ErrorCode::kInvalidArgument);
  error = refusal(node, rank_of("job", 2, 2, 3));
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message, HasSubstr("node rank 1"));
}

TEST_F(Attach, JobsOfOtherNamesAndUsersDoNotDisturb) {
  TestNode node = make_node();
  const ClientId a = node.attach(rank_of("a", 1, 1, 0), 1, 1000);
  const ClientId b = node.attach(rank_of("b", 1, 1, 0), 2, 1001);
  EXPECT_TRUE(node.take<shm::JobUp>(a));
  EXPECT_TRUE(node.take<shm::JobUp>(b));
}

TEST_F(Attach, SessionsAreLimitedAndTheirPlacesComeBack) {
  TestNode node = make_node(1, 3);
  std::vector<ClientId> clients;
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 3; ++i) {
      const ClientId client = node.attach(rank_of(fmt::format("job{}-{}", round, i), 1, 1, 0));
      ASSERT_TRUE(node.take<shm::JobUp>(client)) << round << " " << i;
      clients.push_back(client);
    }
    const auto error = refusal(node, rank_of("more", 1, 1, 0));
    EXPECT_EQ(error.code, ErrorCode::kLimitExceeded);
    EXPECT_THAT(error.message, HasSubstr("3 sessions"));
    for (const ClientId client : clients) node.hang_up(client);
    clients.clear();
    // A slot is not free before its proxy has drained it.
    EXPECT_EQ(refusal(node, rank_of("more", 1, 1, 0)).code, ErrorCode::kLimitExceeded);
    node.step();
  }
  node.expect_nothing_left();
}

TEST_F(Attach, SlotsAreReusedAsLateAsPossible) {
  TestNode node = make_node(1, 3);
  std::vector<std::uint32_t> slots;
  for (std::uint32_t i = 0; i < 2 * shm::kSessionsMax; ++i) {
    const ClientId client = node.attach(rank_of("job", 1, 1, 0));
    slots.push_back(node.take<shm::AttachReply>(client)->session_slot);
    node.send(client, shm::Detach{});
    node.step();
  }
  // However few may be in use at once.
  for (std::uint32_t i = 0; i < slots.size(); ++i) EXPECT_EQ(slots[i], i % shm::kSessionsMax);
}

TEST_F(Attach, AnEndpointThatRegistersNothing) {
  TestNode node = make_node();
  node.nic->refuse_register = "no keys left";
  const auto error = refusal(node, rank_of("job", 1, 1, 0));
  EXPECT_EQ(error.code, ErrorCode::kSystem);
  EXPECT_THAT(error.message, HasSubstr("no keys left"));
  node.expect_nothing_left();
}

TEST_F(Attach, ARefusedClientMayTryAgain) {
  TestNode node = make_node();
  const ClientId client = node.attach(rank_of("", 1, 1, 0));
  ASSERT_TRUE(node.take<shm::ErrorReply>(client));
  node.send(client, rank_of("job", 1, 1, 0));
  EXPECT_TRUE(node.take<shm::JobUp>(client));
}

TEST_F(Attach, TheHeartbeatBeatsInEverySegment) {
  TestNode node = make_node();
  const ClientId waiting = node.attach(rank_of("waiting", 1, 2, 0));
  const ClientId up = node.attach(rank_of("up", 1, 1, 0));
  const shm::Segment segments[] = {node.segment(waiting), node.segment(up)};
  for (const auto& segment : segments) EXPECT_EQ(segment.header().heartbeat_ns, 1u);
  node.wait(100);
  for (const auto& segment : segments) {
    EXPECT_EQ(segment.header().heartbeat_ns, 100 * kMillisecond + 1);
  }
}

TEST_F(Attach, TheHeartbeatOutlastsALongEventButNotAHang) {
  const auto clock = std::make_shared<std::uint64_t>(1);
  TestNode node({}, std::make_shared<FakeMemory>(), clock);
  const ClientId client = node.attach(rank_of("job", 1, 1, 0));
  const auto segment = node.segment(client);
  const auto beat_after = [&](std::uint64_t ms) {
    *clock += ms * kMillisecond;
    node.plane->beat();
    return segment.header().heartbeat_ns;
  };
  EXPECT_EQ(beat_after(20'000), 20'000 * kMillisecond + 1);
  EXPECT_EQ(beat_after(9'000), 29'000 * kMillisecond + 1);
  EXPECT_EQ(beat_after(2'000), 29'000 * kMillisecond + 1);
  node.wait(0);
  EXPECT_EQ(segment.header().heartbeat_ns, 31'000 * kMillisecond + 1);
  node.hang_up(client);
  node.step();
  node.plane->beat();  // its word is gone
  node.expect_nothing_left();
}

TEST_F(Attach, ADrainingDaemonTakesNoRanks) {
  TestNode node = make_node();
  const ClientId up = node.attach(rank_of("up", 1, 1, 0));
  const ClientId waiting = node.attach(rank_of("waiting", 1, 2, 0));
  node.plane->drain();
  EXPECT_EQ(refusal(node, rank_of("new", 1, 1, 0)).code, ErrorCode::kDraining);
  // A rank that waits for local ranks would wait forever; one that runs goes on.
  const auto failed = node.take<shm::SessionFailed>(waiting);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kDraining);
  EXPECT_FALSE(node.take<shm::SessionFailed>(up));
  EXPECT_NE(node.register_buffer(up), shm::kNoHandle);
  EXPECT_FALSE(node.plane->idle());
  node.send(up, shm::Detach{});
  node.hang_up(waiting);
  node.step();
  EXPECT_TRUE(node.take<shm::Done>(up));
  EXPECT_TRUE(node.plane->idle());
  node.expect_nothing_left();

  node.plane->resume();
  const ClientId back = node.attach(rank_of("new", 1, 1, 0));
  EXPECT_NE(node.register_buffer(back), shm::kNoHandle);
  const ControlSnapshot snapshot = node.plane->snapshot();
  EXPECT_FALSE(snapshot.draining);
  EXPECT_EQ(snapshot.sessions_attached, 3);
  EXPECT_EQ(snapshot.sessions_failed, 1);
}

TEST_F(Attach, TheSnapshotShowsWhoIsThere) {
  TestNode node = make_node();
  shm::Attach attach = rank_of("job", 1, 2, 1);
  attach.lane_count = 2;
  const ClientId client = node.attach(attach, 4242, 1234);
  node.register_buffer(client, 8192);
  auto snapshot = node.plane->snapshot();
  ASSERT_EQ(snapshot.sessions.size(), 1u);
  const SessionInfo& session = snapshot.sessions.front();
  EXPECT_EQ(session.job, "job");
  EXPECT_EQ(session.rank, 1u);
  EXPECT_EQ(session.world, 2u);
  EXPECT_EQ(session.pid, 4242);
  EXPECT_EQ(session.uid, 1234u);
  EXPECT_EQ(session.state, "waiting");
  EXPECT_EQ(session.buffers, 1u);
  EXPECT_EQ(session.registered_bytes, 8192u);
  EXPECT_EQ(snapshot.queues.size(), 2u);
  EXPECT_TRUE(snapshot.recent_failures.empty());
  node.hang_up(client);
  node.step();
  snapshot = node.plane->snapshot();
  EXPECT_TRUE(snapshot.sessions.empty());
  ASSERT_EQ(snapshot.recent_failures.size(), 1u);
  EXPECT_EQ(snapshot.recent_failures.front().state, "failed");
  EXPECT_THAT(snapshot.recent_failures.front().reason, HasSubstr("closed by peer"));
}

TEST_F(Attach, ARankWhoseProcessDoesNotRunIsTold) {
  TestNode node = make_node(1);
  const ClientId client = node.attach(rank_of("job", 1, 1, 0));
  const shm::Segment segment = node.segment(client);
  const auto reason = [&] { return node.plane->snapshot().sessions.at(0).reason; };
  // One that does not beat at all is an older client.
  for (int i = 0; i < 30; ++i) node.wait(100);
  EXPECT_EQ(reason(), "");
  for (std::uint64_t beat = 1; beat < 8; ++beat) {
    shm::store_relaxed(&segment.header().beats, beat);
    node.wait(250);
    EXPECT_EQ(reason(), "");
  }
  for (int i = 0; i < 10; ++i) node.wait(100);
  EXPECT_EQ(reason(), "");
  node.wait(200);
  EXPECT_EQ(reason(), "its process has not run for 1.2 s: stopped, frozen or starved");
  shm::store_relaxed(&segment.header().beats, std::uint64_t{8});
  node.wait(100);
  EXPECT_EQ(reason(), "");
}

}  // namespace
}  // namespace mk::daemon::test
