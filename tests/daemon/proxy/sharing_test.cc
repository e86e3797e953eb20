// What jobs get of a saturated link, what their limits leave them, and how long a command of one
// waits behind a flood of another's. The link serves writes one after the other on the test's
// clock, so that every number is the same in every run.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <vector>

#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

constexpr std::uint64_t kPassNs = 250;          ///< a pass of the proxy takes so long
constexpr std::uint64_t kMessageNs = 50;        ///< the link, per write: 20 million a second
constexpr double kLinkBytesPerSecond = 12.5e9;  ///< and per byte: 100 Gbit/s
constexpr std::uint64_t kLatencyNs = 2'000;

class PacedRig : public ProxyRig {
 public:
  PacedRig() : ProxyRig({}, {.name = "scripted", .link_depth = 256}) {}

  /// Lets `ns` pass. `feed` is called before every pass.
  void run_for(std::uint64_t ns, const std::function<void()>& feed) {
    for (const std::uint64_t end = now_ns + ns; now_ns < end; now_ns += kPassNs) {
      feed();
      while (!due_.empty() && due_.front().at_ns <= now_ns) {
        endpoint->complete(due_.front().cookie);
        due_.pop_front();
      }
      proxy->step();
      for (const auto& submission : endpoint->submissions) {
        for (const fabric::Write& write : submission.writes) {
          const double wire_ns = static_cast<double>(write.bytes) * 1e9 / kLinkBytesPerSecond;
          free_ns_ = std::max(free_ns_, now_ns) + kMessageNs + static_cast<std::uint64_t>(wire_ns);
          due_.push_back({free_ns_ + kLatencyNs, write.cookie});
        }
      }
      endpoint->submissions.clear();
      endpoint->offered.clear();
    }
  }

 private:
  struct Due {
    std::uint64_t at_ns;
    std::uint64_t cookie;
  };
  std::deque<Due> due_;
  std::uint64_t free_ns_ = 0;
};

/// Keeps a session's ring full.
void fill(TestSession& session, std::uint32_t bytes) {
  while (session.producers[0].try_push(write_command(1, 0, bytes))) {
  }
}

std::uint64_t bytes_of(TestSession& session) { return session.lane_stats().bytes.value(); }

class SharesOfALink : public testing::TestWithParam<std::uint32_t> {};

