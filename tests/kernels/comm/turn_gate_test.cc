// A turn on a GPU, lane by lane, with ranks that have ended, have not, or have failed.
// (workspace_turn_test.cc has it among launches.)

#include "kernels/comm/turn_gate.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "shm/flag.h"

namespace mk::kernels {
namespace {

constexpr std::uint32_t kLocals = 3;
constexpr std::uint64_t kFirst = 4096, kSecond = 8192;
constexpr std::uint64_t kBytes = 12288;

/// One lane that does the work of all, and a clock that goes on with each look.
struct Lane {
  std::function<void(std::uint64_t now)> meanwhile = [](std::uint64_t) {};
  std::uint64_t now = 0;
  int waiting = 0;
  int waits_begun = 0;

  static std::uint32_t lane() { return 0; }
  static std::uint32_t lanes() { return 1; }
  static bool all(bool yes) { return yes; }
  void waits(bool begin) {
    waiting += begin ? 1 : -1;
    waits_begun += begin;
  }
  std::uint64_t now_ns() const { return now; }
  bool pause(std::uint32_t) {
    meanwhile(++now);
    return true;
  }
};

class Gate : public testing::Test {
 protected:
  Gate() : memory_(kLocals, std::vector<std::uint64_t>(kBytes / 8)) {
    for (std::uint32_t local = 0; local < kLocals; ++local)
      gate_.memory.workspaces[local] = reinterpret_cast<std::byte*>(memory_[local].data());
    gate_.memory.world = {1, kLocals, 0, 1};
    gate_.words_at = kSecond;
    gate_.control.stop = &local_.stop;
    gate_.control.record = &local_.failure;
    gate_.control.session_abort = &abort_;
    gate_.control.timeout_ns = 100;
    *gate_.last() = kFirst;
  }
  std::uint32_t& finished(std::uint64_t words, std::uint32_t local) {
    return *reinterpret_cast<std::uint32_t*>(gate_.memory.workspaces[1] + words +
                                             WorkspaceHead{kLocals}.finished(local));
  }
  std::uint32_t failed(std::uint32_t local, std::uint64_t words) {
    return *gate_.failed(local, words);
  }
  void end_all(std::uint32_t epoch) {
    for (std::uint32_t local = 0; local < kLocals; ++local) finished(kFirst, local) = epoch;
  }
  bool take() { return take_turn(lane_, gate_, totals_); }

