// Whom who-is-slow names, and whom it does not.
#include "daemon/mkctl/slow.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace mk::mkctl {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kSecond = 1'000'000'000;

/// A node with some of a job's ranks, looked at twice, a second apart.
class Node {
 public:
  explicit Node(std::uint32_t node) {
    look_.before.set_node(node);
    look_.after.set_node(node);
    look_.after.set_elapsed_ns(kSecond);
  }
  Node& rank(std::uint32_t rank, std::uint64_t before, std::uint64_t after,
             std::uint64_t standing_ns = 5 * kSecond) {
    for (v1::StatsSample* sample : {&look_.before, &look_.after}) {
      v1::Session& session = *sample->add_ranks();
      session.set_session_id(rank + 1);
      session.set_job("train");
      session.set_rank(rank);
      session.set_world(4);
      session.set_state("up");
      session.set_launches(sample == &look_.before ? before : after);
      session.set_launches_for_ns(before == after ? standing_ns : kSecond / 100);
    }
    return *this;
  }
  /// What the rank that was added last says of itself: ten looks in a launch between the two, in
  /// `waiting` of which it waited for `whom`; in the last one, too, if in any.
  Node& says(std::uint64_t waiting, std::int32_t whom = -1) {
    for (v1::StatsSample* sample : {&look_.before, &look_.after}) {
      const bool first = sample == &look_.before;
      v1::Session& session = *sample->mutable_ranks(sample->ranks_size() - 1);
      v1::Progress& progress = *session.mutable_progress();
      progress.set_op("gemm_ar");
      progress.set_epoch(21);
      progress.set_tiles(128);
      progress.set_tiles_done(waiting == 0 ? 3 : 128);
      progress.set_phase(waiting == 0 ? "compute" : "reduce");
      if (waiting != 0) progress.set_waits_for("a tile");
      progress.set_waits_for_rank(whom);
      progress.set_phase_for_ns(4 * kSecond);
      progress.set_looks(first ? 100 : 110);
      progress.set_looks_in_launch(first ? 100 : 110);
      progress.set_looks_waiting(first ? 50 : 50 + waiting);
    }
    return *this;
  }
  /// The rank that was added last is in an exchange that `whom` has not joined, all the while.
  Node& exchanges(std::int32_t whom) {
    for (v1::StatsSample* sample : {&look_.before, &look_.after}) {
      v1::Session& session = *sample->mutable_ranks(sample->ranks_size() - 1);
      v1::Progress& progress = *session.mutable_progress();
      progress.set_phase("exchange");
      progress.set_waits_for("exchange 'more'");
      progress.set_waits_for_rank(whom);
      progress.set_phase_for_ns(4 * kSecond);
      progress.set_looks(sample == &look_.before ? 100 : 110);
      progress.set_looks_waiting(sample == &look_.before ? 50 : 60);
    }
    return *this;
  }
  v1::Link& link(std::uint64_t outstanding, std::uint64_t stalled_ns) {
    v1::Link& link = *look_.after.add_links();
    link.set_peer(9);
    link.set_state("up");
    link.set_outstanding(outstanding);
    link.set_stalled_for_ns(stalled_ns);
    return link;
  }
  Look look_;
};

Slowness find(const std::vector<Node>& nodes) {
  std::vector<Look> looks;
  for (const Node& node : nodes) looks.push_back(node.look_);
  return find_slow(looks);
}

TEST(WhoIsSlow, NobodyWhenAllMove) {
  const auto found =
      find({Node(0).rank(0, 10, 20).rank(1, 10, 20), Node(1).rank(2, 11, 21).rank(3, 10, 19)});
  EXPECT_TRUE(found.findings.empty());
  ASSERT_EQ(found.jobs.size(), 1u);
  EXPECT_EQ(found.jobs[0].ranks_seen, 4u);
  EXPECT_DOUBLE_EQ(found.jobs[0].launches_per_second, 4.5);
  EXPECT_THAT(render(found), HasSubstr("no rank is behind"));
}

