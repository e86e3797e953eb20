#include "daemon/fabric/verbs/flusher.h"

#include <algorithm>

#include "daemon/fabric/verbs/queue_pair.h"

namespace mk::fabric::verbs {

// -- the queue ------------------------------------------------------------------------------------

bool FlushQueue::flush(const VerbsLocalRegion& region, std::uint64_t cookie_of_caller) {
  if (broken_ || next_ - first_ == kDepth) return false;
  ibv_sge piece{sink_.address, 1, sink_.key};
  ibv_send_wr request{};
  request.wr_id = next_;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_READ;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma.remote_addr = region.address();
  request.wr.rdma.rkey = region.remote_key(0);
  ibv_send_wr* refused = nullptr;
  if (::ibv_post_send(queue_, &request, &refused) != 0) {
    broken_ = true;
    return false;
  }
  cookie(next_++) = cookie_of_caller;
  return true;
}

std::size_t FlushQueue::poll(std::span<Event> events) {
  std::size_t count = 0;
  while (count < events.size() && !broken_ && done_ != next_) {
    ibv_wc completion{};
    const int got = ::ibv_poll_cq(completions_, 1, &completion);
    if (got == 0) break;
    // On one queue pair reads end in the order of their posts.
    broken_ = got < 0 || completion.status != IBV_WC_SUCCESS || completion.wr_id != done_;
    if (broken_) break;
    ++done_;
    events[count++] = {Event::Kind::kFlushed, 0, cookie(first_++), 0, ErrorCode::kOk};
  }
  while (broken_ && first_ != next_ && count < events.size())
    events[count++] = {Event::Kind::kFlushed, 0, cookie(first_++), 0, ErrorCode::kLinkDown};
  return count;
}

// -- its owner ------------------------------------------------------------------------------------

Result<std::unique_ptr<Flusher>> Flusher::open(std::shared_ptr<const Device> device) {
  std::unique_ptr<Flusher> flusher(new Flusher(std::move(device)));
  flusher->sink_ = std::make_unique<std::array<std::byte, 64>>();
  MK_ASSIGN_OR_RETURN(flusher->sink_region_,
                      flusher->device_->register_memory(
                          flusher->sink_->data(), flusher->sink_->size(), IBV_ACCESS_LOCAL_WRITE));
  MK_RETURN_IF_ERROR(flusher->make_queue());
  return flusher;
}

Status Flusher::make_queue() {
  queue_.reset();
  handle_.reset();
  completions_.reset(::ibv_create_cq(device_->context(), static_cast<int>(FlushQueue::kDepth),
                                     nullptr, nullptr, 0));
  if (!completions_)
    return fail_verb(errno, "RDMA port {} gives no completion queue", device_->name());
  ibv_qp_init_attr wanted{};
  wanted.qp_type = IBV_QPT_RC;
  wanted.send_cq = completions_.get();
  wanted.recv_cq = completions_.get();
  wanted.cap.max_send_wr = FlushQueue::kDepth;
  wanted.cap.max_recv_wr = 1;
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  handle_.reset(::ibv_create_qp(device_->domain(), &wanted));
  if (!handle_) return fail_verb(errno, "RDMA port {} gives no queue pair", device_->name());
  MK_ASSIGN_OR_RETURN(const std::uint32_t first, make_first_packet());
  const QueueEnd own{handle_->qp_num, first};
  MK_RETURN_IF_ERROR(connect_queue(handle_.get(), device_->path(), device_->address(), own, own,
                                   IBV_ACCESS_REMOTE_READ));
  queue_ = std::make_unique<FlushQueue>(
      handle_.get(), completions_.get(),
      FlushQueue::Sink{reinterpret_cast<std::uint64_t>(sink_->data()), sink_region_->lkey});
  in_use_.store(true, std::memory_order_release);
  return {};
}

void Flusher::mend() {
  if (in_use_.load(std::memory_order_acquire)) return;
  [[maybe_unused]] const Status made = make_queue();  // or with the next call
}

bool Flusher::flush(const VerbsLocalRegion& region, std::uint64_t cookie) {
  return in_use_.load(std::memory_order_acquire) && queue_->flush(region, cookie);
}

bool Flusher::give_up() {
  if (!in_use_.load(std::memory_order_acquire)) return true;
  queue_->give_up();
  return queue_->empty();
}

std::size_t Flusher::poll(std::span<Event> events) {
  if (!in_use_.load(std::memory_order_acquire)) return 0;
  const std::size_t count = queue_->poll(events);
  if (queue_->broken() && queue_->empty()) in_use_.store(false, std::memory_order_release);
  return count;
}

}  // namespace mk::fabric::verbs
