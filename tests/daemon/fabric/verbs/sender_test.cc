// The data path of one link against a NIC that only writes down: what writes become, when a
// doorbell rings, what is signalled, and that every write ends once, whatever the NIC says.
#include "daemon/fabric/verbs/sender.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/daemon/fabric/verbs/fake_nic.h"

namespace mk::fabric::verbs {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

struct Setup {
  bool extended = true;
  DeliveryContract contract = DeliveryContract::kOrdered;
  std::uint32_t queues = 1;
  std::uint32_t depth = 64;
};

/// A sender, its NIC, and what came out.
struct Rig {
  explicit Rig(const Setup& setup)
      : nic(setup.queues),
        sender(nic.completions(), nic.references(setup.extended),
               {.contract = setup.contract,
                .depth = setup.depth,
                .write_timeout_ns = 5 * kSecond,
                .stop = [this] { ++stops; },
                .peer_name = "node 1 rail 0"}) {}

  void poll(std::uint64_t now_ns = 1) {
    sender.progress(now_ns);
    std::array<Event, 7> events;
    for (std::size_t count = 0; (count = sender.report(3, events)) > 0;) {
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(events[i].link, 3u);
        ++(events[i].kind == Event::Kind::kCompleted ? completed : failed)[events[i].cookie];
        if (events[i].kind == Event::Kind::kFailed) codes[events[i].cookie] = events[i].code;
      }
    }
  }

  FakeNic nic;
  int stops = 0;
  Sender sender;
  FakeMemory memory;
  std::map<std::uint64_t, int> completed, failed;
  std::map<std::uint64_t, ErrorCode> codes;
};

class SenderTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Submission, SenderTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& each) {
                           return std::string(each.param ? "extended" : "classic");
                         });

TEST_P(SenderTest, AnOrderedWriteIsItsDataThenItsFlagInline) {
  Rig rig({.extended = GetParam()});
  const Write write = rig.memory.write(9, 11, 300, 64, 128);
  ASSERT_EQ(rig.sender.post({&write, 1}), 1u);
  const auto& seen = rig.nic.queue().seen;
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(rig.nic.queue().doorbells, 1);
  EXPECT_EQ(seen[0], (Seen{.id = 1,
                           .remote = 0x200000 + 128,
                           .remote_key = 72,
                           .local = 0x10000 + 64,
                           .bytes = 300,
                           .local_key = 71}));
  EXPECT_EQ(seen[1], (Seen{.signaled = true,
                           .is_inline = true,
                           .id = 2,
                           .remote = 0x4000000 + 44,
                           .remote_key = 73,
                           .bytes = 4,
                           .word = write.epoch}));
}

TEST_P(SenderTest, AFlagAloneIsOneInlineWrite) {
  Rig rig({.extended = GetParam()});
  const Write write = rig.memory.write(9, 0, 0);
  ASSERT_EQ(rig.sender.post({&write, 1}), 1u);
  ASSERT_EQ(rig.nic.queue().seen.size(), 1u);
  EXPECT_TRUE(rig.nic.queue().seen[0].is_inline);
  EXPECT_TRUE(rig.nic.queue().seen[0].signaled);
}

TEST_P(SenderTest, AnUnorderedWriteIsOneWriteWithImmediate) {
  Rig rig({.extended = GetParam(), .contract = DeliveryContract::kUnordered});
  const std::array writes{rig.memory.write(1, 5, 77, 1, 2), rig.memory.write(2, 6, 0)};
  ASSERT_EQ(rig.sender.post(writes), 2u);
  const auto& seen = rig.nic.queue().seen;
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0], (Seen{.immediate = true,
                           .id = 1,
                           .remote = 0x200002,
                           .remote_key = 72,
                           .local = 0x10001,
                           .bytes = 77,
                           .local_key = 71,
                           .word = writes[0].immediate}));
  EXPECT_EQ(seen[1],
            (Seen{.immediate = true, .signaled = true, .id = 2, .word = writes[1].immediate}));
}

TEST_P(SenderTest, ABatchRingsOnceAndOnlyItsLastRequestIsSignalled) {
  for (std::size_t size = 1; size <= shm::kBatchMax; ++size) {
    Rig rig({.extended = GetParam()});
    std::vector<Write> writes;
    for (std::size_t i = 0; i < size; ++i)
      writes.push_back(rig.memory.write(i, static_cast<std::uint32_t>(i), i % 2 == 0 ? 10 : 0));
    ASSERT_EQ(rig.sender.post(writes), size);
    const auto& seen = rig.nic.queue().seen;
    EXPECT_EQ(rig.nic.queue().doorbells, 1);
    for (std::size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i].signaled, i + 1 == seen.size());
      EXPECT_EQ(seen[i].id, i + 1);
    }
    rig.poll();
    EXPECT_TRUE(rig.completed.empty());
    rig.nic.complete(seen.back().id);
    rig.poll();
    EXPECT_EQ(rig.completed.size(), size) << "one completion stands for the whole batch";
    EXPECT_TRUE(rig.sender.empty());
  }
}

