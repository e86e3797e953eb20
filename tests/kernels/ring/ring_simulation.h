/// \file
/// The roles of Ring Attention as a discrete-event simulation (support/simulation.h). Instead of
/// attention, each query adds up a number for each key that it is given, read from the key's and
/// the value's bytes: the sums are right only if every key that the mask admits came exactly once,
/// from this launch, whole.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/ring/roles.h"
#include "kernels/ops/ring/spec.h"
#include "tests/kernels/support/engine_actor.h"
#include "tests/kernels/support/simulation.h"

namespace mk::kernels::testing {

struct RingOptions : SimOptions {
  EngineFault engine_fault = EngineFault::kNone;
  RingAttentionShape shape;
  RingAttentionTiling tiling;
  std::uint32_t turn_chunks = 0;  ///< 0: the plan's
  bool forge_releases = false;    ///< the one bank looks released for ever
};

inline std::uint32_t mixed(std::uint32_t hash) {
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  return hash ^ hash >> 12;
}

/// What the elements of a key head's key (or value) are in a launch, all of a row the same.
/// `head`: of the heads of all batches.
inline std::uint16_t content(std::uint32_t epoch, std::uint32_t position, std::uint32_t head,
                             bool value) {
  return static_cast<std::uint16_t>(mixed(epoch * 0x85ebca6bu ^ position * 0x9e3779b1u ^
                                          (head * 2 + (value ? 1u : 0u)) * 0xc2b2ae35u));
}
inline std::uint64_t number_of(std::uint16_t key, std::uint16_t value) {
  return mixed(std::uint32_t{key} << 16 | value);
}

struct RingRank {
  RingAttentionLaunch launch;
  std::vector<std::uint16_t> keys;
  std::vector<std::uint16_t> values;
  std::map<std::uint32_t, std::vector<std::uint64_t>> aside;  ///< by item: its sums
  std::vector<std::uint64_t> out;                             ///< [row][pair]
  bool attended = false;
  bool attended_early = false;  ///< before everything had arrived
  std::uint32_t resumed_most = 0;
  std::map<std::uint32_t, std::uint32_t> resumed;  ///< by item: how often
  std::map<std::uint32_t, std::uint64_t> shown;    ///< by origin: rows, to compute blocks
  std::uint32_t engine_starts = 0;
};

/// The executor of kernels/ops/ring/roles.h; yields between rows.
class Executor : public SimExecutor {
 public:
  Executor(const SimExecutor& frame, RingRank& rank) : SimExecutor(frame), rank_(rank) {}

  void begin(const AttentionItem& item) { sums_.assign(item.query.rows, 0); }
  void resume(const AttentionItem& item) {
    sums_ = rank_.aside.at(item.number);
    rank_.aside.erase(item.number);
    rank_.resumed_most = std::max(rank_.resumed_most, ++rank_.resumed[item.number]);
  }
  void attend(const AttentionItem& item, const AttentionKeys& keys, bool all,
              std::int64_t diagonal) {
    const RingAttentionGeometry& plan = rank_.launch.plan;
    rank_.attended = true;
    for (std::uint32_t j = 0; j < keys.rows; ++j) {
      // The first element of the key and the last of the value.
      std::uint16_t key = 0;
      std::uint16_t value = 0;
      std::copy_n(keys.keys + j * keys.key_stride, 2, reinterpret_cast<std::byte*>(&key));
      maybe_yield();
      std::copy_n(keys.values + j * keys.value_stride + (plan.head_dim - 1) * kElementBytes, 2,
                  reinterpret_cast<std::byte*>(&value));
      for (std::uint32_t i = 0; i < item.query.rows; ++i) {
        if (all || std::int64_t{j} <= std::int64_t{i} + diagonal) sums_[i] += number_of(key, value);
      }
    }
  }
  void put_aside(const AttentionItem& item) { rank_.aside[item.number] = sums_; }
  void finish(const AttentionItem& item) {
    for (std::uint32_t i = 0; i < item.query.rows; ++i) {
      rank_.out[std::size_t{item.query.row + i} * rank_.launch.plan.head_pairs() + item.pair] =
          sums_[i];
    }
  }
  void copy(const CopyJob& job) { copy_in_pieces(job, 200); }
  void start_dma(std::uint32_t, std::uint32_t) {
    maybe_yield();
    ++rank_.engine_starts;
  }

 protected:
  RingRank& rank_;

 private:
  std::vector<std::uint64_t> sums_;
};

/// One whose compute blocks hear from others what has arrived, as on a GPU.
class WatchingExecutor : public Executor {
 public:
  using Executor::Executor;
  void show_rows(std::uint32_t origin, std::uint64_t rows) {
    maybe_yield();
    rank_.shown[origin] = rows;
  }
  std::uint64_t rows_shown(std::uint32_t origin) {
    const auto found = rank_.shown.find(origin);
    return found == rank_.shown.end() ? 0 : found->second;
  }
};

class RingSimulation : private SimOperator {
 public:
  explicit RingSimulation(const RingOptions& options)
      : options_(options),
        plan_(make_plan(options)),
        ranks_(make_ranks(options, plan_)),
        network_bytes_(ranks_.size()),
        simulation_(*this, options, plan_.workspace_bytes, plan_.flag_count()) {
    if (options.forge_releases) forge_releases();
  }

