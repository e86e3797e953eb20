// A ring's content is hostile: whatever a client writes, it hurts only itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

/// Every write handed to the fabric lies inside the buffers of the rig.
void expect_in_bounds(const ScriptedEndpoint& endpoint) {
  for (const auto& submission : endpoint.submissions) {
    ASSERT_LE(submission.writes.size(), shm::kBatchMax);
    for (const auto& write : submission.writes) {
      ASSERT_LT(write.flag_index, kFlags);
      if (write.bytes == 0) continue;
      ASSERT_LE(write.src_offset + write.bytes, kBufferBytes);
      ASSERT_LE(write.dst_offset + write.bytes, kBufferBytes);
    }
  }
}

TEST(HostileRing, RandomBytesInEverySlotWhileAnotherSessionWorks) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    ProxyRig rig;
    rig.endpoint->complete_at_once = true;
    auto& honest = rig.add_session(0);
    auto& hostile = rig.add_session(1, {.lanes = 4, .slot_count_log2 = 6});
    rig.bind_peer(honest, 1, 0);
    rig.bind_peer(hostile, 1, 0);
    std::mt19937_64 random(seed);
    std::uint32_t pushed = 0;
    for (int round = 0; round < 50; ++round) {
      for (std::uint32_t lane = 0; lane < 4; ++lane) {
        const shm::RingView ring = hostile.segment.ring(lane);
        for (std::uint64_t i = 0; i < ring.slot_count(); ++i) {
          for (std::uint64_t& word : ring.slots[i].words) shm::store_relaxed(&word, random());
        }
        std::uint64_t* control = reinterpret_cast<std::uint64_t*>(ring.control);
        for (std::size_t i = 0; i < sizeof(shm::LaneControl) / 8; ++i)
          shm::store_relaxed(control + i, random());
      }
      honest.push(1, 3);
      pushed += 3;
      rig.steps(1);
    }
    rig.settle();
    EXPECT_EQ(honest.completed(), pushed);
    const auto faults = rig.events_of<SessionFault>();
    ASSERT_EQ(faults.size(), 1u) << "seed " << seed;
    EXPECT_EQ(faults[0].slot, 1u);
    EXPECT_EQ(faults[0].code, ErrorCode::kBadCommand);
    EXPECT_THAT(faults[0].reason, HasSubstr("lane "));
    expect_in_bounds(*rig.endpoint);
    rig.proxy->apply(FenceSession{1});
    rig.settle();
    EXPECT_EQ(rig.events_of<Drained>().size(), 1u);
  }
}

/// Commands that are right but for a few flipped bits get much further than random words do.
TEST(HostileRing, NearlyRightCommandsNeverLeaveTheBuffers) {
  std::mt19937_64 random(99);
  int faulted = 0;
  for (int run = 0; run < 300; ++run) {
    ProxyRig rig;
    rig.endpoint->complete_at_once = true;
    auto& hostile = rig.add_session(0, {.slot_count_log2 = 5});
    rig.bind_peer(hostile, 1, 0);
    for (int i = 0; i < 30; ++i) {
      shm::Command command = i % 2 == 0
                                 ? write_command(1, random() % kBufferBytes, 1 + random() % 4096)
                                 : flag_command(1, random() % kFlags);
      command.dst_offset = i % 2 == 0 ? random() % kBufferBytes : 0;
      std::uint64_t words[shm::kCommandWords];
      shm::encode(command, words);
      words[shm::kCommitWord] = hostile.producers[0].produced;
      if (random() % 8 == 0) words[random() % shm::kCommandWords] ^= 1ull << random() % 64;
      if (!hostile.producers[0].has_credit()) break;
      hostile.push_words(words);
    }
    rig.settle();
    expect_in_bounds(*rig.endpoint);
    faulted += rig.events_of<SessionFault>().empty() ? 0 : 1;
  }
  EXPECT_GT(faulted, 100);
}

TEST(HostileRing, AReplayedLapIsRefused) {
  ProxyRig rig;
  rig.endpoint->complete_at_once = true;
  auto& hostile = rig.add_session(0, {.slot_count_log2 = 4});
  rig.bind_peer(hostile, 1, 0);
  hostile.push(1, 16);
  rig.settle();
  const shm::RingView ring = hostile.segment.ring(0);
  for (std::uint64_t i = 0; i < ring.slot_count(); ++i)
    ring.slots[i].words[shm::kCommitWord] ^= shm::kParityBit;
  rig.settle();
  ASSERT_EQ(rig.events_of<SessionFault>().size(), 1u);
  EXPECT_THAT(rig.events_of<SessionFault>()[0].reason,
              HasSubstr("lane 0, command 16: sequence is 0: the slot's next command is number 16"));
}

