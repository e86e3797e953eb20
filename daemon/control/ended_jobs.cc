#include "daemon/control/ended_jobs.h"

#include <algorithm>
#include <map>
#include <utility>

namespace mk::daemon::control {

void EndedJobs::add(EndedJob job) {
  if (keep_ns_ == 0) return;
  const std::uint64_t now_ns = job.ended_ns;
  std::erase_if(jobs_, [&](const EndedJob& old) {
    return old.ended_ns < now_ns && now_ns - old.ended_ns > keep_ns_;
  });
  jobs_.push_back(std::move(job));
  if (jobs_.size() <= kMax) return;
  std::map<std::uint32_t, std::size_t> of_user;
  for (const EndedJob& one : jobs_) ++of_user[one.uid];
  const std::uint32_t most =
      std::ranges::max_element(of_user, {}, [](const auto& user) { return user.second; })->first;
  jobs_.erase(std::ranges::find(jobs_, most, &EndedJob::uid));
}

std::vector<EndedJob> EndedJobs::list(std::uint64_t now_ns) const {
  std::vector<EndedJob> kept;
  for (const EndedJob& job : jobs_) {
    const std::uint64_t ago_ns = now_ns - std::min(now_ns, job.ended_ns);
    if (ago_ns > keep_ns_) continue;
    kept.push_back(job);
    kept.back().ended_for_ns = ago_ns;
  }
  return kept;
}

}  // namespace mk::daemon::control
