// ReduceScatter on the CPU executor: every rank has its share of the sums of all ranks' rows.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/ops/gemm_rs/schedule.h"
#include "kernels/ops/reduce_scatter/spec.h"
#include "tests/kernels/support/collective_tests.h"

namespace mk::kernels::testing {
namespace {

double element(const CollectiveOptions& of, const Bytes& rows, std::size_t at) {
  if (of.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, rows.data() + at * sizeof value, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, rows.data() + at * sizeof bits, sizeof bits);
  return to_double(of.dtype, bits);
}

struct ReduceScatter {
  using Plan = ReduceScatterPlan;
  static constexpr std::string_view kTold = "reduce_scatter";
  static std::uint32_t told_size(const Plan& plan) { return plan.n; }
  static Result<Plan> plan(const CollectiveOptions& of) {
    return Plan::make(of.nodes, of.locals, of.m_max, of.n, of.dtype, of.tiling, of.partials);
  }
  static auto make(const Plan& plan, const RankContext& context, const CpuOptions& options) {
    return make_reduce_scatter_cpu(plan, context, options);
  }
  static Bytes input(const CollectiveOptions& of, std::uint32_t rank,
                     const CollectiveLaunch& launch) {
    return drawn_rows(of, rank, launch, launch.m);
  }
  static std::uint64_t output_bytes(const CollectiveOptions& of, std::uint32_t rank,
                                    std::uint32_t m) {
    return of.rows_of(rank, m) * of.row_bytes();
  }
  static std::uint64_t network_bytes(const Plan& plan, const World& world, std::uint32_t m) {
    return GemmRsSchedule(plan.sums, m).network_bytes(world.node, world.local);
  }
  /// Sums go in fp32. Over several nodes of several ranks each node's is rounded first, where
  /// partials are elements.
  static std::string check(const CollectiveOptions& of, const CollectiveLaunch& launch,
                           const std::vector<Bytes>& outputs, double* worst) {
    std::vector<Bytes> inputs;
    for (std::uint32_t rank = 0; rank < of.world(); ++rank)
      inputs.push_back(input(of, rank, launch));
    const double last = of.dtype == DType::kBf16 ? 0x1p-8 : of.dtype == DType::kF16 ? 0x1p-11 : 0;
    const bool rounds = of.nodes > 1 && of.locals > 1 && of.partials == Partials::kElement;
    for (std::uint32_t rank = 0; rank < of.world(); ++rank) {
      const ShardRange rows = shard_of(launch.m, of.world(), rank);
      for (std::size_t i = 0; i < std::size_t{rows.count} * of.n; ++i) {
        const std::size_t at = std::size_t{rows.first} * of.n + i;
        double expected = 0;
        double magnitude = 0;
        double nodes = 0;
        double node = 0;
        for (std::uint32_t r = 0; r < of.world(); ++r) {
          const double value = element(of, inputs[r], at);
          expected += value;
          magnitude += std::fabs(value);
          node = r % of.locals == 0 ? value : node + value;
          if (r % of.locals + 1 == of.locals) nodes += std::fabs(node);
        }
        const double bound =
            of.world() == 1
                ? 0
                : 1.02 * (of.world() * 0x1p-24 * magnitude + last * std::fabs(expected) +
                          (rounds ? last * nodes : 0) + 0x1p-25 * (1 + of.nodes));
        const double error = std::fabs(element(of, outputs[rank], i) - expected);
        if (bound > 0) *worst = std::max(*worst, error / bound);
        if (!(error <= bound)) {
          return fmt::format("rank {}: element {} is {}, expected {} within {}", rank, i,
                             element(of, outputs[rank], i), expected, bound);
        }
      }
    }
    return {};
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(ReduceScatter, Collective, ReduceScatter);
INSTANTIATE_TYPED_TEST_SUITE_P(ReduceScatter, CollectiveFailure, ReduceScatter);

// A sum is not what its summands cancel down to: f16's range holds within a node, and with partials
// in fp32 over the nodes, too.
TEST(ReduceScatterCpu, SumsBeyondF16OnTheWayAreRightWithPartialsInFp32) {
  CollectiveOptions options = collective_options(2, 2);
  options.dtype = DType::kF16;
  for (const Partials partials : {Partials::kElement, Partials::kF32}) {
    options.partials = partials;
    CollectiveJob<ReduceScatter> job(options);
    NetworkThread network(job.cluster(), 8);
    std::vector<Error> errors(4);
    std::vector<std::vector<std::uint16_t>> outputs(4, std::vector<std::uint16_t>(options.n));
    run_ranks(4, 1, 1, std::chrono::microseconds(0), [&](std::uint32_t rank, std::size_t) {
      // 60000 from both ranks of node 0, -60000 from those of node 1: nodes' sums overflow.
      const std::vector<std::uint16_t> rows(
          4 * options.n, from_float(DType::kF16, rank < 2 ? 60000.0F : -60000.0F));
      return job.op(rank).launch(rows.data(), outputs[rank].data(), 4, Mode::kFused).has_value();
    });
    for (const auto& output : outputs) {
      for (const std::uint16_t bits : output) {
        if (partials == Partials::kF32) {
          EXPECT_EQ(to_double(DType::kF16, bits), 0);
        } else {
          EXPECT_TRUE(std::isnan(to_double(DType::kF16, bits)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace mk::kernels::testing
