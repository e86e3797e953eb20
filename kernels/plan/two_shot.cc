#include "kernels/plan/two_shot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "kernels/comm/tile_grid.h"
#include "kernels/ops/gemm_ar/node_pieces.h"
#include "kernels/plan/model.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {
namespace {

double us(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * 1e3) : 0; }

/// One node's rank. Times grow: events are taken in their order.
class Exchanged {
 public:
  Exchanged(const Problem& problem, const Machine& machine, const Candidate& candidate,
            const Timeline& time)
      : machine_(machine), nodes_(problem.nodes), locals_(problem.locals) {
    const TileGrid grid(problem.shape.m, problem.shape.n, candidate.tiling.tile_m,
                        candidate.tiling.tile_n, problem.result.epilogue.column_step());
    const double elements = double{1} * grid.tile_rows() * grid.tile_cols();
    tile_bytes_ = elements * bytes_of(problem.result.partials);
    result_bytes_ = elements * kElementBytes *
                    problem.result.epilogue.columns_of(grid.tile_cols()) / grid.tile_cols();
    owned_ = std::ceil(grid.tiles() / locals_);
    const auto numbers = order_numbers(problem, machine.kind, candidate);
    if (numbers) per_chunk_ = numbers->chunk_tiles;
    rounds_ = static_cast<std::size_t>(std::max(1.0, std::ceil(owned_ / (per_chunk_ * nodes_))));
    product_ = std::max(time.compute, time.local);
    sum_sent_gb_s_ = candidate.stream_warpgroups * machine.sum_sent_ar_gb_s;
    sum_come_gb_s_ = candidate.receive_warpgroups * machine.sum_come_gb_s;
  }

  double end() {
    sums_come_.assign(rounds_, HUGE_VAL);
    own_reduced_.assign(rounds_, 0);
    handed_out_.assign(rounds_, {});
    compute();
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      if (event.finished) {
        send_finished(event);
      } else {
        send_sums(event);
      }
      receive();
    }
    return std::max({received_, rail_, product_});
  }

 private:
  /// Something is complete, and goes to the rail.
  struct Event {
    double at = 0;
    std::size_t round = 0;
    bool finished = false;
    bool last = false;  ///< sums: the round's last ones to leave
    bool operator>(const Event& other) const {
      return std::pair(at, round) > std::pair(other.at, other.round);
    }
  };

  double chunk_tiles(std::size_t round) const {
    const double before = static_cast<double>(round) * per_chunk_ * nodes_;
    return std::clamp(std::ceil((owned_ - before) / nodes_), 0.0, per_chunk_);
  }
  /// When each chunk is computed, and added up over the local ranks.
  void compute() {
    double reduced = 0;
    double tiles = 0;
    for (std::size_t round = 0; round < rounds_; ++round) {
      const double chunk = chunk_tiles(round);
      for (double position = 0; position < nodes_; ++position) {
        tiles += chunk;
        const double computed = product_ * std::min(1.0, tiles / owned_);
        reduced = std::max(reduced, computed);
        if (locals_ > 1)
          reduced = moved(reduced, chunk * tile_bytes_ * locals_, sum_sent_gb_s_,
                          machine_.sums_link_gb_s);
        if (position + 1 < nodes_) {
          events_.push({reduced, round, false, position + 2 == nodes_});
        } else {
          own_reduced_[round] = reduced;
        }
      }
    }
  }
  double rail(double now, double bytes) {
    rail_ = std::max(rail_, now) + us(bytes, machine_.network_gb_s) + machine_.network_command_us;
    return rail_;
  }
  void send_sums(const Event& event) {
    const double sent = rail(event.at, chunk_tiles(event.round) * tile_bytes_);
    if (event.last)
      sums_come_[event.round] =
          std::max(sent + machine_.network_latency_us, own_reduced_[event.round]);
  }
  void send_finished(const Event& event) {
    std::vector<double>& come = handed_out_[event.round];
    come.push_back(event.at);  // its own
    for (double peer = 1; peer < nodes_; ++peer) {
      come.push_back(rail(event.at, chunk_tiles(event.round) * result_bytes_) +
                     machine_.network_latency_us);
    }
  }
  /// The receive role's steps, in their order, as far as it is known when they can begin.
  void receive() {
    const FinishingOrder order{static_cast<std::uint32_t>(nodes_),
                               static_cast<std::uint32_t>(rounds_)};
    for (; position_ < order.steps(); ++position_) {
      const FinishingOrder::Step step = order.at(position_);
      const double chunk = chunk_tiles(step.round);
      if (step.sums) {
        if (sums_come_[step.round] == HUGE_VAL) return;
        work(sums_come_[step.round], chunk * tile_bytes_ * (nodes_ - 1));
        events_.push({received_, step.round, true, false});
      } else {
        if (handed_out_[step.round].empty()) return;
        work(handed_out_[step.round][step.turn],
             chunk * result_bytes_ * std::max(1.0, locals_ - 1));
      }
    }
  }
  void work(double come, double bytes) {
    received_ = moved(std::max(received_, come), bytes, sum_come_gb_s_, machine_.sums_link_gb_s);
  }
  /// When so many bytes are through: at one rate beside the product, at another one after it.
  double moved(double begin, double bytes, double beside_gb_s, double alone_gb_s) const {
    const double beside = std::max(0.0, product_ - begin);
    const double all_beside = us(bytes, beside_gb_s);
    if (all_beside <= beside) return begin + all_beside;
    return begin + beside + us(bytes - beside * beside_gb_s * 1e3, alone_gb_s);
  }

  const Machine& machine_;
  const double nodes_;
  const double locals_;
  double tile_bytes_ = 0, result_bytes_ = 0;  ///< of partial sums, of C
  double owned_ = 0, per_chunk_ = 1;
  std::size_t rounds_ = 1;
  double product_ = 0;
  double sum_sent_gb_s_ = 0, sum_come_gb_s_ = 0;

  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<double> sums_come_, own_reduced_;  ///< by round
  std::vector<std::vector<double>> handed_out_;  ///< by round: when its finished chunks are here
  double rail_ = 0, received_ = 0;               ///< until when each is taken
  std::uint32_t position_ = 0;                   ///< of the receive role's next step
};

}  // namespace

double two_shot_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                   const Timeline& time) {
  return Exchanged(problem, machine, candidate, time).end();
}

}  // namespace mk::kernels::plan
