// The programs people type: mkctl, mkbench. (mkrun: mkrun_test.cc.)

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/multiprocess/cluster.h"

namespace mk::test {
namespace {

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file, nullptr, false);
}

TEST(Mkctl, ShowsARunningJobAndWhatItMoved) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  const auto ask = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {MK_TEST_MKCTL, "--address", daemons->admin_address(0)});
    return run_program(words);
  };
  EXPECT_EQ(0, ask({"version"}).status);
  auto ranks = start_ranks(*daemons, "shown", 2, 0);
  for (Process& rank : ranks) ASSERT_EQ("launch 2", read_until(rank, "launch 2"));

  // Launches went over the link, so the peer is there and all is well.
  const auto status = ask({"status"});
  EXPECT_EQ(0, status.status) << status.text;
  const auto sessions = ask({"session", "list"});
  EXPECT_EQ(0, sessions.status);
  EXPECT_NE(std::string::npos, sessions.text.find("shown")) << sessions.text;
  const auto queues = nlohmann::json::parse(ask({"--json", "queue", "list"}).text, nullptr, false);
  ASSERT_FALSE(queues.is_discarded());
  EXPECT_NE(std::string::npos, queues.dump().find("commands"));
  const auto links = ask({"link", "list"});
  EXPECT_EQ(0, links.status);
  EXPECT_NE(std::string::npos, links.text.find("up")) << links.text;
}

TEST(Mkctl, ExitCodesTellWhatIsWrong) {
  EXPECT_EQ(3, run_program({MK_TEST_MKCTL, "--address", "unix:/nowhere/at/all", "status"}).status);
  EXPECT_EQ(2, run_program({MK_TEST_MKCTL, "no-such-command"}).status);
}

TEST(Mkbench, WritesItsReportAndJoinsRunningDaemons) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  const std::string json = daemons->folder() + "/out.json";
  const auto bench =
      run_program({MK_TEST_MKBENCH, "gemm-ar",
                   "--nodes",       "2",
                   "--local",       "2",
                   "--m",           "70",
                   "--n",           "130",
                   "--k",           "40",
                   "--iters",       "2",
                   "--warmup",      "1",
                   "--join",        daemons->client_socket(0) + "," + daemons->client_socket(1),
                   "--admin",       daemons->admin_address(0) + "," + daemons->admin_address(1),
                   "--json",        json});
  EXPECT_EQ(0, bench.status) << bench.text;
  EXPECT_NE(std::string::npos, bench.text.find("correct")) << bench.text;
  const auto report = read_json(json);
  ASSERT_FALSE(report.is_discarded());
  EXPECT_TRUE(report["correct"].get<bool>());
  EXPECT_EQ(6u, report["verification"]["launches_checked"].get<unsigned>());
  EXPECT_EQ(6u * 70 * 130, report["verification"]["elements_compared"].get<unsigned>());
  EXPECT_EQ(2u, report["fused"]["samples_ms"].size());
  // The owner of half of C sends its bf16 sums once to its one rail peer.
  EXPECT_GT(report["fused"]["network_bytes_per_rank"].get<double>(), 70.0 * 130 * 0.5);
  EXPECT_EQ(2u, report["links"].size());
}

