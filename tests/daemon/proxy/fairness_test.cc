// Who is served when there is more than a link carries: sessions by weight, lanes in turn, nobody
// never.
#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <map>
#include <vector>

#include "daemon/proxy/engine.h"
#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

/// A rig whose links each carry a fixed number of writes per pass, and producers that keep their
/// rings full.
class CongestedRig : public ProxyRig {
 public:
  explicit CongestedRig(std::size_t per_pass) {
    endpoint->accept = [this, per_pass](fabric::LinkId link, std::size_t offered) {
      const std::size_t taken = std::min(offered, per_pass - carried_[link]);
      carried_[link] += taken;
      return taken;
    };
    endpoint->complete_at_once = true;
  }

  void keep_full(TestSession& session, std::uint16_t peer, std::uint32_t lane = 0,
                 std::uint32_t bytes = 64) {
    feeds_.push_back({&session, peer, lane, bytes});
  }

  void carry(int passes) {
    for (int i = 0; i < passes; ++i) {
      for (const Feed& feed : feeds_) {
        while (
            feed.session->producers[feed.lane].try_push(write_command(feed.peer, 0, feed.bytes))) {
        }
      }
      carried_.clear();
      proxy->step();
      now_ns += 10'000;
    }
  }

 private:
  struct Feed {
    TestSession* session;
    std::uint16_t peer;
    std::uint32_t lane;
    std::uint32_t bytes;
  };
  std::vector<Feed> feeds_;
  std::map<fabric::LinkId, std::size_t> carried_;
};

double ratio(std::uint64_t a, std::uint64_t b) {
  return static_cast<double>(a) / static_cast<double>(b);
}

