#include "kernels/plan/combine_order.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

#include "kernels/comm/shard.h"
#include "kernels/ops/combine/schedule.h"
#include "kernels/ops/combine/spec.h"
#include "kernels/plan/drawn_rows.h"
#include "kernels/plan/experts.h"

namespace mk::kernels::plan {
namespace {

double us(double bytes, double gb_s) { return gb_s > 0 ? bytes / (gb_s * 1e3) : 0; }

/// Tokens that a worker sums for one wait, and workers that have asked at a time.
constexpr std::uint32_t kTokensAtOnce = 8;
constexpr std::uint32_t kAtOnce = 4;

struct Rates {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t tokens = 0;  ///< of a rank
  std::uint32_t steps = 1;
  double element_us = 0;        ///< of a product row, on one SM
  double element_store_us = 0;  ///< of one, over NVLink
  double row_us = 0;            ///< of a row that sums read or write
  double sum_bytes = 0;         ///< of a token's sum for another node
};

/// Tokens of one node's rank, as the owner of their rows on a node sees them.
struct TokensHere {
  explicit TokensHere(std::uint32_t tokens) : ready(tokens, 0), rows(tokens, 0) {}
  std::vector<double> ready;        ///< when the token's rows are computed
  std::vector<std::uint32_t> rows;  ///< how many it has
};

/// Chunks of sums, which workers take in turn from one memory: who asks first is served first.
class Summing {
 public:
  explicit Summing(double begin) : now_(begin) {}
  struct Token {
    double ready = 0;
    double us = 0;
  };
  using Chunk = std::vector<Token>;
  /// Each chunk is summed then.
  std::vector<double> sum(const std::vector<Chunk>& chunks) {
    std::vector<double> done(chunks.size(), 0);
    std::priority_queue<Worker, std::vector<Worker>, std::greater<>> workers;
    const auto ask = [&](Worker worker, double from) {
      const Chunk& chunk = chunks[worker.chunk];
      worker.asked = from;
      if (worker.token % kTokensAtOnce == 0) {
        const std::size_t end = std::min<std::size_t>(chunk.size(), worker.token + kTokensAtOnce);
        for (std::size_t i = worker.token; i < end; ++i)
          worker.asked = std::max(worker.asked, chunk[i].ready);
      }
      workers.push(worker);
    };
    for (std::size_t i = 0; i < std::min<std::size_t>(kAtOnce, chunks.size()); ++i)
      ask({0, i, 0}, 0);
    while (!workers.empty()) {
      Worker worker = workers.top();
      workers.pop();
      const Chunk& chunk = chunks[worker.chunk];
      if (worker.token < chunk.size()) now_ = std::max(now_, worker.asked) + chunk[worker.token].us;
      if (++worker.token < chunk.size()) {
        ask(worker, now_);
        continue;
      }
      done[worker.chunk] = now_;
      worker = {0, worker.chunk + kAtOnce, 0};
      if (worker.chunk < chunks.size()) ask(worker, now_);
    }
    return done;
  }
  double now() const { return now_; }

 private:
  struct Worker {
    double asked = 0;
    std::size_t chunk = 0;
    std::size_t token = 0;
    bool operator>(const Worker& other) const {
      return std::pair(asked, chunk) > std::pair(other.asked, other.chunk);
    }
  };
  double now_;
};

/// A launch of one node's ranks, with drawn rows.
class DrawnLaunch {
 public:
  DrawnLaunch(const Rates& rates, const OrderNumbers& numbers, const Problem& problem,
              const Machine& machine, std::uint32_t blocks, std::uint64_t seed)
      : rates_(rates),
        numbers_(numbers),
        columns_(problem.shape.n),
        machine_(machine),
        blocks_(std::max(1u, blocks)),
        rows_(problem, seed),
        here_(std::size_t{rates.locals} * rates.nodes, TokensHere(rates.tokens)),
        left_(rates.nodes == 1 ? std::size_t{rates.locals} * rates.tokens : 0, kLatenesses) {}

  double end() {
    double end = 0;
    for (std::uint32_t local = 0; local < rates_.locals; ++local)
      end = std::max(end, compute(local));
    for (std::uint32_t local = 0; local < rates_.locals; ++local) end = std::max(end, sum(local));
    return end;
  }