// One message of a client may let a thousand handles go while its rings are full.
TEST(HostileRing, ManyHandlesThatGoBehindFullRingsCostAPassLittle) {
  constexpr std::uint32_t kLanes = 4, kSlotsLog2 = 12, kHandles = 1024;
  ProxyRig rig;
  auto& hostile = rig.add_session(0, {.lanes = kLanes, .slot_count_log2 = kSlotsLog2});
  rig.bind_peer(hostile, 1, 0);
  bool open = false;
  rig.endpoint->accept = [&](fabric::LinkId, std::size_t offered) { return open ? offered : 0; };
  rig.endpoint->complete_at_once = true;
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) hostile.push(1, 1u << kSlotsLog2, lane);
  for (std::uint32_t i = 0; i < kHandles; ++i) {
    const auto other = static_cast<std::uint16_t>(i);
    rig.proxy->apply(UnbindBuffer{0, i == 0 ? kHandle : static_cast<std::uint16_t>(2000 + i)});
    rig.proxy->apply(UnbindPeerBuffer{0, i == 0 ? std::uint16_t{1} : other, kHandle});
  }
  const Counter& looked = rig.proxy->stats().looked_ahead;
  constexpr std::uint64_t kAll = std::uint64_t{kLanes} << kSlotsLog2;
  for (int pass = 0; pass < 200; ++pass) {
    const std::uint64_t before = looked.value();
    rig.proxy->step();
    ASSERT_LE(looked.value() - before, 256u) << "of " << kAll;
  }
  EXPECT_LE(looked.value(), kAll) << "no slot is read twice";
  EXPECT_GE(looked.value(), kAll - 64) << "but for those that were taken";
  EXPECT_TRUE(rig.events.empty());
  open = true;
  rig.settle();
  // All that was committed before is executed, though it names a handle that went.
  EXPECT_TRUE(rig.events_of<SessionFault>().empty());
  for (std::uint32_t lane = 0; lane < kLanes; ++lane)
    EXPECT_EQ(hostile.completed(lane), 1u << kSlotsLog2);
  rig.steps(kHandles);
  EXPECT_EQ(rig.events_of<BufferReleased>().size(), kHandles);
  EXPECT_EQ(rig.events_of<PeerBufferReleased>().size(), kHandles);
  hostile.push(1);
  rig.settle();
  EXPECT_EQ(rig.events_of<SessionFault>().size(), 1u) << "then it is gone";
}

// A handle's answer asks all that is in flight: few at a time, and each in its turn.
TEST(HostileRing, ManyHandlesThatWaitDoNotKeepOthersFromTheirAnswer) {
  ProxyRig rig;
  auto& session = rig.add_bound_session();
  std::vector<FakeLocalRegion> regions(100);
  const auto handle = [](std::size_t i) { return static_cast<std::uint16_t>(100 + i); };
  for (std::size_t i = 0; i < regions.size(); ++i) {
    rig.proxy->apply(BindBuffer{0, handle(i), &regions[i], kBufferBytes});
    shm::Command command = write_command(1);
    command.src_handle = handle(i);
    ASSERT_TRUE(session.producers[0].try_push(command));
  }
  rig.settle();
  for (std::size_t i = 0; i < regions.size(); ++i) rig.proxy->apply(UnbindBuffer{0, handle(i)});
  rig.settle();
  EXPECT_TRUE(rig.events.empty());
  const auto writes = rig.endpoint->writes();
  ASSERT_EQ(writes.size(), regions.size());
  rig.endpoint->complete(writes.back().cookie);
  rig.steps(20);
  ASSERT_EQ(rig.events_of<BufferReleased>().size(), 1u);
  EXPECT_EQ(rig.events_of<BufferReleased>()[0].handle, handle(regions.size() - 1));
  rig.proxy->apply(FenceSession{0});
  for (std::size_t i = 0; i + 1 < writes.size(); ++i) rig.endpoint->complete(writes[i].cookie);
  rig.run();
  EXPECT_EQ(rig.events_of<BufferReleased>().size(), regions.size());
  EXPECT_TRUE(std::holds_alternative<Drained>(rig.events.back()));
}

TEST(HostileRing, AClientThatOverwritesItsCountersIsNotBelieved) {
  ProxyRig rig;
  rig.endpoint->complete_at_once = true;
  auto& session = rig.add_bound_session();
  session.push(1, 10);
  rig.settle();
  session.producers[0].ring.control->consumed = 0;
  session.producers[0].ring.control->completed = ~0ull;
  session.producers[0].ring.control->produced = ~0ull;
  session.push(1, 10);
  rig.settle();
  EXPECT_EQ(session.consumed(), 20u);
  EXPECT_EQ(session.completed(), 20u);
}

TEST(HostileRing, AHeaderRewrittenLaterChangesNothing) {
  ProxyRig rig;
  rig.endpoint->complete_at_once = true;
  auto& session = rig.add_bound_session();
  rig.run();
  std::memset(&session.segment.header().lanes_offset, 0xff, 64);
  session.push(1, 10);
  rig.settle();
  EXPECT_EQ(session.completed(), 10u);
}

}  // namespace
}  // namespace mk::daemon::test
