#include "daemon/fabric/null_fabric.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace mk::fabric {

namespace {

class NullLocalRegion final : public LocalRegion {
 public:
  Bytes key() const override { return Bytes(1); }
};
class NullRemoteRegion final : public RemoteRegion {};

class NullEndpoint final : public Endpoint {
 public:
  explicit NullEndpoint(const EndpointConfig& config)
      : rail_(config.rail), pending_(std::make_unique<Pending[]>(kPendingMax)) {
    capabilities_.name = "null";
    capabilities_.contract = DeliveryContract::kOrdered;
    capabilities_.link_depth = 1024;
    capabilities_.device_memory = true;
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override {
    Bytes bytes(sizeof rail_);
    std::memcpy(bytes.data(), &rail_, sizeof rail_);
    return bytes;
  }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor&) override {
    return std::make_unique<NullLocalRegion>();
  }
  Result<LinkId> connect(std::span<const std::byte>, const std::string&) override {
    return links_.fetch_add(1, std::memory_order_relaxed);
  }
  void disconnect(LinkId) override {}  // what was taken completes all the same
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId, std::span<const std::byte>) override {
    return std::make_unique<NullRemoteRegion>();
  }

  std::size_t post(LinkId link, std::span<const Write> writes) override {
    const std::size_t taken = std::min<std::size_t>(writes.size(), kPendingMax - (tail_ - head_));
    for (std::size_t i = 0; i < taken; ++i)
      pending_[tail_++ % kPendingMax] = Pending{writes[i].cookie, link};
    return taken;
  }
  std::size_t poll(std::span<Event> events) override {
    const std::size_t count = std::min<std::size_t>(events.size(), tail_ - head_);
    for (std::size_t i = 0; i < count; ++i) {
      const Pending& pending = pending_[head_++ % kPendingMax];
      events[i].kind = Event::Kind::kCompleted;
      events[i].link = pending.link;
      events[i].cookie = pending.cookie;
      events[i].code = ErrorCode::kOk;
    }
    return count;
  }
  std::optional<std::uint64_t> next_due_ns() const override {
    return head_ != tail_ ? std::optional<std::uint64_t>(0) : std::nullopt;
  }

 private:
  static constexpr std::uint32_t kPendingMax = 1u << 14;
  struct Pending {
    std::uint64_t cookie;
    LinkId link;
  };

  Capabilities capabilities_;
  const std::uint32_t rail_;
  std::atomic<LinkId> links_{0};
  // Data path, one thread.
  std::unique_ptr<Pending[]> pending_;
  std::uint32_t head_ = 0;
  std::uint32_t tail_ = 0;
};

}  // namespace

std::unique_ptr<Endpoint> make_null_endpoint(const EndpointConfig& config) {
  return std::make_unique<NullEndpoint>(config);
}

}  // namespace mk::fabric
