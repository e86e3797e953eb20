// libibverbs' functions of queue pairs: making them, their states, and giving them work.
#include <algorithm>
#include <memory>
#include <utility>

#include "tests/daemon/fabric/verbs/soft_nic/call.h"

namespace mk::soft_nic {
namespace {

Request& begin(ibv_qp_ex* ex, ibv_wr_opcode opcode, std::uint32_t key, std::uint64_t remote) {
  Request& request = of(ex).building.emplace_back();
  request.id = ex->wr_id;
  request.signaled = (ex->wr_flags & IBV_SEND_SIGNALED) != 0;
  request.opcode = opcode;
  request.remote = remote;
  request.remote_key = key;
  return request;
}

void offer_submission(ibv_qp_ex& ex) {
  ex.wr_start = [](ibv_qp_ex* q) { of(q).building.clear(); };
  ex.wr_rdma_write = [](ibv_qp_ex* q, std::uint32_t key, std::uint64_t remote) {
    begin(q, IBV_WR_RDMA_WRITE, key, remote);
  };
  ex.wr_rdma_write_imm = [](ibv_qp_ex* q, std::uint32_t key, std::uint64_t remote, __be32 word) {
    begin(q, IBV_WR_RDMA_WRITE_WITH_IMM, key, remote).immediate = word;
  };
  ex.wr_set_sge = [](ibv_qp_ex* q, std::uint32_t key, std::uint64_t address, std::uint32_t bytes) {
    of(q).building.back().pieces = {{address, bytes, key}};
  };
  ex.wr_set_sge_list = [](ibv_qp_ex* q, std::size_t count, const ibv_sge* list) {
    of(q).building.back().pieces.assign(list, list + count);
  };
  ex.wr_set_inline_data = [](ibv_qp_ex* q, void* data, std::size_t bytes) {
    if (bytes > of(q).room.max_inline_data) misuse("too much inline data");
    Request& request = of(q).building.back();
    request.is_inline = true;
    request.inline_bytes.assign(static_cast<std::byte*>(data),
                                static_cast<std::byte*>(data) + bytes);
  };
  ex.wr_complete = [](ibv_qp_ex* q) {
    return act("ibv_wr_complete",
               [q](Network& network) { return network.post(of(q), of(q).building); });
  };
}

std::vector<Receive> receives_of(ibv_recv_wr* list) {
  std::vector<Receive> receives;
  for (; list != nullptr; list = list->next)
    receives.push_back({list->wr_id, {list->sg_list, list->sg_list + list->num_sge}});
  return receives;
}

ibv_qp* make_queue(ibv_pd* domain, const ibv_qp_init_attr& wanted, bool extended,
                   const char* name) {
  return make(name, domain->context, [&](Network& network) -> ibv_qp* {
    if (extended && !network.extended) {
      errno = EOPNOTSUPP;
      return nullptr;
    }
    if (wanted.cap.max_send_wr > kWorkRequestsMax || wanted.cap.max_inline_data > kInlineMax) {
      errno = EINVAL;
      return nullptr;
    }
    auto queue = std::make_unique<QueuePair>();
    queue->owner = of(domain->context).owner;
    queue->room = wanted.cap;
    ibv_qp& qp = queue->qp();
    qp.context = domain->context;
    qp.pd = domain;
    qp.send_cq = wanted.send_cq;
    qp.recv_cq = wanted.recv_cq;
    qp.srq = wanted.srq;
    qp.qp_type = wanted.qp_type;
    qp.state = IBV_QPS_RESET;
    qp.qp_num = network.next_queue;
    network.next_queue += 7;
    if (extended) offer_submission(*queue);
    network.queues[qp.qp_num] = queue.get();
    return &queue.release()->qp();
  });
}

/// The attributes that a step to a state needs, by the specification; it takes no others here.
int needed(const ibv_qp& qp, ibv_qp_state to) {
  const bool datagrams = qp.qp_type == IBV_QPT_UD;
  switch (to) {
    case IBV_QPS_INIT:
      return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
             (datagrams ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
    case IBV_QPS_RTR:
      return datagrams ? IBV_QP_STATE
                       : IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    case IBV_QPS_RTS:
      return datagrams ? IBV_QP_STATE | IBV_QP_SQ_PSN
                       : IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    default:
      return IBV_QP_STATE;
  }
}

bool follows(ibv_qp_state from, ibv_qp_state to) {
  switch (to) {
    case IBV_QPS_INIT:
      return from == IBV_QPS_RESET;
    case IBV_QPS_RTR:
      return from == IBV_QPS_INIT;
    case IBV_QPS_RTS:
      return from == IBV_QPS_RTR;
    default:
      return true;
  }
}

void keep(ibv_qp_attr& kept, const ibv_qp_attr& given, int mask) {
  if (mask & IBV_QP_ACCESS_FLAGS) kept.qp_access_flags = given.qp_access_flags;
  if (mask & IBV_QP_PKEY_INDEX) kept.pkey_index = given.pkey_index;
  if (mask & IBV_QP_QKEY) kept.qkey = given.qkey;
  if (mask & IBV_QP_AV) kept.ah_attr = given.ah_attr;
  if (mask & IBV_QP_DEST_QPN) kept.dest_qp_num = given.dest_qp_num;
  if (mask & IBV_QP_RQ_PSN) kept.rq_psn = given.rq_psn;
  if (mask & IBV_QP_SQ_PSN) kept.sq_psn = given.sq_psn;
  if (mask & IBV_QP_TIMEOUT) kept.timeout = given.timeout;
  if (mask & IBV_QP_RETRY_CNT) kept.retry_cnt = given.retry_cnt;
  if (mask & IBV_QP_RNR_RETRY) kept.rnr_retry = given.rnr_retry;
}

}  // namespace

int post_send(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** refused) {
  return act("ibv_post_send", [&](Network& network) {
    QueuePair& queue = of(qp);
    for (; list != nullptr; list = list->next) {
      Request request;
      request.id = list->wr_id;
      request.opcode = list->opcode;
      request.signaled = (list->send_flags & IBV_SEND_SIGNALED) != 0;
      request.pieces.assign(list->sg_list, list->sg_list + list->num_sge);
      if ((list->send_flags & IBV_SEND_INLINE) != 0) {
        const ibv_sge& piece = request.pieces.at(0);
        const auto* const from = reinterpret_cast<const std::byte*>(piece.addr);
        if (piece.length > queue.room.max_inline_data) misuse("too much inline data");
        request.is_inline = true;
        request.inline_bytes.assign(from, from + piece.length);
      }
      request.immediate = list->imm_data;
      if (qp->qp_type == IBV_QPT_UD) {
        request.path = static_cast<Path*>(list->wr.ud.ah)->attributes;
        request.to_queue = list->wr.ud.remote_qpn;
        request.to_key = list->wr.ud.remote_qkey;
      } else {
        request.remote = list->wr.rdma.remote_addr;
        request.remote_key = list->wr.rdma.rkey;
      }
      std::vector<Request> one;
      one.push_back(std::move(request));
      if (const int error = network.post(queue, one)) {
        *refused = list;
        return error;
      }
    }
    return 0;
  });
}

int post_recv(ibv_qp* qp, ibv_recv_wr* list, ibv_recv_wr** refused) {
  return act("ibv_post_recv", [&](Network&) {
    QueuePair& queue = of(qp);
    *refused = list;
    if (qp->state == IBV_QPS_RESET || dead(qp->context)) return EINVAL;
    for (Receive& receive : receives_of(list)) {
      if (queue.receives.size() == queue.room.max_recv_wr) return ENOMEM;
      queue.receives.push_back(std::move(receive));
    }
    return 0;
  });
}

int post_srq_recv(ibv_srq* srq, ibv_recv_wr* list, ibv_recv_wr** refused) {
  return act("ibv_post_srq_recv", [&](Network& network) {
    auto& shared = *static_cast<SharedReceives*>(srq);
    *refused = list;
    if (dead(srq->context)) return EIO;
    for (Receive& receive : receives_of(list)) {
      if (shared.receives.size() == shared.most) return ENOMEM;
      shared.receives.push_back(std::move(receive));
    }
    network.wake();
    return 0;
  });
}

ibv_qp* create_qp_ex(ibv_context*, ibv_qp_init_attr_ex* wanted) {
  ibv_qp_init_attr plain{};
  plain.send_cq = wanted->send_cq;
  plain.recv_cq = wanted->recv_cq;
  plain.srq = wanted->srq;
  plain.cap = wanted->cap;
  plain.qp_type = wanted->qp_type;
  return make_queue(wanted->pd, plain, true, "ibv_create_qp_ex");
}

bool has_gid(const Device& device, const ibv_ah_attr& path) {
  return path.is_global == 0 ||
         std::any_of(device.gids.begin(), device.gids.end(), [&](const ibv_gid_entry& entry) {
           return entry.gid_index == path.grh.sgid_index;
         });
}

}  // namespace mk::soft_nic

using namespace mk::soft_nic;

extern "C" {

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  return make_queue(domain, *wanted, false, "ibv_create_qp");
}
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return reinterpret_cast<ibv_qp_ex*>(qp); }
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  return act("ibv_modify_qp", [&](Network& network) {
    QueuePair& queue = of(qp);
    if (dead(qp->context)) return EIO;
    const ibv_qp_state to = attributes->qp_state;
    if (mask != needed(*qp, to) || !follows(qp->state, to)) return EINVAL;
    if ((mask & IBV_QP_PKEY_INDEX) != 0 && attributes->pkey_index >= queue.owner->pkeys.size())
      return EINVAL;
    if ((mask & IBV_QP_AV) != 0 && !has_gid(*queue.owner, attributes->ah_attr)) return EINVAL;
    keep(queue.attributes, *attributes, mask);
    if (to == IBV_QPS_ERR) {
      network.to_error(queue);
    } else if (to == IBV_QPS_RESET) {
      network.to_reset(queue);
    } else {
      qp->state = to;
    }
    network.wake();
    return 0;
  });
}
int ibv_destroy_qp(ibv_qp* qp) {
  QueuePair* const queue = &of(qp);
  Network& network = Network::get();
  {
    std::unique_lock lock(network.mutex);
    network.forget(*queue, lock);
  }
  return destroy(queue, queue->qp().context, [](Network&) {});
}

}  // extern "C"
