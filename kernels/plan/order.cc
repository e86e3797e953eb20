#include "kernels/plan/order.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "kernels/comm/chunk_sender.h"
#include "kernels/comm/shard.h"
#include "kernels/cuda/core/attention_items.h"
#include "kernels/gather/schedule.h"
#include "kernels/ops/moe/routing_shape.h"
#include "kernels/ops/moe/schedule.h"
#include "kernels/ops/moe/spec.h"
#include "kernels/ops/ring/spec.h"
#include "kernels/plan/combine_order.h"
#include "kernels/plan/drawn_rows.h"
#include "kernels/plan/experts.h"
#include "kernels/plan/operator_work.h"

namespace mk::kernels::plan {
namespace {

double us(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * 1e3) : 0; }

/// Shards that go round the ring in chunks, each as soon as it is there and the rail is free. The
/// thread that sends commits what is there of a run, at most so many chunks at once, and takes its
/// time for it beside the rail.
class RingOfShards {
 public:
  struct Shard {
    double bytes = 0;
    double chunks = 1;
  };
  /// `commit`: what one takes, in us.
  RingOfShards(const Machine& machine, const Shard& shard, const ChunkOrder& order,
               double commit = 0)
      : latency_(machine.network_latency_us),
        header_(machine.network_command_us),
        chunk_(us(shard.bytes / shard.chunks, machine.network_gb_s) + machine.network_command_us),
        order_(order),
        chunks_(static_cast<std::size_t>(std::max(1.0, shard.chunks))),
        commit_(commit) {}
  std::size_t chunks() const { return chunks_; }
  /// `ready`: when this rank's own chunks are ready for the network.
  void go_round(const std::vector<double>& ready) {
    come_.assign(order_.shards + std::size_t{1}, ready);
    std::vector<double> headers(come_.size(), 0);
    // Chunk 0 is the header.
    const auto here = [&](std::size_t shard, std::size_t chunk) -> double& {
      return chunk == 0 ? headers[shard] : come_[shard][chunk - 1];
    };
    for_each_range([&](std::size_t shard, const ChunkRange& run) {
      for (std::size_t next = run.begin; next < run.end;) {
        // A header goes with the first rows, if they are of its run.
        std::size_t end = next == 0 && run.end > 1 ? 2 : next + 1;
        const double begin = std::max(sender_, here(shard, end - 1));
        while (end < run.end && end - next < kCommandsAtOnce && here(shard, end) <= begin) ++end;
        sender_ = begin + commit_;
        for (; next < end; ++next) {
          free_ = std::max(free_, begin) + (next == 0 ? header_ : chunk_);
          here(shard + 1, next) = free_ + latency_;
        }
      }
    });
  }
  /// `one(shard, begin, end)` of chunks without their header, as this rank sends them.
  template <class One>
  void for_each_run(One&& one) const {
    for_each_range([&](std::size_t shard, const ChunkRange& run) {
      one(shard, std::max(run.begin, 1u) - 1, run.end - 1);
    });
  }
  /// By hops: when the chunks have come over them.
  const std::vector<std::vector<double>>& come() const { return come_; }
  /// When all that was given to the rail has left.
  double sent() const { return free_; }

 private:
  template <class One>
  void for_each_range(One&& one) const {
    const auto chunks_of = [this](std::uint32_t) {
      return static_cast<std::uint32_t>(chunks_ + 1);
    };
    order_.for_each_run(chunks_of, [&](std::uint32_t shard, const ChunkRange& run) {
      one(shard, run);
      return true;
    });
  }

