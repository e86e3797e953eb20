// GPU operators that sum refuse a C whose last vector their 32 bits would not reach.
#include "kernels/cuda/host/operator_inputs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace mk::kernels::cuda {
namespace {

void* const kSomewhere = reinterpret_cast<void*>(0x1000);

/// VectorWalk's arithmetic, in 64 bits.
bool reaches(std::uint64_t rows, std::uint64_t ldc) {
  return (rows - 1) * (ldc / kElementStep) + ldc / kElementStep - 1 <= UINT32_MAX;
}

TEST(SummedC, IsRefusedExactlyWhereItsVectorsPass32Bits) {
  for (std::uint64_t rows = 1; rows <= 1u << 20; rows = rows * 3 / 2 + 1) {
    for (std::uint64_t ldc = kElementStep; ldc < 1ull << 37; ldc *= 2) {
      for (const std::uint64_t step : {ldc - kElementStep, ldc, ldc + kElementStep}) {
        if (step == 0 || rows == 1) continue;
        const auto checked =
            check_summed_c("op", kSomewhere, step, static_cast<std::uint32_t>(rows), kElementStep);
        ASSERT_EQ(checked.has_value(), reaches(rows, step)) << rows << " rows, " << step;
        if (checked) continue;
        EXPECT_EQ(checked.error().code, ErrorCode::kInvalidArgument);
        EXPECT_THAT(checked.error().message, testing::HasSubstr("64 GiB"));
      }
    }
  }
}

TEST(SummedC, OfOneRowMayHaveAnyStep) {
  EXPECT_TRUE(check_summed_c("op", kSomewhere, 1ull << 60, 1, kElementStep).has_value());
}

TEST(SummedC, IsHeldToWhatAnyCIs) {
  EXPECT_FALSE(check_summed_c("op", kSomewhere, 8, 4, 16).has_value());
  EXPECT_FALSE(check_summed_c("op", kSomewhere, 20, 4, 16).has_value());
  EXPECT_FALSE(check_summed_c("op", nullptr, 16, 4, 16).has_value());
}

}  // namespace
}  // namespace mk::kernels::cuda
