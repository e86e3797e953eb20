#include "daemon/proxy/link_queue.h"

#include "daemon/plant.h"
#include "shm/flag.h"

namespace mk::daemon {

void LinkQueue::push(Lane& lane, Flow& flow, std::uint64_t now_ns) {
  const AcceptedCommand& accepted = lane.held;
  const shm::Command& command = accepted.command;
  const Peer& peer = *accepted.peer;
  if (count_ == 0) oldest_queued_ns_ = now_ns;
  fabric::Write& write = writes_[count_];
  write.src = accepted.src;
  write.dst = accepted.dst;
  write.src_offset = command.src_offset;
  write.dst_offset = command.dst_offset;
  write.bytes = command.bytes;
  // Both contracts at once: the endpoint takes the one it keeps.
  write.flags = peer.flags;
  write.flag_index = command.flag_index;
  const bool early = MK_PLANT(releases_an_epoch_early) && command.bytes == 0;
  write.epoch = command.epoch + (early ? 1 : 0);
  write.immediate = shm::make_immediate(MK_PLANT(immediate_without_slot) ? 0 : peer.slot,
                                        command.flag_index, write.epoch);
  write.cookie = lane.held_cookie;
  origins_[count_] = Origin{&lane, lane.held_entry, command.commit_time_ns};
  ++count_;
  flow.deficit -= command.bytes + kCommandCostBytes;
  lane.holds = false;
}

std::uint32_t LinkQueue::post(fabric::Endpoint& endpoint, std::uint64_t batch_number,
                              std::uint64_t now_ns, TraceBuffer* trace) {
  if (refused_ || count_ == 0) return 0;
  const std::uint32_t offered = std::min(count_, depth() - std::min(depth(), in_flight_));
  std::uint32_t taken = 0;
  if (offered != 0) {
    const std::size_t answer = endpoint.post(id_, std::span(writes_.data(), offered));
    taken = static_cast<std::uint32_t>(std::min<std::size_t>(answer, offered));
  }
  refused_ = taken < count_;
  if (refused_ && stats_ != nullptr) stats_->post_retries.add(1);
  if (taken == 0) return 0;
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < taken; ++i) {
    bytes += writes_[i].bytes;
    const std::uint32_t waited_ns = record_posted(origins_[i], batch_number, now_ns);
    if (trace != nullptr) {
      trace->record({now_ns,
                     writes_[i].cookie,
                     batch_number,
                     id_,
                     writes_[i].bytes,
                     waited_ns,
                     TraceRecord::Kind::kPosted,
                     {.epoch = writes_[i].epoch}});
    }
  }
  rate_.posted(now_ns, bytes, in_flight_ == 0);
  if (in_flight_ == 0 && stats_ != nullptr) stats_->progress_ns.set(now_ns);
  in_flight_ += taken;
  if (stats_ != nullptr) {
    stats_->batch_commands[taken - 1].add(1);
    stats_->messages.add(taken);
    stats_->bytes.add(bytes);
    stats_->batches.add(1);
    stats_->outstanding.set(in_flight_);
  }
  remove_front(taken);
  return taken;
}

std::uint32_t LinkQueue::record_posted(const Origin& origin, std::uint64_t batch_number,
                                       std::uint64_t now_ns) {
  origin.entry->state = InFlight::State::kPosted;
  origin.entry->posted_ns = now_ns;
  Lane& lane = *origin.lane;
  ++lane.session->posted;
  if (lane.last_batch != batch_number) {
    lane.last_batch = batch_number;
    lane.stats->batches.add(1);
  }
  // The producer's clock, cut to 32 bits; 0 says it took none, and more than 2^31 apart is no
  // latency but nonsense.
  const std::uint32_t waited_ns = static_cast<std::uint32_t>(now_ns) - origin.commit_time_ns;
  if (origin.commit_time_ns == 0 || waited_ns > 1u << 31) return 0;
  lane.stats->commit_to_post.record(waited_ns);
  return waited_ns;
}

void LinkQueue::remove_front(std::uint32_t count) {
  std::copy(writes_.begin() + count, writes_.begin() + count_, writes_.begin());
  if (!MK_PLANT(short_post_mixes_up)) {
    std::copy(origins_.begin() + count, origins_.begin() + count_, origins_.begin());
  }
  count_ -= count;
}

void LinkQueue::drop(const Session& session) {
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < count_; ++i) {
    if (origins_[i].lane->session == &session) {
      origins_[i].entry->state = InFlight::State::kGone;
      continue;
    }
    writes_[kept] = writes_[i];
    origins_[kept++] = origins_[i];
  }
  count_ = kept;
}

void LinkQueue::publish_stats(std::uint64_t now_ns) {
  if (newly_completed_ == 0) return;
  const bool measured = in_flight_ == 0 && rate_.ended(now_ns, newly_failed_ != 0);
  if (stats_ != nullptr) {
    if (measured) stats_->bytes_per_s.set(rate_.bytes_per_s());
    stats_->completed.add(newly_completed_ - newly_failed_);
    if (newly_failed_ != 0) stats_->errors.add(newly_failed_);
    stats_->outstanding.set(in_flight_);
    stats_->progress_ns.set(now_ns);
  }
  newly_completed_ = 0;
  newly_failed_ = 0;
}

}  // namespace mk::daemon