  double latency_;
  double header_;
  double chunk_;
  ChunkOrder order_;
  std::size_t chunks_;
  double commit_;
  double sender_ = 0;  ///< when it has done its last commit
  double free_ = 0;    ///< when the rail is
  std::vector<std::vector<double>> come_;
};

/// When the chunks of shards are on all of a node's ranks.
struct Brought {
  std::vector<double> own;                  ///< of the node's own
  std::vector<std::vector<double>> passed;  ///< by hops, from one on
};

/// Chunks that workers bring side by side, of each kind.
constexpr std::size_t kAtOnce = 4;

/// Pieces of which so many are done side by side that all end together.
constexpr double kTogether = 1e6;

/// When chunks of `pieces` pieces are done, of which so many go on side by side; `us`: all of them.
std::vector<double> done_side_by_side(std::size_t chunks, double us, double pieces) {
  const double each = us / static_cast<double>(chunks);
  std::vector<double> done(chunks);
  for (std::size_t i = 0; i < chunks; ++i) {
    const std::size_t before = i / kAtOnce * kAtOnce;
    const auto beside = static_cast<double>(std::min(kAtOnce, chunks - before));
    const auto turn = static_cast<double>(i - before + 1);
    done[i] = each * (static_cast<double>(before) + ((pieces - 1) * beside + turn) / pieces);
  }
  return done;
}

/// One memory moves a rank's own chunks and, as they come, those that it passes on: of both kinds
/// one in turn while there are both. `share` and `pass` are what a shard of each takes it.
Brought brought_round(const Machine& machine, const RingOfShards::Shard& shard,
                      const ChunkOrder& order, double share, double pass, double pieces) {
  // When chunks leave depends on what came before, and that on when they left: it settles.
  constexpr int kRounds = 3;
  const auto chunks = static_cast<std::size_t>(std::max(1.0, shard.chunks));
  const double each_passed = pass / static_cast<double>(chunks);
  const std::vector<double> alone = done_side_by_side(chunks, share, pieces);
  Brought made;
  made.own = alone;
  for (int round = 0; round < kRounds && order.shards > 0; ++round) {
    RingOfShards ring(machine, shard, order, kCommitUs);
    ring.go_round(made.own);
    made.passed.assign(ring.come().begin() + 1, ring.come().end());
    if (pass <= 0) continue;
    // First asked, first served: each of its workers asks when it has done its last.
    double now = 0;
    std::size_t own = 0;
    std::vector<double> done(kAtOnce, 0);  // of what is passed on, in turn
    std::size_t next = 0;
    const auto serve_own_until = [&](double asked) {
      for (; own < chunks && (own < kAtOnce ? 0 : made.own[own - kAtOnce]) <= asked; ++own) {
        now += own == 0 ? alone[0] : alone[own] - alone[own - 1];
        made.own[own] = now;
      }
    };
    ring.for_each_run([&](std::size_t index, std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        double& chunk = made.passed[index][i];
        double& worker = done[next++ % kAtOnce];
        const double asked = std::max(chunk, worker);
        serve_own_until(asked);
        now = std::max(now, asked) + each_passed;
        worker = chunk = now;
      }
    });
    serve_own_until(HUGE_VAL);
  }
  return made;
}

/// Items of which so many are followed one by one, and looks for the chunks that they await. When
/// all keys are there the others only compute.
constexpr int kItemsFollowed = 1 << 16;
constexpr double kLooksFollowed = 1 << 21;

