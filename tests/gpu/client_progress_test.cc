// A rank on a GPU tells people of its launch (shm/progress.h), and its daemon reads it: whom it
// waits for, and how many tiles it has.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "daemon/control/held_up.h"
#include "shm/host/progress_sizes.h"
#include "tests/client/embedded_ranks.h"
#include "tests/gpu/client_ranks.h"

namespace mk {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

struct Case {
  const char* op;
  std::uint32_t nodes;
};
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* op : {"ag-gemm", "gemm-rs", "gemm-ar", "moe", "combine", "ring", "ring-packed",
                         "all-gather", "reduce-scatter"})
    for (const std::uint32_t nodes : {1u, 2u}) all.push_back({op, nodes});
  return all;
}

class ToldOnGpu : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
  }
};

std::string name_of_case(const testing::TestParamInfo<Case>& test) {
  std::string name = fmt::format("{}x{}_{}", test.param.nodes, 2 / test.param.nodes, test.param.op);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

/// Closed until it is opened, perhaps more than once.
class Gate {
 public:
  void open() {
    open_ = true;
    open_.notify_all();
  }
  void wait() const { open_.wait(false); }

 private:
  std::atomic<bool> open_{false};
};

/// Looks as the daemon does until `enough` of what it sees.
template <class Enough>
daemon::RankProgress look_until(const Session& session, Enough&& enough) {
  daemon::control::ProgressWatch watch(session.options().rank);
  daemon::RankProgress seen;
  const auto end = steady_clock::now() + seconds(5);
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const bool in_launch = launches_seen(session) % 2 == 1;
    watch.look(session.impl()->segment().header().progress, in_launch, 0);
    seen = watch.seen(0);
  } while (!enough(seen) && steady_clock::now() < end);
  return seen;
}

// Two ranks, one of which comes late to a launch: the other one waits for that one, and for nobody
// once it has come.
TEST_P(ToldOnGpu, WhomItWaitsFor) {
  const std::uint32_t nodes = GetParam().nodes;
  auto cluster = cluster_of(nodes);
  ASSERT_NE(cluster, nullptr);
  Gate told;
  daemon::RankProgress waited, after;
  Work work{.op = GetParam().op, .pace = Pace::kLate};
  work.meanwhile = [&](const Session& session) {
    if (session.options().rank == 1) return told.wait();
    waited = look_until(session, [](const auto& seen) { return seen.waits_for_rank == 1; });
    told.open();
    after = look_until(session, [](const auto& seen) { return seen.phase.empty(); });
  };
  std::string wrong[2];
  for_ranks(2, [&](std::uint32_t rank) {
    wrong[rank] = run_rank(place(*cluster, 2 / nodes, rank, "late"), work);
    if (rank == 0 && !wrong[0].empty()) told.open();
  });
  for (const std::string& one : wrong) EXPECT_EQ(one, "");
  fmt::print("{}\n", daemon::control::describe(waited));
  EXPECT_EQ(waited.waits_for_rank, 1) << daemon::control::describe(waited);
  EXPECT_FALSE(waited.waits_for.empty());
  EXPECT_FALSE(waited.phase.empty());
  EXPECT_GT(waited.m, 0u);
  EXPECT_GT(waited.sizes[0], 0u);
  const std::uint32_t op = shm::progress_operator(waited.op);
  EXPECT_NE(op, 0u) << waited.op;
  EXPECT_EQ(waited.sizes[1] != 0, !shm::kProgressSizeNames[op][1].empty());
  EXPECT_EQ(after.phase, "");
  EXPECT_EQ(after.waits_for_rank, -1);
}

// Launches that take long enough to be told of: all operators know their tiles by then.
class TilesOnGpu : public ToldOnGpu {};
TEST_P(TilesOnGpu, AreCounted) {
  auto cluster = cluster_of(1);
  ASSERT_NE(cluster, nullptr);
  daemon::RankProgress seen;
  Gate begun;
  Work work{.op = GetParam().op, .m = 8192, .n = 4096, .k = 4096, .pace = Pace::kLate};
  work.meanwhile = [&](const Session& session) {
    if (session.options().rank == 1) return begun.wait();
    begun.open();
    seen = look_until(
        session, [](const auto& now) { return now.tiles != 0 && now.tiles_done > now.tiles / 4; });
  };
  std::string wrong[2];
  for_ranks(2, [&](std::uint32_t rank) {
    wrong[rank] = run_rank(place(*cluster, 2, rank, "told"), work);
    if (rank == 0 && !wrong[0].empty()) begun.open();
  });
  for (const std::string& one : wrong) EXPECT_EQ(one, "");
  fmt::print("{}\n", daemon::control::describe(seen));
  EXPECT_GT(seen.tiles, 0u);
  EXPECT_GT(seen.tiles_done, 0u);
  EXPECT_LE(seen.tiles_done, seen.tiles);
}

INSTANTIATE_TEST_SUITE_P(Late, ToldOnGpu, testing::ValuesIn(cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Large, TilesOnGpu,
                         testing::Values(Case{"gemm-ar", 1}, Case{"moe", 1}, Case{"combine", 1},
                                         Case{"ring", 1}),
                         name_of_case);

}  // namespace
}  // namespace mk
