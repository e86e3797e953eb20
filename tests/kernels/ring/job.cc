#include "tests/kernels/ring/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

#include "client/tools/numeric/random_matrix.h"
#include "kernels/ops/ring/schedule.h"
#include "tests/kernels/support/run_ranks.h"

namespace mk::kernels::testing {
namespace {

constexpr std::uint16_t kPoison = 0x7fff;  ///< a NaN in bf16 and in f16

}  // namespace

RingJob::RingJob(const RingJobOptions& options) : options_(options) {
  auto plan = RingAttentionPlan::make(options.nodes, options.locals, options.shape, options.tiling);
  if (!plan) throw std::runtime_error(plan.error().message);
  plan_ = *plan;
  cluster_ = std::make_unique<Cluster>(
      ClusterShape{options.nodes, options.locals, plan_.workspace_bytes, plan_.flag_count(),
                   options.cpu.blocks.send, options.slot_count_log2});
  for (std::uint32_t rank = 0; rank < cluster_->size(); ++rank) {
    auto op = RingAttentionCpu::create(plan_, cluster_->context(rank),
                                       cluster_->with_progress(options.cpu, rank));
    if (!op) throw std::runtime_error(op.error().message);
    ops_.push_back(std::move(*op));
  }
}

std::vector<std::uint16_t> RingJob::tensor(const RingLaunch& launch, std::uint32_t which,
                                           std::uint32_t heads) const {
  const std::uint64_t columns = std::uint64_t{heads} * plan_.head_dim;
  std::vector<std::uint16_t> values(launch.seq * columns);
  const tools::RandomMatrix matrix{options_.seed * 7919 + launch.draw, which, columns, type()};
  matrix.rows(0, launch.seq, values.data());
  if (launch.inputs == RingInputs::kOnes) {
    std::fill(values.begin(), values.end(), tools::from_float(type(), 1));
  }
  for (std::uint64_t i = launch.special_from * columns; which != 0 && i < values.size(); ++i) {
    values[i] = tools::from_float(type(), launch.special);
  }
  if (which == 2 || launch.special_from < launch.seq) return values;
  for (std::uint64_t row = 0; row < launch.seq; ++row) {
    for (std::uint64_t i = 0; i < columns; ++i) {
      std::uint16_t& value = values[row * columns + i];
      const float random = tools::to_float(type(), value);
      if (launch.inputs == RingInputs::kSharp) value = tools::from_float(type(), 32 * random);
      if (which == 1 && launch.inputs == RingInputs::kEqual) value = values[i];
      if (which == 1 && launch.inputs == RingInputs::kDistant) {
        const float position = static_cast<float>(row) / static_cast<float>(launch.seq);
        value = tools::from_float(type(), 200 * (position - 0.5f));
      }
    }
  }
  return values;
}

std::vector<ShardRange> RingJob::sequences(const RingLaunch& launch) {
  if (launch.lengths.empty()) return {{0, launch.seq}};
  std::vector<ShardRange> all;
  std::uint32_t first = 0;
  for (const std::uint32_t rows : launch.lengths) {
    all.push_back({first, rows});
    first += rows;
  }
  return all;
}

std::vector<ShardRange> RingJob::parts(std::uint32_t rank, std::uint32_t rows) const {
  const std::uint32_t all = plan_.parts();
  std::vector<ShardRange> parts = {shard_of(rows, all, rank)};
  if (plan_.causal) parts.push_back(shard_of(rows, all, all - 1 - rank));
  return parts;
}

std::vector<std::uint16_t> RingJob::rows_of(const std::vector<std::uint16_t>& whole,
                                            std::uint32_t rank, const RingLaunch& launch,
                                            std::uint32_t row, std::uint64_t stride) const {
  std::vector<std::uint16_t> rows;
  for (const ShardRange& sequence : sequences(launch)) {
    for (const ShardRange& part : parts(rank, sequence.count)) {
      for (std::uint32_t i = 0; i < part.count; ++i) {
        const std::uint64_t position = std::uint64_t{sequence.first} + part.first + i;
        const auto first = whole.begin() + static_cast<std::ptrdiff_t>(position * row);
        rows.insert(rows.end(), first, first + row);
        rows.resize(rows.size() + stride - row, kPoison);
      }
    }
  }
  return rows;
}

double RingJob::scale(const RingLaunch& launch) const {
  return launch.scale != 0 ? launch.scale : 1 / std::sqrt(static_cast<double>(plan_.head_dim));
}

RingRankResult RingJob::launch(std::uint32_t rank, const RingLaunch& launch) {
  const std::uint32_t query_row = plan_.query_heads * plan_.head_dim;
  const std::uint32_t key_row = plan_.key_heads * plan_.head_dim;
  const auto stride = [&](std::uint32_t row, std::uint32_t gap) {
    return std::uint64_t{row} + (launch.padded ? gap : 0);
  };
  RingAttentionTensors tensors;
  tensors.q_strides.row = stride(query_row, 5);
  tensors.k_strides.row = stride(key_row, 3);
  tensors.v_strides.row = stride(key_row, 8);
  tensors.out_strides.row = stride(query_row, 7);
  const auto q =
      rows_of(tensor(launch, 0, plan_.query_heads), rank, launch, query_row, tensors.q_strides.row);
  const auto k =
      rows_of(tensor(launch, 1, plan_.key_heads), rank, launch, key_row, tensors.k_strides.row);
  const auto v =
      rows_of(tensor(launch, 2, plan_.key_heads), rank, launch, key_row, tensors.v_strides.row);
  std::size_t rows = 0;
  for (const ShardRange& sequence : sequences(launch)) rows += ops_[rank]->rows(sequence.count);
  std::vector<std::uint32_t> starts{0};
  for (const std::uint32_t length : launch.lengths) starts.push_back(starts.back() + length);
  std::vector<std::uint16_t> out(rows * tensors.out_strides.row, kPoison);
  RingRankResult result;
  result.lse.assign(launch.lse ? rows * plan_.query_heads : 0, std::nanf(""));
  tensors.q = q.data();
  tensors.k = k.data();
  tensors.v = v.data();
  tensors.out = out.data();
  tensors.lse = launch.lse ? result.lse.data() : nullptr;
  tensors.scale = launch.scale;
  if (!launch.lengths.empty()) {
    tensors.starts = starts.data();
    tensors.sequences = static_cast<std::uint32_t>(launch.lengths.size());
  }
  result.stats = ops_[rank]->launch(tensors, launch.seq, launch.mode);
  if (!result.stats) return result;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto first = out.begin() + static_cast<std::ptrdiff_t>(row * tensors.out_strides.row);
    result.out.insert(result.out.end(), first, first + query_row);
    if (std::any_of(first + query_row, first + static_cast<std::ptrdiff_t>(tensors.out_strides.row),
                    [](std::uint16_t value) { return value != kPoison; })) {
      result.stats = fail(ErrorCode::kInternal, "row {} of out was written beyond its end", row);
    }
  }
  return result;
}

