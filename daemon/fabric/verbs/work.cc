#include "daemon/fabric/verbs/work.h"

#include <endian.h>

#include "daemon/fabric/verbs/region.h"

namespace mk::fabric::verbs {
namespace {

constexpr std::uint32_t kFlagBytes = 4;

bool fits(std::uint64_t offset, std::uint64_t bytes, std::uint64_t size) {
  return offset <= size && bytes <= size - offset;
}

const VerbsLocalRegion& local(const LocalRegion* region) {
  return static_cast<const VerbsLocalRegion&>(*region);
}
const Key& remote(const RemoteRegion* region) {
  return static_cast<const VerbsRemoteRegion&>(*region).key();
}

}  // namespace

bool in_bounds(const Write& write, DeliveryContract contract) {
  if (contract == DeliveryContract::kOrdered &&
      !fits(std::uint64_t{kFlagBytes} * write.flag_index, kFlagBytes, remote(write.flags).bytes))
    return false;
  return write.bytes == 0 || (fits(write.src_offset, write.bytes, local(write.src).bytes()) &&
                              fits(write.dst_offset, write.bytes, remote(write.dst).bytes));
}

std::uint32_t append_work(const Write& write, DeliveryContract contract, std::uint64_t id,
                          Chain& chain) {
  const bool ordered = contract == DeliveryContract::kOrdered;
  std::uint32_t count = 0;
  if (write.bytes > 0 || !ordered) {
    WorkRequest data;
    data.id = id + count++;
    if (write.bytes > 0) {
      data.bytes = write.bytes;
      data.local = local(write.src).address() + write.src_offset;
      data.local_key = local(write.src).local_key();
      data.remote = remote(write.dst).address + write.dst_offset;
      data.remote_key = remote(write.dst).rkey;
    }
    if (!ordered) {
      data.kind = WorkRequest::Kind::kImmediate;
      data.word = write.immediate;
    }
    chain.push(data);
  }
  if (ordered) {
    WorkRequest flag;
    flag.kind = WorkRequest::Kind::kFlag;
    flag.id = id + count++;
    flag.word = write.epoch;
    flag.bytes = kFlagBytes;
    flag.remote = remote(write.flags).address + std::uint64_t{kFlagBytes} * write.flag_index;
    flag.remote_key = remote(write.flags).rkey;
    chain.push(flag);
  }
  return count;
}

int submit_extended(ibv_qp_ex* queue, std::span<WorkRequest> requests, std::size_t& posted) {
  ::ibv_wr_start(queue);
  for (WorkRequest& request : requests) {
    queue->wr_id = request.id;
    // IBV_SEND_INLINE says nothing that the call below does not, but rxe believes only the flag.
    queue->wr_flags = (request.signaled ? unsigned{IBV_SEND_SIGNALED} : 0u) |
                      (request.kind == WorkRequest::Kind::kFlag ? unsigned{IBV_SEND_INLINE} : 0u);
    if (request.kind == WorkRequest::Kind::kImmediate) {
      ::ibv_wr_rdma_write_imm(queue, request.remote_key, request.remote, htobe32(request.word));
    } else {
      ::ibv_wr_rdma_write(queue, request.remote_key, request.remote);
    }
    if (request.kind == WorkRequest::Kind::kFlag) {
      ::ibv_wr_set_inline_data(queue, &request.word, sizeof request.word);
    } else if (request.bytes > 0) {
      ::ibv_wr_set_sge(queue, request.local_key, request.local, request.bytes);
    } else {
      ::ibv_wr_set_sge_list(queue, 0, nullptr);
    }
  }
  const int error = ::ibv_wr_complete(queue);
  posted = error == 0 ? requests.size() : 0;
  return error;
}

int submit_classic(ibv_qp* queue, std::span<WorkRequest> requests, std::size_t& posted) {
  std::array<ibv_send_wr, std::size_t{kRequestsPerWrite} * shm::kBatchMax> list;
  std::array<ibv_sge, list.size()> pieces;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    WorkRequest& request = requests[i];
    const bool flag = request.kind == WorkRequest::Kind::kFlag;
    const bool immediate = request.kind == WorkRequest::Kind::kImmediate;
    pieces[i] = {flag ? reinterpret_cast<std::uint64_t>(&request.word) : request.local,
                 request.bytes, flag ? 0 : request.local_key};
    ibv_send_wr& entry = list[i];
    entry = {};
    entry.wr_id = request.id;
    entry.next = i + 1 < requests.size() ? &list[i + 1] : nullptr;
    entry.sg_list = &pieces[i];
    entry.num_sge = request.bytes > 0 ? 1 : 0;
    entry.opcode = immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    entry.send_flags = (request.signaled ? unsigned{IBV_SEND_SIGNALED} : 0u) |
                       (flag ? unsigned{IBV_SEND_INLINE} : 0u);
    if (immediate) entry.imm_data = htobe32(request.word);
    entry.wr.rdma.remote_addr = request.remote;
    entry.wr.rdma.rkey = request.remote_key;
  }
  ibv_send_wr* refused = nullptr;
  const int error = ::ibv_post_send(queue, list.data(), &refused);
  posted = error == 0           ? requests.size()
           : refused == nullptr ? 0
                                : static_cast<std::size_t>(refused - list.data());
  return error;
}

}  // namespace mk::fabric::verbs
