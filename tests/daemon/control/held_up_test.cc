// What a daemon tells of a rank by its progress words, and whom ranks wait for.
#include "daemon/control/held_up.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/control/progress_watch.h"

namespace mk::daemon::control {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint32_t kCompute = 0, kReduce = 1, kReceive = 3;

shm::Progress launch(std::uint32_t epoch) {
  shm::Progress words{};
  words.op = shm::progress_operator("gemm_ar");
  words.epoch = epoch;
  words.tag = 7;
  words.tiles = 128;
  return words;
}

TEST(ProgressWatch, WhatWorksIsThePhaseWhateverWaits) {
  shm::Progress words = launch(12);
  words.roles[kCompute] = shm::encode({.running = 2, .waiting = 1, .rank = 1});
  words.roles[kReduce] = shm::encode({.running = 1, .waiting = 1, .rank = 3, .wait = 1});
  ProgressWatch watch(0);
  watch.look(words, true, kSecond);
  words.tiles_done = 3;
  watch.look(words, true, 3 * kSecond);
  const RankProgress seen = watch.seen(5 * kSecond);
  EXPECT_EQ(seen.phase, "compute");
  EXPECT_EQ(seen.waits_for, "");
  EXPECT_EQ(seen.phase_for_ns, 4 * kSecond);
  EXPECT_EQ(seen.still_for_ns, 2 * kSecond);
  EXPECT_EQ(seen.looks_waiting, 0u);
  EXPECT_EQ(describe(seen), "gemm_ar launch 12 (tag 7), compute, 3 of 128 tiles");
}

TEST(ProgressWatch, OfWaitsTheOneNearestToItsCause) {
  shm::Progress words = launch(12);
  words.roles[kReceive] =
      shm::encode({.running = 1, .waiting = 1, .rank = 2, .wait = 4, .hops = 1});
  words.roles[kReduce] = shm::encode({.running = 1, .waiting = 1, .rank = 3, .wait = 1});
  words.roles[4] = shm::encode({.running = 1, .waiting = 1, .rank = 0, .wait = 8});
  ProgressWatch watch(0);
  watch.look(words, true, kSecond);
  const RankProgress seen = watch.seen(kSecond);
  EXPECT_EQ(seen.phase, "reduce");
  EXPECT_EQ(seen.waits_for, "a tile");
  EXPECT_EQ(seen.waits_for_rank, 3);
  EXPECT_EQ(seen.looks_waiting, 1u);
}

TEST(ProgressWatch, ARankInAnExchangeWaits) {
  ProgressWatch watch(0);
  watch.look(launch(12), false, kSecond, ExchangeWait{"more", 2});
  watch.look(launch(12), false, 2 * kSecond, ExchangeWait{"more", 2});
  const RankProgress seen = watch.seen(6 * kSecond);
  EXPECT_EQ(seen.phase, kExchangePhase);
  EXPECT_EQ(seen.waits_for_rank, 2);
  EXPECT_EQ(seen.phase_for_ns, 5 * kSecond);
  EXPECT_EQ(seen.looks_waiting, 2u);
  EXPECT_EQ(seen.looks_in_launch, 0u);
  EXPECT_EQ(describe(seen), "in exchange 'more', which rank 2 has not joined");
  // In a launch the words count.
  watch.look(launch(13), true, 7 * kSecond, ExchangeWait{"more", 2});
  EXPECT_EQ(watch.seen(7 * kSecond).waits_for, "");
}

TEST(ProgressWatch, AnyBytesAtAllAreOnlyWords) {
  shm::Progress words{};
  std::fill_n(reinterpret_cast<unsigned char*>(&words), sizeof words, 0xff);
  ProgressWatch watch(0);
  watch.look(words, true, kSecond);
  EXPECT_EQ(watch.seen(kSecond).op, "unknown");
  EXPECT_EQ(watch.seen(kSecond).waits_for, "unknown");
  EXPECT_THAT(who_holds_up({{0, true, watch.seen(kSecond)}}),
              testing::ElementsAre(testing::Field(&HeldUp::by, 0xffffu)));
}

TEST(ProgressWatch, AClientThatSaysNothing) {
  ProgressWatch watch(0);
  watch.look({}, true, kSecond);
  EXPECT_EQ(describe(watch.seen(kSecond)), "");
  EXPECT_EQ(watch.seen(kSecond).phase, "");
}

RankDoing doing(std::uint32_t rank, std::int32_t whom, bool in_launch = true) {
  RankDoing one{rank, in_launch, {}};
  one.progress.op = "gemm_ar";
  one.progress.epoch = 3;
  one.progress.phase = whom < 0 ? "compute" : "reduce";
  if (whom >= 0) one.progress.waits_for = "a tile";
  one.progress.waits_for_rank = whom;
  one.progress.phase_for_ns = (rank + 1) * kSecond;
  return one;
}

TEST(HeldUp, OfWhomAWaitIs) {
  RankProgress progress = doing(0, 3).progress;
  EXPECT_EQ(awaited_text(progress), "a tile of rank 3");
  progress.waits_for = "its launch";
  EXPECT_EQ(awaited_text(progress), "the launch of rank 3");
  EXPECT_EQ(describe(progress), "gemm_ar launch 3, reduce waits for the launch of rank 3");
  EXPECT_EQ(awaited_text(doing(0, -1).progress), "");
}

TEST(HeldUp, WaitsLeadToTheRankThatWorks) {
  const auto found = who_holds_up({doing(0, 1), doing(1, 3), doing(2, 3), doing(3, -1)});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].by, 3u);
  EXPECT_THAT(found[0].ranks, testing::ElementsAre(0, 1, 2));
  EXPECT_EQ(found[0].for_ns, 3 * kSecond);
  EXPECT_EQ(held_up_text({doing(0, 3), doing(3, -1)}),
            "rank 3 (gemm_ar launch 3, compute) holds up rank 0 for 1.0 s");
}

TEST(HeldUp, OrToOneInNoLaunchOrOfAnotherNode) {
  EXPECT_EQ(held_up_text({doing(0, 3), doing(3, -1, false)}),
            "rank 3 (in no launch) holds up rank 0 for 1.0 s");
  // Rank 9 may wait as well.
  EXPECT_EQ(held_up_text({doing(0, 9)}),
            "rank 0 waits for rank 9 of another node for 1.0 s (mkctl who-is-slow asks there)");
  EXPECT_EQ(held_up_text({doing(0, 9), doing(1, 9)}),
            "ranks 0, 1 wait for rank 9 of another node for 2.0 s (mkctl who-is-slow asks there)");
}

TEST(HeldUp, OrThroughAnExchange) {
  RankDoing outside = doing(0, 1, false);
  outside.progress.phase = kExchangePhase;
  outside.progress.waits_for = "exchange 'more'";
  EXPECT_EQ(held_up_text({outside, doing(1, 3), doing(3, -1)}),
            "rank 3 (gemm_ar launch 3, compute) holds up ranks 0, 1 for 2.0 s");
}

TEST(HeldUp, WhatAStoppedRankSaidLastIsOld) {
  RankDoing stopped = doing(1, 0);
  stopped.stopped = "its process has not run for 5.2 s";
  EXPECT_EQ(held_up_text({doing(0, 1), stopped}),
            "rank 1 (its process has not run for 5.2 s) holds up rank 0 for 1.0 s");
}

TEST(HeldUp, ACircleAndOwnCommandsAreNobodys) {
  EXPECT_EQ(held_up_text({doing(0, 1), doing(1, 0), doing(2, 2), doing(3, 2)}), "");
}

}  // namespace
}  // namespace mk::daemon::control
