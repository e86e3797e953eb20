/// \file
/// An operator's roles as a discrete-event simulation: the real role code of all ranks in one
/// thread, switched at every wait and wherever its executor allows, in adversarial orders. Every
/// launch must end (no cyclic wait: "nobody can go on" is a fact here, not a time-out) and every
/// rank must see every element right (nothing read too early or overwritten too soon).
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/comm/block.h"
#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/launch.h"
#include "kernels/cpu/launch_runner.h"
#include "kernels/gather/copy_job.h"
#include "kernels/gather/roles.h"
#include "shm/host/result.h"
#include "tests/kernels/support/cluster.h"
#include "tests/kernels/support/fibers.h"
#include "tests/kernels/support/gather_roles.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {

/// Of one rank: parts done of each chunk, by role and chunk. In the place of a chunk: blocks that
/// are done, and steps taken in the running launch.
using SimParts = std::map<std::pair<Role, std::uint32_t>, std::uint32_t>;

/// What an operator's executor has in a simulation, besides the operator's arithmetic. It looks at
/// many flags at once, and shares chunks out in parts, as a GPU's does.
class SimExecutor {
 public:
  SimExecutor(Fibers& fibers, const std::uint64_t& now_ns, SimParts& parts_done)
      : fibers_(&fibers), now_ns_(&now_ns), parts_done_(&parts_done) {}

  /// To be called in the middle of tiles and copies, so that they are half done when others look.
  void maybe_yield() { fibers_->maybe_yield(); }
  /// Others may look after every piece of a row.
  void copy_in_pieces(const CopyJob& job, std::uint32_t piece_bytes);

  void stores_done() {
    fibers_->maybe_yield();
    fibers_->changed();  // the flag is stored before the next switch
  }
  void loads_begin() {}
  template <class Flag>
  std::uint32_t first_missing(std::uint32_t begin, std::uint32_t end, std::uint32_t wanted,
                              Flag&& flag) {
    if (begin < end) first_seen_ = shm::load_acquire(flag(begin));
    while (begin < end && shm::flag_reached(flag(begin), wanted)) ++begin;
    return begin;
  }
  std::uint32_t first_seen() const { return first_seen_; }
  /// Of each of the rank's chunks in that launch: 1 to 5.
  static std::uint32_t parts(const Launch& launch) {
    return 1 + (launch.epoch * 3 + launch.context.world.rank() * 7) % 5;
  }
  /// So of a gather's rows; every other launch the first ones, or all, to the network first, and in
  /// three of six launches each block takes the next step that nobody has.
  static gather::Sharing sharing(const Launch& launch) {
    constexpr std::uint32_t kFirst[] = {1, 2, 5, 1000};
    const std::uint32_t dice = launch.epoch + launch.context.world.rank();
    return {parts(launch), dice % 2 == 0 ? 0 : kFirst[dice / 2 % 4], dice / 3 % 2 == 0};
  }
  static gather::PassingOn onward(const Launch& launch) {
    return {parts(launch), sharing(launch).taken};
  }
  std::uint32_t take_step(Role role);
  bool last_part(Role role, std::uint32_t chunk, std::uint32_t parts);
  static bool counts_done(Role role) { return role != Role::kCompute; }
  bool last_done(Role role, std::uint32_t count);
  std::uint64_t now_ns() { return *now_ns_; }
  bool pause(std::uint32_t) {
    fibers_->poll();
    return true;
  }

 private:
  Fibers* fibers_;
  const std::uint64_t* now_ns_;
  SimParts* parts_done_;
  std::uint32_t first_seen_ = 0;
};

