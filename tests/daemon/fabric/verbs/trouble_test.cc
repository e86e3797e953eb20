// What goes wrong with RDMA ports, and what becomes of the links over them; on software NICs.
#include <cerrno>
#include <set>

#include "daemon/fabric/choice.h"
#include "tests/daemon/fabric/verbs/trouble.h"

namespace mk::fabric {
namespace {

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

// A queue pair names its partition by the place in the port's table.
TEST_F(VerbsTrouble, APartitionIsFollowedToWhereverItIsInTheTable) {
  FabricSetup setup = on("soft0");
  setup.config.verbs.pkey = 0x8007;
  Node a(setup);
  setup.config.verbs.devices = {"soft1"};
  Node b(setup);
  const Busy busy(a, b);
  const Busy back(b, a);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::set_pkeys("soft0", {0xffff, 0x8007, 0x8009});  // not theirs: nothing happens
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
  EXPECT_TRUE(a.links_down.empty());

  soft_nic::set_pkeys("soft0", {0xffff, 0x8009, 0x8007});
  std::string reason = reason_of(a, b, busy.link.id);
  EXPECT_TRUE(holds(reason, "soft0:1") && holds(reason, "the port's partitions changed")) << reason;
  reason = reason_of(b, a, back.link.id);
  EXPECT_TRUE(holds(reason, "got another address")) << reason;
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
  const Busy again(b, a);
  EXPECT_TRUE(again.arrives(b, a));
}

// Who connects by what it has heard may hear later that the port has moved before: that concerns
// links of then, not this one.
TEST_F(VerbsTrouble, ALinkMadeAfterAMoveOutlivesTheNewsOfIt) {
  FabricSetup setup = on("soft0");
  setup.config.verbs.pkey = 0x8007;
  Node a(setup);
  setup.config.verbs.devices = {"soft1"};
  Node b(setup);
  const Bytes first = b.endpoint->address();
  soft_nic::set_pkeys("soft1", {0xffff, 0x8009, 0x8007});
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.endpoint->address() != first; }));
  const auto link = a.endpoint->connect(first, "node 1 rail 0");
  ASSERT_TRUE(link) << link.error().message;
  EXPECT_TRUE(Busy(b, a).arrives(b, a));  // says where b is
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
  EXPECT_TRUE(a.links_down.empty()) << a.endpoint->link_reason(*link);
  EXPECT_EQ(a.endpoint->link_reason(*link), "");
}

