/// \file
/// A NIC without a network: queue pairs that write down what they are given, by either submission
/// interface, and a completion queue that says what the test puts in. The structures are
/// libibverbs' own, with our functions in them.
#pragma once

#include <endian.h>
#include <infiniband/verbs.h>

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "daemon/fabric/verbs/region.h"
#include "daemon/fabric/verbs/sender.h"

namespace mk::fabric::verbs {

/// One work request as the NIC sees it, in the words of the specification.
struct Seen {
  bool immediate = false;
  bool signaled = false;
  bool is_inline = false;
  std::uint64_t id = 0;
  std::uint64_t remote = 0;
  std::uint32_t remote_key = 0;
  std::uint64_t local = 0;
  std::uint32_t bytes = 0;
  std::uint32_t local_key = 0;
  std::uint32_t word = 0;  ///< inline: the data; with immediate: the immediate, our byte order
  bool read = false;

  bool operator==(const Seen&) const = default;
};

class FakeNic {
 public:
  struct Queue {
    ibv_qp_ex extended{};  ///< first: the functions get a pointer to it
    std::vector<Seen> seen;
    std::vector<Seen> building;
    int doorbells = 0;
    int error = 0;                      ///< the next submissions' answer
    std::size_t accepted_of_error = 0;  ///< classic: how many a failing submission takes
  };

  explicit FakeNic(std::size_t queues) {
    context_.ops.poll_cq = poll;
    context_.ops.post_send = post_send;
    completions_.cq.context = &context_;
    for (std::size_t i = 0; i < queues; ++i) {
      queues_.push_back(std::make_unique<Queue>());
      ibv_qp_ex& qp = queues_.back()->extended;
      qp.qp_base.context = &context_;
      qp.wr_start = [](ibv_qp_ex* q) { of(q).building.clear(); };
      qp.wr_rdma_write = [](ibv_qp_ex* q, std::uint32_t key, std::uint64_t remote) {
        begin(q).remote = remote;
        of(q).building.back().remote_key = key;
      };
      qp.wr_rdma_write_imm = [](ibv_qp_ex* q, std::uint32_t key, std::uint64_t remote,
                                __be32 immediate) {
        Seen& seen = begin(q);
        seen.remote = remote;
        seen.remote_key = key;
        seen.immediate = true;
        seen.word = be32toh(immediate);
      };
      qp.wr_set_sge = [](ibv_qp_ex* q, std::uint32_t key, std::uint64_t local,
                         std::uint32_t bytes) {
        Seen& seen = of(q).building.back();
        seen.local = local;
        seen.local_key = key;
        seen.bytes = bytes;
      };
      qp.wr_set_sge_list = [](ibv_qp_ex*, std::size_t, const ibv_sge*) {};
      qp.wr_set_inline_data = [](ibv_qp_ex* q, void* data, std::size_t bytes) {
        Seen& seen = of(q).building.back();
        seen.is_inline = true;
        seen.bytes = static_cast<std::uint32_t>(bytes);
        std::memcpy(&seen.word, data, bytes);
      };
      qp.wr_complete = [](ibv_qp_ex* q) {
        Queue& queue = of(q);
        if (queue.error != 0) return queue.error;
        queue.seen.insert(queue.seen.end(), queue.building.begin(), queue.building.end());
        ++queue.doorbells;
        return 0;
      };
    }
  }

  Queue& queue(std::size_t i = 0) { return *queues_[i]; }
  ibv_cq* completions() { return &completions_.cq; }
  std::vector<QueueRef> references(bool extended) {
    std::vector<QueueRef> all;
    for (const auto& queue : queues_)
      all.push_back({&queue->extended.qp_base, extended ? &queue->extended : nullptr});
    return all;
  }

  void complete(std::uint64_t id, ibv_wc_status status = IBV_WC_SUCCESS) {
    ibv_wc completion{};
    completion.wr_id = id;
    completion.status = status;
    completions_.waiting.push_back(completion);
  }

 private:
  struct Completions {
    ibv_cq cq{};  ///< first
    std::deque<ibv_wc> waiting;
  };

  static Queue& of(ibv_qp_ex* queue) { return *reinterpret_cast<Queue*>(queue); }
  static Seen& begin(ibv_qp_ex* queue) {
    Seen seen;
    seen.id = queue->wr_id;
    seen.signaled = (queue->wr_flags & IBV_SEND_SIGNALED) != 0;
    of(queue).building.push_back(seen);
    return of(queue).building.back();
  }
  static int poll(ibv_cq* cq, int room, ibv_wc* into) {
    auto& waiting = reinterpret_cast<Completions*>(cq)->waiting;
    int count = 0;
    for (; count < room && !waiting.empty(); ++count) {
      into[count] = waiting.front();
      waiting.pop_front();
    }
    return count;
  }
  static int post_send(ibv_qp* qp, ibv_send_wr* list, ibv_send_wr** refused) {
    Queue& queue = of(reinterpret_cast<ibv_qp_ex*>(qp));
    std::size_t count = 0;
    for (ibv_send_wr* request = list; request != nullptr; request = request->next, ++count) {
      if (queue.error != 0 && count == queue.accepted_of_error) {
        *refused = request;
        return queue.error;
      }
      Seen seen;
      seen.id = request->wr_id;
      seen.signaled = (request->send_flags & IBV_SEND_SIGNALED) != 0;
      seen.is_inline = (request->send_flags & IBV_SEND_INLINE) != 0;
      seen.immediate = request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
      seen.read = request->opcode == IBV_WR_RDMA_READ;
      seen.remote = request->wr.rdma.remote_addr;
      seen.remote_key = request->wr.rdma.rkey;
      if (seen.immediate) seen.word = be32toh(request->imm_data);
      if (request->num_sge == 1) {
        const ibv_sge& piece = request->sg_list[0];
        seen.bytes = piece.length;
        if (seen.is_inline) {
          std::memcpy(&seen.word, reinterpret_cast<const void*>(piece.addr), piece.length);
        } else {
          seen.local = piece.addr;
          seen.local_key = piece.lkey;
        }
      }
      queue.seen.push_back(seen);
    }
    ++queue.doorbells;
    return 0;
  }

  ibv_context context_{};
  Completions completions_;
  std::vector<std::unique_ptr<Queue>> queues_;
};

/// Memory that was never registered, for requests that are never carried out.
struct FakeMemory {
  VerbsLocalRegion source{key(0x10000, 1 << 20), {71}, 0, nullptr};
  VerbsRemoteRegion target{key(0x200000, 1 << 20, 72)};
  VerbsRemoteRegion flags{key(0x4000000, 4096 * 4, 73)};

  static Key key(std::uint64_t address, std::uint64_t bytes, std::uint32_t rkey = 0) {
    Key key;
    key.address = address;
    key.bytes = bytes;
    key.rkeys[0] = rkey;
    return key;
  }
  Write write(std::uint64_t cookie, std::uint32_t flag, std::uint32_t bytes, std::uint64_t from = 0,
              std::uint64_t to = 0) const {
    Write write;
    write.cookie = cookie;
    write.flags = &flags;
    write.flag_index = flag;
    write.epoch = static_cast<std::uint32_t>(cookie) ^ 0x5a5a0000;
    write.immediate = static_cast<std::uint32_t>(cookie) ^ 0x00a5a500;
    write.bytes = bytes;
    if (bytes > 0) {
      write.src = &source;
      write.dst = &target;
      write.src_offset = from;
      write.dst_offset = to;
    }
    return write;
  }
};

}  // namespace mk::fabric::verbs
