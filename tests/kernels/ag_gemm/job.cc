#include "tests/kernels/ag_gemm/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <utility>

#include "kernels/comm/shard.h"
#include "tests/kernels/support/reference.h"
#include "tests/kernels/support/run_ranks.h"

namespace mk::kernels::testing {
namespace {

constexpr std::uint16_t kPoison = 0x7fff;  ///< a NaN in bf16 and in f16

}  // namespace

AgGemmJob::AgGemmJob(const AgGemmJobOptions& options) : options_(options) {
  for (std::uint32_t rank = 0; rank < options.nodes * options.locals; ++rank) {
    auto plan =
        AgGemmPlan::make(options.nodes, options.locals, {options.max.m, n_of(rank), options.max.k},
                         options.dtype, options.tiling, options.epilogue);
    if (!plan) throw std::runtime_error(plan.error().message);
    if (!cluster_) {
      cluster_ = std::make_unique<Cluster>(
          ClusterShape{options.nodes, options.locals, plan->workspace_bytes, plan->flag_count(),
                       options.cpu.blocks.send, options.slot_count_log2});
    }
    auto op = AgGemmCpu::create(*plan, cluster_->context(rank),
                                cluster_->with_progress(options.cpu, rank));
    if (!op) throw std::runtime_error(op.error().message);
    ops_.push_back(std::move(*op));
  }
}

/// Drawn from the job's seed, the launch's number and the rank, so that each user of them draws
/// them again. Gaps between rows hold NaNs.
std::vector<std::uint16_t> AgGemmJob::a_shard(std::uint32_t rank, const AgGemmLaunchPlan& launch,
                                              std::uint64_t lda) const {
  std::mt19937_64 random(options_.seed * 1000003 + launch.inputs * 1009 + rank);
  const std::uint32_t rows = shard_of(launch.m, size(), rank).count;
  std::vector<std::uint16_t> a(rows * lda, kPoison);
  for (std::uint32_t row = 0; row < rows; ++row) {
    const auto values = random_values(options_.dtype, options_.max.k, random);
    std::copy(values.begin(), values.end(), a.begin() + static_cast<std::ptrdiff_t>(row * lda));
  }
  return a;
}

std::vector<std::uint16_t> AgGemmJob::b(std::uint32_t rank, const AgGemmLaunchPlan& launch,
                                        std::uint64_t ldb) const {
  std::mt19937_64 random(options_.seed * 1000033 + launch.inputs * 1013 + rank);
  const bool kn = options_.cpu.b_layout == BLayout::kKN;
  return random_values(options_.dtype, (kn ? options_.max.k : n_of(rank)) * ldb, random);
}

std::vector<std::uint16_t> AgGemmJob::bias(std::uint32_t rank,
                                           const AgGemmLaunchPlan& launch) const {
  if (!options_.epilogue.bias) return {};
  std::mt19937_64 random(options_.seed * 7919 + launch.inputs * 1019 + rank);
  return random_values(options_.dtype, n_of(rank), random);
}

AgGemmResult AgGemmJob::launch(std::uint32_t rank, const AgGemmLaunchPlan& launch) {
  const std::uint32_t n = n_of(rank);
  const std::uint32_t k = options_.max.k;
  const bool kn = options_.cpu.b_layout == BLayout::kKN;
  const std::uint64_t lda = k + (launch.padded ? 5 : 0);
  const std::uint64_t ldb = (kn ? n : k) + (launch.padded ? 3 : 0);
  const std::uint32_t c_columns = options_.epilogue.columns_of(n);
  const std::uint64_t ldc = c_columns + (launch.padded ? 7 : 0);
  const auto a_in = a_shard(rank, launch, lda);
  const void* a = a_in.empty() ? nullptr : a_in.data();
  void* const input = ops_[rank]->input();
  if (launch.in_place && !launch.padded && input != nullptr && (rank + launch.inputs) % 2 == 0) {
    std::copy(a_in.begin(), a_in.end(), static_cast<std::uint16_t*>(input));
    a = input;
  }
  const auto b_in = b(rank, launch, ldb);
  std::vector<std::uint16_t> c(launch.m * ldc, kPoison);
  AgGemmResult result;
  if (launch.gathered) result.gathered.assign(std::size_t{launch.m} * k, kPoison);
  result.stats = ops_[rank]->launch(a, lda, b_in.data(), ldb, c.data(), ldc, launch.m, launch.mode,
                                    launch.gathered ? result.gathered.data() : nullptr,
                                    options_.epilogue.bias ? bias(rank, launch).data() : nullptr);
  if (!result.stats) return result;
  for (std::uint32_t row = 0; row < launch.m; ++row) {
    const auto begin = c.begin() + static_cast<std::ptrdiff_t>(row * ldc);
    result.c.insert(result.c.end(), begin, begin + c_columns);
    if (std::any_of(begin + c_columns, begin + static_cast<std::ptrdiff_t>(ldc),
                    [](std::uint16_t value) { return value != kPoison; })) {
      result.stats = fail(ErrorCode::kInternal, "row {} of c was written beyond its {} columns",
                          row, c_columns);
    }
  }
  return result;
}

std::vector<std::vector<AgGemmResult>> AgGemmJob::run(const std::vector<AgGemmLaunchPlan>& launches,
                                                      std::chrono::microseconds pause_max) {
  std::vector<std::vector<AgGemmResult>> results(launches.size(),
                                                 std::vector<AgGemmResult>(size()));
  run_ranks(size(), launches.size(), options_.seed, pause_max,
            [&](std::uint32_t rank, std::size_t i) {
              results[i][rank] = launch(rank, launches[i]);
              return results[i][rank].stats.has_value();
            });
  return results;
}

std::string AgGemmJob::check(const AgGemmLaunchPlan& launch,
                             const std::vector<AgGemmResult>& results) {
  const std::uint32_t k = options_.max.k;
  std::vector<std::uint16_t> a;
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    const auto shard = a_shard(rank, launch, k);
    a.insert(a.end(), shard.begin(), shard.end());
  }
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    if (!results[rank].stats)
      return fmt::format("rank {}: {}", rank, results[rank].stats.error().message);
    if (launch.gathered && results[rank].gathered != a)
      return fmt::format("rank {}: the gathered A is not A", rank);
    const std::uint32_t n = n_of(rank);
    const bool kn = options_.cpu.b_layout == BLayout::kKN;
    const std::uint64_t ldb = (kn ? n : k) + (launch.padded ? 3 : 0);
    // One rank's product, rounded once.
    Reference reference(options_.dtype, 1, 1, launch.m, n);
    reference.add_rank(a.data(), k, b(rank, launch, ldb).data(), ldb, k, options_.cpu.b_layout);
    reference.finish(options_.epilogue, bias(rank, launch));
    const std::string wrong =
        reference.check(results[rank].c.data(), options_.epilogue.columns_of(n));
    if (!wrong.empty()) return fmt::format("rank {}: {}", rank, wrong);
    worst_ = std::max(worst_, reference.worst());
  }
  return {};
}

}  // namespace mk::kernels::testing
