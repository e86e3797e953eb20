// What the ofi fabric does for EFA alone: what it refuses, that no write comes from an endpoint
// that its target does not know, and what becomes of links whose peers don't get to know them.
#include <gmock/gmock.h>

#include "daemon/fabric/link_slots.h"
#include "daemon/fabric/ofi/introduction.h"
#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/ofi/soft_efa/soft_efa.h"
#include "tests/daemon/fabric/transfer.h"

namespace mk::fabric {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// Of all tests of this program: the suites of conformance and failures, too.
class NothingLeft : public testing::Environment {
  void TearDown() override {
    EXPECT_EQ(soft_efa::strangers(), 0u) << "writes came before their sender was known";
    EXPECT_EQ(soft_efa::live_objects(), 0u);
  }
};
const testing::Environment* const nothing_left = testing::AddGlobalTestEnvironment(new NothingLeft);

class EfaTest : public testing::Test {
 protected:
  EfaTest() {
    setup_ = all_setups().front();
    setup_.config.connect_timeout_ns = soon_ns();
  }
  ~EfaTest() override {
    EXPECT_EQ(soft_efa::strangers(), 0u);
    soft_efa::reset();
  }
  std::string refusal() {
    const auto endpoint = setup_.open();
    return endpoint ? "" : endpoint.error().message;
  }

  FabricSetup setup_;
};

TEST_F(EfaTest, LibfabricBeforeItHadTheDevicesWritesIsRefused) {
  soft_efa::set_version(1, 19);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("1.20 or later"), HasSubstr("1.19 is installed")));
  soft_efa::set_version(1, 20);
  EXPECT_EQ(refusal(), "");
}

TEST_F(EfaTest, ADeviceWithoutRemoteWritesIsRefused) {
  soft_efa::set_emulated_writes(true);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("rdmap0s6-rdm has no remote writes of its own"),
                               HasSubstr("fabric.ofi.provider")));
}

TEST_F(EfaTest, ADeviceThatIsNotThereIsRefusedByName) {
  setup_.config.bind_address = "rdmap7s6";
  EXPECT_THAT(refusal(), HasSubstr("'rdmap7s6'"));
  setup_.config.bind_address = "rdmap1s6";
  const auto endpoint = setup_.open();
  ASSERT_TRUE(endpoint);
  EXPECT_EQ((*endpoint)->capabilities().device, "rdmap1s6-rdm");
}

TEST_F(EfaTest, ADeviceMayCome) {
  soft_efa::refuse("fi_getinfo", FI_ENODATA, 1);
  const auto endpoint = setup_.open();
  ASSERT_FALSE(endpoint);
  EXPECT_EQ(endpoint.error().code, ErrorCode::kUnavailable) << "which the daemon waits for";
  EXPECT_THAT(endpoint.error().message, HasSubstr("no EFA device"));
  EXPECT_EQ(refusal(), "");
}

TEST_F(EfaTest, NoWriteGoesOutBeforeThePeerHasTakenTheSendersAddress) {
  Node a(setup_);
  Node b(setup_);
  soft_efa::hold_messages(true);
  const TestLink link = join(a, b);
  const Write write = make_write(link, 3, 1, 7);
  ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
  for (int i = 0; i < 200; ++i) {
    a.poll();
    b.poll();
  }
  EXPECT_EQ(b.flag(3), 0u);
  EXPECT_TRUE(a.completed.empty());
  EXPECT_EQ(soft_efa::addresses(), 1u) << "the peer's, at the sender";
  soft_efa::hold_messages(false);
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(3) == 1 && a.completed.contains(7); }));
  EXPECT_EQ(soft_efa::addresses(), 2u);
}

TEST_F(EfaTest, ALinkIntroducesItselfBeforeAnyWrite) {
  Node a(setup_);
  Node b(setup_);
  const TestLink link = join(a, b);
  EXPECT_TRUE(pump({&a, &b}, [] { return soft_efa::addresses() == 2; }));
}

TEST_F(EfaTest, APeerThatDoesNotTakeTheAddressInTimeIsNamed) {
  Node a(setup_);
  Node b(setup_);
  soft_efa::hold_messages(true);
  const TestLink link = join(a, b, "node 7 rail 1");
  const Write write = make_write(link, 3, 1, 7);
  ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
  ASSERT_TRUE(
      pump({&a, &b}, [&] { return a.failed.contains(7) && a.links_down.contains(link.id); }));
  EXPECT_THAT(a.endpoint->link_reason(link.id),
              AllOf(HasSubstr("node 7 rail 1 did not take this endpoint's address within"),
                    HasSubstr("s")));
}

TEST_F(EfaTest, APeerWhoseTableTakesNothingMoreIsNamed) {
  Node a(setup_);
  Node b(setup_);
  const TestLink link = join(a, b, "node 7 rail 1");
  soft_efa::refuse("fi_av_insert", ENOMEM, 1);
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.links_down.contains(link.id); }));
  EXPECT_THAT(a.endpoint->link_reason(link.id), HasSubstr("node 7 rail 1"));
  expect_transfer(a, b, 5);
}

