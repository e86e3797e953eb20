// A client that writes anything into its segment: rings, counters, header.
#include <random>
#include <span>

#include "shm/flag.h"
#include "tests/hostile/hostile_pair.h"

namespace mk::test {
namespace {

class HostileRing : public HostileTest {};

void fill(std::span<std::uint64_t> words, std::mt19937_64& random) {
  for (std::uint64_t& word : words) shm::store_relaxed(&word, random());
}

/// All of a lane's slots as words.
std::span<std::uint64_t> slots(const shm::RingView& ring) {
  return {ring.slots->words, ring.slot_count() * shm::kCommandWords};
}

TEST_F(HostileRing, RandomBytesInEverySlotOfEveryLane) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    HostilePair pair(daemons(), 4);
    const shm::SegmentHeader& header = pair.guilty.segment->header();
    // Again and again while the daemon looks at them.
    while (shm::load_acquire(&header.abort_flag) == 0) {
      for (std::uint32_t lane = 0; lane < 4; ++lane) {
        fill(slots(pair.guilty.segment->ring(lane)), random);
        tried(pair.guilty.segment->ring(lane).slot_count());
      }
    }
    pair.expect_ended(ErrorCode::kBadCommand, "lane ");
    EXPECT_TRUE(shown_as_failed(pair.job, "lane "));
    EXPECT_TRUE(shown_as_failed(pair.job, "lost rank 0", 1));
    // And after its end, too.
    for (std::uint32_t lane = 0; lane < 4; ++lane) {
      fill(slots(pair.guilty.segment->ring(lane)), random);
    }
  }
}

TEST_F(HostileRing, EveryFieldOutsideItsBounds) {
  constexpr std::uint64_t kSize = HostilePair::kBytes;
  struct Case {
    const char* says;
    void (*spoil)(shm::Command&);
  };
  const Case cases[] = {
      {"opcode is 0", [](auto& c) { c.opcode = shm::Opcode{0}; }},
      {"opcode is 3", [](auto& c) { c.opcode = shm::Opcode{3}; }},
      {"opcode is 255", [](auto& c) { c.opcode = shm::Opcode{255}; }},
      {"peer is rank 0", [](auto& c) { c.peer = 0; }},
      {"peer is rank 2", [](auto& c) { c.peer = 2; }},
      {"peer is rank 65535", [](auto& c) { c.peer = 65535; }},
      {"source handle is 0", [](auto& c) { c.src_handle = 0; }},
      {"source handle is 2", [](auto& c) { c.src_handle = 2; }},
      {"source handle is 65535", [](auto& c) { c.src_handle = 65535; }},
      {"destination handle is 0", [](auto& c) { c.dst_handle = 0; }},
      {"destination handle is 2", [](auto& c) { c.dst_handle = 2; }},
      {"destination handle is 1025", [](auto& c) { c.dst_handle = 1025; }},
      {"bytes is 0", [](auto& c) { c.bytes = 0; }},
      {"bytes is 4294967295", [](auto& c) { c.bytes = 0xffffffff; }},
      {"source offset 0 with bytes", [](auto& c) { c.bytes = kSize + 1; }},
      {"source offset", [](auto& c) { c.src_offset = kSize - 63; }},
      {"source offset", [](auto& c) { c.src_offset = kSize; }},
      {"source offset", [](auto& c) { c.src_offset = 1ull << 47; }},
      {"source offset", [](auto& c) { c.src_offset = (1ull << 48) - 1; }},
      {"destination offset", [](auto& c) { c.dst_offset = kSize - 63; }},
      {"destination offset", [](auto& c) { c.dst_offset = kSize; }},
      {"destination offset", [](auto& c) { c.dst_offset = (1ull << 47) + 64; }},
      {"destination offset", [](auto& c) { c.dst_offset = (1ull << 48) - 64; }},
      {"flag index is 128", [](auto& c) { c.flag_index = HostilePair::kFlags; }},
      {"flag index is 4294967295", [](auto& c) { c.flag_index = 0xffffffff; }},
      {"a flag-only write", [](auto& c) { c.opcode = shm::Opcode::kWriteFlag; }},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.says);
    HostilePair pair(daemons());
    std::memset(pair.other.buffer->data(), 0x5a, kSize);
    pair.commit(pair.right());
    shm::Command command = pair.right();
    one.spoil(command);
    pair.commit(command);
    tried();
    pair.commit(pair.right());
    pair.expect_ended(ErrorCode::kBadCommand, one.says);
    // Nothing but the first, right command can have written.
    for (std::uint64_t at = 64; at < kSize; ++at) {
      ASSERT_EQ(pair.other.buffer->data()[at], std::byte{0x5a}) << "byte " << at;
    }
    EXPECT_TRUE(shown_as_failed(pair.job, one.says));
  }
}

