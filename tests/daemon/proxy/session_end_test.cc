// How a session ends: fences, faults, links that go down, and when its memory is nobody's any more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

TEST(SessionEnd, AFenceWaitsForWhatIsInFlightAndTakesNothingMore) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1, 8);
  rig.run();
  session.push(1, 8);
  rig.proxy->apply(FenceSession{0});
  rig.run();
  EXPECT_EQ(session.consumed(), 8u);
  EXPECT_TRUE(rig.events.empty());
  const auto writes = rig.endpoint->writes();
  ASSERT_EQ(writes.size(), 8u);
  for (std::size_t i = 0; i < 7; ++i) rig.endpoint->complete(writes[i].cookie);
  rig.run();
  EXPECT_TRUE(rig.events.empty());
  rig.endpoint->fail(writes[7].cookie);
  rig.run();
  EXPECT_EQ(rig.events_of<Drained>().size(), 1u);
  EXPECT_TRUE(rig.events_of<SessionFault>().empty()) << "it was fenced already";
}

TEST(SessionEnd, AFenceDropsWhatWasTakenButNotPosted) {
  ProxyRig rig;
  auto& session = rig.add_session(0);
  auto& other = rig.add_session(1);
  rig.bind_peer(session, 1, 0);
  rig.bind_peer(other, 1, 0);
  bool open = false;
  rig.endpoint->accept = [&](fabric::LinkId, std::size_t offered) { return open ? offered : 0; };
  session.push(1, 4);
  rig.steps(1);
  other.push(1, 3);
  rig.steps(1);
  session.push(1, 20);
  rig.steps(3);
  rig.proxy->apply(FenceSession{0});
  rig.steps(1);
  EXPECT_EQ(rig.events_of<Drained>().size(), 1u) << "nothing of it was with the fabric";
  open = true;
  rig.endpoint->complete_at_once = true;
  rig.settle();
  EXPECT_EQ(rig.endpoint->writes().size(), 3u);
  EXPECT_EQ(other.completed(), 3u);
}

TEST(SessionEnd, AnEmptySessionDrainsAtOnceAndAnUnknownOneToo) {
  ProxyRig rig;
  rig.add_session(9);
  rig.proxy->apply(FenceSession{9});
  rig.proxy->apply(FenceSession{10});
  rig.steps(1);
  const auto drained = rig.events_of<Drained>();
  ASSERT_EQ(drained.size(), 2u);
  EXPECT_EQ(drained[0].slot + drained[1].slot, 19u);
}

TEST(SessionEnd, TwoFencesAreOneAnswer) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1);
  rig.run();
  rig.proxy->apply(FenceSession{0});
  rig.proxy->apply(FenceSession{0});
  rig.run();
  rig.endpoint->complete(rig.endpoint->writes()[0].cookie);
  rig.run();
  EXPECT_EQ(rig.events_of<Drained>().size(), 1u);
}

TEST(SessionEnd, AFaultFencesButOnlyAFenceIsAnsweredByDrained) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1);
  session.push(2);  // no such peer
  session.push(1);
  rig.run();
  ASSERT_EQ(rig.events.size(), 1u);
  const auto fault = rig.events_of<SessionFault>().at(0);
  EXPECT_EQ(fault.code, ErrorCode::kBadCommand);
  EXPECT_EQ(fault.reason,
            "lane 0, command 1: peer is rank 2: the session's rail peers are ranks 1");
  EXPECT_EQ(session.lane_stats().commands.value(), 1u) << "only valid ones count";
  rig.proxy->apply(FenceSession{0});
  rig.run();
  EXPECT_EQ(rig.events_of<Drained>().size(), 1u)
      << "the command before the bad one was not yet posted: dropped";
  EXPECT_TRUE(rig.endpoint->submissions.empty());
}

TEST(SessionEnd, ALinkThatGoesDownFailsAllItsSessionsAndNoOther) {
  ProxyRig rig;
  auto& first = rig.add_session(0);
  auto& second = rig.add_session(1);
  auto& other = rig.add_session(2);
  rig.bind_peer(first, 4, 0);
  rig.bind_peer(first, 8, 1);
  rig.bind_peer(second, 8, 1);
  rig.bind_peer(other, 4, 0);
  first.push(8, 2);
  rig.run();
  rig.endpoint->link_down(1);
  rig.endpoint->link_down(1);
  for (const auto& write : rig.endpoint->writes()) rig.endpoint->fail(write.cookie);
  rig.run();
  const auto faults = rig.events_of<SessionFault>();
  ASSERT_EQ(faults.size(), 2u);
  for (const auto& fault : faults) {
    EXPECT_NE(fault.slot, 2u);
    EXPECT_EQ(fault.code, ErrorCode::kLinkDown);
    EXPECT_THAT(fault.reason, HasSubstr("rank 8"));
  }
  const auto down = rig.events_of<LinkDown>();
  ASSERT_EQ(down.size(), 1u);
  EXPECT_EQ(down[0].link, 1u);
  EXPECT_EQ(down[0].code, ErrorCode::kUnavailable);
  rig.proxy->apply(FenceSession{0});
  rig.proxy->apply(FenceSession{1});
  rig.run();
  EXPECT_EQ(rig.events_of<Drained>().size(), 2u);
  other.push(4);
  rig.endpoint->complete_at_once = true;
  rig.run();
  EXPECT_EQ(other.completed(), 1u);
}

