// mkctl topology, mkctl doctor and mkerneld --doctor as programs.
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/topology/machine_xml.h"

namespace mk::daemon {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class MachineCommands : public testing::Test {
 protected:
  struct Answer {
    int code;
    std::string out, err;
  };
  Answer run(std::vector<std::string> arguments) {
    Program program(folder, std::move(arguments), {"MKCTL_ADDRESS", "MKERNELD_CONFIG"});
    const int code = program.wait();
    return {code, program.out(), program.err()};
  }
  std::string configuration(const std::string& more) {
    const std::string path = folder / "mkerneld.toml";
    std::ofstream(path) << "listen = \"unix:" << (folder / "peer") << "\"\n"
                        << more << "\n[socket]\npath = \"" << (folder / "sock") << "\"\n";
    return path;
  }
  TempFolder folder;
};

TEST_F(MachineCommands, TopologyDrawsAnotherMachineAndItsRails) {
  const std::string xml = folder / "dgx.xml";
  std::ofstream(xml) << topology::dgx_h200();
  const std::string config = configuration("fabric = { name = \"verbs\", rails = 8 }");
  const Answer tree = run({MK_MKCTL, "--config", config, "topology", "--xml", xml});
  EXPECT_EQ(tree.code, 0) << tree.err;
  EXPECT_THAT(tree.out, HasSubstr("machine made\n|-- package 0"));
  EXPECT_THAT(tree.out, HasSubstr("\nrail 7: mlx5_7 (nearest to gpu"));
  const Answer json = run({MK_MKCTL, "--config", config, "topology", "--xml", xml, "--json"});
  const auto parsed = nlohmann::json::parse(json.out, nullptr, false);
  ASSERT_FALSE(parsed.is_discarded()) << json.out << json.err;
  EXPECT_EQ(parsed["rails"].size(), 8u);
  EXPECT_EQ(parsed["rails"][3]["nics"][0], "mlx5_3");
  EXPECT_EQ(run({MK_MKCTL, "--config", config, "topology", "--xml", folder / "none"}).code, 1);

  // How many rails there are is the machine's to say, unless the configuration does.
  for (const auto& [fabric, rails] : std::vector<std::pair<std::string, std::size_t>>{
           {"name = \"verbs\"", 8},
           {"name = \"verbs\", rails = \"auto\"", 8},
           {"name = \"verbs\", verbs = { devices = [\"mlx5_2\", \"mlx5_3\"] }", 2},
           {"name = \"verbs\", rails = 3", 3}}) {
    const std::string by = configuration("fabric = { " + fabric + " }");
    const Answer answer = run({MK_MKCTL, "--config", by, "topology", "--xml", xml, "--json"});
    const auto tree_json = nlohmann::json::parse(answer.out, nullptr, false);
    ASSERT_FALSE(tree_json.is_discarded()) << answer.out << answer.err;
    EXPECT_EQ(tree_json["rails"].size(), rails) << fabric;
  }
}

// hwloc takes the machine from a file: a daemon says what it would open there, and then waits for
// the first NIC, which is not here.
TEST_F(MachineCommands, TheDaemonOpensTheRailsOfItsMachine) {
  const std::string xml = folder / "dgx.xml";
  std::ofstream(xml) << topology::dgx_h200();
  const auto log_of = [&](const std::string& fabric) {
    Program daemon(folder,
                   {MK_MKERNELD, "--config", configuration("fabric = { " + fabric + " }"),
                    "--log-format", "text"},
                   {"HWLOC_XMLFILE=" + xml, "MKERNELD_CONFIG"});
    EXPECT_TRUE(eventually([&] {
      return !daemon.running() ||
             daemon.err().find("waiting: cannot open rail 0") != std::string::npos;
    })) << daemon.err();
    daemon.signal(SIGTERM);
    daemon.wait();
    return daemon.err();
  };
  EXPECT_THAT(log_of("name = \"verbs\""),
              AllOf(HasSubstr("fabric.rails \"auto\" is 8: one for each GPU"), HasSubstr("mlx5_0"),
                    Not(HasSubstr("idle"))));
  EXPECT_THAT(log_of("name = \"verbs\", rails = 1"),
              HasSubstr("7 NICs near this machine's 8 GPUs stay idle: mlx5_1, "));
  EXPECT_THAT(log_of("name = \"verbs\" }\nproxy = { cpus = [0]"),
              HasSubstr("proxy.cpus: 1 entries for 8 rails"));
}

/// Begins a command that runs with a limit: CAP_IPC_LOCK, which root has, would lift it.
std::string without_ipc_lock() {
  return ::geteuid() == 0 ? "exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock" : "exec";
}

// As from a shell with other limits than the service's.
TEST_F(MachineCommands, TheDoctorJudgesTheLimitOfTheDaemonThatRuns) {
  const std::string config = configuration("fabric = { name = \"ofi\" }");
  const std::string doctor = fmt::format("ulimit -S -l 64; {} {} --config {} doctor --json",
                                         without_ipc_lock(), MK_MKCTL, config);
  const auto finding = [&] {
    const auto parsed = nlohmann::json::parse(run({"/bin/sh", "-c", doctor}).out, nullptr, false);
    return parsed.is_discarded() ? std::string()
                                 : parsed["checks"][0]["evidence"].get<std::string>();
  };
  EXPECT_THAT(finding(), HasSubstr("64 KiB (of this process; no daemon runs)"));
  const std::string ready = folder / "ready";
  Program daemon(folder,
                 {"/bin/sh", "-c",
                  fmt::format("ulimit -l 48; {} {} --config {} --fabric null --ready-file {}",
                              without_ipc_lock(), MK_MKERNELD, config, ready)},
                 {"MKERNELD_CONFIG"});
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(ready); })) << daemon.err();
  EXPECT_THAT(finding(),
              HasSubstr(fmt::format("48 KiB (of the running daemon, process {})", daemon.pid())));
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait(), 0) << daemon.err();
}

TEST_F(MachineCommands, TheDoctorOfBothProgramsSaysTheSameAndFailsWhenSomethingDoes) {
  const std::string well = configuration("");
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{MK_MKCTL, "--config", well, "doctor", "--json"},
        std::vector<std::string>{MK_MKERNELD, "--config", well, "--doctor", "--json"}}) {
    const Answer answer = run(command);
    EXPECT_EQ(answer.code, 0) << answer.out << answer.err;
    const auto parsed = nlohmann::json::parse(answer.out, nullptr, false);
    ASSERT_FALSE(parsed.is_discarded()) << answer.out;
    EXPECT_EQ(parsed["checks"].back()["id"], "fabric.write");
    EXPECT_EQ(parsed["checks"].back()["result"], "PASS");
  }
  const std::string ill =
      configuration("peer = [{ id = 1, address = \"unix:" + (folder / "nobody") + "\" }]");
  const Answer answer = run({MK_MKERNELD, "--config", ill, "--doctor"});
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.out, HasSubstr("FAIL  peers.reachable"));
}

}  // namespace
}  // namespace mk::daemon
