// What operators on CPUs are planned by: the machine file that the caller names, and the rate that
// the daemon knows of the links.
#include <gmock/gmock.h>
#include <mkernel/mkernel.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>
#include <vector>

#include "tests/client/embedded_ranks.h"

namespace mk {
namespace {

using testing::HasSubstr;

/// 10 GFLOP/s, 1 GB/s to other nodes, half a millisecond a step; nobody takes turns.
constexpr const char* kMachine = R"({
  "kind": "cpu", "name": "for tests", "sms": 1, "network_gb_s": 1, "cpu_gflops": 10,
  "cpu_f32_gflops": 10, "cpu_memory_gb_s": 1000, "cpu_step_us": 500, "cpu_step_in_turns_us": 500,
  "cpu_command_us": 0, "cpu_network_in_turns_gb_s": 1000})";

class NetworkRate : public testing::Test {
 protected:
  void SetUp() override {
    file_ = std::filesystem::temp_directory_path() /
            ("network_rate_test." + std::to_string(::getpid()) + ".json");
    std::ofstream(file_) << kMachine;
  }
  void TearDown() override { std::filesystem::remove(file_); }

  Tuning tuning() const {
    Tuning tuning;
    tuning.machine_file = file_;
    return tuning;
  }

  /// One launch of an operator that is made for it, on every rank of two nodes: rank 0's
  /// statistics.
  LaunchStats launch(std::vector<Session>& sessions, std::uint64_t side) const {
    std::vector<LaunchStats> stats(sessions.size());
    for_ranks(static_cast<std::uint32_t>(sessions.size()), [&](std::uint32_t rank) {
      auto op = GemmAllReduce::create(sessions[rank], {side, side, side}, tuning());
      ASSERT_TRUE(op) << op.error().message;
      const std::vector<std::uint16_t> a(side * side), b(side * side);
      std::vector<std::uint16_t> c(side * side);
      const auto done = op->launch(a.data(), b.data(), c.data(), side, LaunchMode::kAuto);
      ASSERT_TRUE(done) << done.error().message;
      stats[rank] = *done;
    });
    return stats[0];
  }
  static std::vector<Session> attach_all(const EmbeddedCluster& cluster) {
    std::vector<std::optional<Session>> made(cluster.nodes());
    for_ranks(cluster.nodes(), [&](std::uint32_t rank) {
      auto session = Session::attach(place(cluster, 1, rank, "job"));
      ASSERT_TRUE(session) << session.error().message;
      made[rank] = std::move(*session);
    });
    std::vector<Session> sessions;
    for (auto& session : made) {
      if (session) sessions.push_back(std::move(*session));
    }
    return sessions;
  }
  static std::unique_ptr<EmbeddedCluster> nodes_over(double link_bytes_per_second) {
    auto cluster =
        EmbeddedCluster::start({.nodes = 2, .link_bytes_per_second = link_bytes_per_second});
    EXPECT_TRUE(cluster) << cluster.error().message;
    return cluster ? std::move(*cluster) : nullptr;
  }

 private:
  std::filesystem::path file_;
};

// The same machine: over a link that is slow it pays to overlap, over a fast one it does not.
TEST_F(NetworkRate, OverASlowLinkAutoChoosesOtherwise) {
  constexpr std::uint64_t kSide = 256;
  std::vector<LaunchStats> stats;
  for (const double bytes_per_second : {10e9, 20e6}) {
    const auto cluster = nodes_over(bytes_per_second);
    ASSERT_TRUE(cluster);
    auto sessions = attach_all(*cluster);
    ASSERT_EQ(sessions.size(), 2u);
    stats.push_back(launch(sessions, kSide));
  }
  EXPECT_EQ(stats[0].mode, LaunchMode::kUnfused);
  EXPECT_EQ(stats[1].mode, LaunchMode::kFused);
  // 256 x 256 elements: 6.6 ms at 20 MB/s, within what the rate is rounded by.
  const double slower =
      static_cast<double>(stats[1].estimated_unfused_ns - stats[0].estimated_unfused_ns);
  EXPECT_NEAR(slower, 6.5e6, 0.7e6);
}

// A link that nobody paces is measured: by what it carries, and told with the daemon's beats.
TEST_F(NetworkRate, ALinkThatHasCarriedMuchIsKnown) {
  constexpr std::uint64_t kSide = 1536;
  const auto cluster = nodes_over(0);
  ASSERT_TRUE(cluster);
  auto sessions = attach_all(*cluster);
  ASSERT_EQ(sessions.size(), 2u);
  const std::uint64_t by_file = launch(sessions, kSide).estimated_unfused_ns;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::uint64_t by_link = by_file;
  while (by_link == by_file && std::chrono::steady_clock::now() < deadline)
    by_link = launch(sessions, kSide).estimated_unfused_ns;
  EXPECT_NE(by_link, by_file);
}

TEST_F(NetworkRate, AFileThatIsNotThereOrOfAGpuIsRefused) {
  auto cluster = EmbeddedCluster::start({});
  ASSERT_TRUE(cluster);
  auto session = Session::attach(place(**cluster, 1, 0, "job"));
  ASSERT_TRUE(session);
  Tuning missing;
  missing.machine_file = "/nowhere/machine.json";
  const auto none = GemmAllReduce::create(*session, {8, 8, 8}, missing);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(none.error().message, HasSubstr("/nowhere/machine.json"));
  missing.machine_file = "H100";
  const auto gpu = RingAttention::create(*session, {8, 1, 1, 64}, RingAttention::Tuning{missing});
  ASSERT_FALSE(gpu);
  EXPECT_EQ(gpu.error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mk
