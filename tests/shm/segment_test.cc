// The session segment: sealed, and mapped only when its header holds together.
#include "shm/host/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shm/atomic.h"
#include "support.h"

namespace mk::shm {
namespace {

constexpr SegmentShape kShape{3, 5, 256};

Segment make() {
  auto made = Segment::create(kShape, 0x1122334455667788ull, 42, 7, kFeatureCommitTime);
  EXPECT_TRUE(made) << made.error().message;
  return std::move(*made);
}

Result<Segment> map_again(const Segment& segment) {
  return Segment::map(UniqueFd(::dup(segment.fd())));
}

void expect_refused(const Segment& segment, ErrorCode code, const std::string& says) {
  const test::NoFdLeak no_leak;
  const auto mapped = map_again(segment);
  ASSERT_FALSE(mapped);
  EXPECT_EQ(mapped.error().code, code) << mapped.error().message;
  EXPECT_NE(mapped.error().message.find(says), std::string::npos) << mapped.error().message;
}

TEST(Segment, CreatedHeaderSaysWhatItIs) {
  const Segment segment = make();
  const SegmentHeader& header = segment.header();
  EXPECT_EQ(std::memcmp(&header, "\x1aMKERNL1", 8), 0);
  EXPECT_EQ(header.abi_major, kAbiMajor);
  EXPECT_EQ(header.abi_minor, kAbiMinor);
  EXPECT_EQ(header.header_bytes, kHeaderBytes);
  EXPECT_EQ(header.features, kFeatureCommitTime);
  EXPECT_EQ(header.segment_bytes, segment.bytes());
  EXPECT_EQ(header.generation, 0x1122334455667788ull);
  EXPECT_EQ(header.session_id, 42u);
  EXPECT_EQ(header.session_slot, 7u);
  EXPECT_EQ(header.lane_count, kShape.lane_count);
  EXPECT_EQ(header.slot_count_log2, kShape.slot_count_log2);
  EXPECT_EQ(header.flag_count, kShape.flag_count);
  EXPECT_GT(header.heartbeat_ns, 0u);
  EXPECT_LE(header.heartbeat_ns, monotonic_ns());
  EXPECT_EQ(header.error_word, 0u);
  EXPECT_EQ(header.abort_flag, 0u);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&header);
  for (std::uint64_t i = sizeof(SegmentHeader); i < segment.bytes(); ++i)
    ASSERT_EQ(bytes[i], 0) << i;
}

TEST(Segment, BothSidesSeeTheSameParts) {
  const test::NoFdLeak no_leak;
  const Segment daemon = make();
  auto client = map_again(daemon);
  ASSERT_TRUE(client) << client.error().message;
  EXPECT_EQ(client->shape(), kShape);
  EXPECT_EQ(client->bytes(), daemon.bytes());
  EXPECT_NE(&client->header(), &daemon.header());
  for (std::uint32_t lane = 0; lane < kShape.lane_count; ++lane) {
    RingProducer producer{client->ring(lane)};
    RingConsumer consumer{daemon.ring(lane)};
    EXPECT_EQ(producer.ring.slot_count(), 32u);
    for (std::uint64_t i = 0; i < 32; ++i)
      ASSERT_TRUE(producer.try_push(test::command_of(lane * 100 + i)));
    ASSERT_FALSE(producer.try_push(Command{}));
    for (std::uint64_t i = 0; i < 32; ++i) {
      std::uint64_t words[kCommandWords];
      ASSERT_TRUE(consumer.try_take(words));
      EXPECT_EQ(decode(words), test::command_of(lane * 100 + i));
    }
    consumer.publish_consumed();
    EXPECT_TRUE(producer.has_credit());
  }
  // The flags begin where no ring has written.
  for (std::uint32_t i = 0; i < kShape.flag_count; ++i) ASSERT_EQ(daemon.flags()[i], 0u);
  client->flags()[kShape.flag_count - 1] = 5;
  EXPECT_EQ(daemon.flags()[kShape.flag_count - 1], 5u);
}

TEST(Segment, ShapesOutOfRangeAreRefusedWithTheLimits) {
  const auto made = Segment::create({17, 10, 64}, 1, 1, 0, 0);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(made.error().message.find("1 to 16 lanes"), std::string::npos) << made.error().message;
  EXPECT_NE(made.error().message.find("17 lanes"), std::string::npos) << made.error().message;
}

TEST(Segment, LargestShapeWorks) {
  auto made = Segment::create({kLanesMax, 16, kFlagsMax}, 1, 1, 0, 0);
  ASSERT_TRUE(made) << made.error().message;
  auto mapped = map_again(*made);
  ASSERT_TRUE(mapped) << mapped.error().message;
  RingProducer producer{mapped->ring(kLanesMax - 1), kRingSlotsMax - 1, 0};
  EXPECT_TRUE(producer.try_push(Command{}));
  mapped->flags()[kFlagsMax - 1] = 1;
}

TEST(Segment, IsSealedForGood) {
  const Segment segment = make();
  const auto bytes = static_cast<off_t>(segment.bytes());
  EXPECT_EQ(::ftruncate(segment.fd(), bytes - 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(segment.fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(segment.fd(), bytes + 4096), -1);
  EXPECT_EQ(errno, EPERM);
  // The client could otherwise seal it against the daemon's writes.
  EXPECT_EQ(::fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Segment, MapRefusesEveryMissingSeal) {
  const Segment good = make();
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  for (const int seals :
       {0, kAll & ~F_SEAL_SHRINK, kAll & ~F_SEAL_GROW, kAll & ~F_SEAL_SEAL, kAll}) {
    const test::NoFdLeak no_leak;
    UniqueFd fd(::memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::write(fd.get(), &good.header(), good.bytes()), static_cast<ssize_t>(good.bytes()));
    ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    const auto mapped = Segment::map(std::move(fd));
    EXPECT_EQ(mapped.has_value(), seals == kAll);
    const std::string message = mapped ? "not sealed" : mapped.error().message;
    EXPECT_NE(message.find("not sealed"), std::string::npos) << message;
  }
}

TEST(Segment, MapRefusesWhatIsNoMemory) {
  const test::NoFdLeak no_leak;
  EXPECT_FALSE(Segment::map(UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC))));
  EXPECT_FALSE(Segment::map(UniqueFd()));
}

TEST(Segment, MapRefusesAFileShorterThanItsHeaderOrThanItSays) {
  const Segment good = make();
  const std::size_t page = 4096;
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{8}, sizeof(SegmentHeader) - 1, sizeof(SegmentHeader), page,
        good.bytes() - page, good.bytes() - 1}) {
    const test::NoFdLeak no_leak;
    UniqueFd fd(::memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::write(fd.get(), &good.header(), bytes), static_cast<ssize_t>(bytes));
    ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
    const auto mapped = Segment::map(std::move(fd));
    ASSERT_FALSE(mapped) << bytes;
    EXPECT_EQ(mapped.error().code, ErrorCode::kProtocol) << mapped.error().message;
  }
}

