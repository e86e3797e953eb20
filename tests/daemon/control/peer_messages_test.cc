// What other daemons may say: every bad field breaks the stream, every stale message is ignored.
#include <gmock/gmock.h>

#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

/// Node 0 of two; the test plays node 1.
class PeerMessages : public testing::Test {
 protected:
  PeerMessages() { node.reachable = {1}; }

  PeerHello hello() const {
    PeerHello hello = node.plane->hello();
    hello.node = 1;
    hello.generation = 99;
    return hello;
  }
  void say(const PeerMessage& message) {
    const Status status = node.plane->on_peer_message(1, message);
    EXPECT_TRUE(status) << status.error().message;
  }
  void expect_refused(const PeerMessage& message, const std::string& says) {
    const Status status = node.plane->on_peer_message(1, message);
    ASSERT_FALSE(status) << says;
    EXPECT_THAT(status.error().message, HasSubstr(says));
    EXPECT_THAT(status.error().message, HasSubstr("node 1"));
  }
  template <class Message>
  std::vector<Message> sent() {
    std::vector<Message> found;
    for (const auto& [to, message] : node.sent) {
      if (const auto* content = std::get_if<Message>(&message)) found.push_back(*content);
    }
    return found;
  }
  /// Our own part, as last announced.
  std::uint64_t own_part() { return sent<JobPart>().back().part_id; }
  /// A job of 2 x 1 whose remote part has `part_id`, up.
  ClientId job_up(std::uint64_t part_id) {
    const ClientId client = node.attach(rank_of("job", 2, 1, 0));
    say(part_of("job", part_id, 2, 1, 1));
    say(JobReady{"job", part_id, own_part()});
    EXPECT_TRUE(node.take<shm::JobUp>(client));
    return client;
  }

  TestNode node{{}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1)};
};

TEST_F(PeerMessages, TheFirstIsHello) {
  expect_refused(part_of("job", 1, 2, 1, 1), "did not begin with a hello");
  expect_refused(JobReady{"job", 1}, "did not begin with a hello");
  EXPECT_FALSE(node.plane->on_peer_message(7, hello()));  // not configured
  EXPECT_FALSE(node.plane->on_peer_message(0, hello()));  // ourselves
}