TEST_F(VerbsTrouble, APartitionThatIsTakenAwayEndsTheLinksUntilItIsBack) {
  FabricSetup setup = on("soft0");
  setup.config.verbs.pkey = 0x8007;
  setup.config.connect_timeout_ns = soon_ns();
  Node a(setup);
  setup.config.verbs.devices = {"soft1"};
  Node b(setup);
  const Busy busy(a, b);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::set_pkeys("soft0", {0xffff});
  const std::string reason = reason_of(a, b, busy.link.id);
  EXPECT_TRUE(holds(reason, "partition key 0x8007 is not in the table of port soft0:1")) << reason;
  const auto refused = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
  ASSERT_FALSE(refused);
  EXPECT_TRUE(holds(refused.error().message, "node 1 rail 0: partition key 0x8007 is not in"))
      << refused.error().message;
  EXPECT_FALSE(b.endpoint->connect(a.endpoint->address(), "node 0 rail 0"));
  soft_nic::set_pkeys("soft0", {0xffff, 0x8001, 0x8007});
  ASSERT_TRUE(reconnects(a, b));
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
  EXPECT_TRUE(Busy(b, a).arrives(b, a));
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
  ASSERT_FALSE(late);
  EXPECT_TRUE(holds(late.error().message, "RDMA port soft0:1 is lost: the device failed"))
      << late.error().message;
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

// Every question is repeated until it is answered. A link whose answer was lost for so long that
// the peer has asked for without an answer is given up and made again, as daemons do.
TEST_F(VerbsTrouble, LinksAreMadeThoughManyDatagramsAreLost) {
  soft_nic::lose_datagrams(30);
  FabricSetup patient = on("soft0");
  patient.config.connect_timeout_ns = 60'000'000'000;
  Node a(patient);
  Node b(on("soft1"));
  constexpr int kTries = 3;
  for (int i = 0; i < 3; ++i) {
    int tries = 0;
    while (tries < kTries && !Busy(a, b).arrives(a, b)) ++tries;
    EXPECT_LT(tries, kTries) << i;
  }
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
    setup.config.connect_timeout_ns = soon_ns();
    for (const char* const function : functions) {
      SCOPED_TRACE(arrival + " " + function);
      {
        soft_nic::refuse(function, ENOMEM, 1);
        const auto refused = setup.open();
        const bool made = soft_nic::refusals_left(function) == 0;
        EXPECT_EQ(refused.has_value(), !made);
        EXPECT_TRUE(refused || !refused.error().message.empty());
      }
      EXPECT_EQ(soft_nic::live_objects(), 0u);
      soft_nic::refuse(function, 0, 0);
      Node a(setup);
      Node b(setup);
      soft_nic::refuse(function, EINVAL, 100);
      const auto link = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
      // Without the extended interface it is the classic one.
      const bool needed =
          std::set<std::string>{"ibv_create_cq", "ibv_create_qp", "ibv_modify_qp", "ibv_create_ah"}
              .contains(function);
      EXPECT_EQ(link.has_value(), !needed);
      EXPECT_TRUE(link || !link.error().message.empty());
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

// Every call that looks at a device may fail; then the device is there, and not absent.
TEST_F(VerbsTrouble, ADeviceThatCannotBeLookedAtIsNamedWithTheReason) {
  const std::pair<const char*, const char*> calls[] = {
      {"ibv_open_device", "cannot be opened: Permission denied"},
      {"ibv_query_device", "does not tell its attributes: Permission denied"},
      {"ibv_query_port", "does not tell its attributes: Permission denied"}};
  for (const auto& call : calls) {
    SCOPED_TRACE(call.first);
    soft_nic::refuse(call.first, EACCES, 1 << 30);
    FabricSetup setup = on("soft0");
    const auto named = setup.open();
    ASSERT_FALSE(named);
    EXPECT_EQ(named.error().code, ErrorCode::kUnavailable);
    EXPECT_TRUE(holds(named.error().message, "RDMA device soft0") &&
                holds(named.error().message, call.second))
        << named.error().message;
    setup.config.verbs.devices.clear();
    const auto any = setup.open();
    ASSERT_FALSE(any);
    const Inventory inventory = read_inventory();
    EXPECT_TRUE(inventory.rdma_ports.empty());
    ASSERT_EQ(inventory.closed_devices.size(), 4u);
    const FabricChoice choice = choose_fabric(inventory);
    for (const std::string device : {"soft0", "soft1", "softib0", "softib1"}) {
      EXPECT_TRUE(holds(any.error().message, device)) << any.error().message;
      EXPECT_TRUE(holds(choice.why, device) && holds(choice.why, call.second)) << choice.why;
      EXPECT_TRUE(holds(choice.trouble, device)) << choice.trouble;
    }
    soft_nic::refuse(call.first, 0, 0);
    EXPECT_TRUE(read_inventory().closed_devices.empty());
    EXPECT_EQ(choose_fabric(read_inventory()).trouble, "");
  }
}

TEST_F(VerbsTrouble, WhatIsRefusedForAConnectionNamesThePeer) {
  Node a(on("soft0"));
  Node b(on("soft1"));
  for (const char* const function : {"ibv_create_cq", "ibv_modify_qp"}) {
    soft_nic::refuse(function, ENOMEM, 1);
    const auto refused = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
    ASSERT_FALSE(refused);
    EXPECT_TRUE(holds(refused.error().message, "node 1 rail 0")) << refused.error().message;
    soft_nic::refuse(function, 0, 0);
  }
}

// A NIC that does not tell of datagrams is asked again and again; that is said once.
TEST_F(VerbsTrouble, ANicThatDoesNotNotifyIsPolled) {
  Notices notices;
  FabricSetup setup = on("soft0");
  setup.config.notice = notices.sink();
  soft_nic::refuse("ibv_req_notify_cq", EOPNOTSUPP, 1 << 30);
  {
    Node deaf(setup);
    Node b(on("soft1"));
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(Busy(b, deaf).arrives(b, deaf)) << i;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, patience() * std::chrono::seconds(10));
    soft_nic::refuse("ibv_req_notify_cq", 0, 0);  // it does again
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(Busy(b, deaf).arrives(b, deaf)) << i;
  }
  EXPECT_EQ(notices.count("RDMA port soft0:1 does not tell of datagrams"), 1)
      << testing::PrintToString(notices.all());
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