  std::vector<std::vector<std::uint64_t>> memory_;
  TurnGate gate_;
  LocalWords local_;
  std::uint32_t abort_ = 0;
  Lane lane_;
  WaitTotals totals_;
};

TEST_F(Gate, NobodyWaitsForNobodyNorForItself) {
  end_all(7);
  finished(kFirst, 2) = 6;
  *gate_.last() = 0;
  EXPECT_TRUE(take());
  EXPECT_EQ(kSecond, *gate_.last());
  finished(kSecond, 1) = 3;  // the others have not ended that yet
  EXPECT_TRUE(take());
  EXPECT_EQ(0, lane_.waits_begun);
}

TEST_F(Gate, GoesOnAtOnceWhenAllHaveEnded) {
  end_all(7);
  finished(kFirst, 0) = 8;  // ahead already
  EXPECT_TRUE(take());
  EXPECT_EQ(kSecond, *gate_.last());
  EXPECT_EQ(0, lane_.waits_begun);
}

TEST_F(Gate, WaitsForEveryLocalRank) {
  for (const std::uint32_t late : {0u, 2u}) {
    end_all(7);
    *gate_.last() = kFirst;
    finished(kFirst, late) = 6;
    lane_ = {};
    lane_.meanwhile = [&](std::uint64_t now) {
      EXPECT_EQ(1, lane_.waiting);
      if (now == 50) finished(kFirst, late) = 7;
    };
    EXPECT_TRUE(take());
    EXPECT_EQ(50u, lane_.now);
    EXPECT_EQ(1, lane_.waits_begun);
    EXPECT_EQ(0, lane_.waiting);
    EXPECT_EQ(0u, local_.stop);
  }
}

// A graph that is replayed: each launch takes its own turn.
TEST_F(Gate, TurnsGoToAndFro) {
  end_all(1);
  ASSERT_TRUE(take());
  gate_.words_at = kFirst;
  for (std::uint32_t local = 0; local < kLocals; ++local) finished(kSecond, local) = 1;
  finished(kSecond, 0) = 0;
  lane_.meanwhile = [&](std::uint64_t now) {
    if (now == 20) finished(kSecond, 0) = 1;
  };
  ASSERT_TRUE(take());
  EXPECT_EQ(20u, lane_.now);
  EXPECT_EQ(kFirst, *gate_.last());
}

// All have ended, but copy engines may still write: each rank says when its own have done.
TEST_F(Gate, AfterLaunchesThatEnginesOutlastEachRankHasToSayThatItLeft) {
  const auto left = [&](std::uint32_t at, std::uint32_t by) -> std::uint32_t& {
    return *WorkspaceTurn::left(gate_.memory, at, by);
  };
  for (const std::uint32_t late : {0u, 2u}) {
    end_all(7);
    *gate_.last() = kFirst | TurnGate::kOutlasts;
    const std::uint32_t number = *gate_.turns() + 1;
    for (std::uint32_t by = 0; by < kLocals; ++by) left(1, by) = by == late ? number - 1 : number;
    lane_ = {};
    lane_.meanwhile = [&](std::uint64_t now) {
      for (std::uint32_t at = 0; at < kLocals; ++at) EXPECT_EQ(number, left(at, 1));
      if (now == 50) left(1, late) = number;
    };
    EXPECT_TRUE(take());
    EXPECT_EQ(50u, lane_.now);
    EXPECT_EQ(number, *gate_.turns());
    EXPECT_EQ(kSecond, *gate_.last());
  }
  // The same operator again waits for nobody, and says what comes after it.
  gate_.outlasts = true;
  lane_ = {};
  *gate_.last() = gate_.mark();
  EXPECT_TRUE(take());
  EXPECT_EQ(0, lane_.waits_begun);
  *gate_.last() = kFirst;
  EXPECT_TRUE(take());
  EXPECT_EQ(kSecond | TurnGate::kOutlasts, *gate_.last());
}

TEST_F(Gate, WhoDoesNotLeaveIsNamed) {
  end_all(7);
  *gate_.last() = kFirst | TurnGate::kOutlasts;
  *WorkspaceTurn::left(gate_.memory, 1, 0) = 1;
  EXPECT_FALSE(take());
  EXPECT_EQ(WaitEnd::kTimeout, local_.failure.end);
  EXPECT_EQ(2u, local_.failure.site.rank);
  EXPECT_EQ(TurnGate::note_of(kFirst), local_.failure.site.index[1]);
}

TEST_F(Gate, EndsAtItsDeadlineAndEndsWhoIsLate) {
  end_all(7);
  finished(kFirst, 2) = 6;
  EXPECT_FALSE(take());
  EXPECT_EQ(0, lane_.waiting);
  EXPECT_EQ(1u, local_.stop);
  EXPECT_EQ(WaitEnd::kTimeout, local_.failure.end);
  EXPECT_EQ(2u, local_.failure.site.rank);
  EXPECT_EQ(TurnGate::note_of(kFirst), local_.failure.site.index[1]);
  // The late rank's launch must not end well: this one's copies may come.
  for (std::uint32_t local = 0; local < kLocals; ++local)
    EXPECT_EQ(gate_.memory.world.rank() + 1, failed(local, kFirst));
  EXPECT_EQ(0u, failed(1, kSecond)) << "this rank itself is the cause";
}

TEST_F(Gate, HearsThatTheSessionEnds) {
  end_all(7);
  finished(kFirst, 0) = 6;
  lane_.meanwhile = [&](std::uint64_t now) { abort_ = now == 5; };
  EXPECT_FALSE(take());
  EXPECT_EQ(5u, lane_.now);
  EXPECT_EQ(WaitEnd::kSessionAbort, local_.failure.end);
}

TEST_F(Gate, HearsThatAnotherRankFailed) {
  end_all(7);
  finished(kFirst, 0) = 6;
  lane_.meanwhile = [&](std::uint64_t now) {
    if (now == 5) *gate_.failed(1, kFirst) = 1;
  };
  EXPECT_FALSE(take());
  EXPECT_EQ(5u, lane_.now);
  EXPECT_EQ(WaitEnd::kPeerFailed, local_.failure.end);
  EXPECT_EQ(1u, failed(1, kFirst)) << "the first who failed stays the cause";
  EXPECT_EQ(1u, failed(1, kSecond)) << "and is this launch's, too";
}

// Its own launch has not ended: what it has ended last is less than what the others have.
TEST_F(Gate, RefusesAfterAFailureAlthoughAllHaveEndedMore) {
  end_all(7);
  *gate_.failed(1, kFirst) = 2;
  finished(kFirst, 1) = 6;
  EXPECT_FALSE(take());
  EXPECT_EQ(0u, lane_.now);
  EXPECT_EQ(WaitEnd::kPeerFailed, local_.failure.end);
  EXPECT_EQ(1u, local_.stop);
  EXPECT_EQ(2u, failed(1, kSecond));
}

}  // namespace
}  // namespace mk::kernels
