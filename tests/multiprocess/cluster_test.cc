// The main job: daemons and ranks as processes of their own.

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/multiprocess/cluster.h"
#include "tests/multiprocess/grpc_threads.h"

namespace mk::test {
namespace {

struct World {
  std::uint32_t nodes, local;
  const char* fabric;
};

class Cluster : public testing::TestWithParam<World> {};

TEST_P(Cluster, RunsAJobChecksItAndStopsCleanly) {
  const auto [nodes, local, fabric] = GetParam();
  auto daemons = start_daemons(nodes, fabric);
  ASSERT_NE(nullptr, daemons);
  expect_job_works(*daemons, "first", local);
  expect_job_works(*daemons, "second", local);
  const Status stopped = daemons->stop(120s);
  EXPECT_TRUE(stopped) << stopped.error().message;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Cluster,
                         testing::Values(World{1, 1, "loopback"}, World{1, 4, "loopback"},
                                         World{2, 2, "loopback"}, World{3, 1, "loopback"},
                                         World{4, 1, "loopback"}, World{2, 2, "ofi"},
                                         World{3, 1, "ofi"}),
                         [](const auto& test) {
                           return std::string(test.param.fabric) +
                                  std::to_string(test.param.nodes) + "x" +
                                  std::to_string(test.param.local);
                         });

TEST(TwoJobs, RunSideBySideOnTheSameDaemons) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  auto left = start_ranks(*daemons, "left", 1, 10);
  auto right = start_ranks(*daemons, "right", 2, 10);
  for (Process& rank : left) EXPECT_EQ("done", read_until(rank, "done"));
  for (Process& rank : right) EXPECT_EQ("done", read_until(rank, "done"));
  EXPECT_TRUE(daemons->stop(120s));
}

TEST(TwoJobs, OfOneNameTheSecondIsRefusedAndTheFirstGoesOn) {
  auto daemons = start_daemons(1);
  ASSERT_NE(nullptr, daemons);
  auto first = start_rank(*daemons, "name", 1, 0, 0);
  EXPECT_EQ("launch 0", read_until(first, "launch 0"));
  auto second = start_rank(*daemons, "name", 1, 0, 1);
  const std::string refused = read_until(second, "error");
  EXPECT_TRUE(refused.starts_with("error already-exists")) << refused;
  EXPECT_NE(std::string::npos, refused.find(std::to_string(first.pid())))
      << "names the holder: " << refused;
  EXPECT_EQ("launch ", read_until(first, "launch ").substr(0, 7));
}

TEST(ManyJobs, OneAfterTheOtherLeaveNoDescriptorsOrMappingsBehind) {
  auto daemons = start_daemons(2);
  ASSERT_NE(nullptr, daemons);
  const auto count = [&](const char* what) {
    std::size_t entries = 0;
    for (std::uint32_t node = 0; node < 2; ++node) {
      const auto folder = "/proc/" + std::to_string(daemons->process(node).pid()) + "/" + what;
      std::error_code gone;  // entries come and go while we look
      for (const auto& entry : std::filesystem::directory_iterator(folder, gone)) {
        std::string name;  // empty for what is no thread
        std::getline(std::ifstream(entry.path() / "comm"), name);
        entries += is_grpc_thread(name) ? 0 : 1;
      }
    }
    return entries;
  };
  expect_job_works(*daemons, "warm", 2, 1);
  // The last job's descriptors go a moment after its ranks have ended.
  const auto settled = [&](std::size_t most, const char* what) {
    const auto deadline = patience();
    while (count(what) > most && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(10ms);
    return count(what);
  };
  std::this_thread::sleep_for(200ms);
  const std::size_t descriptors = count("fd");
  const std::size_t threads = count("task");
  for (int job = 0; job < 5; ++job) expect_job_works(*daemons, "job" + std::to_string(job), 2, 1);
  EXPECT_LE(settled(descriptors, "fd"), descriptors);
  EXPECT_LE(settled(threads, "task"), threads);
}

}  // namespace
}  // namespace mk::test
