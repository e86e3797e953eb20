// The wait of all roles: how it ends, what it records, and how that reads.
#include "kernels/comm/wait.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/comm/wait_text.h"

namespace mk::kernels {
namespace {

constexpr std::uint64_t kTimeoutNs = 1000;

/// Time passes by one per pause.
struct FakePacer {
  std::uint64_t now = 0;
  std::uint32_t pauses = 0;
  std::uint64_t now_ns() { return now; }
  bool pause(std::uint32_t attempt) {
    pauses = attempt + 1;
    ++now;
    return true;
  }
};

struct WaitTest : ::testing::Test {
  WaitTest() {
    control.session_abort = &session_abort;
    control.process_abort = &process_abort;
    control.peer_failed = &peer_failed;
    control.stop = &stop;
    control.record = &record;
    control.timeout_ns = kTimeoutNs;
    site.role = Role::kReduce;
    site.kind = FlagKind::kTileReady;
    site.block = 2;
    site.rank = 3;
    site.index[0] = 1;
    site.index[1] = 5;
  }

  /// Waits for epoch 17; `at_pause` is called at every look.
  template <class AtLook>
  bool wait(AtLook&& at_look) {
    pacer.pauses = 0;
    return wait_until(pacer, control, site, totals, 17, [&](std::uint64_t* seen) {
      at_look(pacer.pauses);
      *seen = flag;
      return shm::epoch_reached(flag, 17);
    });
  }
  bool wait() {
    return wait([](std::uint32_t) {});
  }
  std::string text() {
    return describe(record, "gemm_ar", 17, World{2, 2, 1, 0}, peer_failed).message;
  }