// In each mode there is a first launch that all ranks check, and no other.
TEST(Mkbench, SaysCorrectOnlyOfWhatItHasChecked) {
  const auto folder = tools::TemporaryFolder::create("mkbench-test");
  const std::string json = folder->path() + "/report.json";
  const auto bench = [&](const char* verify, const char* modes) {
    return run_program({MK_TEST_MKBENCH, "gemm-rs", "--nodes",  "1",  "--local",  "2",
                        "--m",           "40",      "--n",      "24", "--k",      "8",
                        "--iters",       "3",       "--warmup", "0",  "--verify", verify,
                        "--modes",       modes,     "--json",   json});
  };
  const auto unchecked = bench("none", "both");
  EXPECT_EQ(0, unchecked.status);
  EXPECT_NE(std::string::npos, unchecked.text.find("NOT CHECKED")) << unchecked.text;
  EXPECT_TRUE(read_json(json)["correct"].is_null()) << read_json(json)["correct"];
  for (const char* modes : {"both", "fused", "unfused", "auto"}) {
    const auto checked = bench("first", modes);
    EXPECT_EQ(0, checked.status) << checked.text;
    const auto report = read_json(json);
    EXPECT_EQ(true, report["correct"]);
    const auto launches = report["verification"]["launches_checked"].get<unsigned>();
    EXPECT_GE(launches, 1u) << modes;
    EXPECT_LE(launches, 2u) << modes;
    EXPECT_GE(report["verification"]["elements_compared"].get<unsigned>(), launches * 40 * 24);
  }
}

TEST(Mkbench, TakesSequencesOfDifferentLengths) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  const std::string json = daemons->folder() + "/out.json";
  const auto bench =
      run_program({MK_TEST_MKBENCH, "ring",
                   "--nodes",       "2",
                   "--local",       "1",
                   "--lengths",     "40,0,1,33",
                   "--sizes",       "vary",
                   "--query-heads", "2",
                   "--key-heads",   "1",
                   "--causal",      "--lse",
                   "--iters",       "2",
                   "--warmup",      "1",
                   "--join",        daemons->client_socket(0) + "," + daemons->client_socket(1),
                   "--admin",       daemons->admin_address(0) + "," + daemons->admin_address(1),
                   "--json",        json});
  EXPECT_EQ(0, bench.status) << bench.text;
  EXPECT_NE(std::string::npos, bench.text.find("74 rows in 4 sequences")) << bench.text;
  const auto report = read_json(json);
  ASSERT_FALSE(report.is_discarded());
  EXPECT_TRUE(report["correct"].get<bool>());
  // Every element of the output, and every log-sum-exp.
  EXPECT_EQ(6u * 74 * 2 * (64 + 1), report["verification"]["elements_compared"].get<unsigned>());
}

/// Daemons that were told no network: what they chose and said, and that a job runs over it.
void expect_chooses(const std::vector<std::string>& arguments, const std::string& said,
                    const std::string& shown) {
  tools::DaemonSetOptions options;
  options.fabric.clear();
  options.arguments = arguments;
  options.program = MK_TEST_MKERNELD;
  options.start_timeout = 120s;
  auto daemons = tools::DaemonSet::start(options);
  ASSERT_TRUE(daemons) << daemons.error().message;
  expect_job_works(*daemons, "anywhere", 1);
  for (std::uint32_t node = 0; node < 2; ++node) {
    std::ifstream file(daemons->log_path(node));
    const std::string log(std::istreambuf_iterator<char>(file), {});
    EXPECT_NE(std::string::npos, log.find("auto\\\" is " + said)) << log;  // in JSON
    const auto links =
        run_program({MK_TEST_MKCTL, "--address", daemons->admin_address(node), "link", "show"});
    EXPECT_EQ(0, links.status);
    EXPECT_NE(std::string::npos, links.text.find(shown)) << links.text;
  }
}

TEST(Mkerneld, UsesTheLoopbackByItselfWhileEverybodyIsHere) {
  expect_chooses({}, "loopback: all daemons of the configuration are on this machine", "loopback");
}

TEST(Mkerneld, FindsANetworkByItselfWhereSomebodyIsElsewhere) {
  // An address that documentation may use and nobody has.
  std::error_code none;
  const std::filesystem::directory_iterator ports("/sys/class/infiniband", none), end;
  const std::string found = ports == end ? "ofi" : "verbs";
  expect_chooses({"--insecure", "--peer", "2=192.0.2.1:7171"}, found, found);
}

