// Which port, GID, partition and MTU the verbs fabric takes, and what it says about it.
#include "daemon/fabric/verbs/selection.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace mk::fabric::verbs {
namespace {

using testing::HasSubstr;

PortEntry port(const std::string& device, std::uint8_t number = 1,
               ibv_port_state state = IBV_PORT_ACTIVE) {
  return {device, number, state, IBV_LINK_LAYER_ETHERNET, false};
}

std::string chosen_port(const std::vector<PortEntry>& ports, const std::string& wanted,
                        std::uint32_t rail = 0) {
  const auto choice = choose_port(ports, wanted, rail);
  return choice ? ports[choice->index].name() : "refused: " + choice.error().message;
}

TEST(ChoosePort, RailsGetTheActivePortsInTheOrderOfTheirNumbers) {
  const std::vector<PortEntry> ports = {port("mlx5_10"), port("mlx5_2", 2), port("mlx5_2", 1),
                                        port("mlx5_1", 1, IBV_PORT_DOWN), port("mlx5_0", 1)};
  EXPECT_EQ(chosen_port(ports, "", 0), "mlx5_0:1");
  EXPECT_EQ(chosen_port(ports, "", 1), "mlx5_2:1");
  EXPECT_EQ(chosen_port(ports, "", 2), "mlx5_2:2");
  EXPECT_EQ(chosen_port(ports, "", 3), "mlx5_10:1");
  EXPECT_EQ(chosen_port(ports, "", 4), "mlx5_0:1") << "more rails than ports share them";
}

TEST(ChoosePort, TheConfigurationDecides) {
  const std::vector<PortEntry> ports = {port("mlx5_0"), port("mlx5_1", 1, IBV_PORT_DOWN),
                                        port("mlx5_1", 2)};
  EXPECT_EQ(chosen_port(ports, "mlx5_1:2"), "mlx5_1:2");
  EXPECT_EQ(chosen_port(ports, "mlx5_1"), "mlx5_1:2") << "the device's active port";
  EXPECT_EQ(chosen_port(ports, "mlx5_0", 5), "mlx5_0:1") << "whatever the rail";
}

TEST(ChoosePort, WhatCannotBeUsedIsRefusedWithWhatThereIs) {
  const std::vector<PortEntry> ports = {port("mlx5_0", 1, IBV_PORT_DOWN),
                                        {"cxgb4_0", 1, IBV_PORT_ACTIVE, 0, true}};
  EXPECT_THAT(chosen_port(ports, ""), HasSubstr("mlx5_0:1 (not active)"));
  EXPECT_THAT(chosen_port(ports, ""), HasSubstr("cxgb4_0:1 (iWARP"));
  EXPECT_THAT(chosen_port(ports, "mlx5_0"), HasSubstr("is not active"));
  EXPECT_THAT(chosen_port(ports, "mlx5_7"), HasSubstr("no RDMA device and port \"mlx5_7\""));
  EXPECT_THAT(chosen_port(ports, "cxgb4_0"), HasSubstr("iWARP"));
  EXPECT_EQ(choose_port({}, "", 0).error().code, ErrorCode::kUnavailable);  // one may come
  EXPECT_THAT(chosen_port({}, ""), HasSubstr("no RDMA device"));
}

TEST(ChoosePort, WhatCannotBeLookedAtIsNamedWithItsTrouble) {
  PortEntry closed = port("mlx5_1", 0);
  closed.trouble = "cannot be opened: Permission denied";
  PortEntry silent = port("mlx5_2", 2);
  silent.trouble = "does not tell its attributes: Input/output error";
  const std::vector<PortEntry> ports = {port("mlx5_0"), closed, silent};
  for (const std::string wanted : {"mlx5_1", "mlx5_1:1", "mlx5_1:2"}) {
    const auto choice = choose_port(ports, wanted, 0);
    ASSERT_FALSE(choice) << wanted;
    EXPECT_EQ(choice.error().code, ErrorCode::kUnavailable) << "it may be allowed later";
    EXPECT_THAT(choice.error().message,
                HasSubstr("RDMA device mlx5_1, which is asked for, cannot be opened: Permission"));
  }
  EXPECT_THAT(chosen_port(ports, "mlx5_2:2"), HasSubstr("mlx5_2:2, which is asked for, does not"));
  EXPECT_THAT(chosen_port(ports, "mlx5_2:1"), HasSubstr("no RDMA device and port \"mlx5_2:1\""));
  // Rails are never of such a port, and the log says so.
  for (std::uint32_t rail = 0; rail < 3; ++rail) {
    const auto choice = choose_port(ports, "", rail);
    ASSERT_TRUE(choice);
    EXPECT_EQ(choice->index, 0u);
    EXPECT_THAT(choice->why, HasSubstr("without mlx5_1 cannot be opened: Permission denied, "
                                       "mlx5_2:2 does not tell its attributes"));
  }
  EXPECT_THAT(chosen_port({{closed}}, ""),
              HasSubstr("there are: mlx5_1 (cannot be opened: Permission denied)"));
}

// The kernel numbers devices as they come.
TEST(PresentName, ADeviceIsKnownByItsGuidWhateverItIsCalledNow) {
  const auto with_guid = [](PortEntry entry, std::uint64_t guid) {
    entry.guid = guid;
    return entry;
  };
  const std::vector<PortEntry> ports = {with_guid(port("mlx5_0"), 0xb),
                                        with_guid(port("mlx5_1"), 0xa),
                                        with_guid(port("mlx5_1", 2), 0xa), port("rxe0")};
  EXPECT_EQ(present_name(ports, with_guid(port("mlx5_0"), 0xa)), "mlx5_1:1")
      << "they changed places";
  EXPECT_EQ(present_name(ports, with_guid(port("mlx5_0", 2), 0xa)), "mlx5_1:2");
  EXPECT_EQ(present_name(ports, with_guid(port("mlx5_0"), 0xb)), "mlx5_0:1");
  EXPECT_EQ(present_name(ports, with_guid(port("mlx5_7"), 0xc)), "mlx5_7:1") << "not there";
  EXPECT_EQ(present_name(ports, port("mlx5_7")), "mlx5_7:1") << "without a GUID";
}

ibv_gid_entry gid(std::uint32_t index, const char* address, std::uint32_t type) {
  ibv_gid_entry entry{};
  EXPECT_EQ(::inet_pton(AF_INET6, address, entry.gid.raw), 1) << address;
  entry.gid_index = index;
  entry.port_num = 1;
  entry.gid_type = type;
  return entry;
}

constexpr auto kV1 = IBV_GID_TYPE_ROCE_V1;
constexpr auto kV2 = IBV_GID_TYPE_ROCE_V2;

/// A ConnectX port's table with two addresses and a VLAN, as the kernel fills it: each address in
/// both versions.
std::vector<ibv_gid_entry> full_table() {
  return {gid(0, "fe80::1", kV1),         gid(1, "fe80::1", kV2),
          gid(2, "2001:db8::7", kV1),     gid(3, "2001:db8::7", kV2),
          gid(4, "::ffff:10.1.2.3", kV1), gid(5, "::ffff:10.1.2.3", kV2),
          gid(6, "::ffff:10.9.2.3", kV1), gid(7, "::ffff:10.9.2.3", kV2)};
}

std::int64_t chosen_gid(const std::vector<ibv_gid_entry>& table, std::int32_t wanted = -1) {
  const auto choice = choose_gid(table, wanted, "mlx5_0:1");
  return choice ? std::int64_t{table[choice->index].gid_index} : -1;
}

TEST(ChooseGid, Ipv4BeforeRoutableBeforeLinkLocalAndNeverVersion1) {
  std::vector<ibv_gid_entry> table = full_table();
  EXPECT_EQ(chosen_gid(table), 5);
  const auto without = [&](std::uint32_t index) {
    std::erase_if(table, [&](const ibv_gid_entry& entry) { return entry.gid_index == index; });
    return chosen_gid(table);
  };
  EXPECT_EQ(without(5), 7);
  EXPECT_EQ(without(7), 3);
  EXPECT_EQ(without(3), 1);
  EXPECT_EQ(without(1), -1);
  EXPECT_THAT(choose_gid(table, -1, "mlx5_0:1").error().message,
              HasSubstr("port mlx5_0:1 has no RoCE v2 entry"));
}

TEST(ChooseGid, TheOrderOfTheTableDoesNotMatter) {
  std::vector<ibv_gid_entry> table = full_table();
  std::mt19937 random(11);
  for (int i = 0; i < 50; ++i) {
    std::shuffle(table.begin(), table.end(), random);
    EXPECT_EQ(chosen_gid(table), 5);
  }
}

TEST(ChooseGid, TheConfigurationDecidesEvenForVersion1) {
  EXPECT_EQ(chosen_gid(full_table(), 2), 2);
  const auto missing = choose_gid(full_table(), 8, "mlx5_0:1");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(missing.error().message, HasSubstr("5 = 10.1.2.3 (RoCE v2)"));
}

TEST(ChooseGid, OnInfiniBandItIsThePortsOwn) {
  const std::vector<ibv_gid_entry> table = {gid(0, "fe80::e41d:2d03:5a:1", IBV_GID_TYPE_IB),
                                            gid(1, "2001:db8::1", IBV_GID_TYPE_IB)};
  EXPECT_EQ(chosen_gid(table), 0);
}

TEST(ChooseGid, TheReasonNamesTheRuleAndTheTable) {
  const auto choice = choose_gid(full_table(), -1, "mlx5_0:1");
  ASSERT_TRUE(choice);
  EXPECT_THAT(choice->why, HasSubstr("the first RoCE v2 entry with an IPv4 address"));
  EXPECT_THAT(choice->why, HasSubstr("3 = 2001:db8::7 (RoCE v2)"));
  const auto local = choose_gid(std::vector{gid(1, "fe80::1", kV2)}, -1, "mlx5_0:1");
  ASSERT_TRUE(local);
  EXPECT_THAT(local->why, HasSubstr("link-local"));
}

TEST(ChoosePkey, FullMembershipBeforeLimited) {
  const std::vector<std::uint16_t> table = {0xffff, 0x0012, 0x8012, 0x0034};
  const auto index = [&](std::uint32_t wanted) { return choose_pkey(table, wanted, "p").value(); };
  EXPECT_EQ(index(0), 0);
  EXPECT_EQ(index(0xffff), 0);
  EXPECT_EQ(index(0x7fff), 0) << "the membership bit is not part of the name";
  EXPECT_EQ(index(0x8012), 2);
  EXPECT_EQ(index(0x0012), 2);
  EXPECT_EQ(index(0x8034), 3);
  EXPECT_EQ(choose_pkey(table, 0x8099, "p").error().code, ErrorCode::kNotFound);
}

TEST(ChooseMtu, ThePortsOrLess) {
  EXPECT_EQ(choose_mtu(IBV_MTU_4096, 0, "p").value(), IBV_MTU_4096);
  EXPECT_EQ(choose_mtu(IBV_MTU_4096, 1024, "p").value(), IBV_MTU_1024);
  EXPECT_EQ(choose_mtu(IBV_MTU_1024, 1024, "p").value(), IBV_MTU_1024);
  EXPECT_FALSE(choose_mtu(IBV_MTU_1024, 2048, "p"));
  EXPECT_FALSE(choose_mtu(IBV_MTU_4096, 1500, "p"));
}

}  // namespace
}  // namespace mk::fabric::verbs