TEST(Segment, MapRefusesAnotherMagic) {
  const Segment segment = make();
  segment.header().magic ^= 1;
  expect_refused(segment, ErrorCode::kProtocol,
                 "magic 0x314c4e52454b4d1b instead of 0x314c4e52454b4d1a");
}

TEST(Segment, MapRefusesAnotherMajorAndNamesBothVersions) {
  const Segment segment = make();
  segment.header().abi_major = 9;
  segment.header().abi_minor = 3;
  expect_refused(segment, ErrorCode::kAbiMismatch, "9.3");
  expect_refused(segment, ErrorCode::kAbiMismatch, fmt::format("{}.{}", kAbiMajor, kAbiMinor));
  segment.header().abi_major = 0;
  expect_refused(segment, ErrorCode::kAbiMismatch, "0.3");
}

TEST(Segment, MapAcceptsAnotherMinor) {
  const Segment segment = make();
  segment.header().abi_minor = kAbiMinor + 5;
  segment.header().features = ~0ull;
  EXPECT_TRUE(map_again(segment));
}

// As a daemon of ABI 1.4 wrote it, at the offsets of that release. It reads no progress, so a
// client says none there.
TEST(Segment, MapTakesThatOfTheMinorVersionBefore) {
  const Segment segment = make();
  auto* const bytes = reinterpret_cast<unsigned char*>(&segment.header());
  const unsigned char head[] = {0x1a, 'M',  'K', 'E', 'R', 'N', 'L', '1', 1, 0, 4, 0,
                                0x00, 0x10, 0,   0,   1,   0,   0,   0,   0, 0, 0, 0};
  std::copy(std::begin(head), std::end(head), bytes);
  const auto mapped = map_again(segment);
  ASSERT_TRUE(mapped);
  EXPECT_EQ(mapped->header().abi_minor, 4);
  EXPECT_EQ(mapped->header().features & kFeatureProgress, 0u);
}

