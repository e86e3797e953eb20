// GEMM+AllReduce when something goes wrong; the tests are support/gemm_sum_failure_tests.h.
#include "tests/kernels/support/gemm_sum_failure_tests.h"

namespace mk::kernels::testing {
INSTANTIATE_TYPED_TEST_SUITE_P(AllReduce, GemmSumFailure, GemmArOp);
}  // namespace mk::kernels::testing