TEST_F(HostileRing, EveryFieldAtItsBounds) {
  constexpr std::uint64_t kSize = HostilePair::kBytes;
  HostilePair pair(daemons());
  std::memset(pair.guilty.buffer->data(), 0x11, kSize);
  const auto goes = [&](auto change) {
    std::memset(pair.other.buffer->data(), 0x5a, kSize);
    shm::Command command = pair.right();
    change(command);
    pair.commit(command);
    tried();
    ASSERT_TRUE(pair.all_completed());
    ASSERT_TRUE(daemon::test::eventually([&] {
      return shm::flag_reached(pair.other.segment->flags() + command.flag_index, command.epoch);
    }));
    for (std::uint64_t at = 0; at < kSize; ++at) {
      const bool written = at >= command.dst_offset && at - command.dst_offset < command.bytes;
      ASSERT_EQ(pair.other.buffer->data()[at], written ? std::byte{0x11} : std::byte{0x5a})
          << "byte " << at;
    }
  };
  goes([](auto& c) { c.bytes = 1; });
  goes([](auto& c) { c.bytes = kSize; });
  goes([](auto& c) {
    c.bytes = 1;
    c.src_offset = kSize - 1;
  });
  goes([](auto& c) {
    c.bytes = 1;
    c.dst_offset = kSize - 1;
  });
  goes([](auto& c) { c.flag_index = HostilePair::kFlags - 1; });
  pair.expect_detaches();
}

TEST_F(HostileRing, ReservedBitsAndForeignSequences) {
  const struct {
    const char* says;
    std::uint32_t word;
    std::uint64_t change;
  } cases[] = {
      {"word 0", 0, 1ull << 8},
      {"word 1", 1, 1ull << 48},
      {"word 2", 2, 1ull << 63},
      {"word 5", 5, 1ull << 32},
      {"sequence is 1", 5, 1},
      {"sequence is 16", 5, 16},
      {"sequence is 2147483648", 5, 1ull << 31},
  };
  for (const auto& one : cases) {
    SCOPED_TRACE(one.says);
    HostilePair pair(daemons());
    const shm::RingView ring = pair.guilty.segment->ring(0);
    tried();
    shm::encode(pair.right(), ring.slot(0).words);
    if (one.word < shm::kCommitWord) ring.slot(0).words[one.word] ^= one.change;
    shm::store_release(
        &ring.slot(0).words[shm::kCommitWord],
        shm::commit_word(0, ring.slot_count_log2) ^ (one.word == 5 ? one.change : 0));
    pair.expect_ended(ErrorCode::kBadCommand, one.says);
    EXPECT_TRUE(shown_as_failed(pair.job, one.says));
  }
}

TEST_F(HostileRing, CountersThatJumpAndGoBackMisleadNobodyElse) {
  HostilePair pair(daemons());
  shm::LaneControl& control = *pair.guilty.segment->ring(0).control;
  std::mt19937_64 random(7);
  for (int round = 0; round < 40; ++round) {
    // The daemon reads none of them to find its way; and writes over them when it has news.
    for (std::uint64_t* counter : {&control.produced, &control.consumed, &control.completed}) {
      shm::store_relaxed(counter, round % 2 == 0 ? random() : 0);
      tried();
    }
    const shm::Command command = pair.right();
    pair.guilty.producer.consumed_seen = pair.guilty.producer.produced;
    pair.commit(command);
    ASSERT_TRUE(daemon::test::eventually([&] {
      return shm::flag_reached(pair.other.segment->flags() + command.flag_index, command.epoch);
    })) << round;
    ASSERT_TRUE(pair.all_completed());
  }
  EXPECT_NE(sessions_shown().find(pair.job), std::string::npos);
  // An orderly end waits for what `produced` promises, but not for ever.
  shm::store_relaxed(&control.produced, ~std::uint64_t{0});
  pair.expect_detaches();
}

TEST_F(HostileRing, AProducerThatOvertakesTheConsumerHarmsItself) {
  // More than a lap ahead, over slots that were not given back.
  HostilePair pair(daemons());
  for (std::uint32_t i = 0; i < 5000; ++i) {
    pair.guilty.producer.consumed_seen = pair.guilty.producer.produced;
    pair.commit(pair.right());
    tried();
    if (shm::load_acquire(&pair.guilty.segment->header().abort_flag) != 0) break;
  }
  // It may be lucky throughout; if not, it is told what is wrong.
  if (shm::load_acquire(&pair.guilty.segment->header().abort_flag) != 0) {
    pair.expect_ended(ErrorCode::kBadCommand, "sequence is");
  }
}

TEST_F(HostileRing, AChangedHeaderChangesNothingForTheDaemon) {
  for (const int value : {0x00, 0xff, 0x80}) {
    SCOPED_TRACE(value);
    HostilePair pair(daemons());
    shm::SegmentHeader* header = &pair.guilty.segment->header();
    std::memset(header, value, sizeof *header);
    tried();
    for (int i = 0; i < 40; ++i) {
      const shm::Command command = pair.right();
      pair.commit(command);
      ASSERT_TRUE(daemon::test::eventually([&] {
        return shm::flag_reached(pair.other.segment->flags() + command.flag_index, command.epoch);
      }));
      ASSERT_TRUE(pair.all_completed());
    }
    // Its end is published there nevertheless.
    shm::Command bad = pair.right();
    bad.peer = 9;
    shm::store_release(&header->abort_flag, 0u);
    shm::store_release(&header->error_word, 0u);
    pair.commit(bad);
    pair.expect_ended(ErrorCode::kBadCommand, "peer is rank 9");
    EXPECT_TRUE(shown_as_failed(pair.job, "peer is rank 9"));
  }
}

TEST_F(HostileRing, FlagsOfTheClientsOwnMakingMisleadOnlyItself) {
  HostilePair pair(daemons());
  for (std::uint32_t flag = 0; flag < HostilePair::kFlags; ++flag) {
    shm::store_relaxed(pair.other.segment->flags() + flag, 0x7fffffffu);
    tried();
  }
  pair.commit(pair.right());
  EXPECT_TRUE(pair.all_completed());
  pair.expect_detaches();
}

}  // namespace
}  // namespace mk::test
