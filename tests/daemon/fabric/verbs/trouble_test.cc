// What goes wrong with RDMA ports, and what becomes of the links over them; on software NICs.
#include <cerrno>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/verbs/soft_nic/soft_nic.h"

namespace mk::fabric {
namespace {

FabricSetup on(const std::string& device) {
  FabricSetup setup;
  setup.name = device;
  setup.config.fabric = "verbs";
  setup.config.verbs.devices = {device};
  setup.config.verbs.timeout = 12;
  return setup;
}

class VerbsTrouble : public testing::Test {
 protected:
  void SetUp() override { soft_nic::reset(); }
  void TearDown() override {
    EXPECT_EQ(soft_nic::live_objects(), 0u);
    soft_nic::reset();
  }
};

/// A link of `a` to `b` with a write of `bytes` under way or done.
struct Busy {
  Busy(Node& a, Node& b, std::uint32_t bytes = 100'000)
      : link(join(a, b)),
        source(a.memory(bytes)),
        target(b.memory(bytes)),
        remote(import(a, link, target)) {
    fill_random({source.data(), bytes}, bytes);
    static std::uint32_t made = 0;
    number = ++made;
    const Write write = make_write(link, 5, number, number, source, 0, *remote, 0, bytes);
    posted = post_all(a, link.id, {&write, 1}, {&a, &b});
  }
  bool arrives(Node& a, Node& b) const {
    const auto there = [&] { return b.flag(5) == number && a.completed.contains(number); };
    return posted && pump({&a, &b}, there) &&
           std::memcmp(source.data(), target.data(), target.bytes()) == 0;
  }

  TestLink link;
  Memory source;
  Memory target;
  std::unique_ptr<RemoteRegion> remote;
  std::uint32_t number = 0;  ///< epoch and cookie
  bool posted = false;
};

/// The reason with which the link went down.
std::string reason_of(Node& a, Node& b, LinkId link) {
  if (!pump({&a, &b}, [&] { return a.links_down.contains(link); })) return "the link is well";
  EXPECT_EQ(a.links_down[link], 1);
  return a.endpoint->link_reason(link);
}

bool holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST_F(VerbsTrouble, InfiniBandPortsSpeakByLid) {
  Node a(on("softib0"));
  Node b(on("softib1"));
  const Busy busy(a, b);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::set_lid("softib0", 9);
  const std::string reason = reason_of(a, b, busy.link.id);
  EXPECT_TRUE(holds(reason, "the port's LID changed")) << reason;
  a.endpoint->disconnect(busy.link.id);
  const Busy again(a, b);
  EXPECT_TRUE(again.arrives(a, b));
}

TEST_F(VerbsTrouble, PortsOfOtherKindsPartitionsAndContractsAreRefusedWithTheReason) {
  const auto refusal = [](const FabricSetup& one, const FabricSetup& other) {
    Node a(one);
    Node b(other);
    const auto link = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
    return link ? std::string("connected") : link.error().message;
  };
  EXPECT_TRUE(holds(refusal(on("soft0"), on("softib0")), "its port is InfiniBand"));
  FabricSetup elsewhere = on("soft0");
  elsewhere.config.verbs.pkey = 0x8007;
  const std::string partition = refusal(on("soft0"), elsewhere);
  EXPECT_TRUE(holds(partition, "fabric.verbs.pkey")) << partition;
  FabricSetup immediate = on("soft0");
  immediate.config.verbs.arrival = "immediate";
  EXPECT_TRUE(holds(refusal(on("soft0"), immediate), "fabric.verbs.arrival"));
}

TEST_F(VerbsTrouble, APartitionThatIsTakenAwayFailsTheLinks) {
  Node a(on("soft0"));
  Node b(on("soft0"));
  const Busy busy(a, b);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::set_pkeys("soft0", {0xffff, 0x8009});  // not theirs: nothing happens
  const Write write = make_write(busy.link, 6, 2, 1 << 20);
  ASSERT_TRUE(post_all(a, busy.link.id, {&write, 1}, {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(6) == 2; }));
  EXPECT_TRUE(a.links_down.empty());
  soft_nic::set_pkeys("soft0", {0x8009});
  const std::string reason = reason_of(a, b, busy.link.id);
  EXPECT_TRUE(holds(reason, "partition")) << reason;
}

TEST_F(VerbsTrouble, ADeviceThatFailsTakesItsLinksWithItAndNoOther) {
  Node a(on("soft0"));
  Node b(on("soft1"));
  Node c(on("soft1"));
  const TestLink lost = join(a, b);
  const Busy kept(c, b);
  soft_nic::fail_device("soft0");
  const std::string reason = reason_of(a, b, lost.id);
  EXPECT_TRUE(holds(reason, "the device failed")) << reason;
  EXPECT_TRUE(kept.arrives(c, b));
  const auto late = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
  EXPECT_FALSE(late);
  soft_nic::repair_device("soft0");
  Node d(on("soft0"));
  EXPECT_TRUE(Busy(d, b).arrives(d, b));
}

TEST_F(VerbsTrouble, AQueuePairThatTheNicGivesUpEndsItsLinkOnly) {
  Node a(on("soft0"));
  Node b(on("soft1"));
  const Busy busy(a, b);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::fail_queues("soft0");
  const std::string reason = reason_of(a, b, busy.link.id);
  EXPECT_TRUE(holds(reason, "gave the queue pair up") || holds(reason, "failed")) << reason;
  a.endpoint->disconnect(busy.link.id);
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
}

// Every question is repeated until it is answered.
TEST_F(VerbsTrouble, LinksAreMadeThoughManyDatagramsAreLost) {
  soft_nic::lose_datagrams(30);
  FabricSetup patient = on("soft0");
  patient.config.connect_timeout_ns = 60'000'000'000;
  Node a(patient);
  Node b(on("soft1"));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Busy(a, b).arrives(a, b)) << i;
  soft_nic::lose_datagrams(0);
}

TEST_F(VerbsTrouble, ANicThatHangsIsGivenUpAfterTheTimeoutAndEveryWriteIsReportedOnce) {
  FabricSetup setup = on("soft0");
  setup.config.write_timeout_ns = 300'000'000;
  Node a(setup);
  Node b(setup);
  const Busy busy(a, b);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::hold(true);
  std::vector<Write> writes;
  for (std::uint32_t i = 0; i < 20; ++i) writes.push_back(make_write(busy.link, i, 9, 100 + i));
  ASSERT_TRUE(post_all(a, busy.link.id, writes, {&a}));
  const std::string reason = reason_of(a, b, busy.link.id);
  EXPECT_TRUE(holds(reason, "took no data for 0.3 s")) << reason;
  ASSERT_TRUE(pump({&a}, [&] { return a.total(a.failed) == writes.size(); }));
  for (const auto& [cookie, count] : a.failed) EXPECT_EQ(count, 1) << cookie;
  soft_nic::hold(false);
}

TEST_F(VerbsTrouble, WhatPeersMayNotTouchEndsTheLinkThatTried) {
  Node a(on("soft0"));
  Node b(on("soft1"));
  TestLink link = join(a, b);
  const Memory source = a.memory(4096);
  auto target = std::make_unique<Memory>(b.memory(4096));
  const auto remote = import(a, link, *target);
  target.reset();  // deregistered, and the peer does not know yet
  const Write write = make_write(link, 1, 1, 1, source, 0, *remote, 0, 4096);
  ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
  const std::string reason = reason_of(a, b, link.id);
  EXPECT_TRUE(holds(reason, "was it deregistered?")) << reason;
  EXPECT_TRUE(pump({&a}, [&] { return a.failed.contains(1); }));
  EXPECT_NE(b.flag(1), 1u);
}

// Each call that makes something is refused, the first time and later: an error that says what the
// NIC would not do, and nothing is left behind.
TEST_F(VerbsTrouble, WhateverTheNicRefusesIsAnErrorAndLeavesNothingBehind) {
  const char* const functions[] = {
      "ibv_open_device",   "ibv_query_device", "ibv_query_port",  "ibv_query_gid_table",
      "ibv_alloc_pd",      "ibv_reg_mr",       "ibv_create_cq",   "ibv_create_comp_channel",
      "ibv_create_srq",    "ibv_create_qp",    "ibv_modify_qp",   "ibv_post_recv",
      "ibv_post_srq_recv", "ibv_create_ah",    "ibv_create_qp_ex"};
  for (const std::string arrival : {"flag", "immediate"}) {
    FabricSetup setup = on("soft0");
    setup.config.verbs.arrival = arrival;
    setup.config.connect_timeout_ns = 500'000'000;
    for (const char* const function : functions) {
      SCOPED_TRACE(arrival + " " + function);
      {
        soft_nic::refuse(function, ENOMEM, 1);
        const auto refused = setup.open();
        EXPECT_FALSE(!refused && refused.error().message.empty());
      }
      EXPECT_EQ(soft_nic::live_objects(), 0u);
      soft_nic::refuse(function, 0, 0);
      Node a(setup);
      Node b(setup);
      soft_nic::refuse(function, EINVAL, 100);
      const auto link = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
      EXPECT_FALSE(!link && link.error().message.empty());
      if (link) a.endpoint->disconnect(*link);
      soft_nic::refuse(function, 0, 0);
      try {
        EXPECT_TRUE(Busy(a, b).arrives(a, b));
      } catch (const std::exception& problem) {
        ADD_FAILURE() << problem.what();
      }
    }
    EXPECT_EQ(soft_nic::live_objects(), 0u);
  }
}

TEST_F(VerbsTrouble, ASubmissionThatTheNicDoesNotTakeEndsTheLink) {
  for (const std::string submission : {"extended", "classic"}) {
    FabricSetup setup = on("soft0");
    setup.config.verbs.submission = submission;
    Node a(setup);
    Node b(setup);
    const TestLink link = join(a, b);
    soft_nic::refuse(submission == "classic" ? "ibv_post_send" : "ibv_wr_complete", ENOMEM, 1);
    const Write write = make_write(link, 3, 1, 4);
    ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    const std::string reason = reason_of(a, b, link.id);
    EXPECT_TRUE(holds(reason, "the NIC does not take a write")) << reason;
    EXPECT_TRUE(pump({&a}, [&] { return a.failed.contains(4); }));
  }
}

TEST_F(VerbsTrouble, WithoutTheExtendedInterfaceTheClassicOneServes) {
  soft_nic::offer_extended(false);
  Node a(on("soft0"));
  Node b(on("soft0"));
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
  FabricSetup wanted = on("soft0");
  wanted.config.verbs.submission = "extended";
  Node c(wanted);
  const auto link = c.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
  ASSERT_FALSE(link);
  EXPECT_TRUE(holds(link.error().message, "submission")) << link.error().message;
}

}  // namespace
}  // namespace mk::fabric
