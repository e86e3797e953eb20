// What a queue pair is told at each step, what a peer's address makes of the way to it, and what a
// device's events mean.
#include "daemon/fabric/verbs/queue_pair.h"

#include <gtest/gtest.h>

#include <cstring>

#include "daemon/fabric/verbs/events.h"

namespace mk::fabric::verbs {
namespace {

LocalPath local_path(std::uint32_t link_layer) {
  LocalPath path;
  path.port = 2;
  path.gid_index = 5;
  path.pkey_index = 3;
  path.link_layer = link_layer;
  path.mtu = IBV_MTU_2048;
  path.timeout = 18;
  path.retries = 6;
  path.rnr_retries = 4;
  path.service_level = 3;
  path.traffic_class = 106;
  path.gid.raw[0] = 0xfe;
  path.gid.raw[1] = 0x80;
  path.gid.raw[15] = 1;
  return path;
}

Address peer_address(std::uint8_t subnet = 0x80) {
  Address peer;
  peer.gid = {0xfe, subnet, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9};
  peer.lid = 77;
  peer.mtu = IBV_MTU_1024;
  return peer;
}

TEST(PathTo, OnEthernetEverythingIsGloballyRouted) {
  const ibv_ah_attr path = path_to(local_path(IBV_LINK_LAYER_ETHERNET), peer_address());
  EXPECT_EQ(path.is_global, 1);
  EXPECT_EQ(path.grh.sgid_index, 5);
  EXPECT_EQ(path.grh.traffic_class, 106);
  EXPECT_GT(path.grh.hop_limit, 1);
  EXPECT_EQ(0, std::memcmp(path.grh.dgid.raw, peer_address().gid.data(), 16));
  EXPECT_EQ(path.sl, 3);
  EXPECT_EQ(path.port_num, 2);
}

TEST(PathTo, OnInfiniBandLidsServeWithinTheSubnet) {
  LocalPath local = local_path(IBV_LINK_LAYER_INFINIBAND);
  EXPECT_EQ(path_to(local, peer_address()).is_global, 0);
  EXPECT_EQ(path_to(local, peer_address()).dlid, 77);
  EXPECT_EQ(path_to(local, peer_address(0x81)).is_global, 1) << "another subnet";
  local.global_always = true;
  EXPECT_EQ(path_to(local, peer_address()).is_global, 1) << "the port demands it";
}

TEST(Transitions, CarryTheConfigurationAndTheRightMasks) {
  const LocalPath local = local_path(IBV_LINK_LAYER_ETHERNET);
  const Transition init = to_init(local);
  EXPECT_EQ(init.attributes.qp_state, IBV_QPS_INIT);
  EXPECT_EQ(init.attributes.pkey_index, 3);
  EXPECT_EQ(init.attributes.port_num, 2);
  EXPECT_EQ(init.mask, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);

  const Transition receive = to_ready_to_receive(local, peer_address(), {1234, 0xabcdef});
  EXPECT_EQ(receive.attributes.qp_state, IBV_QPS_RTR);
  EXPECT_EQ(receive.attributes.dest_qp_num, 1234u);
  EXPECT_EQ(receive.attributes.rq_psn, 0xabcdefu);
  EXPECT_EQ(receive.attributes.path_mtu, IBV_MTU_1024) << "the smaller one of both ends";
  EXPECT_EQ(receive.attributes.ah_attr.grh.sgid_index, 5);
  // What the specification requires of this step for a reliable connection, all of it.
  EXPECT_EQ(receive.mask, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);

  const Transition send = to_ready_to_send(local, {55, 0x123456});
  EXPECT_EQ(send.attributes.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(send.attributes.timeout, 18);
  EXPECT_EQ(send.attributes.retry_cnt, 6);
  EXPECT_EQ(send.attributes.rnr_retry, 4);
  EXPECT_EQ(send.attributes.sq_psn, 0x123456u);
  EXPECT_EQ(send.mask, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

TEST(Transitions, AFirstPacketHas24Bits) {
  std::uint32_t seen = 0;
  for (int i = 0; i < 200; ++i) {
    const auto packet = make_first_packet();
    ASSERT_TRUE(packet);
    EXPECT_LT(*packet, 1u << 24);
    seen |= *packet;
  }
  EXPECT_EQ(seen, (1u << 24) - 1) << "every bit is sometimes set";
}

TEST(Events, MeanTroubleForTheRightLinks) {
  using Scope = EventMeaning::Scope;
  EXPECT_EQ(meaning_of(IBV_EVENT_PORT_ERR).scope, Scope::kPort);
  EXPECT_EQ(meaning_of(IBV_EVENT_LID_CHANGE).scope, Scope::kPlace);
  EXPECT_EQ(meaning_of(IBV_EVENT_GID_CHANGE).scope, Scope::kGidTable);
  EXPECT_EQ(meaning_of(IBV_EVENT_PKEY_CHANGE).scope, Scope::kPkeyTable);
  EXPECT_EQ(meaning_of(IBV_EVENT_DEVICE_FATAL).scope, Scope::kDevice);
  EXPECT_EQ(meaning_of(IBV_EVENT_QP_FATAL).scope, Scope::kQueue);
  EXPECT_EQ(meaning_of(IBV_EVENT_QP_ACCESS_ERR).scope, Scope::kQueue);
  for (const auto harmless : {IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED, IBV_EVENT_PORT_ACTIVE,
                              IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_SRQ_LIMIT_REACHED})
    EXPECT_EQ(meaning_of(harmless).scope, Scope::kNothing) << harmless;
  for (int type = 0; type <= IBV_EVENT_WQ_FATAL; ++type) {
    const EventMeaning meaning = meaning_of(static_cast<ibv_event_type>(type));
    EXPECT_EQ(meaning.what.empty(), meaning.scope == Scope::kNothing) << type;
  }
}

}  // namespace
}  // namespace mk::fabric::verbs
