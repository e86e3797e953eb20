#include "daemon/proxy/stats.h"

#include <gtest/gtest.h>

namespace mk::daemon {
namespace {

TEST(LatencyHistogram, BucketsFollowEachOtherWithoutGaps) {
  for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
    EXPECT_EQ(LatencyHistogram::bucket_of(LatencyHistogram::lower_bound_ns(bucket)), bucket);
    if (bucket + 1 == LatencyHistogram::kBuckets) continue;
    const std::uint64_t next = LatencyHistogram::lower_bound_ns(bucket + 1);
    EXPECT_EQ(LatencyHistogram::bucket_of(next - 1), bucket);
    EXPECT_LE((next - LatencyHistogram::lower_bound_ns(bucket)) * 4,
              std::max<std::uint64_t>(4, next));
  }
}

TEST(LatencyHistogram, WhatIsTooLongGoesIntoTheLastBucket) {
  LatencyHistogram histogram;
  histogram.record(~0ull);
  histogram.record(0);
  EXPECT_EQ(histogram.count(LatencyHistogram::kBuckets - 1), 1u);
  EXPECT_EQ(histogram.count(0), 1u);
}

}  // namespace
}  // namespace mk::daemon