TEST_P(SenderTest, MoreThanABatchIsNotTakenAtOnce) {
  Rig rig({.extended = GetParam()});
  const std::vector<Write> writes(shm::kBatchMax + 1, rig.memory.write(1, 1, 0));
  EXPECT_EQ(rig.sender.post(writes), shm::kBatchMax);
}

TEST_P(SenderTest, QueuesShareABatchByFlagAndEachRingsOnce) {
  Rig rig({.extended = GetParam(), .queues = 3});
  std::vector<Write> writes;
  const std::uint32_t flags[] = {0, 8, 16, 24, 7, 15, 23, 31};
  for (std::size_t i = 0; i < 8; ++i) writes.push_back(rig.memory.write(i, flags[i], 5));
  ASSERT_EQ(rig.sender.post(writes), 8u);
  const std::size_t expected[] = {4, 2, 2};  // eighths 0 and 3, then 1, then 2
  for (std::size_t q = 0; q < 3; ++q) {
    const auto& seen = rig.nic.queue(q).seen;
    ASSERT_EQ(seen.size(), 2 * expected[q]);
    EXPECT_EQ(rig.nic.queue(q).doorbells, 1);
    for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i].signaled, i + 1 == seen.size());
  }
  rig.nic.complete(rig.nic.queue(1).seen.back().id);
  rig.poll();
  EXPECT_EQ(rig.completed, (std::map<std::uint64_t, int>{{1, 1}, {5, 1}}));
  rig.nic.complete(rig.nic.queue(0).seen.back().id);
  rig.nic.complete(rig.nic.queue(2).seen.back().id);
  rig.poll();
  EXPECT_EQ(rig.completed.size(), 8u);
}

TEST(QueueOfTest, OneFlagAlwaysUsesOneQueueAndAllAreUsed) {
  for (std::uint32_t queues = 1; queues <= kVerbsQueuesMax; ++queues) {
    std::vector<int> load(queues);
    for (std::uint32_t flag = 0; flag < 8 * queues * 5; ++flag) {
      ASSERT_LT(queue_of(flag, queues), queues);
      ++load[queue_of(flag, queues)];
    }
    for (const int share : load) EXPECT_EQ(share, 40);
  }
}

TEST_P(SenderTest, NoMoreThanTheDepthIsEverWithTheNic) {
  Rig rig({.extended = GetParam(), .depth = 20});
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < 100; ++i) writes.push_back(rig.memory.write(i, 1, 5));
  std::size_t taken = 0;
  for (std::size_t now = 1; now > 0; taken += now)
    now = rig.sender.post(std::span(writes).subspan(taken, 8));
  EXPECT_EQ(taken, 20u);
  EXPECT_EQ(rig.nic.queue().seen.size(), 40u) << "data and flag of each";
  rig.nic.complete(16);  // the first batch of eight
  rig.sender.progress(1);
  EXPECT_EQ(rig.sender.post(writes), 0u) << "a place is free when its end was reported";
  rig.poll();
  EXPECT_EQ(rig.sender.post(writes), 8u);
}

TEST_P(SenderTest, AWriteOutsideItsRegionsFailsAlone) {
  Rig rig({.extended = GetParam()});
  const std::array writes{rig.memory.write(1, 1, 10, (1 << 20) - 9, 0),
                          rig.memory.write(2, 1, 10, 0, (1 << 20) - 9),
                          rig.memory.write(3, 4096, 0), rig.memory.write(4, 4095, 10),
                          rig.memory.write(5, 1, 10, UINT64_MAX - 4, 0)};
  ASSERT_EQ(rig.sender.post(writes), 5u);
  EXPECT_EQ(rig.nic.queue().seen.size(), 2u);
  rig.nic.complete(2);
  rig.poll();
  EXPECT_EQ(rig.completed, (std::map<std::uint64_t, int>{{4, 1}}));
  EXPECT_EQ(rig.failed.size(), 4u);
  EXPECT_EQ(rig.codes[3], ErrorCode::kInvalidArgument);
  EXPECT_FALSE(rig.sender.closed());
}

