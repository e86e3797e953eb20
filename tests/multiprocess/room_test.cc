// A rank that cannot map a workspace, its own or, when all have told each other of theirs, a
// peer's: the creation fails on all ranks, which hear why, and everything goes on as it was.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/multiprocess/cluster.h"

namespace mk::test {
namespace {

struct Case {
  const char* name;
  const char* what;
  const char* percent;
  const char* telling;  ///< of what there is no room for
};
constexpr Case kCases[] = {{"OfItsOwnFirst", "first", "50", "a new buffer"},
                           {"OfItsPeersFirst", "first", "150", "the received buffer"},
                           {"OfItsOwnGrown", "grow", "50", "a grown buffer"},
                           {"OfItsPeersGrown", "grow", "150", "the received buffer"}};

class NoRoom : public testing::TestWithParam<Case> {};

TEST_P(NoRoom, IsAnErrorOnAllRanksAndChangesNothing) {
  const std::string seed = std::to_string(std::random_device{}());
  SCOPED_TRACE("seed " + seed);
  for (const std::uint32_t nodes : {1u, 2u}) {
    SCOPED_TRACE(testing::Message() << nodes << " nodes");
    const auto daemons = start_daemons(nodes);
    ASSERT_NE(nullptr, daemons);
    std::vector<Process> ranks;
    for (std::uint32_t rank = 0; rank < nodes * 2; ++rank) {
      tools::ProcessOptions options;
      options.name = "rank " + std::to_string(rank);
      options.report = true;
      options.arguments = {MK_TEST_ROOM,
                           daemons->client_socket(rank / 2),
                           "room",
                           std::to_string(nodes),
                           "2",
                           std::to_string(rank),
                           seed,
                           GetParam().what,
                           GetParam().percent};
      auto started = Process::start(options);
      ASSERT_TRUE(started) << started.error().message;
      ranks.push_back(std::move(*started));
    }
    for (std::uint32_t rank = 0; rank < nodes * 2; ++rank) {
      const std::string said = read_until(ranks[rank], "refused");
      EXPECT_TRUE(said.starts_with("refused ")) << said;
      EXPECT_NE(said.find(GetParam().telling), said.npos) << said;
      EXPECT_EQ(rank != 1, said.find("rank 1 cannot create gemm-ar: ") != said.npos) << said;
    }
    for (Process& rank : ranks) EXPECT_EQ("done", read_until(rank, "done"));
    for (Process& rank : ranks) EXPECT_TRUE(rank.wait(patience()));
    const Status stopped = daemons->stop(120s);
    EXPECT_TRUE(stopped) << stopped.error().message;
  }
}

INSTANTIATE_TEST_SUITE_P(, NoRoom, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace mk::test
