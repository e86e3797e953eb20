#include "tests/kernels/moe/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "client/tools/numeric/random_matrix.h"
#include "tests/kernels/support/run_ranks.h"

namespace mk::kernels::testing {
namespace {

/// A NaN in bf16 and in f16: what outputs hold before a launch.
constexpr std::uint16_t kPoison = 0x7fff;

}  // namespace

MoeJob::MoeJob(const MoeJobOptions& options) : RoutedJob(options) {
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    weights_.push_back(weights_at(rank));
    const ShardRange experts = shard_of(options.shape.experts, size(), rank);
    std::vector<std::uint16_t>& biases = biases_.emplace_back();
    for (std::uint32_t expert = experts.first; expert < experts.first + experts.count; ++expert) {
      const std::vector<std::uint16_t> one = bias_of(expert);
      biases.insert(biases.end(), one.begin(), one.end());
    }
  }
}

std::vector<std::uint16_t> MoeJob::weights_of(std::uint32_t expert) const {
  const MoeDispatchShape& shape = options_.shape;
  std::vector<std::uint16_t> values(std::size_t{shape.hidden} * shape.weight_columns());
  tools::RandomMatrix{options_.seed, 1u << 20 | expert, shape.weight_columns(), type()}.rows(
      0, shape.hidden, values.data());
  return values;
}

std::vector<std::uint16_t> MoeJob::weights_at(std::uint32_t rank) const {
  const MoeDispatchShape& shape = options_.shape;
  const ShardRange experts = shard_of(shape.experts, size(), rank);
  std::vector<std::uint16_t> all;
  for (std::uint32_t expert = experts.first; expert < experts.first + experts.count; ++expert)
    append_weights(weights_of(expert), shape.hidden, shape.weight_columns(), all);
  return all;
}

std::vector<std::uint16_t> MoeJob::bias_of(std::uint32_t expert) const {
  const std::uint32_t columns = options_.shape.weight_columns();
  std::vector<std::uint16_t> values(options_.shape.bias ? columns : 0);
  if (options_.shape.bias)
    tools::RandomMatrix{options_.seed, 1u << 21 | expert, columns, type()}.rows(0, 1,
                                                                                values.data());
  return values;
}

std::vector<tools::MoeSource> MoeJob::sources(const MoeLaunch& launch) const {
  const MoeDispatchShape& shape = options_.shape;
  std::mt19937_64 random = random_of(launch);
  const auto routing = routing_of(launch, random);
  std::vector<tools::MoeSource> sources;
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    tools::MoeSource source{routing[rank].tokens, routing[rank].ids, routing[rank].weights, {}};
    source.values.resize(source.tokens * shape.hidden);
    tools::RandomMatrix{options_.seed + launch.inputs, rank, shape.hidden, type()}.rows(
        0, source.tokens, source.values.data());
    for (std::uint64_t token = 0; token < source.tokens; ++token) {
      const bool unused = launch.unused != MoeLaunch::Unused::kAsDrawn && token % 3 == 0;
      const bool special = unused && launch.unused == MoeLaunch::Unused::kSpecial;
      for (std::uint64_t slot = token * shape.top_k; slot < (token + 1) * shape.top_k; ++slot) {
        if (unused) source.ids[slot] = -1;
        if (special) source.weights[slot] = std::nanf("");
      }
      if (!special && !launch.all_special) continue;
      for (std::uint64_t i = 0; i < shape.hidden; ++i) {
        const float value = i % 3 == 0 ? std::nanf("") : i % 3 == 1 ? HUGE_VALF : -HUGE_VALF;
        source.values[token * shape.hidden + i] = tools::from_float(type(), value);
      }
    }
    sources.push_back(std::move(source));
  }
  return sources;
}

tools::MoeReference MoeJob::reference(std::uint32_t rank,
                                      const std::vector<tools::MoeSource>& sources) const {
  const MoeDispatchShape& shape = options_.shape;
  return {{options_.nodes, options_.locals, shape.experts, shape.top_k, shape.hidden,
           shape.features, type(), static_cast<mk::MoeEpilogue>(shape.epilogue)},
          rank,
          sources};
}

