/// \file
/// A NIC that is wrong: it shows the flag of one write in seven before the last byte of its data.
/// What a check of the order of arrivals has to find.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/forwarding_nic.h"

namespace mk::fabric {

/// Of two such NICs.
struct HastyControl {
  std::atomic<std::uint64_t> polls{0};
};

class HastyNic final : public ForwardingNic {
 public:
  static Result<std::unique_ptr<Endpoint>> open(const FabricSetup& plain,
                                                const std::shared_ptr<HastyControl>& control) {
    MK_ASSIGN_OR_RETURN(auto inner, plain.open());
    return std::make_unique<HastyNic>(std::move(inner), control);
  }
  HastyNic(std::unique_ptr<Endpoint> inner, std::shared_ptr<HastyControl> control)
      : ForwardingNic(std::move(inner)), control_(std::move(control)) {}

  std::size_t post(LinkId link, std::span<const Write> writes) override {
    std::vector<Write> own(writes.begin(), writes.end());
    for (Write& write : own) write.bytes -= hasty(write) ? 1 : 0;
    const std::size_t taken = inner().post(link, own);
    for (const Write& write : writes.first(taken)) {
      if (!hasty(write)) continue;
      Write last = write;
      last.src_offset += write.bytes - 1;
      last.dst_offset += write.bytes - 1;
      last.bytes = 1;
      last.flag_index = kTestFlags - 1;
      last.immediate = shm::make_immediate(0, kTestFlags - 1, 0);
      last.cookie += kLast;
      late_.push_back({link, last});
    }
    return taken;
  }

  /// The last byte follows when the peer has looked twice since the rest was completed: on links
  /// where the flag shows with the completion, it has been seen by then.
  std::size_t poll(std::span<Event> events) override {
    ++own_polls_;
    const std::uint64_t peer_polls = ++control_->polls - own_polls_;
    const std::size_t count = inner().poll(events);
    std::size_t kept = 0;
    for (const Event& event : events.first(count)) {
      if (event.cookie >= kLast) continue;
      events[kept++] = event;
      for (Late& late : late_) {
        if (event.kind == Event::Kind::kCompleted && late.last.cookie == event.cookie + kLast)
          late.due = peer_polls + 2;
      }
    }
    std::erase_if(late_, [&](const Late& late) {
      return peer_polls >= late.due && inner().post(late.link, {&late.last, 1}) == 1;
    });
    return kept;
  }

 private:
  static constexpr std::uint64_t kLast = std::uint64_t{1} << 40;  ///< cookies of last bytes
  struct Late {
    LinkId link = 0;
    Write last;
    std::uint64_t due = ~std::uint64_t{0};
  };
  static bool hasty(const Write& write) { return write.cookie % 7 == 3 && write.bytes > 1; }

  const std::shared_ptr<HastyControl> control_;
  std::deque<Late> late_;
  std::uint64_t own_polls_ = 0;
};

}  // namespace mk::fabric
