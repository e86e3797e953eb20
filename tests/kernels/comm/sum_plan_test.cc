// The plans of the products summed over ranks, GEMM+AllReduce and GEMM+ReduceScatter: what they
// choose, what they refuse, and when two of them are the same.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/ops/gemm_ar/spec.h"
#include "kernels/ops/gemm_rs/spec.h"
#include "shm/limits.h"

namespace mk::kernels {
namespace {

std::string name_of(const GemmArPlan*) { return "gemm_ar"; }
std::string name_of(const GemmRsPlan*) { return "gemm_rs"; }

template <class Plan>
class GemmPlan : public ::testing::Test {
 protected:
  static Result<Plan> make(std::uint32_t nodes, std::uint32_t locals, const Shape& shape,
                           const Tiling& tiling = {}, DType dtype = DType::kBf16) {
    return Plan::make(nodes, locals, shape, dtype, tiling);
  }
  static void expect_refused(const Result<Plan>& plan, std::string_view part) {
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument);
    const std::string& message = plan.error().message;
    EXPECT_EQ(message.find(name_of(static_cast<Plan*>(nullptr))), 0u) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
};
using Plans = ::testing::Types<GemmArPlan, GemmRsPlan>;
TYPED_TEST_SUITE(GemmPlan, Plans);

TYPED_TEST(GemmPlan, ScalesTilesDownForSmallShapes) {
  const auto large = this->make(2, 2, {4096, 2048, 0});
  const auto small = this->make(2, 2, {128, 256, 0});
  ASSERT_TRUE(large && small);
  EXPECT_EQ(large->tile_m, 128u);
  EXPECT_EQ(large->tile_n, 256u);
  EXPECT_EQ(small->tile_m, 32u);
  EXPECT_EQ(small->tile_n, 64u);
  const auto asked = this->make(2, 2, {128, 256, 0}, {48, 0, 0, 0});
  ASSERT_TRUE(asked);
  EXPECT_EQ(asked->tile_m, 48u);
}

TYPED_TEST(GemmPlan, LargeShapesGetLargerChunksInsteadOfMoreFlags) {
  const auto plan = this->make(4, 1, {65536, 65536, 0});
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_LE(plan->flag_count(), kOperatorFlagsMax);
  EXPECT_GT(plan->chunk_bytes, 256u * 1024);
  const auto many = this->make(128, 8, {8192, 8192, 0});
  ASSERT_TRUE(many) << many.error().message;
  EXPECT_LE(many->flag_count(), shm::kFlagsMax);
}

TYPED_TEST(GemmPlan, TheFingerprintTellsPlansApart) {
  std::set<std::uint64_t> seen;
  for (const Tiling& tiling :
       {Tiling{}, {48, 0, 0, 0}, {0, 40, 0, 0}, {0, 0, 4096, 0}, {0, 0, 0, 1}}) {
    for (DType dtype : {DType::kBf16, DType::kF16}) {
      for (const Shape& shape : {Shape{512, 512, 0}, {513, 512, 0}, {512, 520, 0}}) {
        EXPECT_TRUE(seen.insert(this->make(2, 4, shape, tiling, dtype)->fingerprint()).second);
      }
    }
  }
  EXPECT_EQ(this->make(2, 4, {512, 512, 3})->fingerprint(),
            this->make(2, 4, {512, 512, 9})->fingerprint())
      << "k is each rank's own";
}

TYPED_TEST(GemmPlan, RefusesWhatItCannotDoAndSaysWhatIsAllowed) {
  const Shape shape{64, 64, 0};
  this->expect_refused(this->make(0, 1, shape), "0 nodes x 1 local ranks");
  this->expect_refused(this->make(1, 17, shape), "1 to 16 local ranks");
  this->expect_refused(this->make(1024, 16, shape), "at most 8192 ranks");
  this->expect_refused(this->make(1, 1, {0, 64, 0}), "m = 0");
  this->expect_refused(this->make(1, 1, {64, 1u << 25, 0}), "1 to 16777216");
  this->expect_refused(this->make(1, 1, shape, {}, static_cast<DType>(9)), "neither bf16 nor f16");
  this->expect_refused(this->make(1, 1, shape, {2048, 0, 0, 0}), "at most 1024");
  this->expect_refused(this->make(1, 1, shape, {0, 12, 0, 0}), "multiple of 8");
  this->expect_refused(this->make(1, 1, shape, {0, 0, 1u << 30, 0}), "too large");
  this->expect_refused(this->make(1, 1, shape, {0, 0, 0, 3}), "3 banks");
}

/// Arrival flags of one sender in a bank: one for each chunk; of a two-shot exchange two to a
/// round.
std::uint64_t flags_of_sender(const GemmArPlan& plan) {
  return plan.two_shot ? 2ull * plan.rounds_max() : plan.chunks_max;
}
std::uint64_t flags_of_sender(const GemmRsPlan& plan) { return plan.chunks_max; }

// Whatever the sizes: a plan within all limits, or at once the limit that it would exceed.
TYPED_TEST(GemmPlan, OfAnySizeIsWithinItsLimitsOrRefused) {
  constexpr std::uint32_t kSides[] = {1, 8192, 1u << 18, 1u << 20, (1u << 20) + 7, kSideMax};
  std::vector<Tiling> tilings(5);
  tilings[1].banks = 1;
  tilings[2] = {1, 8, 1, 0};
  tilings[3] = {1, 8, 1, 1};
  tilings[4].exchange = Exchange::kTwoShot;
  std::uint32_t made = 0;
  std::uint32_t refused = 0;
  const auto check = [&](std::uint32_t nodes, std::uint32_t locals, const Shape& shape) {
    for (const Tiling& tiling : tilings) {
      if (tiling.exchange == Exchange::kTwoShot && nodes < 3) continue;
      for (const Partials partials : {Partials::kElement, Partials::kF32}) {
        SCOPED_TRACE(::testing::Message() << nodes << " x " << locals << ", m " << shape.m << ", n "
                                          << shape.n << ", tiling " << (&tiling - tilings.data())
                                          << ", partials " << static_cast<int>(partials));
        GemmResult result;
        result.partials = partials;
        const auto plan = TypeParam::make(nodes, locals, shape, DType::kBf16, tiling, result);
        if (!plan) {
          ++refused;
          EXPECT_EQ(plan.error().code, ErrorCode::kLimitExceeded) << plan.error().message;
          continue;
        }
        ++made;
        EXPECT_LE(plan->chunk_bytes, shm::kCommandPayloadBytesMax / 2);
        EXPECT_LT(plan->workspace.bytes(), shm::kBufferBytesMax);
        EXPECT_LE(plan->flag_count(), kOperatorFlagsMax);
        EXPECT_GE(plan->flag_count(), (nodes - 1) * plan->banks * flags_of_sender(*plan));
      }
    }
  };
  for (const std::uint32_t nodes : {1u, 2u, 3u, 64u, 256u, 513u, 1024u}) {
    for (const std::uint32_t locals : {1u, 8u}) {
      for (const std::uint32_t m : kSides) {
        for (const std::uint32_t n : kSides) check(nodes, locals, {m, n, 0});
      }
    }
  }
  EXPECT_LT(500u, made);
  EXPECT_LT(500u, refused);
}

// A sum has room for the sources of the largest world.
TYPED_TEST(GemmPlan, TakesAsManyNodesAsAWorldMayHave) {
  const Shape shape{64, 64, 0};
  EXPECT_TRUE(this->make(1024, 8, shape));
  this->expect_refused(this->make(1025, 7, shape), "1 to 1024 nodes");
}

}  // namespace
}  // namespace mk::kernels
