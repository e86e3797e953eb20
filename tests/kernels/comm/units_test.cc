// Counts with units: what mixes does not compile, and what converts is right.
#include "kernels/comm/units.h"

#include <gtest/gtest.h>

#include <type_traits>

#include "kernels/comm/launch.h"

namespace mk::kernels {
namespace {

static_assert(std::is_constructible_v<Warpgroups, std::uint32_t>);
static_assert(std::is_convertible_v<Warpgroups, std::uint32_t>);
static_assert(!std::is_constructible_v<Warpgroups, ThreadBlocks>);
static_assert(!std::is_constructible_v<ThreadBlocks, Warpgroups>);
static_assert(!std::is_constructible_v<ThreadBlocks, Sms>);
static_assert(!std::is_assignable_v<Warpgroups&, Sms>);
static_assert(!std::is_assignable_v<ThreadBlocks&, Warpgroups>);
static_assert(!std::is_assignable_v<Workers&, ComputeWorkers>);
static_assert(!std::is_assignable_v<decltype(RoleBlocks::compute)&, decltype(RoleBlocks::send)>);

template <class A, class B>
concept Adds = requires(A a, B b) {
  a + b;
};
template <class A, class B>
concept Compares = requires(A a, B b) {
  a == b;
  a < b;
};
static_assert(Adds<Warpgroups, Warpgroups> && Compares<Warpgroups, Warpgroups>);
static_assert(Adds<Warpgroups, std::uint32_t> && Compares<Warpgroups, std::uint32_t>);
static_assert(!Adds<Warpgroups, ThreadBlocks> && !Compares<Warpgroups, ThreadBlocks>);
static_assert(!Adds<Workers, ComputeWorkers> && !Compares<ComputeWorkers, Workers>);
static_assert(!Adds<ThreadBlocks, ComputeWorkers> && !Compares<ThreadBlocks, Sms>);
static_assert(std::is_same_v<decltype(Sms() + Sms()), Sms>);
static_assert(std::is_trivially_copyable_v<RoleBlocks>);
static_assert(std::is_trivially_copyable_v<Warpgroups> && sizeof(Warpgroups) == 4);

TEST(Units, AnSmIsABlockOfThreeWarpgroups) {
  EXPECT_EQ(thread_blocks_of(Sms(5)).count(), 5u);
  EXPECT_EQ(warpgroups_of(Sms(5)).count(), 15u);
  EXPECT_EQ(warpgroups_of(ThreadBlocks(2)).count(), 6u);
  EXPECT_EQ(warpgroups_of(Sms()).count(), 0u);              // left to be chosen
  EXPECT_EQ(warpgroups_of(ComputeWorkers(2)).count(), 6u);  // each of them is a block
  EXPECT_EQ(warpgroups_of(Workers(2)).count(), 2u);
}

}  // namespace
}  // namespace mk::kernels
