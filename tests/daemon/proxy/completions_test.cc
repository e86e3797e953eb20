// From completions back to the ring: counters in ring order, whatever order and however often the
// fabric reports.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

TEST(Completions, CountInRingOrderWhateverTheirOwn) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1, 4);
  rig.run();
  const auto writes = rig.endpoint->writes();
  ASSERT_EQ(writes.size(), 4u);
  rig.endpoint->complete(writes[2].cookie);
  rig.endpoint->complete(writes[1].cookie);
  rig.run();
  EXPECT_EQ(session.completed(), 0u);
  EXPECT_EQ(session.lane_stats().completed.value(), 0u);
  EXPECT_EQ(rig.link_stats[0].completed.value(), 2u);
  EXPECT_EQ(rig.link_stats[0].outstanding.value(), 2u);
  rig.endpoint->complete(writes[0].cookie);
  rig.run();
  EXPECT_EQ(session.completed(), 3u);
  rig.endpoint->complete(writes[3].cookie);
  rig.run();
  EXPECT_EQ(session.completed(), 4u);
  EXPECT_EQ(session.lane_stats().completed.value(), 4u);
}

TEST(Completions, LanesCountForThemselves) {
  ProxyRig rig;
  auto& session = rig.add_bound_session({.lanes = 2});
  session.push(1, 1, 0);
  session.push(1, 1, 1);
  rig.run();
  const auto writes = rig.endpoint->writes();
  ASSERT_EQ(writes.size(), 2u);
  rig.endpoint->complete(writes[1].cookie);
  rig.run();
  EXPECT_EQ(session.completed(0), 0u);
  EXPECT_EQ(session.completed(1), 1u);
}

TEST(Completions, AStragglerHoldsTheCountButNotTheLane) {
  ProxyRig rig;
  auto& session = rig.add_bound_session({.outstanding_max = 16});
  session.push(1, 100);
  rig.settle();
  const auto straggler = rig.endpoint->writes().at(0);
  std::size_t done = 1;
  for (int round = 0; round < 100; ++round) {
    const auto writes = rig.endpoint->writes();
    while (done < writes.size()) rig.endpoint->complete(writes[done++].cookie);
    rig.settle();
  }
  EXPECT_EQ(rig.endpoint->writes().size(), 32u)
      << "the window holds twice the outstanding commands, no more";
  EXPECT_EQ(session.completed(), 0u);
  rig.endpoint->complete_at_once = true;
  rig.endpoint->complete(straggler.cookie);
  rig.settle();
  EXPECT_EQ(session.completed(), 100u);
}

TEST(Completions, RandomOrderOverManyLapsOfARing) {
  ProxyRig rig;
  auto& session = rig.add_bound_session({.lanes = 2, .slot_count_log2 = 4, .outstanding_max = 24});
  rig.bind_peer(session, 2, 1);
  std::mt19937 random(5);
  std::vector<std::uint64_t> open;
  std::size_t seen = 0;
  while (session.completed(0) < 3'000 || session.completed(1) < 3'000) {
    for (std::uint32_t lane = 0; lane < 2; ++lane) {
      if (session.producers[lane].produced < 3'000 && random() % 2 == 0) {
        session.producers[lane].try_push(
            write_command(static_cast<std::uint16_t>(1 + random() % 2)));
      }
    }
    rig.steps(1);
    rig.now_ns += 700;
    for (; seen < rig.endpoint->submissions.size(); ++seen) {
      for (const auto& write : rig.endpoint->submissions[seen].writes) open.push_back(write.cookie);
    }
    if (!open.empty() && random() % 3 != 0) {
      const std::size_t pick = random() % open.size();
      rig.endpoint->complete(open[pick]);
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(pick));
    }
    for (std::uint32_t lane = 0; lane < 2; ++lane)
      ASSERT_LE(session.completed(lane), session.consumed(lane));
  }
  rig.settle();
  EXPECT_EQ(rig.proxy->stats().bad_completions.value(), 0u);
  EXPECT_TRUE(rig.events.empty());
}

