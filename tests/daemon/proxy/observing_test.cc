// What people may see of a proxy: sizes of submissions, retries, progress, the time from an arrival
// to its flag, and the trace.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "shm/flag.h"
#include "tests/daemon/proxy/proxy_rig.h"

namespace mk::daemon::test {
namespace {

using Kind = TraceRecord::Kind;

TEST(Observing, SubmissionsAreCountedBySize) {
  ProxyRig rig;
  auto& session = rig.add_session(0);
  rig.bind_peer(session, 1, 2);
  session.push(1, 19);
  rig.settle();
  const LinkStats& stats = rig.link_stats[2];
  EXPECT_EQ(stats.batch_commands[7].value(), 2u);
  EXPECT_EQ(stats.batch_commands[2].value(), 1u);
  std::uint64_t batches = 0, writes = 0;
  for (std::uint32_t i = 0; i < shm::kBatchMax; ++i) {
    batches += stats.batch_commands[i].value();
    writes += stats.batch_commands[i].value() * (i + 1);
  }
  EXPECT_EQ(batches, stats.batches.value());
  EXPECT_EQ(writes, stats.messages.value());
}

TEST(Observing, ASubmissionThatIsNotTakenWholeIsARetry) {
  ProxyRig rig;
  auto& session = rig.add_session(0);
  rig.bind_peer(session, 1, 2);
  rig.endpoint->accept = [](fabric::LinkId, std::size_t) { return std::size_t{3}; };
  session.push(1, 8);
  rig.proxy->step();
  EXPECT_EQ(rig.link_stats[2].post_retries.value(), 1u);
  rig.endpoint->accept = nullptr;
  rig.settle();
  EXPECT_EQ(rig.link_stats[2].post_retries.value(), 1u);
  EXPECT_EQ(rig.link_stats[2].messages.value(), 8u);
}

TEST(Observing, ALinksProgressIsItsLastCompletion) {
  ProxyRig rig;
  auto& session = rig.add_session(0);
  rig.bind_peer(session, 1, 2);
  rig.now_ns += 1000;
  session.push(1);
  rig.settle();
  const std::uint64_t posted_ns = rig.link_stats[2].progress_ns.value();
  EXPECT_EQ(posted_ns, 1'000'001'000u);  // nothing was outstanding before
  rig.now_ns += 5'000'000;
  session.push(1);
  rig.settle();
  EXPECT_EQ(rig.link_stats[2].progress_ns.value(), posted_ns);  // posting is no progress
  rig.now_ns += 5'000'000;
  rig.endpoint->complete(rig.endpoint->writes()[0].cookie);
  rig.run();
  EXPECT_EQ(rig.link_stats[2].progress_ns.value(), rig.now_ns);
  EXPECT_EQ(rig.link_stats[2].outstanding.value(), 1u);
}

TEST(Observing, EveryArrivalIsTimedWhereTheDaemonPublishesFlags) {
  for (const auto contract :
       {fabric::DeliveryContract::kUnordered, fabric::DeliveryContract::kOrdered}) {
    ProxyRig rig({}, {.name = "scripted", .contract = contract});
    rig.add_session(0);
    for (std::uint32_t i = 0; i < 5; ++i) rig.endpoint->arrive(shm::make_immediate(0, i, 1));
    rig.run();
    std::uint64_t count = 0;
    for (std::uint32_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
      count += rig.proxy->stats().arrival_to_flag.count(bucket);
    }
    EXPECT_EQ(count, contract == fabric::DeliveryContract::kUnordered ? 5u : 0u);
  }
}

TEST(Observing, ATraceTellsWhichLaunchesWritesAreOf) {
  ProxyRig rig;
  auto& session = rig.add_session(5);
  rig.bind_peer(session, 1, 2);
  shm::Progress& words = session.segment.header().progress;
  const auto launch = [&](std::uint32_t op, std::uint64_t tag) {
    shm::store_relaxed(&words.op, op);
    shm::store_relaxed(&words.epoch, words.epoch + 1);
    shm::store_relaxed(&words.m, 4096u);
    shm::store_relaxed(&words.sizes[0], 9u);
    shm::store_relaxed(&words.sizes[1], 8u);
    shm::store_relaxed(&words.tag, tag);
    session.push(1, 2);
    rig.settle();
  };
  TraceBuffer& trace = rig.proxy->trace();
  launch(3, 7);
  for (int recording = 0; recording < 2; ++recording) {
    trace.start();
    session.push(1);
    rig.settle();
    launch(3, 8);
    trace.stop();
    std::vector<TraceRecord> records;
    trace.take(records);
    std::vector<TracedLaunch> launches;
    std::size_t writes = 0;
    for (const TraceRecord& record : records) {
      if (record.kind == Kind::kPosted) ++writes;
      if (record.kind != Kind::kLaunch) continue;
      EXPECT_EQ(Cookie::unpack(record.cookie).slot, 5u);
      EXPECT_EQ(writes, launches.size()) << "before its writes";
      launches.push_back(record.launch);
    }
    const std::uint32_t epoch = words.epoch;
    const std::vector<TracedLaunch> told{
        {.tag = recording == 0 ? 7u : 8u, .op = 3, .epoch = epoch - 1, .m = 4096, .sizes = {9, 8}},
        {.tag = 8, .op = 3, .epoch = epoch, .m = 4096, .sizes = {9, 8}}};
    EXPECT_EQ(launches, told) << "recording " << recording;
    EXPECT_EQ(writes, 3u);
  }
}

TEST(Observing, ATraceHasEveryWriteAndItsEnd) {
  ProxyRig rig(
      {},
      {.name = "scripted", .contract = fabric::DeliveryContract::kUnordered, .link_depth = 1024});
  auto& session = rig.add_session(5);
  rig.bind_peer(session, 1, 2);
  TraceBuffer& trace = rig.proxy->trace();
  std::vector<TraceRecord> records;
  session.push(1);
  rig.settle();
  trace.take(records);
  EXPECT_TRUE(records.empty());  // off
  trace.start();
  session.push(1, 2, 0, 256);
  rig.settle();
  rig.now_ns += 700;
  rig.endpoint->complete(rig.endpoint->writes()[1].cookie);
  rig.endpoint->fail(rig.endpoint->writes()[2].cookie);
  rig.endpoint->arrive(shm::make_immediate(5, 9, 1));
  rig.run();
  trace.stop();
  rig.endpoint->arrive(shm::make_immediate(5, 9, 2));
  rig.run();
  trace.take(records);
  ASSERT_EQ(records.size(), 6u);
  EXPECT_EQ(records[0].kind, Kind::kLaunch);
  records.erase(records.begin());
  EXPECT_EQ(records[0].kind, Kind::kPosted);
  EXPECT_EQ(records[0].link, 2u);
  EXPECT_EQ(records[0].bytes, 256u);
  EXPECT_EQ(records[0].batch, records[1].batch);
  EXPECT_EQ(Cookie::unpack(records[1].cookie).slot, 5u);
  EXPECT_EQ(Cookie::unpack(records[1].cookie).sequence, 2u);
  EXPECT_EQ(records[2].kind, Kind::kCompleted);
  EXPECT_EQ(records[2].cookie, records[0].cookie);
  EXPECT_EQ(records[2].time_ns, rig.now_ns);
  EXPECT_EQ(records[3].kind, Kind::kFailed);
  EXPECT_EQ(records[3].cookie, records[1].cookie);
  EXPECT_EQ(records[4].kind, Kind::kArrived);
  EXPECT_EQ(shm::immediate_flag(static_cast<std::uint32_t>(records[4].cookie)), 9u);
  EXPECT_EQ(trace.dropped(), 0u);
}

TEST(TraceBuffer, DropsAndCountsWhatNobodyTakes) {
  TraceBuffer trace;
  trace.start();
  for (std::uint64_t i = 0; i < TraceBuffer::kRecords + 10; ++i) trace.record({.time_ns = i});
  EXPECT_EQ(trace.dropped(), 10u);
  std::vector<TraceRecord> records;
  trace.take(records);
  ASSERT_EQ(records.size(), TraceBuffer::kRecords);
  EXPECT_EQ(records.back().time_ns, TraceBuffer::kRecords - 1);
  trace.start();  // again: nothing of before is left
  EXPECT_EQ(trace.dropped(), 0u);
  trace.record({.time_ns = 7});
  records.clear();
  trace.take(records);
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].time_ns, 7u);
}

TEST(TraceBuffer, KeepsOrderBetweenTwoThreads) {
  TraceBuffer trace;
  trace.start();
  constexpr std::uint64_t kCount = 300'000;
  std::atomic<bool> done{false};
  std::thread proxy([&] {
    for (std::uint64_t i = 1; i <= kCount; ++i) {
      if (trace.on()) trace.record({.time_ns = i, .cookie = ~i});
    }
    done = true;
  });
  std::vector<TraceRecord> records;
  while (!done) trace.take(records);
  proxy.join();
  trace.take(records);
  std::uint64_t last = 0;
  for (const TraceRecord& record : records) {
    ASSERT_GT(record.time_ns, last);
    ASSERT_EQ(record.cookie, ~record.time_ns);
    last = record.time_ns;
  }
  EXPECT_EQ(records.size() + trace.dropped(), kCount);
}

}  // namespace
}  // namespace mk::daemon::test