 private:
  struct Tile {
    const DrawnRow* begin = nullptr;
    const DrawnRow* end = nullptr;
    std::uint32_t urgency = 0;
  };
  TokensHere& here(std::uint32_t rail, std::uint32_t hops) {
    return here_[std::size_t{rail} * rates_.nodes + hops];
  }
  /// As RowIndex::urgency_of has it.
  std::uint32_t urgency_of(const DrawnRow& row) const {
    const std::uint64_t step = std::uint64_t{row.token} * rates_.steps / rates_.tokens;
    return (rates_.nodes - 1 - row.hops) * rates_.steps + static_cast<std::uint32_t>(step);
  }
  /// As RowIndex cuts them, in the order of its arrange().
  std::vector<Tile> tiles_of(std::uint32_t local) const {
    std::vector<Tile> tiles;
    for (const DrawnRows::OfExpert& rows : rows_.of_rank(local)) {
      for (std::size_t at = 0; at < rows.size(); at += numbers_.tile_rows) {
        const std::size_t end = std::min<std::size_t>(rows.size(), at + numbers_.tile_rows);
        Tile tile{rows.data() + at, rows.data() + end, rates_.nodes * rates_.steps};
        for (const DrawnRow* row = tile.begin; row != tile.end; ++row)
          tile.urgency = std::min(tile.urgency, urgency_of(*row));
        tiles.push_back(tile);
      }
    }
    std::ranges::stable_sort(tiles, {}, &Tile::urgency);
    return tiles;
  }
  /// When all of the rank's tiles are stored. An SM stores one while it computes the next.
  double compute(std::uint32_t local) {
    const std::vector<Tile> tiles = tiles_of(local);
    struct Block {
      double computed = 0;  ///< its tile
      std::size_t part = 0;
      bool operator>(const Block& other) const {
        return std::pair(computed, part) > std::pair(other.computed, other.part);
      }
    };
    std::priority_queue<Block, std::vector<Block>, std::greater<>> blocks;
    const std::size_t parts = tiles.size() * numbers_.column_tiles;
    const auto elements_of = [&](std::size_t part) {
      const auto column =
          static_cast<std::uint32_t>(part % numbers_.column_tiles * numbers_.tile_columns);
      const Tile& tile = tiles[part / numbers_.column_tiles];
      return static_cast<double>(tile.end - tile.begin) *
             std::min(numbers_.tile_columns, columns_ - column);
    };
    for (std::size_t part = 0; part < std::min<std::size_t>(parts, blocks_); ++part)
      blocks.push({elements_of(part) * rates_.element_us, part});
    std::vector<double> stored(tiles.size(), 0);
    double link = 0;
    while (!blocks.empty()) {
      const Block block = blocks.top();
      blocks.pop();
      link = std::max(link, block.computed) + elements_of(block.part) * rates_.element_store_us;
      double& its = stored[block.part / numbers_.column_tiles];
      its = std::max(its, link);
      const std::size_t next = block.part + blocks_;
      if (next < parts)
        blocks.push({std::max(block.computed + elements_of(next) * rates_.element_us, link), next});
    }
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      // Numbers are in this order, where lateness is asked for.
      const auto left = static_cast<std::uint32_t>(tiles.size() - i);
      for (const DrawnRow* row = tiles[i].begin; row != tiles[i].end; ++row) {
        TokensHere& tokens = here(row->source, row->hops);
        tokens.ready[row->token] = std::max(tokens.ready[row->token], stored[i]);
        ++tokens.rows[row->token];
        if (left_.empty()) continue;
        std::uint32_t& late = left_[std::size_t{row->source} * rates_.tokens + row->token];
        std::uint32_t its_late = 0;
        while (its_late + 1 < kLatenesses && left <= tiles.size() >> (its_late + 1)) ++its_late;
        late = late == kLatenesses ? its_late : std::max(late, its_late);
      }
    }
    return link;
  }
  /// In the order in which a rank sums its own tokens (lateness.h).
  std::vector<std::uint32_t> own_order(std::uint32_t local) const {
    std::vector<std::uint32_t> order(rates_.tokens);
    std::iota(order.begin(), order.end(), 0);
    if (left_.empty()) return order;
    const std::uint32_t* const late = left_.data() + std::size_t{local} * rates_.tokens;
    std::ranges::stable_sort(order, {}, [late](std::uint32_t token) {
      return late[token] == kLatenesses ? 0 : late[token];
    });
    return order;
  }
  /// The rank has all sums then.
  double sum(std::uint32_t local) {
    // For other nodes: those of the next one first, whose tokens come over most hops.
    std::vector<Summing::Chunk> chunks;
    std::vector<std::size_t> first{0};  // chunk of each position
    std::vector<std::vector<std::uint32_t>> chunk_of(rates_.nodes);
    for (std::uint32_t hops = rates_.nodes - 1; hops > 0; --hops) {
      const TokensHere& tokens = here(local, hops);
      chunk_of[hops].resize(rates_.tokens);
      std::uint32_t listed = 0;
      for (std::uint32_t token = 0; token < rates_.tokens; ++token) {
        if (tokens.rows[token] == 0) continue;
        if (listed++ % numbers_.chunk_tokens == 0) chunks.emplace_back();
        chunk_of[hops][token] = static_cast<std::uint32_t>(chunks.size() - 1);
        // Read and written, and read again by the network.
        chunks.back().push_back({tokens.ready[token], (tokens.rows[token] + 2) * rates_.row_us});
      }
      first.push_back(chunks.size());
    }
    Summing memory(0);
    const std::vector<double> reduced = memory.sum(chunks);
    // A header goes in front of each node's. Nodes are alike: what leaves here comes as much later.
    std::vector<double> come(chunks.size(), 0);
    double rail = 0;
    double headers = 0;
    for (std::size_t position = 0; position + 1 < first.size(); ++position) {
      rail += machine_.network_command_us;
      headers = rail + machine_.network_latency_us;
      for (std::size_t chunk = first[position]; chunk < first[position + 1]; ++chunk) {
        const double bytes = static_cast<double>(chunks[chunk].size()) * rates_.sum_bytes;
        rail = std::max(rail, reduced[chunk]) + us(bytes, machine_.network_gb_s) +
               machine_.network_command_us;
        come[chunk] = rail + machine_.network_latency_us;
      }
    }
    const TokensHere& own = here(local, 0);
    std::vector<Summing::Chunk> runs;
    for (const std::uint32_t token : own_order(local)) {
      if (runs.empty() || runs.back().size() == kTokensAtOnce) runs.emplace_back();
      Summing::Token sum{std::max(headers, own.ready[token]), own.rows[token] + 1.0};
      for (std::uint32_t hops = 1; hops < rates_.nodes; ++hops) {
        if (here(local, hops).rows[token] == 0) continue;
        sum.ready = std::max(sum.ready, come[chunk_of[hops][token]]);
        ++sum.us;
      }
      sum.us *= rates_.row_us;
      runs.back().push_back(sum);
    }
    memory.sum(runs);
    return std::max(memory.now(), rates_.nodes > 1 ? rail + machine_.network_latency_us : 0);
  }

