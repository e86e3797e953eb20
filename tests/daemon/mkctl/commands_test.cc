// The commands about jobs, links, configuration and metrics, on real daemons; several daemons at
// once; what is written to files; and that all JSON keeps its schema.
#include <unistd.h>

#include <fstream>
#include <set>

#include "tests/daemon/mkctl/json_check.h"
#include "tests/daemon/mkctl/mkctl_rig.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class WithJob : public WithDaemon {
 protected:
  void SetUp() override {
    start({"--peer", "1=unix:" + (folder / "absent")});
    auto attached = RawClient::attach(folder / "sock", "train");
    ASSERT_TRUE(attached) << attached.error().message;
    client = std::make_unique<RawClient>(std::move(*attached));
    ASSERT_TRUE(client->wait_for(shm::MessageType::kJobUp));
  }
  std::unique_ptr<RawClient> client;
};

TEST_F(WithJob, ListsAndShowsJobs) {
  const Answer list = ask({"job", "list"});
  EXPECT_EQ(list.code, 0) << list.err;
  EXPECT_THAT(list.out, StartsWith("JOB    STATE"));
  EXPECT_THAT(list.out, HasSubstr("train  up"));
  const Answer show = ask({"job", "show", "train"});
  EXPECT_EQ(show.code, 0) << show.err;
  EXPECT_THAT(show.out, HasSubstr("SESSION"));
  EXPECT_THAT(show.out, HasSubstr("COMMIT-POST"));
  const auto json = ask_json({"job", "show", "train"});
  EXPECT_EQ(json["jobs"][0]["state"], "up");
  EXPECT_EQ(json["sessions"].size(), 1u);
  EXPECT_EQ(json["queues"].size(), 1u);
  const Answer absent = ask({"job", "show", "other"});
  EXPECT_EQ(absent.code, 1);
  EXPECT_THAT(absent.err, HasSubstr("no job 'other' at " + address));
}