TEST(Segment, MapRefusesEveryOffsetOutOfRange) {
  struct Offset {
    const char* name;
    std::uint64_t SegmentHeader::*field;
    std::uint64_t alignment;
  };
  for (const Offset& offset : {Offset{"lanes", &SegmentHeader::lanes_offset, 64},
                               Offset{"slots", &SegmentHeader::slots_offset, 16},
                               Offset{"flags", &SegmentHeader::flags_offset, 64}}) {
    const Segment segment = make();
    const std::uint64_t good = segment.header().*offset.field;
    const std::uint64_t bytes = segment.bytes();
    for (const std::uint64_t bad :
         {std::uint64_t{0}, std::uint64_t{64}, kHeaderBytes - offset.alignment, good + 1, good + 4,
          good + 8, bytes - offset.alignment, bytes, bytes + offset.alignment,
          std::uint64_t{1} << 32, std::uint64_t{1} << 63, (std::uint64_t{1} << 63) + good,
          ~std::uint64_t{0}, ~std::uint64_t{0} - 63, ~std::uint64_t{0} - 4095}) {
      SCOPED_TRACE(testing::Message() << offset.name << " at " << bad << " of " << bytes);
      segment.header().*offset.field = bad;
      expect_refused(segment, ErrorCode::kProtocol, offset.name);
    }
    segment.header().*offset.field = good;
    EXPECT_TRUE(map_again(segment));
  }
}

TEST(Segment, MapRefusesPartsThatOverlap) {
  const Segment segment = make();
  const SegmentHeader good = segment.header();
  for (const std::uint64_t lanes :
       {good.slots_offset, good.slots_offset + 64, good.flags_offset, good.flags_offset - 64}) {
    segment.header().lanes_offset = lanes;
    expect_refused(segment, ErrorCode::kProtocol, "overlap");
  }
  segment.header().lanes_offset = good.lanes_offset;
  segment.header().slots_offset = good.lanes_offset;
  expect_refused(segment, ErrorCode::kProtocol, "overlap");
}

TEST(Segment, MapTakesOffsetsFromTheHeaderNotFromItsOwnBuild) {
  const Segment segment = make();
  SegmentHeader& header = segment.header();
  std::swap(header.slots_offset,
            header.lanes_offset);  // another order, the lanes' page first or last
  header.lanes_offset = header.flags_offset + 1024 + 64;
  ASSERT_LE(header.lanes_offset + 3 * sizeof(LaneControl), segment.bytes());
  auto mapped = map_again(segment);
  ASSERT_TRUE(mapped) << mapped.error().message;
  const auto* base = reinterpret_cast<const std::byte*>(&mapped->header());
  EXPECT_EQ(reinterpret_cast<const std::byte*>(mapped->ring(1).control),
            base + header.lanes_offset + 192);
  EXPECT_EQ(reinterpret_cast<const std::byte*>(mapped->ring(1).slots),
            base + header.slots_offset + 32 * 48);
}

