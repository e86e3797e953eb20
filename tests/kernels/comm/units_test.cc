// Counts with units: what mixes does not compile, and what converts is right.
#include "kernels/comm/units.h"

#include <gtest/gtest.h>

#include <type_traits>

namespace mk::kernels {
namespace {

static_assert(std::is_constructible_v<Warpgroups, std::uint32_t>);
static_assert(std::is_convertible_v<Warpgroups, std::uint32_t>);
static_assert(!std::is_constructible_v<Warpgroups, ThreadBlocks>);
static_assert(!std::is_constructible_v<ThreadBlocks, Warpgroups>);
static_assert(!std::is_constructible_v<ThreadBlocks, Sms>);
static_assert(!std::is_assignable_v<Warpgroups&, Sms>);
static_assert(!std::is_assignable_v<ThreadBlocks&, Warpgroups>);
static_assert(std::is_trivially_copyable_v<Warpgroups> && sizeof(Warpgroups) == 4);

TEST(Units, AnSmIsABlockOfThreeWarpgroups) {
  EXPECT_EQ(thread_blocks_of(Sms(5)).count(), 5u);
  EXPECT_EQ(warpgroups_of(Sms(5)).count(), 15u);
  EXPECT_EQ(warpgroups_of(ThreadBlocks(2)).count(), 6u);
  EXPECT_EQ(warpgroups_of(Sms()).count(), 0u);  // left to be chosen
}

}  // namespace
}  // namespace mk::kernels