TEST(SessionEnd, ALinkReportedDownBeforeThePeerIsBoundFailsTheSessionAllTheSame) {
  ProxyRig rig;
  rig.endpoint->link_down(3);
  rig.run();
  EXPECT_EQ(rig.events_of<LinkDown>().size(), 1u);
  auto& session = rig.add_session(0);
  rig.bind_peer(session, 6, 3);
  rig.run();
  ASSERT_EQ(rig.events_of<SessionFault>().size(), 1u);
  EXPECT_THAT(rig.events_of<SessionFault>()[0].reason, HasSubstr("rank 6"));
}

TEST(SessionEnd, ABufferIsReleasedWhenNoWriteNamesIt) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  FakeLocalRegion second;
  rig.proxy->apply(BindBuffer{0, 8, &second, kBufferBytes});
  shm::Command from_second = write_command(1);
  from_second.src_handle = 8;
  session.push(1);
  ASSERT_TRUE(session.producers[0].try_push(from_second));
  rig.run();
  rig.proxy->apply(UnbindBuffer{0, kHandle});
  rig.proxy->apply(UnbindBuffer{0, 8});
  rig.proxy->apply(UnbindBuffer{0, 900});
  rig.proxy->apply(UnbindBuffer{33, 5});  // a session long gone
  rig.run();
  std::vector<std::uint16_t> released;
  const auto handles = [&] {
    released.clear();
    for (const auto& event : rig.events_of<BufferReleased>()) released.push_back(event.handle);
    return released;
  };
  EXPECT_THAT(handles(), testing::UnorderedElementsAre(900, 5));
  rig.endpoint->complete(rig.endpoint->writes()[1].cookie);
  rig.run();
  EXPECT_THAT(handles(), testing::UnorderedElementsAre(900, 5, 8));
  rig.endpoint->complete(rig.endpoint->writes()[0].cookie);
  rig.run();
  EXPECT_THAT(handles(), testing::UnorderedElementsAre(900, 5, 8, kHandle));
  session.push(1);
  rig.run();
  ASSERT_EQ(rig.events_of<SessionFault>().size(), 1u);
  EXPECT_THAT(rig.events_of<SessionFault>()[0].reason, HasSubstr("source handle is 7"));
}

TEST(SessionEnd, APeersBufferIsReleasedWhenNoWriteNamesIt) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  rig.bind_peer(session, 2, 1);
  bool open = false;
  rig.endpoint->accept = [&](fabric::LinkId link, std::size_t offered) {
    return open || link == 1 ? offered : 0;
  };
  session.push(2);
  session.push(1);  // taken, but its link refuses it
  rig.steps(3);
  rig.proxy->apply(UnbindPeerBuffer{0, 1, kHandle});
  rig.proxy->apply(UnbindPeerBuffer{0, 3, kHandle});
  rig.steps(2);
  ASSERT_EQ(rig.events_of<PeerBufferReleased>().size(), 1u);
  EXPECT_EQ(rig.events_of<PeerBufferReleased>()[0].peer_rank, 3u);
  open = true;
  rig.endpoint->complete_at_once = true;
  rig.settle();
  ASSERT_EQ(rig.events_of<PeerBufferReleased>().size(), 2u);
  EXPECT_EQ(rig.events_of<PeerBufferReleased>()[1].peer_rank, 1u);
  EXPECT_TRUE(rig.events_of<SessionFault>().empty()) << "the command was valid when it was taken";
}

TEST(SessionEnd, WaitingReleasesAreAnsweredBeforeDrained) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1);
  rig.run();
  rig.proxy->apply(UnbindBuffer{0, kHandle});
  rig.proxy->apply(FenceSession{0});
  rig.run();
  EXPECT_TRUE(rig.events.empty());
  rig.endpoint->complete(rig.endpoint->writes()[0].cookie);
  rig.run();
  ASSERT_EQ(rig.events.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<BufferReleased>(rig.events[0]));
  EXPECT_TRUE(std::holds_alternative<Drained>(rig.events[1]));
}

TEST(SessionEnd, ASlotInUseIsRefused) {
  ProxyRig rig;
  auto& session = rig.add_session(0);
  rig.add_session(0);
  rig.bind_peer(session, 1, 0);
  rig.run();
  ASSERT_EQ(rig.events_of<SessionFault>().size(), 1u);
  EXPECT_EQ(rig.events_of<SessionFault>()[0].code, ErrorCode::kInternal);
  session.push(1);
  rig.endpoint->complete_at_once = true;
  rig.run();
  EXPECT_EQ(session.completed(), 1u) << "the one that was there goes on";
}

TEST(SessionEnd, SlotsAreReusedManyTimesWithWorkInFlight) {
  ProxyRig rig;
  rig.endpoint->complete_at_once = true;
  auto& neighbour = rig.add_session(1);
  rig.bind_peer(neighbour, 1, 0);
  for (int generation = 0; generation < 200; ++generation) {
    TestSession session(0, {.lanes = 2});
    rig.add_again(session);
    rig.bind_peer(session, 1, 0);
    rig.bind_peer(session, 2, static_cast<fabric::LinkId>(1 + generation % 3));
    rig.steps(1);
    session.push(1, 5, 0);
    session.push(2, 5, 1);
    neighbour.push(1);
    rig.steps(generation % 3);
    rig.proxy->apply(FenceSession{0});
    rig.settle();
    ASSERT_EQ(rig.events_of<Drained>().size(), static_cast<std::size_t>(generation) + 1);
  }
  EXPECT_EQ(neighbour.completed(), 200u);
  EXPECT_TRUE(rig.events_of<SessionFault>().empty());
}

}  // namespace
}  // namespace mk::daemon::test