/// The operator of all ranks, as a test brings it.
class SimOperator {
 public:
  virtual ~SimOperator() = default;
  virtual const char* name() const = 0;
  /// The rank's launch, with its geometry, blocks and banks set; the simulation fills in the rest.
  virtual Launch& launch(std::uint32_t rank) = 0;
  virtual std::vector<RoleThread> threads(const World& world) const = 0;
  /// Before the rank's next launch, whose epoch, m and mode are set: inputs, poisoned outputs.
  virtual void begin(std::uint32_t rank) = 0;
  virtual bool run_role(std::uint32_t rank, Role role, std::uint32_t index, BlockTotals& totals,
                        const SimExecutor& executor) = 0;
  /// What goes on beside the rank's launch: its end does not wait for it, but its next one does.
  virtual bool run_beside(std::uint32_t /*rank*/, const SimExecutor& /*executor*/) { return true; }
  /// After the rank's launch: empty, or which element is wrong.
  virtual std::string check(std::uint32_t rank) = 0;
  /// Now and then while the rank's launch runs.
  virtual void watch(std::uint32_t /*rank*/) {}
};

/// One launch, the same for all ranks.
struct SimLaunch {
  std::uint32_t m = 0;
  Mode mode = Mode::kFused;
};

/// What is simulated of any operator. A test's options are these and its operator's own.
struct SimOptions {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  RoleBlocks blocks;
  std::vector<SimLaunch> launches;
  Order order = Order::kRandom;
  std::uint64_t seed = 1;
  NetworkOptions network;

  /// And one of all orders, another for the next seed.
  void set_seed(std::uint64_t to) {
    seed = to;
    order = kOrders[to % std::size(kOrders)];
  }
};

class Simulation {
 public:
  /// `op` outlives it. Each rank has a workspace of so many bytes and so many flags.
  Simulation(SimOperator& op, const SimOptions& options, std::uint64_t workspace_bytes,
             std::uint32_t flag_count);

  /// Empty, or the first thing that went wrong.
  std::string run();
  /// Whether `run` found an element wrong (and not just a wait or the network).
  bool saw_wrong_element() const { return saw_wrong_element_; }

  Cluster& cluster() { return cluster_; }
  const Network& network() const { return network_; }
  /// Before `run`: the operator's flag on that rank looks reached for ever. Needs
  /// NetworkOptions::keep_forged_flags.
  void forge_flag(std::uint32_t rank, std::uint32_t flag);

 private:
  struct Rank {
    std::uint32_t index = 0;
    LocalWords local;
    SimParts parts_done;
    std::uint32_t started = 0;  ///< epoch
    std::uint32_t threads_done = 0;
    std::uint32_t beside_done = 0;  ///< epoch
  };

  void add_rank(std::uint32_t index);
  void run_thread(Rank& rank, const RoleThread& thread);
  void run_beside(Rank& rank);
  void drive(Rank& rank, std::size_t threads);
  bool await_start(const Rank& rank, std::uint32_t epoch);
  bool await_records_free(Launch& launch);
  void fail(Rank& rank);

  SimOperator& op_;
  SimOptions options_;
  Cluster cluster_;
  Network network_;
  Fibers fibers_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::uint64_t now_ns_ = 0;
  std::string wrong_;
  bool saw_wrong_element_ = false;
};

/// The plan that was made, or an exception that says why there is none.
template <class Plan>
Plan plan_or_throw(const Result<Plan>& made) {
  if (!made) throw std::runtime_error(made.error().message);
  return *made;
}

/// In how many of the seeds 1 .. `seeds` a simulation of `options_of(seed)` sees a wrong element.
/// Of simulations that are broken on purpose: if that went unnoticed, those of whole ones would
/// prove nothing.
template <class OperatorSimulation, class OptionsOf>
int seeds_seen_wrong(std::uint64_t seeds, OptionsOf&& options_of) {
  int seen = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    OperatorSimulation simulation(options_of(seed));
    simulation.run();
    seen += simulation.saw_wrong_element();
  }
  return seen;
}

/// `count` launches with m from 1 to m_max, some unfused; the last with m_max.
std::vector<SimLaunch> random_sim_launches(std::uint32_t count, std::uint32_t m_max,
                                           std::uint64_t seed);

}  // namespace mk::kernels::testing