TEST(WhoIsSlow, AJobWhoseRanksAreAllInNoLaunchIsIdle) {
  constexpr const char* kOutside = "no rank is in a launch";
  const auto idle = find({Node(0).rank(0, 20, 20).rank(1, 20, 20)});
  EXPECT_TRUE(idle.findings.empty());
  EXPECT_TRUE(idle.jobs[0].idle);
  EXPECT_THAT(render(idle), HasSubstr(kOutside));
  // One began a launch, or is in one.
  for (const std::uint64_t after : {21u, 22u}) {
    const auto moves = find({Node(0).rank(0, 20, 20).rank(1, 20, after)});
    EXPECT_FALSE(moves.jobs[0].idle);
    EXPECT_THAT(render(moves), testing::Not(HasSubstr(kOutside)));
  }
  EXPECT_FALSE(find({Node(0).rank(0, 21, 21).rank(1, 21, 21)}).jobs[0].idle);
}

TEST(WhoIsSlow, TheRankThatHasNotBegunTheLaunchTheOthersAreIn) {
  const auto found =
      find({Node(0).rank(0, 41, 41).rank(1, 41, 41), Node(1).rank(2, 41, 41).rank(3, 40, 40)});
  ASSERT_EQ(found.findings.size(), 1u);
  const Finding& one = found.findings[0];
  EXPECT_EQ(one.kind, "rank-behind");
  EXPECT_EQ(one.rank, 3);
  EXPECT_EQ(one.node, 1u);
  EXPECT_EQ(one.for_ns, 5 * kSecond);
  EXPECT_EQ(one.why, "has not begun launch 21; ranks 0, 1, 2 are in launch 21");
}

TEST(WhoIsSlow, TheRankThatIsStillInTheLaunchBefore) {
  const auto found = find({Node(0).rank(0, 43, 43).rank(1, 39, 39)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].rank, 1);
  EXPECT_EQ(found.findings[0].why,
            "still in launch 20; rank 0 is in launch 22; or it waits for a rank that was not seen");
  EXPECT_THAT(render(found), HasSubstr("only 2 of 4 ranks were seen"));
}

TEST(WhoIsSlow, AllInOneLaunchNamesTheLastToEnter) {
  const auto found = find({Node(0).rank(0, 41, 41, 9 * kSecond).rank(1, 41, 41, 2 * kSecond),
                           Node(1).rank(2, 41, 41, 9 * kSecond).rank(3, 41, 41, 9 * kSecond)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].kind, "launch-long");
  EXPECT_EQ(found.findings[0].rank, 1);
  EXPECT_EQ(found.findings[0].for_ns, 2 * kSecond);
}

TEST(WhoIsSlow, NobodyWhoIsSeenTakesTheBlameOfThoseWhoAreNot) {
  // Rank 3, on a node that was not asked, is stopped: 1 came last, and waits like 0.
  const auto found = find({Node(0).rank(0, 41, 41, 9 * kSecond).rank(1, 41, 41, 2 * kSecond)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].kind, "launch-long");
  EXPECT_EQ(found.findings[0].rank, -1);
  EXPECT_EQ(found.findings[0].who, "2 of 4 ranks, which were not seen");
  EXPECT_THAT(found.findings[0].why, HasSubstr("ask the other nodes, too (--hosts)"));
}

