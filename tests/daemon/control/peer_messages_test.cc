// What other daemons may say: every bad field breaks the stream, every stale message is ignored.
#include <gmock/gmock.h>

#include "tests/daemon/control/peer_messages_rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

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
  EXPECT_TRUE(std::holds_alternative<JobOffer>(node.sent.back().second));
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

// A connect blocks for as long as the endpoint waits. The pause before the next one is a pause all
// the same, or the control thread would do nothing but connect.
TEST_F(PeerMessages, ThePauseAfterAConnectThatBlockedBeginsWhenItEnds) {
  say(hello());
  node.nic->refuse_connect = true;
  node.nic->on_connect = [this] { node.pass(2'000); };
  auto attach = rank_of("job", 2, 1, 0);
  attach.timeout_ms = 600'000;
  node.attach(attach);
  say(part_of("job", 11, 2, 1, 1));
  ASSERT_EQ(node.nic->connects, 1);
  node.plane->on_tick();
  node.plane->on_tick();
  EXPECT_EQ(node.nic->connects, 1) << "no pause was made";
  node.wait(101);
  EXPECT_EQ(node.nic->connects, 2);
  node.plane->on_tick();
  node.wait(101);
  EXPECT_EQ(node.nic->connects, 2) << "the second pause is twice as long";
  node.wait(100);
  EXPECT_EQ(node.nic->connects, 3);
}

// The sentence that ends a job names nodes. There may be many: it still fits what any daemon takes,
// and so costs no other job the stream.
TEST_F(PeerMessages, TheReasonOfAJobThatEndsFitsAMessage) {
  TestNode many{{.nodes = shm::kNodesMax},
                std::make_shared<FakeMemory>(),
                std::make_shared<std::uint64_t>(1)};
  many.reachable = {1};
  PeerHello from = hello();
  from.fabric = many.plane->hello().fabric;
  ASSERT_TRUE(many.plane->on_peer_message(1, from));
  for (NodeId other = 2; other < shm::kNodesMax; ++other) {
    PeerHello bad = from;
    bad.node = other;
    bad.fabric.assign(shm::kNameBytesMax, 'x');
    ASSERT_FALSE(many.plane->on_peer_message(other, bad));
  }
  const ClientId client = many.attach(rank_of("job", shm::kNodesMax, 1, 0));
  many.wait(5'100);
  const auto failed = many.take<shm::SessionFailed>(client);
  ASSERT_TRUE(failed);
  EXPECT_LT(failed->message.size(), shm::kMessageTextBytesMax);
  EXPECT_THAT(failed->message, HasSubstr("and 1016 more like it"));
  for (const auto& [to, message] : many.sent) {
    if (const auto* left = std::get_if<JobLeft>(&message)) {
      EXPECT_LE(left->reason.size(), shm::kMessageTextBytesMax);
    }
  }
}

TEST_F(PeerMessages, AReasonOfAnyLengthAndKindOfBytesIsTaken) {
  say(hello());
  const ClientId client = job_up(11);
  say(JobLeft{"job", 11, 1, ErrorCode::kPeerLost, "caf\xe9\n" + std::string(100'000, 'x')});
  const auto failed = node.take<shm::SessionFailed>(client);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("caf\\xe9\\x0axxx"));
  EXPECT_LE(failed->message.size(), shm::kMessageTextBytesMax);
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
  expect_refused(ExchangePart{"job", 11, 1, 1, "t", {}}, "rank 1 sent exchange 1");
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
  // (another node was missing), announces its part again. Our next rank takes it while the last
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
