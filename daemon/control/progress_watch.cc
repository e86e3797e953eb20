#include "daemon/control/progress_watch.h"

#include <optional>
#include <tuple>

#include "shm/atomic.h"

namespace mk::daemon::control {
namespace {

template <std::size_t count>
std::string name_at(const std::string_view (&names)[count], std::uint32_t place) {
  return place < count ? std::string(names[place]) : "unknown";
}

/// Roles in the order in which a launch is told by them: those that make results come first.
constexpr std::uint32_t kOrder[] = {0, 6, 7, 1, 3, 5, 2, 4};

}  // namespace

void ProgressWatch::find_phase(const shm::Progress& words, RankProgress& now) const {
  struct Wait {
    std::uint32_t role = 0;
    shm::RoleWord word;
    /// The least tells most: of the cause, not of what follows from it.
    auto weight(std::uint32_t own) const { return std::tuple(word.rank == own, word.hops); }
  };
  std::optional<Wait> nearest;
  for (const std::uint32_t role : kOrder) {
    const shm::RoleWord word = shm::decode_role(shm::load_relaxed(&words.roles[role]));
    if (word.running == 0) continue;
    if (word.waiting < word.running) {
      now.phase = shm::kProgressRoleNames[role];
      return;
    }
    const Wait wait{role, word};
    if (!nearest || wait.weight(rank_) < nearest->weight(rank_)) nearest = wait;
  }
  if (!nearest) return;
  now.phase = shm::kProgressRoleNames[nearest->role];
  now.waits_for = name_at(shm::kProgressWaitNames, nearest->word.wait);
  now.waits_for_rank = static_cast<std::int32_t>(nearest->word.rank);
}

void ProgressWatch::look(const shm::Progress& words, bool in_launch, std::uint64_t now_ns,
                         const std::optional<ExchangeWait>& exchange) {
  RankProgress now;
  const std::uint32_t op = shm::load_relaxed(&words.op);
  if (op != 0) now.op = name_at(shm::kProgressOperators, op);
  now.epoch = shm::load_relaxed(&words.epoch);
  now.tag = shm::load_relaxed(&words.tag);
  now.m = shm::load_relaxed(&words.m);
  now.sizes = shm::sizes_of(words);
  now.tiles = shm::load_relaxed(&words.tiles);
  now.chunks = shm::load_relaxed(&words.chunks);
  now.tiles_done = shm::load_relaxed(&words.tiles_done);
  now.chunks_done = shm::load_relaxed(&words.chunks_done);
  if (in_launch && op != 0) find_phase(words, now);
  if (!in_launch && exchange) {
    now.phase = kExchangePhase;
    now.waits_for = "exchange '" + exchange->tag + "'";
    now.waits_for_rank = static_cast<std::int32_t>(exchange->rank);
  }
  now.looks = last_.looks + 1;
  now.looks_in_launch = last_.looks_in_launch + (in_launch ? 1 : 0);
  now.looks_waiting = last_.looks_waiting + (now.waits_for.empty() ? 0 : 1);
  const auto phase = [](const RankProgress& of) {
    return std::tie(of.phase, of.waits_for, of.waits_for_rank);
  };
  const auto done = [](const RankProgress& of) {
    return std::tie(of.op, of.epoch, of.tiles_done, of.chunks_done);
  };
  if (last_.looks == 0 || phase(now) != phase(last_)) phase_since_ns_ = now_ns;
  if (last_.looks == 0 || done(now) != done(last_)) still_since_ns_ = now_ns;
  last_ = std::move(now);
}

RankProgress ProgressWatch::seen(std::uint64_t now_ns) const {
  RankProgress seen = last_;
  if (last_.looks == 0) return seen;
  seen.phase_for_ns = now_ns - phase_since_ns_;
  seen.still_for_ns = now_ns - still_since_ns_;
  return seen;
}

}  // namespace mk::daemon::control