TEST(WhoIsSlow, TheRankWhoseProcessDoesNotRun) {
  // In the launch that all are in, though another came last; behind; in front.
  for (const std::uint64_t launches : {41u, 40u, 43u}) {
    Node node(0);
    node.rank(0, 41, 41, 2 * kSecond).rank(1, launches, launches, 9 * kSecond);
    node.look_.after.mutable_ranks(1)->set_reason("its process has not run for 8.7 s");
    const auto found = find({node});
    ASSERT_GE(found.findings.size(), 1u);
    const Finding& one = found.findings[0];
    EXPECT_EQ(one.kind, "rank-stopped");
    EXPECT_EQ(one.rank, 1);
    EXPECT_EQ(one.why, "its process has not run for 8.7 s");
    EXPECT_EQ(one.for_ns, 9 * kSecond);
    // Who is named is named once; rank 0 only where it is behind.
    EXPECT_EQ(found.findings.size(), launches == 43 ? 2u : 1u);
  }
}

TEST(WhoIsSlow, TheRankThatComputesWhileOthersWait) {
  // In one launch that lasts; and where all move on, so that none is behind.
  for (const std::uint64_t after : {41u, 61u}) {
    const auto found = find({Node(0).rank(0, 41, after).says(10, 3).rank(1, 41, after).says(9, 0),
                             Node(1).rank(2, 41, after).says(10, 3).rank(3, 41, after).says(0)});
    ASSERT_EQ(found.findings.size(), 1u);
    const Finding& one = found.findings[0];
    EXPECT_EQ(one.kind, "rank-holds");
    EXPECT_EQ(one.rank, 3);
    EXPECT_EQ(one.node, 1u);
    EXPECT_EQ(one.for_ns, 4 * kSecond);
    EXPECT_EQ(one.why,
              "works: gemm_ar launch 21, compute, 3 of 128 tiles; meanwhile ranks 0, 1, 2 wait at "
              "least 90% of the time, rank 0 in reduce of gemm_ar launch 21 for a tile of rank 3");
  }
}

TEST(WhoIsSlow, WhatARankDoesIsNotTheInstantInWhichItWaits) {
  Node node(1);
  node.rank(3, 41, 61).says(0);
  v1::Progress& now = *node.look_.after.mutable_ranks(0)->mutable_progress();
  now.set_phase("collect");
  now.set_waits_for("a result");
  now.set_waits_for_rank(2);
  const auto found = find({Node(0).rank(0, 41, 61).says(10, 3).rank(2, 41, 61).says(10, 3), node});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_THAT(found.findings[0].why,
              testing::StartsWith("works: gemm_ar launch 21, compute, 3 of 128 tiles; "));
}

TEST(WhoIsSlow, OfSeveralThatWorkTheOneThatTheWaitsLeadTo) {
  const auto found = find({Node(0).rank(0, 41, 61).says(10, 1).rank(1, 41, 61).says(0),
                           Node(1).rank(2, 41, 61).says(0).rank(3, 41, 61).says(9, 0)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].rank, 1);
}

TEST(WhoIsSlow, NotTheRanksThatWaitInAnExchangeForTheOneThatIsStopped) {
  // Ranks 0 and 1 are through with the launch in which rank 3 waits for rank 2.
  Node other(1);
  other.rank(2, 41, 41).says(0).rank(3, 41, 41).says(10, 2);
  other.look_.after.mutable_ranks(0)->set_reason("its process has not run for 8.7 s");
  const auto found =
      find({Node(0).rank(0, 42, 42).exchanges(2).rank(1, 42, 42).exchanges(2), other});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].kind, "rank-stopped");
  EXPECT_EQ(found.findings[0].rank, 2);
  // They may do anything else out of sight of the daemon, too: nobody's waits lead to them.
  const auto hidden = find({Node(0).rank(0, 42, 42).says(0).rank(1, 42, 42).says(0), other});
  ASSERT_EQ(hidden.findings.size(), 1u);
  EXPECT_EQ(hidden.findings[0].rank, 2);
}