  std::string run() {
    const std::string wrong = simulation_.run();
    if (!wrong.empty()) return wrong;
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (simulation_.network().bytes_of(rank) != network_bytes_[rank]) {
        return fmt::format("rank {} sent {} bytes, not {}", rank,
                           simulation_.network().bytes_of(rank), network_bytes_[rank]);
      }
    }
    return {};
  }
  bool saw_wrong_element() const { return simulation_.saw_wrong_element(); }
  /// How often any item was taken up again in a launch, at most.
  std::uint32_t resumed_most() const {
    std::uint32_t most = 0;
    for (const RingRank& rank : ranks_) most = std::max(most, rank.resumed_most);
    return most;
  }
  /// Launches in which a rank had attended keys before everything had arrived, and all launches.
  std::pair<int, int> overlapped(Mode mode) const { return overlapped_[static_cast<int>(mode)]; }

 private:
  static RingAttentionPlan make_plan(const RingOptions& options) {
    RingAttentionPlan plan = plan_or_throw(
        RingAttentionPlan::make(options.nodes, options.locals, options.shape, options.tiling));
    if (options.turn_chunks != 0) plan.gather.turn_chunks = options.turn_chunks;
    return plan;
  }
  static std::vector<RingRank> make_ranks(const RingOptions& options,
                                          const RingAttentionPlan& plan) {
    std::vector<RingRank> ranks(options.nodes * options.locals);
    for (RingRank& rank : ranks) {
      rank.launch.plan = plan;
      rank.launch.banks = plan.banks;
      rank.launch.blocks = options.blocks;
    }
    return ranks;
  }

  const char* name() const override { return "ring_attention"; }
  Launch& launch(std::uint32_t rank) override { return ranks_[rank].launch; }
  std::vector<RoleThread> threads(const World& world) const override {
    const RoleBlocks& blocks = options_.blocks;
    std::vector<RoleThread> threads;
    add_role(threads, Role::kCompute, blocks.compute);
    add_gather_roles(threads, world, blocks);
    if (plan_.packing == KeyPacking::kHeads) add_role(threads, Role::kCollect, world.nodes);
    return threads;
  }

  /// The rank's rows as positions in the sequence, by the definition of the parts.
  std::vector<std::uint32_t> positions(std::uint32_t rank, std::uint32_t seq) const {
    std::vector<std::uint32_t> all;
    for (std::uint32_t part : {rank, plan_.parts() - 1 - rank}) {
      const ShardRange range = shard_of(seq, plan_.parts(), part);
      for (std::uint32_t i = 0; i < range.count; ++i) all.push_back(range.first + i);
      if (!plan_.causal) break;
    }
    return all;
  }

  void begin(std::uint32_t index) override {
    RingRank& rank = ranks_[index];
    const std::uint32_t epoch = rank.launch.epoch;
    const std::uint32_t pairs = plan_.head_pairs();
    const auto own = positions(index, rank.launch.m);
    const auto rows = static_cast<std::uint32_t>(own.size());
    // Keys as [row][batch][head], values the same or, by heads, as [batch][head][row].
    const bool by_heads = plan_.packing == KeyPacking::kHeads;
    rank.keys.resize(std::size_t{rows} * pairs * plan_.head_dim);
    rank.values.resize(rank.keys.size());
    for (std::size_t i = 0; i < rank.keys.size(); ++i) {
      const std::size_t line = i / plan_.head_dim;
      rank.keys[i] =
          content(epoch, own[line / pairs], static_cast<std::uint32_t>(line % pairs), false);
      rank.values[i] =
          by_heads
              ? content(epoch, own[line % rows], static_cast<std::uint32_t>(line / rows), true)
              : content(epoch, own[line / pairs], static_cast<std::uint32_t>(line % pairs), true);
    }
    const std::uint64_t line = plan_.head_bytes();
    const HeadTensor keys{reinterpret_cast<const std::byte*>(rank.keys.data()),
                          plan_.key_heads * line, pairs * line, line};
    HeadTensor values = keys;
    if (by_heads) values = {nullptr, plan_.key_heads * rows * line, line, rows * line};
    values.base = reinterpret_cast<const std::byte*>(rank.values.data());
    rank.launch.keys_values = KeySource::of(plan_, keys, values, rows);
    // Ranks may differ in that.
    rank.launch.by_dma = plan_.engines && (epoch + index) % 4 != 0;
    rank.engine_starts = 0;
    rank.attended = rank.attended_early = false;
    rank.aside.clear();
    rank.resumed.clear();
    rank.shown.clear();
    rank.out.assign(own.size() * pairs, 0xdddddddddddddddd);
    const RingAttentionSchedule schedule(plan_, rank.launch.context.world, rank.launch.m,
                                         rank.launch.mode);
    network_bytes_[index] += schedule.network_bytes();
  }

