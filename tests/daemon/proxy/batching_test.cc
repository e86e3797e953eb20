// How commands become submissions: grouping, order, window, back-pressure, limits, and what goes
// into a Write.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "shm/flag.h"
#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

std::vector<std::size_t> sizes(const ScriptedEndpoint& endpoint) {
  std::vector<std::size_t> out;
  for (const auto& submission : endpoint.submissions) out.push_back(submission.writes.size());
  return out;
}

/// The source offsets of a link's writes: the order in which one lane pushed them.
std::vector<std::uint64_t> order_on(const ScriptedEndpoint& endpoint, fabric::LinkId link) {
  std::vector<std::uint64_t> out;
  for (const auto& submission : endpoint.submissions) {
    if (submission.link != link) continue;
    for (const auto& write : submission.writes) out.push_back(write.src_offset);
  }
  return out;
}

TEST(Batching, AWriteCarriesBothContracts) {
  ProxyRig rig;
  auto& session = rig.add_session(3);
  rig.bind_peer(session, 9, 2, /*peer_slot=*/41);
  shm::Command command = write_command(9, 4096, 1000);
  command.dst_offset = 8192;
  command.flag_index = 77;
  command.epoch = 0x12345;
  ASSERT_TRUE(session.producers[0].try_push(command));
  ASSERT_TRUE(session.producers[0].try_push(flag_command(9, 78, 0x12346)));
  rig.run();
  ASSERT_EQ(sizes(*rig.endpoint), std::vector<std::size_t>{2});
  EXPECT_EQ(rig.endpoint->submissions[0].link, 2u);
  const fabric::Write& write = rig.endpoint->submissions[0].writes[0];
  EXPECT_EQ(write.src, &rig.local);
  EXPECT_EQ(write.dst, &rig.remote);
  EXPECT_EQ(write.src_offset, 4096u);
  EXPECT_EQ(write.dst_offset, 8192u);
  EXPECT_EQ(write.bytes, 1000u);
  EXPECT_EQ(write.flags, &rig.remote_flags);
  EXPECT_EQ(write.flag_index, 77u);
  EXPECT_EQ(write.epoch, 0x12345u);
  EXPECT_EQ(write.immediate, shm::make_immediate(41, 77, 0x12345));
  const fabric::Write& flag = rig.endpoint->submissions[0].writes[1];
  EXPECT_EQ(flag.src, nullptr);
  EXPECT_EQ(flag.dst, nullptr);
  EXPECT_EQ(flag.bytes, 0u);
  EXPECT_EQ(flag.immediate, shm::make_immediate(41, 78, 0x12346));
  EXPECT_NE(flag.cookie, write.cookie);
}

TEST(Batching, EightAtMostAndFullOnesGoAtOnce) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1, 19);
  rig.steps(1);
  EXPECT_EQ(sizes(*rig.endpoint), (std::vector<std::size_t>{8, 8})) << "the rest waits for company";
  rig.settle();
  EXPECT_EQ(sizes(*rig.endpoint), (std::vector<std::size_t>{8, 8, 3}));
  EXPECT_EQ(session.lane_stats().commands.value(), 19u);
  EXPECT_EQ(session.lane_stats().bytes.value(), 19u * 64);
  EXPECT_EQ(session.lane_stats().batches.value(), 3u);
  EXPECT_EQ(rig.link_stats[0].messages.value(), 19u);
  EXPECT_EQ(rig.link_stats[0].bytes.value(), 19u * 64);
  EXPECT_EQ(rig.link_stats[0].batches.value(), 3u);
  EXPECT_EQ(rig.link_stats[0].outstanding.value(), 19u);
}

TEST(Batching, AnIdleLinkGetsWhatThereIsWithoutWaiting) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1);
  rig.steps(1);
  EXPECT_EQ(sizes(*rig.endpoint), std::vector<std::size_t>{1});
}

TEST(Batching, ABusyLinksPartialSubmissionWaitsNoLongerThanItsWindow) {
  ProxyOptions options;
  options.batch_window_ns = 2'000;
  ProxyRig rig(options);
  auto& session = rig.add_bound_session();
  session.push(1, 8);
  rig.steps(1);
  session.push(1, 2);
  rig.steps(1);
  rig.now_ns += 1'000;
  session.push(1, 1);
  rig.steps(1);
  rig.now_ns += 999;
  rig.steps(3);
  EXPECT_EQ(sizes(*rig.endpoint), std::vector<std::size_t>{8});
  rig.now_ns += 1;
  rig.steps(1);
  EXPECT_EQ(sizes(*rig.endpoint), (std::vector<std::size_t>{8, 3}));
}

