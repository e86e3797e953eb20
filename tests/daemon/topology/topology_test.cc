// Which NICs serve which GPU, on machines that are not ours: made for the tests, read by hwloc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "daemon/control/rail_names.h"
#include "daemon/topology/draw.h"
#include "daemon/topology/nic_choice.h"
#include "tests/daemon/topology/made_machine.h"

namespace mk::topology {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::vector<std::string> names(const Machine& machine, const std::vector<RailChoice>& choices) {
  std::vector<std::string> all;
  for (const RailChoice& choice : choices) all.push_back(nic_names(machine, choice));
  return all;
}

std::vector<std::string> chosen(const Machine& machine, NicKind kind, std::uint32_t rails = 0,
                                const std::vector<std::string>& by_name = {}) {
  const auto choices = choose_nics(machine, kind, rails, by_name);
  if (!choices) return {choices.error().message};
  return names(machine, *choices);
}

TEST(TopologyTest, OnADgxEachGpuGetsTheNicOfItsSwitch) {
  const Machine machine = machine_of(dgx_h200());
  ASSERT_EQ(machine.gpus.size(), 8u);
  ASSERT_EQ(machine.nics.size(), 10u);
  EXPECT_EQ(machine.name, "made");
  const auto choices = choose_nics(machine, NicKind::kVerbs, 0, {});
  ASSERT_TRUE(choices) << choices.error().message;
  EXPECT_THAT(names(machine, *choices), ElementsAre("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3",
                                                    "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"));
  for (std::uint32_t rail = 0; rail < 8; ++rail) {
    const Distance to =
        distance(machine, machine.gpus[rail], machine.nics[(*choices)[rail].nics[0]]);
    EXPECT_EQ(to.reach, Reach::kSwitch);
    EXPECT_EQ((*choices)[rail].gpu, rail);
    EXPECT_THAT((*choices)[rail].why, HasSubstr(machine.gpus[rail].bus_id));
  }
}

TEST(TopologyTest, OnAP5enEachGpuGetsTwoEfaDevicesAndNoneTwice) {
  const Machine machine = machine_of(p5en());
  ASSERT_EQ(machine.gpus.size(), 8u);
  const auto choices = choose_nics(machine, NicKind::kEfa, 0, {});
  ASSERT_TRUE(choices) << choices.error().message;
  ASSERT_EQ(choices->size(), 8u);
  std::set<std::uint32_t> used;
  for (std::uint32_t rail = 0; rail < 8; ++rail) {
    ASSERT_EQ((*choices)[rail].nics.size(), 2u);
    for (const std::uint32_t nic : (*choices)[rail].nics) {
      EXPECT_TRUE(used.insert(nic).second) << nic;
      EXPECT_TRUE(machine.nics[nic].efa);
      EXPECT_EQ(distance(machine, machine.gpus[rail], machine.nics[nic]).reach, Reach::kSwitch);
    }
  }
  EXPECT_EQ(used.size(), 16u);
  EXPECT_EQ(names(machine, *choices)[0], "rdmap18s0+rdmap22s0");
  EXPECT_THAT(chosen(machine, NicKind::kInterface, 1), ElementsAre("ens32"));
  EXPECT_THAT(chosen(machine, NicKind::kVerbs, 1).at(0),
              AllOf(HasSubstr("no InfiniBand or RoCE NIC"), HasSubstr("rdmap18s0")));
}

TEST(TopologyTest, AWorkstationsOneNicServesAllItsGpus) {
  const Machine machine = machine_of(workstation());
  ASSERT_EQ(machine.gpus.size(), 2u) << "a management controller's display is no GPU";
  EXPECT_THAT(chosen(machine, NicKind::kVerbs), ElementsAre("mlx5_0", "mlx5_0"));
  EXPECT_THAT(chosen(machine, NicKind::kInterface), ElementsAre("mlx5_0", "mlx5_0"));
  EXPECT_EQ(distance(machine, machine.gpus[0], machine.nics[0]).reach, Reach::kHostBridge);
}

TEST(TopologyTest, AMachineWithoutNicsSaysSo) {
  MachineXml xml(1);
  const Machine machine =
      machine_of(xml.text({{xml.host_bridge(0, {xml.bridge(0, 1, {xml.gpu(1)})})}}));
  const auto choices = choose_nics(machine, NicKind::kVerbs, 0, {});
  ASSERT_FALSE(choices);
  EXPECT_EQ(choices.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(choices.error().message, HasSubstr("this machine has no NIC"));
  EXPECT_THAT(draw(machine, {}), AllOf(HasSubstr("GPU 0 0000:01:00.0"), HasSubstr("no NIC")));
  const Machine empty = machine_of(MachineXml(1).text({}));
  EXPECT_THAT(draw(empty, {}), AllOf(HasSubstr("no GPU"), HasSubstr("no NIC")));
}

TEST(TopologyTest, WithoutGpusRailsTakeTheNicsInTurn) {
  MachineXml xml(1);
  const Machine machine =
      machine_of(xml.text({{xml.host_bridge(0, {xml.bridge(0, 1, {xml.connectx(1, "mlx5_10")}),
                                                xml.bridge(0, 5, {xml.connectx(5, "mlx5_9")})})}}));
  EXPECT_THAT(chosen(machine, NicKind::kVerbs, 3), ElementsAre("mlx5_9", "mlx5_10", "mlx5_9"));
  EXPECT_THAT(chosen(machine, NicKind::kVerbs), ElementsAre("mlx5_9"));
}

TEST(TopologyTest, GpusThatAreEquallyNearShareTheirNicsOut) {
  for (const auto& [gpus, nics, expected] :
       std::vector<std::tuple<std::uint32_t, std::uint32_t, std::vector<std::string>>>{
           {2, 2, {"mlx5_0", "mlx5_1"}},
           {2, 4, {"mlx5_0+mlx5_1", "mlx5_2+mlx5_3"}},
           {2, 3, {"mlx5_0", "mlx5_1+mlx5_2"}},
           {4, 2, {"mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"}}}) {
    MachineXml xml(1);
    std::vector<Part> ports;
    for (std::uint32_t i = 0; i < nics; ++i)
      ports.push_back(
          xml.bridge(1, 4 + 4 * i, {xml.connectx(4 + 4 * i, fmt::format("mlx5_{}", i))}));
    for (std::uint32_t i = 0; i < gpus; ++i)
      ports.push_back(xml.bridge(1, 0x40 + 4 * i, {xml.gpu(0x40 + 4 * i)}));
    const Machine machine =
        machine_of(xml.text({{xml.host_bridge(0, {xml.bridge(0, 1, std::move(ports))})}}));
    EXPECT_EQ(chosen(machine, NicKind::kVerbs), expected) << gpus << " GPUs, " << nics << " NICs";
  }
}

TEST(TopologyTest, ThePciePathDecidesBeforeTheNumaDomainAndThatBeforeNothing) {
  // GPU and NIC A below one switch; NIC B elsewhere in the domain; NIC C in the other domain.
  MachineXml xml(2);
  const std::vector<std::vector<Part>> packages{
      {xml.host_bridge(0x10, {xml.bridge(0x10, 0x11, {xml.gpu(0x11)})}),
       xml.host_bridge(0x20, {xml.bridge(0x20, 0x21, {xml.connectx(0x21, "mlx5_7")})})},
      {xml.host_bridge(0x30, {xml.bridge(0x30, 0x31, {xml.connectx(0x31, "mlx5_0")})}),
       xml.host_bridge(0x40, {xml.bridge(0x40, 0x41, {xml.gpu(0x41)})})}};
  const Machine machine = machine_of(xml.text(packages));
  EXPECT_THAT(chosen(machine, NicKind::kVerbs), ElementsAre("mlx5_7", "mlx5_0"));
  EXPECT_EQ(distance(machine, machine.gpus[0], machine.nics[1]).reach, Reach::kNuma);
  const Distance far = distance(machine, machine.gpus[0], machine.nics[0]);
  EXPECT_EQ(far.reach, Reach::kMachine);
  EXPECT_TRUE(far.other_numa);
  EXPECT_GT(far, distance(machine, machine.gpus[0], machine.nics[1]));

  // Where a host bridge is shared, its NIC is nearer than one elsewhere in the NUMA domain.
  MachineXml two(1);
  const Machine shared = machine_of(two.text(
      {{two.host_bridge(0x10, {two.bridge(0x10, 0x11, {two.gpu(0x11)}),
                               two.bridge(0x10, 0x15, {two.connectx(0x15, "mlx5_5")})}),
        two.host_bridge(0x20, {two.bridge(0x20, 0x21, {two.connectx(0x21, "mlx5_1")})})}}));
  EXPECT_THAT(chosen(shared, NicKind::kVerbs), ElementsAre("mlx5_5"));
}

TEST(TopologyTest, APortThatIsDownIsDrawnButNotChosen) {
  MachineXml xml(1);
  const Machine machine = machine_of(xml.text(
      {{xml.host_bridge(0, {xml.bridge(0, 1,
                                       {xml.bridge(1, 2, {xml.gpu(2)}),
                                        xml.bridge(1, 6, {xml.connectx(6, "mlx5_0", false)})}),
                            xml.bridge(0, 10, {xml.connectx(10, "mlx5_1")})})}}));
  EXPECT_THAT(chosen(machine, NicKind::kVerbs), ElementsAre("mlx5_1"));
  EXPECT_THAT(draw(machine, {}), HasSubstr("NIC mlx5_0 0000:06:00.0, no port is up"));
  EXPECT_THAT(chosen(machine, NicKind::kVerbs, 1, {"mlx5_0"}), ElementsAre("mlx5_0"))
      << "who names it gets it";
}

TEST(TopologyTest, TheConfigurationOverridesByName) {
  const Machine machine = machine_of(dgx_h200());
  EXPECT_THAT(chosen(machine, NicKind::kVerbs, 3, {"mlx5_7:1", "", "mlx5_10+mlx5_11"}),
              ElementsAre("mlx5_7", "mlx5_1", "mlx5_10+mlx5_11"));
  EXPECT_THAT(chosen(machine, NicKind::kVerbs, 2, {"storage0"}), ElementsAre("mlx5_10", "mlx5_10"));
  const auto unknown = choose_nics(machine, NicKind::kVerbs, 1, {"mlx5_99"});
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(unknown.error().message,
              AllOf(HasSubstr("\"mlx5_99\""), HasSubstr("mlx5_0, mlx5_1")));
  EXPECT_FALSE(choose_nics(machine, NicKind::kVerbs, 1, {"mlx5_0+"}));
}

TEST(TopologyTest, TheTreeShowsWhatHangsWhereAndWhichRailItServes) {
  const Machine machine = machine_of(dgx_h200(false));
  const auto choices = choose_nics(machine, NicKind::kVerbs, 0, {});
  const std::string tree = draw(machine, *choices);
  EXPECT_THAT(tree, HasSubstr("machine made\n|-- package 0\n|   |-- host bridge 0000:10\n"));
  EXPECT_THAT(tree, HasSubstr("NIC mlx5_3 0000:66:00.0, MT2910 Family [ConnectX-7]  [rail 3]"));
  EXPECT_THAT(tree, HasSubstr("GPU 7 0000:da:00.0, GH100 [H200 SXM 141GB]  [rail 7]"));
  EXPECT_THAT(tree,
              HasSubstr("rail 0: mlx5_0 (nearest to gpu 0000:16:00.0: one PCIe switch, 4 hops)"));
  const auto json = nlohmann::json::parse(to_json(machine, *choices));
  EXPECT_EQ(json["gpus"].size(), 8u);
  EXPECT_EQ(json["rails"][5]["nics"][0], "mlx5_5");
  EXPECT_EQ(json["rails"][5]["gpu"], machine.gpus[5].bus_id);
  EXPECT_EQ(json["nics"][0]["numa"], 0);
  EXPECT_EQ(json["nics"][7]["numa"], 1);
}

TEST(TopologyTest, TheTreeShowsTheRailsThatTheConfigurationGivesGpus) {
  const Machine machine = machine_of(dgx_h200(false));
  const auto choices = choose_nics(machine, NicKind::kVerbs, 0, {});
  const GpuRails configured{{machine.gpus[7].bus_id, 2}};
  const std::string tree = draw(machine, *choices, {}, configured);
  EXPECT_THAT(tree, HasSubstr("GPU 7 0000:da:00.0, GH100 [H200 SXM 141GB]  [rail 2]"));
  EXPECT_THAT(tree, HasSubstr("GPU 0000:da:00.0: rail 2 (configured)"));
  const auto json = nlohmann::json::parse(to_json(machine, *choices, {}, configured));
  EXPECT_EQ(json["configured"][0]["gpu"], "0000:da:00.0");
  EXPECT_EQ(json["configured"][0]["rail"], 2);
}

TEST(TopologyTest, NodesBuiltAlikeAlignAndOthersAreToldApart) {
  using daemon::control::misalignment;
  const Machine one = machine_of(dgx_h200(true));
  const Machine other = machine_of(dgx_h200(false));
  EXPECT_EQ(misalignment(chosen(one, NicKind::kVerbs), chosen(other, NicKind::kVerbs)), "");
  EXPECT_EQ(misalignment({"mlx5_0", "mlx5_1"}, {"mlx5_0", "mlx5_3"}),
            "rail 1 is mlx5_1 here and mlx5_3 there");
  EXPECT_EQ(misalignment({"mlx5_0"}, {""}), "") << "a daemon that does not say is not accused";
}

TEST(TopologyTest, ThisMachineCanBeRead) {
  const auto machine = read_machine();
  ASSERT_TRUE(machine) << machine.error().message;
  EXPECT_THAT(draw(*machine, {}), Not(HasSubstr("|-- \n")));
}

TEST(TopologyTest, AFileThatIsNoneIsRefused) {
  EXPECT_FALSE(read_machine("/nonexistent/machine.xml"));
  const std::string path = testing::TempDir() + fmt::format("garbage-{}.xml", ::getpid());
  std::ofstream(path) << "<topology><object type=";
  EXPECT_FALSE(read_machine(path));
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace mk::topology
