// How two daemons find out that they have parts of one job, and what either has told the other by
// then.
#include <gmock/gmock.h>

#include "tests/daemon/control/peer_messages_rig.h"

namespace mk::daemon::test {
namespace {

class Handshake : public PeerMessages {};

TEST_F(Handshake, OffersAreChecked) {
  say(hello());
  auto with = [](auto change) {
    JobOffer offer = PlayedPeer::offer_of(part_of("job", 1, 2, 2, 1));
    change(offer);
    return offer;
  };
  expect_refused(with([](auto& p) { p.job.clear(); }), "bad name");
  expect_refused(with([](auto& p) { p.job.assign(129, 'x'); }), "bad name");
  expect_refused(with([](auto& p) { p.job = "caf\xe9"; }), "bad name");
  expect_refused(with([](auto& p) { p.nodes = 1; }), "1 nodes");
  expect_refused(with([](auto& p) { p.nodes = 1025; }), "1025 nodes");
  expect_refused(with([](auto& p) { p.local_size = 0; }), "0 ranks");
  expect_refused(with([](auto& p) { p.local_size = 17; }), "17 ranks");
  expect_refused(with([](auto& p) { p.node_rank = 2; }), "node rank 2");
  expect_refused(with([](auto& p) { p.nodes = 1024, p.local_size = 16; }), "1024 nodes of 16");
  expect_refused(with([](auto& p) { p.nonce.pop_back(); }), "a nonce of 31 bytes");
  EXPECT_EQ(node.plane->counts().early_parts, 0u);
}

TEST_F(Handshake, PartsAreChecked) {
  say(hello());
  const auto refused = [this](auto change, const std::string& says) {
    static std::uint64_t part_id = 100;
    JobPart part = part_of("job", ++part_id, 2, 2, 1);
    const JobPart offered = part;
    change(part);
    const ClientId zero = node.attach(rank_of("job", 2, 2, 0));
    const ClientId one = node.attach(rank_of("job", 2, 2, 1));
    // Offered and proved as it should be; what comes then is another one.
    PlayedPeer peer(1, 0);
    for (PeerMessage& message : peer.play(offered)) say(message);
    for (PeerMessage& message : peer.answer(sent<JobOffer>().back())) say(message);
    expect_refused(part, says);
    for (const ClientId client : {zero, one}) node.hang_up(client);
    node.step();
  };
  refused([](auto& p) { p.node_rank = 0; }, "and was offered as 1 of 2 of 2");
  refused([](auto& p) { p.local_size = 1; }, "and was offered as 1 of 2 of 2");
  refused([](auto& p) { p.sessions.pop_back(); }, "1 sessions");
  refused([](auto& p) { p.sessions[0].rank = 3; }, "rank 3 at local rank 0");
  refused([](auto& p) { p.sessions[1].slot = 64; }, "slot 64");
  refused([](auto& p) { p.sessions[1].flag_count = 0; }, "0 flags");
  refused([](auto& p) { p.sessions[1].flag_count = 65537; }, "65537 flags");
  refused([](auto& p) { p.sessions[1].flags_key.resize(1025); }, "1025 bytes");
}

// What opens memory goes to the nodes of a job only, and after they have shown that they are.
TEST_F(Handshake, ANodeIsToldOfAJobWhatItNeedsAfterItHasProvedThatItIsItsOwn) {
  TestNode three{{.nodes = 3}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1)};
  three.reachable = {1, 2};
  for (const NodeId other : {1u, 2u}) {
    PeerHello from = hello();
    from.node = other;
    ASSERT_TRUE(three.plane->on_peer_message(other, from));
  }
  auto attach = rank_of("job", 2, 1, 0);
  attach.secret = "swordfish";
  const ClientId client = three.attach(attach);
  const auto parts_to = [&](NodeId to) {
    return std::ranges::count_if(three.sent, [&](const auto& one) {
      return one.first == to && std::holds_alternative<JobPart>(one.second);
    });
  };
  // Offers say nothing of it; and one that cannot prove is not answered with a part, nor one that
  // sends its part unasked, nor one that shows another node's proof.
  EXPECT_EQ(parts_to(1) + parts_to(2), 0);
  ASSERT_TRUE(three.play(2, part_of("job", 21, 2, 1, 1), 1000, "guess"));
  ASSERT_TRUE(three.plane->on_peer_message(2, part_of("job", 21, 2, 1, 1)));
  PlayedPeer relay(1, 0);
  std::vector<PeerMessage> theirs = relay.play(part_of("job", 21, 2, 1, 1), 1000, "swordfish");
  for (const auto& [to, said] : std::vector(three.sent)) {
    for (PeerMessage& answer : relay.answer(said)) theirs.push_back(answer);
  }
  for (PeerMessage& message : theirs) ASSERT_TRUE(three.plane->on_peer_message(2, message));
  EXPECT_EQ(parts_to(2), 0);
  EXPECT_FALSE(three.take<shm::SessionFailed>(client));
  // The owner's other node is not in its way.
  ASSERT_TRUE(three.play(1, part_of("job", 11, 2, 1, 1), 1000, "swordfish"));
  EXPECT_EQ(parts_to(1), 1);
  std::uint64_t own = 0;
  for (const auto& [to, message] : three.sent) {
    if (const auto* part = std::get_if<JobPart>(&message)) own = part->part_id;
  }
  ASSERT_TRUE(three.plane->on_peer_message(1, JobReady{"job", 11, own}));
  EXPECT_TRUE(three.take<shm::JobUp>(client));
  // Nor does it learn why the job ends.
  three.hang_up(client);
  three.step();
  for (const auto& [to, message] : three.sent) {
    const auto* left = std::get_if<JobLeft>(&message);
    if (left != nullptr && left->code != ErrorCode::kOk) {
      EXPECT_EQ(left->reason.empty(), to == 2) << left->reason;
    }
    EXPECT_FALSE(to == 2 && std::holds_alternative<RegionAnnounce>(message));
  }
}

TEST_F(Handshake, EarlyPartsAreBoundedAndExpire) {
  say(hello());
  for (std::uint32_t i = 0; i < shm::kSessionsMax; ++i) {
    say(part_of(fmt::format("job{}", i), i, 2, 1, 1));
  }
  say(part_of("job3", 333, 2, 1, 1));  // takes the place of its predecessor
  EXPECT_EQ(node.plane->counts().early_parts, shm::kSessionsMax);
  expect_refused(PlayedPeer::offer_of(part_of("more", 1, 2, 1, 1)), "65 jobs at once");
  // One that is sent again stays; the others have been forgotten by their daemon, or by us.
  for (int i = 0; i < 5; ++i) {
    node.wait(30'000);
    say(part_of("job7", 7, 2, 1, 1));
  }
  EXPECT_EQ(node.plane->counts().early_parts, 1u);
  node.plane->on_peer_down(1, "gone");
  EXPECT_EQ(node.plane->counts().early_parts, 0u);
}

TEST_F(Handshake, AWaitingPartIsOfferedAgainSoThatItDoesNotExpire) {
  say(hello());
  auto attach = rank_of("job", 2, 1, 0);
  attach.timeout_ms = 600'000;
  node.attach(attach);
  for (int i = 0; i < 120; ++i) node.wait(1'000);
  const auto offers = sent<JobOffer>();
  EXPECT_GE(offers.size(), 4u);
  EXPECT_LE(offers.size(), 6u);
  for (const JobOffer& offer : offers) EXPECT_EQ(offer.part_id, offers.front().part_id);
}

}  // namespace
}  // namespace mk::daemon::test
