#include "tests/kernels/support/gemm_sum_job.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/run_ranks.h"

namespace mk::kernels::testing {

template <class Op>
GemmSumJob<Op>::GemmSumJob(const JobOptions& options) : options_(options) {
  auto plan = Op::Plan::make(options.nodes, options.locals, options.max, options.dtype,
                             options.tiling, options.result);
  if (!plan) throw std::runtime_error(plan.error().message);
  plan_ = *plan;
  cluster_ = std::make_unique<Cluster>(
      ClusterShape{options.nodes, options.locals, plan_.workspace_bytes(), plan_.flag_count(),
                   options.cpu.blocks.send, options.slot_count_log2});
  for (std::uint32_t rank = 0; rank < cluster_->size(); ++rank) {
    auto op = Op::Cpu::create(plan_, options.max.k + rank % 3, cluster_->context(rank),
                              cluster_->with_progress(options.cpu, rank));
    if (!op) throw std::runtime_error(op.error().message);
    ops_.push_back(std::move(*op));
  }
}

template <class Op>
Inputs GemmSumJob<Op>::inputs(std::uint32_t rank, const LaunchPlan& launch) const {
  std::mt19937_64 random(options_.seed * 1000003 + launch.inputs * 1009 + rank);
  const bool kn = options_.cpu.b_layout == BLayout::kKN;
  const std::uint32_t n = options_.max.n;
  Inputs inputs;
  inputs.k = options_.max.k + rank % 3;
  inputs.lda = inputs.k + (launch.padded ? 5 : 0);
  inputs.ldb = (kn ? n : inputs.k) + (launch.padded ? 3 : 0);
  inputs.a = random_values(options_.dtype, launch.m * inputs.lda, random);
  inputs.b = random_values(options_.dtype, (kn ? inputs.k : n) * inputs.ldb, random);
  if (launch.padded) {
    poison_gaps(inputs.a, inputs.lda, 5);
    poison_gaps(inputs.b, inputs.ldb, 3);
  }
  return inputs;
}

template <class Op>
std::vector<std::uint16_t> GemmSumJob<Op>::bias(const LaunchPlan& launch) const {
  if (!options_.result.epilogue.bias) return {};
  std::mt19937_64 random(options_.seed * 7919 + launch.inputs);
  return random_values(options_.dtype, options_.max.n, random);
}

template <class Op>
RankResult GemmSumJob<Op>::launch(std::uint32_t rank, const LaunchPlan& launch) {
  const Inputs in = inputs(rank, launch);
  const std::vector<std::uint16_t> bias = this->bias(launch);
  const std::uint32_t n = plan_.result_columns();
  const std::uint64_t ldc = n + (launch.padded ? 7 : 0);
  RankMemory& memory = cluster_->rank(rank);
  const ShardRange rows = Op::rows(memory.world, launch.m);
  // Nobody else writes this rank's C now: that needs this rank's tiles of the coming launch.
  std::uint16_t* out = Op::output(plan_, memory.workspace.get());
  if (out != nullptr) std::fill(out, out + std::size_t{options_.max.m} * n, kPoison);
  const bool into_c = launch.into_c || out == nullptr;
  std::vector<std::uint16_t> c(into_c ? rows.count * ldc : 0, kPoison);
  RankResult result;
  result.stats =
      ops_[rank]->launch(in.a.data(), in.lda, in.b.data(), in.ldb, c.empty() ? nullptr : c.data(),
                         ldc, launch.m, launch.mode_of(rank), bias.empty() ? nullptr : bias.data());
  if (!result.stats) return result;
  const auto beyond = [&](std::uint32_t row) {
    const auto begin = c.begin() + static_cast<std::ptrdiff_t>(row * ldc);
    return std::any_of(begin + n, begin + static_cast<std::ptrdiff_t>(ldc),
                       [](std::uint16_t value) { return value != kPoison; });
  };
  for (std::uint32_t row = 0; row < rows.count; ++row) {
    const std::uint16_t* from = into_c ? c.data() + row * ldc : out + std::size_t{row} * n;
    result.c.insert(result.c.end(), from, from + n);
    if (into_c && beyond(row)) {
      result.stats =
          fail(ErrorCode::kInternal, "row {} of c was written beyond its {} columns", row, n);
    }
  }
  return result;
}

template <class Op>
std::vector<std::vector<RankResult>> GemmSumJob<Op>::run(const std::vector<LaunchPlan>& launches,
                                                         std::chrono::microseconds pause_max) {
  std::vector<std::vector<RankResult>> results(launches.size(), std::vector<RankResult>(size()));
  run_ranks(size(), launches.size(), options_.seed, pause_max,
            [&](std::uint32_t rank, std::size_t i) {
              results[i][rank] = launch(rank, launches[i]);
              return results[i][rank].stats.has_value();
            });
  return results;
}

template <class Op>
std::string GemmSumJob<Op>::check(const LaunchPlan& launch,
                                  const std::vector<RankResult>& results) {
  Reference reference(options_.dtype, options_.nodes, options_.locals, launch.m, options_.max.n,
                      options_.result.partials);
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    if (!results[rank].stats)
      return fmt::format("rank {}: {}", rank, results[rank].stats.error().message);
    const Inputs in = inputs(rank, launch);
    reference.add_rank(in.a.data(), in.lda, in.b.data(), in.ldb, in.k, options_.cpu.b_layout);
  }
  reference.finish(options_.result.epilogue, bias(launch));
  const std::uint32_t n = plan_.result_columns();
  std::vector<std::uint16_t> c(std::size_t{launch.m} * n);
  std::vector<bool> known(launch.m, false);
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    const ShardRange rows = Op::rows(cluster_->rank(rank).world, launch.m);
    const auto first = c.begin() + static_cast<std::ptrdiff_t>(std::size_t{rows.first} * n);
    if (rows.count != 0 && known[rows.first] &&
        !std::equal(results[rank].c.begin(), results[rank].c.end(), first))
      return fmt::format("rank {} has other bits than ranks before it", rank);
    std::copy(results[rank].c.begin(), results[rank].c.end(), first);
    std::fill_n(known.begin() + rows.first, rows.count, true);
  }
  if (std::find(known.begin(), known.end(), false) != known.end()) return "nobody has some row";
  std::string wrong = reference.check(c.data(), n);
  worst_ = std::max(worst_, reference.worst());
  return wrong;
}

template class GemmSumJob<GemmArOp>;
template class GemmSumJob<GemmArTwoShotOp>;
template class GemmSumJob<GemmRsOp>;

}  // namespace mk::kernels::testing
