// A send block's commands: what they say, and that credits are waited for.
#include "kernels/comm/chunk_sender.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/comm/banks.h"

namespace mk::kernels {
namespace {

/// Every pause lets the consumer take one command, as long as it is allowed to.
struct ConsumingPacer {
  shm::RingConsumer* consumer = nullptr;
  std::vector<shm::Command> taken;
  std::uint64_t now = 5;
  bool consuming = true;

  std::uint64_t now_ns() { return now; }
  bool pause(std::uint32_t) {
    ++now;
    if (consuming) take();
    return true;
  }
  bool take() {
    std::uint64_t words[shm::kCommandWords];
    if (!consumer->try_take(words)) return false;
    EXPECT_TRUE(shm::reserved_bits_clear(words));
    taken.push_back(shm::decode(words));
    consumer->publish_consumed();
    return true;
  }
};

struct ChunkSenderTest : ::testing::Test {
  static constexpr std::uint32_t kSlotsLog2 = 4;
  ChunkSenderTest() : slots(1u << kSlotsLog2) {
    producers[1].ring = {slots.data(), &lane_control, kSlotsLog2};
    consumer.ring = producers[1].ring;
    pacer.consumer = &consumer;
    context.world = {3, 2, 1, 1};
    context.workspace_handle = 11;
    context.rail_peers = peers;
    context.lanes = producers;
    context.lane_count = 2;
    control.stop = &stop;
    control.record = &record;
    control.timeout_ns = 1000;
  }
  std::vector<shm::CommandSlot> slots;
  shm::LaneControl lane_control{};
  shm::RingProducer producers[2];
  shm::RingConsumer consumer;
  const RailPeer peers[3] = {{}, {}, {5, 22, 640}};
  RankContext context;
  std::uint32_t stop = 0;
  WaitRecord record;
  WaitControl control;
  WaitTotals totals;
  ConsumingPacer pacer;
};

TEST_F(ChunkSenderTest, WritesWhatTheDaemonNeeds) {
  ChunkSender<ConsumingPacer> sender(pacer, control, context, 1, totals);
  pacer.now = 4;
  ASSERT_TRUE(sender.add_chunk(2, 4096, 8192, 777, 3, 17));
  ASSERT_TRUE(sender.add_flag(2, 4, 18));
  EXPECT_FALSE(pacer.take()) << "seen before the commit";
  EXPECT_EQ(sender.added(), 2u);
  EXPECT_EQ(sender.produced(), 0u);
  pacer.now = 5;
  sender.commit();
  EXPECT_EQ(sender.added(), 0u);
  while (pacer.take()) {
  }
  ASSERT_EQ(pacer.taken.size(), 2u);
  shm::Command write;
  write.opcode = shm::Opcode::kWrite;
  write.peer = 5;
  write.src_handle = 11;
  write.dst_handle = 22;
  write.src_offset = 4096;
  write.dst_offset = 8192;
  write.bytes = 777;
  write.flag_index = 643;
  write.epoch = 17;
  write.commit_time_ns = 5;
  EXPECT_EQ(pacer.taken[0], write);
  shm::Command flag;
  flag.opcode = shm::Opcode::kWriteFlag;
  flag.peer = 5;
  flag.flag_index = 644;
  flag.epoch = 18;
  flag.commit_time_ns = 5;
  EXPECT_EQ(pacer.taken[1], flag);
  EXPECT_EQ(sender.commands(), 2u);
  EXPECT_EQ(sender.payload_bytes(), 777u);
  EXPECT_EQ(sender.produced(), 2u);
}

TEST_F(ChunkSenderTest, WaitsForCreditsWhenTheRingIsFull) {
  ChunkSender<ConsumingPacer> sender(pacer, control, context, 1, totals);
  for (std::uint32_t i = 1; i <= 100; ++i) {
    ASSERT_TRUE(sender.add_flag(2, 0, i));
    sender.commit();
  }
  while (pacer.take()) {
  }
  ASSERT_EQ(pacer.taken.size(), 100u);
  for (std::uint32_t i = 0; i < 100; ++i) EXPECT_EQ(pacer.taken[i].epoch, i + 1);
  EXPECT_GT(totals.count, 0u);
}

TEST_F(ChunkSenderTest, AFullRingThatNobodyEmptiesEndsTheWait) {
  pacer.consuming = false;
  ChunkSender<ConsumingPacer> sender(pacer, control, context, 1, totals);
  for (std::uint32_t i = 0; i < 16; ++i) ASSERT_TRUE(sender.add_flag(2, 0, i + 1));
  EXPECT_FALSE(sender.add_flag(2, 0, 17)) << "there are credits for committed and added ones alike";
  EXPECT_EQ(record.end, WaitEnd::kTimeout);
  EXPECT_EQ(record.site.kind, FlagKind::kCredit);
  EXPECT_EQ(record.site.index[0], 1u);
  EXPECT_EQ(record.site.rank, 3u);
  EXPECT_EQ(record.expected, 1u);
  EXPECT_EQ(record.seen, 0u);
  sender.commit();
  EXPECT_EQ(sender.commands(), 16u);
}

// Every prefix of what is added can be committed, and only that is seen; over two laps.
TEST_F(ChunkSenderTest, WhatIsAddedIsSeenAsFarAsItIsCommitted) {
  for (std::uint32_t added = 1; added <= kCommandsAtOnce; ++added) {
    for (std::uint32_t committed = 0; committed <= added; ++committed) {
      pacer.taken.clear();
      ChunkSender<ConsumingPacer> sender(pacer, control, context, 1, totals);
      const std::uint64_t before = lane_control.produced;
      for (std::uint32_t i = 0; i < added; ++i)
        ASSERT_TRUE(sender.add_chunk(2, 16 * i, 32 * i, 100 + i, i, 7));
      sender.commit(committed);
      while (pacer.take()) {
      }
      ASSERT_EQ(pacer.taken.size(), committed);
      for (std::uint32_t i = 0; i < committed; ++i) {
        EXPECT_EQ(pacer.taken[i].src_offset, 16 * i);
        EXPECT_EQ(pacer.taken[i].dst_offset, 32 * i);
        EXPECT_EQ(pacer.taken[i].bytes, 100 + i);
      }
      EXPECT_EQ(sender.added(), added - committed);
      EXPECT_EQ(sender.commands(), committed);
      EXPECT_EQ(sender.produced(), before + committed);
      EXPECT_EQ(lane_control.produced, before + committed);
      EXPECT_EQ(producers[1].produced, before + committed) << "for the next sender of the lane";
    }
  }
}

TEST_F(ChunkSenderTest, VeryManyFlagsAreCommittedMeanwhile) {
  ChunkSender<ConsumingPacer> sender(pacer, control, context, 1, totals);
  for (std::uint32_t i = 1; i <= 50; ++i) {
    ASSERT_TRUE(sender.add_flag(2, 0, i));
    ASSERT_LE(sender.added(), kCommandsAtOnce);
  }
  sender.commit();
  while (pacer.take()) {
  }
  ASSERT_EQ(pacer.taken.size(), 50u);
  for (std::uint32_t i = 0; i < 50; ++i) EXPECT_EQ(pacer.taken[i].epoch, i + 1);
  EXPECT_EQ(sender.commands(), 50u);
}

/// A clock that is not the daemon's.
struct OwnTimePacer : ConsumingPacer {
  explicit OwnTimePacer(const ConsumingPacer& other) : ConsumingPacer(other) {}
  static std::uint32_t commit_time_ns() { return 0; }
};

TEST_F(ChunkSenderTest, AClockThatIsNotTheDaemonsSaysNothing) {
  OwnTimePacer own(pacer);
  ChunkSender<OwnTimePacer> sender(own, control, context, 1, totals);
  ASSERT_TRUE(sender.add_flag(2, 0, 9));
  sender.commit();
  ASSERT_TRUE(own.take());
  EXPECT_EQ(own.taken[0].commit_time_ns, 0u);
  EXPECT_EQ(own.taken[0].epoch, 9u);
}

TEST_F(ChunkSenderTest, TheNextSenderOfALaneGoesOnWhereTheLastOneEnded) {
  ChunkSender<ConsumingPacer> first(pacer, control, context, 1, totals);
  for (std::uint32_t i = 1; i <= 20; ++i) ASSERT_TRUE(first.add_flag(2, 0, i));
  first.commit();
  EXPECT_EQ(producers[1].produced, 20u);
  EXPECT_GE(producers[1].consumed_seen, 4u) << "more than the ring has were given";
  ChunkSender<ConsumingPacer> second(pacer, control, context, 1, totals);
  EXPECT_EQ(second.produced(), 20u);
  ASSERT_TRUE(second.add_flag(2, 0, 21));
  second.commit();
  while (pacer.take()) {
  }
  ASSERT_EQ(pacer.taken.size(), 21u);
  for (std::uint32_t i = 0; i < 21; ++i) EXPECT_EQ(pacer.taken[i].epoch, i + 1);
}

TEST_F(ChunkSenderTest, LargeChunksAreAskedForFewAtFirst) {
  ChunkSender<ConsumingPacer> sender(pacer, control, context, 1, totals);
  constexpr std::uint32_t kLarge = 256 << 10, kSmall = 32 << 10;
  for (const std::uint32_t wanted : {3u, 6u, 8u, 8u}) {
    EXPECT_EQ(sender.at_once(kLarge), wanted);
    EXPECT_EQ(sender.at_once(kSmall), kCommandsAtOnce) << "the network is soon done with two";
    sender.commit();
    EXPECT_EQ(sender.at_once(kLarge), wanted) << "nothing to commit, so nothing is known";
    ASSERT_TRUE(sender.add_flag(2, 0, wanted));
    sender.commit();
  }
}

TEST_F(ChunkSenderTest, CompletedIsCountedFromTheDaemonsWord) {
  lane_control.completed = 7;
  EXPECT_TRUE(wait_completed(pacer, control, context, Role::kReduce, 0, 1, 7, totals));
  pacer.consuming = false;
  EXPECT_FALSE(wait_completed(pacer, control, context, Role::kReduce, 0, 1, 8, totals));
  EXPECT_EQ(record.site.kind, FlagKind::kCompleted);
  EXPECT_EQ(record.site.role, Role::kReduce);
  EXPECT_EQ(record.expected, 8u);
  EXPECT_EQ(record.seen, 7u);
}

TEST(Banks, AlternateAndNameTheirLastUse) {
  EXPECT_EQ(bank_of(7, 2), 1u);
  EXPECT_EQ(bank_of(8, 2), 0u);
  EXPECT_EQ(bank_of(7, 1), 0u);
  EXPECT_EQ(previous_use(9, 2), 7u);
  EXPECT_EQ(previous_use(9, 1), 8u);
  // Flags start at 0, which counts as having reached whatever came before the first launch.
  for (std::uint32_t banks : {1u, 2u}) {
    for (std::uint32_t epoch = 1; epoch <= banks; ++epoch) {
      EXPECT_TRUE(shm::epoch_reached(0, previous_use(epoch, banks)));
    }
    EXPECT_FALSE(shm::epoch_reached(0, previous_use(banks + 1, banks)));
  }
}

TEST(Banks, EveryBankIsRefreshedWithinTheEpochWindow) {
  for (std::uint32_t banks : {1u, 2u}) {
    for (std::uint32_t bank = 0; bank < banks; ++bank) {
      std::uint32_t last = 0;
      for (std::uint32_t epoch = 1; epoch < 5000; ++epoch) {
        if (bank_of(epoch, banks) != bank || !refresh_due(epoch, banks)) continue;
        EXPECT_LT(epoch - last, 512u);
        last = epoch;
      }
      EXPECT_GT(last, 4500u);
    }
  }
}

}  // namespace
}  // namespace mk::kernels
