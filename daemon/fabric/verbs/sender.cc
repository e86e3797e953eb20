#include "daemon/fabric/verbs/sender.h"

#include <algorithm>
#include <utility>

#include "daemon/fabric/verbs/handle.h"

namespace mk::fabric::verbs {
namespace {

/// A request's id on the completion queue: its lane's number over its own.
constexpr unsigned kLaneShift = 56;
constexpr std::uint64_t kRequestMask = (std::uint64_t{1} << kLaneShift) - 1;

/// A queue in the error state returns all it holds; one that has not after so long never will.
constexpr std::uint64_t kFlushNsMax = 1'000'000'000;

std::string describe(const ibv_wc& completion, const std::string& peer) {
  const char* const status = ::ibv_wc_status_str(completion.status);
  switch (completion.status) {
    case IBV_WC_RETRY_EXC_ERR:
      return fmt::format(
          "{} does not acknowledge what is sent to it ({}): its daemon, its NIC or the way there "
          "is down, or the GID index is wrong on one side",
          peer, status);
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return fmt::format("{} does not take arrivals fast enough ({})", peer, status);
    case IBV_WC_WR_FLUSH_ERR:
      return fmt::format("the NIC gave the queue pair to {} up ({})", peer, status);
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
      return fmt::format("{} refused a write to its memory ({}): was it deregistered?", peer,
                         status);
    default:
      return fmt::format("a write to {} failed: {} (vendor error {:#x})", peer, status,
                         completion.vendor_err);
  }
}

}  // namespace

Sender::Sender(ibv_cq* completions, std::vector<QueueRef> queues, Options options)
    : completions_(completions),
      options_(std::move(options)),
      requests_max_(std::uint64_t{kRequestsPerWrite} * options_.depth),
      lanes_(queues.size()),
      done_(options_.depth),
      free_(options_.depth) {
  for (std::size_t i = 0; i < queues.size(); ++i) {
    lanes_[i].queue = queues[i];
    lanes_[i].writes.resize(options_.depth);
  }
}

std::size_t Sender::post(std::span<const Write> writes) {
  const std::size_t most =
      std::min({writes.size(), std::size_t{free_}, std::size_t{shm::kBatchMax}});
  std::size_t taken = 0;
  for (; taken < most && place(writes[taken]); ++taken) --free_;
  for (Lane& lane : lanes_) {
    if (!lane.chain.empty()) submit(lane);
  }
  return taken;
}

bool Sender::place(const Write& write) {
  if (closed_ || !in_bounds(write, options_.contract)) {
    finish(write.cookie, closed_ ? ErrorCode::kLinkDown : ErrorCode::kInvalidArgument);
    return true;
  }
  // Its keys may by now be other memory's.
  if (write.bytes != 0 && opening_of(write) != options_.opening) {
    finish(write.cookie, ErrorCode::kNotFound);
    return true;
  }
  const std::uint32_t index = queue_of(write.flag_index, static_cast<std::uint32_t>(lanes_.size()));
  Lane& lane = lanes_[index];
  WorkMaker maker(write, options_.contract, options_.message_bytes_max);
  const std::uint32_t needed = maker.count();
  if (needed > requests_max_) {
    finish(write.cookie, ErrorCode::kInvalidArgument);
    return true;
  }
  if (lane.taken - lane.completed + needed > requests_max_) return false;
  WorkRequest request;
  while (maker.next(request)) {
    request.id = std::uint64_t{index} << kLaneShift | ++lane.taken;
    if (lane.chain.full()) submit(lane);
    lane.chain.push(request);
  }
  lane.writes[lane.tail++ % lane.writes.size()] = {write.cookie, lane.taken};
  ++outstanding_;
  return true;
}

void Sender::submit(Lane& lane) {
  lane.chain.back().signaled = true;
  const std::span<WorkRequest> requests = lane.chain.requests();
  std::size_t posted = 0;
  int error = 0;
  if (!closed_) {
    error = lane.queue.extended != nullptr ? submit_extended(lane.queue.extended, requests, posted)
                                           : submit_classic(lane.queue.classic, requests, posted);
  }
  lane.posted += posted;
  lane.chain.clear();
  if (error != 0) {
    close(fmt::format("the NIC does not take a write to {}: {}", options_.peer_name,
                      errno_text(error)));
  }
}

void Sender::progress(std::uint64_t now_ns) {
  if (outstanding_ == 0) {
    idle_ = true;
    return;
  }
  if (std::exchange(idle_, false)) progress_ns_ = now_ns;
  std::array<ibv_wc, 32> completions;
  int count = 0;
  do {
    count = ::ibv_poll_cq(completions_, static_cast<int>(completions.size()), completions.data());
    for (int i = 0; i < count; ++i) take(completions[static_cast<std::size_t>(i)]);
    if (count > 0) progress_ns_ = now_ns;
  } while (count == static_cast<int>(completions.size()));
  if (count < 0) close(fmt::format("the completion queue to {} is broken", options_.peer_name));
  if (outstanding_ == 0) return;
  if (!closed_ && now_ns - std::min(now_ns, progress_ns_) > options_.write_timeout_ns) {
    close(fmt::format("{} took no data for {} s", options_.peer_name,
                      static_cast<double>(options_.write_timeout_ns) / 1e9));
  }
  if (closed_) end_flush(now_ns);
}

void Sender::take(const ibv_wc& completion) {
  Lane& lane = lanes_[(completion.wr_id >> kLaneShift) % lanes_.size()];
  const std::uint64_t id = completion.wr_id & kRequestMask;
  if (id <= lane.completed || id > lane.posted) return;  // none of ours
  lane.completed = id;
  if (completion.status != IBV_WC_SUCCESS) {
    // What the queue held before it may have arrived, or not: without a completion of its own it is
    // not acknowledged.
    close(describe(completion, options_.peer_name));
    return;
  }
  while (lane.head != lane.tail && lane.writes[lane.head % lane.writes.size()].last_request <= id) {
    finish(lane.writes[lane.head++ % lane.writes.size()].cookie, ErrorCode::kOk);
    --outstanding_;
  }
}

void Sender::finish(std::uint64_t cookie, ErrorCode code) {
  done_[done_tail_++ % done_.size()] = {cookie, code};
}

void Sender::close(const std::string& reason) {
  if (std::exchange(closed_, true)) return;
  reason_ = reason;
  options_.stop();
}

void Sender::end_flush(std::uint64_t now_ns) {
  if (closed_ns_ == 0) closed_ns_ = now_ns;
  const bool flushed = std::all_of(lanes_.begin(), lanes_.end(),
                                   [](const Lane& lane) { return lane.completed == lane.posted; });
  if (!flushed && now_ns - closed_ns_ <= kFlushNsMax) return;
  for (Lane& lane : lanes_) {
    while (lane.head != lane.tail) {
      finish(lane.writes[lane.head++ % lane.writes.size()].cookie, ErrorCode::kLinkDown);
      --outstanding_;
    }
  }
}

std::size_t Sender::report(LinkId link, std::span<Event> events) {
  std::size_t count = 0;
  while (done_head_ != done_tail_ && count < events.size()) {
    const Done& done = done_[done_head_++ % done_.size()];
    events[count++] = {done.code == ErrorCode::kOk ? Event::Kind::kCompleted : Event::Kind::kFailed,
                       link, done.cookie, 0, done.code};
    ++free_;
  }
  return count;
}

}  // namespace mk::fabric::verbs
