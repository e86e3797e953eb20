// mkctl as a program against a real mkerneld, and against nobody.
#include <sys/resource.h>

#include <filesystem>
#include <sstream>

#include "tests/daemon/mkctl/mkctl_rig.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST_F(WithDaemon, StatusOfAHealthyDaemon) {
  start();
  const Answer answer = ask({"status"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out, StartsWith("node 0: ok\n"));
  EXPECT_THAT(answer.out, HasSubstr("0 of 64 sessions"));
  const auto json = ask_json({"status"});
  EXPECT_EQ(json["health"], "ok");
  EXPECT_EQ(json["pid"], daemon->pid());
}

TEST_F(WithDaemon, StatusOfADaemonWithoutItsPeerIsOne) {
  start({"--peer", "1=unix:" + (folder / "absent")});
  const Answer answer = ask({"status"});
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.out, StartsWith("node 0: degraded\n"));
  EXPECT_THAT(answer.out,
              HasSubstr("waiting for node 1 (unix:" + (folder / "absent") + ") to connect"));
  const Answer json = ask({"--json", "status"});
  EXPECT_EQ(json.code, 1);
  EXPECT_EQ(nlohmann::json::parse(json.out)["health"], "degraded");
}

TEST_F(WithDaemon, DrainsAndResumes) {
  start();
  auto runs = RawClient::attach(folder / "sock", "runs");
  ASSERT_TRUE(runs) << runs.error().message;
  const Answer left = ask({"drain", "--timeout", "200ms"});
  EXPECT_EQ(left.code, 1) << left.err;
  EXPECT_EQ(left.out, "draining: new jobs are refused, 1 sessions are left, of: runs\n");
  EXPECT_THAT(ask({"status"}).out, StartsWith("node 0: draining\n"));
  const auto refused = RawClient::attach(folder / "sock", "new");
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message,
              HasSubstr("the daemon of node 0 is drained for maintenance (mkctl drain) and takes "
                        "no new ranks; attach again when it is back, or run on another node"));
  // A job that runs is not disturbed; when it ends, so does the drain.
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    runs = fail(ErrorCode::kAborted, "hangs up");
  });
  const Answer drained = ask({"drain", "--timeout", "60s"});
  ends.join();
  EXPECT_EQ(drained.code, 0) << drained.err;
  EXPECT_EQ(drained.out, "drained: no job is left, new ones are refused\n");
  EXPECT_TRUE(daemon->running());
  EXPECT_EQ(ask({"resume"}).code, 0);
  EXPECT_THAT(ask({"status"}).out, StartsWith("node 0: ok\n"));
  EXPECT_TRUE(RawClient::attach(folder / "sock", "new"));
  EXPECT_EQ(ask({"drain", "--timeout", "soon"}).code, 2);
}

TEST_F(WithDaemon, ListsWhatIsThere) {
  start();
  EXPECT_EQ(ask({"session", "list"}).out, "no rank is attached\n");
  EXPECT_EQ(ask_json({"session", "list"})["sessions"].size(), 0u);
  auto client = RawClient::attach(folder / "sock", "mkctl-test");
  ASSERT_TRUE(client) << client.error().message;
  ASSERT_TRUE(client->wait_for(shm::MessageType::kJobUp));
  EXPECT_THAT(ask({"session", "list"}).out, HasSubstr("mkctl-test"));
  const auto sessions = ask_json({"session", "list"});
  EXPECT_EQ(sessions["sessions"][0]["job"], "mkctl-test");
  EXPECT_EQ(sessions["sessions"][0]["state"], "up");
  const auto queues = ask_json({"queue", "list"});
  EXPECT_EQ(queues["queues"][0]["job"], "mkctl-test");
  EXPECT_EQ(queues["queues"][0]["commands"], 0);
  EXPECT_THAT(ask({"queue", "list"}).out, HasSubstr("COMMIT-POST"));
  EXPECT_EQ(ask_json({"link", "list"})["links"].size(), 0u);
  EXPECT_EQ(ask({"link", "list"}).code, 0);
}

TEST_F(WithDaemon, WatchesStats) {
  start();
  const Answer text = ask({"stats", "--interval", "100ms", "--count", "2"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(std::count(text.out.begin(), text.out.end(), '\n'), 3);
  const Answer lines = ask({"--json", "stats", "--interval", "100ms", "--count", "3"});
  std::istringstream stream(lines.out);
  int samples = 0;
  for (std::string line; std::getline(stream, line); ++samples) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json["elapsed_ns"] == 0, samples == 0);
  }
  EXPECT_EQ(samples, 3);
  const Answer refused = ask({"stats", "--interval", "1ms", "--count", "1"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("is allowed"));
}

TEST_F(WithDaemon, NoticesTheEndOfTheDaemonWhileWatching) {
  start();
  Program watch(folder, {MK_MKCTL, "--address", address, "stats", "--interval", "100ms"});
  EXPECT_TRUE(eventually([&] { return watch.out().find('\n') != std::string::npos; }));
  daemon->signal(SIGTERM);
  EXPECT_EQ(watch.wait(), 3);
  EXPECT_THAT(watch.err(), HasSubstr("no answer from " + address));
}

// Libraries that it loads take these signals, write a file into the working folder, and exit
// with 1.
TEST_F(WithDaemon, EndsBySignalsAsEveryProgramAndLeavesNoFileOfALibrary) {
  start();
  const rlimit none{0, 0};
  for (const int signal : {SIGINT, SIGTERM, SIGABRT, SIGSEGV}) {
    SCOPED_TRACE(signal);
    const std::string place = folder / ("signal-" + std::to_string(signal));
    std::filesystem::create_directory(place);
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(place);
    Program watch(folder, {MK_MKCTL, "--address", address, "stats", "--interval", "100ms"});
    std::filesystem::current_path(before);
    ASSERT_TRUE(eventually([&] { return watch.out().find('\n') != std::string::npos; }));
    ASSERT_EQ(::prlimit(watch.pid(), RLIMIT_CORE, &none, nullptr), 0);
    watch.signal(signal);
    EXPECT_EQ(watch.wait(), 128 + signal);
    EXPECT_TRUE(std::filesystem::is_empty(place));
  }
}

TEST_F(WithDaemon, SaysBothVersions) {
  start();
  const Answer answer = ask({"version"});
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.out, HasSubstr("mkerneld 0."));
  EXPECT_THAT(answer.out, HasSubstr("mkctl 0."));
  EXPECT_EQ(ask_json({"version"})["abi_major"], shm::kAbiMajor);
}

