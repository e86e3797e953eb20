// Ranks that fork: what their children do disturbs nobody, and a rank's death is its own, even if
// others hold what it held.

#include <signal.h>

#include "tests/multiprocess/cluster.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MK_TEST_THREAD_SANITIZER 1
#endif
#if __has_feature(address_sanitizer) && __clang_major__ < 17
#define MK_TEST_ADDRESS_SANITIZER_FORKS_LOCKED 1
#endif
#endif

namespace mk::test {
namespace {

/// Rank `rank` of a job of two nodes with one rank each, whose rank 0 has children that do `what`.
Process start_forker(const tools::DaemonSet& daemons, const std::string& job, std::uint32_t rank,
                     const std::string& what) {
  tools::ProcessOptions options;
  options.name = "rank " + std::to_string(rank);
  options.report = true;
  options.arguments = {
      MK_TEST_FORKER, daemons.client_socket(rank), job, "2", "1", std::to_string(rank), what};
  auto started = Process::start(options);
  EXPECT_TRUE(started) << started.error().message;
  return std::move(*started);
}

void expect_all_end_well(const tools::DaemonSet& daemons, const std::string& job,
                         const std::string& what) {
  Process ranks[] = {start_forker(daemons, job, 0, what), start_forker(daemons, job, 1, what)};
  for (Process& rank : ranks) EXPECT_EQ("done", read_until(rank, "done"));
  for (Process& rank : ranks) EXPECT_TRUE(rank.wait(patience()));
}

class ForkedChildren : public testing::TestWithParam<const char*> {};

TEST_P(ForkedChildren, LeaveTheParentsSessionAlone) {
#ifdef MK_TEST_ADDRESS_SANITIZER_FORKS_LOCKED
  if (GetParam() == std::string("crowd"))
    GTEST_SKIP() << "before LLVM 17 fork() does not wait for AddressSanitizer's allocator: a child "
                    "of a busy process may find it locked for good";
#endif
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  expect_all_end_well(*daemons, "parent", GetParam());
  EXPECT_TRUE(daemons->check());
  EXPECT_TRUE(daemons->stop(120s));
}

INSTANTIATE_TEST_SUITE_P(Whats, ForkedChildren,
                         testing::Values("destroy", "exit", "exec", "die", "call", "crowd"),
                         [](const auto& test) { return std::string(test.param); });

TEST(ForkedChild, MayAttachASessionOfItsOwn) {
#ifdef MK_TEST_THREAD_SANITIZER
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts a thread";
#endif
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  expect_all_end_well(*daemons, "parent", "attach");
  EXPECT_TRUE(daemons->stop(120s));
}

class ChildOfTheDead : public testing::TestWithParam<const char*> {};

TEST_P(ChildOfTheDead, KeepsNeitherItsRankAliveNorItsName) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  Process victim = start_forker(*daemons, "mortal", 0, GetParam());
  Process other = start_forker(*daemons, "mortal", 1, GetParam());
  const std::string child = read_until(victim, "child ");
  ASSERT_TRUE(child.starts_with("child ")) << child;
  const pid_t pid = std::stoi(child.substr(6));
  const std::string victim_pid = std::to_string(victim.pid());
  victim.signal(SIGKILL);
  const std::string error = read_until(other, "error");
  EXPECT_NE(std::string::npos, error.find("lost rank 0")) << error;
  EXPECT_NE(std::string::npos, error.find("pid " + victim_pid)) << error;
  EXPECT_FALSE(other.wait(patience()));
  // The child has not ended, and nobody waits for it.
  expect_all_end_well(*daemons, "mortal", "exec");
  EXPECT_EQ(0, ::kill(pid, SIGKILL));
  EXPECT_TRUE(daemons->check());
  EXPECT_TRUE(daemons->stop(120s));
}

INSTANTIATE_TEST_SUITE_P(Whats, ChildOfTheDead, testing::Values("stay", "hold"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace mk::test