TEST(Completions, TwiceIsCountedAndChangesNothing) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1, 2);
  rig.run();
  const auto writes = rig.endpoint->writes();
  for (int i = 0; i < 3; ++i) rig.endpoint->complete(writes[1].cookie);
  rig.run();
  EXPECT_EQ(session.completed(), 0u);
  rig.endpoint->complete(writes[0].cookie);
  rig.endpoint->complete(writes[0].cookie);
  rig.run();
  EXPECT_EQ(session.completed(), 2u);
  EXPECT_EQ(rig.proxy->stats().bad_completions.value(), 3u);
  EXPECT_EQ(rig.link_stats[0].outstanding.value(), 0u);
}

TEST(Completions, CookiesFromNowhereAreCounted) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  std::mt19937_64 random(1);
  for (int i = 0; i < 20'000; ++i) rig.endpoint->complete(random());
  rig.run();
  EXPECT_EQ(rig.proxy->stats().bad_completions.value(), 20'000u);
  session.push(1);
  rig.endpoint->complete_at_once = true;
  rig.run();
  EXPECT_EQ(session.completed(), 1u);
}

TEST(Completions, LateOnesOfADrainedSessionDoNotHitItsSuccessor) {
  ProxyRig rig;
  auto& session = rig.add_session(5);
  rig.bind_peer(session, 1, 0);
  session.push(1, 3);
  rig.run();
  const auto writes = rig.endpoint->writes();
  for (const auto& write : writes) rig.endpoint->complete(write.cookie);
  rig.proxy->apply(FenceSession{5});
  rig.run();
  ASSERT_EQ(rig.events_of<Drained>().size(), 1u);

  auto& successor = rig.add_session(5);
  rig.bind_peer(successor, 1, 0);
  successor.push(1, 3);
  rig.run();
  for (const auto& write : writes) rig.endpoint->complete(write.cookie);
  for (const auto& write : writes) rig.endpoint->fail(write.cookie);
  rig.run();
  EXPECT_EQ(successor.completed(), 0u);
  EXPECT_EQ(rig.proxy->stats().bad_completions.value(), 6u);
  EXPECT_TRUE(rig.events_of<SessionFault>().empty());
  for (const auto& write : rig.endpoint->writes()) rig.endpoint->complete(write.cookie);
  rig.run();
  EXPECT_EQ(successor.completed(), 3u);
}

TEST(Completions, AFailedWriteFailsItsSessionAndNamesThePeer) {
  ProxyRig rig;
  auto& session = rig.add_session(0);
  auto& other = rig.add_session(1);
  rig.bind_peer(session, 17, 0);
  rig.bind_peer(other, 1, 1);
  session.push(17, 3);
  other.push(1, 1);
  rig.run();
  std::vector<fabric::Write> of_session;
  for (const auto& submission : rig.endpoint->submissions) {
    if (submission.link == 0) of_session = submission.writes;
    if (submission.link == 1) rig.endpoint->complete(submission.writes[0].cookie);
  }
  ASSERT_EQ(of_session.size(), 3u);
  rig.endpoint->complete(of_session[0].cookie);
  rig.endpoint->fail(of_session[1].cookie);
  rig.endpoint->fail(of_session[2].cookie);
  rig.run();
  const auto faults = rig.events_of<SessionFault>();
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults[0].slot, 0u);
  EXPECT_EQ(faults[0].code, ErrorCode::kLinkDown);
  EXPECT_THAT(faults[0].reason, HasSubstr("lane 0, command 1 to rank 17 failed"));
  EXPECT_EQ(session.completed(), 1u) << "never beyond the failed one";
  EXPECT_EQ(other.completed(), 1u);
  EXPECT_EQ(rig.link_stats[0].errors.value(), 2u);
  EXPECT_EQ(rig.link_stats[0].outstanding.value(), 0u);
}

TEST(Completions, PostToCompletionIsMeasured) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1);
  rig.run();
  rig.now_ns += 5'000'000'000;  // more than 32 bits of nanoseconds
  rig.endpoint->complete(rig.endpoint->writes()[0].cookie);
  rig.run();
  EXPECT_EQ(
      session.lane_stats().post_to_completion.count(LatencyHistogram::bucket_of(5'000'000'000)),
      1u);
}

}  // namespace
}  // namespace mk::daemon::test