TEST(WhoIsSlow, TheRankThatComputesWhileOthersWaitInAnExchange) {
  const auto found = find({Node(0).rank(0, 42, 42).exchanges(2).rank(1, 42, 42).exchanges(2),
                           Node(1).rank(2, 41, 41).says(0).rank(3, 42, 42).exchanges(2)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].kind, "rank-holds");
  EXPECT_EQ(found.findings[0].rank, 2);
  EXPECT_EQ(found.findings[0].why,
            "works: gemm_ar launch 21, compute, 3 of 128 tiles; meanwhile ranks 0, 1, 3 wait all "
            "the time, rank 0 in exchange 'more', which rank 2 has not joined");
}

TEST(WhoIsSlow, ARankWhoseProcessIsInAnotherGroup) {
  // The process of rank 1 waits in the job 'dp', so that rank 0 waits for it in 'train'.
  Node node(0);
  node.rank(0, 41, 41).says(10, 1).rank(1, 40, 40).says(0);
  node.rank(5, 31, 31).says(10, 7);
  for (v1::StatsSample* sample : {&node.look_.before, &node.look_.after}) {
    sample->mutable_ranks(1)->set_pid(4711);
    sample->mutable_ranks(1)->mutable_progress()->set_looks_in_launch(100);
    sample->mutable_ranks(2)->set_pid(4711);
    sample->mutable_ranks(2)->set_job("dp");
  }
  const auto found = find({node}).findings;
  const auto holder = std::find_if(found.begin(), found.end(), [](const Finding& one) {
    return one.job == "train" && one.kind == "rank-holds";
  });
  ASSERT_NE(holder, found.end());
  EXPECT_EQ(holder->rank, 1);
  EXPECT_THAT(holder->why,
              testing::StartsWith("in no launch: its process is in job 'dp', gemm_ar launch 21, "
                                  "reduce waits for a tile of rank 7"));
}

TEST(WhoIsSlow, NobodyWhoIsSeenWhereTheWaitsLeadElsewhere) {
  const auto found = find({Node(0).rank(0, 42, 42).exchanges(2).rank(1, 41, 41).says(0)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].rank, -1);
  EXPECT_EQ(found.findings[0].who, "2 of 4 ranks, which were not seen");
  EXPECT_EQ(found.findings[0].why,
            "rank 0 waits all the time, rank 0 in exchange 'more', which rank 2 has not joined; "
            "ask the other nodes, too (--hosts)");
}

TEST(WhoIsSlow, NobodyWhereAllWaitForEachOtherALittle) {
  const auto found = find({Node(0).rank(0, 41, 61).says(4, 1).rank(1, 41, 61).says(4, 0),
                           Node(1).rank(2, 41, 61).says(5, 3).rank(3, 41, 61).says(2, 2)});
  EXPECT_TRUE(found.findings.empty());
}

/// A job of four ranks that wait so many percent of the time, over `looks` looks in launches.
std::vector<Node> waiting(const std::vector<std::uint64_t>& percent, std::uint64_t looks) {
  std::vector<Node> nodes{Node(0), Node(1)};
  for (std::uint32_t rank = 0; rank < percent.size(); ++rank) {
    Node& node = nodes[rank / 2];
    node.rank(rank, 41, 61).says(percent[rank], 3);
    v1::Session& after = *node.look_.after.mutable_ranks(node.look_.after.ranks_size() - 1);
    after.mutable_progress()->set_looks(100 + looks);
    after.mutable_progress()->set_looks_in_launch(100 + looks);
    after.mutable_progress()->set_looks_waiting(50 + percent[rank] * looks / 100);
  }
  return nodes;
}

TEST(WhoIsSlow, TheRankThatIsAFifthSlower) {
  const auto found = find(waiting({20, 17, 19, 2}, 100));
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].kind, "rank-slower");
  EXPECT_EQ(found.findings[0].rank, 3);
  EXPECT_EQ(found.findings[0].node, 1u);
  EXPECT_EQ(found.findings[0].why,
            "waits 2% of the time, the other ranks at least 17%: slower by about 18%");
  EXPECT_EQ(found.findings[0].for_ns, kSecond);
  const auto two = find(waiting({20, 3, 19, 2}, 100));
  ASSERT_EQ(two.findings.size(), 2u);
  EXPECT_EQ(two.findings[0].rank, 1);
  EXPECT_EQ(two.findings[1].rank, 3);
}

