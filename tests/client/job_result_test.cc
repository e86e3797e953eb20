// mkrun's summary of its ranks' reports.

#include <gtest/gtest.h>

#include <vector>

#include "client/tools/mkrun/job.h"
#include "client/tools/numeric/hash.h"

namespace mk::tools {
namespace {

TEST(JobResult, AddsUpWhatRanksReportAndTakesTheSlowestTime) {
  JobResult result;
  result.add({{5, 10, 0, 100, 0, 7, 0.5}, {9, 20, 1, 200, 0, 7, 0.25}});
  result.add({{3, 1, 0, 10, 0, 8, 0.75}, {2, 1, 0, 10, 0, 8, 0.1}});
  EXPECT_EQ(2u, result.launches);
  EXPECT_EQ(12u, result.total_ns);
  EXPECT_EQ(32u, result.network_bytes);
  EXPECT_EQ(1u, result.nonfinite_partials);
  EXPECT_EQ(320u, result.compared);
  EXPECT_EQ(0.75, result.worst_ratio);
  EXPECT_TRUE(result.right());
  result.add({{1, 1, 0, 10, 3, 8, 2}, {1, 1, 0, 10, 0, 8, 0}});
  EXPECT_EQ(3u, result.wrong);
  EXPECT_FALSE(result.right());
}

// Each rank compares its own rows: what another has of them shows by its hash alone.
TEST(JobResult, IsWrongWhereOneRanksCopyDiffers) {
  const std::vector<std::uint16_t> copy(37 * 8, 0x3f80);
  for (std::size_t at = 0; at < copy.size(); ++at) {
    std::vector<std::uint16_t> spoilt = copy;
    spoilt[at] ^= 1;
    JobResult result;
    LaunchDone right, other;
    right.copy_hash = hash_of(std::as_bytes(std::span(copy)));
    other.copy_hash = hash_of(std::as_bytes(std::span(spoilt)));
    result.add({right, right, right});
    EXPECT_TRUE(result.right());
    result.add({right, other, right});
    EXPECT_FALSE(result.right()) << "element " << at;
    EXPECT_EQ(1u, result.unlike);
  }
}

}  // namespace
}  // namespace mk::tools