TEST(Segment, MapRefusesSizesOutOfRange) {
  const Segment segment = make();
  const SegmentHeader good = segment.header();
  const auto refuse = [&](auto change) {
    segment.header() = good;
    change(segment.header());
    expect_refused(segment, ErrorCode::kProtocol, "states");
  };
  for (const std::uint32_t lanes : {0u, kLanesMax + 1, ~0u})
    refuse([&](auto& h) { h.lane_count = lanes; });
  for (const std::uint32_t log2 : {0u, 3u, 17u, 31u, 32u, 63u, 64u, ~0u}) {
    refuse([&](auto& h) { h.slot_count_log2 = log2; });
  }
  for (const std::uint32_t flags : {0u, 1u, 65u, kFlagsMax + 64, ~0u - 63})
    refuse([&](auto& h) { h.flag_count = flags; });
  for (const std::uint32_t bytes : {0u, 1u, 767u, ~0u})
    refuse([&](auto& h) { h.header_bytes = bytes; });
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{4095}, good.segment_bytes + 1, ~std::uint64_t{0}}) {
    refuse([&](auto& h) { h.segment_bytes = bytes; });
  }
  // Valid by themselves, but more than the segment holds.
  const auto too_much = [&](auto change) {
    segment.header() = good;
    change(segment.header());
    const auto mapped = map_again(segment);
    ASSERT_FALSE(mapped);
    EXPECT_EQ(mapped.error().code, ErrorCode::kProtocol) << mapped.error().message;
  };
  too_much([](auto& h) { h.lane_count = kLanesMax; });
  too_much([](auto& h) { h.slot_count_log2 = 16; });
  too_much([](auto& h) { h.flag_count = kFlagsMax; });
  too_much([](auto& h) { h.segment_bytes = h.flags_offset; });
}

TEST(Segment, WhateverMapAcceptsLiesInside) {
  std::mt19937_64 random(3);
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    const Segment segment = make();
    auto* words = reinterpret_cast<std::uint32_t*>(&segment.header());
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int c = 0; c < changes; ++c) {
      auto& word = words[2 + random() % 24];
      const std::uint32_t values[] = {
          0, 1, word + 64, word - 64, word * 2, static_cast<std::uint32_t>(random()), ~0u};
      word = values[random() % std::size(values)];
    }
    const auto mapped = map_again(segment);
    if (!mapped) continue;
    ++accepted;
    // Touch the far end of every part: a wrong acceptance is a crash here.
    const std::uint32_t lane = mapped->shape().lane_count - 1;
    const RingView ring = mapped->ring(lane);
    ring.slots[ring.slot_count() - 1].words[5] = 1;
    store_release(&ring.control->produced, std::uint64_t{1});
    mapped->flags()[mapped->shape().flag_count - 1] = 1;
    const auto* end = reinterpret_cast<const std::byte*>(&mapped->header()) + mapped->bytes();
    ASSERT_LE(reinterpret_cast<const std::byte*>(ring.slots + ring.slot_count()), end);
    ASSERT_LE(reinterpret_cast<const std::byte*>(ring.control + 1), end);
    ASSERT_LE(reinterpret_cast<const std::byte*>(mapped->flags() + mapped->shape().flag_count),
              end);
  }
  EXPECT_GT(accepted, 100);
}

