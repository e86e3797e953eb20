#include "daemon/fabric/verbs/queue_pair.h"

#include <algorithm>

namespace mk::fabric::verbs {
namespace {

/// How long a receiver without a posted receive asks the sender to wait: 0.64 ms, in the
/// specification's code.
constexpr std::uint8_t kReceiverNotReadyTimer = 12;
constexpr std::uint32_t kInlineBytes = 8;
constexpr std::size_t kSubnetPrefixBytes = 8;

bool needs_global_route(const LocalPath& local, const Address& peer) {
  if (local.link_layer == IBV_LINK_LAYER_ETHERNET || local.global_always) return true;
  return !std::equal(peer.gid.begin(), peer.gid.begin() + kSubnetPrefixBytes, local.gid.raw);
}

}  // namespace

ibv_ah_attr path_to(const LocalPath& local, const Address& peer) {
  ibv_ah_attr path{};
  path.port_num = local.port;
  path.sl = local.service_level;
  path.dlid = static_cast<std::uint16_t>(peer.lid);
  if (needs_global_route(local, peer)) {
    path.is_global = 1;
    std::copy(peer.gid.begin(), peer.gid.end(), path.grh.dgid.raw);
    path.grh.sgid_index = local.gid_index;
    path.grh.hop_limit = 64;
    path.grh.traffic_class = local.traffic_class;
  }
  return path;
}

Transition to_init(const LocalPath& local, unsigned access) {
  Transition step;
  step.attributes.qp_state = IBV_QPS_INIT;
  step.attributes.port_num = local.port;
  step.attributes.pkey_index = local.pkey_index;
  step.attributes.qp_access_flags = access;
  step.mask = IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS;
  return step;
}

Transition to_ready_to_receive(const LocalPath& local, const Address& peer,
                               const QueueEnd& remote) {
  Transition step;
  step.attributes.qp_state = IBV_QPS_RTR;
  step.attributes.ah_attr = path_to(local, peer);
  step.attributes.path_mtu = std::min(local.mtu, static_cast<ibv_mtu>(peer.mtu));
  step.attributes.dest_qp_num = remote.number;
  step.attributes.rq_psn = remote.first_packet;
  step.attributes.max_dest_rd_atomic = 1;
  step.attributes.min_rnr_timer = kReceiverNotReadyTimer;
  step.mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  return step;
}

Transition to_ready_to_send(const LocalPath& local, const QueueEnd& own) {
  Transition step;
  step.attributes.qp_state = IBV_QPS_RTS;
  step.attributes.timeout = local.timeout;
  step.attributes.retry_cnt = local.retries;
  step.attributes.rnr_retry = local.rnr_retries;
  step.attributes.sq_psn = own.first_packet;
  step.attributes.max_rd_atomic = 1;
  step.mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
              IBV_QP_MAX_QP_RD_ATOMIC;
  return step;
}

Transition to_error() {
  Transition step;
  step.attributes.qp_state = IBV_QPS_ERR;
  step.mask = IBV_QP_STATE;
  return step;
}

Status take_step(ibv_qp* queue, const Transition& step, std::string_view name) {
  ibv_qp_attr attributes = step.attributes;
  if (const int error = ::ibv_modify_qp(queue, &attributes, step.mask))
    return fail_verb(error, "a queue pair does not become {}", name);
  return {};
}

Status connect_queue(ibv_qp* queue, const LocalPath& local, const Address& peer,
                     const QueueEnd& own, const QueueEnd& remote, unsigned access) {
  MK_RETURN_IF_ERROR(take_step(queue, to_init(local, access), "initialised (INIT)"));
  MK_RETURN_IF_ERROR(
      take_step(queue, to_ready_to_receive(local, peer, remote), "ready to receive (RTR)"));
  return take_step(queue, to_ready_to_send(local, own), "ready to send (RTS)");
}

Result<std::uint32_t> make_first_packet() {
  MK_ASSIGN_OR_RETURN(const Token random, make_token());
  return random[0] | static_cast<std::uint32_t>(random[1]) << 8 |
         static_cast<std::uint32_t>(random[2]) << 16;
}

Result<Submission> submission_of(const std::string& name) {
  if (name == "auto") return Submission::kAuto;
  if (name == "extended") return Submission::kExtended;
  if (name == "classic") return Submission::kClassic;
  return fail(ErrorCode::kInvalidArgument,
              "fabric.verbs.submission is \"{}\": it is \"auto\", \"extended\" or \"classic\"",
              name);
}

Result<SendingQueue> make_sending_queue(ibv_pd* domain, ibv_cq* completions,
                                        std::uint32_t work_requests, Submission submission) {
  ibv_qp_init_attr_ex wanted{};
  wanted.qp_type = IBV_QPT_RC;
  wanted.send_cq = completions;
  wanted.recv_cq = completions;
  wanted.cap.max_send_wr = work_requests;
  wanted.cap.max_recv_wr = 1;
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  wanted.cap.max_inline_data = kInlineBytes;
  wanted.pd = domain;
  wanted.comp_mask = IBV_QP_INIT_ATTR_PD;
  SendingQueue queue;
  if (submission != Submission::kClassic) {
    wanted.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    wanted.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    queue.handle.reset(::ibv_create_qp_ex(domain->context, &wanted));
    if (queue.handle) {
      queue.extended = ::ibv_qp_to_qp_ex(queue.handle.get());
      return queue;
    }
    if (submission == Submission::kExtended) {
      return fail_verb(errno,
                       "no queue pair with the extended send interface (fabric.verbs.submission = "
                       "\"extended\")");
    }
    wanted.comp_mask = IBV_QP_INIT_ATTR_PD;
    wanted.send_ops_flags = 0;
  }
  queue.handle.reset(::ibv_create_qp_ex(domain->context, &wanted));
  if (!queue.handle) return fail_verb(errno, "no queue pair of {} work requests", work_requests);
  return queue;
}

}  // namespace mk::fabric::verbs
