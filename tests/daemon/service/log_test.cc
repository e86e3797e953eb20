// Logs: the lines, the choice of format, and the rate limit.
#include "daemon/service/log.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "daemon/control/source_line.h"
#include "shm/host/unique_fd.h"
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
  std::vector<nlohmann::json> lines(Logger& logger) {
    EXPECT_TRUE(logger.flush(kPatience));
    return lines();
  }
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
  EXPECT_EQ(lines(logger).size(), 2u);
}

TEST_F(LogFile, HoldsBackWhatRepeatsAndSaysHowMuch) {
  Logger logger({.format = LogFormat::kJson,
                 .fd = fd,
                 .burst = 3,
                 .refill = std::chrono::milliseconds(3'600'000)});
  for (int i = 0; i < 10; ++i) logger.write_limited("spam", LogLevel::kInfo, "spam");
  logger.write_limited("other", LogLevel::kInfo, "other");
  for (int i = 0; i < 10; ++i) logger.write(LogLevel::kInfo, "never held back");
  EXPECT_EQ(lines(logger).size(), 3u + 1 + 10);

  Logger quick(
      {.format = LogFormat::kJson, .fd = fd, .burst = 1, .refill = std::chrono::milliseconds(50)});
  for (int i = 0; i < 5; ++i) quick.write_limited("spam", LogLevel::kInfo, "burst");
  EXPECT_TRUE(eventually([&] {
    quick.write_limited("spam", LogLevel::kInfo, "burst");
    return lines(quick).size() > 3u + 1 + 10 + 1;
  }));
  const auto last = lines(quick).back();
  EXPECT_THAT(std::string(last["message"]), HasSubstr("like it were not logged"));
  EXPECT_GE(std::stoi(std::string(last["fields"]["held_back"])), 1);
}

constexpr std::chrono::milliseconds kNever(3'600'000);

/// What one line of the engine's code says.
LogRecord garbage(const std::string& text, std::optional<std::uint32_t> user) {
  return {LogLevel::kWarning, text, {}, user, SourceLine::current()};
}
LogRecord failure(const std::string& text, std::optional<std::uint32_t> user) {
  return {LogLevel::kError, text, {}, user, SourceLine::current()};
}

TEST_F(LogFile, NoTextOfAClientMakesAKindOfItsOwn) {
  Logger logger({.format = LogFormat::kJson, .fd = fd, .burst = 5, .refill = kNever});
  const LogSink sink = logger.sink();
  // Sentences that share no beginning, as when each job has a name of its own.
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    std::string name(1 + random() % 100, 'x');
    for (char& c : name) c = static_cast<char>('a' + random() % 26);
    sink(garbage(name + " is refused", 1000));
  }
  EXPECT_EQ(lines(logger).size(), 5u);
  for (int i = 0; i < 10; ++i) sink(failure(fmt::format("job 'j{}' failed", i), 1000));
  EXPECT_EQ(lines(logger).size(), 10u) << "another line of the code is another kind";
}

TEST_F(LogFile, AUserSpendsNobodyElsesBudget) {
  Logger logger({.format = LogFormat::kJson,
                 .fd = fd,
                 .burst = 5,
                 .refill = kNever,
                 .user_burst = 7,
                 .user_refill = kNever});
  const LogSink sink = logger.sink();
  for (int i = 0; i < 100; ++i) sink(garbage("by 1000", 1000));
  for (int i = 0; i < 100; ++i) sink(failure("by 1000, another kind", 1000));
  EXPECT_EQ(lines(logger).size(), 7u) << "all kinds of one user together";
  sink(garbage("by 1001", 1001));
  sink(garbage("by the daemon", std::nullopt));
  EXPECT_EQ(lines(logger).size(), 9u);
  // Thousands of uids, as a user namespace gives one person, are not thousands of budgets.
  for (std::uint32_t uid = 100'000; uid < 110'000; ++uid) sink(garbage("by one of many", uid));
  EXPECT_LE(lines(logger).size(), 9u + 256 + 5);
}

