#include "daemon/fabric/staged/receiver.h"

#include <cstring>
#include <utility>

namespace mk::fabric::staged {

void Receiver::arrived(std::uint32_t immediate) {
  const Half half = Half::unpack(immediate);
  const std::shared_ptr<Region> region = regions_->find(half.region);
  if (region == nullptr) {
    ++lost_;
    return;
  }
  Region::Halves& halves = region->halves[half.flag_index];
  (half.record ? halves.record : halves.data) =
      static_cast<std::uint16_t>(Region::kHere | half.nonce);
  if (halves.record != halves.data) return;
  halves = {};
  begin(region, half.flag_index);
}

void Receiver::begin(const std::shared_ptr<Region>& region, std::uint32_t flag_index) {
  Record record;
  std::memcpy(&record, region->record(flag_index), sizeof record);
  // A peer's daemon is trusted to mean well, not to be right.
  const bool valid = record.flag_index == flag_index && record.bytes != 0 &&
                     record.offset <= region->bytes &&
                     record.bytes <= region->bytes - record.offset;
  const GpuTicket ticket =
      valid ? region->to_gpu(copier_, record.offset, record.bytes) : GpuTicket{};
  if (!ticket) {
    ++lost_;
    return;
  }
  ring_[begun_++ % ring_.size()] = {region, record, ticket};
}

std::size_t Receiver::report(std::uint64_t now_ns, std::span<Event> events) {
  std::size_t count = 0;
  while (shown_ < begun_) {
    Copy& copy = ring_[shown_ % ring_.size()];
    const GpuCopier::State state = copier_.state(copy.ticket, now_ns);
    if (state == GpuCopier::State::kUnderWay) break;
    if (state == GpuCopier::State::kFailed) {
      ++lost_;
    } else if (flags_ != nullptr) {
      if (!flags_->store(copy.record.flags, copy.record.flag_index, copy.record.epoch)) ++lost_;
    } else {
      if (count == events.size()) break;
      events[count++] = {Event::Kind::kArrival, 0, 0, copy.record.immediate, ErrorCode::kOk};
    }
    copy.region->end_copy();
    copy.region.reset();
    ++shown_;
  }
  return count;
}

void Receiver::drop_copies() {
  for (; shown_ < begun_; ++shown_) {
    Copy& copy = ring_[shown_ % ring_.size()];
    copy.region->end_copy();
    copy.region.reset();
  }
}

}  // namespace mk::fabric::staged