  const Rates& rates_;
  const OrderNumbers& numbers_;
  const std::uint32_t columns_;
  const Machine& machine_;
  const std::uint32_t blocks_;
  const DrawnRows rows_;
  std::vector<TokensHere> here_;     ///< [rail][hops]
  std::vector<std::uint32_t> left_;  ///< [local][token]: lateness, of one node alone
};

}  // namespace

double combine_us(const Problem& problem, const Machine& machine, const Candidate& candidate,
                  const Timeline& time, const OrderNumbers& numbers) {
  const ExpertTerms terms = expert_terms(problem, machine, candidate);
  const double others = problem.locals - 1.0;
  const double elements =
      double{1} * tokens_of_rank(problem) * problem.experts.top_k * problem.shape.n;
  const double partial = bytes_of(problem.result.partials);
  Rates rates;
  rates.nodes = problem.nodes;
  rates.locals = problem.locals;
  rates.tokens = tokens_of_rank(problem);
  rates.steps = combine_cuda_steps(problem.nodes);
  rates.element_us = time.compute * std::max(1u, candidate.compute_blocks) / elements;
  rates.element_store_us = us(partial * others / problem.locals, machine.link_gb_s);
  rates.sum_bytes = problem.shape.n * partial;
  // On one node most sums come when the product is done, and its SMs make them.
  rates.row_us = us(rates.sum_bytes, problem.nodes > 1 ? terms.sum_gb_s : machine.hbm_gb_s);
  double sum = 0;
  const std::vector<std::uint64_t> seeds = seeds_of_draws(problem);
  for (const std::uint64_t seed : seeds)
    sum += DrawnLaunch(rates, numbers, problem, machine, candidate.compute_blocks, seed).end();
  return sum / static_cast<double>(seeds.size());
}

}  // namespace mk::kernels::plan
