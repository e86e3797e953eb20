#include "daemon/fabric/verbs/work.h"

#include <endian.h>

#include <algorithm>

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

std::uint32_t opening_of(const Write& write) { return local(write.src).opening(); }

std::uint32_t WorkMaker::part_bytes(std::uint64_t from) const {
  return static_cast<std::uint32_t>(
      std::min({write_.bytes - from, message_bytes_max_,
                local(write_.src).left_in_piece(write_.src_offset + from),
                remote(write_.dst).left_in_piece(write_.dst_offset + from)}));
}

std::uint32_t WorkMaker::count() const {
  std::uint32_t parts = 0;
  for (std::uint64_t from = 0; from < write_.bytes; from += part_bytes(from)) ++parts;
  return contract_ == DeliveryContract::kOrdered ? parts + 1 : std::max(parts, 1u);
}

bool WorkMaker::next(WorkRequest& request) {
  if (ended_) return false;
  const bool ordered = contract_ == DeliveryContract::kOrdered;
  request = {};
  if (done_ < write_.bytes) {
    request.bytes = part_bytes(done_);
    const std::uint64_t from = write_.src_offset + done_;
    const std::uint64_t to = write_.dst_offset + done_;
    request.local = local(write_.src).address() + from;
    request.local_key = local(write_.src).local_key(from);
    request.remote = remote(write_.dst).address + to;
    request.remote_key = remote(write_.dst).rkey(to);
    done_ += request.bytes;
    if (ordered || done_ < write_.bytes) return true;
  }
  ended_ = true;
  if (!ordered) {
    request.kind = WorkRequest::Kind::kImmediate;
    request.word = write_.immediate;
    return true;
  }
  const std::uint64_t at = std::uint64_t{kFlagBytes} * write_.flag_index;
  request.kind = WorkRequest::Kind::kFlag;
  request.word = write_.epoch;
  request.bytes = kFlagBytes;
  request.remote = remote(write_.flags).address + at;
  request.remote_key = remote(write_.flags).rkey(at);
  return true;
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
