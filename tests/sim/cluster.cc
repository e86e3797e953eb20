#include "tests/sim/cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace mk::sim {

namespace {

/// How long after a fault its consequences may still fail a job: links back off for up to 5 s.
constexpr std::uint64_t kAftermathNs = 6 * kSecond;
/// How long a write may be under way to somebody who has lost touch with its sender.
constexpr std::uint64_t kStrayNs = 60 * kSecond;
/// All jobs are over by then, or somebody waits for ever.
constexpr std::uint64_t kJobsNsMax = 600 * kSecond;
/// What is left of the last job is gone by then: memory waits ten seconds for a peer that is mute.
constexpr std::uint64_t kSettleNsMax = 60 * kSecond;

bool has(const JobRun& run, NodeId node) {
  return std::ranges::find(run.plan->nodes, node) != run.plan->nodes.end();
}

}  // namespace

Cluster::Cluster(std::uint64_t seed, const PlanOptions& options, bool tracing)
    : world_(seed, tracing),
      plan_(draw_plan(world_.random, options)),
      network_(world_, plan_.network, *this),
      wires_(world_, plan_.wire_delay_ns_max),
      nodes_(plan_.nodes),
      ranks_(plan_.nodes) {}

Cluster::~Cluster() {
  for (auto& node : nodes_) {
    if (node != nullptr) node->kill();
  }
}

Report Cluster::run() {
  const std::uint64_t started_ns = world_.now();
  world_.trace([&] {
    const bool ordered = plan_.network.contract == fabric::DeliveryContract::kOrdered;
    return fmt::format("{} nodes of {} rails, {} network", plan_.nodes, plan_.rails,
                       ordered ? "an ordered" : "an unordered");
  });
  for (NodeId id = 0; id < plan_.nodes; ++id) start_node(id);
  for (const JobSchedule& schedule : plan_.jobs) {
    Job& job = *jobs_.emplace_back(std::make_unique<Job>(Job{&schedule, 0, nullptr}));
    world_.after(schedule.start_ns, [this, &job] { start_run(job); });
    ++jobs_left_;
  }
  for (const Fault& fault : plan_.faults) {
    world_.after(fault.at_ns, [this, &fault] { inject(fault); });
  }
  if (!run_until(started_ns + kJobsNsMax, [this] { return jobs_left_ == 0; })) {
    world_.violate("the jobs did not come to an end");
  }
  std::string left;
  const auto settled = [&, next = std::uint64_t{0}]() mutable {
    if (world_.now() < next) return false;
    next = world_.now() + 200 * kMillisecond;
    left = leftovers();
    return left.empty();
  };
  if (!run_until(world_.now() + kSettleNsMax, settled) && !world_.violation()) {
    world_.violate("all clients are gone, and there is still:" + left);
  }
  report_.violation = world_.violation();
  report_.simulated_ns = world_.now() - started_ns;
  report_.steps = world_.steps();
  report_.nodes = plan_.nodes;
  report_.faults = static_cast<std::uint32_t>(plan_.faults.size());
  report_.trace = world_.last_events();
  return report_;
}

bool Cluster::run_until(std::uint64_t time_ns, const std::function<bool()>& done) {
  while (!world_.violation() && world_.now() < time_ns) {
    if (done()) return true;
    if (!world_.step()) return done();
  }
  return false;
}

std::string Cluster::leftovers() const {
  std::string left;
  const auto add = [&](NodeId node, const char* what, std::size_t count, std::size_t start = 0) {
    if (count != start) left += fmt::format(" {} {} on node {};", count, what, node);
  };
  for (NodeId id = 0; id < plan_.nodes; ++id) {
    if (nodes_[id] == nullptr) continue;
    const daemon::ControlCounts counts = nodes_[id]->counts();
    add(id, "clients", counts.clients);
    add(id, "sessions", counts.sessions);
    add(id, "jobs", counts.jobs);
    add(id, "early parts", counts.early_parts);
    add(id, "session slots", counts.slots_used);
    const Network::Counts held = network_.counts(id);
    add(id, "registered regions", held.local_regions);
    add(id, "imported regions", held.remote_regions);
    add(id, "writes in flight", held.writes);
    add(id, "links", held.links, counts.links_up);
  }
  if (!files_.empty()) left += fmt::format(" {} files of ranks;", files_.size());
  return left;
}