  bool run_role(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
                const SimExecutor& frame) override {
    if (plan_.packing == KeyPacking::kHeads)
      return run_role_with<WatchingExecutor>(index, role, block_index, totals, frame);
    return run_role_with<Executor>(index, role, block_index, totals, frame);
  }
  template <class RoleExecutor>
  bool run_role_with(std::uint32_t index, Role role, std::uint32_t block_index, BlockTotals& totals,
                     const SimExecutor& frame) {
    RoleExecutor executor(frame, ranks_[index]);
    RingAttentionBlock<RoleExecutor> block(executor, ranks_[index].launch, role, block_index,
                                           totals);
    switch (role) {
      case Role::kCompute:
        return ring_attention::compute(block);
      case Role::kCollect:
        if constexpr (requires { executor.show_rows(0u, 0u); }) return ring_attention::watch(block);
        return false;
      case Role::kShare:
        return ring_attention::share(block);
      case Role::kSend:
        return ring_attention::send(block);
      default:
        return ring_attention::receive(block);
    }
  }

  bool run_beside(std::uint32_t index, const SimExecutor& frame) override {
    RingRank& rank = ranks_[index];
    const RingAttentionLaunch& launch = rank.launch;
    if (!launch.by_dma) return true;
    WatchingExecutor executor(frame, rank);
    BlockTotals totals;
    RingAttentionBlock<WatchingExecutor> block(executor, launch, Role::kPull, 0, totals);
    EngineActor engines(executor, block.gather, launch.keys_values, options_.engine_fault);
    if (!engines.await_start(rank.engine_starts, totals.waits)) return false;
    const GatherSchedule& gather = block.schedule.gather();
    const std::uint32_t rows = launch.keys_values.rows;
    const bool brought =
        gather::bring_rows(gather, rows, gather.data_bytes(rows) / launch.plan.head_units(),
                           gather::PieceOrder::kPieceByPiece, engines)
            .has_value();
    engines.bring();
    return brought;
  }

  void watch(std::uint32_t index) override {
    RingRank& rank = ranks_[index];
    const World& world = rank.launch.context.world;
    const GatherSchedule schedule(plan_.gather, world);
    if (!rank.attended || rank.attended_early) return;
    for (std::uint32_t node = 0; node < world.nodes; ++node) {
      if (node == world.node) continue;
      const auto rows =
          static_cast<std::uint32_t>(positions(world.rail_peer(node), rank.launch.m).size());
      const std::uint32_t flag =
          schedule.arrival(bank_of(rank.launch.epoch, plan_.banks), world.node, node,
                           schedule.chunks(plan_.gathered_rows(rows)) - 1);
      rank.attended_early |=
          !shm::flag_reached(rank.launch.context.arrival_flags + flag, rank.launch.epoch);
    }
  }

  std::string check(std::uint32_t index) override {
    const RingRank& rank = ranks_[index];
    if (rank.engine_starts != (rank.launch.by_dma ? 1 : 0))
      return fmt::format("copy engines were started {} times", rank.engine_starts);
    auto& [early, all] = overlapped_[static_cast<int>(rank.launch.mode)];
    early += rank.attended_early;
    ++all;
    const std::uint32_t seq = rank.launch.m;
    const auto own = positions(index, seq);
    for (std::uint32_t head = 0; head < plan_.head_pairs(); ++head) {
      std::vector<std::uint64_t> sums(seq + 1);  // of the first keys
      for (std::uint32_t j = 0; j < seq; ++j) {
        sums[j + 1] = sums[j] + number_of(content(rank.launch.epoch, j, head, false),
                                          content(rank.launch.epoch, j, head, true));
      }
      for (std::size_t row = 0; row < own.size(); ++row) {
        const std::uint64_t expected = sums[plan_.causal ? own[row] + 1 : seq];
        if (rank.out[row * plan_.head_pairs() + head] != expected)
          return fmt::format("row {} of the sequence, head {} is wrong", own[row], head);
      }
    }
    return {};
  }

  void forge_releases() {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      const World world{options_.nodes, options_.locals, rank / options_.locals,
                        rank % options_.locals};
      const GatherSchedule schedule(plan_.gather, world);
      simulation_.forge_flag(rank, schedule.release(world.node));
    }
  }

  RingOptions options_;
  RingAttentionPlan plan_;
  std::vector<RingRank> ranks_;
  std::vector<std::uint64_t> network_bytes_;  ///< by rank, of all launches so far
  std::pair<int, int> overlapped_[2] = {};
  Simulation simulation_;
};

}  // namespace mk::kernels::testing
