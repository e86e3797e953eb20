// The command ring in one thread: empty, full, credits, laps, hostile content, and a model.
#include "shm/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <random>
#include <vector>

#include "support.h"
#include "test_ring.h"

namespace mk::shm {
namespace {

using test::command_of;
using test::TestRing;
using Words = std::array<std::uint64_t, kCommandWords>;

/// Counter values at which a ring may trip: the start, lap boundaries, the wrap of the 32-bit
/// sequence.
std::vector<std::uint64_t> starts(std::uint32_t log2) {
  const std::uint64_t slots = 1ull << log2;
  std::vector<std::uint64_t> result = {0, 1};
  const std::uint64_t wrap = std::uint64_t{1} << 32;
  for (const std::uint64_t edge :
       {slots, 2 * slots, 3 * slots, 7 * slots, wrap, wrap + slots, 2 * wrap, wrap << 31}) {
    for (std::uint64_t d = 0; d <= 4; ++d) result.push_back(edge - 2 + d);
    result.push_back(edge - slots + 1);
  }
  // With the smallest rings, an edge less two lies before the start.
  const auto out_of_reach = [](std::uint64_t first) {
    return first > (std::uint64_t{1} << 63) + 1000;
  };
  result.erase(std::remove_if(result.begin(), result.end(), out_of_reach), result.end());
  return result;
}

TEST(Ring, NewRingIsEmpty) {
  TestRing ring(4);
  Words words;
  EXPECT_FALSE(ring.consumer.try_take(words.data()));
  EXPECT_EQ(ring.producer.completed(), 0u);
  EXPECT_TRUE(ring.producer.has_credit());
}

TEST(Ring, RingThatRanIsEmpty) {
  for (std::uint32_t log2 = 4; log2 <= 10; ++log2) {
    for (const std::uint64_t first : starts(log2)) {
      TestRing ring(log2, first);
      Words words;
      EXPECT_FALSE(ring.consumer.try_take(words.data())) << first;
    }
  }
}

TEST(Ring, OneCommandGoesThroughOnce) {
  for (const std::uint64_t first : starts(4)) {
    TestRing ring(4, first);
    const Command sent = command_of(first);
    ASSERT_TRUE(ring.producer.try_push(sent));
    EXPECT_EQ(ring.view().control->produced, first + 1);
    Words words;
    ASSERT_TRUE(ring.consumer.try_take(words.data())) << first;
    EXPECT_EQ(decode(words.data()), sent);
    EXPECT_TRUE(reserved_bits_clear(words.data()));
    EXPECT_TRUE(ring.consumer.sequence_matches(words.data()));
    EXPECT_FALSE(ring.consumer.try_take(words.data()));
  }
}

TEST(Ring, FullAtExactlySlotCountAndCreditsComeBack) {
  for (std::uint32_t log2 = 4; log2 <= 8; ++log2) {
    for (const std::uint64_t first : starts(log2)) {
      TestRing ring(log2, first);
      const std::uint64_t slots = ring.view().slot_count();
      for (std::uint64_t i = 0; i < slots; ++i) ASSERT_TRUE(ring.producer.try_push(command_of(i)));
      const std::vector<CommandSlot> before(ring.view().slots, ring.view().slots + slots);
      ASSERT_FALSE(ring.producer.has_credit());
      ASSERT_FALSE(ring.producer.try_push(command_of(99)));
      EXPECT_EQ(ring.producer.produced, first + slots);
      for (std::uint64_t i = 0; i < slots; ++i) {
        ASSERT_TRUE(std::equal(before[i].words, before[i].words + kCommandWords,
                               ring.view().slots[i].words))
            << "a refused command was written";
      }
      // Taken is not enough: the slot is free when the consumer says so.
      Words words;
      ASSERT_TRUE(ring.consumer.try_take(words.data()));
      ASSERT_TRUE(ring.consumer.try_take(words.data()));
      ASSERT_FALSE(ring.producer.try_push(command_of(99)));
      ring.consumer.publish_consumed();
      ASSERT_TRUE(ring.producer.try_push(command_of(slots)));
      ASSERT_TRUE(ring.producer.try_push(command_of(slots + 1)));
      ASSERT_FALSE(ring.producer.try_push(command_of(99)));
      for (std::uint64_t i = 2; i < slots + 2; ++i) {
        ASSERT_TRUE(ring.consumer.try_take(words.data()));
        ASSERT_EQ(decode(words.data()), command_of(i));
        ASSERT_TRUE(ring.consumer.sequence_matches(words.data()));
      }
      ASSERT_FALSE(ring.consumer.try_take(words.data()));
    }
  }
}

TEST(Ring, EveryLapBoundaryIsCrossedInOrder) {
  for (std::uint32_t log2 = 0; log2 <= 6; ++log2) {
    for (const std::uint64_t first : starts(log2)) {
      TestRing ring(log2, first);
      for (std::uint64_t i = 0; i < (5ull << log2); ++i) {
        ASSERT_TRUE(ring.producer.try_push(command_of(i)));
        Words words;
        ASSERT_TRUE(ring.consumer.try_take(words.data())) << log2 << " " << first << "+" << i;
        ASSERT_EQ(decode(words.data()), command_of(i));
        ASSERT_TRUE(ring.consumer.sequence_matches(words.data()));
        ASSERT_FALSE(ring.consumer.try_take(words.data())) << "read the lap before";
        ring.consumer.publish_consumed();
      }
    }
  }
}

// Written ahead of the commit, all that there are credits for: taken as far as they are committed.
TEST(Ring, WhatIsWrittenIsTakenAsFarAsItIsCommitted) {
  std::mt19937_64 random(7);
  for (std::uint32_t log2 = 2; log2 <= 6; ++log2) {
    for (const std::uint64_t first : starts(log2)) {
      TestRing ring(log2, first);
      const std::uint64_t slots = ring.view().slot_count();
      std::uint64_t sent = 0;
      for (int round = 0; round < 20; ++round) {
        const std::uint64_t count = 1 + random() % slots;
        ASSERT_TRUE(ring.producer.has_credits(count));
        for (std::uint64_t i = 0; i < count; ++i) ring.producer.write(i, command_of(sent + i));
        Words words;
        for (std::uint64_t taken = 0; taken < count;) {
          ASSERT_FALSE(ring.consumer.try_take(words.data())) << "what is not committed";
          const std::uint64_t part = 1 + random() % (count - taken);
          ring.producer.commit(part);
          for (const std::uint64_t end = taken + part; taken < end; ++taken) {
            ASSERT_TRUE(ring.consumer.try_take(words.data()));
            ASSERT_EQ(decode(words.data()), command_of(sent + taken));
            ASSERT_TRUE(ring.consumer.sequence_matches(words.data()));
          }
          EXPECT_EQ(ring.view().control->produced, first + sent + taken);
        }
        EXPECT_FALSE(ring.producer.has_credits(slots)) << "taken is not consumed";
        ring.consumer.publish_consumed();
        ASSERT_TRUE(ring.producer.has_credits(slots));
        ASSERT_FALSE(ring.producer.has_credits(slots + 1));
        sent += count;
      }
    }
  }
}

// The first of several commands is shown last: a reader that finds it finds all, and neighbouring
// ones go as one copy.
TEST(Ring, TheFirstOfACommitIsStoredLast) {
  for (std::uint64_t count = 0; count <= 16; ++count) {
    std::vector<std::uint64_t> words(16, 0);
    std::uint64_t stored = 0;
    store_release_back(
        count, [&](std::uint64_t i) { return &words[i]; },
        [&](std::uint64_t i) {
          EXPECT_EQ(i, count - 1 - stored);
          for (std::uint64_t later = i + 1; later < count; ++later)
            EXPECT_EQ(words[later], 100 + later) << "not there yet";
          ++stored;
          return 100 + i;
        });
    EXPECT_EQ(stored, count);
    for (std::uint64_t i = 0; i < words.size(); ++i) EXPECT_EQ(words[i], i < count ? 100 + i : 0);
  }
}

// The time of the commit is known after the rest.
TEST(Ring, ATimeIsPutIntoWhatIsWritten) {
  for (const std::uint64_t first : starts(4)) {
    TestRing ring(4, first);
    for (std::uint64_t i = 0; i < 3; ++i) ring.producer.write(i, command_of(i));
    for (std::uint64_t i = 0; i < 3; ++i)
      ring.producer.stamp(i, 0xfedcba98u + static_cast<std::uint32_t>(i));
    ring.producer.commit(3);
    for (std::uint64_t i = 0; i < 3; ++i) {
      Words words;
      ASSERT_TRUE(ring.consumer.try_take(words.data()));
      Command wanted = command_of(i);
      wanted.commit_time_ns = 0xfedcba98u + static_cast<std::uint32_t>(i);
      EXPECT_EQ(decode(words.data()), wanted);
    }
  }
}

TEST(Ring, ACommandOfZerosIsACommand) {
  for (const std::uint64_t first : starts(4)) {
    TestRing ring(4, first);
    for (int i = 0; i < 40; ++i) {
      ASSERT_TRUE(ring.producer.try_push(Command{}));
      Words words;
      ASSERT_TRUE(ring.consumer.try_take(words.data()));
      EXPECT_EQ(decode(words.data()), Command{});
      EXPECT_FALSE(ring.consumer.try_take(words.data()));
      ring.consumer.publish_consumed();
    }
  }
}

TEST(Ring, HalfWrittenCommandIsNotTaken) {
  TestRing ring(4);
  encode(command_of(7), ring.view().slot(0).words);  // all but the commit word
  Words words;
  EXPECT_FALSE(ring.consumer.try_take(words.data()));
}

TEST(Ring, CompletionsAreCountedFromWhereTheRingWas) {
  TestRing ring(4, (1ull << 32) - 1);
  ring.consumer.publish_completed(0);
  EXPECT_EQ(ring.producer.completed(), (1ull << 32) - 1);
  ring.consumer.publish_completed(3);
  EXPECT_EQ(ring.producer.completed(), (1ull << 32) + 2);
}

TEST(Ring, TheConsumerNeverReadsItsCountersBack) {
  TestRing ring(4);
  ASSERT_TRUE(ring.producer.try_push(command_of(1)));
  ring.view().control->consumed = 1ull << 50;  // a client that scribbles
  ring.view().control->completed = ~0ull;
  ring.view().control->produced = 0;
  Words words;
  ASSERT_TRUE(ring.consumer.try_take(words.data()));
  ring.consumer.publish_consumed();
  ring.consumer.publish_completed(1);
  EXPECT_EQ(ring.view().control->consumed, 1u);
  EXPECT_EQ(ring.view().control->completed, 1u);
}

TEST(RingHostile, ASequenceOfAnotherCommandIsNoticed) {
  for (const std::uint64_t first : starts(4)) {
    for (const std::uint64_t ahead : {1ull, 5ull, 32ull, 1ull << 20, (1ull << 32) - 1}) {
      TestRing ring(4, first);
      const std::uint64_t wrong = (first + ahead) & 0xffffffffu;
      ring.view().slot(first).words[kCommitWord] = lap_parity(first, 4) | wrong;
      Words words;
      ASSERT_TRUE(ring.consumer.try_take(words.data()));
      EXPECT_FALSE(ring.consumer.sequence_matches(words.data())) << first << " " << ahead;
    }
  }
}

TEST(RingHostile, AnyContentIsTakenAsItIsAndDecodes) {
  std::vector<Words> patterns;
  for (int byte = 0; byte < 256; ++byte) {
    Words words;
    words.fill(0x0101010101010101ull * static_cast<std::uint64_t>(byte));
    patterns.push_back(words);
  }
  for (unsigned bit = 0; bit < 64 * kCommandWords; ++bit) {
    Words words{};
    words[bit / 64] = 1ull << (bit % 64);
    patterns.push_back(words);
    for (auto& word : words) word = ~word;
    patterns.push_back(words);
  }
  std::mt19937_64 random(2);
  for (int i = 0; i < 2000; ++i) {
    Words words;
    for (auto& word : words) word = random();
    patterns.push_back(words);
  }
  TestRing ring(4);
  std::uint64_t taken = 0;
  for (const Words& pattern : patterns) {
    std::copy(pattern.begin(), pattern.end(), ring.view().slot(ring.consumer.consumed).words);
    const bool committed =
        (pattern[kCommitWord] & kParityBit) == lap_parity(ring.consumer.consumed, 4);
    Words words{};
    ASSERT_EQ(ring.consumer.try_take(words.data()), committed);
    if (!committed) continue;
    EXPECT_EQ(words, pattern);
    const Command command = decode(words.data());
    EXPECT_LE(command.src_offset, kOffsetMask);
    EXPECT_LE(command.dst_offset, kOffsetMask);
    ++taken;
  }
  EXPECT_EQ(ring.consumer.consumed, taken);
  EXPECT_GT(taken, patterns.size() / 4);
}

TEST(RingHostile, AProducerThatIgnoresCreditsLosesOnlyItsOwnCommands) {
  // A whole lap too far: the slot shows the parity of the next lap, which to the consumer is "not
  // yet committed".
  TestRing ring(4);
  for (std::uint64_t i = 0; i < 17; ++i) {
    ring.producer.consumed_seen = ring.producer.produced;
    ASSERT_TRUE(ring.producer.try_push(command_of(i)));
  }
  Words words;
  EXPECT_FALSE(ring.consumer.try_take(words.data()));
  EXPECT_EQ(ring.consumer.consumed, 0u);
}

/// Random pushes, takes and publications against a queue that knows what must come out.
void run_model(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto log2 = static_cast<std::uint32_t>(random() % 6);
  const auto candidates = starts(log2);
  const std::uint64_t first = candidates[random() % candidates.size()];
  SCOPED_TRACE(testing::Message() << "seed " << seed << ", 2^" << log2 << " slots from " << first);
  TestRing ring(log2, first);
  std::deque<Command> queue;
  std::uint64_t pushed = first, taken = first, freed = first, completed = first;
  const std::uint64_t push_weight = 1 + random() % 6, take_weight = 1 + random() % 6;
  for (int step = 0; step < 4000; ++step) {
    const std::uint64_t choice = random() % (push_weight + take_weight + 2);
    if (choice < push_weight) {
      const Command command = command_of(random());
      const bool room = pushed - freed < ring.view().slot_count();
      ASSERT_EQ(ring.producer.try_push(command), room) << "step " << step;
      if (room) {
        queue.push_back(command);
        ++pushed;
      }
    } else if (choice < push_weight + take_weight) {
      Words words;
      ASSERT_EQ(ring.consumer.try_take(words.data()), !queue.empty()) << "step " << step;
      if (queue.empty()) continue;
      ASSERT_EQ(decode(words.data()), queue.front()) << "step " << step;
      ASSERT_TRUE(ring.consumer.sequence_matches(words.data())) << "step " << step;
      queue.pop_front();
      ++taken;
    } else if (choice == push_weight + take_weight) {
      ring.consumer.publish_consumed();
      freed = taken;
    } else {
      const std::uint64_t count = random() % (taken - completed + 1);
      ring.consumer.publish_completed(count);
      completed += count;
      ASSERT_EQ(ring.producer.completed(), completed);
    }
    ASSERT_EQ(ring.view().control->produced, pushed);
    ASSERT_EQ(ring.view().control->consumed, freed);
  }
}

TEST(RingModel, RandomInterleavings) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    run_model(seed);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace mk::shm
