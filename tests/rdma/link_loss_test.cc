// A port that goes down and comes back, and an address that goes away, seen by links over it:
// the kernel's software NIC in the virtual machine of run_vm.sh, or a software NIC of the test's
// own.
#include <string>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/transfer.h"
#include "tests/rdma/interface.h"

namespace mk::fabric {
namespace {

class LinkLossTest : public testing::TestWithParam<FabricSetup> {
 protected:
  void SetUp() override {
    if (const auto reason = interface::untouchable()) GTEST_SKIP() << *reason;
  }
  void TearDown() override {
    if (interface::untouchable()) return;
    interface::set_up(true);
    interface::reset_addresses();
  }
  FabricSetup impatient() const {
    FabricSetup setup = GetParam();
    setup.config.connect_timeout_ns = soon_ns();
    return setup;
  }
};

TEST_P(LinkLossTest, APortThatGoesDownFailsItsLinksAndServesNewOnesWhenItIsBack) {
  Node a(impatient());
  Node b(impatient());
  expect_transfer(a, b, 1);
  const EightWrites under_way(a, b);
  const TestLink& link = under_way.link;
  ASSERT_TRUE(under_way.posted);
  interface::set_up(false);
  ASSERT_TRUE(pump({&a, &b}, [&] {
    return a.links_down.contains(link.id) && a.total(a.completed) + a.total(a.failed) == 9;
  }));
  EXPECT_EQ(a.links_down[link.id], 1);
  // Which comes first, the port's event or a write that fails of it, is up to the NIC: rxe fails
  // writes by itself when the machine is slow to tell, others when nobody acknowledges them.
  const std::string reason = a.endpoint->link_reason(link.id);
  EXPECT_TRUE(reason.find("the port went down") != std::string::npos ||
              reason.find("failed: local QP operation error") != std::string::npos ||
              reason.find("does not acknowledge what is sent to it") != std::string::npos)
      << reason;
  for (const auto& [cookie, count] : a.failed) {
    EXPECT_EQ(count, 1);
    EXPECT_FALSE(a.completed.contains(cookie));
  }
  const Write late = make_write(link, 1, 9, 999);
  ASSERT_TRUE(post_all(a, link.id, {&late, 1}, {&a}));
  EXPECT_TRUE(pump({&a}, [&] { return a.failed.contains(999); }));

  const auto started = std::chrono::steady_clock::now();
  const auto during = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
  EXPECT_FALSE(during) << "while the port is down";
  EXPECT_LT(std::chrono::steady_clock::now() - started, patience() * std::chrono::seconds(10));

  interface::set_up(true);
  // The daemon tries again with backoff; here, until the interface answers.
  const auto deadline = std::chrono::steady_clock::now() + patience() * std::chrono::seconds(20);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto again = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
    if (!again) continue;
    a.endpoint->disconnect(*again);
    break;
  }
  expect_transfer(a, b, 2);
}

TEST_P(LinkLossTest, AnAddressThatGoesAwayFailsTheLinksThatUseIt) {
  Node a(impatient());
  Node b(impatient());
  const TestLink link = join(a, b);
  interface::remove_first_address();
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.links_down.contains(link.id); }));
  EXPECT_NE(a.endpoint->link_reason(link.id).find("GID changed"), std::string::npos)
      << a.endpoint->link_reason(link.id);
}

TEST_P(LinkLossTest, AnotherAddressIsToldToPeersAndServesNewLinksWithoutARestart) {
  interface::add_second_address();
  const auto until = std::chrono::steady_clock::now() + patience() * std::chrono::seconds(10);
  while (interface::second_address_gid() < 0 && std::chrono::steady_clock::now() < until) {
  }
  FabricSetup stays = impatient();
  stays.config.verbs.gid_index = interface::second_address_gid();
  ASSERT_GE(stays.config.verbs.gid_index, 0);
  Node a(impatient());  // speaks from 10.77.0.1
  Node b(stays);        // from 10.78.0.1
  const Bytes known_of_a = a.endpoint->address();
  const Bytes known_of_b = b.endpoint->address();
  const TestLink there = join(a, b);
  const TestLink back = join(b, a);
  interface::remove_first_address();
  ASSERT_TRUE(pump(
      {&a, &b}, [&] { return a.links_down.contains(there.id) && b.links_down.contains(back.id); }));
  EXPECT_NE(a.endpoint->link_reason(there.id).find("10.78.0.1"), std::string::npos)
      << a.endpoint->link_reason(there.id);
  a.endpoint->disconnect(there.id);
  b.endpoint->disconnect(back.id);
  EXPECT_NE(a.endpoint->address(), known_of_a);
  EXPECT_EQ(b.endpoint->address(), known_of_b);
  // The daemons go on using what the Peer service told them at the start.
  const auto connect = [](Node& from, const Bytes& to) {
    const auto deadline = std::chrono::steady_clock::now() + patience() * std::chrono::seconds(30);
    for (;;) {
      auto link = from.endpoint->connect(to, "node 1 rail 0");
      if (link || std::chrono::steady_clock::now() > deadline) return link;
    }
  };
  const auto back_again = connect(b, known_of_a);
  ASSERT_TRUE(back_again) << back_again.error().message;
  const auto again = connect(a, known_of_b);
  ASSERT_TRUE(again) << again.error().message;
  expect_transfer(a, b, 7);
  expect_transfer(b, a, 8);
}

std::vector<FabricSetup> verbs_setups() {
  std::vector<FabricSetup> setups = all_setups();
  std::erase_if(setups, [](const FabricSetup& setup) { return setup.config.fabric != "verbs"; });
  return setups;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LinkLossTest);
INSTANTIATE_TEST_SUITE_P(Fabrics, LinkLossTest, testing::ValuesIn(verbs_setups()), setup_name);

}  // namespace
}  // namespace mk::fabric
