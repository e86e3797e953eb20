// Every operator over real processes in one world, over both fabrics: right at all sizes, the same
// from run to run, right when ranks are late; and the check itself finds what is wrong. The other
// worlds are in numeric_matrix_test.cc.

#include "tests/multiprocess/numeric.h"

namespace mk::test {
namespace {

class Numeric : public NumericTest {};

TEST_P(Numeric, IsRightAtAllSizes) { expect_right_at_all_sizes(); }

INSTANTIATE_TEST_SUITE_P(Operators, Numeric,
                         testing::Combine(testing::Values(NumericWorld{"loopback", 2, 2},
                                                          NumericWorld{"ofi", 2, 2}),
                                          testing::ValuesIn(numeric_cases(true))),
                         numeric_name);

class NumericRun : public NumericTest {
 protected:
  bench::BenchOptions job(std::size_t sizes = 0) const {
    const auto& [world, op] = GetParam();
    return numeric_job(world, op, edge_sizes(op).at(sizes));
  }
};

TEST_P(NumericRun, GivesTheSameBitsAgain) {
  bench::BenchOptions options = job();
  const auto first = expect_right(options);
  options.spec.skew_ms = 3;  // another interleaving
  const auto second = expect_right(options);
  ASSERT_EQ(first.reports.size(), second.reports.size());
  for (std::size_t launch = 0; launch < first.reports.size(); ++launch) {
    for (std::size_t rank = 0; rank < first.reports[launch].size(); ++rank) {
      EXPECT_EQ(first.reports[launch][rank].output_hash, second.reports[launch][rank].output_hash)
          << "launch " << launch << ", rank " << rank;
    }
  }
}

TEST_P(NumericRun, IsRightInManyLaunchesBackToBack) {
  bench::BenchOptions options = job();
  options.spec.iterations = 60;
  expect_right(options);
}

TEST_P(NumericRun, IsRightWhenRanksAreLate) {
  bench::BenchOptions options = job(1);
  options.spec.iterations = 2;
  options.spec.skew_ms = 500;
  expect_right(options);
}

TEST_P(NumericRun, ASpoiledElementIsFound) {
  bench::BenchOptions options = job();
  options.spec.iterations = 1;
  options.spec.tamper_at = 0;  // the largest: rank 0 has something to spoil
  const auto result = bench::run_bench(options, [](const std::string&) {});
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_FALSE(result->verification.passed());
}

INSTANTIATE_TEST_SUITE_P(Operators, NumericRun,
                         testing::Combine(testing::Values(NumericWorld{"loopback", 2, 2}),
                                          testing::ValuesIn(numeric_cases(false))),
                         numeric_name);

}  // namespace
}  // namespace mk::test
