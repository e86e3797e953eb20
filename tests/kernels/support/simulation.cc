#include "tests/kernels/support/simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "kernels/comm/operator_block.h"
#include "kernels/comm/wait_text.h"
#include "kernels/comm/workspace_head.h"

namespace mk::kernels::testing {
namespace {

// In the place of a chunk.
constexpr std::uint32_t kRole = ~0u;
constexpr std::uint32_t kStepsTaken = ~1u;

}  // namespace

void SimExecutor::copy_in_pieces(const CopyJob& job, std::uint32_t piece_bytes) {
  for (std::uint64_t row = 0; row < job.rows; ++row) {
    for (std::uint32_t i = 0; i < job.target_count; ++i) {
      for (std::uint32_t at = 0; at < job.row_bytes; at += piece_bytes) {
        std::memcpy(job.targets[i] + row * job.target_stride + at,
                    job.source + row * job.source_stride + at,
                    std::min(piece_bytes, job.row_bytes - at));
        maybe_yield();
      }
    }
  }
}

bool SimExecutor::last_part(Role role, std::uint32_t chunk, std::uint32_t parts) {
  std::uint32_t& done = (*parts_done_)[{role, chunk}];
  if (++done != parts) return false;
  done = 0;
  return true;
}

std::uint32_t SimExecutor::take_step(Role role) {
  maybe_yield();
  return (*parts_done_)[{role, kStepsTaken}]++;
}

bool SimExecutor::last_done(Role role, std::uint32_t count) {
  return last_part(role, kRole, count);
}

/// Of a ring: few slots, so that senders come to its end and wait.
constexpr std::uint32_t kSlotCountLog2 = 4;

Simulation::Simulation(SimOperator& op, const SimOptions& options, std::uint64_t workspace_bytes,
                       std::uint32_t flag_count)
    : op_(op),
      options_(options),
      cluster_({options.nodes, options.locals, workspace_bytes, flag_count, options.blocks.send,
                kSlotCountLog2}),
      network_(cluster_, options.seed, options.network),
      fibers_(options.order, options.seed) {
  fibers_.starve(static_cast<std::uint32_t>(options.seed % cluster_.size()));
}

std::string Simulation::run() {
  for (std::uint32_t rank = 0; rank < cluster_.size(); ++rank) add_rank(rank);
  fibers_.run([this] { return network_.busy(); }, [this] { network_.step(); },
              // Nobody can go on: the clock jumps, so that the first waits end and say what they
              // are.
              [this] { now_ns_ += 1'000'000; });
  // A complaint ends all traffic: what else went wrong came of that.
  if (!network_.complaint().empty()) wrong_ = network_.complaint();
  return wrong_;
}

void Simulation::forge_flag(std::uint32_t rank, std::uint32_t flag) {
  RankMemory& memory = cluster_.rank(rank);
  memory.flags[memory.flag_base + flag] = kForged;
}

void Simulation::add_rank(std::uint32_t index) {
  ranks_.push_back(std::make_unique<Rank>());
  Rank& rank = *ranks_.back();
  rank.index = index;
  Launch& launch = op_.launch(index);
  launch.context = cluster_.context(index);
  launch.local = &rank.local;
  launch.control.stop = &rank.local.stop;
  launch.control.record = &rank.local.failure;
  launch.control.timeout_ns = 1000;
  const std::vector<RoleThread> threads = op_.threads(launch.context.world);
  for (const RoleThread& thread : threads)
    fibers_.add(index, [this, &rank, thread] { run_thread(rank, thread); });
  fibers_.add(index, [this, &rank] { run_beside(rank); });
  fibers_.add(index, [this, &rank, count = threads.size()] { drive(rank, count); });
}

/// False: something has gone wrong meanwhile.
bool Simulation::await_start(const Rank& rank, std::uint32_t epoch) {
  while (rank.started != epoch) {
    if (!wrong_.empty()) return false;
    fibers_.poll();
  }
  return true;
}

void Simulation::run_beside(Rank& rank) {
  const SimExecutor executor(fibers_, now_ns_, rank.parts_done);
  for (std::uint32_t epoch = 1; epoch <= options_.launches.size(); ++epoch) {
    if (!await_start(rank, epoch)) return;
    if (!op_.run_beside(rank.index, executor)) fail(rank);
    rank.beside_done = epoch;
    fibers_.changed();
  }
}

void Simulation::run_thread(Rank& rank, const RoleThread& thread) {
  const SimExecutor executor(fibers_, now_ns_, rank.parts_done);
  for (std::uint32_t epoch = 1; epoch <= options_.launches.size(); ++epoch) {
    if (!await_start(rank, epoch)) return;
    const auto run = [&](Role role) {
      BlockTotals totals;
      return op_.run_role(rank.index, role, thread.index, totals, executor);
    };
    if (!run(thread.role) || (thread.then && !run(*thread.then))) fail(rank);
    ++rank.threads_done;
    fibers_.changed();
  }
}

/// The launching thread of one rank: what LaunchRunner::run does.
void Simulation::drive(Rank& rank, std::size_t threads) {
  Launch& launch = op_.launch(rank.index);
  for (std::uint32_t epoch = 1; epoch <= options_.launches.size(); ++epoch) {
    while (rank.beside_done != epoch - 1) {
      if (!wrong_.empty()) return;
      fibers_.poll();
    }
    launch.epoch = epoch;
    launch.m = options_.launches[epoch - 1].m;
    launch.mode = options_.launches[epoch - 1].mode;
    rank.threads_done = 0;
    op_.begin(rank.index);
    if (!await_records_free(launch)) return fail(rank);
    announce_launch(launch);
    for (const Role role : {Role::kCompute, Role::kShare, Role::kReduce, Role::kReceive})
      rank.parts_done.erase({role, kStepsTaken});
    rank.started = epoch;
    fibers_.changed();
    while (rank.threads_done != threads) {
      if (!wrong_.empty()) return;
      op_.watch(rank.index);
      fibers_.poll();
    }
    announce_end(launch);
    fibers_.changed();
    const std::string wrong = op_.check(rank.index);
    if (wrong.empty() || !wrong_.empty()) continue;
    saw_wrong_element_ = true;
    wrong_ = fmt::format("rank {}, launch {}: {}", rank.index, epoch, wrong);
  }
}

bool Simulation::await_records_free(Launch& launch) {
  SimParts no_parts;
  SimExecutor executor(fibers_, now_ns_, no_parts);
  BlockTotals totals;
  OperatorBlock<SimExecutor> block(executor, launch, Role::kCompute, 0, totals);
  for (std::uint32_t local = 0; local < launch.context.world.locals; ++local) {
    if (!block.await_finished(local, launch.epoch - kLaunchRecordBanks)) return false;
  }
  return true;
}

void Simulation::fail(Rank& rank) {
  if (!wrong_.empty()) return;
  const Launch& launch = op_.launch(rank.index);
  wrong_ = describe(rank.local.failure, op_.name(), launch.epoch, launch.context.world, 0).message;
}

std::vector<SimLaunch> random_sim_launches(std::uint32_t count, std::uint32_t m_max,
                                           std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<SimLaunch> launches;
  for (std::uint32_t i = 0; i < count; ++i) {
    launches.push_back({static_cast<std::uint32_t>(1 + random() % m_max),
                        random() % 4 == 0 ? Mode::kUnfused : Mode::kFused});
  }
  launches.back().m = m_max;
  return launches;
}

}  // namespace mk::kernels::testing
