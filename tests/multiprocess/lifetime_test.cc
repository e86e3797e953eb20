// Operators and sessions that end at once, over real daemons: nothing fails, and nothing stays. By
// default a few rounds; MK_TEST_LIFETIME=full runs 2,000 of each operator and 10,000 operators in
// one session, which takes an hour on two cores.

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "tests/client/lifetime_runs.h"
#include "tests/multiprocess/cluster.h"
#include "tests/multiprocess/grpc_threads.h"

namespace mk::test {
namespace {

bool full() {
  const char* const wanted = std::getenv("MK_TEST_LIFETIME");
  return wanted != nullptr && std::string(wanted) == "full";
}

AttachOptions place(const tools::DaemonSet& daemons, const std::string& job, std::uint32_t rank) {
  auto options = AttachOptions::of_rank(job, rank, daemons.size(), 1);
  options.socket = daemons.client_socket(rank);
  options.timeout = 120s;
  return options;
}

void for_both(const std::function<void(std::uint32_t)>& body) {
  std::thread other(body, 1u);
  body(0);
  other.join();
}

/// What a process has: descriptors, mappings, and memory that is its own.
struct Holding {
  std::size_t descriptors = 0, mappings = 0, kilobytes = 0;
};
Holding holding_of(pid_t pid) {
  Holding has;
  const std::string folder = "/proc/" + std::to_string(pid);
  std::error_code gone;  // entries come and go while we look
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(folder + "/fd", gone))
    ++has.descriptors;
  std::ifstream maps(folder + "/maps");
  for (std::string line; std::getline(maps, line);) ++has.mappings;
  std::ifstream status(folder + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) has.kilobytes = std::strtoull(line.c_str() + 8, nullptr, 10);
  }
  return has;
}

class OverRealDaemons : public testing::TestWithParam<const char*> {};

TEST_P(OverRealDaemons, OperatorsDestroyedAfterTheirLaunchFailNobody) {
  auto daemons = start_daemons(2, GetParam());
  ASSERT_NE(nullptr, daemons);
  // Jobs side by side, as most of a round is waiting.
  const std::uint32_t jobs = full() ? 6 : 2;
  const std::uint32_t rounds = full() ? 2000 : 6;
  for (const Kind kind : kKinds) {
    std::atomic<std::uint32_t> next{0};
    std::vector<std::thread> threads;
    for (std::uint32_t job = 0; job < jobs; ++job) {
      threads.emplace_back([&] {
        for (std::uint32_t round = next++; round < rounds && !HasFailure(); round = next++) {
          // Now and then so long that all threads sleep as long as they may.
          const auto pause = round % 25 == 3 ? 3'000'000us : 2'000us;
          const std::string name = fmt::format("{}-{}", name_of(kind), round);
          for_both([&](std::uint32_t rank) {
            live_once(place(*daemons, name, rank), kind, round, pause);
          });
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (HasFailure()) return;
    if (full()) std::cout << name_of(kind) << " " << rounds << " times over " << GetParam() << "\n";
  }
  EXPECT_TRUE(daemons->stop(120s));
}

TEST_P(OverRealDaemons, OperatorsThatComeAndGoLeaveNothingBehind) {
  auto daemons = start_daemons(2, GetParam());
  ASSERT_NE(nullptr, daemons);
  const std::uint32_t rounds = full() ? 10'000 : 120;
  const std::uint32_t warm = rounds / 3;
  std::vector<Holding> before, after;
  const auto look = [&] {
    return std::vector{holding_of(::getpid()), holding_of(daemons->process(0).pid()),
                       holding_of(daemons->process(1).pid())};
  };
  for_both([&](std::uint32_t rank) {
    auto session = Session::attach(place(*daemons, "churn", rank));
    ASSERT_TRUE(session) << session.error().message;
    come_and_go(*session, rounds, [&](std::uint32_t round) {
      if (rank != 0) return;
      if (round == warm) before = look();
      if (round + 1 == rounds) after = look();
    });
  });
  ASSERT_EQ(before.size(), 3u);
  ASSERT_EQ(after.size(), 3u);
  for (std::size_t i = 0; i < before.size(); ++i) {
    SCOPED_TRACE(i == 0 ? "this process" : "a daemon");
    // Two or three operators are alive at any time, and the last to go may be on their way.
    EXPECT_LE(after[i].descriptors, before[i].descriptors + 16);
    EXPECT_LE(after[i].mappings, before[i].mappings + 40);
    if (full()) {
      EXPECT_LE(after[i].kilobytes, before[i].kilobytes + before[i].kilobytes / 10 + 4096);
      std::cout << GetParam() << ": descriptors " << before[i].descriptors << " to "
                << after[i].descriptors << ", mappings " << before[i].mappings << " to "
                << after[i].mappings << ", kB " << before[i].kilobytes << " to "
                << after[i].kilobytes << "\n";
    }
  }
  EXPECT_TRUE(daemons->stop(120s));
}

INSTANTIATE_TEST_SUITE_P(Fabrics, OverRealDaemons, testing::Values("loopback", "ofi"));

}  // namespace
}  // namespace mk::test