MoeRankResult MoeJob::launch(std::uint32_t rank, const MoeLaunch& launch, std::uint32_t capacity) {
  const tools::MoeSource input = sources(launch)[rank];
  MoeRankResult result;
  result.y.assign(std::size_t{capacity} * options_.shape.features, kPoison);
  MoeDispatchCpu& op = *ops_[rank];
  result.stats = op.launch({input.values.data(), input.ids.data(), input.weights.data(),
                            static_cast<std::uint32_t>(input.tokens), weights_[rank].data(),
                            options_.shape.bias ? biases_[rank].data() : nullptr},
                           result.y.data(), capacity, launch.mode);
  result.rows.assign(op.rows().begin(), op.rows().end());
  result.offsets.assign(op.expert_offsets().begin(), op.expert_offsets().end());
  return result;
}

std::vector<std::vector<MoeRankResult>> MoeJob::run(const std::vector<MoeLaunch>& launches,
                                                    std::chrono::microseconds pause_max) {
  std::vector<std::vector<MoeRankResult>> results(launches.size(),
                                                  std::vector<MoeRankResult>(size()));
  run_ranks(size(), launches.size(), options_.seed, pause_max,
            [&](std::uint32_t rank, std::size_t i) {
              results[i][rank] = launch(rank, launches[i], plan_.shape.rows_max);
              const auto& stats = results[i][rank].stats;
              return stats || stats.error().code == ErrorCode::kLimitExceeded;
            });
  return results;
}

std::string MoeJob::check(const MoeLaunch& launch, const std::vector<MoeRankResult>& results) {
  const auto inputs = sources(launch);
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    std::string wrong = check_rank(rank, reference(rank, inputs), results[rank]);
    if (!wrong.empty()) return fmt::format("rank {}: {}", rank, wrong);
  }
  return {};
}

std::string MoeJob::check_rank(std::uint32_t rank, const tools::MoeReference& expected,
                               const MoeRankResult& result) {
  if (!result.stats) return result.stats.error().message;
  if (result.rows.size() != expected.rows().size())
    return fmt::format("{} rows, expected {}", result.rows.size(), expected.rows().size());
  for (std::size_t row = 0; row < result.rows.size(); ++row) {
    const auto& want = expected.rows()[row];
    if (result.rows[row] == MoeRow{want.rank, want.token, want.slot, want.weight}) continue;
    const MoeRow& got = result.rows[row];
    return fmt::format("row {} is rank {} token {} slot {}, expected {} {} {}", row, got.rank,
                       got.token, got.slot, want.rank, want.token, want.slot);
  }
  if (result.offsets.size() != expected.expert_count() + std::size_t{1})
    return fmt::format("{} offsets for {} experts", result.offsets.size(), expected.expert_count());
  for (std::uint32_t i = 0; i <= expected.expert_count(); ++i) {
    if (result.offsets[i] != expected.offset(i))
      return fmt::format("offset {} is {}, expected {}", i, result.offsets[i], expected.offset(i));
  }
  const std::uint32_t features = options_.shape.features;
  for (std::uint32_t i = 0; i < expected.expert_count(); ++i) {
    const std::uint32_t expert = expected.first_expert() + i;
    const std::vector<std::uint16_t> bias = bias_of(expert);
    const auto comparison = expected.compare(i, weights_of(expert).data(), result.y.data(),
                                             bias.empty() ? nullptr : bias.data());
    if (comparison.wrong != 0) {
      return fmt::format("{} elements wrong, first [{}][{}] of expert {}; worst error {} x bound",
                         comparison.wrong, comparison.first_wrong / features,
                         comparison.first_wrong % features, expected.first_expert() + i,
                         comparison.worst_ratio);
    }
    worst_ = std::max(worst_, comparison.worst_ratio);
  }
  const auto beyond = result.y.begin() + static_cast<std::ptrdiff_t>(result.rows.size() * features);
  if (std::any_of(beyond, result.y.end(), [](std::uint16_t value) { return value != kPoison; }))
    return fmt::format("something was written beyond row {} of rank {}", result.rows.size(), rank);
  return {};
}

}  // namespace mk::kernels::testing
