/// \file
/// Nodes of a job whose ranks are this process's, a GPU each, joined by real daemons over the
/// loopback fabric: what libmkclient does for a rank, for all ranks at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/rank_context.h"

namespace mk::test {

/// Ends the process on anything unexpected.
class DaemonNodes {
 public:
  /// Starts a daemon per node, with a rail for each local rank. `program`: mkerneld.
  /// `link_bandwidth`: of each rail and direction, "50GB/s"; empty: unpaced.
  DaemonNodes(std::uint32_t nodes, std::uint32_t locals, const std::string& program,
              const std::string& link_bandwidth);
  ~DaemonNodes();
  DaemonNodes(const DaemonNodes&) = delete;
  DaemonNodes& operator=(const DaemonNodes&) = delete;

  /// A new job: rank r attaches, with GPU r.
  void attach();
  /// Of every rank: `bytes` of zeroed memory on its GPU that its node's ranks reach and the daemons
  /// know, with `flags` arrival flags. As long as the job.
  std::vector<kernels::RankContext> memory(std::uint64_t bytes, std::uint32_t flags);
  void detach();

 private:
  struct Ranks;
  std::unique_ptr<Ranks> ranks_;
};

}  // namespace mk::test
