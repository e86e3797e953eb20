/// \file
/// A job on this machine: daemons of its own (or the caller's), and a program started once per
/// rank, which reports line by line in JSON.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "client/tools/launch/daemons.h"
#include "client/tools/launch/ranks.h"
#include "shm/host/result.h"

namespace mk::tools {

struct LocalJobOptions {
  std::string name;          ///< the job's name begins so
  std::uint32_t local = 1;   ///< ranks per node
  DaemonSetOptions daemons;  ///< `nodes` says how many nodes, also when they are joined
  /// Running daemons to join, one client socket per node; empty: start daemons.
  std::vector<std::string> join_sockets;
  std::string program;         ///< of a rank; empty: this program
  std::vector<int> inherited;  ///< descriptors that ranks get under the same number
};

/// What a rank process is told, as words of its command line and back.
struct RankArguments {
  std::uint32_t rank = 0;
  std::string socket;   ///< of its daemon
  std::string job;      ///< the job's name
  nlohmann::json spec;  ///< what to do
};
inline constexpr const char* kRankCommand = "rank";

/// The rank's side: `words` are what followed `kRankCommand`. kInvalidArgument says what is wrong.
Result<RankArguments> parse_rank_arguments(const std::vector<std::string>& words);

class LocalJob {
 public:
  /// Starts the daemons, unless joined, and `PROGRAM rank ...` for each rank of every node, all
  /// with the same `spec`.
  static Result<LocalJob> start(const LocalJobOptions& options, const nlohmann::json& spec);

  /// The next report of every rank, by rank. An error says what the ranks, and daemons of our own,
  /// that ended had to say.
  Result<std::vector<nlohmann::json>> read_reports(std::chrono::milliseconds patience,
                                                   const std::string& what);
  /// Waits until all ranks have ended well. The daemons still run.
  Status finish_ranks(std::chrono::milliseconds patience);
  /// Stops daemons of our own; they must end well.
  Status stop_daemons();

  /// Null when daemons were joined.
  const DaemonSet* daemons() const { return daemons_ ? &*daemons_ : nullptr; }
  const std::string& folder() const { return ranks_->folder(); }

 private:
  LocalJob() = default;
  std::optional<DaemonSet> daemons_;
  std::optional<RankSet> ranks_;  ///< goes before the daemons
};

}  // namespace mk::tools