TEST_F(LogFile, WhatWasHeldBackIsToldWithoutAnotherEvent) {
  Logger logger(
      {.format = LogFormat::kJson, .fd = fd, .burst = 1, .refill = std::chrono::milliseconds(20)});
  const LogSink sink = logger.sink();
  for (int i = 0; i < 50; ++i) sink(garbage(fmt::format("job {} is refused", i), 1000));
  EXPECT_TRUE(eventually([&] {
    logger.tell_held_back();
    const auto said = lines(logger);
    return std::ranges::any_of(said, [](const nlohmann::json& line) {
      return std::string(line["message"]).find("were not logged, the last: job ") !=
             std::string::npos;
    });
  }));
  const std::size_t said = lines(logger).size();
  logger.tell_held_back();
  EXPECT_EQ(lines(logger).size(), said) << "once";
}

LoggerOptions without_refill(int fd) {
  return {.level = LogLevel::kError,
          .format = LogFormat::kJson,
          .fd = fd,
          .burst = 5,
          .refill = kNever,
          .user_burst = 7,
          .user_refill = kNever};
}

TEST_F(LogFile, AuditsHaveABudgetThatNothingElseUses) {
  Logger logger(without_refill(fd));
  const LogSink sink = logger.sink();
  for (int i = 0; i < 100; ++i) sink(failure("noise", 1000));
  ASSERT_EQ(lines(logger).size(), 5u);
  for (int i = 0; i < 100; ++i) logger.audit("audit: done", {});
  EXPECT_EQ(lines(logger).size(), 105u) << "no change goes unsaid";
  for (int i = 0; i < 100; ++i) logger.audit_refused("uid 1000", "Drain", "audit: refused", {});
  EXPECT_EQ(lines(logger).size(), 110u);
  logger.audit_refused("uid 1001", "Drain", "audit: refused", {});
  EXPECT_EQ(lines(logger).size(), 111u) << "each caller has its own";
}

