// Logs: the lines, the choice of format, and the rate limit.
#include "daemon/service/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kTime = 1'700'000'000'123'456'789;

TEST(Log, ATextLineIsForPeople) {
  EXPECT_EQ(
      format_text_line(kTime, {.node = 3}, LogLevel::kWarning, "lost node 1", {{"peer", "1"}}),
      "2023-11-14T22:13:20.123Z warning mkerneld[3] lost node 1");
  EXPECT_EQ(format_text_line(kTime, {}, LogLevel::kInfo, "up", {{"rail", "2"}, {"job", "a\nb"}}),
            "2023-11-14T22:13:20.123Z info    mkerneld[0] up rail=2 job=a\\x0ab");
}

TEST(Log, AJsonLineIsForMachines) {
  const std::string line =
      format_json_line(kTime, {.node = 3}, LogLevel::kError,
                       "quote \" back \\ line\n tab\t bad \xff good \xc3\xa9", {{"a\"b", "c"}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["time"], "2023-11-14T22:13:20.123Z");
  EXPECT_EQ(json["level"], "error");
  EXPECT_EQ(json["program"], "mkerneld");
  EXPECT_EQ(json["node"], 3);
  EXPECT_EQ(json["message"], "quote \" back \\ line\n tab\t bad \xef\xbf\xbd good \xc3\xa9");
  EXPECT_EQ(json["fields"]["a\"b"], "c");
}

class LogFile : public testing::Test {
 protected:
  void SetUp() override {
    fd = ::open((folder / "log").c_str(), O_RDWR | O_CREAT | O_APPEND, 0600);
  }
  void TearDown() override { ::close(fd); }
  std::vector<nlohmann::json> lines() {
    std::vector<nlohmann::json> all;
    std::ifstream file(folder / "log");
    for (std::string line; std::getline(file, line);) all.push_back(nlohmann::json::parse(line));
    return all;
  }
  TempFolder folder;
  int fd = -1;
};

TEST_F(LogFile, FormatsByWhereItGoes) {
  ::unsetenv("JOURNAL_STREAM");
  EXPECT_EQ(resolve_log_format(LogFormat::kAuto, fd), LogFormat::kJson);
  EXPECT_EQ(resolve_log_format(LogFormat::kText, fd), LogFormat::kText);
  struct stat status {};
  ::fstat(fd, &status);
  ::setenv("JOURNAL_STREAM", fmt::format("{}:{}", status.st_dev, status.st_ino).c_str(), 1);
  EXPECT_EQ(resolve_log_format(LogFormat::kAuto, fd), LogFormat::kJournald);
  ::setenv("JOURNAL_STREAM", "1:2", 1);  // somebody redirected us
  EXPECT_EQ(resolve_log_format(LogFormat::kAuto, fd), LogFormat::kJson);
  ::setenv("JOURNAL_STREAM", "nonsense", 1);
  EXPECT_EQ(resolve_log_format(LogFormat::kAuto, fd), LogFormat::kJson);
  ::unsetenv("JOURNAL_STREAM");
}

TEST_F(LogFile, DropsWhatIsBelowTheLevel) {
  Logger logger({.level = LogLevel::kWarning, .format = LogFormat::kJson, .fd = fd});
  logger.write(LogLevel::kInfo, "no");
  logger.write_limited("k", LogLevel::kInfo, "no");
  logger.write(LogLevel::kWarning, "yes");
  logger.write(LogLevel::kError, "yes");
  EXPECT_EQ(lines().size(), 2u);
}

TEST_F(LogFile, HoldsBackWhatRepeatsAndSaysHowMuch) {
  Logger logger({.format = LogFormat::kJson,
                 .fd = fd,
                 .burst = 3,
                 .refill = std::chrono::milliseconds(3'600'000)});
  for (int i = 0; i < 10; ++i) logger.write_limited("spam", LogLevel::kInfo, "spam");
  logger.write_limited("other", LogLevel::kInfo, "other");
  for (int i = 0; i < 10; ++i) logger.write(LogLevel::kInfo, "never held back");
  EXPECT_EQ(lines().size(), 3u + 1 + 10);

  Logger quick(
      {.format = LogFormat::kJson, .fd = fd, .burst = 1, .refill = std::chrono::milliseconds(50)});
  for (int i = 0; i < 5; ++i) quick.write_limited("spam", LogLevel::kInfo, "burst");
  EXPECT_TRUE(eventually([&] {
    quick.write_limited("spam", LogLevel::kInfo, "burst");
    return lines().size() > 3u + 1 + 10 + 1;
  }));
  const auto last = lines().back();
  EXPECT_THAT(std::string(last["message"]), HasSubstr("like it were not logged"));
  EXPECT_GE(std::stoi(std::string(last["fields"]["held_back"])), 1);
}

TEST_F(LogFile, TheEnginesSentencesAreLimitedWhateverTheirIds) {
  Logger logger({.format = LogFormat::kJson,
                 .fd = fd,
                 .burst = 5,
                 .refill = std::chrono::milliseconds(3'600'000)});
  const LogSink sink = logger.sink();
  for (int i = 0; i < 100; ++i) {
    sink({LogLevel::kWarning, fmt::format("session {} sent garbage", i), {}});
  }
  EXPECT_EQ(lines().size(), 5u);
  for (int i = 0; i < 10; ++i) sink({LogLevel::kError, fmt::format("job 'j{}' failed", i), {}});
  EXPECT_EQ(lines().size(), 10u);
}

TEST_F(LogFile, LinesOfManyThreadsStayWhole) {
  Logger logger({.format = LogFormat::kJson, .fd = fd});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&logger] {
      for (int i = 0; i < 200; ++i) logger.write(LogLevel::kInfo, std::string(300, 'x'));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lines().size(), 800u);
}

}  // namespace
}  // namespace mk::daemon