TEST(Batching, AWaitingSubmissionGoesAsSoonAsItIsFullOrTheLinkIdle) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  session.push(1, 8);
  rig.steps(1);
  session.push(1, 5);
  rig.steps(1);
  session.push(1, 3);
  rig.steps(1);
  EXPECT_EQ(sizes(*rig.endpoint), (std::vector<std::size_t>{8, 8}));
  session.push(1, 1);
  rig.steps(1);
  for (const auto& write : rig.endpoint->writes()) rig.endpoint->complete(write.cookie);
  rig.steps(1);
  EXPECT_EQ(sizes(*rig.endpoint), (std::vector<std::size_t>{8, 8, 1}));
}

TEST(Batching, WithoutAWindowNothingWaits) {
  ProxyOptions options;
  options.batch_window_ns = 0;
  ProxyRig rig(options);
  auto& session = rig.add_bound_session();
  session.push(1, 19);
  rig.steps(1);
  EXPECT_EQ(sizes(*rig.endpoint), (std::vector<std::size_t>{8, 8, 3}));
}

TEST(Batching, GroupsByLinkAndKeepsEachLinksOrder) {
  ProxyRig rig;
  auto& session = rig.add_session(0);
  for (std::uint16_t rank = 1; rank <= 3; ++rank) rig.bind_peer(session, rank, rank);
  std::map<fabric::LinkId, std::vector<std::uint64_t>> expected;
  std::mt19937 random(11);
  for (std::uint32_t i = 0; i < 200; ++i) {
    const auto rank = static_cast<std::uint16_t>(1 + random() % 3);
    expected[rank].push_back(session.producers[0].produced);
    session.push(rank);
  }
  rig.settle();
  for (const auto& [link, order] : expected)
    EXPECT_EQ(order_on(*rig.endpoint, link), order) << "link " << link;
  for (const auto& submission : rig.endpoint->submissions)
    EXPECT_LE(submission.writes.size(), shm::kBatchMax);
  EXPECT_LE(rig.endpoint->submissions.size(), 200 / 8 + 3 * 6) << "submissions stay well filled";
}

TEST(Batching, OneSubmissionHoldsSeveralLanesAndSessions) {
  ProxyRig rig;
  auto& first = rig.add_session(0, {.lanes = 2});
  auto& second = rig.add_session(1);
  rig.bind_peer(first, 1, 0);
  rig.bind_peer(second, 1, 0);
  first.push(1, 2, 0);
  first.push(1, 2, 1);
  second.push(1, 3);
  rig.steps(1);
  EXPECT_EQ(sizes(*rig.endpoint), std::vector<std::size_t>{7});
  EXPECT_EQ(first.lane_stats(0).batches.value(), 1u);
  EXPECT_EQ(first.lane_stats(1).batches.value(), 1u);
  EXPECT_EQ(second.lane_stats(0).batches.value(), 1u);
  EXPECT_EQ(rig.link_stats[0].batches.value(), 1u);
}

