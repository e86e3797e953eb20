// What a link is taken to carry: the best of its busy periods, and not for ever.
#include "daemon/proxy/link_rate.h"

#include <gtest/gtest.h>

namespace mk::daemon {
namespace {

constexpr std::uint64_t kMib = 1 << 20;

/// One period: `bytes` in two writes within `ns`.
bool run(LinkRate& rate, std::uint64_t& now_ns, std::uint64_t bytes, std::uint64_t ns,
         bool failed = false) {
  now_ns += 1'000'000;  // nobody sends, which says nothing of the link
  rate.posted(now_ns, bytes / 2, true);
  rate.posted(now_ns + ns / 2, bytes / 2, false);
  now_ns += ns;
  return rate.ended(now_ns, failed);
}

TEST(LinkRate, IsThatOfTheBestLongPeriod) {
  LinkRate rate;
  std::uint64_t now_ns = 1;
  EXPECT_EQ(rate.bytes_per_s(), 0u);
  EXPECT_TRUE(run(rate, now_ns, 4 * kMib, 4'194'304));
  EXPECT_EQ(rate.bytes_per_s(), 1'000'000'000u);
  EXPECT_FALSE(run(rate, now_ns, 4 * kMib, 10 * 4'194'304)) << "the product was slow, not the link";
  EXPECT_EQ(rate.bytes_per_s(), 1'000'000'000u);
  EXPECT_TRUE(run(rate, now_ns, 4 * kMib, 4'194'304 / 2));
  EXPECT_EQ(rate.bytes_per_s(), 2'000'000'000u);
}

TEST(LinkRate, ShortAndFailedPeriodsSayNothing) {
  LinkRate rate;
  std::uint64_t now_ns = 1;
  EXPECT_FALSE(run(rate, now_ns, kMib - 2, 1000));
  EXPECT_FALSE(run(rate, now_ns, 4 * kMib, 1000, true));
  EXPECT_FALSE(run(rate, now_ns, 4 * kMib, 0));
  EXPECT_EQ(rate.bytes_per_s(), 0u);
}

TEST(LinkRate, ALinkThatHasBecomeSlowIsSeen) {
  LinkRate rate;
  std::uint64_t now_ns = 1;
  run(rate, now_ns, 8 * kMib, 1'000'000);
  const std::uint64_t fast = rate.bytes_per_s();
  std::uint32_t periods = 0;
  while (rate.bytes_per_s() == fast && periods < 1000) {
    run(rate, now_ns, 8 * kMib, 100'000'000);
    ++periods;
  }
  EXPECT_GE(periods, LinkRate::kPeriods);
  EXPECT_LE(periods, 2 * LinkRate::kPeriods);
  EXPECT_EQ(rate.bytes_per_s(), fast / 100);
}

}  // namespace
}  // namespace mk::daemon
