// The rails that a daemon opens, by configuration and machine, and that they are those which
// `mkctl topology` and the doctor show.
#include "daemon/topology/rails.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shm/limits.h"
#include "tests/daemon/topology/made_machine.h"

namespace mk::topology {
namespace {

using daemon::Config;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

Config config_of(const std::string& toml) {
  const auto config = daemon::parse_config(toml, "mk.toml", {});
  EXPECT_TRUE(config) << config.error().message;
  return config.value_or(Config{});
}
const Config kVerbs = config_of("fabric.name = 'verbs'");
const Config kEfa = config_of("[fabric]\nname = 'ofi'\n[fabric.ofi]\nprovider = 'efa'");

Config with_rails(Config config, std::uint32_t rails) {
  config.fabric.rails = rails;
  return config;
}

RailPlan plan_of(const Config& config, const Machine& machine) {
  const auto plan = plan_rails(config, [&] { return machine; });
  EXPECT_TRUE(plan) << plan.error().message;
  return plan.value_or(RailPlan{});
}
RailPlan plan_without_looking(const Config& config) {
  const auto plan = plan_rails(config, []() -> Result<Machine> {
    ADD_FAILURE() << "nobody needs to look";
    return Machine{};
  });
  EXPECT_TRUE(plan) << plan.error().message;
  return plan.value_or(RailPlan{});
}

/// The NIC that each endpoint is opened with; "" where the fabric's own rule decides.
std::vector<std::string> opened(const RailPlan& plan) {
  std::vector<std::string> names;
  for (const fabric::EndpointConfig& one : plan.endpoints) {
    EXPECT_EQ(one.rail, names.size());
    const auto& devices = one.verbs.devices;
    if (one.fabric != "verbs") {
      names.push_back(one.bind_address);
    } else {
      names.push_back(devices.empty() ? "" : devices[one.rail % devices.size()]);
    }
  }
  return names;
}
std::vector<std::string> shown(const Config& config, const Machine& machine) {
  const auto choices = choose_nics(machine, config);
  if (!choices) return {choices.error().message};
  EXPECT_EQ(choices->size(), rail_count(machine, config));
  std::vector<std::string> names;
  for (const RailChoice& choice : *choices) names.push_back(nic_names(machine, choice));
  return names;
}

/// `count` ConnectX-7 or EFA devices, and no GPU.
Machine without_gpus(std::uint32_t count, bool efa) {
  MachineXml xml(1);
  std::vector<Part> ports;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t bus = 1 + 4 * i;
    ports.push_back(xml.bridge(0, bus,
                               {efa ? xml.efa(bus, fmt::format("rdmap{}s6", i))
                                    : xml.connectx(bus, fmt::format("mlx5_{}", i))}));
  }
  return machine_of(xml.text({{xml.host_bridge(0, std::move(ports))}}));
}

TEST(Rails, OnADgxThereIsOneForEachGpuWithItsOwnNic) {
  for (const bool storage : {true, false}) {
    const Machine machine = machine_of(dgx_h200(storage));
    const RailPlan plan = plan_of(kVerbs, machine);
    EXPECT_THAT(opened(plan), ElementsAre("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4",
                                          "mlx5_5", "mlx5_6", "mlx5_7"));
    EXPECT_EQ(shown(kVerbs, machine), opened(plan));
    EXPECT_EQ(plan.why, "fabric.rails \"auto\" is 8: one for each GPU");
    EXPECT_EQ(plan.unused, "");
    EXPECT_THAT(plan.endpoints[3].nic_why, HasSubstr(machine.gpus[3].bus_id));
  }
}

TEST(Rails, OnAP5enThereIsOneForEachGpuWithItsTwoEfaDevices) {
  const Machine machine = machine_of(p5en());
  const RailPlan plan = plan_of(kEfa, machine);
  ASSERT_THAT(opened(plan), SizeIs(8));
  EXPECT_THAT(opened(plan), Each(HasSubstr("+")));
  EXPECT_EQ(opened(plan)[0], "rdmap18s0+rdmap22s0");
  EXPECT_EQ(shown(kEfa, machine), opened(plan));
}

TEST(RailsByGpu, AreThoseOnTheNearestNics) {
  const Machine h200 = machine_of(dgx_h200(true));
  const auto near = rails_by_gpu(h200, kVerbs);
  ASSERT_EQ(near.size(), 8u);
  for (std::uint32_t gpu = 0; gpu < 8; ++gpu)
    EXPECT_THAT(near.at(h200.gpus[gpu].bus_id), ElementsAre(gpu));
  const Machine p5 = machine_of(p5en());
  for (std::uint32_t gpu = 0; gpu < 8; ++gpu)
    EXPECT_THAT(rails_by_gpu(p5, kEfa).at(p5.gpus[gpu].bus_id), ElementsAre(gpu));
  // Fewer rails than GPUs: a GPU without a rail of its own takes the nearest, or all that are as
  // near.
  const auto two = rails_by_gpu(h200, with_rails(kVerbs, 2));
  EXPECT_THAT(two.at(h200.gpus[0].bus_id), ElementsAre(0));
  EXPECT_THAT(two.at(h200.gpus[1].bus_id), ElementsAre(1));
  for (std::uint32_t gpu = 2; gpu < 8; ++gpu)
    EXPECT_THAT(two.at(h200.gpus[gpu].bus_id), testing::SizeIs(testing::Ge(1u)));
  // Of GPUs that share a NIC, each has a rail of its own.
  const Machine shared = machine_of(workstation());
  EXPECT_THAT(rails_by_gpu(shared, kVerbs).at(shared.gpus[1].bus_id), ElementsAre(1));
}

TEST(RailsNearCpus, AreThoseOfTheDomainThatMostAreIn) {
  const Machine h200 = machine_of(dgx_h200(true));
  const auto rails = rails_by_numa(h200, kVerbs);
  ASSERT_EQ(rails.size(), 2u);
  EXPECT_EQ(rails.at(0).size() + rails.at(1).size(), 8u);
  for (const auto& [numa, of_numa] : rails) {
    for (const std::uint32_t rail : of_numa) EXPECT_EQ(h200.nics[rail].numa, numa);
  }
  const std::map<std::uint32_t, std::uint32_t> numa{{0, 0}, {1, 0}, {2, 1}, {3, 1}};
  const auto near = [&](const std::vector<std::uint32_t>& cpus) {
    return rails_near_cpus(numa, {{0, {0, 1}}, {1, {2, 3}}}, cpus);
  };
  EXPECT_THAT(near({0, 1}), ElementsAre(0, 1));
  EXPECT_THAT(near({1, 2, 3}), ElementsAre(2, 3));
  EXPECT_TRUE(near({0, 1, 2, 3}).empty()) << "as near to all";
  EXPECT_TRUE(near({7, 8}).empty()) << "not of this machine";
  EXPECT_TRUE(near({}).empty());
}

TEST(RailsByGpu, AreNothingWhereRailsAreNoNics) {
  const Machine h200 = machine_of(dgx_h200(true));
  EXPECT_TRUE(
      rails_by_gpu(h200, config_of("fabric.name = \"loopback\"\nfabric.rails = 4")).empty());
  EXPECT_TRUE(rails_by_gpu(without_gpus(2, true), kEfa).empty());
}

TEST(Rails, OnAWorkstationTheGpusShareTheNic) {
  const Machine machine = machine_of(workstation());
  const RailPlan plan = plan_of(kVerbs, machine);
  EXPECT_THAT(opened(plan), ElementsAre("mlx5_0", "mlx5_0"));
  EXPECT_EQ(shown(kVerbs, machine), opened(plan));
  EXPECT_EQ(plan_of(with_rails(kVerbs, 1), machine).unused, "") << "no NIC is idle";
}

TEST(Rails, WithoutSuchANicThereIsOneThatOpeningWillComplainOf) {
  const Machine machine = machine_of(workstation());
  EXPECT_THAT(opened(plan_of(kEfa, machine)), ElementsAre(""));
  EXPECT_THAT(shown(kEfa, machine), ElementsAre(HasSubstr("no EFA NIC")));
  const auto unread = plan_rails(
      kVerbs, []() -> Result<Machine> { return fail(ErrorCode::kUnavailable, "hwloc"); });
  ASSERT_TRUE(unread);
  EXPECT_THAT(opened(*unread), ElementsAre(""));
}

TEST(Rails, WithoutGpusThereIsOneAndMoreTakeTheNicsInTurn) {
  const Machine efa = without_gpus(2, true);
  EXPECT_THAT(opened(plan_of(kEfa, efa)), ElementsAre("rdmap0s6"));
  EXPECT_THAT(plan_of(kEfa, efa).why, HasSubstr("is 1: this machine has no GPU"));
  const Config three = with_rails(kEfa, 3);
  EXPECT_THAT(opened(plan_of(three, efa)), ElementsAre("rdmap0s6", "rdmap1s6", "rdmap0s6"));
  EXPECT_EQ(shown(three, efa), opened(plan_of(three, efa)));
  EXPECT_EQ(plan_of(three, efa).unused, "");
  // Over verbs its own rule goes by ports, of which hwloc does not see those made of software.
  const Machine verbs = without_gpus(2, false);
  EXPECT_THAT(opened(plan_of(with_rails(kVerbs, 2), verbs)), ElementsAre("", ""));
  EXPECT_THAT(shown(with_rails(kVerbs, 2), verbs), ElementsAre("mlx5_0", "mlx5_1"));
}

TEST(Rails, ThereAreNoMoreThanADaemonCanHave) {
  MachineXml xml(1);
  std::vector<Part> ports{xml.bridge(0, 0xf0, {xml.connectx(0xf0, "mlx5_0")})};
  for (std::uint32_t i = 0; i < 20; ++i)
    ports.push_back(xml.bridge(0, 4 + 4 * i, {xml.gpu(4 + 4 * i)}));
  const Machine machine = machine_of(xml.text({{xml.host_bridge(0, std::move(ports))}}));
  ASSERT_EQ(machine.gpus.size(), 20u);
  EXPECT_THAT(opened(plan_of(kVerbs, machine)), SizeIs(shm::kLocalRanksMax));
}

TEST(Rails, TooFewOfThemAreWarnedOfWithWhatToSet) {
  const Machine machine = machine_of(dgx_h200());
  const RailPlan one = plan_of(with_rails(kVerbs, 1), machine);
  EXPECT_THAT(opened(one), ElementsAre("mlx5_0"));
  EXPECT_EQ(one.why, "");
  EXPECT_EQ(one.unused,
            "fabric.rails is 1, and 7 NICs near this machine's 8 GPUs stay idle: mlx5_1, mlx5_2, "
            "mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7; set fabric.rails = \"auto\" on all nodes, "
            "which is 8 here");
  EXPECT_THAT(plan_of(with_rails(kVerbs, 7), machine).unused,
              HasSubstr("a NIC near this machine's 8 GPUs stays idle: mlx5_7;"));
  EXPECT_EQ(plan_of(with_rails(kVerbs, 8), machine).unused, "");
  EXPECT_EQ(plan_of(with_rails(kVerbs, 16), machine).unused, "");
}

TEST(Rails, AFabricWithoutNicsOfItsOwnHasOneAndTheMachineIsNotLookedAt) {
  for (const char* const toml :
       {"", "fabric.name = 'loopback'", "fabric.name = 'null'", "fabric.name = 'ofi'"}) {
    const RailPlan plan = plan_without_looking(config_of(toml));
    EXPECT_THAT(opened(plan), ElementsAre("")) << toml;
    EXPECT_EQ(plan.why + plan.unused, "") << toml;
    EXPECT_EQ(rail_count(machine_of(dgx_h200()), config_of(toml)), 1u) << toml;
  }
  EXPECT_THAT(opened(plan_without_looking(config_of("fabric.rails = 3"))), SizeIs(3));
}

TEST(Rails, NamesDecideByRailAndHowManyThereAre) {
  const Machine dgx = machine_of(dgx_h200());
  const Config four = config_of(
      "[fabric]\nname = 'verbs'\n[fabric.verbs]\ndevices = ['mlx5_4', 'mlx5_5:1', 'mlx5_10', "
      "'mlx5_6+mlx5_7']");
  EXPECT_THAT(opened(plan_without_looking(four)),
              ElementsAre("mlx5_4", "mlx5_5:1", "mlx5_10", "mlx5_6+mlx5_7"));
  EXPECT_THAT(shown(four, dgx), ElementsAre("mlx5_4", "mlx5_5", "mlx5_10", "mlx5_6+mlx5_7"));
  EXPECT_THAT(opened(plan_without_looking(with_rails(four, 8))), SizeIs(8));

  const Machine aws = machine_of(p5en());
  const std::string efa = "[fabric]\nname = 'ofi'\nrails = 4\n[fabric.ofi]\nprovider = 'efa'\n";
  const Config two = config_of(efa + "bind = ['rdmap18s0+rdmap22s0', 'rdmap46s0']");
  EXPECT_THAT(opened(plan_without_looking(two)),
              ElementsAre("rdmap18s0+rdmap22s0", "rdmap46s0", "rdmap18s0+rdmap22s0", "rdmap46s0"));
  EXPECT_EQ(shown(two, aws), opened(plan_without_looking(two)));
  EXPECT_THAT(opened(plan_without_looking(with_rails(two, daemon::kRailsAuto))), SizeIs(2));
  EXPECT_THAT(opened(plan_without_looking(config_of(efa + "bind = 'rdmap46s0'"))),
              AllOf(SizeIs(4), Each("rdmap46s0")))
      << "one name is for all";
  EXPECT_THAT(shown(config_of(efa + "bind = 'rdmap9s9'"), aws),
              ElementsAre(HasSubstr("there is no NIC \"rdmap9s9\"")));

  const Config tcp = config_of("[fabric]\nname = 'ofi'\n[fabric.ofi]\nbind = ['ens32', 'ens32']");
  EXPECT_THAT(opened(plan_without_looking(tcp)), ElementsAre("ens32", "ens32"));
  EXPECT_THAT(shown(tcp, aws), ElementsAre("ens32", "ens32"));
  EXPECT_THAT(shown(config_of("[fabric]\nname='ofi'\n[fabric.ofi]\nbind = '10.0.0.1'"), aws),
              ElementsAre("ens32"))
      << "an address is no NIC's name";
}

TEST(Rails, WhatIsListedByRailFitsWhatAutoIs) {
  Config config = kVerbs;
  config.proxy.cpus = {2, 3};
  const Machine machine = machine_of(dgx_h200());
  const auto plan = plan_rails(config, [&] { return machine; });
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(plan.error().message,
            "proxy.cpus: 2 entries for 8 rails (fabric.rails = \"auto\"); one per rail is "
            "expected, or fabric.rails = 2");
  config.proxy.cpus = {2, 3, 4, 5, 6, 7, 8, 9};
  EXPECT_THAT(opened(plan_of(config, machine)), SizeIs(8));
}

}  // namespace
}  // namespace mk::topology
