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