TEST(Batching, WhateverPostTakesNothingIsLostOrReordered) {
  for (std::size_t most = 0; most <= shm::kBatchMax; ++most) {
    ProxyRig rig;
    auto& session = rig.add_bound_session({.outstanding_max = 512});
    std::mt19937 random(static_cast<unsigned>(most));
    bool stuck = true;
    rig.endpoint->accept = [&](fabric::LinkId, std::size_t) {
      return stuck ? 0 : random() % (most + 1);
    };
    session.push(1, 200);
    rig.steps(50);
    EXPECT_TRUE(rig.endpoint->submissions.empty());
    EXPECT_LE(session.consumed(), shm::kBatchMax + 1) << "what cannot be posted stays in the ring";
    EXPECT_GT(session.lane_stats().credit_stalls.value(), 0u);
    stuck = false;
    for (int i = 0; i < 2'000; ++i) {
      rig.steps(1);
      rig.now_ns += 1'000;
    }
    if (most == 0) {
      EXPECT_TRUE(rig.endpoint->submissions.empty());
      continue;
    }
    const auto order = order_on(*rig.endpoint, 0);
    ASSERT_EQ(order.size(), 200u) << "up to " << most << " per post";
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
}

TEST(Batching, ARefusedSubmissionIsOfferedOnceAPass) {
  ProxyRig rig;
  auto& session = rig.add_bound_session({.lanes = 8});
  rig.endpoint->accept = [](fabric::LinkId, std::size_t) { return 0; };
  for (std::uint32_t lane = 0; lane < 8; ++lane) session.push(1, 8, lane);
  rig.steps(10);
  EXPECT_LE(rig.endpoint->offered.size(), 10u);
}

TEST(Batching, AStuckLinkHoldsUpNobodyElse) {
  ProxyRig rig;
  auto& session = rig.add_bound_session({.lanes = 2});
  rig.bind_peer(session, 2, 1);
  rig.endpoint->accept = [](fabric::LinkId link, std::size_t offered) {
    return link == 0 ? 0 : offered;
  };
  rig.endpoint->complete_at_once = true;
  session.push(1, 100, 0);
  session.push(2, 300, 1);
  rig.settle();
  EXPECT_EQ(order_on(*rig.endpoint, 1).size(), 300u);
  EXPECT_EQ(session.completed(1), 300u);
  EXPECT_EQ(session.completed(0), 0u);
}

TEST(Batching, TheLinksDepthIsNeverExceeded) {
  ProxyRig rig({}, {.name = "scripted", .link_depth = 21});
  auto& session = rig.add_bound_session();
  session.push(1, 100);
  rig.settle();
  EXPECT_EQ(rig.endpoint->writes().size(), 21u);
  std::size_t completed = 0;
  while (completed < 100) {
    const auto writes = rig.endpoint->writes();
    ASSERT_LE(writes.size() - completed, 21u);
    ASSERT_LT(completed, writes.size());
    rig.endpoint->complete(writes[completed++].cookie);
    rig.settle();
  }
  EXPECT_EQ(session.completed(), 100u);
}

TEST(Batching, TakenSlotsAreFreeAtOnceAndNoEarlier) {
  ProxyRig rig;
  auto& session = rig.add_bound_session({.slot_count_log2 = 4, .outstanding_max = 256});
  session.push(1, 16);
  EXPECT_FALSE(session.producers[0].try_push(write_command(1)));
  EXPECT_EQ(session.consumed(), 0u);
  rig.run();
  EXPECT_EQ(session.consumed(), 16u);
  EXPECT_EQ(session.completed(), 0u);
  session.push(1, 16);  // while all the earlier ones are still in flight
  rig.settle();
  EXPECT_EQ(rig.endpoint->writes().size(), 32u);
}

TEST(Batching, OutstandingIsBoundedOverAllLanes) {
  ProxyRig rig;
  auto& session = rig.add_bound_session({.lanes = 3, .outstanding_max = 20});
  for (std::uint32_t lane = 0; lane < 3; ++lane) session.push(1, 30, lane);
  rig.settle();
  EXPECT_EQ(rig.endpoint->writes().size(), 20u);
  EXPECT_EQ(session.consumed(0) + session.consumed(1) + session.consumed(2), 20u);
  const std::uint64_t stalls = session.lane_stats(0).credit_stalls.value();
  EXPECT_GT(stalls, 0u);
  rig.endpoint->complete_at_once = true;
  for (const auto& write : rig.endpoint->writes()) rig.endpoint->complete(write.cookie);
  rig.settle();
  for (std::uint32_t lane = 0; lane < 3; ++lane) EXPECT_EQ(session.completed(lane), 30u);
}

TEST(Batching, CommitToPostComesFromTheProducersClock) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  rig.now_ns = (7ull << 32) + 100;  // the low half has just wrapped
  const auto push = [&](std::uint32_t commit_time_ns) {
    shm::Command command = write_command(1);
    command.commit_time_ns = commit_time_ns;
    ASSERT_TRUE(session.producers[0].try_push(command));
  };
  push(0xffff'ffffu - 99);  // 200 ns ago
  push(0);                  // not taken
  push(5'000'000);          // in the future: nonsense
  rig.run();
  const LatencyHistogram& histogram = session.lane_stats().commit_to_post;
  std::uint64_t total = 0;
  for (std::uint32_t i = 0; i < LatencyHistogram::kBuckets; ++i) total += histogram.count(i);
  EXPECT_EQ(total, 1u);
  EXPECT_EQ(histogram.count(LatencyHistogram::bucket_of(200)), 1u);
}

}  // namespace
}  // namespace mk::daemon::test