TEST_F(EfaTest, WhoWasNotGivenTheAddressOfAnEndpointIsNotTakenIn) {
  Node b(setup_);
  const auto address = from_blob<ofi::Address>(b.endpoint->address());
  ASSERT_TRUE(address);
  const auto domain = ofi::Domain::open(setup_.config);
  ASSERT_TRUE(domain);
  const auto introduce = [&](const ofi::Address& to) {
    auto port = (*domain)->open_port(16);
    EXPECT_TRUE(port);
    fi_addr_t peer = FI_ADDR_UNSPEC;
    EXPECT_EQ(1, ::fi_av_insert(port->addresses.get(), address->name, 1, &peer, 0, nullptr));
    const auto introduction = ofi::Introduction::prepare(**domain, *port, peer, to);
    EXPECT_TRUE(introduction);
    for (int i = 0; i < 300; ++i) {
      [[maybe_unused]] const long rc = (*introduction)->progress({Token{9}, 1});
      fi_cq_data_entry entry{};
      if (::fi_cq_read(port->completions.get(), &entry, 1) == 1)
        (*introduction)->completed(entry.op_context);
      b.poll();
    }
    const bool done = (*introduction)->done();
    port->close();
    return done;
  };
  ofi::Address wrong = *address;
  wrong.endpoint[3] ^= 1;
  EXPECT_FALSE(introduce(wrong));
  ofi::Address nobodys = *address;
  nobodys.tag ^= 1;
  EXPECT_FALSE(introduce(nobodys)) << "a tag that no peer was told";
  EXPECT_EQ(soft_efa::addresses(), 0u);
  EXPECT_TRUE(introduce(*address));
  EXPECT_EQ(soft_efa::addresses(), 1u);
}

TEST_F(EfaTest, LinksThatComeAndGoLeaveNoAddressesBehind) {
  Node a(setup_);
  Node b(setup_);
  // An address stays until its link's place is taken again, so there are as many as places.
  constexpr std::uint32_t kTurn = kLinksMax + 50;
  std::size_t after_a_turn = 0;
  for (std::uint32_t i = 1; i <= 2 * kTurn; ++i) {
    const TestLink link = join(a, b);
    const Write write = make_write(link, 1, i, i);
    ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(1) == i && a.completed.contains(i); }));
    a.endpoint->disconnect(link.id);
    for (int polls = 0; polls < 4; ++polls) a.poll();
    if (i == kTurn) after_a_turn = soft_efa::addresses();
  }
  EXPECT_EQ(soft_efa::addresses(), after_a_turn);
}

TEST_F(EfaTest, ADeviceThatGoesDownFailsItsLinksAndServesNewOnesWhenItIsBack) {
  Node a(setup_);
  FabricSetup other = setup_;
  other.config.bind_address = "rdmap1s6";
  Node b(other);
  expect_transfer(a, b, 1);
  const EightWrites under_way(a, b);
  const TestLink& link = under_way.link;
  ASSERT_TRUE(under_way.posted);
  soft_efa::set_up("rdmap1s6", false);
  ASSERT_TRUE(pump({&a, &b}, [&] {
    return a.links_down.contains(link.id) && a.total(a.completed) + a.total(a.failed) == 9;
  }));
  EXPECT_EQ(a.links_down[link.id], 1);
  EXPECT_THAT(a.endpoint->link_reason(link.id),
              AllOf(HasSubstr("node 1 rail 0"), HasSubstr("Unresponsive remote")));
  for (const auto& [cookie, count] : a.failed) EXPECT_FALSE(a.completed.contains(cookie));

  const TestLink during = join(a, b);
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.links_down.contains(during.id); }));
  soft_efa::set_up("rdmap1s6", true);
  expect_transfer(a, b, 2);
}

TEST_F(EfaTest, GpuMemoryThatTheDeviceDoesNotReachIsStagedForAReasonThatIsKept) {
  const FabricSetup with = with_gpus("", setup_, setup_);
  const auto expect_staged = [&](const std::string& why) {
    const Node node(with);
    const Memory memory = node.memory(10'000);
    EXPECT_EQ(memory.region->gpu_path, "staged through host memory");
    EXPECT_THAT(memory.region->gpu_path_why, HasSubstr(why));
  };
  if (MK_OFI_DMABUF == 0) return expect_staged("this build has libfabric 1.1");
  soft_efa::set_gpu_memory(false);
  expect_staged("has no provider 'efa'");
  soft_efa::set_gpu_memory(true);
  soft_efa::refuse("fi_mr_regattr", ENOTSUP, 1);
  expect_staged("does not register");
  EXPECT_EQ(Node(with).memory(10'000).region->gpu_path, "by dmabuf");
}

TEST_F(EfaTest, WhatADeviceWroteToAGpuIsReadBackBeforeItsFlagShows) {
  if (MK_OFI_DMABUF == 0) GTEST_SKIP() << "needs the headers of libfabric 1.20";
  const FabricSetup with = with_gpus("", setup_, setup_);
  Node a(with);
  Node b(with);
  expect_transfer(a, b, 3);  // the GPU sees only what was read back
  EXPECT_GT(soft_efa::flushed_pieces(), 0u);
}

}  // namespace
}  // namespace mk::fabric