TEST(Mkbench, BadUsageExitsWithTwo) {
  EXPECT_EQ(2, run_program({MK_TEST_MKBENCH, "gemm-ar", "--fabric", "carrier-pigeon"}).status);
  const auto none = run_program({MK_TEST_MKBENCH, "gemm-ar", "--m", "0"});
  EXPECT_EQ(2, none.status);
  EXPECT_NE(none.text.find("--m: must be at least 1"), std::string::npos) << none.text;
  EXPECT_EQ(
      2, run_program({MK_TEST_MKBENCH, "gemm-ar", "--fabric", "ofi", "--link-bandwidth", "1GB/s"})
             .status);
  EXPECT_EQ(2, run_program({MK_TEST_MKBENCH}).status);
}

// What is written takes nobody else's place, and that is known before anything is measured.
TEST(Mkbench, WritesOverNothingThatIsNotItsOwn) {
  const auto folder = tools::TemporaryFolder::create("mkbench-test");
  const std::string file = folder->path() + "/report.json";
  const auto bench = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {MK_TEST_MKBENCH, "gemm-ar", "--nodes", "1", "--local", "1", "--m",
                               "8", "--n", "8", "--k", "8", "--iters", "1", "--warmup", "0"});
    return run_program(more);
  };
  EXPECT_EQ(0, bench({"--json", file}).status);
  EXPECT_EQ(0, bench({"--json", file, "--modes", "fused"}).status) << "an earlier report";
  const auto report = read_json(file);
  EXPECT_EQ("mkbench gemm-ar", report["tool"]);
  std::ofstream(file) << "precious";
  std::filesystem::create_symlink(file, folder->path() + "/link");
  for (const char* option : {"--json", "--trace", "--trace-picture"}) {
    const auto refused = bench({option, file});
    EXPECT_EQ(2, refused.status) << refused.text;
    EXPECT_NE(std::string::npos, refused.text.find("--overwrite")) << refused.text;
    EXPECT_EQ(2, bench({option, folder->path() + "/link", "--overwrite"}).status) << option;
    EXPECT_EQ(2, bench({option, "/dev/null", "--overwrite"}).status) << option;
  }
  std::ifstream kept(file);
  EXPECT_EQ("precious", std::string(std::istreambuf_iterator<char>(kept), {}));
  EXPECT_EQ(0, bench({"--trace", file, "--overwrite"}).status);
  EXPECT_TRUE(read_json(file)["traceEvents"].is_array());
  EXPECT_EQ(2, std::distance(std::filesystem::directory_iterator(folder->path()),
                             std::filesystem::directory_iterator{}));
}

// Of every program, whatever it prints.
TEST(Programs, FailWhereTheirOutputIsLost) {
  const std::vector<std::string> bench = {
      MK_TEST_MKBENCH, "gemm-ar", "--nodes", "1", "--local", "1", "--m", "8",
      "--n",           "8",       "--k",     "8", "--iters", "1"};
  const std::vector<std::vector<std::string>> runs = {{MK_TEST_MKCTL, "--help"},
                                                      {MK_TEST_MKRUN, "--help"},
                                                      {MK_TEST_MKBENCH, "--help"},
                                                      {MK_TEST_MKERNELD, "--help"},
                                                      {MK_TEST_MKCTL, "--version"},
                                                      {MK_TEST_MKRUN, "--version"},
                                                      {MK_TEST_MKBENCH, "--version"},
                                                      {MK_TEST_MKERNELD, "--version"},
                                                      {MK_TEST_MKERNELD, "--check-config"},
                                                      {MK_TEST_MKERNELD, "--doctor"},
                                                      bench};
  for (const auto& run : runs) {
    std::vector<std::string> lost = {"/bin/sh", "-c", "exec \"$@\" >/dev/full", "sh"};
    lost.insert(lost.end(), run.begin(), run.end());
    const auto ended = run_program(lost);
    EXPECT_EQ(1, ended.status) << fmt::format("{}", fmt::join(run, " ")) << "\n" << ended.text;
    EXPECT_NE(std::string::npos, ended.text.find("cannot write to standard output: "))
        << ended.text;
  }
}

}  // namespace
}  // namespace mk::test
