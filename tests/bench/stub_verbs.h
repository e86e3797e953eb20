/// \file
/// The verbs fabric's data path over a NIC whose driver does nothing: requests are taken, and those
/// that are signalled complete at the next poll. What is left is what our code costs.
#pragma once

#include <array>
#include <memory>

#include "daemon/fabric/verbs/region.h"
#include "daemon/fabric/verbs/sender.h"

namespace mk::fabric::verbs {

class StubVerbsEndpoint final : public Endpoint {
 public:
  static constexpr std::uint32_t kDepth = 256;

  StubVerbsEndpoint() {
    capabilities_.name = "verbs, driver stubbed out";
    capabilities_.link_depth = kDepth;
    context_.ops.poll_cq = poll_queue;
    queue_.completions.context = &context_;
    ibv_qp_ex& qp = queue_.extended;
    qp.qp_base.context = &context_;
    qp.wr_start = [](ibv_qp_ex*) {};
    qp.wr_rdma_write = [](ibv_qp_ex* q, std::uint32_t, std::uint64_t) {
      if ((q->wr_flags & IBV_SEND_SIGNALED) != 0) of(q).signaled[of(q).tail++ % kDepth] = q->wr_id;
    };
    qp.wr_set_sge = [](ibv_qp_ex*, std::uint32_t, std::uint64_t, std::uint32_t) {};
    qp.wr_set_inline_data = [](ibv_qp_ex*, void*, std::size_t) {};
    qp.wr_complete = [](ibv_qp_ex*) { return 0; };
    sender_ =
        std::make_unique<Sender>(&queue_.completions, std::vector<QueueRef>{{&qp.qp_base, &qp}},
                                 Sender::Options{.contract = DeliveryContract::kOrdered,
                                                 .depth = kDepth,
                                                 .write_timeout_ns = UINT64_MAX,
                                                 .stop = [] {},
                                                 .peer_name = "nobody"});
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override { return {}; }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor&) override {
    return std::make_unique<VerbsLocalRegion>(everything(), std::vector<std::uint32_t>{1}, 0u,
                                              nullptr);
  }
  Result<LinkId> connect(std::span<const std::byte>, const std::string&) override { return 0; }
  void disconnect(LinkId) override {}
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId, std::span<const std::byte>) override {
    return std::make_unique<VerbsRemoteRegion>(everything());
  }
  std::size_t post(LinkId, std::span<const Write> writes) override { return sender_->post(writes); }
  std::size_t poll(std::span<Event> events) override {
    sender_->progress(1);
    return sender_->report(0, events);
  }

 private:
  struct Queue {
    ibv_qp_ex extended{};  ///< first: the functions get a pointer to it
    ibv_cq completions{};
    std::array<std::uint64_t, kDepth> signaled{};
    std::uint32_t head = 0, tail = 0;
  };
  static Queue& of(ibv_qp_ex* queue) { return *reinterpret_cast<Queue*>(queue); }
  static int poll_queue(ibv_cq* completions, int room, ibv_wc* into) {
    Queue& queue = *reinterpret_cast<Queue*>(reinterpret_cast<char*>(completions) -
                                             offsetof(Queue, completions));
    int count = 0;
    for (; count < room && queue.head != queue.tail; ++count) {
      into[count].wr_id = queue.signaled[queue.head++ % kDepth];
      into[count].status = IBV_WC_SUCCESS;
    }
    return count;
  }
  static Key everything() {
    Key key;
    key.bytes = UINT64_MAX;
    return key;
  }

  Capabilities capabilities_;
  ibv_context context_{};
  Queue queue_;
  std::unique_ptr<Sender> sender_;
};

}  // namespace mk::fabric::verbs
