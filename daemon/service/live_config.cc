#include "daemon/service/live_config.h"

#include "shm/limits.h"

namespace mk::daemon {
namespace {

constexpr double kRateMax = 1e15;
constexpr std::size_t kChangesMax = 1024;

Status check(const JobChange& change) {
  if (change.job.empty() || change.job.size() > shm::kJobNameBytesMax) {
    return fail(ErrorCode::kInvalidArgument, "a job's name has 1 to {} bytes",
                shm::kJobNameBytesMax);
  }
  if (change.weight && (*change.weight == 0 || *change.weight > kJobWeightMax)) {
    return fail(ErrorCode::kInvalidArgument, "a weight of {}; 1 to {} are possible", *change.weight,
                kJobWeightMax);
  }
  for (const auto& rate : {change.bytes_per_second, change.commands_per_second}) {
    if (rate && !(*rate >= 0 && *rate <= kRateMax)) {
      return fail(ErrorCode::kInvalidArgument,
                  "a rate of {} per second; 0 (unlimited) to {:.0e} are possible", *rate, kRateMax);
    }
  }
  return {};
}

}  // namespace

Result<JobShare> LiveConfig::change(const JobChange& change) {
  MK_RETURN_IF_ERROR(check(change));
  std::lock_guard lock(mutex_);
  if (change.reset) changes_.erase(change.job);
  if (change.weight || change.bytes_per_second || change.commands_per_second) {
    if (!changes_.contains(change.job) && changes_.size() >= kChangesMax) {
      return fail(ErrorCode::kLimitExceeded,
                  "{} jobs have been changed already; undo one of them first (reset)",
                  changes_.size());
    }
    JobChange& kept = changes_[change.job];
    if (change.weight) kept.weight = change.weight;
    if (change.bytes_per_second) kept.bytes_per_second = change.bytes_per_second;
    if (change.commands_per_second) kept.commands_per_second = change.commands_per_second;
  }
  return share_locked(change.job);
}

JobShare LiveConfig::share_locked(const std::string& job) const {
  JobShare share = job_share(config_.jobs, job);
  const auto changed = changes_.find(job);
  if (changed == changes_.end()) return share;
  const JobChange& change = changed->second;
  RateLimit& limit = share.limit;
  share.weight = change.weight.value_or(share.weight);
  limit.bytes_per_second = change.bytes_per_second.value_or(limit.bytes_per_second);
  limit.commands_per_second = change.commands_per_second.value_or(limit.commands_per_second);
  return share;
}

}  // namespace mk::daemon