TEST_F(PeerMessages, HelloIsChecked) {
  auto with = [this](auto change) {
    PeerHello changed = hello();
    change(changed);
    return changed;
  };
  expect_refused(with([](auto& h) { h.node = 3; }), "calls itself node 3");
  expect_refused(with([](auto& h) { h.abi_major = 9; }), fmt::format("ABI 9.{}", shm::kAbiMinor));
  expect_refused(with([](auto& h) { h.abi_major = 9; }),
                 fmt::format(") {}.{}", shm::kAbiMajor, shm::kAbiMinor));
  expect_refused(with([](auto& h) { h.fabric = "other"; }), "'other'");
  expect_refused(with([](auto& h) { h.rail_addresses.clear(); }), "0 rails");
  expect_refused(with([](auto& h) { h.rail_addresses[0].resize(513); }), "513 bytes");
  say(hello());
  // The reason shows in the error of a job that waits for that node.
  node.plane->on_peer_down(1, "gone");
  expect_refused(with([](auto& h) { h.abi_major = 9; }), fmt::format("ABI 9.{}", shm::kAbiMinor));
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  node.wait(5'100);
  EXPECT_THAT(node.take<shm::SessionFailed>(client)->message,
              HasSubstr(fmt::format("ABI 9.{}", shm::kAbiMinor)));
}

// Where our rails are, a peer has from our hello, and anew whenever that changes; one whose stream
// begins later has it before anything else.
TEST_F(PeerMessages, ARailWithAnotherAddressIsToldToThoseThatAreThereAndThoseThatCome) {
  const auto told = [&] {
    std::vector<Bytes> addresses;
    for (const RailMoved& moved : sent<RailMoved>()) {
      EXPECT_EQ(moved.rail, 0u);
      addresses.push_back(moved.address);
    }
    return addresses;
  };
  const Bytes first = node.plane->hello().rail_addresses[0], second = {std::byte{8}},
              third = {std::byte{9}};
  say(hello());
  node.wait(1'000);
  EXPECT_TRUE(told().empty()) << "the hello has said it";
  node.nic->address = second;
  node.wait(1'000);
  EXPECT_EQ(told(), std::vector<Bytes>{second}) << "once";
  // A job's part never overtakes it.
  node.nic->address = third;
  node.attach(rank_of("job", 2, 1, 0));
  EXPECT_EQ(told(), (std::vector<Bytes>{second, third}));
  EXPECT_TRUE(std::holds_alternative<JobPart>(node.sent.back().second));
  // What a new stream begins with is of the start.
  node.plane->on_peer_down(1, "gone");
  node.sent.clear();
  EXPECT_EQ(node.plane->hello().rail_addresses[0], first);
  say(hello());
  ASSERT_FALSE(node.sent.empty());
  EXPECT_TRUE(std::holds_alternative<RailMoved>(node.sent.front().second));
  EXPECT_EQ(told(), std::vector<Bytes>{third});
}

TEST_F(PeerMessages, ARailThatMovedIsConnectedToWhereItIs) {
  const Bytes second = {std::byte{8}}, third = {std::byte{9}};
  say(hello());
  expect_refused(RailMoved{1, second}, "its rail 1 has moved");
  expect_refused(RailMoved{0, Bytes(513)}, "513 bytes");
  node.nic->refuse_connect = true;
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  say(part_of("job", 11, 2, 1, 1));
  ASSERT_EQ(node.nic->connected_to, std::vector<Bytes>{hello().rail_addresses[0]});
  // It need not wait until an address that leads nowhere would be tried again.
  say(RailMoved{0, second});
  node.nic->refuse_connect = false;
  node.plane->on_tick();
  ASSERT_EQ(node.nic->connected_to.size(), 2u);
  EXPECT_EQ(node.nic->connected_to.back(), second);
  say(JobReady{"job", 11, own_part()});
  EXPECT_TRUE(node.take<shm::JobUp>(client));
  // A link to where it was stays with those who have it; the next job gets one to where it is.
  say(RailMoved{0, second});
  say(RailMoved{0, third});
  node.wait(1'000);
  EXPECT_EQ(node.nic->connects, 2);
  EXPECT_FALSE(node.take<shm::SessionFailed>(client));
  const ClientId next = node.attach(rank_of("next", 2, 1, 0));
  say(part_of("next", 12, 2, 1, 1));
  say(JobReady{"next", 12, own_part()});
  EXPECT_TRUE(node.take<shm::JobUp>(next));
  ASSERT_EQ(node.nic->connects, 3);
  EXPECT_EQ(node.nic->connected_to.back(), third);
  EXPECT_EQ(node.nic->links, 2);
  EXPECT_FALSE(node.take<shm::SessionFailed>(client));
}

TEST_F(PeerMessages, PartsAreChecked) {
  say(hello());
  auto with = [](auto change) {
    JobPart part = part_of("job", 1, 2, 2, 1);
    change(part);
    return part;
  };
  expect_refused(with([](auto& p) { p.job.clear(); }), "bad name");
  expect_refused(with([](auto& p) { p.job.assign(129, 'x'); }), "bad name");
  expect_refused(with([](auto& p) { p.nodes = 1; }), "1 nodes");
  expect_refused(with([](auto& p) { p.nodes = 129; }), "129 nodes");
  expect_refused(with([](auto& p) { p.local_size = 0; }), "0 ranks");
  expect_refused(with([](auto& p) { p.local_size = 17; }), "17 ranks");
  expect_refused(with([](auto& p) { p.node_rank = 2; }), "node rank 2");
  expect_refused(with([](auto& p) { p.nodes = 128, p.local_size = 16; }), "128 nodes of 16");
  expect_refused(with([](auto& p) { p.sessions.pop_back(); }), "1 sessions");
  expect_refused(with([](auto& p) { p.sessions[0].rank = 3; }), "rank 3 at local rank 0");
  expect_refused(with([](auto& p) { p.sessions[1].slot = 64; }), "slot 64");
  expect_refused(with([](auto& p) { p.sessions[1].flag_count = 0; }), "0 flags");
  expect_refused(with([](auto& p) { p.sessions[1].flag_count = 65537; }), "65537 flags");
  expect_refused(with([](auto& p) { p.sessions[1].flags_key.resize(1025); }), "1025 bytes");
  EXPECT_EQ(node.plane->counts().early_parts, 0u);
}

TEST_F(PeerMessages, EarlyPartsAreBoundedAndExpire) {
  say(hello());
  for (std::uint32_t i = 0; i < shm::kSessionsMax; ++i) {
    say(part_of(fmt::format("job{}", i), i, 2, 1, 1));
  }
  say(part_of("job3", 333, 2, 1, 1));  // takes the place of its predecessor
  EXPECT_EQ(node.plane->counts().early_parts, shm::kSessionsMax);
  expect_refused(part_of("more", 1, 2, 1, 1), "65 jobs at once");
  // One that is sent again stays; the others have been forgotten by their daemon, or by us.
  for (int i = 0; i < 5; ++i) {
    node.wait(30'000);
    say(part_of("job7", 7, 2, 1, 1));
  }
  EXPECT_EQ(node.plane->counts().early_parts, 1u);
  node.plane->on_peer_down(1, "gone");
  EXPECT_EQ(node.plane->counts().early_parts, 0u);
}

TEST_F(PeerMessages, AWaitingPartIsSentAgainSoThatItDoesNotExpire) {
  say(hello());
  auto attach = rank_of("job", 2, 1, 0);
  attach.timeout_ms = 600'000;
  node.attach(attach);
  for (int i = 0; i < 120; ++i) node.wait(1'000);
  const auto parts = sent<JobPart>();
  EXPECT_GE(parts.size(), 4u);
  EXPECT_LE(parts.size(), 6u);
  for (const JobPart& part : parts) EXPECT_EQ(part.part_id, parts.front().part_id);
}

TEST_F(PeerMessages, WhatConcernsAJobIsChecked) {
  say(hello());
  job_up(11);
  auto region = [](auto change) {
    RegionAnnounce changed{"job", 11, 1, 5, 4096, Bytes(8)};
    change(changed);
    return changed;
  };
  expect_refused(region([](auto& r) { r.rank = 0; }), "not on node rank 1");
  expect_refused(region([](auto& r) { r.rank = 77; }), "rank 77");
  expect_refused(region([](auto& r) { r.handle = 0; }), "buffer 0");
  expect_refused(region([](auto& r) { r.handle = 1025; }), "buffer 1025");
  expect_refused(region([](auto& r) { r.bytes = 0; }), "of 0 bytes");
  expect_refused(region([](auto& r) { r.bytes = shm::kBufferBytesMax + 1; }), "bytes with");
  expect_refused(region([](auto& r) { r.key.resize(1025); }), "1025 bytes");
  say(region([](auto&) {}));
  expect_refused(region([](auto&) {}), "two buffers with handle 5");
  expect_refused(RegionWithdraw{"job", 11, 0, 5}, "a withdrawal for rank 0");
  expect_refused(ExchangePart{"job", 11, 0, 0, "t", {}}, "an exchange for rank 0");
  expect_refused(ExchangePart{"job", 11, 1, 0, std::string(257, 't'), {}}, "257 bytes");
  expect_refused(ExchangePart{"job", 11, 1, 1, "t", {}}, "exchange 1 of rank 1");
  expect_refused(ExchangePart{"job", 11, 1, 0, "t", Bytes(65'537)}, "65537 bytes");
  expect_refused(JobLeft{"job", 11, 2, ErrorCode::kPeerLost, "x"}, "rank 2 left");
}

TEST_F(PeerMessages, MessagesOfUnknownPartsAreIgnored) {
  say(hello());
  const ClientId client = job_up(11);
  node.sent.clear();
  for (const std::uint64_t part : {std::uint64_t{12}, std::uint64_t{0}}) {
    say(JobReady{"job", part});
    say(RegionAnnounce{"job", part, 1, 5, 4096, Bytes(8)});
    say(RegionWithdraw{"job", part, 1, 5});
    say(ExchangePart{"job", part, 1, 0, "t", {}});
    say(JobLeft{"job", part, 1, ErrorCode::kPeerLost, "x"});
    say(JobLeft{"job", part, 1, ErrorCode::kOk, ""});
  }
  EXPECT_TRUE(node.sent.empty());
  EXPECT_FALSE(node.take<shm::SessionFailed>(client));
  EXPECT_EQ(node.plane->counts().jobs, 1u);
}

TEST_F(PeerMessages, ARestartedJobNeverMixesWithItsPredecessor) {
  say(hello());
  const ClientId first = job_up(11);
  const std::uint64_t old_own = own_part();
  say(RegionAnnounce{"job", 11, 1, 5, 4096, Bytes(8)});
  EXPECT_EQ(node.nic->remote_regions, 2);
  // The peer's rank dies and is started again before we have said anything.
  say(JobLeft{"job", 11, 1, ErrorCode::kPeerLost, "rank 1 died"});
  say(part_of("job", 12, 2, 1, 1));
  EXPECT_TRUE(node.take<shm::SessionFailed>(first));
  // Its new part waits for our new rank; late words about the old one change nothing.
  EXPECT_EQ(node.plane->counts().early_parts, 1u);
  node.step();
  say(JobLeft{"job", 11, 1, ErrorCode::kOk, ""});
  node.hang_up(first);
  node.step();
  const ClientId second = node.attach(rank_of("job", 2, 1, 0));
  const std::uint64_t new_own = own_part();
  EXPECT_NE(new_own, old_own);
  EXPECT_EQ(sent<JobReady>().back().part_id, new_own);
  say(JobReady{"job", 11, new_own});
  EXPECT_FALSE(node.take<shm::JobUp>(second));
  say(RegionAnnounce{"job", 11, 1, 6, 4096, Bytes(8)});
  say(ExchangePart{"job", 11, 1, 0, "stale", {}});
  say(JobLeft{"job", 11, 1, ErrorCode::kPeerLost, "again"});
  say(JobReady{"job", 12, old_own});
  EXPECT_FALSE(node.take<shm::JobUp>(second));
  say(JobReady{"job", 12, new_own});
  EXPECT_TRUE(node.take<shm::JobUp>(second));
  EXPECT_FALSE(node.take<shm::SessionFailed>(second));
  // The exchange has its own numbers in the new run.
  node.send(second, shm::Exchange{"t", bytes_of("a"), 1'000});
  say(ExchangePart{"job", 12, 1, 0, "t", bytes_of("b")});
  EXPECT_EQ(node.take<shm::ExchangeReply>(second)->blobs,
            (std::vector{bytes_of("a"), bytes_of("b")}));
  EXPECT_EQ(node.nic->remote_regions, 1);  // flags
}

TEST_F(PeerMessages, APartThatEndedWithoutOursFailsNobodyOfOurs) {
  // Our rank is back at once and finds the part of the run before, which has failed over there
  // before that daemon heard of us: its end is on its way.
  say(hello());
  say(part_of("job", 11, 2, 1, 1));
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  EXPECT_EQ(node.nic->remote_regions, 1);  // its flags: we are bound
  say(JobLeft{"job", 11, 1, ErrorCode::kTimeout, "not attached: rank 0", 0});
  EXPECT_EQ(node.nic->remote_regions, 0);
  say(JobLeft{"job", 11, 1, ErrorCode::kOk, "", 0});
  EXPECT_FALSE(node.take<shm::SessionFailed>(client));
  // Its next part is the one of this run.
  say(part_of("job", 12, 2, 1, 1));
  say(JobReady{"job", 12, own_part()});
  EXPECT_TRUE(node.take<shm::JobUp>(client));
  // One that has ours is as good as its word.
  say(JobLeft{"job", 12, 1, ErrorCode::kPeerLost, "rank 1 died", own_part()});
  EXPECT_EQ(node.take<shm::SessionFailed>(client)->code, ErrorCode::kPeerLost);
}

TEST_F(PeerMessages, ReadyWithAPartThatHasEndedDoesNotCount) {
  // Our rank comes, is announced, dies, and comes again. The peer was quick enough to be ready with
  // the first, and gives its memory up on the news of its end: the second must not write to it.
  say(hello());
  const ClientId first = node.attach(rank_of("job", 2, 1, 0));
  const std::uint64_t old_own = own_part();
  node.hang_up(first);
  node.step();
  say(part_of("job", 11, 2, 1, 1));
  const ClientId second = node.attach(rank_of("job", 2, 1, 0));
  EXPECT_NE(own_part(), old_own);
  say(JobReady{"job", 11, old_own});
  EXPECT_FALSE(node.take<shm::JobUp>(second));
  say(JobLeft{"job", 11, 0, ErrorCode::kPeerLost, "rank 0 died"});
  say(JobLeft{"job", 11, 1, ErrorCode::kOk, ""});
  EXPECT_EQ(node.take<shm::SessionFailed>(second)->code, ErrorCode::kPeerLost);
  node.step();
  node.hang_up(second);
  node.expect_nothing_left();
}

TEST_F(PeerMessages, CommandsBeforeTheJobIsUpReachNobody) {
  // The peer's part is bound, but the peer has not bound ours: it may give its flags up any time.
  say(hello());
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  say(part_of("job", 11, 2, 1, 1));
  EXPECT_EQ(sent<JobReady>().size(), 1u);
  shm::Segment segment = node.segment(client);
  shm::RingProducer producer{segment.ring(0)};
  ASSERT_TRUE(producer.try_push({.opcode = shm::Opcode::kWriteFlag, .peer = 1, .epoch = 1}));
  node.step();
  const auto failed = node.take<shm::SessionFailed>(client);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kBadCommand);
  EXPECT_THAT(failed->message, HasSubstr("rail peers are ranks none"));
  EXPECT_EQ(producer.completed(), 0u);
}

TEST_F(PeerMessages, APartAnnouncedAgainMayBeTheNextJobsToo) {
  // Our rank ends when both parts are known. The peer's daemon, which had bound nothing yet
  // (another node was missing), announces its part again; our next rank takes it while the last
  // one's memory still waits for it. What the peer says then concerns both.
  say(hello());
  const ClientId first = node.attach(rank_of("job", 2, 1, 0));
  say(part_of("job", 11, 2, 1, 1));
  node.hang_up(first);
  node.step();
  EXPECT_EQ(node.plane->counts().sessions, 1u);
  say(part_of("job", 11, 2, 1, 1));
  const ClientId second = node.attach(rank_of("job", 2, 1, 0));
  say(JobReady{"job", 11, own_part()});
  EXPECT_TRUE(node.take<shm::JobUp>(second));
  say(JobLeft{"job", 11, 1, ErrorCode::kPeerLost, "rank 1 died"});
  EXPECT_TRUE(node.take<shm::SessionFailed>(second));
  say(JobLeft{"job", 11, 1, ErrorCode::kOk, ""});
  node.step();
  node.hang_up(second);
  node.expect_nothing_left();
}

TEST_F(PeerMessages, APartThatComesAgainIsNoSecondOne) {
  say(hello());
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  say(part_of("job", 11, 2, 1, 1));
  say(part_of("job", 11, 2, 1, 1));
  EXPECT_EQ(node.plane->counts().early_parts, 0u);
  say(JobReady{"job", 11, own_part()});
  say(JobReady{"job", 11, own_part()});
  EXPECT_TRUE(node.take<shm::JobUp>(client));
  EXPECT_FALSE(node.take<shm::JobUp>(client));
  say(part_of("job", 11, 2, 1, 1));
  EXPECT_EQ(node.plane->counts().early_parts, 0u);
}

TEST_F(PeerMessages, AnnouncementsBeforeWeAreBoundWait) {
  say(hello());
  node.nic->refuse_connect = true;
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  say(part_of("job", 11, 2, 1, 1));
  say(JobReady{"job", 11, own_part()});
  say(RegionAnnounce{"job", 11, 1, 5, 4096, Bytes(8)});
  say(RegionAnnounce{"job", 11, 1, 6, 4096, Bytes(8)});
  expect_refused(RegionAnnounce{"job", 11, 1, 6, 4096, Bytes(8)}, "two buffers with handle 6");
  say(RegionWithdraw{"job", 11, 1, 6});
  EXPECT_EQ(sent<RegionWithdraw>().size(), 1u);
  EXPECT_EQ(node.nic->remote_regions, 0);
  node.nic->refuse_connect = false;
  node.wait(200);
  EXPECT_TRUE(node.take<shm::JobUp>(client));
  EXPECT_EQ(node.nic->remote_regions, 2);  // flags and buffer 5
}

TEST_F(PeerMessages, AWithdrawalGoesBackWhenTheProxyHasLetGo) {
  say(hello());
  job_up(11);
  say(RegionAnnounce{"job", 11, 1, 5, 4096, Bytes(8)});
  say(RegionWithdraw{"job", 11, 1, 5});
  EXPECT_TRUE(sent<RegionWithdraw>().empty());
  say(RegionWithdraw{"job", 11, 1, 5});  // twice changes nothing
  node.step();
  ASSERT_EQ(sent<RegionWithdraw>().size(), 1u);
  const RegionWithdraw back = sent<RegionWithdraw>().front();
  EXPECT_EQ(back.part_id, 11u);
  EXPECT_EQ(back.rank, 1u);
  EXPECT_EQ(back.handle, 5);
  EXPECT_EQ(node.nic->remote_regions, 1);
  // The handle may be used anew.
  say(RegionAnnounce{"job", 11, 1, 5, 8192, Bytes(8)});
  EXPECT_EQ(node.nic->remote_regions, 2);
}

TEST_F(PeerMessages, ADaemonThatRestartsReplacesItsStream) {
  say(hello());
  const ClientId client = job_up(11);
  PeerHello again = hello();
  again.generation = 100;
  say(again);
  const auto failed = node.take<shm::SessionFailed>(client);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kPeerLost);
  node.hang_up(client);
  node.step();
  node.expect_nothing_left();
  job_up(12);
}

TEST_F(PeerMessages, ASendThatFailsFailsTheJob) {
  say(hello());
  const ClientId client = job_up(11);
  node.reachable.clear();
  node.register_buffer(client);
  const auto failed = node.take<shm::SessionFailed>(client);
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->code, ErrorCode::kPeerLost);
  EXPECT_THAT(failed->message, HasSubstr("node 1 cannot be reached"));
}

}  // namespace
}  // namespace mk::daemon::test
