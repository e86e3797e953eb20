// How the tensors of a Ring Attention launch are checked, and what is filled in.
#include "kernels/ops/ring/tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace mk::kernels {
namespace {

using testing::HasSubstr;

constexpr std::uint32_t kRows = 10;
constexpr std::uint64_t kDim = 64;

RingAttentionGeometry plan_of(std::uint32_t batch, std::uint32_t query_heads,
                              std::uint32_t key_heads) {
  RingAttentionGeometry plan;
  plan.batch = batch;
  plan.query_heads = query_heads;
  plan.key_heads = key_heads;
  plan.head_dim = kDim;
  return plan;
}

class RingTensors : public testing::Test {
 protected:
  RingTensors() {
    tensors_.q = tensors_.k = tensors_.v = memory_;
    tensors_.out = memory_;
  }
  std::string error(const RingAttentionGeometry& plan) const {
    const auto checked = checked_tensors(plan, tensors_, kRows);
    if (checked) return "none";
    EXPECT_EQ(checked.error().code, ErrorCode::kInvalidArgument);
    return checked.error().message;
  }

  char memory_[16] = {};
  RingAttentionTensors tensors_;
};

void expect_strides(const RingStrides& strides, std::uint64_t row, std::uint64_t head,
                    std::uint64_t batch) {
  EXPECT_EQ(strides.row, row);
  EXPECT_EQ(strides.head, head);
  EXPECT_EQ(strides.batch, batch);
}

TEST_F(RingTensors, WithoutStridesLieAsRowsOfHeadsWithoutGaps) {
  const auto checked = checked_tensors(plan_of(3, 6, 2), tensors_, kRows);
  ASSERT_TRUE(checked) << checked.error().message;
  expect_strides(checked->q_strides, 6 * kDim, kDim, kRows * 6 * kDim);
  expect_strides(checked->out_strides, 6 * kDim, kDim, kRows * 6 * kDim);
  expect_strides(checked->k_strides, 2 * kDim, kDim, kRows * 2 * kDim);
  expect_strides(checked->v_strides, 2 * kDim, kDim, kRows * 2 * kDim);
  expect_strides(checked->lse_strides, 6, 1, kRows * 6);
  EXPECT_DOUBLE_EQ(checked->scale, 0.125);
}

TEST_F(RingTensors, MayLieByHeadsAndBatchesFollowEachOtherThen) {
  tensors_.q_strides = {kDim, kRows * kDim, 0};
  const auto checked = checked_tensors(plan_of(3, 6, 2), tensors_, kRows);
  ASSERT_TRUE(checked) << checked.error().message;
  expect_strides(checked->q_strides, kDim, kRows * kDim, 6 * kRows * kDim);
}

TEST_F(RingTensors, MayBeTakenApartInAnyOrder) {
  // [row][batch][head], with a gap after each row.
  tensors_.k_strides = {3 * 2 * kDim + 8, kDim, 2 * kDim};
  EXPECT_EQ(error(plan_of(3, 6, 2)), "none");
}

TEST_F(RingTensors, StridesOfWhatThereIsOneOfDoNotMatter) {
  tensors_.k_strides = {0, 7, 3};
  const auto checked = checked_tensors(plan_of(1, 6, 1), tensors_, kRows);
  ASSERT_TRUE(checked) << checked.error().message;
  expect_strides(checked->k_strides, kDim, kDim, kRows * kDim);
}

TEST_F(RingTensors, RefusesWhatOverlaps) {
  const auto plan = plan_of(3, 6, 2);
  tensors_.q_strides.row = 6 * kDim - 1;
  EXPECT_THAT(error(plan), HasSubstr("rows of q are 383 elements apart; they have 384"));
  tensors_.q_strides = {};
  tensors_.v_strides.head = kDim - 1;
  EXPECT_THAT(error(plan), HasSubstr("heads of v are 63 elements apart; they have 64"));
  tensors_.v_strides = {};
  tensors_.out_strides.batch = kRows * 6 * kDim - 1;
  EXPECT_THAT(error(plan), HasSubstr("batches of out are 3839 elements apart; they have 3840"));
  tensors_.out_strides = {};
  tensors_.lse_strides.row = 5;
  EXPECT_THAT(error(plan), HasSubstr("rows of lse are 5 elements apart; they have 6"));
  tensors_.lse_strides = {};
  // Head by head, and the rows of two heads between each other.
  tensors_.k_strides = {kDim, (kRows - 1) * kDim, 0};
  EXPECT_THAT(error(plan), HasSubstr("heads of k are 576 elements apart; they have 640"));
}

TEST_F(RingTensors, RefusesStridesWhoseSumsWouldOverflow) {
  tensors_.q_strides.batch = std::numeric_limits<std::uint64_t>::max() / 2;
  EXPECT_THAT(error(plan_of(3, 6, 2)), HasSubstr("batches of q"));
}

TEST_F(RingTensors, MayBeMissingOnARankWithoutRows) {
  EXPECT_TRUE(checked_tensors(plan_of(1, 2, 1), {}, 0));
  EXPECT_FALSE(checked_tensors(plan_of(1, 2, 1), {}, 1));
}

TEST_F(RingTensors, RefusesMissingTensorsAndScalesThatAreNoNumbers) {
  const auto plan = plan_of(1, 2, 1);
  for (const void** tensor : {&tensors_.q, &tensors_.k, &tensors_.v}) {
    *tensor = nullptr;
    EXPECT_THAT(error(plan), HasSubstr("is null"));
    *tensor = memory_;
  }
  tensors_.out = nullptr;
  EXPECT_THAT(error(plan), HasSubstr("out is null"));
  tensors_.out = memory_;
  for (const double scale :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    tensors_.scale = scale;
    EXPECT_THAT(error(plan), HasSubstr("a scale of"));
  }
}

}  // namespace
}  // namespace mk::kernels
