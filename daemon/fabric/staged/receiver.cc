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
      ring_(kDepth) {
  to_flush_.reserve(kRegionsMax);
  flushing_.reserve(kRegionsMax);
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
  if (valid && region->direct != nullptr && region->hold()) {
    // What was waiting for a flush until now is in the list.
    if (region->arrived++ == region->flushed && !region->flushing) to_flush_.push_back(region);
    ring_[begun_++ % ring_.size()] = {region, record, {}, peer, region->arrived};
    return;
  }
  const GpuTicket ticket = valid && region->direct == nullptr
                               ? region->to_gpu(copier_, record.offset, record.bytes)
                               : GpuTicket{};
  if (!ticket) {
    ++lost_;
    return;
  }
  ring_[begun_++ % ring_.size()] = {region, record, ticket, peer, 0};
}

void Receiver::flush() {
  std::size_t kept = 0;
  for (std::shared_ptr<Region>& region : to_flush_) {
    if (flush_(*region->direct, flushes_ + 1)) {
      region->covered = region->arrived;
      region->flushing = true;
      flushing_.push_back({++flushes_, std::move(region)});
    } else {
      to_flush_[kept++] = std::move(region);
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
  // What a flush that failed stood for waits for the next, if there can be one.
  if (code == ErrorCode::kOk) region->flushed = region->covered;
  region->unreachable = code == ErrorCode::kNotFound;
  if (region->unreachable) return;
  if (region->flushed != region->arrived) to_flush_.push_back(region);
}

GpuCopier::State Receiver::state(const Copy& copy, std::uint64_t now_ns) {
  if (copy.arrival == 0) return copier_.state(copy.ticket, now_ns);
  if (copy.arrival <= copy.region->flushed) return GpuCopier::State::kDone;
  return copy.region->unreachable ? GpuCopier::State::kFailed : GpuCopier::State::kUnderWay;
}

std::size_t Receiver::report(std::uint64_t now_ns, std::span<Event> events) {
  std::size_t count = 0;
  while (shown_ < begun_) {
    Copy& copy = ring_[shown_ % ring_.size()];
    const GpuCopier::State now = state(copy, now_ns);
    if (now == GpuCopier::State::kUnderWay) break;
    if (now == GpuCopier::State::kFailed) {
      ++lost_;
    } else if (flags_ != nullptr) {
      if (!flags_->store(copy.record.flags, copy.record.flag_index, copy.record.epoch)) ++lost_;
    } else {
      if (count == events.size()) break;
      events[count++] = {Event::Kind::kArrival, 0,        0, copy.record.immediate,
                         ErrorCode::kOk,        copy.peer};
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
