#include "daemon/fabric/ofi/link.h"

#include <algorithm>
#include <array>
#include <utility>

namespace mk::fabric::ofi {
namespace {

/// A link that has completed writes, has none in flight and yet is told to wait has lost its
/// connection. libfabric would try for ever to make a new one.
constexpr std::uint64_t kReconnectNs = 500'000'000;
constexpr std::size_t kDoorbellBytes = 8;

/// The proxy has checked these bounds; the provider would answer a mistake by ending the
/// connection.
bool in_bounds(const Write& write) {
  if (write.bytes == 0) return true;
  const MemoryDescriptor& source = static_cast<const OfiLocalRegion&>(*write.src).memory();
  const Key& target = static_cast<const OfiRemoteRegion&>(*write.dst).key();
  return write.src_offset <= source.bytes && write.bytes <= source.bytes - write.src_offset &&
         write.dst_offset <= target.bytes && write.bytes <= target.bytes - write.dst_offset;
}

}  // namespace

Bytes OfiLocalRegion::key() const {
  Key key;
  key.endpoint = endpoint_;
  key.key = wire_key();
  key.base = wire_base();
  key.bytes = memory_.bytes;
  return to_blob(key);
}

Link::Link(Port port, fi_addr_t peer, const Address& address, std::string peer_name,
           const OfiLocalRegion& zeros, const Manner& manner, std::uint32_t depth,
           const Limits& limits, std::unique_ptr<Introduction> introduction, const Token& own)
    : introduction_(std::move(introduction)),
      own_(own),
      port_(std::move(port)),
      peer_(peer),
      address_(address),
      peer_name_(std::move(peer_name)),
      zeros_(zeros),
      manner_(manner),
      limits_(limits),
      operations_(depth),
      waiting_(depth),
      done_(depth),
      acknowledgements_(depth),
      knocked_(!manner.completes_early) {
  free_.reserve(depth);
  for (Operation& operation : operations_) {
    operation.data.operation = &operation;
    operation.notify.operation = &operation;
    free_.push_back(&operation);
  }
}

std::string Link::reason() const {
  const std::lock_guard lock(reason_mutex_);
  return reason_;
}

std::size_t Link::post(std::span<const Write> writes, std::uint64_t now_ns) {
  if (!busy()) progress_ns_ = now_ns;
  std::size_t taken = 0;
  for (; taken < writes.size() && !free_.empty(); ++taken) {
    Operation& operation = *free_.back();
    free_.pop_back();
    operation.write = writes[taken];
    operation.in_use = true;
    operation.data_posted = false;
    operation.asks = false;
    operation.outstanding = 0;
    if (down_ || !in_bounds(operation.write)) {
      finish(operation, down_ ? ErrorCode::kLinkDown : ErrorCode::kInvalidArgument);
      continue;
    }
    long rc = -FI_EAGAIN;
    if (waiting_head_ == waiting_tail_ && introduced())
      rc = submit(operation, taken + 1 < writes.size() && !free_.empty());
    if (rc == -FI_EAGAIN) {
      waiting_[waiting_tail_++ % waiting_.size()] = &operation;
    } else if (rc != 0) {
      close_refused(rc);
    }
  }
  return taken;
}

void Link::close_refused(long rc) {
  close(fmt::format("{}: the provider refused a write: {}", peer_name_,
                    ::fi_strerror(static_cast<int>(-rc))));
}

long Link::submit_empty(Context& context) {
  fi_msg_rma message{};
  const fi_rma_iov nothing{address_.doorbell_base, 0, address_.doorbell_key};
  message.addr = peer_;
  message.rma_iov = &nothing;
  message.rma_iov_count = 1;
  message.context = &context.scratch;
  const long rc =
      ::fi_writemsg(port_.endpoint.get(), &message, FI_DELIVERY_COMPLETE | FI_COMPLETION);
  if (rc == 0) ++in_flight_;
  return rc;
}

long Link::knock() {
  if (knocked_) return 0;
  const long rc = submit_empty(knock_);
  knocked_ = rc == 0;
  return rc;
}

long Link::submit(Operation& operation, bool more) {
  if (const long rc = knock(); rc != 0) return rc;
  const Write& write = operation.write;
  operation.asks = manner_.completes_early && acknowledgements_.due();
  const std::uint64_t last =
      FI_REMOTE_CQ_DATA | (operation.asks ? FI_DELIVERY_COMPLETE : 0) | (more ? FI_MORE : 0);
  if (write.bytes > 0 && !operation.data_posted) {
    const auto& source = static_cast<const OfiLocalRegion&>(*write.src);
    const Key& target = static_cast<const OfiRemoteRegion&>(*write.dst).key();
    const long rc = submit_write(source.memory().address + write.src_offset, write.bytes,
                                 source.descriptor(), target.base + write.dst_offset, target.key,
                                 operation, operation.data, manner_.notify_apart ? FI_MORE : last);
    if (rc != 0) return rc;
    ++operation.outstanding;
    ++in_flight_;
    if (!manner_.notify_apart) {
      note_sent(operation);
      return 0;
    }
    operation.data_posted = true;
  }
  const long rc = submit_write(zeros_.memory().address, manner_.notify_apart ? 0 : kDoorbellBytes,
                               zeros_.descriptor(), address_.doorbell_base, address_.doorbell_key,
                               operation, operation.notify, last);
  if (rc != 0) return rc;
  operation.data_posted = false;
  ++operation.outstanding;
  ++in_flight_;
  note_sent(operation);
  return 0;
}

void Link::note_sent(Operation& operation) {
  if (!manner_.completes_early) return;
  const auto index = static_cast<std::uint32_t>(&operation - operations_.data());
  operation.number = acknowledgements_.sent(index, operation.asks);
}

void Link::finish_acknowledged() {
  acknowledgements_.take_acknowledged([this](std::uint32_t index) {
    Operation& operation = operations_[index];
    if (operation.outstanding > 0) return false;
    finish(operation, ErrorCode::kOk);
    return true;
  });
}

void Link::ask_for_rest() {
  if (!acknowledgements_.rest_waits()) return;
  const long rc = submit_empty(ask_);
  if (rc == -FI_EAGAIN) return;
  if (rc != 0) return close_refused(rc);
  ask_end_ = acknowledgements_.ask_for_rest();
}

long Link::submit_write(const void* source, std::size_t bytes, void* descriptor,
                        std::uint64_t target, std::uint64_t key, const Operation& operation,
                        Context& context, std::uint64_t flags) {
  const iovec local{const_cast<void*>(source), bytes};
  const fi_rma_iov remote{target, bytes, key};
  fi_msg_rma message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer_;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = &context.scratch;
  message.data = operation.write.immediate;
  if (manner_.tags_writes) message.data |= std::uint64_t{address_.tag} << 32;
  // With a completion all the same, so that what is in flight stays bounded, and a link that hangs
  // is noticed.
  const std::uint64_t inject = bytes > 0 && bytes <= manner_.inject_bytes ? FI_INJECT : 0;
  return ::fi_writemsg(port_.endpoint.get(), &message, flags | FI_COMPLETION | inject);
}

void Link::progress(std::uint64_t now_ns) {
  if (down_ || !busy()) return;
  if (!introduced() && progress_ns_ == 0) progress_ns_ = now_ns;
  take_completions(now_ns);
  if (down_ || !introduce(now_ns)) return;
  retry_waiting();
  if (!down_) ask_for_rest();
  if (down_ || !busy()) return;
  const bool reconnecting = ever_completed_ && in_flight_ == 0;
  const bool connected = ever_completed_ || introduction_ != nullptr;  // the handshake is done
  const std::uint64_t limit = reconnecting ? std::min(kReconnectNs, limits_.connect_ns)
                              : connected  ? limits_.write_ns
                                           : limits_.connect_ns;
  if (now_ns - std::min(now_ns, progress_ns_) <= limit) return;
  const double seconds = static_cast<double>(limit) / 1e9;
  if (reconnecting) {
    close(fmt::format("{} closed the connection and accepts no new one", peer_name_));
  } else if (connected) {
    close(fmt::format("{} took no data for {} s", peer_name_, seconds));
  } else {
    close(fmt::format("{} did not accept a connection within {} s", peer_name_, seconds));
  }
}

bool Link::introduce(std::uint64_t now_ns) {
  if (introduced()) return true;
  const long rc = introduction_->progress({own_, link_slot(id)});
  if (rc != 0 && rc != -FI_EAGAIN) {
    close(fmt::format("{}: the provider refused to introduce this endpoint: {}", peer_name_,
                      ::fi_strerror(static_cast<int>(-rc))));
  } else if (now_ns - std::min(now_ns, progress_ns_) > limits_.connect_ns) {
    close(fmt::format("{} did not take this endpoint's address within {} s", peer_name_,
                      static_cast<double>(limits_.connect_ns) / 1e9));
  }
  return false;
}

void Link::retry_waiting() {
  while (waiting_head_ != waiting_tail_) {
    Operation& operation = *waiting_[waiting_head_ % waiting_.size()];
    const long rc = submit(operation, waiting_tail_ - waiting_head_ > 1);
    if (rc == -FI_EAGAIN) return;
    ++waiting_head_;
    if (rc != 0) return close_refused(rc);
  }
}

void Link::take_completions(std::uint64_t now_ns) {
  std::array<fi_cq_data_entry, 32> entries;
  const ssize_t count = ::fi_cq_read(port_.completions.get(), entries.data(), entries.size());
  if (count == -FI_EAGAIN) return;
  if (count < 0) {
    return close(
        fmt::format("{}: {}", peer_name_,
                    count == -FI_EAVAIL ? read_error() : ::fi_strerror(static_cast<int>(-count))));
  }
  for (ssize_t i = 0; i < count; ++i) {
    void* const context = entries[static_cast<std::size_t>(i)].op_context;
    if (context == nullptr) continue;
    if (introduction_ != nullptr && introduction_->completed(context)) {
      if (introduced()) progress_ns_ = now_ns;
      continue;
    }
    progress_ns_ = now_ns;
    ever_completed_ = true;
    --in_flight_;
    if (context == &knock_) continue;
    if (context == &ask_) {
      acknowledgements_.acknowledge(ask_end_);
      continue;
    }
    Operation& operation = *static_cast<Context*>(context)->operation;
    if (--operation.outstanding > 0 || operation.data_posted) continue;
    if (!manner_.completes_early) finish(operation, ErrorCode::kOk);
    if (operation.asks) acknowledgements_.acknowledge(operation.number + 1);
  }
  finish_acknowledged();
}

std::string Link::read_error() {
  fi_cq_err_entry entry{};
  const char* const what =
      introduced() ? "a write failed" : "it did not take this endpoint's address";
  if (::fi_cq_readerr(port_.completions.get(), &entry, 0) < 0)
    return fmt::format("{}, and the provider does not say why", what);
  std::array<char, 256> text{};
  const char* detail = ::fi_cq_strerror(port_.completions.get(), entry.prov_errno, entry.err_data,
                                        text.data(), text.size());
  return fmt::format("{}: {} ({}; provider error {})", what, ::fi_strerror(entry.err),
                     detail != nullptr ? detail : "no detail", entry.prov_errno);
}

void Link::finish(Operation& operation, ErrorCode code) {
  done_[done_tail_++ % done_.size()] = {operation.write.cookie, code, &operation};
  operation.in_use = false;
}

std::size_t Link::report(std::span<Event> events) {
  std::size_t count = 0;
  while (done_head_ != done_tail_ && count < events.size()) {
    const Done& done = done_[done_head_++ % done_.size()];
    events[count++] = {done.code == ErrorCode::kOk ? Event::Kind::kCompleted : Event::Kind::kFailed,
                       id, done.cookie, 0, done.code};
    free_.push_back(done.operation);
  }
  return count;
}

void Link::close(const std::string& reason) {
  if (down_) return;
  down_ = true;
  {
    const std::lock_guard lock(reason_mutex_);
    reason_ = reason;
  }
  port_.close();
  for (Operation& operation : operations_) {
    if (operation.in_use) finish(operation, ErrorCode::kLinkDown);
  }
  in_flight_ = 0;
  waiting_head_ = waiting_tail_;
  acknowledgements_.forget();
}

}  // namespace mk::fabric::ofi
