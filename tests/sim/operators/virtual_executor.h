/// \file
/// The executor of every operator's roles, in virtual time: copies, sums and tiles take as long as
/// the machine says (costs.h), and move nothing. An operator's executor derives from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>

#include "kernels/comm/launch.h"
#include "kernels/comm/sum_job.h"
#include "kernels/comm/wait.h"
#include "kernels/gather/copy_job.h"
#include "kernels/gather/geometry.h"
#include "shm/flag.h"
#include "tests/sim/operators/costs.h"
#include "tests/sim/operators/virtual_threads.h"

namespace mk::sim {

/// A rank's threads share this besides the operator's own memory.
struct RankState {
  kernels::LocalWords local;
  /// The ranks that may wait for stores of this rank since its last switch.
  enum class Stored { kNothing, kForRank, kForNode };
  Stored stored = Stored::kNothing;
  std::uint32_t computing = 0;  ///< threads with tiles left
  std::uint32_t sharing = 0;    ///< threads that share this rank's rows
  std::uint32_t bringing = 0;   ///< those, and threads that pass others' rows on
  std::uint32_t running = 0;
  double end_us = 0;
  Server memory, tables, plan, share, pass_on, sum_sent, sum_come, link;
  std::map<kernels::Role, std::uint32_t> steps_taken;
  /// Parts done of a role's chunk.
  std::map<std::pair<kernels::Role, std::uint32_t>, std::uint32_t> parts_done;
};

class VirtualExecutor {
 public:
  VirtualExecutor(VirtualThreads& threads, RankState& rank, const Costs& costs, kernels::Role role)
      : threads_(&threads), rank_(&rank), costs_(&costs), role_(role) {}

  // --- comm/wait.h, comm/block.h ---

  std::uint64_t now_ns() const { return threads_->now_ns(); }
  bool pause(std::uint32_t) {
    threads_->wait();
    return true;
  }
  void stores_done() {
    before_ = rank_->stored;
    rank_->stored = RankState::Stored::kForNode;
  }
  void publish_within_rank(std::uint32_t* flag, std::uint32_t epoch) {
    rank_->stored = std::max(before_, RankState::Stored::kForRank);
    shm::flag_publish(flag, epoch);
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
  bool last_part(kernels::Role role, std::uint32_t chunk, std::uint32_t parts) {
    std::uint32_t& done = rank_->parts_done[{role, chunk}];
    if (++done != parts) return false;
    done = 0;
    return true;
  }

  // --- Arithmetic and copies ---

  /// This rank's rows (the share role), or others' (receive), to `job`'s targets.
  void copy(const kernels::CopyJob& job, bool to_own_slot = false) {
    const double bytes = double{1} * job.rows * job.row_bytes;
    if (job.rows == 1 && job.row_bytes <= kernels::kGatherHeaderBytes) copy_header(job);
    if (costs_->one_memory) {
      move(rank_->memory, bytes * (1 + job.target_count), costs_->share);
      return;
    }
    const double peers = job.target_count - (to_own_slot ? 1.0 : 0.0);
    if (to_own_slot && costs_->own_slot_gb_s > 0 && peers == 0)
      return move(rank_->memory, bytes, {costs_->own_slot_gb_s, costs_->own_slot_gb_s});
    const bool own = role_ == kernels::Role::kShare;
    move(own ? rank_->share : rank_->pass_on, bytes * peers, own ? costs_->share : costs_->pass_on);
  }

 protected:
  /// `share_of_all`: the tile's, of all that this rank multiplies. `store_us`: what `way` takes to
  /// bring the tile where it goes. The next one is computed meanwhile, and ends no sooner.
  void compute(double share_of_all, Server* way = nullptr, double store_us = 0) {
    double all_us = costs_->compute_us;
    if (costs_->gather_compute_us > 0 && rank_->bringing == 0) {
      all_us = costs_->gather_compute_us;
    } else if (costs_->shared_compute_us > 0 && rank_->sharing == 0) {
      all_us = costs_->shared_compute_us;
    }
    const double begin = threads_->now_us() > stored_us_ ? threads_->now_us() : computed_us_;
    threads_->sleep_until(begin + all_us * share_of_all * costs_->compute_threads +
                          costs_->store_beside_share * store_us);
    computed_us_ = threads_->now_us();
    if (way != nullptr) threads_->sleep_until(way->serve(computed_us_, store_us));
    stored_us_ = threads_->now_us();
  }
  /// Piece by piece, as the rate is another one once the rank has computed its tiles.
  void move(Server& server, double bytes, const LocalRate& rate) {
    while (bytes > 0) {
      const double gb_s = rank_->computing != 0 ? rate.beside : rate.alone;
      if (gb_s <= 0) return;
      const double piece =
          rate.beside == rate.alone ? bytes : std::min(bytes, kPieceUs * gb_s * 1e3);
      threads_->sleep_until(server.serve(threads_->now_us(), us_of(piece, gb_s)));
      bytes -= piece;
    }
  }
  static double us_of(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * 1e3) : 0; }

  VirtualThreads* threads_;
  RankState* rank_;
  const Costs* costs_;
  kernels::Role role_;

 private:
  static constexpr double kPieceUs = 4;

  /// Those who wait read headers.
  static void copy_header(const kernels::CopyJob& job) {
    for (std::uint32_t i = 0; i < job.target_count; ++i)
      std::memcpy(job.targets[i], job.source, job.row_bytes);
  }

  RankState::Stored before_ = RankState::Stored::kNothing;
  std::uint32_t first_seen_ = 0;
  double computed_us_ = 0;  ///< when the last tile was
  double stored_us_ = 0;    ///< and when it was where it goes
};

}  // namespace mk::sim
