#include "daemon/fabric/staged/link.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace mk::fabric::staged {
namespace {

const StagedLocalRegion& source_of(const Write& write) {
  return static_cast<const StagedLocalRegion&>(*write.src);
}
const StagedRemoteRegion& target_of(const Write& write) {
  return static_cast<const StagedRemoteRegion&>(*write.dst);
}

/// The proxy has checked the bounds; a mistake there must not become a write outside a buffer.
bool valid(const Write& write) {
  if (write.src == nullptr || write.dst == nullptr || !write.src->of_gpu || !write.dst->of_gpu ||
      write.bytes == 0 || write.flag_index >= shm::kFlagsMax)
    return false;
  const std::uint64_t here = source_of(write).region()->bytes;
  const std::uint64_t there = target_of(write).bytes();
  return write.src_offset <= here && write.bytes <= here - write.src_offset &&
         write.dst_offset <= there && write.bytes <= there - write.dst_offset;
}

}  // namespace

std::size_t Link::post(std::span<const Write> writes, GpuCopier& copier, std::uint8_t& nonce) {
  std::size_t count = 0;
  for (; count < writes.size() && taken_ - reported_ < ring_.size(); ++count) {
    Transfer& transfer = at(taken_++);
    transfer = {};
    transfer.write = writes[count];
    transfer.nonce = ++nonce;
    transfer.code = broken_;
    if (!failed() && !begin(transfer, copier) && transfer.code == ErrorCode::kOk)
      transfer.code = ErrorCode::kSystem;
  }
  return count;
}

bool Link::begin(Transfer& transfer, GpuCopier& copier) {
  const Write& write = transfer.write;
  if (!valid(write)) {
    transfer.code = ErrorCode::kInvalidArgument;
    return false;
  }
  if (source_of(write).region()->direct != nullptr) return true;
  transfer.ticket = source_of(write).region()->to_host(copier, write.src_offset, write.bytes);
  return static_cast<bool>(transfer.ticket);
}

void Link::end_copy(Transfer& transfer) {
  transfer.ticket = {};
  source_of(transfer.write).region()->end_copy();
}

bool Link::settled(Transfer& transfer, GpuCopier& copier, std::uint64_t now_ns) {
  if (!transfer.ticket) return true;
  const GpuCopier::State state = copier.state(transfer.ticket, now_ns);
  if (state == GpuCopier::State::kUnderWay) return false;
  if (state == GpuCopier::State::kFailed) transfer.code = ErrorCode::kSystem;
  end_copy(transfer);
  return true;
}

Write Link::half(std::uint64_t number, bool record) {
  const Transfer& transfer = at(number);
  const StagedRemoteRegion& target = target_of(transfer.write);
  const std::uint64_t slot = number % ring_.size();
  Write write;
  write.dst = target.memory();
  write.flag_index = transfer.write.flag_index;
  write.immediate = Half{record, target.number(), transfer.write.flag_index, transfer.nonce}.pack();
  write.cookie = number;
  if (!record) {
    const Region& source = *source_of(transfer.write).region();
    write.src = source.direct != nullptr ? source.direct.get() : source.host.get();
    write.src_offset = transfer.write.src_offset + (source.direct != nullptr ? 0 : kImageOffset);
    if (target.direct() != nullptr) write.dst = target.direct();
    write.dst_offset = transfer.write.dst_offset + (target.direct() != nullptr ? 0 : kImageOffset);
    write.bytes = transfer.write.bytes;
    return write;
  }
  const Write& whole = transfer.write;
  const Record says{whole.flags != nullptr ? whole.flags->key_digest : 0,
                    whole.dst_offset,
                    whole.bytes,
                    whole.flag_index,
                    whole.epoch,
                    whole.immediate};
  std::memcpy(records_.data() + slot * sizeof says, &says, sizeof says);
  write.src = records_region_.get();
  write.src_offset = slot * sizeof says;
  write.dst_offset = std::uint64_t{whole.flag_index} * sizeof says;
  write.bytes = sizeof says;
  return write;
}

void Link::progress(GpuCopier& copier, std::uint64_t now_ns) {
  while (sent_ < taken_) {
    // The halves of those at the front that have been copied, as one submission.
    std::array<Write, shm::kBatchMax> batch;
    std::size_t count = 0;
    for (std::uint64_t i = sent_; i < taken_ && count < batch.size(); ++i) {
      Transfer& transfer = at(i);
      if (!settled(transfer, copier, now_ns)) break;
      if (transfer.code != ErrorCode::kOk) {
        if (count == 0 && i == sent_) ++sent_;
        if (count == 0) continue;
        break;
      }
      for (std::uint8_t part = transfer.sent; part < 2 && count < batch.size(); ++part)
        batch[count++] = half(i, part == 1);
    }
    if (count == 0) return;
    std::size_t accepted = carrier_.post(over_, {batch.data(), count});
    const bool all = accepted == count;
    while (accepted > 0) {
      Transfer& transfer = at(sent_);
      const std::size_t now = std::min<std::size_t>(accepted, 2u - transfer.sent);
      transfer.sent = static_cast<std::uint8_t>(transfer.sent + now);
      accepted -= now;
      if (transfer.sent == 2) ++sent_;
    }
    if (!all) return;
  }
}

void Link::on_carried(std::uint64_t cookie, bool failed, ErrorCode code) {
  if (cookie < reported_ || cookie >= taken_) return;
  Transfer& transfer = at(cookie);
  ++transfer.carried;
  if (failed && transfer.code == ErrorCode::kOk)
    transfer.code = code == ErrorCode::kOk ? ErrorCode::kLinkDown : code;
}

std::size_t Link::report(std::span<Event> events) {
  std::size_t count = 0;
  while (reported_ < sent_ && count < events.size()) {
    const Transfer& transfer = at(reported_);
    if (transfer.carried < transfer.sent) break;
    const bool ok = transfer.code == ErrorCode::kOk;
    events[count++] = {ok ? Event::Kind::kCompleted : Event::Kind::kFailed, id,
                       transfer.write.cookie, 0, transfer.code};
    ++reported_;
  }
  return count;
}

void Link::fail(ErrorCode code) {
  if (failed()) return;
  broken_ = code;
  for (std::uint64_t i = sent_; i < taken_; ++i) {
    if (at(i).code == ErrorCode::kOk) at(i).code = code;
  }
}

void Link::drop_copies() {
  for (std::uint64_t i = reported_; i < taken_; ++i) {
    if (at(i).ticket) end_copy(at(i));
  }
}

}  // namespace mk::fabric::staged
