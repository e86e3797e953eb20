#include "daemon/control/session.h"

#include <utility>

#include "shm/atomic.h"
#include "shm/limits.h"

namespace mk::daemon::control {
namespace {

/// Four beats of a client.
constexpr std::uint64_t kSilenceMaxNs = 1'000'000'000;

}  // namespace

bool Session::rings_done() const {
  for (std::uint32_t lane = 0; lane < segment.shape().lane_count; ++lane) {
    const shm::RingView ring = segment.ring(lane);
    // `produced` is the client's word: whatever it says, the wait for this has a deadline.
    if (shm::load_relaxed(&ring.control->produced) != shm::load_relaxed(&ring.control->completed)) {
      return false;
    }
  }
  return true;
}

bool Session::progresses() {
  std::uint64_t completed = 0;
  for (const LaneStats& lane : stats->lanes) completed += lane.completed.value();
  return std::exchange(completed_seen, completed) != completed;
}

std::uint64_t Session::launch_age(std::uint64_t now_ns) {
  // The client's word: it decides about its own job only.
  const std::uint64_t launches = shm::load_relaxed(&segment.header().launches);
  if (launches % 2 == 0 || launches != launches_seen) {
    launches_seen = launches;
    launches_seen_ns = now_ns;
  }
  return now_ns - launches_seen_ns;
}

OperatorCounts Session::watch_client(std::uint64_t now_ns,
                                     const std::optional<ExchangeWait>& exchange) {
  const std::uint64_t launches_before = launches_watched;
  const auto watch = [now_ns](std::uint64_t* word, std::uint64_t& last, std::uint64_t& since_ns) {
    const std::uint64_t now = shm::load_relaxed(word);
    if (now == last && since_ns != 0) return;
    last = now;
    since_ns = now_ns;
  };
  watch(&segment.header().launches, launches_watched, launches_since_ns);
  watch(&segment.header().beats, beats_watched, beats_since_ns);
  const bool in_launch = launches_watched % 2 == 1;
  progress.look(segment.header().progress, in_launch, now_ns, exchange);
  const std::uint64_t passed_ns = watched_ns != 0 ? now_ns - watched_ns : 0;
  watched_ns = now_ns;
  OperatorCounts counts;
  // Odd while one is under way, so that halves rounded up are those begun.
  if (launches_watched > launches_before)
    counts.launches = (launches_watched + 1) / 2 - (launches_before + 1) / 2;
  if (in_launch) {
    counts.launch_ns = passed_ns;
    if (!progress.seen(now_ns).waits_for.empty()) counts.wait_ns = passed_ns;
  }
  return counts;
}

std::uint64_t Session::silent_ns(std::uint64_t now_ns) const {
  if (beats_watched == 0) return 0;
  const std::uint64_t silent = now_ns - beats_since_ns;
  return silent > kSilenceMaxNs ? silent : 0;
}

void Session::tell_network_rate(std::initializer_list<double> limits) {
  double slowest = 0;
  const auto at_most = [&slowest](double rate) {
    if (rate > 0 && (slowest == 0 || rate < slowest)) slowest = rate;
  };
  for (const double limit : limits) at_most(limit);
  for (const auto& [rank, peer] : peers)
    at_most(static_cast<double>(peer.link->stats->bytes_per_s.value()));
  shm::store_relaxed(&segment.header().network_bytes_per_s, static_cast<std::uint64_t>(slowest));
}

Result<std::uint32_t> Session::allocate_flags(std::uint32_t count) {
  const std::uint32_t total = segment.shape().flag_count;
  if (count == 0) {
    return fail(ErrorCode::kInvalidArgument, "{} asked for 0 flags; at least 1", describe());
  }
  const std::uint64_t rounded = shm::round_up(count, shm::kFlagGranule);
  std::uint64_t used = 0;
  for (const auto& [base, range] : flag_ranges) used += range.count;
  /// The first gap that is long enough at or behind `at`, or `total`.
  const auto gap_from = [&](std::uint64_t at) {
    for (const auto& [base, range] : flag_ranges) {
      if (base + range.count <= at) continue;
      if (base >= at + rounded) break;
      at = base + range.count;
    }
    return at + rounded <= total ? static_cast<std::uint32_t>(at) : total;
  };
  std::uint32_t base = gap_from(next_flag);
  if (base == total) base = gap_from(0);
  if (base == total) {
    return fail(ErrorCode::kLimitExceeded,
                "{} asked for {} flags in one piece, but {} of its {} are free, in pieces; destroy "
                "operators that are not needed any more (their flags come back when all ranks have "
                "destroyed them){}",
                describe(), count, total - used, total,
                total < shm::kFlagsMax
                    ? fmt::format(", or attach with more flags, at most {}", shm::kFlagsMax)
                    : "");
  }
  flag_ranges[base] = {static_cast<std::uint32_t>(rounded)};
  next_flag = base + static_cast<std::uint32_t>(rounded);
  return base;
}

Result<std::uint16_t> Session::free_handle() const {
  for (std::uint32_t tried = 0; tried < shm::kBuffersMax; ++tried) {
    const auto handle = static_cast<std::uint16_t>((last_handle + tried) % shm::kBuffersMax + 1);
    if (!buffers.contains(handle)) return handle;
  }
  return fail(ErrorCode::kLimitExceeded,
              "{} has {} registered buffers, the most a session may have; deregister some",
              describe(), buffers.size());
}

void Session::add_buffer(std::uint16_t handle, Buffer buffer) {
  last_handle = handle;
  registered_bytes += buffer.bytes;
  buffers_host_bytes += buffer.host_bytes;
  buffers.emplace(handle, std::move(buffer));
}

void Session::remove_buffer(std::uint16_t handle) {
  const auto found = buffers.find(handle);
  if (found == buffers.end()) return;
  registered_bytes -= found->second.bytes;
  buffers_host_bytes -= found->second.host_bytes;
  buffers.erase(found);
}

std::string Session::describe() const {
  // A container may be seen from outside only: then the client's own word has to do.
  const std::string pid = credentials.pid != 0
                              ? fmt::format("{}", credentials.pid)
                              : fmt::format("{} of another pid namespace",
                                            shm::load_relaxed(&segment.header().client_pid));
  return fmt::format("rank {} (node rank {}, pid {})", attach.rank, attach.node_rank, pid);
}

}  // namespace mk::daemon::control
