// The configuration: every key good and bad, messages with their places, overrides, the example.
#include "daemon/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <set>
#include <sstream>

namespace mk::daemon {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string error_of(const std::string& toml, const ConfigOverrides& overrides = {}) {
  const auto config = parse_config(toml, "mk.toml", overrides);
  if (config) return "(accepted)";
  EXPECT_EQ(config.error().code, ErrorCode::kInvalidArgument);
  return config.error().message;
}

Config config_of(const std::string& toml, const ConfigOverrides& overrides = {}) {
  const auto config = parse_config(toml, "mk.toml", overrides);
  EXPECT_TRUE(config) << (config ? "" : config.error().message);
  return config.value_or(Config{});
}

// -- texts that are no TOML ---------------------------------------------------------------------

TEST(Config, TableHeadersThatNameNoKeyAreErrorsLikeOthers) {
  // Found by tests/fuzz: the parser used to end the process.
  for (const char* toml : {"[.a]", "[\x01]", "[[.a]]", "[=]", "[a.]", "[  \xc3\xa9]"}) {
    EXPECT_THAT(error_of(toml), HasSubstr("mk.toml:1:")) << toml;
  }
}

TEST(Config, IsAsciiThroughout) {
  // Found by tests/fuzz: what the parser does with these outside strings is undefined.
  EXPECT_EQ(error_of("node_id = 1\n  \xc3\xa9"),
            "mk.toml:2:3: byte 0xc3 is not ASCII: a configuration is ASCII throughout, its "
            "comments too");
  EXPECT_THAT(error_of("# \xe3\x80\x81"), HasSubstr("mk.toml:1:3: byte 0xe3"));
  EXPECT_THAT(error_of("socket.path = \"/run/\\u00e9\""), HasSubstr("ASCII"));
  EXPECT_THAT(error_of("fabric.verbs.devices = [\"\\u00e9\"]"), HasSubstr("ASCII"));
}

// -- every key --------------------------------------------------------------------------------

struct GoodCase {
  const char* toml;
  const char* printed;  ///< a line of the effective configuration
};
class GoodValue : public testing::TestWithParam<GoodCase> {};

TEST_P(GoodValue, IsTakenAndPrinted) {
  const std::string printed = print_config(config_of(GetParam().toml));
  EXPECT_THAT("\n" + printed, HasSubstr(std::string("\n") + GetParam().printed + "\n"));
}

INSTANTIATE_TEST_SUITE_P(
    Keys, GoodValue,
    testing::Values(
        GoodCase{"node_id = 127", "node_id = 127"},
        GoodCase{"listen = 'unix:/tmp/peer.sock'", "listen = \"unix:/tmp/peer.sock\""},
        GoodCase{"listen = '127.0.0.1:0'", "listen = \"127.0.0.1:0\""},
        GoodCase{"insecure = true", "insecure = true"},
        GoodCase{"[socket]\npath = '@mk'", "path = \"@mk\""},
        GoodCase{"[socket]\nmode = '0600'", "mode = \"0600\""},
        GoodCase{"[[peer]]\nid = 1\naddress = 'localhost:7'", "address = \"localhost:7\""},
        GoodCase{"[fabric]\nname = 'ofi'", "name = \"ofi\""},
        GoodCase{"[fabric]\nrails = 16", "rails = 16"},
        GoodCase{"[fabric]\nrails = 'auto'", "rails = \"auto\""},
        GoodCase{"[fabric.loopback]\nbandwidth = '400Gbit/s'", "bandwidth = \"50GB/s\""},
        GoodCase{"[fabric.loopback]\nlatency = '5us'", "latency = \"5us\""},
        GoodCase{"[fabric.ofi]\nprovider = 'efa'", "provider = \"efa\""},
        GoodCase{"[fabric.ofi]\nbind = 'eth0'", "bind = [\"eth0\"]"},
        GoodCase{"[fabric.ofi]\nbind = ''", "bind = []"},
        GoodCase{"[fabric.ofi]\nbind = ['a+b', 'c']", "bind = [\"a+b\", \"c\"]"},
        GoodCase{"[fabric]\nname = 'verbs'", "name = \"verbs\""},
        GoodCase{"[fabric.verbs]\ndevices = ['mlx5_0', 'mlx5_1:2']",
                 "devices = [\"mlx5_0\", \"mlx5_1:2\"]"},
        GoodCase{"[fabric.verbs]\ngid_index = 3", "gid_index = 3"},
        GoodCase{"[fabric.verbs]\npkey = 0x8001", "pkey = 0x8001"},
        GoodCase{"[fabric.verbs]\nmtu = 4096", "mtu = 4096"},
        GoodCase{"[fabric.verbs]\nqueues = 8", "queues = 8"},
        GoodCase{"[fabric.verbs]\ntimeout = 31", "timeout = 31"},
        GoodCase{"[fabric.verbs]\nretries = 0", "retries = 0"},
        GoodCase{"[fabric.verbs]\nrnr_retries = 6", "rnr_retries = 6"},
        GoodCase{"[fabric.verbs]\nservice_level = 15", "service_level = 15"},
        GoodCase{"[fabric.verbs]\ntraffic_class = 106", "traffic_class = 106"},
        GoodCase{"[fabric.verbs]\nrelaxed_ordering = false", "relaxed_ordering = false"},
        GoodCase{"[fabric.verbs]\ngpu_direct = false", "gpu_direct = false"},
        GoodCase{"[fabric.verbs]\narrival = 'immediate'", "arrival = \"immediate\""},
        GoodCase{"[fabric.verbs]\nsubmission = 'classic'", "submission = \"classic\""},
        GoodCase{"[proxy]\ncpus = [3]", "cpus = [3]"},
        GoodCase{"[proxy]\nbatch_window = '0'", "batch_window = \"0s\""},
        GoodCase{"[proxy]\nspin = '1ms'", "spin = \"1ms\""},
        GoodCase{"[proxy]\nspin = '0'", "spin = \"0s\""},
        GoodCase{"[proxy]\nspin = 'auto'", "spin = \"auto\""},
        GoodCase{"[proxy]\ncpus = [1]", "spin = \"auto\""},
        GoodCase{"[proxy]\nsleep_max = '20ms'", "sleep_max = \"20ms\""},
        GoodCase{"[limits]\nsessions = 1", "sessions = 1"},
        GoodCase{"[limits]\noutstanding = 65536", "outstanding = 65536"},
        GoodCase{"[limits]\nregistered = '64GiB'", "registered = \"64GiB\""},
        GoodCase{"[limits]\nregistered = 'auto'", "registered = \"auto\""},
        GoodCase{"[limits]\nall_registered = 'unlimited'", "all_registered = \"unlimited\""},
        GoodCase{"[limits]\nuser_sessions = 0", "user_sessions = 0"},
        GoodCase{"[limits]\ndescriptors = 'auto'", "descriptors = \"auto\""},
        GoodCase{"[limits]\ndrain = '0'", "drain = \"0s\""},
        GoodCase{"[limits]\nended_jobs = '0'", "ended_jobs = \"0s\""},
        GoodCase{"[[job]]\npattern = 'a*'\nweight = 9", "weight = 9"},
        GoodCase{"[log]\nlevel = 'debug'", "level = \"debug\""},
        GoodCase{"[log]\nformat = 'journald'", "format = \"journald\""},
        GoodCase{"[metrics]\nlisten = '127.0.0.1:9464'", "[metrics]\nlisten = \"127.0.0.1:9464\""},
        GoodCase{"[tls]\ncert='c'\nkey='k'\nca='a \"b\"'", "ca = \"a \\\"b\\\"\""}));

struct BadCase {
  const char* toml;
  const char* message;
};
class BadValue : public testing::TestWithParam<BadCase> {};

TEST_P(BadValue, IsRefusedWithItsPlace) {
  EXPECT_EQ(error_of(GetParam().toml), GetParam().message);
}

constexpr const char* kNodeIdText =
    "mk.toml:1:11: node_id: a whole number from 0 to 1023 is expected";
constexpr const char* kListenText =
    "mk.toml:1:10: listen: \"host:port\", \"[ipv6]:port\" or \"unix:/path\" is expected, with a "
    "port "
    "of 0 to 65535";

INSTANTIATE_TEST_SUITE_P(
    Keys, BadValue,
    testing::Values(
        BadCase{"node_id = 1024", kNodeIdText}, BadCase{"node_id = '1'", kNodeIdText},
        BadCase{"node_id = -1", kNodeIdText}, BadCase{"node_id = 1.0", kNodeIdText},
        BadCase{"listen = 7171", "mk.toml:1:10: listen: a string in quotes is expected"},
        BadCase{"listen = 'localhost'", kListenText},
        BadCase{
            "listen = 'unix:x'",
            "mk.toml:1:10: listen: the path after \"unix:\" must be absolute and of at most 107 "
            "bytes"},
        BadCase{"insecure = 'yes'", "mk.toml:1:12: insecure: true or false is expected"},
        BadCase{"socket = '/x'", "mk.toml:1:10: socket: a table is expected: [socket]"},
        BadCase{"[socket]\npath = 'x'",
                "mk.toml:2:8: socket.path: an absolute path, or \"@name\", of at most 107 bytes is "
                "expected"},
        BadCase{"[socket]\nmode = 666", "mk.toml:2:8: socket.mode: a string in quotes is expected"},
        BadCase{"[socket]\nmode = '888'",
                "mk.toml:2:8: socket.mode: an octal mode such as \"0660\" is expected"},
        BadCase{"[socket]\nmode = '1777'",
                "mk.toml:2:8: socket.mode: an octal mode such as \"0660\" is expected"},
        BadCase{"peer = 1", "mk.toml:1:8: peer: a list of tables is expected: [[peer]]"},
        BadCase{"[[peer]]\nid = 1", "mk.toml:1:1: peer.address is missing"},
        BadCase{"[[peer]]\naddress = 'h:1'\nid = 2000",
                "mk.toml:3:6: peer.id: a whole number from 0 to 1023 is expected"},
        BadCase{"[[peer]]\nid = 1\naddress = 'localhost:0'",
                "mk.toml:3:11: peer.address: \"host:port\", \"[ipv6]:port\" or \"unix:/path\" is "
                "expected, with a port of 1 to 65535"},
        BadCase{"[[peer]]\nid=1\naddress='localhost:1'\n[[peer]]\nid=1\naddress='localhost:2'",
                "mk.toml:4:1: peer: node id 1 is given to two peers"},
        BadCase{"[fabric]\nname = 'tcp'",
                "mk.toml:2:8: fabric.name: \"tcp\" is not one of \"auto\", \"loopback\", \"ofi\", "
                "\"verbs\", "
                "\"null\""},
        BadCase{"[fabric]\nrails = 0",
                "mk.toml:2:9: fabric.rails: a whole number from 1 to 16, or \"auto\", is expected"},
        BadCase{"[fabric]\nrails = 'all'",
                "mk.toml:2:9: fabric.rails: a whole number from 1 to 16, or \"auto\", is expected"},
        BadCase{
            "[fabric]\nrails = 2\n[fabric.verbs]\ndevices = ['a', 'b', 'c']",
            "fabric.verbs.devices: 3 entries for 2 rails; one for all, one per rail, or a number "
            "that divides the rails is expected (of several NICs for one rail, \"a+b\" is one "
            "entry)"},
        BadCase{"[fabric]\nrails = 3\n[fabric.ofi]\nbind = ['a', 'b']",
                "fabric.ofi.bind: 2 entries for 3 rails; one for all, one per rail, or a number "
                "that divides the rails is expected (of several NICs for one rail, \"a+b\" is one "
                "entry)"},
        BadCase{"[fabric.ofi]\nbind = ['a','a','a','a','a','a','a','a','a','a','a','a','a','a',"
                "'a','a','a']",
                "fabric.ofi.bind: 17 entries; there are at most 16 rails, and a rail of several "
                "NICs is one entry, \"a+b\""},
        BadCase{"[fabric.loopback]\nbandwidth = 2",
                "mk.toml:2:13: fabric.loopback.bandwidth: a string in quotes is expected"},
        BadCase{"[fabric.loopback]\nlatency = '5 minutes'",
                "mk.toml:2:11: fabric.loopback.latency: a duration such as \"5us\" is expected: a "
                "number and ns, us, ms or s, at most a day"},
        BadCase{
            "[fabric.ofi]\nbind = \"a\\nb\"",
            "mk.toml:2:8: fabric.ofi.bind: a line of at most 256 bytes of ASCII is expected, or a "
            "list of them"},
        BadCase{"[fabric.ofi]\nbind = ['eth0', '']",
                "mk.toml:2:8: fabric.ofi.bind: a list of strings of 1 to 256 bytes of ASCII is "
                "expected"},
        BadCase{
            "[fabric.verbs]\ndevices = 'mlx5_0'",
            "mk.toml:2:11: fabric.verbs.devices: a list of strings of 1 to 80 bytes of ASCII is "
            "expected"},
        BadCase{"[fabric.verbs]\nmtu = 1500",
                "fabric.verbs.mtu: 1500 is not one of 0, 256, 512, 1024, 2048, 4096"},
        BadCase{"[fabric.verbs]\nqueues = 9",
                "mk.toml:2:10: fabric.verbs.queues: a whole number from 1 to 8 is expected"},
        BadCase{"[fabric.verbs]\narrival = 'soon'",
                "mk.toml:2:11: fabric.verbs.arrival: \"soon\" is not one of \"flag\", "
                "\"immediate\""},
        BadCase{"[proxy]\nspin = 'soon'",
                "mk.toml:2:8: proxy.spin: a duration such as \"5us\" is expected: a number and ns, "
                "us, ms or s, at most a day, or \"auto\""},
        BadCase{"[proxy]\nspin = 5", "mk.toml:2:8: proxy.spin: a string in quotes is expected"},
        BadCase{"[proxy]\nsleep_max = '20.001ms'",
                "mk.toml:2:13: proxy.sleep_max: a duration such as \"5us\" is expected: a number "
                "and ns, us, ms or s, at most 20ms"},
        BadCase{"[proxy]\ncpus = 1",
                "mk.toml:2:8: proxy.cpus: a list of whole numbers from -1 to 4095 is expected"},
        BadCase{"[proxy]\ncpus = [0, 'x']",
                "mk.toml:2:8: proxy.cpus: a list of whole numbers from -1 to 4095 is expected"},
        BadCase{"fabric.rails = 1\n[proxy]\ncpus = [0, 1]",
                "proxy.cpus: 2 entries for 1 rails; one per rail is expected"},
        BadCase{"[limits]\nsessions = 65",
                "mk.toml:2:12: limits.sessions: a whole number from 1 to 64 is expected"},
        BadCase{
            "[limits]\nregistered = '1'",
            "mk.toml:2:14: limits.registered: a size such as \"16GiB\" is expected: a number and "
            "B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, or \"unlimited\", or \"auto\""},
        BadCase{"[limits]\nuser_sessions = 'all'",
                "mk.toml:2:17: limits.user_sessions: a whole number from 0 to 64, or \"auto\", is "
                "expected"},
        BadCase{"[[job]]\nweight = 2", "mk.toml:1:1: job.pattern is missing"},
        BadCase{"[[job]]\npattern = 'x'\nweight = 0",
                "mk.toml:3:10: job.weight: a whole number from 1 to 1000 is expected"},
        BadCase{"[log]\nlevel = 'loud'",
                "mk.toml:2:9: log.level: \"loud\" is not one of \"debug\", \"info\", \"warning\", "
                "\"error\""},
        BadCase{"[log]\nformat = 'xml'",
                "mk.toml:2:10: log.format: \"xml\" is not one of \"auto\", \"text\", \"json\", "
                "\"journald\""},
        BadCase{"[metrics]\nlisten = '0.0.0.0:9464'",
                "mk.toml:2:10: metrics.listen: \"\" or a loopback address such as "
                "\"127.0.0.1:9464\" is expected"},
        BadCase{"[tls]\ncert = 'c'", "tls: cert, key and ca are needed together (mutual TLS)"}));

// -- unknown keys, several mistakes, syntax ---------------------------------------------------

TEST(Config, UnknownKeysNameTheNearestOne) {
  EXPECT_THAT(
      error_of("nodeid = 1"),
      HasSubstr(
          "mk.toml:1:1: nodeid: unknown key; did you mean \"node_id\"? Known here: "
          "node_id, listen, insecure, socket, peer, discovery, fabric, proxy, limits, admin, job, "
          "gpu, metrics, log, tls"));
  EXPECT_THAT(error_of("[fabric.loopback]\nbandwitdh = '1GB/s'"),
              HasSubstr("mk.toml:2:1: fabric.loopback.bandwitdh: unknown key; did you mean "
                        "\"bandwidth\"?"));
  EXPECT_THAT(error_of("[[peer]]\nid = 1\naddress = 'localhost:1'\nport = 3"),
              HasSubstr("mk.toml:4:1: peer.port: unknown key. Known here: id, address"));
  EXPECT_THAT(error_of("[meters]\nx = 1"), HasSubstr("mk.toml:1:2: meters: unknown key"));
}

TEST(Config, ReportsAllMistakesInTheOrderOfTheFile) {
  EXPECT_EQ(error_of("node_id = 'a'\n\n[log]\nlevel = 'loud'\n[limits]\nsessions = 0\n",
                     {.node_id = "x"}),
            "mk.toml:1:11: node_id: a whole number from 0 to 1023 is expected\n"
            "mk.toml:4:9: log.level: \"loud\" is not one of \"debug\", \"info\", \"warning\", "
            "\"error\"\n"
            "mk.toml:6:12: limits.sessions: a whole number from 1 to 64 is expected\n"
            "--node-id x: a node id from 0 to 1023 is expected");
}

TEST(Config, SyntaxErrorsHaveTheirPlace) {
  EXPECT_THAT(error_of("node_id = 1\nlisten = \n"), HasSubstr("mk.toml:2:"));
  EXPECT_THAT(error_of("node_id = 1\nnode_id = 2\n"), HasSubstr("mk.toml:2:"));
  EXPECT_THAT(error_of(std::string("\0\xff", 2)), HasSubstr("mk.toml:1:"));
}

// -- what needs all of it ---------------------------------------------------------------------

TEST(Config, BeyondThisMachineNeedsTlsOrConsent) {
  EXPECT_THAT(error_of("listen = '0.0.0.0:7171'"),
              HasSubstr("listen 0.0.0.0:7171 is reached over the network: give [tls] cert, key and "
                        "ca; with insecure = true instead, anybody"));
  EXPECT_THAT(error_of("[[peer]]\nid = 1\naddress = '10.0.0.2:7171'"),
              HasSubstr("peer 1 10.0.0.2:7171 is reached over the network"));
  EXPECT_TRUE(config_of("listen = '0.0.0.0:1'\ninsecure = true").insecure);
  EXPECT_TRUE(config_of("listen = '0.0.0.0:1'\n[tls]\ncert='c'\nkey='k'\nca='a'").tls.enabled());
  EXPECT_TRUE(config_of("listen = '0.0.0.0:1'", {.insecure = true}).insecure);
}

TEST(Config, ADaemonIsNotItsOwnPeer) {
  EXPECT_EQ(error_of("node_id = 3\n[[peer]]\nid = 3\naddress = 'localhost:1'"),
            "peer 3: this daemon has node id 3 itself");
  EXPECT_EQ(
      error_of("[[peer]]\nid=1\naddress='localhost:1'\n[[peer]]\nid=2\naddress='localhost:1'"),
      "peer 2: another peer has address localhost:1");
  // The default is listen = "127.0.0.1:7171".
  const std::string peer = "[[peer]]\nid = 1\naddress = ";
  for (const std::string& own : {peer + "'127.0.0.1:7171'", peer + "'localhost:7171'",
                                 "listen='unix:/p'\n" + peer + "'unix:/p'",
                                 "insecure=true\nlisten='0.0.0.0:5'\n" + peer + "'localhost:5'",
                                 "insecure=true\ndiscovery.advertise='a:9'\n" + peer + "'a:9'"}) {
    EXPECT_THAT(error_of(own), HasSubstr("is this daemon's own address: name the one of node 1"))
        << own;
  }
  EXPECT_EQ(error_of(peer + "'127.0.0.2:7171'"), "(accepted)");
  EXPECT_EQ(error_of(peer + "'127.0.0.1:7172'"), "(accepted)");
  EXPECT_EQ(error_of("listen = 'unix:/x'\n[socket]\npath = '/x'"),
            "listen and socket.path must not be the same socket");
}

TEST(Config, JobWeightsByTheFirstPatternThatMatches) {
  const std::vector<JobConfig> jobs{
      {"prod-*", {8, {}}}, {"*-?", {3, {}}}, {"prod-small", {2, {}}}, {"", {7, {}}}};
  EXPECT_EQ(job_share(jobs, "prod-small").weight, 8u);
  EXPECT_EQ(job_share(jobs, "prod-").weight, 8u);
  EXPECT_EQ(job_share(jobs, "a-b-c").weight, 3u);
  EXPECT_EQ(job_share(jobs, "a-b-cd").weight, 1u);
  EXPECT_EQ(job_share(jobs, "").weight, 7u);
  EXPECT_EQ(job_share({{"*a*b*", {2, {}}}}, std::string(200, 'a')).weight, 1u);
  EXPECT_EQ(job_share({{"*a*b*", {2, {}}}}, std::string(200, 'a') + "b").weight, 2u);
  EXPECT_EQ(job_share({}, "x").weight, 1u);
}

// -- overrides --------------------------------------------------------------------------------

TEST(Config, FlagsOverrideTheFile) {
  ConfigOverrides over;
  over.node_id = "2";
  over.listen = "unix:/tmp/2.sock";
  over.socket = "@two";
  over.fabric = "null";
  over.rails = "2";
  over.link_bandwidth = "1GB/s";
  over.link_latency = "1ms";
  over.log_level = "error";
  over.log_format = "json";
  over.peers = {"0=unix:/tmp/0.sock", "1=unix:/tmp/1.sock"};
  const Config config = config_of(
      "node_id = 1\n[[peer]]\nid = 0\naddress = 'localhost:9'\n[fabric]\nname='ofi'", over);
  EXPECT_EQ(config.node_id, 2u);
  EXPECT_EQ(config.listen.text(), "unix:/tmp/2.sock");
  EXPECT_EQ(config.socket.path, "@two");
  EXPECT_EQ(config.fabric.name, "null");
  EXPECT_EQ(config.fabric.rails, 2u);
  EXPECT_EQ(config.fabric.loopback.bandwidth_bytes_per_second, 1e9);
  EXPECT_EQ(config.fabric.loopback.latency_ns, 1'000'000u);
  EXPECT_EQ(config.log.level, "error");
  EXPECT_EQ(config.log.format, LogFormat::kJson);
  ASSERT_EQ(config.peers.size(), 2u);
  EXPECT_EQ(config.peers[0].address.text(), "unix:/tmp/0.sock");
  EXPECT_EQ(config.peers[1].id, 1u);
}

TEST(Config, TheAdminSocketIsNotInTheFolderThatJobsMount) {
  const auto admin_of = [](const std::string& toml) { return admin_socket_path(config_of(toml)); };
  EXPECT_EQ(admin_of(""), "/run/mkernel-admin/mkerneld.sock");
  EXPECT_EQ(admin_of("socket.path = '/run/mkernel/a/b.sock'"), "/run/mkernel-admin/a/b.sock");
  // Whatever the length of the name, none falls back to the folder of the clients.
  for (std::size_t bytes = 1; bytes <= 94; ++bytes) {
    const std::string admin =
        admin_of("socket.path = '/run/mkernel/" + std::string(bytes, 'x') + "'");
    EXPECT_THAT(admin, Not(HasSubstr("/run/mkernel/")));
    EXPECT_EQ(admin.empty(), bytes > 88) << "there is none where its path would be too long";
  }
  EXPECT_EQ(admin_of("socket.path = '/srv/m.sock'"), "/srv/m-admin.sock");
  EXPECT_EQ(admin_of("socket.path = '@m'"), "");
  EXPECT_EQ(admin_of("[admin]\nsocket = '/elsewhere/a.sock'"), "/elsewhere/a.sock");
}

TEST(Config, BadFlagsAreNamed) {
  EXPECT_EQ(error_of("", {.node_id = "-1"}), "--node-id -1: a node id from 0 to 1023 is expected");
  EXPECT_THAT(error_of("", {.listen = "x"}), HasSubstr("--listen x: \"host:port\""));
  EXPECT_THAT(error_of("", {.socket = "x"}), HasSubstr("--socket x: an absolute path"));
  EXPECT_THAT(error_of("", {.fabric = "x"}), HasSubstr("--fabric x: \"x\" is not one of"));
  EXPECT_EQ(error_of("", {.rails = "17"}),
            "--rails 17: \"auto\" or a number from 1 to 16 is expected");
  EXPECT_THAT(error_of("", {.link_bandwidth = "x"}), HasSubstr("--link-bandwidth x: a bandwidth"));
  EXPECT_THAT(error_of("", {.link_latency = "x"}), HasSubstr("--link-latency x: a duration"));
  EXPECT_THAT(error_of("", {.log_level = "x"}), HasSubstr("--log-level x: \"x\" is not one of"));
  EXPECT_THAT(error_of("", {.log_format = "x"}), HasSubstr("--log-format x: \"x\" is not one of"));
  EXPECT_EQ(error_of("", {.peers = {"1=localhost:1", "1=localhost:2"}}),
            "--peer 1=localhost:2: another --peer has given node 1 an address");
  EXPECT_EQ(error_of("", {.peers = {"1"}}),
            "--peer 1: ID=ADDRESS is expected, such as 1=unix:/run/mkernel/1.sock");
  EXPECT_THAT(error_of("", {.peers = {"x=localhost:1"}}), HasSubstr("a node id from 0 to 1023"));
  EXPECT_THAT(error_of("", {.peers = {"1=localhost"}}),
              HasSubstr("--peer 1=localhost: \"host:port"));
}

TEST(Config, RailsAreAutoWithoutAFlagOrWithIt) {
  EXPECT_EQ(Config{}.fabric.rails, kRailsAuto);
  EXPECT_EQ(config_of("fabric.rails = 4", {.rails = "auto"}).fabric.rails, kRailsAuto);
  // How many that is, and whether the lists fit, is the machine's: topology::plan_rails.
  EXPECT_EQ(config_of("[proxy]\ncpus = [0, 1]").proxy.cpus.size(), 2u);
  EXPECT_EQ(config_of("fabric.rails = 4\n[fabric.ofi]\nbind = ['a', 'b']").fabric.ofi.bind,
            (std::vector<std::string>{"a", "b"}));
}

// -- files ------------------------------------------------------------------------------------

TEST(Config, TheExampleIsTheDefaults) {
  const auto example = load_config(MK_EXAMPLE, {});
  ASSERT_TRUE(example) << example.error().message;
  EXPECT_EQ(print_config(*example), print_config(Config{}));
}

/// The keys that the parser takes in a table, asked for with one that it does not: "[limits]", or
/// "[[peer]]", or "" for the top. None: it is no table.
std::vector<std::string> known_keys(const std::string& header) {
  const std::string said = error_of(header + "\nno_such_key = 1");
  const std::string::size_type unknown = said.find("no_such_key: unknown key");
  if (unknown == std::string::npos) return {};
  const std::string::size_type list = said.find("Known here: ", unknown);
  std::istringstream keys(said.substr(list + 12, said.find('\n', list) - list - 12));
  std::vector<std::string> known;
  for (std::string key; std::getline(keys, key, ',');)
    known.push_back(key.substr(key.find_first_not_of(' ')));
  return known;
}

/// "limits.drain" and so on, of a text with a line for each key; what is commented out counts.
std::set<std::string> keys_written(std::istream& text) {
  std::set<std::string> keys;
  std::string table;
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("# ")) line.erase(0, 2);
    if (line.starts_with('[')) {
      table =
          line.substr(line.find_first_not_of('['), line.find(']') - line.find_first_not_of('[')) +
          ".";
    } else if (const auto key = line.substr(0, line.find(" = "));
               key.size() < line.size() && key.find(' ') == std::string::npos) {
      keys.insert(table + key);
    }
  }
  return keys;
}

