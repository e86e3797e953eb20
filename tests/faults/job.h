/// \file
/// Rank processes whose report lines are read as they come, with the time of each.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "client/tools/launch/process.h"
#include "tests/faults/cluster.h"

namespace mk::faults {

/// Polls until `done` or for `patience`.
bool eventually(const std::function<bool()>& done,
                std::chrono::milliseconds patience = std::chrono::seconds(60));

class Rank {
 public:
  Rank(const std::string& program, const std::string& socket, const std::string& job,
       std::uint32_t nodes, std::uint32_t local, std::uint32_t rank);
  ~Rank();  ///< kills it
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void signal(int number) { process_.signal(number); }
  pid_t pid() const { return process_.pid(); }
  std::uint64_t launches() const { return launches_.load(); }
  /// Its process has ended or reported an error.
  bool ended() const { return ended_.load(); }
  /// "error CODE SENTENCE"; empty when it said none.
  std::string error() const;
  /// When the error came.
  Clock::time_point error_at() const;

 private:
  void read();

  tools::Process process_;
  std::atomic<std::uint64_t> launches_{0};
  std::atomic<bool> ended_{false}, stop_{false};
  mutable std::mutex mutex_;
  std::string error_;
  Clock::time_point error_at_;
  std::thread reader_;
};

/// A job of one or more ranks per node; ranks are node-major.
class Job {
 public:
  Job(const std::string& program, const std::vector<std::string>& sockets, const std::string& name,
      std::uint32_t local);

  Rank& rank(std::uint32_t number) { return *ranks_[number]; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(ranks_.size()); }
  /// Every rank has ended this many more launches, or one has ended: false then.
  bool advance(std::uint64_t launches);
  bool any_ended() const;
  std::uint64_t launches() const;  ///< of all ranks
  std::string errors() const;

 private:
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace mk::faults