TEST_P(SenderTest, AnErrorEndsTheLinkAndEveryWriteOnce) {
  Rig rig({.extended = GetParam()});
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < 24; ++i) writes.push_back(rig.memory.write(i, 1, 5));
  for (std::size_t i = 0; i < 24; i += 8)
    ASSERT_EQ(rig.sender.post(std::span(writes).subspan(i, 8)), 8u);
  rig.nic.complete(16);
  rig.nic.complete(19, IBV_WC_RETRY_EXC_ERR);
  rig.poll(10);
  EXPECT_TRUE(rig.sender.closed());
  EXPECT_EQ(rig.stops, 1);
  EXPECT_NE(rig.sender.reason().find("node 1 rail 0 does not acknowledge"), std::string::npos)
      << rig.sender.reason();
  EXPECT_EQ(rig.completed.size(), 8u);
  EXPECT_TRUE(rig.failed.empty()) << "the NIC still has the rest: its memory is not free yet";
  for (std::uint64_t id = 20; id <= 48; ++id) rig.nic.complete(id, IBV_WC_WR_FLUSH_ERR);
  rig.poll(11);
  EXPECT_EQ(rig.failed.size(), 16u);
  for (const auto& [cookie, count] : rig.failed) {
    EXPECT_EQ(count, 1);
    EXPECT_FALSE(rig.completed.contains(cookie));
    EXPECT_EQ(rig.codes[cookie], ErrorCode::kLinkDown);
  }
  EXPECT_TRUE(rig.sender.empty());
  const Write late = rig.memory.write(99, 1, 5);
  EXPECT_EQ(rig.sender.post({&late, 1}), 1u);
  rig.poll(12);
  EXPECT_EQ(rig.failed[99], 1);
  EXPECT_EQ(rig.nic.queue().seen.size(), 48u) << "and nothing more is given to the NIC";
}

TEST_P(SenderTest, AnAcknowledgedWriteAfterTheEndIsReportedAsSuch) {
  Rig rig({.extended = GetParam(), .queues = 2});
  const std::array writes{rig.memory.write(1, 0, 5), rig.memory.write(2, 8, 5)};
  ASSERT_EQ(rig.sender.post(writes), 2u);
  rig.nic.complete(rig.nic.queue(0).seen[1].id, IBV_WC_REM_ACCESS_ERR);
  rig.poll(1);
  rig.nic.complete(rig.nic.queue(1).seen[1].id);
  rig.poll(2);
  EXPECT_TRUE(rig.completed.contains(2));
  EXPECT_TRUE(rig.failed.contains(1));
}

TEST_P(SenderTest, AQueueThatReturnsNothingIsNotWaitedForForEver) {
  Rig rig({.extended = GetParam()});
  const Write write = rig.memory.write(1, 1, 5);
  ASSERT_EQ(rig.sender.post({&write, 1}), 1u);
  rig.sender.close("given up");
  rig.poll(kSecond);
  EXPECT_TRUE(rig.failed.empty());
  rig.poll(2 * kSecond);
  EXPECT_TRUE(rig.failed.empty());
  rig.poll(2 * kSecond + 1);
  EXPECT_EQ(rig.failed[1], 1);
}

TEST_P(SenderTest, NoCompletionForTooLongEndsTheLink) {
  Rig rig({.extended = GetParam()});
  std::vector<Write> writes(2, rig.memory.write(1, 1, 5));
  rig.poll(100 * kSecond);
  ASSERT_EQ(rig.sender.post({&writes[0], 1}), 1u);
  rig.poll(200 * kSecond);  // idle before: the time counts from here
  EXPECT_FALSE(rig.sender.closed());
  ASSERT_EQ(rig.sender.post({&writes[1], 1}), 1u);
  rig.nic.complete(2);
  rig.poll(204 * kSecond);
  rig.poll(209 * kSecond);
  EXPECT_FALSE(rig.sender.closed());
  rig.poll(209 * kSecond + 1);
  EXPECT_TRUE(rig.sender.closed());
  EXPECT_NE(rig.sender.reason().find("took no data for 5 s"), std::string::npos);
}

TEST_P(SenderTest, ARefusedSubmissionEndsTheLinkAndFailsWhatTheNicDidNotTake) {
  Rig rig({.extended = GetParam()});
  rig.nic.queue().error = ENOMEM;
  rig.nic.queue().accepted_of_error = GetParam() ? 0 : 3;
  std::vector<Write> writes;
  for (std::uint64_t i = 0; i < 4; ++i) writes.push_back(rig.memory.write(i, 1, 5));
  EXPECT_EQ(rig.sender.post(writes), 4u);
  EXPECT_TRUE(rig.sender.closed());
  if (!GetParam()) {
    for (std::uint64_t id = 1; id <= 3; ++id) rig.nic.complete(id, IBV_WC_WR_FLUSH_ERR);
  }
  rig.poll();
  EXPECT_EQ(rig.failed.size(), 4u);
  EXPECT_TRUE(rig.sender.empty());
}

