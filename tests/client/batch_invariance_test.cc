// Where a row's bits may depend on the number of rows, Tuning::batch_invariant is refused: on CPUs,
// and by operators that promise nothing of the kind. (What it promises on GPUs is in
// tests/kernels/plan/choose_test.cc and tests/gpu/operators_test.cc.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "mkernel/all_gather_gemm.h"
#include "mkernel/gemm_all_reduce.h"
#include "mkernel/gemm_combine.h"
#include "mkernel/gemm_reduce_scatter.h"
#include "mkernel/moe_dispatch_gemm.h"
#include "mkernel/ring_attention.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using testing::AllOf;
using testing::HasSubstr;

template <class Op>
void expect_refused(Session& session, const char* name) {
  typename Op::Shape shape{};
  typename Op::Tuning tuning{};
  tuning.batch_invariant = true;
  const auto op = Op::create(session, shape, tuning);
  ASSERT_FALSE(op) << name;
  EXPECT_EQ(ErrorCode::kUnsupported, op.error().code) << op.error().message;
  EXPECT_THAT(op.error().message, AllOf(HasSubstr(name), HasSubstr("batch_invariant")));
}

template <class Op>
void expect_gemm_refused(Session& session, const char* name) {
  Tuning tuning;
  tuning.batch_invariant = true;
  const auto op = Op::create(session, {8, 8, 8}, tuning);
  ASSERT_FALSE(op) << name;
  EXPECT_EQ(ErrorCode::kUnsupported, op.error().code) << op.error().message;
  EXPECT_THAT(op.error().message, AllOf(HasSubstr(name), HasSubstr("batch_invariant")));
  EXPECT_TRUE(Op::create(session, {8, 8, 8}, Tuning{})) << name;
}

TEST(BatchInvariance, IsRefusedWhereItCannotBePromised) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "rows"));
  ASSERT_TRUE(session) << session.error().message;
  expect_gemm_refused<AllGatherGemm>(*session, "ag-gemm");
  expect_gemm_refused<GemmReduceScatter>(*session, "gemm-rs");
  expect_gemm_refused<GemmAllReduce>(*session, "gemm-ar");
  expect_refused<MoeDispatchGemm>(*session, "moe");
  expect_refused<GemmCombine>(*session, "combine");
  expect_refused<RingAttention>(*session, "ring");
}

}  // namespace
}  // namespace mk
