#include "daemon/fabric/loopback/link.h"

#include <algorithm>
#include <cmath>

namespace mk::fabric::loopback {

LinkSchedule::Times LinkSchedule::reserve(std::uint64_t now_ns, std::uint64_t bytes) {
  Times times{};
  if (now_ns > free_ns_) {
    free_ns_ = now_ns;
    rest_ns_ = 0;
  }
  times.start_ns = free_ns_;
  if (model_.bytes_per_second > 0) {
    const double exact = static_cast<double>(bytes) * 1e9 / model_.bytes_per_second + rest_ns_;
    const double whole = std::floor(exact);
    free_ns_ += static_cast<std::uint64_t>(whole);
    rest_ns_ = exact - whole;
  }
  times.end_ns = free_ns_;
  times.arrival_ns = free_ns_ + model_.latency_ns;
  return times;
}

TransferQueue::TransferQueue(const LinkModel& model, std::uint32_t depth, GpuCopier& gpu)
    : schedule_(model), gpu_(gpu), ring_(depth) {}

bool TransferQueue::post(const Write& write, std::uint64_t now_ns) {
  if (posted_ - std::min(reported_, shown_) == ring_.size()) return false;
  Transfer& transfer = at(posted_++);
  transfer = {};
  transfer.cookie = write.cookie;
  transfer.bytes = write.bytes;
  transfer.flag_index = write.flag_index;
  transfer.epoch = write.epoch;
  transfer.code = broken_;
  if (failed()) {
    ++copied_;
    return true;
  }
  // The proxy has checked these bounds; a mistake there must not become a write outside a peer's
  // region.
  bool valid = true;
  if (write.bytes > 0) {
    const auto& region = static_cast<const LoopbackLocalRegion*>(write.src)->region();
    const MemoryDescriptor& source = region->memory;
    const auto& target = static_cast<const LoopbackRemoteRegion*>(write.dst)->target();
    valid = write.src_offset <= source.bytes && write.bytes <= source.bytes - write.src_offset &&
            write.dst_offset <= target->bytes() &&
            write.bytes <= target->bytes() - write.dst_offset &&
            source.device.has_value() == target->on_gpu();
    if (source.device) transfer.from = region;
    const std::byte* const begin = source.device ? region->view.data() : source.address;
    transfer.source = begin + write.src_offset;
    transfer.gpu_slot = region->gpu_slot;
    transfer.target = target;
    transfer.offset = write.dst_offset;
  }
  if (write.flags != nullptr) {
    const auto& flags = static_cast<const LoopbackRemoteRegion*>(write.flags)->target();
    valid = valid && flags->flag_aligned() &&
            (std::uint64_t{write.flag_index} + 1) * 4 <= flags->bytes();
    transfer.flags = flags;
  }
  if (!valid) {
    transfer.code = ErrorCode::kInvalidArgument;
    transfer.bytes = 0;
    transfer.flags.reset();
  }
  transfer.times = schedule_.reserve(now_ns, transfer.bytes);
  return true;
}

void TransferQueue::show(Transfer& transfer) {
  if (transfer.flags && transfer.code == ErrorCode::kOk)
    transfer.flags->store_flag(transfer.flag_index, transfer.epoch);
  transfer.from.reset();
  transfer.target.reset();
  transfer.flags.reset();
}

bool TransferQueue::copy(Transfer& transfer, std::uint64_t& budget) {
  const auto slice =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(transfer.bytes - transfer.copied, budget));
  if (!transfer.target->write(transfer.offset + transfer.copied, transfer.source + transfer.copied,
                              slice)) {
    transfer.code =
        ErrorCode::kPeerLost;  // the peer deregistered the memory: only this write fails
  }
  transfer.copied += slice;
  budget -= slice;
  return transfer.code != ErrorCode::kOk || transfer.copied == transfer.bytes;
}

std::uint64_t TransferQueue::copy_from_ns(const Transfer& transfer) {
  const bool by_gpu = transfer.gpu_slot != kGpuSlotsMax;
  return transfer.times.start_ns -
         (by_gpu ? std::min(kGpuAheadNs, transfer.times.start_ns) : std::uint64_t{0});
}