TEST_F(WithDaemon, FindsTheDaemonByEnvironmentAndConfiguration) {
  start();
  EXPECT_EQ(run({"status"}, {"MKCTL_ADDRESS=" + address}).code, 0);
  std::ofstream(folder / "toml") << "listen = '" << address << "'\n";
  EXPECT_EQ(run({"status", "--config", folder / "toml"}).code, 0);
  EXPECT_EQ(run({"status"}, {"MKCTL_ADDRESS", "MKERNELD_CONFIG=" + (folder / "toml")}).code, 0);
}

TEST_F(Mkctl, NobodyThereIsThree) {
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"status"},
                                             {"version"},
                                             {"session", "list"},
                                             {"queue", "list"},
                                             {"link", "list"},
                                             {"stats", "--count", "1"}}) {
    const Answer answer = ask(command);
    EXPECT_EQ(answer.code, 3) << command[0];
    EXPECT_THAT(answer.err, HasSubstr("no answer from " + address));
    EXPECT_THAT(answer.err, testing::Not(HasSubstr("last error")));
    EXPECT_EQ(answer.out, "");
  }
}

TEST_F(WithDaemon, ADaemonThatIsStuckIsThreeWithinTheTimeout) {
  start();
  daemon->signal(SIGSTOP);
  const Answer answer = run({"--address", address, "--timeout", "200ms", "status"});
  daemon->signal(SIGCONT);
  EXPECT_EQ(answer.code, 3);
  EXPECT_THAT(answer.err, HasSubstr("none within 200ms"));
}

TEST_F(Mkctl, WrongUseIsTwo) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{}, "subcommand"},
      {{"session"}, "subcommand"},
      {{"sessions", "list"}, "unknown command \"sessions\""},
      {{"status", "--nonsense"}, "--nonsense"},
      {{"--address", "nonsense", "status"}, "--address nonsense: \"host:port\""},
      {{"--timeout", "x", "status"}, "--timeout: a duration"},
      {{"stats", "--interval", "x"}, "--interval: a duration"},
      {{"--config", "/absent", "status"}, "/absent does not exist"},
      {{"--address", "unix:/x", "--tls-cert", "/absent", "status"}, "cannot open tls.cert"},
  };
  for (const auto& [arguments, message] : cases) {
    const Answer answer = run(arguments);
    EXPECT_EQ(answer.code, 2) << message;
    EXPECT_THAT(answer.err, HasSubstr(message));
    EXPECT_EQ(answer.out, "");
  }
  std::ofstream(folder / "toml") << "listen = '127.0.0.1:0'\n";
  const Answer portless = run({"--config", folder / "toml", "status"});
  EXPECT_EQ(portless.code, 2);
  EXPECT_THAT(portless.err, HasSubstr("give --address"));
}

/// The commands that a help text lists.
std::vector<std::string> lines_of_subcommands(const std::string& help) {
  std::vector<std::string> names;
  std::istringstream lines(help.substr(std::min(help.find("Subcommands:"), help.size())));
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line) && line.starts_with("  ")) {
    const std::size_t begin = line.find_first_not_of(' ');
    if (begin == 2) names.push_back(line.substr(2, line.find(' ', 2) - 2));
  }
  return names;
}

TEST_F(Mkctl, HelpAndVersionAreZero) {
  EXPECT_EQ(run({"--help"}).code, 0);
  EXPECT_EQ(run({"--version"}).code, 0);
  EXPECT_EQ(run({"session", "--help"}).code, 0);
}

TEST_F(Mkctl, EachCommandsHelpHasAnExampleOfIt) {
  std::size_t commands = 0;
  const auto check = [&](const std::vector<std::string>& words, const std::string& name) {
    std::vector<std::string> arguments = words;
    arguments.emplace_back("--help");
    const std::string help = run(arguments).out;
    EXPECT_THAT(help, testing::ContainsRegex("Example:\n  mkctl .*" + name)) << name;
    EXPECT_THAT(help, HasSubstr("Exit status: 0 ok")) << name;
    ++commands;
  };
  for (const std::string& line : lines_of_subcommands(run({"--help"}).out)) {
    const std::string help = run({line, "--help"}).out;
    const auto within = lines_of_subcommands(help);
    for (const std::string& one : within) check({line, one}, line + " " + one);
    if (within.empty()) check({line}, line);
    EXPECT_THAT(help, testing::Not(testing::StartsWith("About "))) << line;
  }
  EXPECT_GE(commands, 20u);
}

}  // namespace
}  // namespace mk::daemon
