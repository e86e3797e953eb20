// Which network "auto" means, on machines that are not ours.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/topology/rails.h"

namespace mk::topology {
namespace {

using fabric::choose_fabric;
using fabric::Inventory;
using testing::HasSubstr;

constexpr std::uint32_t kDebian12 = 1u << 16 | 17;
constexpr std::uint32_t kNew = 2u << 16 | 1;

Inventory machine(std::vector<std::string> ports, std::uint32_t ofi,
                  std::vector<std::string> providers) {
  return {true, std::move(ports), ofi, std::move(providers)};
}

TEST(FabricChoiceTest, VerbsWhereAPortIsActive) {
  const auto choice =
      choose_fabric(machine({"mlx5_0:1", "mlx5_1:1"}, kNew, {"efa", "verbs;ofi_rxm", "tcp"}));
  EXPECT_EQ(choice.fabric, "verbs");
  EXPECT_THAT(choice.why, HasSubstr("mlx5_0:1, mlx5_1:1"));
}

TEST(FabricChoiceTest, EfaElseWhereLibfabricDrivesIt) {
  const auto choice = choose_fabric(machine({}, kNew, {"tcp", "efa", "shm"}));
  EXPECT_EQ(choice.fabric, "ofi");
  EXPECT_EQ(choice.provider, "efa");
  EXPECT_THAT(choice.why, HasSubstr("no InfiniBand or RoCE port is active"));

  const auto old = choose_fabric(machine({}, kDebian12, {"efa", "tcp;ofi_rxm"}));
  EXPECT_EQ(old.provider, "tcp") << "emulated writes are worse than none";
  EXPECT_THAT(old.why, HasSubstr("needs libfabric 1.20"));
}

TEST(FabricChoiceTest, DevicesThatCannotBeOpenedAreNotThoughtAbsent) {
  Inventory closed = machine({}, kNew, {"tcp"});
  closed.closed_devices = {"mlx5_0 cannot be opened: Permission denied"};
  const auto tcp = choose_fabric(closed);
  EXPECT_EQ(tcp.provider, "tcp");
  EXPECT_THAT(tcp.why, HasSubstr("mlx5_0 cannot be opened: Permission denied"));
  EXPECT_THAT(tcp.trouble, HasSubstr("mlx5_0 cannot be opened: Permission denied"));
  closed.rdma_ports = {"mlx5_1:1"};
  const auto verbs = choose_fabric(closed);
  EXPECT_EQ(verbs.fabric, "verbs");
  EXPECT_THAT(verbs.trouble, HasSubstr("mlx5_0 cannot be opened"));
  daemon::Config config;
  config.fabric.name = "auto";
  config.listen.host = "10.0.0.1";
  EXPECT_EQ(resolve_fabric(config, [&] { return closed; }).trouble, verbs.trouble);
  EXPECT_EQ(choose_fabric(machine({}, kNew, {"tcp"})).trouble, "");
}

TEST(FabricChoiceTest, TheBestProviderForAnyNetworkElse) {
  EXPECT_EQ(choose_fabric(machine({}, kDebian12, {"shm", "tcp;ofi_rxm", "net"})).provider, "net");
  EXPECT_EQ(choose_fabric(machine({}, kNew, {"shm", "net", "tcp;ofi_rxm"})).provider, "tcp");
  EXPECT_EQ(choose_fabric(machine({}, kNew, {"tcp"})).provider, "tcp");
  Inventory bare;
  const auto choice = choose_fabric(bare);
  EXPECT_EQ(choice.fabric, "ofi") << "opening it says what is missing";
  EXPECT_THAT(choice.why, HasSubstr("no verbs fabric"));
  EXPECT_THAT(choice.why, HasSubstr("no provider"));
}

TEST(FabricChoiceTest, AConfigurationThatNamesItsFabricIsLeftAlone) {
  daemon::Config config;
  config.fabric.name = "ofi";
  const auto resolved = resolve_fabric(config, []() -> Inventory {
    ADD_FAILURE() << "nobody needs to look";
    return {};
  });
  EXPECT_EQ(resolved.config.fabric.name, "ofi");
  EXPECT_EQ(resolved.why, "");
}

TEST(FabricChoiceTest, AutoIsLoopbackWhileEverybodyIsHere) {
  const auto look = [] { return machine({"mlx5_0:1"}, kNew, {}); };
  daemon::Config config;
  config.fabric.name = "auto";
  EXPECT_EQ(resolve_fabric(config, look).config.fabric.name, "loopback");
  config.peers.push_back({1, {.host = "127.0.0.1", .port = 7172}});
  EXPECT_EQ(resolve_fabric(config, look).config.fabric.name, "loopback");
  config.peers.push_back({2, {.host = "10.0.0.2", .port = 7171}});
  EXPECT_EQ(resolve_fabric(config, look).config.fabric.name, "verbs");
  config.peers.clear();
  config.discovery.kind = "dns";
  EXPECT_EQ(resolve_fabric(config, look).config.fabric.name, "verbs");
  config.discovery.kind = "static";
  config.listen.host = "10.0.0.1";
  const auto resolved = resolve_fabric(config, [] { return machine({}, kDebian12, {"net"}); });
  EXPECT_EQ(resolved.config.fabric.name, "ofi");
  EXPECT_EQ(resolved.config.fabric.ofi.provider, "net");
  EXPECT_THAT(resolved.why, HasSubstr("ofi over net"));
}

TEST(FabricChoiceTest, ThisMachineCanBeLookedAt) {
  const Inventory here = fabric::read_inventory();
  EXPECT_FALSE(choose_fabric(here).fabric.empty());
}

}  // namespace
}  // namespace mk::topology
