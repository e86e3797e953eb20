// GEMM+AllReduce on the CPU executor; the tests are support/gemm_sum_tests.h.
#include "tests/kernels/support/gemm_sum_tests.h"

namespace mk::kernels::testing {
INSTANTIATE_TYPED_TEST_SUITE_P(AllReduce, GemmSum, GemmArOp);
}  // namespace mk::kernels::testing
