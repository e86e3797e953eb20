/// \file
/// Rails of a rank's own choice, other ones on each node: every pair of rails of two nodes carries
/// an operator's data.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "mkernel/mkernel.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

constexpr std::uint32_t kRails = 3;

std::unique_ptr<EmbeddedCluster> cluster_with_rails(const char* fabric) {
  EmbeddedOptions options;
  options.nodes = 2;
  options.rails = kRails;
  options.fabric = fabric;
  auto cluster = EmbeddedCluster::start(options);
  EXPECT_TRUE(cluster) << cluster.error().message;
  return cluster ? std::move(*cluster) : nullptr;
}

class Rails : public testing::TestWithParam<const char*> {};

TEST_P(Rails, OfTwoNodesNeedNotBeTheSame) {
  const auto cluster = cluster_with_rails(GetParam());
  ASSERT_NE(nullptr, cluster);
  for (std::uint32_t pair = 0; pair < kRails * kRails; ++pair) {
    const std::uint32_t rail_of_node[] = {pair / kRails, pair % kRails};
    for_ranks(4, [&](std::uint32_t rank) {
      AttachOptions options = place(*cluster, 2, rank, "pair" + std::to_string(pair));
      // The second rank of a node is on the next rail.
      options.rail = static_cast<std::int32_t>(
          (rail_of_node[options.node_rank] + options.local_rank) % kRails);
      auto session = Session::attach(options);
      ASSERT_TRUE(session) << session.error().message;
      auto op = GemmAllReduce::create(*session, {16, 16, 16});
      ASSERT_TRUE(op) << op.error().message;
      const std::vector<std::uint16_t> ones(256, 0x3f80);
      std::vector<std::uint16_t> c(256, 0xffff);
      for (int launch = 0; launch < 3; ++launch) {
        const auto stats = op->launch(ones.data(), ones.data(), c.data(), 16);
        ASSERT_TRUE(stats) << stats.error().message;
        EXPECT_EQ(std::vector<std::uint16_t>(256, 0x4280), c);  // 64.0
      }
      EXPECT_TRUE(session->barrier());
    });
  }
}
INSTANTIATE_TEST_SUITE_P(, Rails, testing::Values("loopback", "ofi"),
                         [](const auto& test) { return std::string(test.param); });

TEST(RailOption, ThatIsNoneIsRefusedWithTheirNumber) {
  const auto cluster = cluster_with_rails("loopback");
  AttachOptions options = place(*cluster, 1, 0, "far");
  options.world = options.nodes = 1;
  options.rail = kRails;
  const auto session = Session::attach(options);
  ASSERT_FALSE(session);
  EXPECT_EQ(ErrorCode::kInvalidArgument, session.error().code);
  EXPECT_NE(std::string::npos, session.error().message.find("rail 3, but this node has 3"))
      << session.error().message;
}

TEST(RailOption, OfTheEnvironmentIsANumber) {
  const auto cluster = cluster_with_rails("loopback");
  AttachOptions options = place(*cluster, 1, 0, "environment");
  options.world = options.nodes = 1;
  for (const char* wrong : {"x", "1x", "-1", "99999999999"}) {
    ::setenv("MKERNEL_RAIL", wrong, 1);
    const auto session = Session::attach(options);
    ASSERT_FALSE(session) << wrong;
    EXPECT_NE(std::string::npos, session.error().message.find("MKERNEL_RAIL"))
        << session.error().message;
  }
  ::setenv("MKERNEL_RAIL", "7", 1);
  EXPECT_FALSE(Session::attach(options));
  options.rail = 1;  // goes before the environment
  EXPECT_TRUE(Session::attach(options));
  ::unsetenv("MKERNEL_RAIL");
}

TEST(GpuOption, IsAPciAddress) {
  const auto cluster = cluster_with_rails("loopback");
  AttachOptions options = place(*cluster, 1, 0, "gpu");
  options.world = options.nodes = 1;
  for (const char* wrong : {"0", "1b:00.0", "0000:1B:00.0", "0000:1b:00.0 ", "gpu 0"}) {
    options.gpu = wrong;
    const auto session = Session::attach(options);
    ASSERT_FALSE(session) << wrong;
    EXPECT_NE(std::string::npos, session.error().message.find("AttachOptions::gpu"))
        << session.error().message;
  }
  options.gpu = "0000:1b:00.0";
  EXPECT_TRUE(Session::attach(options));
}

}  // namespace
}  // namespace mk
