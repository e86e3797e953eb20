// Launches by operator and tag, for metrics: exact while there are few, bounded when there are
// many.
#include "daemon/control/operator_totals.h"

#include <gtest/gtest.h>

#include "shm/atomic.h"
#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using control::OperatorTotals;

constexpr std::uint64_t kKeepNs = 100'000'000'000;

OperatorLabels of(int job, int tag, int uid = 7) {
  return {"job" + std::to_string(job), std::to_string(uid), "gemm_ar", std::to_string(tag)};
}

TEST(OperatorTotals, AreAddedUpByAllTheirLabels) {
  OperatorTotals totals(kKeepNs);
  totals.add(of(1, 5), {2, 30, 10}, 1);
  totals.add(of(1, 6), {1, 1, 1}, 2);
  totals.add(of(1, 5), {3, 40, 20}, 3);
  const auto list = totals.list(3);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].labels, of(1, 5));
  EXPECT_EQ(list[0].counts.launches, 5u);
  EXPECT_EQ(list[0].counts.launch_ns, 70u);
  EXPECT_EQ(list[0].counts.wait_ns, 30u);
}

TEST(OperatorTotals, AreForgottenWhenNothingIsAddedForTheirTime) {
  OperatorTotals totals(kKeepNs);
  totals.add(of(1, 5), {1, 1, 1}, 1);
  totals.add(of(1, 6), {1, 1, 1}, 2);
  EXPECT_EQ(totals.list(kKeepNs + 1).size(), 2u);
  EXPECT_EQ(totals.list(kKeepNs + 2).size(), 1u);
}

// A tag that counts steps up would else be a series a step.
TEST(OperatorTotals, TagsBeyondSomeAreOther) {
  OperatorTotals totals(kKeepNs);
  for (int step = 1; step <= 1000; ++step) totals.add(of(1, step), {1, 0, 0}, 1);
  const auto list = totals.list(1);
  ASSERT_EQ(list.size(), OperatorTotals::kTagsMax + 1);
  std::uint64_t other = 0;
  for (const OperatorTotal& one : list)
    if (one.labels.tag == "other") other = one.counts.launches;
  EXPECT_EQ(other, 1000 - OperatorTotals::kTagsMax);
}

TEST(OperatorTotals, AreBoundedWhateverUsersDoAndLoseNothing) {
  OperatorTotals totals(kKeepNs);
  totals.add(of(0, 1, 1), {1, 0, 0}, 1);
  std::uint64_t added = 1;
  for (int uid = 2; uid < 12; ++uid)
    for (int job = 0; job < 100; ++job) totals.add(of(job, 1, uid), {1, 0, 0}, 1), ++added;
  for (int uid = 100; uid < 900; ++uid) totals.add(of(0, 1, uid), {1, 0, 0}, 1), ++added;
  totals.add(of(0, 1, 1), {1, 0, 0}, 1), ++added;
  const auto list = totals.list(1);
  EXPECT_LE(list.size(), OperatorTotals::kMax + 1);
  std::uint64_t sum = 0, of_user_2 = 0;
  for (const OperatorTotal& one : list) {
    sum += one.counts.launches;
    of_user_2 += one.labels.uid == "2" ? 1 : 0;
    if (one.labels == of(0, 1, 1)) {
      EXPECT_EQ(one.counts.launches, 2u) << "who was there stays";
    }
  }
  EXPECT_EQ(sum, added);
  EXPECT_EQ(of_user_2, OperatorTotals::kOfUserMax + 1);
}

TEST(OperatorTotals, AreWhatRanksSayOfThemselves) {
  TestCluster cluster(1);
  JobRun run(cluster, "train", 1, 1);
  run.attach_all();
  const shm::Segment segment = run.node_of(0).segment(run.client(0));
  shm::SegmentHeader& header = segment.header();
  cluster.wait(200);
  shm::store_relaxed(&header.progress.op, shm::progress_operator("ag_gemm"));
  shm::store_relaxed(&header.progress.tag, std::uint64_t{42});
  shm::store_relaxed(&header.launches, std::uint64_t{7});
  cluster.wait(2'000);
  const auto list = cluster.node(0).plane->snapshot().operators;
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].labels.job, "train");
  EXPECT_EQ(list[0].labels.op, "ag_gemm");
  EXPECT_EQ(list[0].labels.tag, "42");
  EXPECT_EQ(list[0].counts.launches, 4u);
  EXPECT_GT(list[0].counts.launch_ns, 1'000'000'000u);
}

}  // namespace
}  // namespace mk::daemon::test