// -- nodes and jobs
// ----------------------------------------------------------------------------------------------

void Cluster::start_node(NodeId id) {
  NodePlan plan = plan_.node;
  plan.id = id;
  nodes_[id] = Node::start(world_, network_, wires_, *this, plan);
}

void Cluster::start_run(Job& job) {
  const JobPlan& plan = job.schedule->plan;
  const JobSchedule::Run& how = job.schedule->runs[job.next_run++];
  job.run = std::make_unique<JobRun>();
  JobRun& run = *job.run;
  run.plan = &plan;
  run.number = next_run_number_++;
  run.left = plan.world();
  ++report_.runs;
  world_.trace([&] {
    return fmt::format("run {} of {} begins: {} nodes of {} ranks, {} launches of {} x {} bytes",
                       run.number, plan.name, plan.nodes.size(), plan.local_size, plan.launches,
                       plan.chunks, plan.chunk_bytes);
  });
  if (how.behaviour.manner != Manner::kProper) run.forgive("one of its ranks misbehaves");
  for (const NodeId a : plan.nodes) {
    const Trouble& own = node_trouble_[a];
    if (world_.now() < own.until_ns) run.forgive(own.why);
    for (const NodeId b : plan.nodes) {
      const Trouble& between = pair_trouble_[std::minmax(a, b)];
      if (world_.now() < between.until_ns) run.forgive(between.why);
    }
  }
  for (std::uint32_t rank = 0; rank < plan.world(); ++rank) {
    run.ranks.push_back(std::make_shared<Rank>(world_, *this, run, rank,
                                               rank == how.rank ? how.behaviour : RankPlan{}));
  }
  for (const auto& rank : run.ranks) {
    ranks_[rank->node()].push_back(rank);
    world_.at(world_.now() + world_.random.scaled(100, 20 * kMillisecond), rank,
              [](Rank& started) { started.start(); });
  }
}

void Cluster::on_over(JobRun& run, const Rank& rank, const std::string& failure) {
  // A slot is held until nothing can write to its memory any more: few slots may not be enough.
  if (failure.find("its limit (sessions that end keep") != std::string::npos) {
    run.forgive("there are few slots");
  }
  // Nothing orders two connections: the daemon may hear of the end of the process before later than
  // of its successor's attach.
  if (failure.find("is held by process") != std::string::npos && succeeds_just_now(run, rank)) {
    run.forgive("the end of the run before was not seen yet");
  }
  if (!failure.empty() && run.excuse.empty()) {
    world_.violate(fmt::format("{} failed although nothing happened to its job: {}",
                               rank.describe(), failure));
  }
  if (failure.empty()) report_.launches += run.plan->launches;
  if (--run.left != 0) return;
  for (const auto& job : jobs_) {
    if (job->run.get() == &run) end_run(*job);
  }
}

bool Cluster::succeeds_just_now(const JobRun& run, const Rank& rank) const {
  return std::ranges::any_of(ended_, [&](const auto& before) {
    return before->plan == run.plan &&
           world_.now() < before->ranks[rank.rank()]->over_at_ns() + kSecond;
  });
}

void Cluster::end_run(Job& job) {
  if (!job.run->excuse.empty()) ++report_.failed_runs;
  for (auto& ranks : ranks_) {
    std::erase_if(ranks, [](const auto& rank) {
      const auto alive = rank.lock();
      return alive == nullptr || alive->over();
    });
  }
  ended_.push_back(std::move(job.run));
  if (job.next_run == job.schedule->runs.size()) {
    --jobs_left_;
    return;
  }
  world_.after(world_.random.scaled(10 * kMicrosecond, kSecond), [this, &job] { start_run(job); });
}