// The man page holds the example, so it has every key as well.
TEST(Config, TheExampleAndWhatIsPrintedHaveEveryKeyOfTheParser) {
  std::ifstream file(MK_EXAMPLE);
  const std::set<std::string> example = keys_written(file);
  Config full;
  full.peers = {{1, *parse_address("10.0.0.2:7171", false), "name"}};
  full.jobs = {{"production-*", 4}};
  full.gpu_rails = {{"0000:1b:00.0", 2}};
  std::istringstream text(print_config(full));
  const std::set<std::string> printed = keys_written(text);
  std::size_t keys = 0;
  const std::function<void(const std::string&)> visit = [&](const std::string& table) {
    const auto known = known_keys(table.empty() ? "" : "[" + table + "]");
    for (const std::string& key : known.empty() ? known_keys("[[" + table + "]]") : known) {
      const std::string path = table.empty() ? key : table + "." + key;
      if (!known_keys("[" + path + "]").empty() || !known_keys("[[" + path + "]]").empty()) {
        visit(path);
        continue;
      }
      ++keys;
      EXPECT_TRUE(example.contains(path)) << path << " is not in the example";
      EXPECT_TRUE(printed.contains(path)) << path << " is not printed";
    }
  };
  visit("");
  EXPECT_EQ(keys, example.size()) << "nothing else is in the example";
}