double ring_attention_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                         const LaunchWork& work, const Timeline& time,
                         const OrderNumbers& numbers) {
  const std::uint32_t ranks = problem.ranks();
  const std::uint32_t key_heads =
      problem.heads.key_heads != 0 ? problem.heads.key_heads : problem.shape.n;
  const std::uint32_t batch = std::max(1u, problem.heads.batch);
  const double pairs = double{1} * batch * key_heads;
  const std::uint32_t halves = problem.heads.causal ? 2 : 1;
  const std::uint32_t part = div_up(problem.shape.m, ranks * halves);
  const std::uint32_t tile = ring_tile_queries(problem.shape.k);
  const std::uint32_t tiles = div_up(part, tile) * halves;
  const double items = double{1} * tiles * problem.shape.n * batch;
  const double blocks = std::max(1u, candidate.compute_blocks);
  // For all rows of a head.
  const double rows_us = time.compute * blocks / (double{1} * problem.shape.n * batch);

  // The node's memory: a rank's own keys, then those that it passes on.
  const double targets = problem.locals - 1.0;
  const double own_part = problem.nodes > 1 ? targets + 2 : targets > 0 ? targets + 1 : 0;
  const double passed_part = targets > 0 ? (targets + 1) * (problem.nodes - 1.0) : 0;
  const double all_parts = std::max(1.0, own_part + passed_part);
  const double share = time.local * own_part / all_parts;
  const double pass =
      problem.nodes > 1 ? time.local * passed_part / all_parts / (problem.nodes - 1) : 0;

  // By hops: when its chunks are here, on all of the node's ranks.
  const double chunks = numbers.chunks;
  const double shard = work.network_bytes / std::max(1.0, problem.nodes - 1.0);
  const Brought keys =
      brought_round(machine, {shard, chunks}, {problem.nodes - 1, numbers.turn_chunks}, share, pass,
                    std::max(1.0, 2 * pairs / chunks));
  const auto at = [&](const std::vector<double>& chunks_here, double heads) {
    const double chunk = std::ceil(heads / pairs * static_cast<double>(chunks_here.size())) - 1;
    return chunks_here[static_cast<std::size_t>(std::max(0.0, chunk))];
  };

  // A free block takes the next item. Items go head by head, under a mask key head by key head, the
  // longest first.
  const bool causal = problem.heads.causal;
  const auto group = static_cast<int>(problem.shape.n / std::max(1u, key_heads));
  const auto of_head = static_cast<int>(tiles);
  const auto sections = cuda::HeadSections::of(
      static_cast<int>(batch * problem.shape.n), causal ? group : 1, of_head,
      causal ? cuda::HeadSections::kLastOfBlock * static_cast<int>(blocks) : 0);
  // Under a mask the first rank's items differ most: its first part sees its own keys alone, its
  // last part nearly all.
  struct Item {
    double own = 0;    ///< with its rank's keys, us
    double other = 0;  ///< with another rank's
  };
  const auto item_of = [&](int row) -> Item {
    if (!causal) {
      const double rows = std::min(1.0, (part - double{1} * row * tile) / tile);
      const double each = rows_us * rows * tile / part / ranks;
      return {each, each};
    }
    const double of_part = tiles / 2.0;
    const double half = row < of_part ? 0 : 1;
    const double first = (row - half * of_part) * tile;
    const double rows = std::min<double>(tile, part - first);
    const double of_keys = rows_us / 2 * rows / part / ranks;  // a part's, which all rows see
    return {of_keys * (half + (first + rows / 2) / part), of_keys * 2 * half};
  };
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  for (double block = 0; block < blocks; ++block) free.push(0);
  const double values = std::clamp(std::ceil(chunks / pairs / 2), 1.0, 8.0);
  // When all keys are here, and what is left to compute.
  double all_here = 0;
  const auto last_of = [&](const std::vector<double>& chunks_here) {
    for (const double chunk : chunks_here) all_here = std::max(all_here, chunk);
  };
  if (problem.locals > 1) last_of(keys.own);
  for (const auto& chunks_here : keys.passed) last_of(chunks_here);
  const auto us_of = [&](const Item& item) { return item.own + item.other * (ranks - 1); };
  double left = 0;
  for (int row = 0; row < of_head; ++row) left += us_of(item_of(row));
  left *= double{1} * problem.shape.n * batch;
  double looks = 0;
  double end = 0;
  for (int number = 0; number < items; ++number) {
    const double begin = free.top();
    if ((number >= kItemsFollowed && begin >= all_here) || looks > kLooksFollowed) {
      for (; !free.empty(); free.pop()) left += free.top();
      end = std::max({end, all_here, left / blocks});
      break;
    }
    const cuda::HeadSections::Place place = sections.place_of(number, of_head);
    const int head = place.first + (causal ? place.within % place.heads : place.within / of_head);
    const int row = causal ? of_head - 1 - place.within / place.heads : place.within % of_head;
    const int key_heads_begun = head / group + 1;
    const double heads = key_heads_begun;
    const Item item = item_of(row);
    left -= us_of(item);
    double now = begin + item.own;
    free.pop();
    // A head's keys come first, then its values, by which an item goes on.
    // By then those of the node's other ranks are there, too.
    const auto meet = [&](const std::vector<double>& chunks_here, double of_ranks) {
      if (item.other <= 0) return;
      for (double part_of = 1; part_of <= values; ++part_of)
        now = std::max(now, at(chunks_here, heads - 0.5 + 0.5 * part_of / values)) +
              item.other / values;
      now += item.other * (of_ranks - 1);
    };
    if (begin >= all_here) {
      now += item.other * (ranks - 1);
    } else {
      if (problem.locals > 1) meet(keys.own, targets);
      for (const auto& chunks_here : keys.passed) meet(chunks_here, problem.locals);
      looks += values * static_cast<double>(keys.passed.size() + 1);
    }
    free.push(now);
    end = std::max(end, now);
  }
  if (!keys.passed.empty()) end = std::max(end, keys.passed.back().back());
  return end;
}