  std::uint32_t session_abort = 0, process_abort = 0, peer_failed = 0, stop = 0, flag = 16;
  WaitRecord record;
  WaitControl control;
  WaitSite site;
  WaitTotals totals;
  FakePacer pacer;
};

TEST_F(WaitTest, AWaitThatIsOverAtTheFirstLookCostsNothing) {
  flag = 18;
  EXPECT_TRUE(wait());
  EXPECT_EQ(pacer.pauses, 0u);
  EXPECT_EQ(totals.count, 0u);
}

TEST_F(WaitTest, EndsWhenTheFlagShowsTheEpoch) {
  EXPECT_TRUE(wait([&](std::uint32_t pauses) {
    if (pauses == 10) flag = 17;
  }));
  EXPECT_EQ(totals.count, 1u);
  EXPECT_EQ(totals.ns, 10u);
  EXPECT_EQ(record.claimed, 0u);
  EXPECT_EQ(stop, 0u);
}

TEST_F(WaitTest, EpochsCompareAcrossTheWrap) {
  flag = 0xffffffffu;
  EXPECT_TRUE(wait_flag(pacer, control, site, totals, &flag, 0xfffffffeu));
  flag = 2;
  EXPECT_TRUE(wait_flag(pacer, control, site, totals, &flag, 0xffffffffu));
}

TEST_F(WaitTest, TheDeadlineEndsItAndSaysWhoWaitedForWhat) {
  EXPECT_FALSE(wait());
  EXPECT_EQ(record.end, WaitEnd::kTimeout);
  EXPECT_EQ(record.expected, 17u);
  EXPECT_EQ(record.seen, 16u);
  EXPECT_EQ(record.waited_ns, kTimeoutNs + 1);
  EXPECT_EQ(stop, 1u);
  record.waited_ns = 1'500'000'000;
  EXPECT_EQ(
      text(),
      "gemm_ar launch 17 on rank 2: reduce block 2 waited 1.500 s for rank 3: flag "
      "tile-ready[local rank 1][owned "
      "tile 5] shows 16, expected epoch 17; find out why it is behind, or raise the wait timeout");
}

TEST_F(WaitTest, IndirectWaitsGetMoreTime) {
  site.hops = 2;
  EXPECT_FALSE(wait());
  EXPECT_EQ(record.waited_ns, kTimeoutNs * 3 / 2 + 1);
}

TEST_F(WaitTest, AWaitFarFromItsCauseSaysThatOthersMayBeBehind) {
  site.hops = 4;
  EXPECT_FALSE(wait());
  EXPECT_NE(text().find("why it, or a rank that it waits for, is behind"), std::string::npos);
}

TEST_F(WaitTest, AFlagThatCameBeforeTheClockWasReadCounts) {
  EXPECT_TRUE(wait([&](std::uint32_t pauses) {
    if (pauses == 3) {
      flag = 17;
      pacer.now = 100 * kTimeoutNs;
    }
  }));
}

TEST_F(WaitTest, AbortWordsEndIt) {
  const auto expect_end = [&](std::uint32_t& word, WaitEnd end, std::string_view words) {
    record = {};
    stop = 0;
    pacer = {};
    EXPECT_FALSE(wait([&](std::uint32_t pauses) {
      if (pauses == 4) word = 2;
    }));
    EXPECT_EQ(pacer.pauses, 4u);
    EXPECT_EQ(record.end, end);
    EXPECT_NE(text().find(words), std::string::npos) << text();
    EXPECT_EQ(describe(record, "gemm_ar", 17, {}, peer_failed).code, ErrorCode::kAborted);
    word = 0;
  };
  expect_end(session_abort, WaitEnd::kSessionAbort, "the session was aborted while reduce block 2");
  expect_end(process_abort, WaitEnd::kProcessAbort, "the connection to the daemon was lost while");
  peer_failed = 2;
  record = {};
  stop = 0;
  EXPECT_FALSE(wait());
  EXPECT_EQ(record.end, WaitEnd::kPeerFailed);
  EXPECT_NE(text().find("the launch of rank 1 on the same node failed"), std::string::npos)
      << text();
}

// A kernel's blocks leave such words for its poller, who tells people.
TEST(AwaitedWord, SaysWhomAWaitIsForAndForWhat) {
  EXPECT_EQ(AwaitedWord::role_word(0), 0u) << "nobody waits";
  for (const auto kind : {FlagKind::kLaunchRecord, FlagKind::kRowsIndexed}) {
    for (const std::uint32_t rank : {0u, 1023u}) {
      for (const std::uint32_t hops : {0u, 5u}) {
        WaitSite site;
        site.kind = kind;
        site.rank = rank;
        site.hops = hops;
        const std::uint32_t word = AwaitedWord::encode(site);
        EXPECT_NE(word, 0u);
        EXPECT_EQ(shm::decode_role(AwaitedWord::role_word(word)),
                  (shm::RoleWord{1, 1, rank, static_cast<std::uint32_t>(kind), hops}));
      }
    }
  }
}

TEST_F(WaitTest, OnlyTheFirstFailureIsRecorded) {
  EXPECT_FALSE(wait());
  site.block = 9;
  EXPECT_FALSE(wait()) << "stopped by the first";
  EXPECT_EQ(record.site.block, 2u);
  stop = 0;
  EXPECT_FALSE(wait()) << "its own deadline";
  EXPECT_EQ(record.site.block, 2u);
}

TEST_F(WaitTest, MissingWordsAreNoStop) {
  control.session_abort = control.process_abort = control.peer_failed = nullptr;
  EXPECT_EQ(control.stop_reason(), WaitEnd::kReached);
}

TEST(WaitText, EveryFlagHasItsName) {
  const auto text = [](FlagKind kind) {
    WaitRecord record;
    record.end = WaitEnd::kTimeout;
    record.site.kind = kind;
    record.site.index[0] = 3;
    record.site.index[1] = 4;
    record.site.rank = 7;
    return describe(record, "gemm_ar", 1, World{2, 4, 1, 1}, 0).message;
  };
  EXPECT_NE(text(FlagKind::kLaunchRecord).find("rank 7: flag launch-record[local rank 3]"),
            std::string::npos);
  EXPECT_NE(text(FlagKind::kChunkReduced).find("chunk-reduced[chunk 3]"), std::string::npos);
  EXPECT_NE(text(FlagKind::kOutReady).find("out-ready[local rank 3][chunk 4]"), std::string::npos);
  EXPECT_NE(text(FlagKind::kArrival).find("arrival[node 3][chunk 4]"), std::string::npos);
  EXPECT_NE(text(FlagKind::kRelease).find("release[node 3][bank 4]"), std::string::npos);
  EXPECT_NE(text(FlagKind::kCredit).find("its daemon: commands taken from lane 3 shows"),
            std::string::npos);
  EXPECT_NE(text(FlagKind::kCompleted).find("its daemon: commands completed of lane 3"),
            std::string::npos);
  EXPECT_NE(text(FlagKind::kBlockDone).find("block-done[receive block 4]"), std::string::npos);
  EXPECT_NE(text(FlagKind::kRowsIndexed).find("rows-indexed[local rank 3]"), std::string::npos);
  EXPECT_NE(text(FlagKind::kPassedOn).find("passed-on by the DMA engines shows 0, expected at"),
            std::string::npos);
}

}  // namespace
}  // namespace mk::kernels
