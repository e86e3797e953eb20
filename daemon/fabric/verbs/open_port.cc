#include "daemon/fabric/verbs/open_port.h"

#include <utility>

namespace mk::fabric::verbs {

Result<std::shared_ptr<OpenPort>> OpenPort::open(const EndpointConfig& config,
                                                 const Token& endpoint, std::uint32_t number,
                                                 std::uint32_t version) {
  const bool unordered = config.verbs.arrival == "immediate";
  std::shared_ptr<OpenPort> port(new OpenPort(endpoint, number, unordered));
  MK_ASSIGN_OR_RETURN(port->device_, Device::open(config, version));
  port->keys_ = std::make_shared<KeyTable>(port->device_);
  MK_ASSIGN_OR_RETURN(port->contact_, Contact::open(port->device_));
  MK_ASSIGN_OR_RETURN(port->acceptor_, Acceptor::open(port->device_, unordered));
  return port;
}

Address OpenPort::address() const {
  Address address = device_->address();
  address.endpoint = endpoint_;
  address.contact_queue = contact_->number();
  address.contact_key = contact_->key();
  address.unordered = unordered_ ? 1 : 0;
  return address;
}

Status OpenPort::make_flusher() {
  if (flusher_ != nullptr) return {};
  MK_ASSIGN_OR_RETURN(flusher_, Flusher::open(device_));
  shared_flusher_.store(flusher_.get(), std::memory_order_release);
  return {};
}

// -- the place ------------------------------------------------------------------------------------

PortPlace::PortPlace(std::shared_ptr<OpenPort> first)
    : present_(std::move(first)), shown_(present_.get()) {}

std::shared_ptr<OpenPort> PortPlace::get() const {
  const std::lock_guard lock(mutex_);
  return present_;
}

Result<std::shared_ptr<OpenPort>> PortPlace::need() const {
  const std::lock_guard lock(mutex_);
  if (present_ == nullptr) return fail(ErrorCode::kUnavailable, "{}", why_);
  return present_;
}

Address PortPlace::address() const {
  const std::lock_guard lock(mutex_);
  return present_ != nullptr ? present_->address() : last_;
}

void PortPlace::lose(const std::string& why) {
  std::shared_ptr<OpenPort> lost;
  {
    const std::lock_guard lock(mutex_);
    why_ = why;
    if (present_ == nullptr) return;
    last_ = present_->address();
    lost = std::move(present_);
    present_ = nullptr;
  }
  shown_.store(nullptr, std::memory_order_seq_cst);
  lost_.push_back(std::move(lost));
}

void PortPlace::put(std::shared_ptr<OpenPort> next) {
  OpenPort* const raw = next.get();
  {
    const std::lock_guard lock(mutex_);
    present_ = std::move(next);
  }
  shown_.store(raw, std::memory_order_seq_cst);
}

bool PortPlace::bury() {
  const OpenPort* const held = held_.load(std::memory_order_seq_cst);
  std::erase_if(lost_, [held](const auto& port) { return port.get() != held; });
  return lost_.empty();
}

void PortPlace::turn() {
  // It may be lost, and buried, before anybody sees that it is held: so it is only when it is still
  // shown after that has been said. All of this in one order with `lose` and `bury`.
  for (OpenPort* next = shown_.load(std::memory_order_seq_cst);;) {
    held_.store(next, std::memory_order_seq_cst);
    OpenPort* const again = shown_.load(std::memory_order_seq_cst);
    if (again == next) return;
    next = again;
  }
}

}  // namespace mk::fabric::verbs
