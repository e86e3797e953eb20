#include "tests/kernels/combine/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "client/tools/numeric/combine_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "tests/kernels/support/run_ranks.h"

namespace mk::kernels::testing {
namespace {

/// A NaN in bf16 and in f16: what outputs hold before a launch.
constexpr std::uint16_t kPoison = 0x7fff;

}  // namespace

CombineJob::CombineJob(const CombineJobOptions& options) : RoutedJob(options) {
  const CombineShape& shape = options.shape;
  for (std::uint32_t expert = 0; expert < shape.experts; ++expert)
    by_expert_.push_back(weights_of(expert));
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    const ShardRange experts = shard_of(shape.experts, size(), rank);
    std::vector<std::uint16_t>& all = weights_.emplace_back();
    for (std::uint32_t expert = experts.first; expert < experts.first + experts.count; ++expert)
      append_weights(by_expert_[expert], shape.features, shape.hidden, all);
  }
}

std::vector<std::uint16_t> CombineJob::weights_of(std::uint32_t expert) const {
  const CombineShape& shape = options_.shape;
  std::vector<std::uint16_t> values(std::size_t{shape.features} * shape.hidden);
  tools::RandomMatrix{options_.seed, 1u << 20 | expert, shape.hidden, type()}.rows(
      0, shape.features, values.data());
  return values;
}

std::vector<CombineRankInput> CombineJob::inputs(const CombineLaunchCase& launch) const {
  const CombineShape& shape = options_.shape;
  std::mt19937_64 random = random_of(launch);
  const auto routing = routing_of(launch, random);
  std::vector<CombineRankInput> all(size());
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    CombineRankInput& input = all[rank];
    input.routing = routing[rank];
    input.handle = draw_handle(routing, shape.experts, shape.top_k, rank, random);
    input.y.resize(input.handle.rows.size() * shape.features);
    tools::RandomMatrix{options_.seed + launch.inputs, rank, shape.features, type()}.rows(
        0, input.handle.rows.size(), input.y.data());
    input.residual.resize(std::size_t{input.routing.tokens} * shape.hidden);
    tools::RandomMatrix{options_.seed + launch.inputs, 1000 + rank, shape.hidden, type()}.rows(
        0, input.routing.tokens, input.residual.data());
    for (std::size_t row = 0; launch.nan && row < input.handle.rows.size(); ++row) {
      const MoeRow& from = input.handle.rows[row];
      if (from.token == 0) input.y[row * shape.features + from.slot] = kPoison;
    }
  }
  return all;
}

CombineRankResult CombineJob::launch(std::uint32_t rank, const CombineRankInput& input,
                                     bool residual, Mode mode) {
  CombineRankResult result;
  result.out.assign(std::size_t{input.routing.tokens} * options_.shape.hidden, kPoison);
  result.stats = ops_[rank]->launch(
      {input.y.data(), input.handle.rows, input.handle.offsets, weights_[rank].data(),
       input.routing.ids.data(), input.routing.tokens, residual ? input.residual.data() : nullptr},
      result.out.data(), mode);
  return result;
}

std::vector<std::vector<CombineRankResult>> CombineJob::run(
    const std::vector<CombineLaunchCase>& launches, std::chrono::microseconds pause_max) {
  std::vector<std::vector<CombineRankResult>> results(launches.size(),
                                                      std::vector<CombineRankResult>(size()));
  std::vector<std::vector<CombineRankInput>> all;
  for (const CombineLaunchCase& one : launches) all.push_back(inputs(one));
  run_ranks(size(), launches.size(), options_.seed, pause_max,
            [&](std::uint32_t rank, std::size_t i) {
              results[i][rank] = launch(rank, all[i][rank], launches[i].residual, launches[i].mode);
              return bool{results[i][rank].stats};
            });
  return results;
}

std::string CombineJob::check(const CombineLaunchCase& launch,
                              const std::vector<CombineRankInput>& inputs,
                              const std::vector<CombineRankResult>& results) {
  const CombineShape& shape = options_.shape;
  // Where each token's rows are, by rank, token and slot.
  std::vector<std::vector<std::vector<double>>> rows(size());
  for (std::uint32_t rank = 0; rank < size(); ++rank)
    rows[rank].resize(inputs[rank].routing.ids.size());
  for (const CombineRankInput& input : inputs) {
    for (std::size_t i = 0; i < input.handle.rows.size(); ++i) {
      const MoeRow& row = input.handle.rows[i];
      std::vector<double>& values = rows[row.rank][std::size_t{row.token} * shape.top_k + row.slot];
      for (std::size_t c = 0; c < shape.features; ++c)
        values.push_back(tools::to_float(type(), input.y[i * shape.features + c]));
    }
  }
  tools::CombineReference reference({options_.nodes, shape.top_k, shape.hidden, shape.features,
                                     type(), shape.partials == CombinePartials::kF32});
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    if (!results[rank].stats) return results[rank].stats.error().message;
    const RankRouting& routing = inputs[rank].routing;
    tools::Comparison comparison;
    for (std::size_t token = 0; token < routing.tokens; ++token) {
      std::vector<tools::CombineTerm> terms;
      for (std::size_t i = token * shape.top_k; i < (token + 1) * shape.top_k; ++i) {
        if (routing.ids[i] < 0) continue;
        terms.push_back({rows[rank][i],
                         {},
                         by_expert_[static_cast<std::size_t>(routing.ids[i])].data(),
                         routing.weights[i]});
      }
      const std::size_t at = token * shape.hidden;
      reference.compare(terms, launch.residual ? inputs[rank].residual.data() + at : nullptr,
                        results[rank].out.data() + at, at, &comparison);
    }
    if (comparison.wrong != 0) {
      return fmt::format("rank {}: {} elements wrong, first [{}][{}]; worst error {} x bound", rank,
                         comparison.wrong, comparison.first_wrong / shape.hidden,
                         comparison.first_wrong % shape.hidden, comparison.worst_ratio);
    }
    worst_ = std::max(worst_, comparison.worst_ratio);
  }
  return {};
}

}  // namespace mk::kernels::testing