// Of a flood of refusals, how many there were, whose and when is told of every one.
TEST_F(LogFile, NoRefusedChangeGoesUnsaid) {
  std::map<std::string, std::uint64_t> tried, told;
  const auto began = std::chrono::system_clock::now();
  {
    Logger logger(without_refill(fd));
    std::mt19937_64 random(3);
    // More callers than have accounts, and more than are counted at a time.
    for (int i = 0; i < 20'000; ++i) {
      const std::string caller = fmt::format("uid {}", random() % 2 == 0 ? 7 : random() % 3000);
      const std::string method = random() % 3 == 0 ? "Drain" : "SetJob";
      logger.audit_refused(caller, method, "audit: refused " + method + " to " + caller,
                           {{"audit", method}, {"who", caller}});
      ++tried[caller + method];
      if (i % 5000 == 2500) logger.tell_held_back();
    }
  }
  std::size_t count = 0;
  for (const auto& line : lines()) {
    ++count;
    const auto& fields = line["fields"];
    const std::string who = std::string(fields["who"]) + std::string(fields["audit"]);
    EXPECT_THAT(std::string(line["message"]), HasSubstr("audit: refused "));
    if (!fields.contains("count")) {
      ++told[who];
      continue;
    }
    told[who] += std::stoull(std::string(fields["count"]));
    EXPECT_LE(std::string(fields["first"]), std::string(fields["last"]));
    EXPECT_LE(std::string(fields["last"]), std::string(line["time"]));
    EXPECT_GE(
        std::string(fields["first"]),
        fmt::format("{:%Y-%m-%dT%H:%M}", fmt::gmtime(std::chrono::system_clock::to_time_t(began))));
  }
  EXPECT_EQ(told, tried);
  EXPECT_LT(count, 15'000u) << "one line says many";
}

TEST_F(LogFile, AFloodOfRefusalsOfOneCallerIsAFewLines) {
  {
    Logger logger(without_refill(fd));
    for (int i = 0; i < 100'000; ++i) logger.audit_refused("uid 7", "Drain", "audit: refused", {});
    logger.tell_held_back();
  }
  const auto said = lines();
  ASSERT_EQ(said.size(), 6u);
  EXPECT_EQ(said.back()["fields"]["count"], "99995");
  EXPECT_EQ(said.back()["fields"]["who"], "uid 7");
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
  EXPECT_EQ(lines(logger).size(), 800u);
}

/// A pipe with room for nothing more.
struct FullPipe {
  FullPipe() {
    ::signal(SIGPIPE, SIG_IGN);  // as the daemon does
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    read.reset(ends[0]);
    write.reset(ends[1]);
    const std::string junk(4096, '.');
    while (::write(write.get(), junk.data(), junk.size()) > 0) filled += junk.size();
    for (const int end : ends) ::fcntl(end, F_SETFL, 0);
  }
  UniqueFd read, write;
  std::size_t filled = 0;
};

TEST(LogPipe, ThatNobodyReadsHoldsNobodyUpAndWhatIsLostIsCounted) {
  FullPipe pipe;
  constexpr std::uint64_t kLines = 2000, kAudits = 10;
  std::optional<Logger> logger(
      std::in_place,
      LoggerOptions{.format = LogFormat::kJson, .fd = pipe.write.get(), .queue_bytes_max = 65536});
  auto logged = std::async(std::launch::async, [&] {
    for (std::uint64_t i = 0; i < kLines; ++i)
      logger->write(LogLevel::kInfo, std::to_string(i), {{"padding", std::string(200, 'x')}});
    for (std::uint64_t i = 0; i < kAudits; ++i) logger->audit("audit: " + std::to_string(i), {});
  });
  const bool in_time = logged.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  EXPECT_TRUE(in_time);
  // Somebody reads again.
  std::string text;
  auto drained = std::async(std::launch::async, [&] {
    std::array<char, 4096> some;
    for (ssize_t n; (n = ::read(pipe.read.get(), some.data(), some.size())) > 0;)
      text.append(some.data(), static_cast<std::size_t>(n));
  });
  logged.wait();
  EXPECT_TRUE(logger->flush(kPatience));
  logger->write(LogLevel::kInfo, "as ever");
  logger.reset();
  pipe.write.reset();
  drained.wait();

  std::istringstream said(text.substr(pipe.filled));
  std::uint64_t lines = 0, lost = 0;
  std::vector<std::string> order;
  for (std::string line; std::getline(said, line);) {
    const auto json = nlohmann::json::parse(line);
    order.push_back(json["message"]);
    if (json.contains("fields") && json["fields"].contains("lost")) {
      lost += std::stoull(std::string(json["fields"]["lost"]));
      EXPECT_THAT(order.back(), HasSubstr(" log lines are lost, 0 of them audits"));
    } else {
      ++lines;
    }
  }
  EXPECT_EQ(lines + lost, kLines + kAudits + 1);
  EXPECT_GT(lost, 0u);
  EXPECT_LT(lost, kLines);
  EXPECT_EQ(order.front(), "0");
  EXPECT_EQ(order.back(), "as ever");
  EXPECT_THAT(order, testing::IsSupersetOf({"audit: 0", "audit: 9"}));
}

TEST(LogPipe, ThatNobodyReadsDoesNotKeepTheEnd) {
  FullPipe pipe;
  auto ended = std::async(std::launch::async, [&] {
    Logger logger({.format = LogFormat::kJson, .fd = pipe.write.get()});
    logger.write(LogLevel::kInfo, "last words");
  });
  EXPECT_EQ(ended.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  pipe.read.reset();  // what still writes is told that nobody will read
}

}  // namespace
}  // namespace mk::daemon
