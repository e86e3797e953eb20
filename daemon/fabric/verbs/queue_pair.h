/// \file
/// Reliable queue pairs: the attributes of each step from fresh to sending (pure), creation, and
/// taking the steps.
#pragma once

#include <string>
#include <utility>

#include "daemon/fabric/verbs/handle.h"
#include "daemon/fabric/verbs/wire.h"

namespace mk::fabric::verbs {

/// This side's place on the network, and how patient its connections are.
struct LocalPath {
  std::uint8_t port = 1;
  std::uint8_t gid_index = 0;
  std::uint16_t pkey_index = 0;
  std::uint32_t link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  bool global_always = false;  ///< the port wants a global route header on everything
  ibv_gid gid{};
  ibv_mtu mtu = IBV_MTU_1024;
  std::uint8_t timeout = 14;
  std::uint8_t retries = 7;
  std::uint8_t rnr_retries = 7;
  std::uint8_t service_level = 0;
  std::uint8_t traffic_class = 0;
};

/// What ibv_modify_qp is given for one step.
struct Transition {
  ibv_qp_attr attributes{};
  int mask = 0;
};

/// The way to a peer: a global route header on Ethernet, where the port demands it, and between
/// InfiniBand subnets; LIDs alone otherwise.
ibv_ah_attr path_to(const LocalPath& local, const Address& peer);

/// `access`: what the other end may do. Both ends of a link: the receiving one sends empty writes
/// back to see whether the sender still lives.
Transition to_init(const LocalPath& local, unsigned access = IBV_ACCESS_REMOTE_WRITE);
/// The MTU is the smaller one of both ends.
Transition to_ready_to_receive(const LocalPath& local, const Address& peer, const QueueEnd& remote);
Transition to_ready_to_send(const LocalPath& local, const QueueEnd& own);
Transition to_error();

Status take_step(ibv_qp* queue, const Transition& step, std::string_view name);
/// From fresh to sending.
Status connect_queue(ibv_qp* queue, const LocalPath& local, const Address& peer,
                     const QueueEnd& own, const QueueEnd& remote,
                     unsigned access = IBV_ACCESS_REMOTE_WRITE);

/// A fresh packet sequence number.
Result<std::uint32_t> make_first_packet();

/// A queue pair that sends, and how it is fed.
struct SendingQueue {
  QueuePairHandle handle;
  ibv_qp_ex* extended = nullptr;  ///< null: classic posts
};
enum class Submission { kAuto, kExtended, kClassic };
/// Of fabric.verbs.submission. kInvalidArgument.
Result<Submission> submission_of(const std::string& name);

/// `work_requests`: the depth of the send queue; every completion goes to `completions`. kAuto: the
/// extended interface where the provider has it.
Result<SendingQueue> make_sending_queue(ibv_pd* domain, ibv_cq* completions,
                                        std::uint32_t work_requests, Submission submission);

}  // namespace mk::fabric::verbs