/// A rank's compute blocks, of which a free one takes the next tile.
class ComputeBlocks {
 public:
  explicit ComputeBlocks(std::uint32_t blocks) {
    for (std::uint32_t i = 0; i < std::max(1u, blocks); ++i) free_.push(0);
  }
  std::size_t count() const { return free_.size(); }
  /// A tile that is ready then and takes so long.
  void take(double ready, double us) {
    const double end = std::max(free_.top(), ready) + us;
    free_.pop();
    free_.push(end);
    end_ = std::max(end_, end);
  }
  double end() const { return end_; }

 private:
  std::priority_queue<double, std::vector<double>, std::greater<>> free_;
  double end_ = 0;
};

/// A tile of one expert's rows.
struct RowsOfTile {
  const DrawnRow* begin = nullptr;
  const DrawnRow* end = nullptr;
  std::uint32_t key = 0;  ///< by which tiles are in order
  double rows() const { return static_cast<double>(end - begin); }
};

/// A rank's tiles as RoutingPlan cuts them, in its order.
std::vector<RowsOfTile> moe_tiles(const Problem& problem, const OrderNumbers& numbers,
                                  const std::vector<DrawnRows::OfExpert>& experts) {
  RoutingShape shape;
  shape.world = {problem.nodes, problem.locals, 0, 0};
  shape.tokens_max = tokens_of_rank(problem);
  shape.steps = moe_dispatch_cuda_way(problem.nodes).steps;
  const auto key_of = [&](const DrawnRow& row) {
    const std::uint32_t part = row.token / RoutingShape::kPartTokens;
    return row.hops * shape.steps + part * shape.steps / shape.parts_of_source();
  };
  std::vector<RowsOfTile> tiles;
  for (const DrawnRows::OfExpert& rows : experts) {
    const DrawnRow* const end = rows.data() + rows.size();
    for (const DrawnRow* row = rows.data(); row != end;) {
      RowsOfTile tile{row, row + std::min<std::ptrdiff_t>(end - row, numbers.tile_rows), 0};
      // It ends where rows over more hops begin, if it is half full there.
      for (const DrawnRow* at = row + numbers.tile_rows / 2; at < tile.end; ++at) {
        if (at == row || at->hops == (at - 1)->hops) continue;
        tile.end = at;
      }
      row = tile.end;
      tile.key = key_of(*(tile.end - 1));
      tiles.push_back(tile);
    }
  }
  std::ranges::stable_sort(tiles, {}, &RowsOfTile::key);
  return tiles;
}

