#include "daemon/control/operator_totals.h"

#include <algorithm>
#include <utility>

namespace mk::daemon::control {
namespace {

constexpr std::uint64_t kKeepNsMin = 60'000'000'000;
constexpr const char* kOther = "other";

}  // namespace

OperatorTotals::OperatorTotals(std::uint64_t keep_ns) : keep_ns_(std::max(keep_ns, kKeepNsMin)) {}

bool OperatorTotals::expired(const Entry& entry, std::uint64_t now_ns) const {
  return now_ns > entry.added_ns && now_ns - entry.added_ns > keep_ns_;
}

OperatorTotals::Entry& OperatorTotals::entry_of(OperatorLabels labels, std::uint64_t now_ns) {
  if (const auto found = entries_.find(labels); found != entries_.end()) return found->second;
  std::erase_if(entries_, [&](const auto& entry) { return expired(entry.second, now_ns); });
  std::size_t of_operator = 0, of_user = 0;
  for (const auto& [other, entry] : entries_) {
    if (other.uid != labels.uid) continue;
    ++of_user;
    if (other.job == labels.job && other.op == labels.op) ++of_operator;
  }
  if (of_operator >= kTagsMax) labels.tag = kOther;
  if (of_user >= kOfUserMax) labels.job = labels.op = labels.tag = kOther;
  if (!entries_.contains(labels) && entries_.size() >= kMax)
    labels = {kOther, kOther, kOther, kOther};
  return entries_[std::move(labels)];
}

void OperatorTotals::add(OperatorLabels labels, const OperatorCounts& more, std::uint64_t now_ns) {
  Entry& entry = entry_of(std::move(labels), now_ns);
  entry.counts.launches += more.launches;
  entry.counts.launch_ns += more.launch_ns;
  entry.counts.wait_ns += more.wait_ns;
  entry.added_ns = now_ns;
}

std::vector<OperatorTotal> OperatorTotals::list(std::uint64_t now_ns) const {
  std::vector<OperatorTotal> list;
  for (const auto& [labels, entry] : entries_)
    if (!expired(entry, now_ns)) list.push_back({labels, entry.counts});
  return list;
}

}  // namespace mk::daemon::control
