#include "daemon/fabric/staged/receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace mk::fabric::staged {

Receiver::Receiver(GpuCopier& copier, std::shared_ptr<RegionTable> regions,
                   std::shared_ptr<FlagTable> flags, Flush flush)
    : copier_(copier),
      regions_(std::move(regions)),
      flags_(std::move(flags)),
      flush_(std::move(flush)),
      copies_(kDepth) {
  for (std::uint32_t i = 0; i + 1 < kDepth; ++i) copies_[i].next = i + 1;
  // Those that were deregistered may be there for a while beside new ones.
  for (auto* const list : {&to_flush_, &showing_}) list->reserve(std::size_t{2} * kRegionsMax);
  flushing_.reserve(std::size_t{2} * kRegionsMax);
}

void Receiver::arrived(std::uint32_t immediate, PeerNumber peer) {
  const Half half = Half::unpack(immediate);
  const std::shared_ptr<Region> region = regions_->find(half.region);
  if (region == nullptr) {
    ++lost_;
    return;
  }
  Region::Halves& halves = region->halves[half.flag_index];
  // The halves of two peers make no whole.
  const auto from = static_cast<std::uint16_t>(peer);
  if (halves.peer != from) halves = {.peer = from};
  (half.record ? halves.record : halves.data) =
      static_cast<std::uint16_t>(Region::kHere | half.nonce);
  if (halves.record != halves.data) return;
  halves = {};
  begin(region, half.flag_index, peer);
}

void Receiver::begin(const std::shared_ptr<Region>& region, std::uint32_t flag_index,
                     PeerNumber peer) {
  Record record;
  std::memcpy(&record, region->record(flag_index), sizeof record);
  // A peer's daemon is trusted to mean well, not to be right.
  const bool valid = record.flag_index == flag_index && record.bytes != 0 &&
                     record.offset <= region->bytes &&
                     record.bytes <= region->bytes - record.offset;
  if (valid && region->direct != nullptr && !region->unreachable && region->hold()) {
    // What was waiting for a flush until now is in the list.
    if (region->arrived++ == region->flushed && !region->flushing) to_flush_.push_back(region);
    return add({region, record, {}, peer, region->arrived});
  }
  const GpuTicket ticket = valid && region->direct == nullptr
                               ? region->to_gpu(copier_, record.offset, record.bytes)
                               : GpuTicket{};
  if (!ticket) {
    ++lost_;
    return;
  }
  add({region, record, ticket, peer, 0});
}

void Receiver::add(Copy copy) {
  const std::uint32_t place = free_;
  free_ = std::exchange(copies_[place].next, Region::kNone);
  ++waiting_;
  Region& region = *copy.region;
  copies_[place] = std::move(copy);
  if (region.first_waiting == Region::kNone) {
    region.first_waiting = place;
    showing_.push_back(copies_[place].region);
  } else {
    copies_[region.last_waiting].next = place;
  }
  region.last_waiting = place;
}

void Receiver::drop_first(Region& region) {
  const std::uint32_t place = region.first_waiting;
  Copy& copy = copies_[place];
  region.first_waiting = copy.next;
  region.end_copy();
  copy.region.reset();
  copy.next = std::exchange(free_, place);
  --waiting_;
}

void Receiver::flush() {
  std::size_t kept = 0;
  bool go_on = !flushing_alone_;
  for (std::shared_ptr<Region>& region : to_flush_) {
    const bool alone = region->failures > 0;
    // The flushes under way end first: no later one keeps this one waiting.
    if (alone && !flushing_.empty()) go_on = false;
    if (go_on && flush_(*region->direct, flushes_ + 1)) {
      region->covered = region->arrived;
      region->flushing = true;
      flushing_.push_back({++flushes_, std::move(region)});
      flushing_alone_ = alone;
      go_on = !alone;
    } else if (go_on && alone && !region->registered()) {
      region->unreachable = true;
      region.reset();
    } else {
      std::swap(to_flush_[kept++], region);
    }
  }
  to_flush_.resize(kept);
}

void Receiver::flushed(std::uint64_t cookie, ErrorCode code) {
  const auto found = std::find_if(flushing_.begin(), flushing_.end(),
                                  [&](const Flushing& one) { return one.cookie == cookie; });
  if (found == flushing_.end()) return;
  const std::shared_ptr<Region> region = std::move(found->region);
  flushing_.erase(found);
  region->flushing = false;
  const bool alone = std::exchange(flushing_alone_, false);
  // What a flush that failed stood for waits for the next, if there can be one.
  if (code == ErrorCode::kOk) {
    region->flushed = region->covered;
    region->failures = 0;
  } else if (region->failures == 0 || alone) {
    ++region->failures;
  }
  region->unreachable = code == ErrorCode::kNotFound || region->failures > kFlushesMax ||
                        (region->failures > 0 && !region->registered());
  if (region->unreachable) return;
  if (region->flushed != region->arrived) to_flush_.push_back(region);
}

GpuCopier::State Receiver::state(const Copy& copy, std::uint64_t now_ns) {
  if (copy.arrival == 0) return copier_.state(copy.ticket, now_ns);
  if (copy.arrival <= copy.region->flushed) return GpuCopier::State::kDone;
  return copy.region->unreachable ? GpuCopier::State::kFailed : GpuCopier::State::kUnderWay;
}

bool Receiver::report_of(Region& region, std::uint64_t now_ns, std::span<Event> events,
                         std::size_t& count) {
  while (region.first_waiting != Region::kNone) {
    const Copy& copy = copies_[region.first_waiting];
    const GpuCopier::State now = state(copy, now_ns);
    if (now == GpuCopier::State::kUnderWay) return true;
    if (now == GpuCopier::State::kFailed) {
      ++lost_;
    } else if (flags_ != nullptr) {
      if (!flags_->store(copy.record.flags, copy.record.flag_index, copy.record.epoch)) ++lost_;
    } else {
      if (count == events.size()) return false;
      events[count++] = {Event::Kind::kArrival, 0,        0, copy.record.immediate,
                         ErrorCode::kOk,        copy.peer};
    }
    drop_first(region);
  }
  return true;
}

std::size_t Receiver::report(std::uint64_t now_ns, std::span<Event> events) {
  std::size_t count = 0;
  bool room = true;
  std::size_t seen = 0;
  for (; seen < showing_.size() && room; ++seen) {
    room = report_of(*showing_[seen], now_ns, events, count);
  }
  // The next call begins with those that this one has not come to.
  std::rotate(showing_.begin(), showing_.begin() + static_cast<std::ptrdiff_t>(seen),
              showing_.end());
  std::erase_if(showing_, [](const std::shared_ptr<Region>& region) {
    return region->first_waiting == Region::kNone;
  });
  return count;
}

void Receiver::drop_copies() {
  for (const std::shared_ptr<Region>& region : showing_) {
    while (region->first_waiting != Region::kNone) drop_first(*region);
  }
  showing_.clear();
}

}  // namespace mk::fabric::staged
