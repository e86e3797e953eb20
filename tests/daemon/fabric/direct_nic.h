/// \file
/// A NIC that reaches memory of GPUs by itself, over one that reaches the host's: the fake driver's
/// GPU memory is the host's. What it writes there is seen by the GPU only when it was flushed, if
/// `shadowed`. Registrations are counted, and refused when the test says so.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "tests/daemon/fabric/forwarding_nic.h"

namespace mk::fabric {

/// What tests do to all such NICs of a setup, and see of them.
struct DirectControl {
  bool shadowed = true;
  bool hold_flushes = false;  ///< they end by `end_flushes` alone
  bool refuse_flushes = false;
  bool takes_dmabufs = true;
  bool has_module = true;
  std::atomic<int> by_dmabuf{0}, by_module{0}, gone{0};  ///< registrations
  int flushes = 0;                                       ///< taken
  int arrivals = 0;                                      ///< that the NICs have reported

  struct Shadow {
    std::vector<std::byte> bytes;
    std::byte* gpu = nullptr;
  };
  struct Flush {
    const Endpoint* nic = nullptr;
    Event event;
    std::shared_ptr<Shadow> shadow;
    std::vector<std::byte> seen;  ///< what had been written when it began
  };
  std::deque<Flush> under_way;
  std::shared_ptr<Shadow> dead;  ///< of a GPU that is gone: its flushes fail
  int dead_flushes = 0;
  std::deque<std::pair<const Endpoint*, Event>> ended;

  void end_flushes(ErrorCode code = ErrorCode::kOk) {
    for (; !under_way.empty(); under_way.pop_front()) {
      Flush& flush = under_way.front();
      const bool fails = flush.shadow == dead;
      dead_flushes += fails ? 1 : 0;
      flush.event.code = fails ? ErrorCode::kLinkDown : code;
      if (flush.event.code == ErrorCode::kOk && shadowed)
        std::memcpy(flush.shadow->gpu, flush.seen.data(), flush.seen.size());
      ended.emplace_back(flush.nic, flush.event);
    }
  }
};

class DirectNic final : public ForwardingNic {
 public:
  DirectNic(std::unique_ptr<Endpoint> host, std::shared_ptr<DirectControl> control)
      : ForwardingNic(std::move(host)),
        control_(std::move(control)),
        capabilities_(inner().capabilities()) {
    capabilities_.gpu_direct = true;
  }

  const Capabilities& capabilities() const override { return capabilities_; }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor& memory) override {
    if (memory.direct == GpuWindow::kNone) return inner().register_memory(memory);
    const bool dmabuf = memory.direct == GpuWindow::kDmabuf;
    if (dmabuf && (!control_->takes_dmabufs || memory.dmabuf < 0))
      return fail(ErrorCode::kUnavailable, "the test's NIC takes no dmabuf");
    if (!dmabuf && !control_->has_module)
      return fail(ErrorCode::kUnavailable, "the test's NIC has no such module");
    auto region = std::make_unique<Region>(control_);
    MK_ASSIGN_OR_RETURN(region->real, inner().register_memory({memory.address, memory.bytes}));
    region->shadow = std::make_shared<DirectControl::Shadow>();
    region->shadow->gpu = memory.address;
    if (control_->shadowed) {
      region->shadow->bytes.assign(memory.address, memory.address + memory.bytes);
      MK_ASSIGN_OR_RETURN(region->written,
                          inner().register_memory({region->shadow->bytes.data(), memory.bytes}));
    }
    ++(dmabuf ? control_->by_dmabuf : control_->by_module);
    return region;
  }

  std::size_t post(LinkId link, std::span<const Write> writes) override {
    std::vector<Write> own(writes.begin(), writes.end());
    for (Write& write : own) {
      if (const auto* const region = dynamic_cast<const Region*>(write.src))
        write.src = region->real.get();
    }
    return inner().post(link, own);
  }
  std::size_t poll(std::span<Event> events) override {
    if (!control_->hold_flushes && ++polls_ % 3 == 0) control_->end_flushes();
    std::size_t count = 0;
    std::erase_if(control_->ended, [&](const auto& one) {
      if (one.first != this || count == events.size()) return false;
      events[count++] = one.second;
      return true;
    });
    const auto of_host = events.subspan(count, inner().poll(events.subspan(count)));
    for (const Event& event : of_host) control_->arrivals += event.kind == Event::Kind::kArrival;
    return count + of_host.size();
  }
  bool flush(const LocalRegion& region, std::uint64_t cookie) override {
    if (control_->refuse_flushes) return false;
    const auto& shadow = static_cast<const Region&>(region).shadow;
    Event event;
    event.kind = Event::Kind::kFlushed;
    event.cookie = cookie;
    control_->under_way.push_back({this, event, shadow, shadow->bytes});
    ++control_->flushes;
    return true;
  }

 private:
  struct Region final : LocalRegion {
    explicit Region(std::shared_ptr<DirectControl> owner) : control(std::move(owner)) {}
    ~Region() override { ++control->gone; }
    Bytes key() const override { return (written != nullptr ? written : real)->key(); }
    const std::shared_ptr<DirectControl> control;
    std::unique_ptr<LocalRegion> real, written;
    std::shared_ptr<DirectControl::Shadow> shadow;
  };

  const std::shared_ptr<DirectControl> control_;
  Capabilities capabilities_;
  unsigned polls_ = 0;
};

}  // namespace mk::fabric