TEST(Config, WhatIsPrintedParsesToTheSame) {
  const std::string all =
      "node_id = 3\nlisten = '[::1]:9'\ninsecure = true\n[socket]\npath='/x/\"y'\nmode='0600'\n"
      "[[peer]]\nid=1\naddress='h:1'\n[[peer]]\nid=2\naddress='unix:/p'\n"
      "[fabric]\nname='ofi'\nrails=2\n[fabric.loopback]\nbandwidth='1.5GB/s'\nlatency='7us'\n"
      "[fabric.ofi]\nprovider='efa'\nbind=['eth1','a+b']\n[fabric.verbs]\ndevices=['a:1','b']\ngid_"
      "index="
      "2\n"
      "pkey=3\nmtu=512\nqueues=4\ntimeout=5\nretries=6\nrnr_retries=1\nservice_level=7\n"
      "traffic_class=8\nrelaxed_ordering=false\ngpu_direct=false\narrival='immediate'\nsubmission='"
      "classic'\n[proxy]"
      "\ncpus=[1,-1]\nbatch_window='1us'\n"
      "spin='2us'\nsleep_max='3us'\n[limits]\nsessions=2\noutstanding=3\nregistered='5MiB'\n"
      "user_sessions=1\nuser_buffers=2\nuser_rings=3\nuser_registered='4MiB'\n"
      "all_registered='6MiB'\nuser_descriptors=7\ndescriptors=8\n"
      "drain='6s'\nended_jobs='7s'\n[[job]]\npattern='a'\nweight=2\n[log]\nlevel='error'\nformat='"
      "text'\n";
  const std::string printed = print_config(config_of(all));
  EXPECT_EQ(print_config(config_of(printed)), printed);
}

TEST(Config, AMissingFileSaysSo) {
  const auto config = load_config("/nonexistent/mk.toml", {});
  ASSERT_FALSE(config);
  EXPECT_EQ(config.error().code, ErrorCode::kNotFound);
  EXPECT_EQ(config.error().message, "config file /nonexistent/mk.toml does not exist");
  EXPECT_FALSE(load_config("/", {}));
  EXPECT_TRUE(load_config("", {}));
}
}  // namespace
}  // namespace mk::daemon
