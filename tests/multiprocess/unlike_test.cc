// Operators that are not alike, of one session, as real processes over real daemons: each launch's
// elements are right in any order of launches, with late ranks.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/multiprocess/cluster.h"

namespace mk::test {
namespace {

class UnlikeProcesses : public testing::TestWithParam<const char*> {};

TEST_P(UnlikeProcesses, AreRightInAnyOrder) {
  constexpr std::uint32_t kNodes = 2, kLocal = 2;
  const auto daemons = start_daemons(kNodes, GetParam());
  ASSERT_NE(nullptr, daemons);
  for (int job = 0; job < 2; ++job) {
    const std::string seed = std::to_string(std::random_device{}());
    SCOPED_TRACE("seed " + seed);
    std::vector<Process> ranks;
    for (std::uint32_t rank = 0; rank < kNodes * kLocal; ++rank) {
      tools::ProcessOptions options;
      options.name = "rank " + std::to_string(rank);
      options.report = true;
      options.arguments = {MK_TEST_UNLIKE,
                           daemons->client_socket(rank / kLocal),
                           "unlike" + std::to_string(job),
                           std::to_string(kNodes),
                           std::to_string(kLocal),
                           std::to_string(rank),
                           seed};
      auto started = Process::start(options);
      ASSERT_TRUE(started) << started.error().message;
      ranks.push_back(std::move(*started));
    }
    for (Process& rank : ranks) EXPECT_EQ("done", read_until(rank, "done"));
    for (Process& rank : ranks) EXPECT_TRUE(rank.wait(patience()));
  }
  const Status stopped = daemons->stop(120s);
  EXPECT_TRUE(stopped) << stopped.error().message;
}

INSTANTIATE_TEST_SUITE_P(Fabrics, UnlikeProcesses, testing::Values("loopback", "ofi"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace mk::test
