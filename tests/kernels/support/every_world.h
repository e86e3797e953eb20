/// \file
/// Launches on CPUs in every world, and numbers that all of them must have.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/comm/launch.h"
#include "tests/kernels/support/network.h"

namespace mk::kernels::testing {

class EveryWorld : public ::testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {
 protected:
  std::uint32_t nodes() const { return std::get<0>(GetParam()); }
  std::uint32_t locals() const { return std::get<1>(GetParam()); }
  std::uint64_t seed() const { return nodes() * 100 + locals(); }
};

inline std::string name_of_world(const ::testing::TestParamInfo<EveryWorld::ParamType>& world) {
  return fmt::format("{}x{}", std::get<0>(world.param), std::get<1>(world.param));
}

/// Every launch is right, and has its number and mode; the network, which it stops, saw the bytes
/// that the ranks' statistics say. `more(launch, rank, stats)` looks at the rest.
template <class Job, class Launch, class Result, class More>
void expect_right_launches(Job& job, NetworkThread& network, const std::vector<Launch>& launches,
                           const std::vector<std::vector<Result>>& results, More&& more) {
  std::vector<std::uint64_t> bytes(job.size(), 0);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    SCOPED_TRACE(fmt::format("launch {}", i + 1));
    ASSERT_EQ(job.check(launches[i], results[i]), "");
    for (std::uint32_t rank = 0; rank < job.size(); ++rank) {
      const LaunchStats& stats = *results[i][rank].stats;
      EXPECT_EQ(stats.epoch, i + 1);
      EXPECT_EQ(stats.mode, launches[i].mode);
      more(i, rank, stats);
      bytes[rank] += stats.network_bytes;
    }
  }
  Network& seen = network.stop();
  EXPECT_EQ(seen.complaint(), "");
  for (std::uint32_t rank = 0; rank < job.size(); ++rank)
    EXPECT_EQ(seen.bytes_of(rank), bytes[rank]);
}

}  // namespace mk::kernels::testing
