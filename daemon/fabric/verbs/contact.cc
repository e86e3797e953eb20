#include "daemon/fabric/verbs/contact.h"

#include <fcntl.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace mk::fabric::verbs {
namespace {

/// A datagram leaves at once; a port that lets none out so long is down.
constexpr std::chrono::milliseconds kSendTime(200);

}  // namespace

Result<std::unique_ptr<Contact>> Contact::open(std::shared_ptr<const Device> device) {
  std::unique_ptr<Contact> contact(new Contact(std::move(device)));
  MK_RETURN_IF_ERROR(contact->create());
  return contact;
}

Status Contact::create() {
  MK_ASSIGN_OR_RETURN(const Token random, make_token());
  std::memcpy(&key_, random.data(), sizeof key_);
  key_ &= 0x7fffffff;  // those above are the kernel's
  ibv_context* const context = device_->context();
  arrivals_.reset(::ibv_create_comp_channel(context));
  if (!arrivals_) return fail_verb(errno, "RDMA port {} gives no event channel", device_->name());
  if (::fcntl(arrivals_->fd, F_SETFL, ::fcntl(arrivals_->fd, F_GETFL) | O_NONBLOCK) != 0)
    return fail_errno(errno, "an event channel does not become non-blocking");
  received_queue_.reset(::ibv_create_cq(context, kReceives, nullptr, arrivals_.get(), 0));
  sent_queue_.reset(::ibv_create_cq(context, 4, nullptr, nullptr, 0));
  if (!received_queue_ || !sent_queue_)
    return fail_verb(errno, "RDMA port {} gives no completion queue", device_->name());

  ibv_qp_init_attr wanted{};
  wanted.qp_type = IBV_QPT_UD;
  wanted.send_cq = sent_queue_.get();
  wanted.recv_cq = received_queue_.get();
  wanted.cap = {.max_send_wr = 2,
                .max_recv_wr = kReceives,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = 0};
  queue_.reset(::ibv_create_qp(device_->domain(), &wanted));
  if (!queue_) return fail_verb(errno, "RDMA port {} gives no datagram queue", device_->name());

  MK_ASSIGN_OR_RETURN(
      received_region_,
      device_->register_memory(reinterpret_cast<std::byte*>(received_.data()),
                               received_.size() * sizeof(Received), IBV_ACCESS_LOCAL_WRITE));
  MK_ASSIGN_OR_RETURN(outgoing_region_,
                      device_->register_memory(reinterpret_cast<std::byte*>(&outgoing_),
                                               sizeof outgoing_, IBV_ACCESS_LOCAL_WRITE));
  MK_RETURN_IF_ERROR(start());
  arm();
  return {};
}

Status Contact::start() {
  pkey_index_ = device_->path().pkey_index;
  Transition step;
  step.attributes.qp_state = IBV_QPS_INIT;
  step.attributes.port_num = device_->port();
  step.attributes.pkey_index = pkey_index_;
  step.attributes.qkey = key_;
  step.mask = IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_QKEY;
  MK_RETURN_IF_ERROR(take_step(queue_.get(), step, "initialised (datagrams)"));
  for (std::uint32_t slot = 0; slot < kReceives; ++slot) MK_RETURN_IF_ERROR(post_receive(slot));
  step = {};
  step.attributes.qp_state = IBV_QPS_RTR;
  step.mask = IBV_QP_STATE;
  MK_RETURN_IF_ERROR(take_step(queue_.get(), step, "ready to receive (datagrams)"));
  step.attributes.qp_state = IBV_QPS_RTS;
  step.attributes.sq_psn = 0;
  step.mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
  return take_step(queue_.get(), step, "ready to send (datagrams)");
}

Status Contact::follow() {
  const std::lock_guard lock(send_mutex_);
  return device_->path().pkey_index == pkey_index_ ? Status() : start_again();
}

Status Contact::restart() {
  const std::lock_guard lock(send_mutex_);
  return start_again();
}

