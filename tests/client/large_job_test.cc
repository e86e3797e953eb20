// A job of more than 128 nodes, each a daemon of this process: links between all of them, an
// operator, and launches.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "client/tools/numeric/elements.h"
#include "mkernel/mkernel.h"
#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using Elements = std::vector<std::uint16_t>;

constexpr std::uint32_t kNodes = 130;
constexpr DataType kType = DataType::kBf16;

std::uint16_t element(std::uint64_t value) {
  return tools::from_float(kType, static_cast<float>(value));
}

TEST(LargeJob, RunsOnMoreThan128Nodes) {
  EmbeddedOptions embedded;
  embedded.nodes = kNodes;
  embedded.spin = std::chrono::nanoseconds(0);  // so many threads share few cores
  auto started = EmbeddedCluster::start(embedded);
  ASSERT_TRUE(started) << started.error().message;
  const std::unique_ptr<EmbeddedCluster> cluster = std::move(*started);
  std::atomic<std::uint32_t> right{0};
  for_ranks(kNodes, [&](std::uint32_t rank) {
    auto options = place(*cluster, 1, rank, "large");
    options.arrival_flags = 16'384;
    auto session = Session::attach(options);
    ASSERT_TRUE(session) << session.error().message;
    Tuning tuning;
    tuning.compute_sms = tuning.reduce_sms = tuning.send_sms = tuning.receive_sms = 1;
    // A sum over all nodes, of small whole numbers: exact.
    constexpr std::uint64_t kM = 8, kN = 16, kK = 2;
    tuning.exchange = Exchange::kOneShot;
    auto op = GemmAllReduce::create(*session, {kM, kN, kK, kType}, tuning);
    ASSERT_TRUE(op) << op.error().message;
    const Elements a(kM * kK, element(1)), b(kK * kN, element(rank % 2));
    for (int launch = 0; launch < 3; ++launch) {  // each bank, and one again
      Elements c(kM * kN, 0x7fff);
      const auto stats = op->launch(a.data(), b.data(), c.data(), kM);
      ASSERT_TRUE(stats) << stats.error().message;
      ASSERT_EQ(Elements(kM * kN, element(kK * (kNodes / 2))), c);
    }
    EXPECT_TRUE(session->barrier());
    ++right;
  });
  EXPECT_EQ(kNodes, right);
}

TEST(LargeJob, OneNodeTooManyIsRefusedWithTheLimit) {
  auto options = AttachOptions::of_rank("large", 0, 1025, 1);
  options.socket = "@nobody";
  const auto refused = Session::attach(options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(ErrorCode::kLimitExceeded, refused.error().code);
  for (const char* part : {"8192 ranks", "1024 nodes", "1025", "split"})
    EXPECT_NE(std::string::npos, refused.error().message.find(part)) << refused.error().message;
}

}  // namespace
}  // namespace mk
