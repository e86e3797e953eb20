#include "daemon/control/held_up.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

namespace mk::daemon::control {
namespace {

using ByRank = std::map<std::uint32_t, const RankDoing*>;

bool waits(const RankDoing& doing) {
  return doing.stopped.empty() && !doing.progress.waits_for.empty();
}

/// Whom the rank waits for; nullopt: it works, is stopped, or waits for bytes of its own.
std::optional<std::uint32_t> awaited_by(const RankDoing& doing) {
  const RankProgress& its = doing.progress;
  if (!waits(doing) || its.waits_for_rank < 0) return std::nullopt;
  const auto whom = static_cast<std::uint32_t>(its.waits_for_rank);
  return whom == doing.rank ? std::nullopt : std::optional(whom);
}

/// Where the waits from `doing` on lead; nullopt: to nobody.
std::optional<std::uint32_t> end_of_waits(const RankDoing& doing, const ByRank& all) {
  std::set<std::uint32_t> seen{doing.rank};
  std::optional<std::uint32_t> at = awaited_by(doing);
  while (at && seen.insert(*at).second) {
    const auto found = all.find(*at);
    if (found == all.end()) return at;
    const RankDoing& next = *found->second;
    if (!waits(next)) return at;
    at = awaited_by(next);
  }
  return std::nullopt;
}

}  // namespace

std::vector<HeldUp> who_holds_up(const std::vector<RankDoing>& ranks) {
  ByRank all;
  for (const RankDoing& one : ranks) all[one.rank] = &one;
  std::map<std::uint32_t, HeldUp> found;
  for (const auto& [rank, doing] : all) {
    const auto by = end_of_waits(*doing, all);
    if (!by) continue;
    HeldUp& held = found[*by];
    held.by = *by;
    held.ranks.push_back(rank);
    held.for_ns = std::max(held.for_ns, doing->progress.phase_for_ns);
  }
  std::vector<HeldUp> list;
  for (auto& [by, held] : found) list.push_back(std::move(held));
  return list;
}

std::string list_of(const std::vector<std::uint32_t>& ranks) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  if (ranks.size() > kShown) text += fmt::format(" and {} more", ranks.size() - kShown);
  return text;
}

std::string awaited_text(const RankProgress& progress) {
  std::string text = progress.waits_for;
  if (text.empty() || progress.waits_for_rank < 0) return text;
  // The client names what is of the other rank.
  if (text == "its launch" || text == "its end") text.replace(0, 3, "the");
  return text + fmt::format(" of rank {}", progress.waits_for_rank);
}

std::string describe(const RankProgress& progress) {
  if (progress.phase == kExchangePhase) {
    return fmt::format("in {}, which rank {} has not joined", progress.waits_for,
                       progress.waits_for_rank);
  }
  if (progress.op.empty()) return {};
  std::string text = fmt::format("{} launch {}", progress.op, progress.epoch);
  if (progress.tag != 0) text += fmt::format(" (tag {})", progress.tag);
  if (!progress.phase.empty()) text += ", " + progress.phase;
  if (!progress.waits_for.empty()) text += " waits for " + awaited_text(progress);
  const auto count = [&text](std::uint32_t done, std::uint32_t all, const char* of) {
    if (all != 0) {
      text += fmt::format(", {} of {} {}", done, all, of);
    } else if (done != 0) {
      text += fmt::format(", {} {}", done, of);
    }
  };
  count(progress.tiles_done, progress.tiles, "tiles");
  count(progress.chunks_done, progress.chunks, "chunks");
  return text;
}

std::string held_up_text(const std::vector<RankDoing>& ranks) {
  std::string text;
  bool elsewhere = false;
  for (const HeldUp& held : who_holds_up(ranks)) {
    const auto by = std::ranges::find(ranks, held.by, &RankDoing::rank);
    const bool several = held.ranks.size() != 1;
    const std::string who = (several ? "ranks " : "rank ") + list_of(held.ranks);
    text += text.empty() ? "" : "; ";
    if (by == ranks.end()) {
      elsewhere = true;
      text += fmt::format("{} {} for rank {} of another node", who, several ? "wait" : "waits",
                          held.by);
    } else {
      std::string doing = by->stopped;
      if (doing.empty()) doing = by->in_launch ? describe(by->progress) : "in no launch";
      if (doing.empty()) doing = "in a launch";
      text += fmt::format("rank {} ({}) holds up {}", held.by, doing, who);
    }
    text += fmt::format(" for {:.1f} s", 1e-9 * static_cast<double>(held.for_ns));
  }
  return elsewhere ? text + " (mkctl who-is-slow asks there)" : text;
}

}  // namespace mk::daemon::control