TEST(Segment, AHeaderRewrittenLaterChangesNothing) {
  const Segment daemon = make();
  const auto client = map_again(daemon);
  ASSERT_TRUE(client);
  for (const Segment* side : {&daemon, &*client}) {
    const CommandSlot* slots = side->ring(2).slots;
    const LaneControl* control = side->ring(2).control;
    const std::uint32_t* flags = side->flags();
    std::memset(&daemon.header(), 0xff, kHeaderBytes);
    EXPECT_EQ(side->ring(2).slots, slots);
    EXPECT_EQ(side->ring(2).control, control);
    EXPECT_EQ(side->ring(2).slot_count(), 32u);
    EXPECT_EQ(side->flags(), flags);
    EXPECT_EQ(side->shape(), kShape);
  }
}

TEST(Segment, SurvivesAMove) {
  Segment first = make();
  const Segment second = std::move(first);
  second.flags()[0] = 3;
  second.publish_failure(ErrorCode::kTimeout, "moved");
  EXPECT_EQ(second.failure().error().message, "moved");
}

TEST(SegmentFailure, NoneAtFirst) {
  const Segment segment = make();
  EXPECT_TRUE(segment.failure());
  segment.publish_failure(ErrorCode::kOk, "nothing");
  EXPECT_TRUE(segment.failure());
}

TEST(SegmentFailure, OnlyTheFirstIsPublished) {
  const Segment daemon = make();
  const auto client = map_again(daemon);
  ASSERT_TRUE(client);
  daemon.publish_failure(ErrorCode::kLinkDown, "the link to node 1 is down");
  daemon.publish_failure(ErrorCode::kAborted, "something that followed");
  EXPECT_EQ(client->failure().error(), (Error{ErrorCode::kLinkDown, "the link to node 1 is down"}));
  EXPECT_NE(client->header().abort_flag, 0u);
}

TEST(SegmentFailure, AClientThatSetsTheWordItselfDoesNotSilenceTheDaemon) {
  const Segment daemon = make();
  daemon.header().error_word = 5;
  daemon.publish_failure(ErrorCode::kBadCommand, "bad opcode 9");
  EXPECT_EQ(daemon.failure().error(), (Error{ErrorCode::kBadCommand, "bad opcode 9"}));
}

TEST(SegmentFailure, ALongReasonIsCutAtACharacter) {
  for (std::size_t pad = 0; pad < 4; ++pad) {
    const Segment segment = make();
    std::string reason(pad, 'x');
    while (reason.size() < 2000) reason += "\u20ac";
    segment.publish_failure(ErrorCode::kInternal, reason);
    const std::string seen = segment.failure().error().message;
    EXPECT_EQ(seen, reason.substr(0, seen.size()));
    EXPECT_LT(seen.size(), kReasonBytesMax);
    EXPECT_GE(seen.size(), kReasonBytesMax - 4);
    EXPECT_EQ((seen.size() - pad) % 3, 0u);
  }
}

TEST(SegmentFailure, AReasonWithoutItsZeroIsReadNoFurther) {
  const Segment segment = make();
  std::memset(segment.header().reason, 'r', kReasonBytesMax);
  segment.header().error_word = 1;
  EXPECT_EQ(segment.failure().error().message, std::string(kReasonBytesMax, 'r'));
}

TEST(SegmentFailure, OneOfManyThreadsWinsAndReadersSeeItWhole) {
  for (int round = 0; round < 50; ++round) {
    const Segment daemon = make();
    const auto client = map_again(daemon);
    ASSERT_TRUE(client);
    std::vector<std::thread> threads;
    for (std::uint32_t i = 1; i <= 4; ++i) {
      threads.emplace_back([&daemon, i] {
        daemon.publish_failure(static_cast<ErrorCode>(i),
                               std::string(400, static_cast<char>('0' + i)));
      });
    }
    const auto deadline = test::in_seconds(60);
    while (client->failure() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    const Error seen = client->failure().error();
    EXPECT_EQ(seen.message,
              std::string(400, static_cast<char>('0' + static_cast<std::uint32_t>(seen.code))));
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(client->failure().error(), seen);
  }
}

TEST(MonotonicClock, NeverGoesBack) {
  std::uint64_t last = monotonic_ns();
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t now = monotonic_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace mk::shm
