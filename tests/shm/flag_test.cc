// Epochs over their wrap, and immediates.
#include "shm/flag.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace mk::shm {
namespace {

constexpr std::uint32_t kHalf = 1u << 31;

TEST(Epoch, ReachedIsRightAroundEveryWrap) {
  for (const std::uint32_t base : {0u, kHalf, 0u - 5'000u, 12'345u}) {
    for (std::uint32_t b = base - 700; b != base + 700; ++b) {
      for (std::int64_t d = -700; d <= 700; ++d) {
        ASSERT_EQ(epoch_reached(b + static_cast<std::uint32_t>(d), b), d >= 0) << b << " " << d;
      }
    }
  }
}

TEST(Epoch, ReachedIsRightUpToHalfTheRange) {
  for (const std::uint32_t b : {0u, 1u, kHalf - 1, kHalf, kHalf + 1, ~0u}) {
    for (std::uint32_t d = 0; d < 1000; ++d) {
      EXPECT_TRUE(epoch_reached(b + (kHalf - 1) - d, b));
      EXPECT_FALSE(epoch_reached(b - (kHalf - 1) + d, b));
    }
  }
}

TEST(Epoch, AFlagThatWaitsNeverPassesEarlyOverTheWrap) {
  std::uint32_t flag = 0u - 3;
  for (std::uint32_t epoch = 0u - 2; epoch != 3; ++epoch) {
    EXPECT_FALSE(flag_reached(&flag, epoch));
    flag_publish(&flag, epoch);
    EXPECT_TRUE(flag_reached(&flag, epoch));
    EXPECT_FALSE(flag_reached(&flag, epoch + 1));
    EXPECT_TRUE(flag_reached(&flag, epoch - 1));
  }
}

TEST(Immediate, EveryFieldComesBack) {
  std::uint64_t wrong = 0;
  for (std::uint32_t slot = 0; slot < 1u << kImmediateSlotBits; ++slot) {
    for (std::uint32_t flag = 0; flag < 1u << kImmediateFlagBits; ++flag) {
      for (const std::uint32_t epoch : {0u, 1u, 511u, 512u, 1023u, 1024u, ~0u}) {
        const std::uint32_t immediate = make_immediate(slot, flag, epoch);
        wrong += immediate_slot(immediate) != slot || immediate_flag(immediate) != flag ||
                 (immediate & 1023) != (epoch & 1023);
      }
    }
  }
  EXPECT_EQ(wrong, 0u);
  for (std::uint32_t epoch = 0; epoch < 1u << kImmediateEpochBits; ++epoch) {
    for (const std::uint32_t flag : {0u, 1u, 0xaaaau, 0xffffu}) {
      const std::uint32_t immediate = make_immediate(63, flag, epoch);
      EXPECT_EQ(immediate_slot(immediate), 63u);
      EXPECT_EQ(immediate_flag(immediate), flag);
      EXPECT_EQ(immediate_epoch(immediate, epoch), epoch);
    }
  }
}

TEST(Immediate, EveryEpochWithin512OfTheLastOneIsRebuilt) {
  std::vector<std::uint32_t> nears;
  for (const std::uint32_t base : {0u, 512u, 1024u, kHalf, 0u - 1024u, 0x12345678u}) {
    for (std::uint32_t d = 0; d < 1100; ++d) nears.push_back(base - 550 + d);
  }
  std::uint64_t wrong = 0;
  for (const std::uint32_t near : nears) {
    for (std::int32_t delta = -511; delta <= 511; ++delta) {
      const std::uint32_t epoch = near + static_cast<std::uint32_t>(delta);
      wrong += immediate_epoch(make_immediate(63, 0xffff, epoch), near) != epoch;
      wrong += immediate_epoch(make_immediate(0, 0, epoch), near) != epoch;
    }
  }
  EXPECT_EQ(wrong, 0u);
}

TEST(Immediate, At512TheEarlierEpochIsTaken) {
  for (const std::uint32_t near : {0u, 511u, 512u, kHalf, ~0u}) {
    EXPECT_EQ(immediate_epoch(make_immediate(1, 2, near - 512), near), near - 512);
    EXPECT_EQ(immediate_epoch(make_immediate(1, 2, near + 512), near), near - 512);
  }
}

}  // namespace
}  // namespace mk::shm
