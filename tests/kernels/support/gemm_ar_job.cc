#include "tests/kernels/support/gemm_ar_job.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "tests/kernels/support/reference.h"

namespace mk::kernels::testing {

GemmArJob::GemmArJob(const JobOptions& options) : options_(options) {
  auto plan =
      GemmArPlan::make(options.nodes, options.locals, options.max, options.dtype, options.tiling);
  if (!plan) throw std::runtime_error(plan.error().message);
  plan_ = *plan;
  cluster_ = std::make_unique<Cluster>(
      ClusterShape{options.nodes, options.locals, plan_.workspace_bytes(), plan_.flag_count(),
                   options.cpu.blocks.send, options.slot_count_log2});
  for (std::uint32_t rank = 0; rank < cluster_->size(); ++rank) {
    auto op =
        GemmArCpu::create(plan_, options.max.k + rank % 3, cluster_->context(rank), options.cpu);
    if (!op) throw std::runtime_error(op.error().message);
    ops_.push_back(std::move(*op));
  }
}

Inputs GemmArJob::inputs(std::uint32_t rank, const LaunchPlan& launch) const {
  std::mt19937_64 random(options_.seed * 1000003 + launch.inputs * 1009 + rank);
  const bool kn = options_.cpu.b_layout == BLayout::kKN;
  const std::uint32_t n = options_.max.n;
  Inputs inputs;
  inputs.k = options_.max.k + rank % 3;
  inputs.lda = inputs.k + (launch.padded ? 5 : 0);
  inputs.ldb = (kn ? n : inputs.k) + (launch.padded ? 3 : 0);
  inputs.a = random_values(options_.dtype, launch.m * inputs.lda, random);
  inputs.b = random_values(options_.dtype, (kn ? inputs.k : n) * inputs.ldb, random);
  return inputs;
}

RankResult GemmArJob::launch(std::uint32_t rank, const LaunchPlan& launch) {
  const Inputs in = inputs(rank, launch);
  const std::uint32_t n = options_.max.n;
  const std::uint64_t ldc = n + (launch.padded ? 7 : 0);
  GemmArCpu& op = *ops_[rank];
  // Nobody else writes this rank's C now: that needs this rank's tiles of the coming launch.
  auto* out =
      reinterpret_cast<std::uint16_t*>(cluster_->rank(rank).workspace.get() + plan_.layout.out);
  std::fill(out, out + std::size_t{options_.max.m} * n, kPoison);
  std::vector<std::uint16_t> c(launch.into_c ? launch.m * ldc : 0, kPoison);
  RankResult result;
  result.stats = op.launch(in.a.data(), in.lda, in.b.data(), in.ldb,
                           launch.into_c ? c.data() : nullptr, ldc, launch.m, launch.mode);
  if (!result.stats) return result;
  result.c.resize(std::size_t{launch.m} * n);
  for (std::uint32_t row = 0; row < launch.m; ++row) {
    const std::uint16_t* from = launch.into_c ? c.data() + row * ldc : out + std::size_t{row} * n;
    std::copy(from, from + n, result.c.begin() + static_cast<std::ptrdiff_t>(std::size_t{row} * n));
    if (launch.into_c && std::any_of(c.begin() + static_cast<std::ptrdiff_t>(row * ldc + n),
                                     c.begin() + static_cast<std::ptrdiff_t>((row + 1) * ldc),
                                     [](std::uint16_t value) { return value != kPoison; })) {
      result.stats =
          fail(ErrorCode::kInternal, "row {} of c was written beyond its {} columns", row, n);
    }
  }
  return result;
}

std::vector<std::vector<RankResult>> GemmArJob::run(const std::vector<LaunchPlan>& launches,
                                                    std::chrono::microseconds pause_max) {
  std::vector<std::vector<RankResult>> results(launches.size(), std::vector<RankResult>(size()));
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937_64 random(options_.seed * 31 + rank);
      for (std::size_t i = 0; i < launches.size(); ++i) {
        if (pause_max.count() > 0 && random() % 2 == 0) {
          std::this_thread::sleep_for(pause_max * (random() % 1000) / 1000);
        }
        results[i][rank] = launch(rank, launches[i]);
        if (!results[i][rank].stats) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::string GemmArJob::check(const LaunchPlan& launch, const std::vector<RankResult>& results) {
  Reference reference(options_.dtype, options_.nodes, options_.locals, launch.m, options_.max.n);
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    if (!results[rank].stats)
      return fmt::format("rank {}: {}", rank, results[rank].stats.error().message);
    const Inputs in = inputs(rank, launch);
    reference.add_rank(in.a.data(), in.lda, in.b.data(), in.ldb, in.k, options_.cpu.b_layout);
  }
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    if (rank > 0 && results[rank].c != results[0].c)
      return fmt::format("ranks 0 and {} have different bits", rank);
  }
  std::string wrong = reference.check(results[0].c.data(), options_.max.n);
  worst_ = std::max(worst_, reference.worst());
  return wrong;
}

}  // namespace mk::kernels::testing