TEST_F(WithJob, TerminatesAJobAndTellsItWhy) {
  const Answer answer = ask({"job", "terminate", "train", "--reason", "maintenance at noon"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_EQ(answer.out, "job 'train' is terminated: 1 ranks here, and its other nodes are told\n");
  ASSERT_TRUE(client->wait_for(shm::MessageType::kSessionFailed));
  // What it did stays to be seen.
  ASSERT_TRUE(eventually([&] {
    const std::string out = ask({"job", "list"}).out;
    return out.starts_with("no job has a rank here\n") && out.find("with an error") != out.npos;
  }));
  EXPECT_THAT(ask({"session", "list"}).out,
              HasSubstr("it was terminated by an administrator on node 0: maintenance at noon"));
  const Answer again = ask({"job", "terminate", "train"});
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.err, HasSubstr("no rank of a job 'train' is attached"));
  EXPECT_EQ(ask({"job", "show", "train"}).code, 0);  // its end is still known
}

TEST_F(WithJob, ShowsAPeerToWhichThereIsNoLinkYet) {
  const Answer answer = ask({"link", "show"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out,
              StartsWith("node 1 (unix:" + (folder / "absent") + "): no job has wanted"));
  EXPECT_THAT(answer.out, HasSubstr("not connected (it has to call us) for "));
  const auto json = ask_json({"link", "show", "1"});
  EXPECT_EQ(json["links"].size(), 0u);
  EXPECT_EQ(json["peers"][0]["state"], "waiting");
  EXPECT_GT(json["peers"][0]["state_for_ns"], 0);
  EXPECT_EQ(ask({"link", "show", "7"}).code, 1);
}

TEST_F(WithJob, NamesTheDaemonThatIsNotThere) {
  const Answer answer = ask({"who-is-slow", "--interval", "100ms"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out, HasSubstr("the daemon of node 1"));
  EXPECT_THAT(answer.out, HasSubstr("train: 0.0 launches/s"));
  const auto json = ask_json({"who-is-slow", "--interval", "100ms"});
  EXPECT_EQ(json["findings"][0]["kind"], "peer-down");
}

TEST_F(WithJob, DrawsTheMachineWithItsRanksAndWhatDecidedTheirRails) {
  const Answer answer = ask({"topology"});
  EXPECT_THAT(answer.out, HasSubstr("\nrank 0 of train: rail 0 (the only one)\n"));
  const auto json = nlohmann::json::parse(ask({"topology", "--json"}).out, nullptr, false);
  EXPECT_EQ(json["ranks"][0]["why"], "the only one");
  EXPECT_NE(json["ranks"][0]["cpus"], "");
}

// Not those of the file that mkctl would find here.
TEST_F(WithDaemon, DrawsTheRailsOfTheRunningDaemon) {
  start({"--rails", "3"});
  const auto json = ask_json({"topology"});
  EXPECT_EQ(json["rails"].size(), 3u);
  const std::string other = folder / "other.toml";
  std::ofstream(other) << "fabric = { name = \"null\", rails = 2 }\n";
  EXPECT_EQ(ask_json({"--config", other, "topology"})["rails"].size(), 2u) << "the file was named";
}

TEST_F(WithJob, PrintsMetricsAsPrometheusWouldSeeThem) {
  const Answer answer = ask({"metrics"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out, StartsWith("# HELP mkernel_build_info "));
  EXPECT_THAT(answer.out, HasSubstr("\nmkernel_job_sessions{job_name=\"train\",node=\"0\"} 1\n"));
  EXPECT_THAT(answer.out,
              HasSubstr("\nmkernel_commit_to_post_seconds_bucket{node=\"0\",le=\"+Inf\"} 0\n"));
}

/// Every command that prints an answer of a daemon, and what else it is given, in an order in which
/// all succeed; `config diff` apart, which wants a file.
std::vector<std::pair<std::string, std::vector<std::string>>> all_commands(
    const std::string& trace, const std::string& bundle) {
  return {
      {"version", {"version"}},
      {"status", {"status"}},
      {"session list", {"session", "list"}},
      {"job list", {"job", "list"}},
      {"job show", {"job", "show", "train"}},
      {"queue list", {"queue", "list"}},
      {"link list", {"link", "list"}},
      {"link show", {"link", "show"}},
      {"config show", {"config", "show"}},
      {"stats", {"stats", "--count", "1"}},
      {"metrics", {"metrics"}},
      {"who-is-slow", {"who-is-slow", "--interval", "100ms"}},
      {"trace record", {"trace", "record", "--seconds", "0.05", "-o", trace}},
      {"bundle", {"bundle", "-o", bundle}},
      {"top", {"top", "--interval", "100ms", "--count", "1"}},
      {"job set", {"job", "set", "train", "--weight", "3"}},
      {"topology", {"topology"}},
      {"doctor", {"doctor"}},
      {"ready", {"ready"}},
      {"drain", {"drain", "--timeout", "0s"}},
      {"ready", {"ready"}},  // no, but in the same form
      {"resume", {"resume"}},
      {"job terminate", {"job", "terminate", "train"}},
  };
}

TEST_F(WithJob, EveryJsonAnswerFitsTheSchema) {
  const Answer schema_text = run({"schema"});
  ASSERT_EQ(schema_text.code, 0) << schema_text.err;
  const auto schema = nlohmann::json::parse(schema_text.out);
  const std::string trace = folder / "trace.json", bundle = folder / "bundle.tar.gz";
  std::set<std::string> tried{"config diff"};  // in a test of its own, since it wants a file
  for (const auto& [name, arguments] : all_commands(trace, bundle)) {
    tried.insert(name);
    std::vector<std::string> with_json = arguments;
    with_json.push_back("--json");
    const Answer answer = ask(with_json);
    const auto json = nlohmann::json::parse(answer.out, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << name << ": " << answer.out << answer.err;
    EXPECT_EQ(json["command"], name);
    EXPECT_EQ(json_trouble(json, schema["commands"][name], schema), "") << name;
  }
  for (const auto& [name, definition] : schema["commands"].items()) {
    EXPECT_TRUE(tried.contains(name)) << name << " is in the schema, but not tried here";
  }
  ::unlink(trace.c_str());
  ::unlink(bundle.c_str());
}

// What cannot be printed is an exit status of every command, also of those that print without end.
TEST_F(WithJob, EveryCommandFailsWhereItsAnswerIsLost) {
  const auto expect_lost = [&](const std::string& name, std::vector<std::string> arguments,
                               const std::string& daemons = "--address") {
    arguments.insert(arguments.begin(),
                     {"/bin/sh", "-c", "exec \"$@\" >/dev/full", "sh", MK_MKCTL, "--timeout", "30s",
                      daemons, daemons == "--hosts" ? address + "," + address : address});
    Program program(folder, arguments);
    const int code = program.wait();
    EXPECT_TRUE(code == 1 || code == 2) << name << " exits with " << code;
    EXPECT_THAT(program.err(), HasSubstr("mkctl: cannot write to standard output: ")) << name;
  };
  const std::string trace = folder / "trace.json", bundle = folder / "bundle.tar.gz";
  for (const auto& [name, arguments] : all_commands(trace, bundle)) {
    std::vector<std::string> given = arguments;
    if (name == "top") given.push_back("--json");
    expect_lost(name, given);
    // A daemon that drains is not ready, and says so where nothing is lost.
    if (name == "drain") {
      EXPECT_EQ(ask({"resume"}).code, 0);
    }
  }
  expect_lost("status as JSON", {"status", "--json"});
  expect_lost("status of several", {"status"}, "--hosts");
  expect_lost("stats without end", {"stats", "--interval", "100ms"});
  expect_lost("stats of several", {"stats", "--interval", "100ms"}, "--hosts");
  expect_lost("top without end", {"top", "--json", "--interval", "100ms"});
  expect_lost("help", {"--help"});
  expect_lost("version", {"--version"});
  expect_lost("schema", {"schema"});
  expect_lost("completion", {"completion", "bash"});
  ::unlink(trace.c_str());
  ::unlink(bundle.c_str());
}

TEST_F(Mkctl, TheSchemaKeepsWhatItHasPromised) {
  const auto promised = nlohmann::json::parse(read_file(MK_SCHEMA));
  const auto now = nlohmann::json::parse(run({"schema"}).out);
  // A field may come, none may go or change its type.
  EXPECT_EQ(schema_trouble(promised, now, ""), "");
}

TEST_F(Mkctl, TheCheckOfSchemasSeesWhatIsWrong) {
  using nlohmann::json;
  const json schema = json::parse(R"({"$defs": {"A": {"type": "object", "properties":
      {"n": {"type": "integer"}, "e": {"enum": ["x"]}, "l": {"type": "array", "items": {"$ref": "#/$defs/A"}}},
      "required": ["n"]}}})");
  const json a = {{"$ref", "#/$defs/A"}};
  EXPECT_EQ(json_trouble({{"n", 1}, {"e", "x"}, {"l", json::array({{{"n", 2}}})}}, a, schema), "");
  EXPECT_NE(json_trouble(json::object(), a, schema), "");
  EXPECT_NE(json_trouble({{"n", "1"}}, a, schema), "");
  EXPECT_NE(json_trouble({{"n", 1.5}}, a, schema), "");
  EXPECT_EQ(json_trouble(nullptr, {{"type", {"string", "null"}}}, schema), "");
  EXPECT_NE(json_trouble(1, {{"type", {"string", "null"}}}, schema), "");
  EXPECT_NE(json_trouble({{"n", 1}, {"e", "y"}}, a, schema), "");
  EXPECT_NE(json_trouble({{"n", 1}, {"l", json::array({json::object()})}}, a, schema), "");
  EXPECT_NE(schema_trouble({{"a", 1}}, json::object(), ""), "");
  EXPECT_NE(schema_trouble({{"a", {{"type", "integer"}}}}, {{"a", {{"type", "string"}}}}, ""), "");
  EXPECT_NE(schema_trouble({{"required", {"x"}}}, {{"required", {"y"}}}, ""), "");
  EXPECT_EQ(schema_trouble({{"required", {"x"}}}, {{"required", {"y", "x"}}, {"b", 1}}, ""), "");
}

TEST_F(WithDaemon, ShowsItsConfigurationAndWhatTheFileWouldChange) {
  std::ofstream(folder / "toml") << "[limits]\nsessions = 9\n";
  start({"--config", folder / "toml"});
  const Answer show = ask({"config", "show"});
  EXPECT_EQ(show.code, 0) << show.err;
  EXPECT_THAT(show.out, StartsWith("# in effect at " + address + "; from " + (folder / "toml")));
  EXPECT_THAT(show.out, HasSubstr("\nsessions = 9\n"));
  const Answer same = ask({"config", "diff"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_EQ(same.out, (folder / "toml") + " is in effect\n");
  std::ofstream(folder / "toml") << "[limits]\nsessions = 10\n[log]\nlevel = 'debug'\n";
  const Answer differs = ask({"config", "diff"});
  EXPECT_EQ(differs.code, 1);
  EXPECT_EQ(differs.out,
            "limits.sessions: 9 -> 10  (restart)\nlog.level: \"info\" -> \"debug\"  (reload)\n");
  const Answer json = ask({"config", "diff", "--json"});
  EXPECT_EQ(nlohmann::json::parse(json.out)["changes"][0]["key"], "limits.sessions");
  const auto schema = nlohmann::json::parse(run({"schema"}).out);
  EXPECT_EQ(
      json_trouble(nlohmann::json::parse(json.out), schema["commands"]["config diff"], schema), "");
  std::ofstream(folder / "toml") << "[limits]\nsessions = 'many'\n";
  const Answer broken = ask({"config", "diff"});
  EXPECT_EQ(broken.code, 1);
  EXPECT_THAT(broken.err, HasSubstr("could not take " + (folder / "toml")));
  std::ofstream(folder / "other") << "[limits]\nsessions = 9\n[fabric]\nrails = 2\n";
  const Answer other = ask({"config", "diff", folder / "other"});
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.out, HasSubstr("fabric.rails: \"auto\" -> 2  (restart)\n"));
  EXPECT_EQ(ask({"config", "diff", "/absent"}).code, 2);
}

TEST_F(WithDaemon, WithoutAFileThereIsNothingToCompare) {
  start();
  const Answer answer = ask({"config", "diff"});
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.err, HasSubstr("has no configuration file"));
}

TEST_F(WithDaemon, SeveralDaemonsAnswerForThemselves) {
  start();
  const std::string gone = "unix:" + (folder / "gone");
  const Answer text = run({"--hosts", address + "," + gone + "," + address, "status"});
  EXPECT_EQ(text.code, 3);
  EXPECT_THAT(text.out, HasSubstr("== " + address + " ==\nnode 0: ok\n"));
  EXPECT_THAT(text.out, HasSubstr("== " + gone + " ==\n"));
  EXPECT_THAT(text.err, HasSubstr("mkctl: " + gone + ": no answer from " + gone));
  const Answer json_text = run({"--hosts", address + "," + gone, "--json", "status"});
  const auto json = nlohmann::json::parse(json_text.out);
  EXPECT_EQ(json["schema_version"], 1);
  ASSERT_EQ(json["hosts"].size(), 2u);
  EXPECT_EQ(json["hosts"][0]["answer"]["health"], "ok");
  EXPECT_EQ(json["hosts"][0]["exit_status"], 0);
  EXPECT_EQ(json["hosts"][1]["exit_status"], 3);
  EXPECT_TRUE(json["hosts"][1]["answer"].is_null());
  EXPECT_THAT(json["hosts"][1]["error"].get<std::string>(), HasSubstr("no answer"));
  std::ofstream(folder / "hosts") << "# all of them\n" << address << "  # this one\n\n" << gone;
  const Answer from_file = run({"--hosts", "@" + (folder / "hosts"), "--json", "version"});
  EXPECT_EQ(nlohmann::json::parse(from_file.out)["hosts"].size(), 2u);
  EXPECT_EQ(run({"--hosts", ",", "status"}).code, 2);
  EXPECT_EQ(run({"--hosts", "@/absent", "status"}).code, 2);
  EXPECT_EQ(run({"--host", address, "status"}).code, 0);
}

/// A hundred at once, of which most do not answer: not one after the other.
TEST_F(WithDaemon, ManyDaemonsAreAskedSideBySide) {
  start();
  std::string hosts = address;
  for (int i = 0; i < 100; ++i) hosts += ",unix:" + (folder / ("gone" + std::to_string(i)));
  const Answer answer = run({"--hosts", hosts, "--json", "version"});
  EXPECT_EQ(answer.code, 3);
  EXPECT_EQ(nlohmann::json::parse(answer.out)["hosts"].size(), 101u);
}

TEST_F(WithDaemon, RecordsATraceOfNothing) {
  start();
  const Answer answer = ask({"trace", "record", "--seconds", "0.1", "-o", folder / "x.json"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_EQ(answer.out,
            (folder / "x.json") +
                ": 0 writes in 0 submissions, 0 failed, 0 under way at an edge; 0 arrivals\n");
  const auto json = nlohmann::json::parse(read_file(folder / "x.json"));
  EXPECT_TRUE(json["traceEvents"].is_array());
  EXPECT_EQ(ask({"trace", "record", "--seconds", "0.1", "-o", "/absent/x"}).code, 2);
  EXPECT_EQ(ask({"trace", "record", "--seconds", "100", "-o", folder / "x.json"}).code, 2);
  EXPECT_EQ(ask({"trace", "record"}).code, 2);
  ::unlink((folder / "x.json").c_str());
}

TEST_F(WithDaemon, WritesOverNothingThatIsNotItsOwn) {
  start();
  const std::string file = folder / "f", link = folder / "link";
  const auto record = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"trace", "record", "--seconds", "0.05", "-o"});
    return ask(more);
  };
  EXPECT_EQ(record({file}).code, 0);
  EXPECT_EQ(record({file}).code, 0) << "an earlier recording";
  ASSERT_EQ(::symlink(file.c_str(), link.c_str()), 0);
  for (const std::string& out : {link, std::string("/dev/null")}) {
    EXPECT_EQ(record({out, "--overwrite"}).code, 2) << out;
    EXPECT_EQ(ask({"bundle", "--overwrite", "-o", out}).code, 2) << out;
  }
  std::ofstream(file) << "precious";
  const Answer refused = record({file});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--overwrite"));
  EXPECT_EQ(ask({"bundle", "-o", file}).code, 2);
  EXPECT_EQ(read_file(file), "precious");
  EXPECT_EQ(record({file, "--overwrite"}).code, 0);
  EXPECT_EQ(ask({"bundle", "--overwrite", "-o", file}).code, 0);
  for (const std::string& name : {file, link}) ::unlink(name.c_str());
}

TEST_F(WithDaemon, BundlesWhatItKnowsAndNoSecret) {
  std::ofstream(folder / "toml") << "[metrics]\nlisten = '127.0.0.1:0'\n";
  start({"--config", folder / "toml"});
  const std::string gone = "unix:" + (folder / "gone");
  const Answer answer = run({"--hosts", address + "," + gone, "bundle", "-o", folder / "b.tar.gz"});
  EXPECT_EQ(answer.code, 3);  // one did not answer
  EXPECT_THAT(answer.out, HasSubstr("1 of 2 daemons"));
  Program tar(folder, {"/bin/tar", "-tzf", folder / "b.tar.gz"});
  EXPECT_EQ(tar.wait(), 0);
  for (const char* file :
       {"manifest.json", "version.json", "status.json", "sessions.json", "jobs.json", "queues.json",
        "links.json", "config.json", "metrics.txt", "stats.json", "version.json.error",
        "system/uname.txt", "system/memory.txt", "log/mkerneld.txt"}) {
    EXPECT_THAT(tar.out(), HasSubstr(std::string("/") + file + "\n"));
  }
  Program all(folder, {"/bin/tar", "-xzOf", folder / "b.tar.gz"});
  EXPECT_EQ(all.wait(), 0);
  EXPECT_THAT(all.out(), HasSubstr("mkernel_build_info"));
  EXPECT_THAT(all.out(), HasSubstr("MemTotal"));
  EXPECT_THAT(all.out(), Not(HasSubstr("PRIVATE KEY")));
  ::unlink((folder / "b.tar.gz").c_str());
}

TEST_F(Mkctl, CompletesInBash) {
  const auto completions = [&](const std::string& line) {
    Program bash(folder, {"/bin/bash", "-c",
                          "source <(" MK_MKCTL " completion bash); COMP_WORDS=(" + line +
                              " ''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _mkctl mkctl '' x; "
                              "echo \" ${COMPREPLY[*]} \""});
    EXPECT_EQ(bash.wait(), 0) << bash.err();
    return bash.out();
  };
  for (const char* word : {" status ", " who-is-slow ", " job ", " top ", " bundle "}) {
    EXPECT_THAT(completions("mkctl"), HasSubstr(word));
  }
  EXPECT_EQ(completions("mkctl config"), " show diff \n");
  EXPECT_THAT(completions("mkctl --json link"), HasSubstr(" show "));
  EXPECT_EQ(completions("mkctl link show"), "  \n");
  for (const char* shell : {"zsh", "fish"}) {
    EXPECT_THAT(run({"completion", shell}).out, HasSubstr("who-is-slow"));
  }
  EXPECT_EQ(run({"completion", "tcsh"}).code, 2);
}

TEST_F(WithDaemon, TopWantsATerminal) {
  start();
  const Answer answer = ask({"top"});
  EXPECT_EQ(answer.code, 2);
  EXPECT_THAT(answer.err, HasSubstr("this needs a terminal"));
}

}  // namespace
}  // namespace mk::daemon