double moe_dispatch_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                       const LaunchWork& work, const Timeline& time, const OrderNumbers& numbers) {
  const ExpertTerms terms = expert_terms(problem, machine, candidate);
  const double nodes = problem.nodes;
  const double table = double{kRoutingBytes} * problem.experts.top_k * tokens_of_rank(problem);
  // Tables: as tokens, but small.
  const ChunkOrder order{problem.nodes - 1, 0};
  RingOfShards tables(machine, {table, double{1} * numbers.table_chunks}, order);
  if (problem.nodes > 1) tables.go_round(std::vector<double>(tables.chunks(), 0));
  const double table_here = problem.nodes > 1 ? tables.come().back().back() : 0;
  // Rows are counted as tables come, and find their places when all are counted.
  const double counted = std::max(terms.before / 2, table_here + terms.before / 2 / nodes);
  const double planned = counted + terms.before / 2;
  // Tokens: no rank sends any before it has sent all tables.
  const double shard = work.network_bytes / std::max(1.0, nodes - 1) - table;
  RingOfShards tokens(machine, {shard, double{1} * numbers.chunks}, order);
  // One worker brings the table before its first chunk, so that chunk comes with the next ones.
  const std::vector<double> shared = done_side_by_side(numbers.chunks, terms.share, kTogether);
  std::vector<double> own = shared;
  for (double& chunk : own) chunk = std::max(chunk, tables.sent());
  tokens.go_round(own);
  const double pass = problem.nodes > 1 ? terms.passed / (nodes - 1) : 0;
  std::vector<std::vector<double>> here{shared};  // by hops
  double passed = 0;
  for (std::uint32_t hop = 1; hop < problem.nodes; ++hop) {
    here.push_back(tokens.come()[hop]);
    for (double& chunk : here.back())
      chunk = passed = std::max(passed, chunk) + pass / static_cast<double>(here.back().size());
  }
  const double tokens_each = tokens_of_rank(problem);
  const double rows = tokens_each * problem.experts.top_k;
  // When a rank's tiles are all computed.
  const auto computed = [&](const std::vector<DrawnRows::OfExpert>& experts) {
    ComputeBlocks blocks(candidate.compute_blocks);
    const double row_us =
        time.compute / rows / numbers.column_tiles * static_cast<double>(blocks.count());
    double packed = planned;
    for (const RowsOfTile& tile : moe_tiles(problem, numbers, experts)) {
      packed += terms.packed * tile.rows() / rows;
      for (const DrawnRow* row = tile.begin; row != tile.end; ++row) {
        const std::vector<double>& chunks = here[row->hops];
        const double chunk =
            std::ceil(static_cast<double>(chunks.size()) * (row->token + 1) / tokens_each) - 1;
        packed = std::max(packed, chunks[static_cast<std::size_t>(std::max(0.0, chunk))]);
      }
      for (std::uint32_t column = 0; column < numbers.column_tiles; ++column)
        blocks.take(packed, row_us * tile.rows());
    }
    return blocks.end();
  };
  double sum = 0;
  const std::vector<std::uint64_t> seeds = seeds_of_draws(problem);
  for (const std::uint64_t seed : seeds) {
    const DrawnRows drawn(problem, seed);
    double end = tokens.sent();
    for (std::uint32_t local = 0; local < problem.locals; ++local)
      end = std::max(end, computed(drawn.of_rank(local)));
    sum += end;
  }
  return sum / static_cast<double>(seeds.size());
}

}  // namespace

double ordered_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                  const LaunchWork& work, const Timeline& time) {
  const auto numbers = order_numbers(problem, machine.kind, candidate);
  if (!numbers) return 0;
  switch (problem.op) {
    case Op::kRing:
      return ring_attention_us(problem, machine, candidate, work, time, *numbers);
    case Op::kMoe:
      return moe_dispatch_us(problem, machine, candidate, work, time, *numbers);
    case Op::kCombine:
      return combine_us(problem, machine, candidate, time, *numbers);
    default:
      return 0;
  }
}

}  // namespace mk::kernels::plan
