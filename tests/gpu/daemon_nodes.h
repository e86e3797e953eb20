/// \file
/// Nodes of a job whose ranks are this process's, joined by daemons: what libmkclient does for a
/// rank, for all ranks at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm/rank_context.h"

namespace mk::test {

/// The GPU of each of `ranks` ranks that are dealt out to `devices` of them, the first ones.
std::vector<int> dealt_out(std::uint32_t ranks, std::uint32_t devices);

/// Ends the process on anything unexpected.
class DaemonNodes {
 public:
  /// Starts a daemon per node, with a rail for each local rank. `devices`: by rank. `program`:
  /// mkerneld; empty: the nodes are this process's (EmbeddedCluster). Ranks that share a GPU want
  /// that: daemons of other processes would take turns with them on it, milliseconds each.
  /// `link_bandwidth`: of each rail and direction of the loopback fabric, "50GB/s"; empty: unpaced.
  DaemonNodes(std::uint32_t nodes, std::uint32_t locals, const std::vector<int>& devices,
              const std::string& program, const std::string& link_bandwidth,
              const std::string& fabric = "loopback");
  ~DaemonNodes();
  DaemonNodes(const DaemonNodes&) = delete;
  DaemonNodes& operator=(const DaemonNodes&) = delete;

  /// A new job: every rank attaches.
  void attach();
  /// Of every rank: `bytes` of zeroed memory on its GPU that its node's ranks reach and the daemons
  /// know, with `flags` arrival flags. As long as the job.
  std::vector<kernels::RankContext> memory(std::uint64_t bytes, std::uint32_t flags);
  void detach();
  /// Where the Admin service of `node`'s daemon listens; not of this process's nodes.
  const std::string& admin_address(std::uint32_t node) const;

 private:
  struct Ranks;
  std::unique_ptr<Ranks> ranks_;
};

}  // namespace mk::test