TEST(WhoIsSlow, NobodyIsSlowerByChanceOrByHalfATruth) {
  EXPECT_TRUE(find(waiting({20, 17, 19, 2}, 50)).findings.empty()) << "too few looks";
  EXPECT_TRUE(find(waiting({20, 10, 19, 2}, 100)).findings.empty()) << "no clear gap";
  EXPECT_TRUE(find(waiting({8, 9, 7, 8}, 100)).findings.empty()) << "all alike";
  // One of them says nothing of itself.
  auto nodes = waiting({20, 17, 19}, 100);
  nodes[1].rank(3, 41, 61);
  EXPECT_TRUE(find(nodes).findings.empty());
}

/// Two ranks of two nodes: 1 waits for what 0 has sent, which is on its way at both looks or not.
std::vector<Node> sent(bool under_way, std::uint64_t sender_waiting, bool sender_in_launch) {
  std::vector<Node> nodes{Node(0).rank(0, 41, 61).says(sender_waiting, 1),
                          Node(1).rank(1, 41, 61).says(10, 0)};
  if (!sender_in_launch)
    nodes[0].look_.after.mutable_ranks(0)->mutable_progress()->set_looks_in_launch(101);
  for (v1::StatsSample* sample : {&nodes[0].look_.before, &nodes[0].look_.after}) {
    v1::Link& link = *sample->add_links();
    const bool first = sample == &nodes[0].look_.before;
    link.set_peer(1);
    link.set_state("up");
    link.set_outstanding(under_way || first ? 3 : 0);
    link.set_bytes(first ? 1000000 : 6000000);
  }
  return nodes;
}

TEST(WhoIsSlow, TheLinkThatCarriesWhatIsAwaitedAndNotTheSender) {
  for (const bool in_launch : {false, true}) {
    const auto found = find(sent(true, in_launch ? 9 : 0, in_launch));
    ASSERT_EQ(found.findings.size(), 1u);
    const Finding& one = found.findings[0];
    EXPECT_EQ(one.kind, "link-slow");
    EXPECT_EQ(one.who, "the link of rail 0 from node 0 to node 1");
    EXPECT_EQ(
        one.why,
        "moves 5.00 MB/s, 3 writes outstanding; meanwhile rank 1 waits all the time, rank 1 in "
        "reduce of gemm_ar launch 21 for a tile of rank 0");
    EXPECT_EQ(one.for_ns, 4 * kSecond);
  }
}

TEST(WhoIsSlow, TheSenderWhereItsLinkIsFreeOrItStillWorks) {
  for (const auto& nodes : {sent(false, 0, false), sent(true, 0, true)}) {
    const auto found = find(nodes);
    ASSERT_EQ(found.findings.size(), 1u);
    EXPECT_EQ(found.findings[0].kind, "rank-holds");
    EXPECT_EQ(found.findings[0].rank, 0);
  }
}

TEST(WhoIsSlow, ARankThatWaitsIsNotBehind) {
  // Rank 1 is a launch behind rank 0, and waits there for rank 2, which has not come.
  const auto found = find({Node(0).rank(0, 43, 43).says(10, 1).rank(1, 41, 41).says(10, 2),
                           Node(1).rank(2, 40, 40).rank(3, 41, 41).says(10, 2)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].kind, "rank-behind");
  EXPECT_EQ(found.findings[0].rank, 2);
}