TEST_P(SenderTest, StrayCompletionsChangeNothing) {
  Rig rig({.extended = GetParam()});
  const Write write = rig.memory.write(1, 1, 5);
  ASSERT_EQ(rig.sender.post({&write, 1}), 1u);
  rig.nic.complete(0);
  rig.nic.complete(77);
  rig.nic.complete(2);
  rig.nic.complete(2);
  rig.poll();
  EXPECT_EQ(rig.completed, (std::map<std::uint64_t, int>{{1, 1}}));
  EXPECT_FALSE(rig.sender.closed());
}

TEST_P(SenderTest, AtRandomEveryWriteEndsOnceAndInTheOrderOfItsQueue) {
  std::mt19937 random(GetParam() ? 5 : 6);
  const auto draw = [&](std::uint32_t below) {
    return static_cast<std::uint32_t>(random() % below);
  };
  Rig rig({.extended = GetParam(), .queues = 4, .depth = 50});
  std::uint64_t cookie = 0;
  std::vector<std::size_t> returned(4);
  for (int step = 0; step < 3000; ++step) {
    std::vector<Write> writes;
    const std::size_t size = 1 + random() % 8;
    for (std::size_t i = 0; i < size; ++i)
      writes.push_back(rig.memory.write(cookie + i, draw(4096), draw(3) * 100));
    cookie += rig.sender.post(writes);
    for (std::size_t q = 0; q < 4; ++q) {
      const auto& seen = rig.nic.queue(q).seen;
      while (returned[q] < seen.size() && random() % 4 != 0) {
        if (seen[returned[q]].signaled) rig.nic.complete(seen[returned[q]].id);
        ++returned[q];
      }
    }
    rig.poll();
  }
  for (std::size_t q = 0; q < 4; ++q) {
    const auto& seen = rig.nic.queue(q).seen;
    for (; returned[q] < seen.size(); ++returned[q])
      if (seen[returned[q]].signaled) rig.nic.complete(seen[returned[q]].id);
  }
  rig.poll();
  EXPECT_GT(cookie, 1000u);
  EXPECT_EQ(rig.completed.size(), cookie);
  for (const auto& [id, count] : rig.completed) EXPECT_EQ(count, 1) << id;
  EXPECT_TRUE(rig.sender.empty());
}

// -- memory in pieces, messages of limited length ---------------------------------------------

/// Memory registered in pieces of 2^`source_shift` and 2^`target_shift` bytes; a piece's keys tell
/// which it is.
struct PiecedMemory {
  PiecedMemory(std::uint32_t source_shift, std::uint32_t target_shift)
      : source(pieced(0x10000, source_shift), keys(500), 0, nullptr),
        target(pieced(0x200000, target_shift)),
        flags(pieced(0x4000000, 63)) {}
  static std::vector<std::uint32_t> keys(std::uint32_t first) {
    std::vector<std::uint32_t> all(kPiecesMax);
    for (std::uint32_t i = 0; i < kPiecesMax; ++i) all[i] = first + i;
    return all;
  }
  static Key pieced(std::uint64_t address, std::uint32_t shift) {
    Key key;
    key.address = address;
    key.bytes = 64 * 1024;
    key.piece_shift = shift;
    for (std::uint32_t i = 0; i < kPiecesMax; ++i) key.rkeys[i] = 700 + i;
    return key;
  }
  VerbsLocalRegion source;
  VerbsRemoteRegion target;
  VerbsRemoteRegion flags;
};