Status Contact::start_again() {
  Transition step;
  step.attributes.qp_state = IBV_QPS_RESET;
  step.mask = IBV_QP_STATE;
  MK_RETURN_IF_ERROR(take_step(queue_.get(), step, "fresh (datagrams)"));
  ibv_wc completion{};
  for (ibv_cq* const completions : {received_queue_.get(), sent_queue_.get()}) {
    while (::ibv_poll_cq(completions, 1, &completion) > 0) {
    }
  }
  in_flight_ = false;
  outgoing_path_.reset();
  broken_.store(false, std::memory_order_release);
  return start();
}

Status Contact::post_receive(std::uint64_t slot) {
  ibv_sge piece{reinterpret_cast<std::uint64_t>(&received_[slot]), sizeof(Received),
                received_region_->lkey};
  ibv_recv_wr request{};
  request.wr_id = slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* refused = nullptr;
  if (const int error = ::ibv_post_recv(queue_.get(), &request, &refused))
    return fail_verb(error, "the datagram queue takes no receive");
  return {};
}

Status Contact::send(const Address& to, const Datagram& datagram) {
  const std::lock_guard lock(send_mutex_);
  // One at a time: the path and the buffer are in use until the NIC has sent it, however late.
  if (in_flight_ && !take_back()) {
    return fail(ErrorCode::kUnavailable,
                "RDMA port {} has not sent an earlier datagram: is it down?", device_->name());
  }
  ibv_ah_attr attributes = path_to(device_->path(), to);
  outgoing_path_.reset(::ibv_create_ah(device_->domain(), &attributes));
  if (!outgoing_path_) return fail_verb(errno, "RDMA port {} knows no way there", device_->name());
  outgoing_ = datagram;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(&outgoing_), sizeof outgoing_,
                outgoing_region_->lkey};
  ibv_send_wr request{};
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.ud.ah = outgoing_path_.get();
  request.wr.ud.remote_qpn = to.contact_queue;
  request.wr.ud.remote_qkey = to.contact_key;
  ibv_send_wr* refused = nullptr;
  if (const int error = ::ibv_post_send(queue_.get(), &request, &refused))
    return fail_verb(error, "RDMA port {} sends no datagram", device_->name());
  in_flight_ = true;
  const auto deadline = std::chrono::steady_clock::now() + kSendTime;
  std::optional<ibv_wc_status> status;
  while (!(status = take_back())) {
    if (std::chrono::steady_clock::now() > deadline) {
      return fail(ErrorCode::kUnavailable, "RDMA port {} sends no datagram: is it down?",
                  device_->name());
    }
    std::this_thread::yield();
  }
  if (*status != IBV_WC_SUCCESS) {
    return fail(ErrorCode::kUnavailable, "RDMA port {} could not send a datagram: {}",
                device_->name(), ::ibv_wc_status_str(*status));
  }
  return {};
}

std::optional<ibv_wc_status> Contact::take_back() {
  ibv_wc completion{};
  const int got = ::ibv_poll_cq(sent_queue_.get(), 1, &completion);
  if (got == 0) return std::nullopt;
  const ibv_wc_status status = got < 0 ? IBV_WC_GENERAL_ERR : completion.status;
  if (status != IBV_WC_SUCCESS) broken_.store(true, std::memory_order_release);
  in_flight_ = false;
  outgoing_path_.reset();
  return status;
}

std::optional<Datagram> Contact::receive() {
  ibv_wc completion{};
  while (::ibv_poll_cq(received_queue_.get(), 1, &completion) == 1) {
    std::optional<Datagram> datagram;
    if (completion.status == IBV_WC_SUCCESS && completion.byte_len == sizeof(Received) &&
        received_[completion.wr_id].datagram.magic == Datagram::kMagic)
      datagram = received_[completion.wr_id].datagram;
    if (completion.status == IBV_WC_WR_FLUSH_ERR) {  // the queue is in error, or its device gone
      broken_.store(true, std::memory_order_release);
      continue;
    }
    [[maybe_unused]] const Status posted = post_receive(completion.wr_id);
    if (datagram) return datagram;
  }
  return std::nullopt;
}

void Contact::rearm() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (::ibv_get_cq_event(arrivals_.get(), &queue, &context) == 0) ::ibv_ack_cq_events(queue, 1);
  arm();
}

void Contact::arm() {
  const int error = ::ibv_req_notify_cq(received_queue_.get(), 0);
  deaf_ = error == 0 ? std::string() : errno_text(error);
}

}  // namespace mk::fabric::verbs
