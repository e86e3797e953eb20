// Division by numbers known before, and shards dealt out with it, against the language's own.
#include "kernels/comm/divisor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "kernels/comm/shard.h"
#include "kernels/comm/types.h"
#include "shm/limits.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kNumbersEnd = 1u << 31;

void check(std::uint32_t number, std::uint32_t by) {
  const Divisor divisor(by);
  ASSERT_EQ(number / divisor, number / by) << number << " / " << by;
  ASSERT_EQ(number % divisor, number % by) << number << " % " << by;
}

TEST(Divisor, DividesSmallNumbersAsTheLanguageDoes) {
  for (std::uint32_t by = 1; by <= 600; ++by) {
    for (std::uint32_t number = 0; number <= 3000; ++number) check(number, by);
  }
}

// Where a quotient steps, up to the largest number: there a multiplier that is too small or too
// large by one shows.
TEST(Divisor, DividesAroundMultiplesUpToTheLargestNumber) {
  const auto around_multiples = [](std::uint32_t by) {
    const std::uint32_t last = (kNumbersEnd - 1) / by;
    for (const std::uint32_t quotient : {0u, 1u, 2u, last / 3, last / 2, last - 1, last}) {
      if (quotient > last) continue;
      const std::uint64_t multiple = std::uint64_t{quotient} * by;
      for (std::uint64_t number = multiple == 0 ? 0 : multiple - 1; number <= multiple + 1;
           ++number)
        if (number < kNumbersEnd) check(static_cast<std::uint32_t>(number), by);
    }
    check(kNumbersEnd - 1, by);
  };
  for (std::uint32_t by = 1; by <= 5000; ++by) around_multiples(by);
  for (std::uint32_t bit = 1; bit <= 31; ++bit) {
    for (const std::int64_t off : {-1, 0, 1}) {
      const auto by = (std::int64_t{1} << bit) + off;
      if (by <= kNumbersEnd) around_multiples(static_cast<std::uint32_t>(by));
    }
  }
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200'000; ++i) {
    around_multiples(1 + static_cast<std::uint32_t>(random() % (kNumbersEnd - 1) >> random() % 31));
  }
}

TEST(Divisor, RoundsUp) {
  for (std::uint32_t by = 1; by <= 130; ++by) {
    for (std::uint32_t number = 0; number <= 1000; ++number)
      ASSERT_EQ(div_up(number, Divisor(by)), div_up(number, by)) << number << " / " << by;
  }
}

TEST(Divisor, OfOneIsWhatNobodyHasSet) { EXPECT_EQ(12345u / Divisor(), 12345u); }

TEST(Shards, AreThoseOfShardOf) {
  for (std::uint32_t parts = 1; parts <= 40; ++parts) {
    for (std::uint32_t rows = 0; rows <= 300; ++rows) {
      const Shards shards(rows, parts);
      ASSERT_EQ(shards.most(), shard_rows_max(rows, parts));
      ASSERT_EQ(shards.least(), rows / parts);
      ASSERT_EQ(shards.even(), rows % parts == 0);
      ASSERT_EQ(shards.rows_before(parts), rows);
      for (std::uint32_t part = 0; part < parts; ++part)
        ASSERT_EQ(shards.of(part), shard_of(rows, parts, part)) << rows << " in " << parts;
    }
  }
}

TEST(Shards, OfTheLargestWorldAreThoseOfShardOf) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const auto parts = static_cast<std::uint32_t>(shm::kWorldMax - random() % 8);
    const auto rows = static_cast<std::uint32_t>(random() >> 33);
    const Shards shards(rows, parts);
    for (std::uint32_t part = 0; part < parts; ++part)
      ASSERT_EQ(shards.of(part), shard_of(rows, parts, part)) << rows << " in " << parts;
  }
}

}  // namespace
}  // namespace mk::kernels