TEST(Fairness, WeightsDecideTheShareOfACongestedLink) {
  for (const std::size_t per_pass : {1u, 3u, 8u, 20u}) {
    CongestedRig rig(per_pass);
    auto& light = rig.add_session(0, {.weight = 1});
    auto& heavy = rig.add_session(1, {.weight = 3});
    for (auto* session : {&light, &heavy}) {
      rig.bind_peer(*session, 1, 0);
      rig.keep_full(*session, 1);
    }
    rig.carry(static_cast<int>(40'000 / per_pass));
    EXPECT_NEAR(ratio(heavy.completed(), light.completed()), 3.0, 0.15) << per_pass << " per pass";
  }
}

TEST(Fairness, EqualWeightsShareBytesNotCommands) {
  CongestedRig rig(4);
  auto& small = rig.add_session(0);
  auto& large = rig.add_session(1);
  for (auto* session : {&small, &large}) rig.bind_peer(*session, 1, 0);
  rig.keep_full(small, 1, 0, 64 << 10);
  rig.keep_full(large, 1, 0, 256 << 10);
  rig.carry(20'000);
  EXPECT_NEAR(ratio(small.lane_stats().bytes.value() + small.completed() * 8192,
                    large.lane_stats().bytes.value() + large.completed() * 8192),
              1.0, 0.05);
}

TEST(Fairness, AnUncongestedLinkDoesNotBendTheSharesOfACongestedOne) {
  CongestedRig rig(8);
  auto& light = rig.add_session(0, {.weight = 1});
  auto& heavy = rig.add_session(1, {.weight = 3});
  auto& elsewhere = rig.add_session(2, {.weight = 1});
  for (auto* session : {&light, &heavy}) {
    rig.bind_peer(*session, 1, 0);
    rig.keep_full(*session, 1);
  }
  rig.bind_peer(elsewhere, 1, 1);
  rig.keep_full(elsewhere, 1);
  rig.carry(10'000);
  EXPECT_NEAR(ratio(heavy.completed(), light.completed()), 3.0, 0.15);
  // A new round begins with a pass of its own, so a link that counts by the pass misses a little.
  EXPECT_NEAR(ratio(elsewhere.completed(), heavy.completed() + light.completed()), 1.0, 0.02);
}

TEST(Fairness, AnIdleSessionsShareGoesToTheOthersAndIsNotSaved) {
  CongestedRig rig(8);
  auto& busy = rig.add_session(0);
  auto& late = rig.add_session(1);
  for (auto* session : {&busy, &late}) rig.bind_peer(*session, 1, 0);
  rig.keep_full(busy, 1);
  rig.carry(5'000);
  EXPECT_NEAR(static_cast<double>(busy.completed()), 40'000, 700);
  rig.keep_full(late, 1);
  const std::uint64_t before = busy.completed();
  rig.carry(5'000);
  EXPECT_NEAR(ratio(busy.completed() - before, late.completed()), 1.0, 0.05);
}

TEST(Fairness, LanesOfASessionTakeTurns) {
  for (const std::size_t per_pass : {1u, 2u, 7u, 8u}) {
    CongestedRig rig(per_pass);
    auto& session = rig.add_bound_session({.lanes = 5});
    for (std::uint32_t lane = 0; lane < 5; ++lane) rig.keep_full(session, 1, lane);
    rig.carry(static_cast<int>(40'000 / per_pass));
    for (std::uint32_t lane = 0; lane < 5; ++lane) {
      EXPECT_NEAR(static_cast<double>(session.completed(lane)), 8'000, 800)
          << "lane " << lane << ", " << per_pass;
    }
  }
}

TEST(Fairness, AHugeCommandIsPaidOffAndStarvesNobody) {
  CongestedRig rig(8);
  auto& huge = rig.add_session(0);
  auto& small = rig.add_session(1);
  FakeLocalRegion big_source;
  FakeRemoteRegion big_destination;
  for (auto* session : {&huge, &small}) rig.bind_peer(*session, 1, 0);
  rig.proxy->apply(BindBuffer{0, kHandle, &big_source, shm::kCommandPayloadBytesMax});
  rig.proxy->apply(BindPeerBuffer{0, 1, kHandle, &big_destination, shm::kCommandPayloadBytesMax});
  rig.keep_full(huge, 1, 0, shm::kCommandPayloadBytesMax);
  rig.keep_full(small, 1, 0, 64);
  rig.carry(5'000);
  EXPECT_GE(huge.completed(), 1u);
  EXPECT_GT(small.completed(), 39'000u);
}

TEST(Fairness, AnIndebtedSessionAloneNeverWaits) {
  CongestedRig rig(8);
  auto& session = rig.add_session(0);
  FakeLocalRegion big_source;
  FakeRemoteRegion big_destination;
  rig.bind_peer(session, 1, 0);
  rig.proxy->apply(BindBuffer{0, kHandle, &big_source, shm::kCommandPayloadBytesMax});
  rig.proxy->apply(BindPeerBuffer{0, 1, kHandle, &big_destination, shm::kCommandPayloadBytesMax});
  rig.keep_full(session, 1, 0, shm::kCommandPayloadBytesMax);
  rig.carry(300);
  EXPECT_GE(session.completed(), 290u) << "one command a pass, each of 512 rounds";
}

TEST(Fairness, ManySessionsBeyondAPassesBudgetAreAllServed) {
  CongestedRig rig(100'000);
  for (SessionSlot slot = 0; slot < 32; ++slot) {
    auto& session = rig.add_session(slot);
    rig.bind_peer(session, 1, slot % 8);
    rig.keep_full(session, 1);
  }
  rig.carry(2'000);
  std::uint64_t least = ~0ull;
  std::uint64_t most = 0;
  for (const auto& session : rig.sessions) {
    least = std::min(least, session->completed());
    most = std::max(most, session->completed());
  }
  EXPECT_GT(least, 0u);
  EXPECT_LE(most - least, most / 10);
}

/// Sessions that fill a whole pass each, and one on a link of its own that nobody else wants.
class FilledPasses : public testing::TestWithParam<SessionSlot> {
 protected:
  FilledPasses() {
    for (SessionSlot slot = 0; slot < GetParam(); ++slot) {
      auto& filler = rig.add_session(slot, {.lanes = 16, .outstanding_max = 1024, .weight = 1000});
      rig.bind_peer(filler, 1, slot);
      for (std::uint32_t lane = 0; lane < 16; ++lane) rig.keep_full(filler, 1, lane);
    }
    other = &rig.add_session(GetParam());
    rig.bind_peer(*other, 1, 7);
    rig.keep_full(*other, 1);
  }
  /// Enough sweeps for many rounds of the other's, and far fewer than a round of a filler's has.
  void expect_rounds_for_the_other() {
    constexpr int kSweeps = 200;
    rig.carry(kSweeps * static_cast<int>(GetParam() + 1));
    for (SessionSlot slot = 0; slot < GetParam(); ++slot) {
      EXPECT_GT(rig.sessions[slot]->completed(), 2u * kSweeps) << "it filled no passes";
    }
    EXPECT_GT(other->completed(), kSweeps / 2 * std::uint64_t{kLaneTurnMax});
  }

  CongestedRig rig{100'000};
  TestSession* other = nullptr;
};

TEST_P(FilledPasses, ByARoundOfAThousandKeepNoRoundFromOthers) { expect_rounds_for_the_other(); }

TEST_P(FilledPasses, ByCommandsToARankThatLeftKeepNoRoundFromOthers) {
  for (SessionSlot slot = 0; slot < GetParam(); ++slot) rig.proxy->apply(RetirePeer{slot, 1});
  expect_rounds_for_the_other();
}

// A pass that finds nothing for the rest of the sessions says that there may be more, so the thread
// does not sleep on what the first ones have left.
TEST(Fairness, APassThatEndsASweepIsNotTheLastWithWork) {
  ProxyRig rig;
  auto& busy = rig.add_session(0, {.lanes = 16});
  auto& idle = rig.add_session(1);
  for (auto* session : {&busy, &idle}) rig.bind_peer(*session, 1, 0);
  rig.proxy->apply(RetirePeer{0, 1});  // so that no completion is work, either
  for (std::uint32_t lane = 0; lane < 16; ++lane) busy.push(1, 1000, lane);
  rig.run();
  for (std::uint32_t lane = 0; lane < 16; ++lane) EXPECT_EQ(busy.completed(lane), 1000u) << lane;
}

INSTANTIATE_TEST_SUITE_P(Sessions, FilledPasses, testing::Values(1u, 2u, 3u, 7u));

}  // namespace
}  // namespace mk::daemon::test