TEST_P(SharesOfALink, Weights1And3GetAQuarterAndThreeQuarters) {
  PacedRig rig;
  auto& light = rig.add_session(0, {.weight = 1});
  auto& heavy = rig.add_session(1, {.weight = 3});
  for (auto* session : {&light, &heavy}) rig.bind_peer(*session, 1, 0);
  rig.run_for(40'000'000, [&] {
    fill(light, GetParam());
    fill(heavy, GetParam());
  });
  const double all = static_cast<double>(light.completed() + heavy.completed());
  EXPECT_NEAR(static_cast<double>(light.completed()) / all, 0.25, 0.0125);
  EXPECT_NEAR(static_cast<double>(heavy.completed()) / all, 0.75, 0.0375);
  // And the link is saturated: nothing is lost by sharing it.
  const double moved = all * static_cast<double>(GetParam());
  const double possible =
      40e6 / (kMessageNs + static_cast<double>(GetParam()) * 1e9 / kLinkBytesPerSecond);
  EXPECT_GT(moved, 0.97 * possible * static_cast<double>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Bytes, SharesOfALink, testing::Values(4u << 10, 64u << 10, 256u << 10),
                         [](const auto& test) { return std::to_string(test.param); });

/// The median time from commit to completion of commands of 64 KiB, one at a time.
double median_latency_ns(bool flooded) {
  PacedRig rig;
  auto& victim = rig.add_session(0);
  auto& flood = rig.add_session(1, {.lanes = 4});
  for (auto* session : {&victim, &flood}) rig.bind_peer(*session, 1, 0);
  std::vector<double> latencies;
  std::uint64_t committed_ns = 0;
  rig.run_for(20'000'000, [&] {
    if (flooded) {
      for (auto& producer : flood.producers) {
        while (producer.try_push(write_command(1, 0, 8))) {
        }
      }
    }
    if (victim.completed() < victim.producers[0].produced) return;
    if (committed_ns != 0) latencies.push_back(static_cast<double>(rig.now_ns - committed_ns));
    committed_ns = rig.now_ns;
    victim.push(1, 1, 0, 64 << 10);
  });
  EXPECT_GT(latencies.size(), 500u);
  if (flooded) {
    EXPECT_GT(flood.completed(), 20'000u) << "it was no flood";
  }
  std::nth_element(latencies.begin(), latencies.begin() + latencies.size() / 2, latencies.end());
  return latencies[latencies.size() / 2];
}

TEST(Sharing, AFloodOfSmallCommandsDoesNotDoubleAnothersMedianLatency) {
  const double alone = median_latency_ns(false);
  const double beside = median_latency_ns(true);
  RecordProperty("alone_ns", std::to_string(alone));
  RecordProperty("beside_ns", std::to_string(beside));
  EXPECT_LE(beside, 2 * alone);
}

TEST(Limits, BytesPerSecondAreKept) {
  for (const std::uint32_t bytes : {64u, 4096u, 1u << 20}) {
    PacedRig rig;
    auto& session = rig.add_bound_session();
    rig.proxy->apply(SetShare{0, 1, {.bytes_per_second = 1e9}});
    rig.run_for(100'000'000, [&] { fill(session, bytes); });
    // 100 ms, and the burst at the start.
    const double most = 1e9 * (0.1 + 1e-9 * Pacer::kBurstNs) + bytes;
    EXPECT_LE(static_cast<double>(bytes_of(session)), most) << bytes;
    if (bytes > 64) {
      EXPECT_GE(static_cast<double>(bytes_of(session)), 0.98e8) << bytes;
    }
  }
}

TEST(Limits, CommandsPerSecondAreKeptWhateverTheirSize) {
  for (const std::uint32_t bytes : {8u, 65536u}) {
    PacedRig rig;
    auto& session = rig.add_bound_session({.lanes = 1});
    rig.proxy->apply(SetShare{0, 1, {.commands_per_second = 50'000}});
    rig.run_for(100'000'000, [&] { fill(session, bytes); });
    EXPECT_NEAR(static_cast<double>(session.completed()), 5'000 + 250, 20) << bytes;
  }
}

TEST(Limits, OneSessionsLimitIsTheOthersGain) {
  PacedRig rig;
  auto& limited = rig.add_session(0);
  auto& other = rig.add_session(1);
  for (auto* session : {&limited, &other}) rig.bind_peer(*session, 1, 0);
  rig.proxy->apply(SetShare{0, 1, {.bytes_per_second = 1.25e9}});
  rig.run_for(40'000'000, [&] {
    fill(limited, 64 << 10);
    fill(other, 64 << 10);
  });
  const double all = static_cast<double>(bytes_of(limited) + bytes_of(other));
  EXPECT_NEAR(static_cast<double>(bytes_of(limited)) / all, 0.1, 0.015);
  EXPECT_GT(all, 0.95 * 0.04 * kLinkBytesPerSecond);
}

TEST(Limits, SharesChangeWhileCommandsFlow) {
  PacedRig rig;
  auto& one = rig.add_session(0);
  auto& two = rig.add_session(1);
  for (auto* session : {&one, &two}) rig.bind_peer(*session, 1, 0);
  const auto feed = [&] {
    fill(one, 64 << 10);
    fill(two, 64 << 10);
  };
  const auto share_of_one = [&] {
    const std::uint64_t before[] = {one.completed(), two.completed()};
    rig.run_for(40'000'000, feed);
    const double gained = static_cast<double>(one.completed() - before[0]);
    return gained / (gained + static_cast<double>(two.completed() - before[1]));
  };
  EXPECT_NEAR(share_of_one(), 0.5, 0.03);
  rig.proxy->apply(SetShare{1, 4, {}});
  rig.run_for(5'000'000, feed);  // what is credited already is served first
  EXPECT_NEAR(share_of_one(), 0.2, 0.02);
  rig.proxy->apply(SetShare{0, 4, {}});
  rig.run_for(5'000'000, feed);
  EXPECT_NEAR(share_of_one(), 0.5, 0.03);
  rig.proxy->apply(SetShare{1, 4, {.commands_per_second = 1}});
  rig.run_for(5'000'000, feed);
  EXPECT_GT(share_of_one(), 0.99);
  rig.proxy->apply(SetShare{1, 4, {}});
  rig.run_for(5'000'000, feed);
  EXPECT_NEAR(share_of_one(), 0.5, 0.03);
  rig.proxy->apply(SetShare{63, 4, {}});  // nobody there
  rig.proxy->step();
}

TEST(Limits, APacerAdmitsALargeCommandAfterARestAndThenCollects) {
  Pacer pacer;
  EXPECT_FALSE(pacer.limited());
  EXPECT_TRUE(pacer.admits(0));
  pacer.set({.bytes_per_second = 1000});
  EXPECT_TRUE(pacer.limited());
  EXPECT_TRUE(pacer.admits(1'000'000'000));
  pacer.take(1'000'000'000, 10'000);  // ten seconds' worth
  EXPECT_FALSE(pacer.admits(1'000'000'001));
  EXPECT_EQ(pacer.due_ns(), 11'000'000'000 - Pacer::kBurstNs);
  EXPECT_TRUE(pacer.admits(pacer.due_ns()));
  pacer.set({.bytes_per_second = 1000, .commands_per_second = 1});
  EXPECT_TRUE(pacer.admits(1'000'000'002)) << "a new limit forgets old debts";
  pacer.take(1'000'000'002, 1);
  EXPECT_EQ(pacer.due_ns(), 2'000'000'002 - Pacer::kBurstNs) << "the stricter of the two";
}

}  // namespace
}  // namespace mk::daemon::test