std::vector<std::vector<RingRankResult>> RingJob::run(const std::vector<RingLaunch>& launches,
                                                      std::chrono::microseconds pause_max) {
  std::vector<std::vector<RingRankResult>> results(launches.size(),
                                                   std::vector<RingRankResult>(size()));
  run_ranks(size(), launches.size(), options_.seed, pause_max,
            [&](std::uint32_t rank, std::size_t i) {
              results[i][rank] = launch(rank, launches[i]);
              return results[i][rank].stats.has_value();
            });
  return results;
}

std::string RingJob::check(const RingLaunch& launch, const std::vector<RingRankResult>& results) {
  const auto q = tensor(launch, 0, plan_.query_heads);
  const auto k = tensor(launch, 1, plan_.key_heads);
  const auto v = tensor(launch, 2, plan_.key_heads);
  tools::AttentionProblem problem;
  problem.query_heads = plan_.query_heads;
  problem.key_heads = plan_.key_heads;
  problem.head_dim = plan_.head_dim;
  problem.causal = plan_.causal;
  problem.scale = scale(launch);
  problem.type = type();
  problem.tile_keys = plan_.tile_k;
  const std::uint64_t row_elements = std::uint64_t{plan_.query_heads} * plan_.head_dim;
  const std::uint64_t key_elements = std::uint64_t{plan_.key_heads} * plan_.head_dim;
  std::vector<std::uint64_t> rows(size());  // of each rank, so far
  for (const ShardRange& sequence : sequences(launch)) {
    problem.sequence = sequence.count;
    problem.tiles =
        RingAttentionSchedule(plan_, cluster_->context(0).world, sequence.count, launch.mode)
            .steps();
    const tools::AttentionReference reference(problem, k.data() + sequence.first * key_elements,
                                              v.data() + sequence.first * key_elements);
    for (std::uint32_t rank = 0; rank < size(); ++rank) {
      const RingRankResult& result = results[rank];
      if (!result.stats) return fmt::format("rank {}: {}", rank, result.stats.error().message);
      std::uint64_t& row = rows[rank];
      for (const ShardRange& part : parts(rank, sequence.count)) {
        const std::uint64_t position = std::uint64_t{sequence.first} + part.first;
        const auto compared =
            reference.compare(part.first, part.count, q.data() + position * row_elements,
                              result.out.data() + row * row_elements,
                              launch.lse ? result.lse.data() + row * plan_.query_heads : nullptr);
        for (const auto& [name, of] :
             {std::pair{"out", &compared.out}, std::pair{"lse", &compared.lse}}) {
          worst_ = std::max(worst_, of->worst_ratio);
          if (of->wrong == 0) continue;
          return fmt::format(
              "rank {}, rows {} and on of the sequence at {}: {} of {} wrong in {}, the "
              "first at {}, worst {} times its bound",
              rank, part.first, sequence.first, of->wrong, of->compared, name, of->first_wrong,
              of->worst_ratio);
        }
        row += part.count;
      }
    }
  }
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    if (rows[rank] * row_elements != results[rank].out.size())
      return "the outputs are of another size";
  }
  return {};
}

}  // namespace mk::kernels::testing
