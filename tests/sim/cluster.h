/// \file
/// One cluster from its first daemon to the moment when nothing is left of it: runs the plan of a
/// seed and holds every step of it to the invariants.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/sim/network.h"
#include "tests/sim/node.h"
#include "tests/sim/plan.h"
#include "tests/sim/rank.h"
#include "tests/sim/wires.h"
#include "tests/sim/world.h"

namespace mk::sim {

/// What became of a cluster.
struct Report {
  std::optional<std::string> violation;
  std::uint64_t simulated_ns = 0;
  std::uint64_t steps = 0;
  std::uint32_t nodes = 0, runs = 0, failed_runs = 0, faults = 0;
  std::uint64_t launches = 0;
  std::deque<std::string> trace;  ///< the last events; of a traced run only
};

class Cluster final : public NetworkWatch, public NodeWatch, public RankWatch {
 public:
  Cluster(std::uint64_t seed, const PlanOptions& options, bool tracing);
  ~Cluster() override;

  /// Runs to the end, or to the first violation. Once.
  Report run();

 private:
  struct Job {
    const JobSchedule* schedule;
    std::size_t next_run = 0;
    std::unique_ptr<JobRun> run;  ///< null between two
  };

  void start_node(NodeId id);
  void start_run(Job& job);
  /// Whether the same rank of an earlier run of the job ended less than a second ago.
  bool succeeds_just_now(const JobRun& run, const Rank& rank) const;
  void end_run(Job& job);
  void inject(const Fault& fault);
  void forgive_node(NodeId node, std::uint64_t for_ns, const std::string& why);
  void forgive_pair(NodeId a, NodeId b, std::uint64_t for_ns, const std::string& why);
  void lose_touch(NodeId a, NodeId b);
  bool run_until(std::uint64_t time_ns, const std::function<bool()>& done);
  /// What is still held although everybody is gone; empty: nothing.
  std::string leftovers() const;

  // NetworkWatch
  void on_data(const Landing& landing) override;
  void on_flag(FileId file) override;
  void on_trouble(NodeId from, NodeId to, std::uint64_t for_ns) override;
  bool may_have_lost_touch(NodeId writer, NodeId owner) override;
  // NodeWatch
  void after_pass(NodeId node) override;
  // RankWatch
  std::shared_ptr<Node> node(NodeId id) override { return nodes_[id]; }
  void on_over(JobRun& run, const Rank& rank, const std::string& failure) override;
  void on_file(FileId file, Rank* rank) override;

  World world_;
  const ClusterPlan plan_;
  Network network_;
  Wires wires_;
  std::vector<std::shared_ptr<Node>> nodes_;             ///< null: down
  std::vector<std::vector<std::weak_ptr<Rank>>> ranks_;  ///< by node: those that may look
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<std::unique_ptr<JobRun>> ended_;  ///< their ranks are named by what is on its way
  std::unordered_map<FileId, Rank*> files_;
  /// Until when a run that meets with it may fail, and why; by node, and by pair.
  struct Trouble {
    std::uint64_t until_ns = 0;
    std::string why;
  };
  std::map<NodeId, Trouble> node_trouble_;
  std::map<std::pair<NodeId, NodeId>, Trouble> pair_trouble_;
  std::map<std::pair<NodeId, NodeId>, std::uint64_t> lost_touch_until_;
  std::uint32_t jobs_left_ = 0;
  std::uint64_t next_run_number_ = 1;
  Report report_;
};

}  // namespace mk::sim
