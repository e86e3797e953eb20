// GEMM+ReduceScatter when something goes wrong; most tests are support/gemm_sum_failure_tests.h.
#include "tests/kernels/support/gemm_sum_failure_tests.h"

namespace mk::kernels::testing {

INSTANTIATE_TYPED_TEST_SUITE_P(ReduceScatter, GemmSumFailure, GemmRsOp);

TEST(GemmRsFailure, NoRoomForRowsIsRefusedAndForNoneIsNot) {
  GemmSumJob<GemmRsOp> job(job_options(1, 3, std::chrono::seconds(120)));
  const std::vector<std::uint16_t> some(4096, 0);
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    expect_refused(job.op(rank).launch(some.data(), 18, some.data(), 48, nullptr, 48, 40),
                   "c is null, but of 40 rows rank");
  }
  // One row goes to the last rank; the others get none and pass null.
  const auto errors = launch_on(job, {0, 1, 2}, {1, 1, 1});
  for (const Error& error : errors) EXPECT_EQ(error.code, ErrorCode::kOk) << error.message;
}

}  // namespace mk::kernels::testing
