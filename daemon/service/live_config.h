/// \file
/// The configuration in effect, and what people have changed of it since (`mkctl job set`).
/// Thread-safe.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "daemon/config/config.h"
#include "shm/host/result.h"

namespace mk::daemon {

/// What to change of a job's share; nullopt: as it is.
struct JobChange {
  std::string job;
  std::optional<std::uint32_t> weight;
  std::optional<double> bytes_per_second, commands_per_second;  ///< 0: unlimited
  bool reset = false;                                           ///< first undoes earlier changes
};

/// What came of it.
struct JobChanged {
  JobShare share;
  std::uint32_t sessions = 0;  ///< of the job that are here
};

class LiveConfig {
 public:
  explicit LiveConfig(Config config) : config_(std::move(config)) {}

  Config get() const {
    std::lock_guard lock(mutex_);
    return config_;
  }
  void set(const Config& config) {
    std::lock_guard lock(mutex_);
    config_ = config;
  }

  JobShare share_of(const std::string& job) const {
    std::lock_guard lock(mutex_);
    return share_locked(job);
  }
  /// Puts a change on top of what the configuration says of the job, now and after a reload.
  Result<JobShare> change(const JobChange& change);

 private:
  JobShare share_locked(const std::string& job) const;

  mutable std::mutex mutex_;
  Config config_;
  std::map<std::string, JobChange> changes_;  ///< by job
};

}  // namespace mk::daemon
