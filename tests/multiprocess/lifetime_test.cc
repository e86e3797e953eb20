// Operators and sessions that end at once, over real daemons: nothing fails, and nothing stays. By
// default a few rounds; MK_TEST_LIFETIME=full runs 2,000 of each operator and fabric, 500 with
// delays, and 10,000 operators in one session. Most of that is waiting: run a process for each
// test.

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "tests/client/lifetime_runs.h"
#include "tests/multiprocess/cluster.h"
#include "tests/multiprocess/delays.h"
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

/// Many jobs, as many at a time as `full()` says: both ranks attach, create, launch once, destroy
/// and detach, each at once or a little later.
void live_and_die(const tools::DaemonSet& daemons, Kind kind, std::uint32_t rounds) {
  const std::uint32_t at_a_time = full() ? 8 : 2;
  std::atomic<std::uint32_t> next{0};
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < at_a_time; ++i) {
    threads.emplace_back([&] {
      for (std::uint32_t round = next++; round < rounds && !testing::Test::HasFailure();
           round = next++) {
        // Pauses of up to 3 s let all threads of the daemons fall asleep. One is enough here.
        const bool sleeps = full() || (round == 5 && kind == Kind::kGemmAllReduce);
        const std::string name = fmt::format("{}-{}", name_of(kind), round);
        for_both([&](std::uint32_t rank) {
          live_once(place(daemons, name, rank), kind, round, sleeps ? 3'000'000us : 2'000us);
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Place {
  Kind kind;
  const char* fabric;
};
std::vector<Place> places() {
  std::vector<Place> all;
  for (const Kind kind : kKinds) {
    for (const char* const fabric : {"loopback", "ofi"}) all.push_back({kind, fabric});
  }
  return all;
}
void PrintTo(const Place& place, std::ostream* out) {
  *out << name_of(place.kind) << " over " << place.fabric;
}

class DestroyedAtOnce : public testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    daemons_ = start_daemons(2, GetParam().fabric);
    ASSERT_NE(nullptr, daemons_);
  }
  void TearDown() override {
    if (daemons_ == nullptr) return;
    EXPECT_TRUE(daemons_->stop(120s));
  }
  void run(std::uint32_t rounds) {
    live_and_die(*daemons_, GetParam().kind, rounds);
    if (full() && !HasFailure()) {
      std::cout << testing::PrintToString(GetParam()) << ": " << rounds << " times\n";
    }
  }
  std::unique_ptr<tools::DaemonSet> daemons_;
};

TEST_P(DestroyedAtOnce, FailsNobody) { run(full() ? 2000 : 6); }

// A rank's threads or a whole daemon stand still, while the other rank destroys and goes.
TEST_P(DestroyedAtOnce, FailsNobodyWhileOthersAreDelayed) {
  const auto most = full() ? 100ms : 20ms;
  const ThreadDelays threads(most, 1);
  const ProcessDelays daemons({daemons_->process(0).pid(), daemons_->process(1).pid()}, most, 2);
  run(full() ? 500 : 4);
}

INSTANTIATE_TEST_SUITE_P(Operators, DestroyedAtOnce, testing::ValuesIn(places()),
                         [](const testing::TestParamInfo<Place>& test) {
                           return fmt::format("{}_{}", name_of(test.param.kind), test.param.fabric);
                         });

class OverRealDaemons : public testing::TestWithParam<const char*> {};

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