TEST(WorkMakerTest, ARequestNeverLeavesItsPiecesAndTogetherTheyAreTheWrite) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 4000; ++round) {
    const auto source_shift = static_cast<std::uint32_t>(11 + random() % 6);
    const auto target_shift = static_cast<std::uint32_t>(11 + random() % 6);
    const std::uint64_t message_max = random() % 3 == 0 ? 1 + random() % 5000 : UINT64_MAX;
    const bool ordered = random() % 2 == 0;
    const PiecedMemory memory(source_shift, target_shift);
    Write write;
    write.bytes = static_cast<std::uint32_t>(random() % 20'000);
    write.src_offset = random() % (64 * 1024 - write.bytes);
    write.dst_offset = random() % (64 * 1024 - write.bytes);
    write.src = &memory.source;
    write.dst = &memory.target;
    write.flags = &memory.flags;
    write.flag_index = 3;
    write.epoch = 41;
    write.immediate = 42;
    WorkMaker maker(write, ordered ? DeliveryContract::kOrdered : DeliveryContract::kUnordered,
                    message_max);
    const std::uint32_t count = maker.count();
    std::vector<WorkRequest> all;
    for (WorkRequest request; maker.next(request);) all.push_back(request);
    ASSERT_EQ(all.size(), count);
    std::uint64_t done = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const WorkRequest& request = all[i];
      const bool last = i + 1 == all.size();
      if (ordered && last) {
        EXPECT_EQ(request.kind, WorkRequest::Kind::kFlag);
        EXPECT_EQ(request.remote, 0x4000000u + 12);
        EXPECT_EQ(request.word, 41u);
        continue;
      }
      EXPECT_EQ(request.kind, last ? WorkRequest::Kind::kImmediate : WorkRequest::Kind::kData);
      if (last) {
        EXPECT_EQ(request.word, 42u);
      }
      if (write.bytes == 0) continue;
      ASSERT_GT(request.bytes, 0u);
      ASSERT_LE(request.bytes, message_max);
      const std::uint64_t from = write.src_offset + done;
      const std::uint64_t to = write.dst_offset + done;
      EXPECT_EQ(request.local, 0x10000 + from);
      EXPECT_EQ(request.remote, 0x200000 + to);
      EXPECT_EQ(request.local_key, 500 + (from >> source_shift));
      EXPECT_EQ(request.remote_key, 700 + (to >> target_shift));
      EXPECT_EQ(from >> source_shift, (from + request.bytes - 1) >> source_shift);
      EXPECT_EQ(to >> target_shift, (to + request.bytes - 1) >> target_shift);
      done += request.bytes;
    }
    EXPECT_EQ(done, write.bytes);
  }
}

TEST_P(SenderTest, WritesOfManyRequestsNeverOverfillTheQueueAndAllEndOnce) {
  constexpr std::uint32_t kDepth = 32;
  FakeNic nic(1);
  const PiecedMemory memory(11, 12);
  Sender sender(nic.completions(), nic.references(GetParam()),
                {.depth = kDepth,
                 .message_bytes_max = 1000,
                 .write_timeout_ns = 5 * kSecond,
                 .stop = [] {},
                 .peer_name = "node 1 rail 0"});
  std::mt19937_64 random(11);
  std::map<std::uint64_t, int> completed;
  std::uint64_t next = 0, answered = 0;
  constexpr std::uint64_t kWrites = 3000;
  std::uint64_t fullest = 0;
  while (completed.size() < kWrites) {
    std::vector<Write> batch(next < kWrites ? std::min<std::uint64_t>(8, kWrites - next) : 0);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      Write& write = batch[i];
      write.cookie = next + i;
      write.bytes = static_cast<std::uint32_t>(random() % 12'000);
      write.src = &memory.source;
      write.dst = &memory.target;
      write.flags = &memory.flags;
    }
    next += sender.post(batch);
    auto& seen = nic.queue().seen;
    fullest = std::max(fullest, seen.size() - answered);
    ASSERT_LE(seen.size() - answered, 2 * kDepth);
    // The NIC gets on a little: what is signalled among the next few requests.
    const std::uint64_t until = std::min<std::uint64_t>(seen.size(), answered + random() % 40);
    for (; answered < until; ++answered) {
      if (seen[answered].signaled) nic.complete(seen[answered].id);
    }
    sender.progress(1);
    std::array<Event, 16> events;
    for (std::size_t count = 0; (count = sender.report(0, events)) > 0;) {
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(events[i].kind, Event::Kind::kCompleted);
        ++completed[events[i].cookie];
      }
    }
  }
  EXPECT_GT(fullest, kDepth);
  for (const auto& [cookie, count] : completed) EXPECT_EQ(count, 1) << cookie;
  EXPECT_TRUE(sender.empty());

  Write beyond;
  beyond.cookie = 99;
  beyond.bytes = 64 * 1024;  // more requests than the queue has room for: it would wait for ever
  beyond.src = &memory.source;
  beyond.dst = &memory.target;
  beyond.flags = &memory.flags;
  ASSERT_EQ(sender.post({&beyond, 1}), 1u);
  std::array<Event, 1> events;
  ASSERT_EQ(sender.report(0, events), 1u);
  EXPECT_EQ(events[0].kind, Event::Kind::kFailed);
  EXPECT_EQ(events[0].code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace mk::fabric::verbs
