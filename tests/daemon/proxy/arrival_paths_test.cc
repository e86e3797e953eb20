// Arrivals through the engine: to the right session's flag, or counted as bad.
#include <gtest/gtest.h>

#include "shm/flag.h"
#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

TEST(ArrivalPaths, GoToTheSessionInTheImmediate) {
  ProxyRig rig({}, {.name = "scripted", .contract = fabric::DeliveryContract::kUnordered});
  auto& first = rig.add_session(0);
  auto& last = rig.add_session(shm::kSessionsMax - 1);
  rig.endpoint->arrive(shm::make_immediate(shm::kSessionsMax - 1, 200, 3));
  EXPECT_TRUE(rig.proxy->step());
  EXPECT_EQ(last.segment.flags()[200], 3u);
  EXPECT_EQ(first.segment.flags()[200], 0u);
  EXPECT_EQ(rig.proxy->stats().arrivals.value(), 1u);
}

TEST(ArrivalPaths, BadOnesAreCounted) {
  ProxyRig rig;
  rig.add_session(2);
  rig.endpoint->arrive(shm::make_immediate(3, 0, 1));       // no such session
  rig.endpoint->arrive(shm::make_immediate(2, kFlags, 1));  // no such flag
  rig.endpoint->arrive(0xffff'ffffu);
  rig.run();
  EXPECT_EQ(rig.proxy->stats().bad_arrivals.value(), 3u);
  EXPECT_EQ(rig.proxy->stats().arrivals.value(), 0u);
}

// Any peer can make up an immediate with any slot in it. It counts only from nodes that have a part
// of the session's job, and only as long as they have.
TEST(ArrivalPaths, CountOnlyFromNodesOfTheSessionsJob) {
  ProxyRig rig({}, {.name = "scripted",
                    .contract = fabric::DeliveryContract::kUnordered,
                    .arrivals_named = true});
  auto& ours = rig.add_session(0);
  auto& others = rig.add_session(1);
  rig.proxy->apply(AdmitPeer{0, 5, true});
  rig.proxy->apply(AdmitPeer{1, 6, true});
  const auto arrive = [&](SessionSlot slot, fabric::PeerNumber peer, std::uint32_t epoch) {
    rig.endpoint->arrive(shm::make_immediate(slot, 9, epoch), peer);
    rig.run();
  };
  arrive(0, 5, 1);
  EXPECT_EQ(ours.segment.flags()[9], 1u);
  for (const fabric::PeerNumber stranger : {6u, 0u, 127u, 128u, fabric::kAnyPeer}) {
    arrive(0, stranger, 2);
    EXPECT_EQ(ours.segment.flags()[9], 1u) << "raised by peer " << stranger;
  }
  EXPECT_EQ(rig.proxy->stats().bad_arrivals.value(), 5u);
  arrive(1, 6, 3);
  EXPECT_EQ(others.segment.flags()[9], 3u);
  rig.proxy->apply(AdmitPeer{0, 5, false});
  arrive(0, 5, 4);
  EXPECT_EQ(ours.segment.flags()[9], 1u) << "its part was of an earlier run";
  rig.proxy->apply(AdmitPeer{0, 4'000'000'000u, true});  // no node
  rig.run();
}

// A node may be quicker than our next pass.
TEST(ArrivalPaths, ANodeThatWasJustAdmittedIsHeard) {
  ProxyRig rig({}, {.name = "scripted",
                    .contract = fabric::DeliveryContract::kUnordered,
                    .arrivals_named = true});
  auto& session = rig.add_session(0);
  rig.run();
  rig.endpoint->on_poll = [&] { rig.proxy->apply(AdmitPeer{0, 5, true}); };
  rig.endpoint->arrive(shm::make_immediate(0, 9, 1), 5);
  rig.run();
  EXPECT_EQ(session.segment.flags()[9], 1u);
}

TEST(ArrivalPaths, AfterTheSessionIsGoneTheyAreBad) {
  ProxyRig rig;
  rig.add_session(2);
  rig.proxy->apply(FenceSession{2});
  rig.run();
  rig.endpoint->arrive(shm::make_immediate(2, 0, 1));
  rig.run();
  EXPECT_EQ(rig.proxy->stats().bad_arrivals.value(), 1u);
}

}  // namespace
}  // namespace mk::daemon::test
