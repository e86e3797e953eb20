#include "client/tools/launch/process.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <thread>

#include "client/tools/launch/daemons.h"

namespace mk::tools {
namespace {

using namespace std::chrono_literals;

auto soon() { return std::chrono::steady_clock::now() + 20s; }

ProcessOptions shell(const std::string& script) {
  ProcessOptions options;
  options.name = "the script";
  options.arguments = {"/bin/sh", "-c", script};
  options.report = true;
  return options;
}

TEST(Process, ReportsLinesUntilItEnds) {
  auto process = Process::start(shell("echo one >&3; printf 'two\\nthr' >&3; echo ee >&3"));
  ASSERT_TRUE(process);
  for (const char* expected : {"one", "two", "three"}) {
    const auto line = process->read_line(soon());
    ASSERT_TRUE(line && *line);
    EXPECT_EQ(expected, **line);
  }
  const auto end = process->read_line(soon());
  ASSERT_TRUE(end);
  EXPECT_FALSE(*end);
  EXPECT_TRUE(process->wait(soon()));
}

TEST(Process, AFailureNamesTheProcessItsStatusAndItsLastWords) {
  const auto folder = TemporaryFolder::create("process-test");
  ProcessOptions options = shell("echo the reason; exit 3");
  options.output_path = folder->path() + "/log";
  auto process = Process::start(options);
  const Status end = process->wait(soon());
  ASSERT_FALSE(end);
  EXPECT_EQ("the script exited with status 3; the end of its output:\n  the reason\n",
            end.error().message);
}

TEST(Process, ADeathBySignalIsSaid) {
  auto process = Process::start(shell("kill -9 $$"));
  const Status end = process->wait(soon());
  ASSERT_FALSE(end);
  EXPECT_NE(std::string::npos, end.error().message.find("killed by signal 9"));
}

TEST(Process, APassedDeadlineIsATimeout) {
  auto process = Process::start(shell("exec sleep 60"));
  const auto now = std::chrono::steady_clock::now();
  EXPECT_EQ(ErrorCode::kTimeout, process->wait(now).error().code);
  EXPECT_EQ(ErrorCode::kTimeout, process->read_line(now + 1ms).error().code);
}

TEST(Process, DiesWithItsObject) {
  pid_t pid = 0;
  {
    auto process = Process::start(shell("exec sleep 60"));
    pid = process->pid();
    EXPECT_EQ(0, ::kill(pid, 0));
  }
  EXPECT_NE(0, ::kill(pid, 0));
}

TEST(Process, AProgramThatIsNotThereFails) {
  ProcessOptions options;
  options.name = "nothing";
  options.arguments = {"/nowhere/program"};
  auto process = Process::start(options);
  ASSERT_TRUE(process);
  EXPECT_FALSE(process->wait(soon()));
}

TEST(Process, EnvironmentIsAddedAndReplaced) {
  ::setenv("MK_PROCESS_TEST", "old", 1);
  ProcessOptions options = shell("echo $MK_PROCESS_TEST$MK_PROCESS_TEST_TWO >&3");
  options.environment = {"MK_PROCESS_TEST=new", "MK_PROCESS_TEST_TWO=er"};
  auto process = Process::start(options);
  EXPECT_EQ("newer", **process->read_line(soon()));
  ::unsetenv("MK_PROCESS_TEST");
}

TEST(TemporaryFolder, GoesWithEverythingInIt) {
  std::string path;
  {
    const auto folder = TemporaryFolder::create("process-test");
    path = folder->path();
    std::filesystem::create_directories(path + "/a/b");
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(FindProgram, SaysWhereItLooked) {
  const auto found = find_program("no-such-program", {"../there"});
  ASSERT_FALSE(found);
  EXPECT_NE(std::string::npos, found.error().message.find("there/no-such-program"));
}

TEST(DaemonSet, ADaemonThatDoesNotStartIsNamed) {
  DaemonSetOptions options;
  options.program = "/bin/false";
  const auto set = DaemonSet::start(options);
  ASSERT_FALSE(set);
  EXPECT_NE(std::string::npos, set.error().message.find("mkerneld of node 0 did not start"))
      << set.error().message;
}

}  // namespace
}  // namespace mk::tools