std::uint64_t TransferQueue::hand_over(std::uint64_t now_ns) {
  Transfer& first = at(copied_);
  std::uint64_t bytes = first.bytes;
  std::uint64_t end = copied_ + 1;
  for (; end < posted_; ++end) {
    const Transfer& next = at(end);
    const bool follows = next.code == ErrorCode::kOk && next.bytes > 0 && next.from == first.from &&
                         next.target == first.target && next.source == first.source + bytes &&
                         next.offset == first.offset + bytes;
    if (!follows || copy_from_ns(next) > now_ns + kGpuRunNs || bytes + next.bytes > kGpuRunBytesMax)
      break;
    bytes += next.bytes;
  }
  const GpuTicket ticket =
      first.target->copy(gpu_, first.gpu_slot, first.offset, first.source, bytes);
  const ErrorCode code = ticket                        ? ErrorCode::kOk
                         : gpu_.failed(first.gpu_slot) ? ErrorCode::kSystem
                                                       : ErrorCode::kPeerLost;
  for (std::uint64_t i = copied_; i < end; ++i) {
    Transfer& transfer = at(i);
    transfer.ticket = ticket;
    transfer.leads = i == copied_;
    transfer.code = code;
    transfer.copied = transfer.bytes;
  }
  return end - copied_;
}

bool TransferQueue::settled(Transfer& transfer, std::uint64_t now_ns) {
  if (!transfer.ticket) return true;
  const GpuCopier::State state = gpu_.state(transfer.ticket, now_ns);
  if (state == GpuCopier::State::kUnderWay) return false;
  if (state == GpuCopier::State::kFailed) transfer.code = ErrorCode::kSystem;
  transfer.ticket = {};
  if (transfer.leads) transfer.target->end_copy();
  return true;
}

void TransferQueue::advance(std::uint64_t now_ns, std::uint64_t& budget) {
  while (copied_ < posted_) {
    Transfer& transfer = at(copied_);
    if (copy_from_ns(transfer) > now_ns && !failed()) break;
    if (transfer.code == ErrorCode::kOk && transfer.copied < transfer.bytes) {
      if (budget == 0) break;
      if (transfer.gpu_slot != kGpuSlotsMax) {
        copied_ += hand_over(now_ns);
        budget -= std::min(budget, kHandOverBytes);
        continue;
      }
      if (!copy(transfer, budget)) break;
    }
    ++copied_;
  }
  while (shown_ < copied_ && (at(shown_).times.arrival_ns <= now_ns || failed()) &&
         settled(at(shown_), now_ns))
    show(at(shown_++));
}

std::size_t TransferQueue::report(LinkId link, std::uint64_t now_ns, std::span<Event> events) {
  std::size_t count = 0;
  while (reported_ < copied_ && count < events.size()) {
    Transfer& transfer = at(reported_);
    if (transfer.times.end_ns > now_ns && !failed()) break;
    if (!settled(transfer, now_ns)) break;
    const bool ok = transfer.code == ErrorCode::kOk;
    events[count++] = {ok ? Event::Kind::kCompleted : Event::Kind::kFailed, link, transfer.cookie,
                       0, transfer.code};
    ++reported_;
  }
  return count;
}

void TransferQueue::fail_all(ErrorCode code, bool show_completed) {
  if (failed()) return;
  broken_ = code;
  for (std::uint64_t i = shown_; i < posted_; ++i) {
    // Copied in full and merely waiting for its time: it will be reported as completed, so it has
    // to be seen.
    if (i >= copied_ || (i >= reported_ && !show_completed)) at(i).code = code;
  }
  copied_ = posted_;
  std::uint64_t none = 0;
  advance(0, none);
}

std::optional<std::uint64_t> TransferQueue::next_due_ns() const {
  if (empty()) return std::nullopt;
  if (failed()) return 0;
  std::uint64_t due = UINT64_MAX;
  if (copied_ < posted_) due = std::min(due, copy_from_ns(at(copied_)));
  if (reported_ < copied_) due = std::min(due, at(reported_).times.end_ns);
  if (shown_ < copied_) due = std::min(due, at(shown_).times.arrival_ns);
  return due;
}

}  // namespace mk::fabric::loopback