void Cluster::on_file(FileId file, Rank* rank) {
  if (rank != nullptr) {
    files_[file] = rank;
  } else {
    files_.erase(file);
  }
}

// -- what goes wrong
// ----------------------------------------------------------------------------------------------

void Cluster::inject(const Fault& fault) {
  const NodeId id = fault.node;
  const std::string why = fmt::format("{} at node {}", fault_name(fault.kind), id);
  world_.trace([&] { return fmt::format("FAULT {} ({} ms)", why, fault.for_ns / kMillisecond); });
  if (nodes_[id] == nullptr) return;
  switch (fault.kind) {
    case Fault::Kind::kBreakLinks:
      return network_.break_links(id, fault.other);
    case Fault::Kind::kFlapPort:
      return network_.flap(id, fault.rail, fault.for_ns);
    case Fault::Kind::kCutWire:
      forgive_pair(id, fault.other, fault.for_ns + kSecond, why);
      lose_touch(id, fault.other);
      return wires_.cut(id, fault.other, "cut by the simulator", fault.for_ns);
    case Fault::Kind::kRestart:
      forgive_node(id, fault.for_ns + kSecond, why);
      for (NodeId other = 0; other < plan_.nodes; ++other) lose_touch(id, other);
      std::exchange(nodes_[id], nullptr)->kill();
      world_.after(fault.for_ns, [this, id] { start_node(id); });
      return;
    case Fault::Kind::kFreeze:
      // Shorter than any deadline: nobody may fail for it.
      return nodes_[id]->freeze(fault.for_ns);
    case Fault::Kind::kJumpClock:
      forgive_node(id, kSecond, why);
      for (NodeId other = 0; other < plan_.nodes; ++other) lose_touch(id, other);
      return nodes_[id]->jump_clock(fault.for_ns);
    case Fault::Kind::kStorm:
      return network_.storm(id, fault.for_ns);
    case Fault::Kind::kDrain:
      forgive_node(id, fault.for_ns, why);
      nodes_[id]->drain();
      world_.at(world_.now() + fault.for_ns, nodes_[id], [](Node& node) { node.resume(); });
      return;
  }
}

void Cluster::forgive_node(NodeId node, std::uint64_t for_ns, const std::string& why) {
  Trouble& trouble = node_trouble_[node];
  trouble.until_ns = std::max(trouble.until_ns, world_.now() + for_ns + kAftermathNs);
  trouble.why = why;
  for (const auto& job : jobs_) {
    if (job->run != nullptr && has(*job->run, node)) job->run->forgive(why);
  }
}

void Cluster::forgive_pair(NodeId a, NodeId b, std::uint64_t for_ns, const std::string& why) {
  Trouble& trouble = pair_trouble_[std::minmax(a, b)];
  trouble.until_ns = std::max(trouble.until_ns, world_.now() + for_ns + kAftermathNs);
  trouble.why = why;
  for (const auto& job : jobs_) {
    if (job->run != nullptr && has(*job->run, a) && has(*job->run, b)) job->run->forgive(why);
  }
}

void Cluster::lose_touch(NodeId a, NodeId b) {
  lost_touch_until_[std::minmax(a, b)] = world_.now() + kStrayNs;
}

void Cluster::on_trouble(NodeId from, NodeId to, std::uint64_t for_ns) {
  forgive_pair(from, to, for_ns, fmt::format("links between nodes {} and {}", from, to));
}

bool Cluster::may_have_lost_touch(NodeId writer, NodeId owner) {
  return world_.now() < lost_touch_until_[std::minmax(writer, owner)];
}

// -- who looks when
// ----------------------------------------------------------------------------------------------

void Cluster::on_data(const Landing& landing) {
  const auto found = files_.find(landing.file);
  if (found != files_.end()) found->second->on_data(landing);
}

void Cluster::on_flag(FileId file) {
  const auto found = files_.find(file);
  if (found != files_.end()) found->second->look();
}

void Cluster::after_pass(NodeId node) {
  for (const auto& rank : ranks_[node]) {
    if (const auto alive = rank.lock()) alive->look();
  }
}

}  // namespace mk::sim
