// What fails, and what the others see of it.

#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>

#include "tests/multiprocess/cluster.h"

namespace mk::test {
namespace {

class Fabric : public testing::TestWithParam<const char*> {};

TEST_P(Fabric, ARankKilledInMidLaunchIsNamedToTheOthersAndTheDaemonsGoOn) {
  auto daemons = start_daemons(2, GetParam());
  ASSERT_NE(nullptr, daemons);
  for (std::uint32_t victim = 0; victim < 4; ++victim) {
    auto ranks = start_ranks(*daemons, "doomed" + std::to_string(victim), 2, 0);
    for (Process& rank : ranks) ASSERT_EQ("launch 2", read_until(rank, "launch 2"));
    ranks[victim].signal(SIGKILL);
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      if (rank == victim) continue;
      const std::string error = read_until(ranks[rank], "error");
      EXPECT_TRUE(error.starts_with("error peer-lost")) << error;
      EXPECT_NE(std::string::npos, error.find("rank " + std::to_string(victim))) << error;
    }
  }
  EXPECT_TRUE(daemons->check());
  expect_job_works(*daemons, "after", 2);
  EXPECT_TRUE(daemons->stop(120s));
}

TEST_P(Fabric, AKilledDaemonEndsTheJobAndTheOtherDaemonGoesOn) {
  auto daemons = start_daemons(2, GetParam());
  ASSERT_NE(nullptr, daemons);
  auto ranks = start_ranks(*daemons, "doomed", 1, 0);
  for (Process& rank : ranks) ASSERT_EQ("launch 2", read_until(rank, "launch 2"));
  daemons->process(1).signal(SIGKILL);
  const std::string own = read_until(ranks[1], "error");
  EXPECT_TRUE(own.starts_with("error daemon-lost")) << own;
  const std::string other = read_until(ranks[0], "error");
  EXPECT_TRUE(other.starts_with("error peer-lost") || other.starts_with("error link-down") ||
              other.starts_with("error unavailable"))
      << other;
  EXPECT_NE(std::string::npos, other.find("node 1")) << other;
  EXPECT_FALSE(daemons->process(0).ended());
}

INSTANTIATE_TEST_SUITE_P(Fabrics, Fabric, testing::Values("loopback", "ofi"),
                         [](const auto& test) { return std::string(test.param); });

TEST(Daemon, TerminationEndsSessionsWithAReasonAndExitsWithZero) {
  auto daemons = start_daemons(1);
  ASSERT_NE(nullptr, daemons);
  auto ranks = start_ranks(*daemons, "served", 2, 200);
  for (Process& rank : ranks) ASSERT_EQ("launch 0", read_until(rank, "launch 0"));
  const Status stopped = daemons->stop(120s);  // drains: the job runs to its end, or is told
  EXPECT_TRUE(stopped) << stopped.error().message;
  for (Process& rank : ranks) {
    const std::string end = read_until(rank, "done");
    EXPECT_TRUE(end == "done" || end.starts_with("error draining")) << end;
  }
}

TEST(Daemon, AStaleSocketFileIsReplaced) {
  auto folder = tools::TemporaryFolder::create("mk-test");
  const std::string socket = folder->path() + "/stale.sock";
  for (int start = 0; start < 2; ++start) {
    tools::ProcessOptions options;
    options.name = "mkerneld";
    options.report = true;
    options.output_path = folder->path() + "/log";
    options.arguments = {
        MK_TEST_MKERNELD, "--socket", socket, "--listen", "unix:" + folder->path() + "/peer",
        "--ready-fd",     "3"};
    auto daemon = Process::start(options);
    const auto ready = daemon->read_line(patience());
    ASSERT_TRUE(ready && *ready) << tools::tail_of(options.output_path, 20);
    EXPECT_TRUE(std::filesystem::exists(socket));
    daemon->signal(SIGKILL);  // leaves the socket's file behind
    EXPECT_FALSE(daemon->wait(patience()));
    EXPECT_TRUE(std::filesystem::exists(socket));
  }
}

TEST(Daemon, ASecondOneOnTheSameSocketSaysWhoHoldsIt) {
  auto daemons = start_daemons(1);
  ASSERT_NE(nullptr, daemons);
  const auto second = run_program({MK_TEST_MKERNELD, "--socket", daemons->client_socket(0),
                                   "--listen", "unix:" + daemons->folder() + "/other"});
  EXPECT_NE(0, second.status);
  EXPECT_NE(std::string::npos, second.text.find(std::to_string(daemons->process(0).pid())))
      << second.text;
  expect_job_works(*daemons, "unharmed", 1, 1);
}

TEST(Peers, AnUnreachablePeerIsNamedWhenTheRendezvousEnds) {
  // Two nodes are configured; only node 0's daemon runs.
  auto folder = tools::TemporaryFolder::create("mk-test");
  tools::ProcessOptions options;
  options.name = "mkerneld";
  options.report = true;
  options.output_path = folder->path() + "/log";
  options.arguments = {MK_TEST_MKERNELD,
                       "--node-id",
                       "0",
                       "--socket",
                       folder->path() + "/sock",
                       "--listen",
                       "unix:" + folder->path() + "/peer0",
                       "--peer",
                       "1=unix:" + folder->path() + "/peer1",
                       "--ready-fd",
                       "3"};
  auto daemon = Process::start(options);
  const auto ready = daemon->read_line(patience());
  ASSERT_TRUE(ready && *ready) << tools::tail_of(options.output_path, 20);
  const auto bench = run_program({MK_TEST_MKBENCH, "gemm-ar", "--nodes", "2", "--local", "1", "--m",
                                  "8", "--n", "8", "--k", "8", "--timeout-ms", "5000", "--join",
                                  folder->path() + "/sock," + folder->path() + "/absent"});
  EXPECT_EQ(1, bench.status);
  EXPECT_NE(std::string::npos, bench.text.find("node 1")) << bench.text;
  EXPECT_NE(std::string::npos, bench.text.find("absent")) << bench.text;
}

TEST(LockedMemory, AJobRunsWithoutAnyToSpare) {
  // RLIMIT_MEMLOCK is inherited by everything started from here on.
  rlimit before{};
  ASSERT_EQ(0, ::getrlimit(RLIMIT_MEMLOCK, &before));
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(0, ::setrlimit(RLIMIT_MEMLOCK, &none));
  auto daemons = start_daemons(2);
  EXPECT_NE(nullptr, daemons);
  if (daemons) expect_job_works(*daemons, "unlocked", 1);
  EXPECT_EQ(0, ::setrlimit(RLIMIT_MEMLOCK, &before));
}

}  // namespace
}  // namespace mk::test
