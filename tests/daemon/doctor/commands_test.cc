// mkctl topology, mkctl doctor and mkerneld --doctor as programs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/topology/machine_xml.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;

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
