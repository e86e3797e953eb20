// What is left to see of jobs that have ended.
#include "daemon/control/ended_jobs.h"

#include <gtest/gtest.h>

#include "shm/atomic.h"
#include "tests/daemon/control/job_run.h"

namespace mk::daemon::test {
namespace {

using control::EndedJobs;

EndedJob ended(std::uint32_t uid, std::uint64_t at_ns) {
  EndedJob job;
  job.name = std::to_string(at_ns);
  job.uid = uid;
  job.ended_ns = at_ns;
  return job;
}

TEST(EndedJobs, AreForgottenWhenTheirTimeIsOver) {
  EndedJobs jobs(100);
  jobs.add(ended(1, 1000));
  jobs.add(ended(1, 1050));
  EXPECT_EQ(jobs.list(1050).size(), 2u);
  EXPECT_EQ(jobs.list(1100).size(), 2u);
  ASSERT_EQ(jobs.list(1101).size(), 1u);
  EXPECT_EQ(jobs.list(1101).front().name, "1050");
  EXPECT_TRUE(jobs.list(1151).empty());
  EndedJobs none(0);
  none.add(ended(1, 1000));
  EXPECT_TRUE(none.list(1000).empty());
}

// Who starts jobs by the thousand pushes out his own.
TEST(EndedJobs, AreBoundedAndNobodyPushesOutAnothers) {
  EndedJobs jobs(1'000'000);
  jobs.add(ended(7, 1));
  for (std::uint64_t i = 2; i < 1000; ++i) jobs.add(ended(8, i));
  const auto left = jobs.list(1000);
  ASSERT_EQ(left.size(), EndedJobs::kMax);
  EXPECT_EQ(left.front().uid, 7u);
  EXPECT_EQ(left.back().name, "999") << "the newest are kept";
}

TEST(EndedJobs, HaveTheTotalsOfTheirRanksAndWhetherTheyFailed) {
  TestCluster cluster(2);
  cluster.connect_all();
  JobRun good(cluster, "good", 2, 2), bad(cluster, "bad", 2, 1);
  good.attach_all();
  bad.attach_all();
  const auto seen = [&] { return cluster.node(0).plane->snapshot().ended_jobs; };
  EXPECT_TRUE(seen().empty()) << "they run";
  {
    const shm::Segment segment = good.node_of(0).segment(good.client(0));
    shm::store_relaxed(&segment.header().launches, std::uint64_t{6});
  }
  cluster.wait(5'000);
  bad.hang_up(1);
  cluster.settle();
  good.detach_all();
  bad.hang_up_all();
  cluster.expect_nothing_left();
  const auto all = seen();
  ASSERT_EQ(all.size(), 2u);
  const EndedJob& first = all[0].name == "good" ? all[0] : all[1];
  const EndedJob& second = all[0].name == "good" ? all[1] : all[0];
  EXPECT_EQ(first.name, "good");
  EXPECT_FALSE(first.failed);
  EXPECT_EQ(first.ranks, 2u);
  EXPECT_EQ(first.launches, 3u);
  EXPECT_GE(first.ran_ns, 5'000'000'000u);
  EXPECT_LT(first.ran_ns, 60'000'000'000u);
  EXPECT_EQ(second.name, "bad");
  EXPECT_TRUE(second.failed);
  EXPECT_EQ(second.ranks, 1u);
}

}  // namespace
}  // namespace mk::daemon::test
