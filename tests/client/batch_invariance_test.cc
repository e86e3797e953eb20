// Tuning::batch_invariant on the CPU executor. (GPUs: tests/gpu/client_row_bits_test.cc, and
// operators_test.cc there; the planner: tests/kernels/plan/choose_test.cc.)
#include <gmock/gmock.h>

#include "tests/client/row_bits.h"

namespace mk::test {
namespace {

class BatchInvariance : public testing::TestWithParam<EmbeddedWorld> {
 protected:
  const HostMemory memory_{};
  /// Two panels of K, and tiles of which the last ones are odd.
  const RowBits bits_{memory_,
                      Executor::kCpu,
                      GetParam(),
                      {{150, 150, 0, 0}, {23, 23, 0, 0}, {64, 150, 32, 16}, {97, 97, 64, 40}},
                      72,
                      1104,
                      {BLayout::kKN, BLayout::kNK},
                      true,
                      true,
                      301,
                      {0, 5}};
};

TEST_P(BatchInvariance, AllGatherGemm) { bits_.all_gather_gemm(); }
TEST_P(BatchInvariance, GemmReduceScatter) { bits_.gemm_reduce_scatter(); }
TEST_P(BatchInvariance, GemmAllReduce) { bits_.gemm_all_reduce(); }
TEST_P(BatchInvariance, ReduceScatter) { bits_.reduce_scatter(); }
TEST_P(BatchInvariance, MoeDispatchGemmAndGemmCombine) { bits_.experts(); }
TEST_P(BatchInvariance, RingAttention) { bits_.ring_attention(); }

INSTANTIATE_TEST_SUITE_P(Worlds, BatchInvariance,
                         testing::Values(EmbeddedWorld{1, 1, "loopback", DataType::kBf16},
                                         EmbeddedWorld{1, 3, "loopback", DataType::kBf16},
                                         EmbeddedWorld{2, 2, "loopback", DataType::kF16},
                                         EmbeddedWorld{3, 2, "loopback", DataType::kBf16},
                                         EmbeddedWorld{4, 1, "loopback", DataType::kBf16}),
                         name_of_world);

TEST(BatchInvarianceTuning, IsTakenWhereBytesOnlyMove) {
  const auto cluster = cluster_of(1);
  auto session = Session::attach(place(*cluster, 1, 0, "bytes"));
  ASSERT_TRUE(session) << session.error().message;
  Tuning tuning;
  tuning.batch_invariant = true;
  const auto op = AllGather::create(*session, {8, 8}, tuning);
  EXPECT_TRUE(op) << op.error().message;
}

// Ranks that differ would give bits of both kinds.
TEST(BatchInvarianceTuning, IsTheSameOnAllRanks) {
  const auto cluster = cluster_of(1);
  ASSERT_NE(nullptr, cluster);
  for_ranks(2, [&](std::uint32_t rank) {
    auto session = Session::attach(place(*cluster, 2, rank, "differ"));
    ASSERT_TRUE(session) << session.error().message;
    Tuning tuning;
    tuning.batch_invariant = rank == 1;
    const auto op = GemmAllReduce::create(*session, {8, 8, 8}, tuning);
    ASSERT_FALSE(op);
    EXPECT_EQ(ErrorCode::kShapeMismatch, op.error().code) << op.error().message;
    EXPECT_THAT(op.error().message, testing::HasSubstr("batch_invariant"));
  });
}

}  // namespace
}  // namespace mk::test