TEST(WhoIsSlow, NotTheRanksThatWaitForTheOneNamed) {
  // Rank 0 left launch 21 before rank 3 stopped in it; 1 and 2 cannot.
  Node node(0);
  node.rank(0, 43, 43).rank(1, 41, 41).rank(2, 41, 41).rank(3, 41, 41);
  node.look_.after.mutable_ranks(3)->set_reason("its process has not run for 8.7 s");
  const auto stopped = find({node});
  ASSERT_EQ(stopped.findings.size(), 1u);
  EXPECT_EQ(stopped.findings[0].rank, 3);
  // The same where 3 has not come to launch 21, and nobody knows why.
  const auto late = find({Node(0).rank(0, 43, 43).rank(1, 41, 41).rank(2, 41, 41).rank(3, 40, 40)});
  ASSERT_EQ(late.findings.size(), 1u);
  EXPECT_EQ(late.findings[0].rank, 3);
}

TEST(WhoIsSlow, AllThatStandOnTheSameLaunchOrBetweenTwo) {
  // In launch 21 both may be the one; between two launches nobody waits for anybody.
  const auto inside = find({Node(0).rank(0, 43, 43).rank(1, 41, 41).rank(2, 41, 41)});
  EXPECT_EQ(inside.findings.size(), 2u);
  const auto between = find({Node(0).rank(0, 43, 43).rank(1, 42, 42).rank(2, 40, 40)});
  EXPECT_EQ(between.findings.size(), 2u);
}

TEST(WhoIsSlow, OneThatMovesExcusesNobody) {
  const auto found = find({Node(0).rank(0, 43, 43).rank(1, 41, 41).rank(2, 37, 39)});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].rank, 1);
}

TEST(WhoIsSlow, BetweenLaunchesNobodyWaits) {
  EXPECT_TRUE(find({Node(0).rank(0, 40, 40).rank(1, 40, 40)}).findings.empty());
}

TEST(WhoIsSlow, ALinkOnlyWhenNothingCompletesAllTheWhile) {
  Node node(0);
  node.link(5, kSecond / 2);  // completed within the second
  node.link(0, 0);            // idle
  node.link(7, 3 * kSecond).set_rail(4);
  const auto found = find({node});
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].kind, "link-stalled");
  EXPECT_EQ(found.findings[0].who, "the link of rail 4 from node 0 to node 9");
  EXPECT_EQ(found.findings[0].for_ns, 3 * kSecond);
}

TEST(WhoIsSlow, TheWorstFirst) {
  Node node(0);
  node.rank(0, 41, 41).rank(1, 40, 40);
  v1::Link& link = node.link(0, 0);
  link.set_state("error");
  link.set_reason("cable");
  v1::PeerStatus& peer = *node.look_.after.add_peers();
  peer.set_node(9);
  peer.set_state(v1::PeerStatus::STATE_CONNECTING);
  v1::Job& job = *node.look_.after.add_jobs();
  job.set_job("other");
  job.set_waits_for("not attached: ranks 2 3");
  job.add_missing_ranks(2);
  job.add_missing_ranks(3);
  for (v1::StatsSample* sample : {&node.look_.before, &node.look_.after}) {
    v1::Queue& queue = *sample->add_queues();
    queue.set_job("train");
    queue.set_depth(3);
    queue.set_commands(100);
    queue.set_credit_stalls(sample == &node.look_.before ? 5 : 900);
  }
  std::vector<std::string> kinds;
  for (const Finding& one : find({node}).findings) kinds.push_back(one.kind);
  EXPECT_THAT(kinds, testing::ElementsAre("peer-down", "link-down", "rank-behind", "rank-missing",
                                          "ring-stuck"));
  const std::string text = render(find({node}));
  EXPECT_THAT(text, HasSubstr("ranks 2, 3"));
  EXPECT_THAT(text, HasSubstr("3 commands wait for earlier ones to complete"));
  EXPECT_EQ(json_of(find({node}))["findings"].size(), 5u);
}

TEST(WhoIsSlow, NothingToSee) { EXPECT_EQ(render(find({Node(0)})), "no job is up\n"); }

}  // namespace
}  // namespace mk::mkctl
