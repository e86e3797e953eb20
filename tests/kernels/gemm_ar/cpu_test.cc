// GEMM+AllReduce on the CPU executor; the tests are support/gemm_sum_tests.h.
#include "tests/kernels/support/gemm_sum_tests.h"

namespace mk::kernels::testing {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(AllReduce, GemmSum, GemmArOp);
INSTANTIATE_TYPED_TEST_SUITE_P(TwoShotAllReduce, GemmSum, GemmArTwoShotOp);

template <class Op>
std::vector<std::vector<RankResult>> results_of(const JobOptions& options,
                                                const std::vector<LaunchPlan>& launches) {
  GemmSumJob<Op> job(options);
  NetworkThread network(job.cluster(), options.seed);
  auto results = job.run(launches);
  EXPECT_EQ(network.stop().complaint(), "");
  return results;
}

// Both forms add the nodes' sums in node order and round once, so they give the same bits.
TEST(TwoShotAllReduce, GivesTheBitsOfTheOneShotForm) {
  for (std::uint32_t world = 0; world < 12; ++world) {
    JobOptions options;
    options.nodes = 3 + world % 3;
    options.locals = 1 + world / 6;
    options.max = {37, 56, 300};
    options.dtype = world % 2 == 0 ? DType::kBf16 : DType::kF16;
    options.tiling = {8, 16, 600, 0};
    options.result.partials = world / 3 % 2 == 0 ? Partials::kElement : Partials::kF32;
    options.result.epilogue = {world % 4 == 3 ? Activation::kGelu : Activation::kNone,
                               world % 4 == 1};
    options.cpu.batch_invariant = world % 5 == 0;
    options.cpu.wait_timeout = std::chrono::seconds(120);
    options.seed = world + 1;
    const auto launches = random_launches(4, options.max.m, options.seed);
    const auto one = results_of<GemmArOp>(options, launches);
    const auto two = results_of<GemmArTwoShotOp>(options, launches);
    for (std::size_t i = 0; i < launches.size(); ++i) {
      for (std::uint32_t rank = 0; rank < options.nodes * options.locals; ++rank) {
        ASSERT_TRUE(one[i][rank].stats && two[i][rank].stats) << "launch " << i;
        ASSERT_EQ(one[i][rank].c, two[i][rank].c) << "world " << world << ", launch " << i;
      }
    }
  }
}

// Not finite: every partial, counted where it is added, and on one node of the rail alone.
TEST(TwoShotAllReduce, CountsWhatIsNotFiniteWhereItIsAdded) {
  JobOptions options;
  options.nodes = 3;
  options.max = {24, 16, 2};
  options.tiling = {8, 16, 600, 0};
  options.dtype = DType::kF16;
  options.cpu.count_nonfinite = true;
  GemmSumJob<GemmArTwoShotOp> job(options);
  NetworkThread network(job.cluster(), 1);
  std::vector<std::uint64_t> nonfinite(3);
  run_ranks(3, 1, 1, {}, [&](std::uint32_t rank, std::size_t) {
    const std::uint32_t k = 2 + rank;
    const std::vector<std::uint16_t> a(24 * k, from_float(options.dtype, 200));
    const std::vector<std::uint16_t> b(k * 16, from_float(options.dtype, 200));
    std::vector<std::uint16_t> c(24 * 16);
    const auto stats =
        job.op(rank).launch(a.data(), k, b.data(), 16, c.data(), 16, 24, Mode::kFused);
    if (stats) nonfinite[rank] = stats->nonfinite_partials;
    return stats.has_value();
  });
  // Three tiles, one for each node, of three infinite partials to an element.
  EXPECT_EQ(nonfinite, std::vector<std::uint64_t>(3, 8u * 16 * 3));
}

}  // namespace
}  // namespace mk::kernels::testing
