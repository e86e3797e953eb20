// The loopback fabric between memories of GPUs, over a driver whose streams do their work when the
// test says so: nothing is completed or shown before its copy is over, whatever the link's model
// says. Nothing that a GPU still reads or writes is let go.
#include "shm/gpu/memory.h"
#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/shm/gpu/fake_driver.h"

namespace mk::fabric {
namespace {

using gpu::test::FakeDriver;
using gpu::test::FakeMachine;

constexpr std::uint32_t kBytes = 1 << 16;

/// A rank's buffer in GPU memory, as its process made it and as its daemon registered it.
struct GpuBuffer {
  gpu::Allocation memory;
  std::unique_ptr<LocalRegion> region;
};

Write write_of(const TestLink& link, std::uint32_t flag, std::uint64_t cookie,
               const GpuBuffer& source, std::uint64_t source_offset, const RemoteRegion& target,
               std::uint64_t target_offset, std::uint32_t bytes) {
  Write made = make_write(link, flag, 1, cookie);
  made.src = source.region.get();
  made.src_offset = source_offset;
  made.dst = &target;
  made.dst_offset = target_offset;
  made.bytes = bytes;
  return made;
}

class GpuLoopback : public testing::Test {
 protected:
  /// `ns` a poll moves the clock by, if the link is paced.
  FabricSetup setup(double bytes_per_second = 0, std::uint64_t latency_ns = 0,
                    bool share_process_memory = true) {
    FabricSetup made;
    made.config.link_model = {bytes_per_second, latency_ns};
    made.loopback.now_ns = [this] { return now_; };
    made.loopback.share_process_memory = share_process_memory;
    made.loopback.load_gpu_driver = [this]() -> Result<std::shared_ptr<gpu::Driver>> {
      return driver_;
    };
    return made;
  }
  /// Of another process on `device`, so that the daemon has to open it.
  Result<GpuBuffer> buffer(Node& node, int device, std::uint64_t bytes = kBytes,
                           bool other_process = true) {
    MK_ASSIGN_OR_RETURN(auto memory, gpu::Allocation::create(ranks_, device, bytes));
    gpu::MemoryKey key = memory.key();
    if (other_process) key.process.start_time += 1;
    MK_ASSIGN_OR_RETURN(auto region,
                        node.endpoint->register_memory({.bytes = bytes, .device = key}));
    return GpuBuffer{std::move(memory), std::move(region)};
  }
  static std::unique_ptr<RemoteRegion> import(Node& from, const TestLink& link,
                                              const GpuBuffer& buffer) {
    auto region = from.endpoint->import_region(link.id, buffer.region->key());
    EXPECT_TRUE(region) << region.error().message;
    return region ? std::move(*region) : nullptr;
  }
  /// Two nodes, a buffer of GPU 0 at one and of GPU 1 at the other, and the way between them.
  struct Pair {
    Pair(GpuLoopback& test, const FabricSetup& setup, std::uint64_t bytes = kBytes,
         bool other_process = true)
        : a(setup),
          b(setup),
          link(join(a, b)),
          source(test.buffer(a, 0, bytes, other_process).value()),
          target(test.buffer(b, 1, bytes, other_process).value()),
          remote(import(a, link, target)) {}
    Write write(std::uint32_t flag, std::uint64_t cookie, std::uint64_t source_offset,
                std::uint64_t target_offset, std::uint32_t bytes) const {
      return write_of(link, flag, cookie, source, source_offset, *remote, target_offset, bytes);
    }
    std::size_t post(std::span<const Write> writes) { return a.endpoint->post(link.id, writes); }

    Node a, b;
    const TestLink link;
    GpuBuffer source, target;
    const std::unique_ptr<RemoteRegion> remote;
  };

  std::uint64_t now_ = 1'000'000'000;
  const std::shared_ptr<FakeMachine> machine_ = std::make_shared<FakeMachine>();
  const std::shared_ptr<FakeDriver> ranks_ = std::make_shared<FakeDriver>(machine_);
  const std::shared_ptr<FakeDriver> driver_ = std::make_shared<FakeDriver>(machine_);  ///< daemons'
};

TEST_F(GpuLoopback, NothingIsCompletedOrShownBeforeItsCopyIsOver) {
  for (const bool share : {true, false}) {
    SCOPED_TRACE(share);
    Pair pair(*this, setup(0, 0, share));
    fill_random({pair.source.memory.data(), kBytes}, 7);
    driver_->hold = true;
    const Write writes[] = {pair.write(0, 1, 16, 48, 1000), pair.write(1, 2, 2000, 4096, 5000)};
    ASSERT_EQ(pair.post(writes), 2u);
    const Write flag_only = make_write(pair.link, 2, 1, 3);
    ASSERT_EQ(pair.post({&flag_only, 1}), 1u);
    for (int i = 0; i < 10; ++i) pair.a.poll();
    EXPECT_EQ(pair.a.total(pair.a.completed), 0u);
    EXPECT_EQ(pair.b.flag(0), 0u);
    EXPECT_EQ(pair.b.flag(2), 0u) << "it stays behind the data before it";
    EXPECT_TRUE(pair.a.endpoint->next_due_ns()) << "the proxy must go on polling";

    // One piece of work after the other: a flag never shows before its bytes are there.
    for (int step = 0; step < 20 && pair.a.completed.size() < 3; ++step) {
      driver_->run(1);
      pair.a.poll();
      if (pair.b.flag(0) == 1) {
        EXPECT_EQ(
            0, std::memcmp(pair.target.memory.data() + 48, pair.source.memory.data() + 16, 1000));
      }
      if (pair.b.flag(1) == 1) {
        EXPECT_EQ(0, std::memcmp(pair.target.memory.data() + 4096, pair.source.memory.data() + 2000,
                                 5000));
      }
      EXPECT_GE(pair.b.flag(0), pair.b.flag(1));
      EXPECT_GE(pair.b.flag(1), pair.b.flag(2));
      EXPECT_GE(pair.a.completed.contains(1), pair.b.flag(0) == 1);
    }
    EXPECT_EQ(pair.a.completed.size(), 3u);
    EXPECT_EQ(pair.b.flag(2), 1u);
    EXPECT_TRUE(pair.a.settled());
    EXPECT_EQ(pair.a.failed.size(), 0u);
    driver_->hold = false;
  }
}

TEST_F(GpuLoopback, APacedLinkKeepsItsTimesWhenTheGpuIsFasterAndWaitsWhenItIsSlower) {
  Pair pair(*this, setup(1e9, 5'000));
  const std::uint64_t start = now_;
  const auto at = [&](std::uint64_t ns) {
    now_ = start + ns;
    pair.a.poll();
    pair.a.poll();  // what the first handed over is over by the second
  };
  const Write writes[] = {pair.write(0, 1, 0, 0, 1000), pair.write(1, 2, 1000, 1000, 2000)};
  ASSERT_EQ(pair.post(writes), 2u);
  at(0);
  EXPECT_EQ(driver_->copies(), 1u) << "one lies behind the other: they go together";
  at(999);
  EXPECT_FALSE(pair.a.completed.contains(1));
  at(1000);
  EXPECT_TRUE(pair.a.completed.contains(1));
  EXPECT_FALSE(pair.a.completed.contains(2));
  at(5999);
  EXPECT_EQ(pair.b.flag(0), 0u);
  driver_->hold = true;
  at(6000);
  EXPECT_EQ(pair.b.flag(0), 1u);
  at(8000);
  EXPECT_EQ(pair.b.flag(1), 1u) << "its copy was over before";

  // A GPU that is late makes the write late.
  const Write late = pair.write(2, 3, 0, 0, 1000);
  ASSERT_EQ(pair.post({&late, 1}), 1u);
  at(8000 + 1000 + 5000);
  EXPECT_FALSE(pair.a.completed.contains(3));
  EXPECT_EQ(pair.b.flag(2), 0u);
  driver_->run();
  at(8000 + 1000 + 5000);
  EXPECT_TRUE(pair.a.completed.contains(3));
  EXPECT_EQ(pair.b.flag(2), 1u);
  EXPECT_EQ(pair.a.endpoint->next_due_ns(), std::nullopt);
}

TEST_F(GpuLoopback, WritesGoTogetherOnlyWhenTheyLieTogetherAndAreSoonDue) {
  Pair pair(*this, setup(1e9, 0));  // a kilobyte takes a microsecond
  const std::uint64_t start = now_;
  const Write writes[] = {pair.write(0, 1, 0, 0, 1000), pair.write(1, 2, 1000, 2000, 1000),
                          pair.write(2, 3, 2000, 3000, 1000), pair.write(3, 4, 3000, 4000, 1000),
                          pair.write(4, 5, 5000, 5000, 1000)};
  ASSERT_EQ(pair.post(writes), 5u);
  pair.a.poll();
  // The first's target ends before the second's; behind the second lie two more; the last one's
  // source lies elsewhere.
  EXPECT_EQ(driver_->copies(), 3u);
  for (std::uint32_t k = 1; k <= 5; ++k) {
    now_ = start + k * 1000u - 1;
    pair.a.poll();
    pair.a.poll();
    EXPECT_EQ(pair.a.completed.size(), k - 1) << "each at its own time";
    EXPECT_EQ(pair.b.flag(k - 1), 0u);
    now_ = start + k * 1000u;
    pair.a.poll();
    pair.a.poll();
    EXPECT_EQ(pair.a.completed.size(), k);
    EXPECT_EQ(pair.b.flag(k - 1), 1u);
  }
  EXPECT_EQ(0,
            std::memcmp(pair.target.memory.data() + 2000, pair.source.memory.data() + 1000, 3000));
  EXPECT_EQ(0,
            std::memcmp(pair.target.memory.data() + 5000, pair.source.memory.data() + 5000, 1000));
  EXPECT_TRUE(pair.a.settled());
}

// Allocations lie one behind the other, and CUDA refuses a copy that crosses from one into another.
TEST_F(GpuLoopback, WritesOfSeveralBuffersNeverGoTogether) {
  for (const bool share : {true, false}) {
    SCOPED_TRACE(share);
    const FabricSetup both = setup(0, 0, share);
    Node a(both), b(both);
    const TestLink link = join(a, b);
    constexpr std::uint64_t kGranule = gpu::kAllocationGranule;
    constexpr std::uint32_t kBuffers = 4;
    std::vector<GpuBuffer> sources;
    for (std::uint32_t i = 0; i < kBuffers; ++i) {
      sources.push_back(buffer(a, 0, kGranule).value());
      fill_random({sources[i].memory.data(), kGranule}, 40 + i);
      if (i > 0) {
        ASSERT_EQ(sources[i].memory.data(), sources[i - 1].memory.data() + kGranule);
      }
    }
    GpuBuffer target = buffer(b, 1, kBuffers * kGranule).value();
    std::memset(target.memory.data(), std::to_integer<int>(kPoison), kBuffers * kGranule);
    const auto remote = import(a, link, target);
    // The halves of each; the second half of one and the first of the next are neighbours, too.
    constexpr std::uint32_t kHalf = kGranule / 2;
    std::vector<Write> writes;
    for (std::uint32_t i = 0; i < 2 * kBuffers; ++i)
      writes.push_back(write_of(link, i, i, sources[i / 2], i % 2 * kHalf, *remote,
                                i * std::uint64_t{kHalf}, kHalf));
    const std::size_t before = driver_->copies();
    ASSERT_EQ(a.endpoint->post(link.id, writes), writes.size());
    ASSERT_TRUE(pump({&a}, [&] { return a.completed.size() + a.failed.size() == 2 * kBuffers; }));
    EXPECT_TRUE(a.failed.empty());
    EXPECT_EQ(driver_->copies() - before, kBuffers) << "what is of one buffer goes together";
    for (std::uint32_t i = 0; i < kBuffers; ++i) {
      EXPECT_EQ(
          0, std::memcmp(target.memory.data() + i * kGranule, sources[i].memory.data(), kGranule));
    }
  }
}

TEST_F(GpuLoopback, AWriteThatStartsMuchLaterIsNotCopiedYet) {
  Pair pair(*this, setup(1e9, 0), 1 << 20);
  const std::uint64_t start = now_;
  const Write writes[] = {pair.write(0, 1, 0, 0, 400'000),
                          pair.write(1, 2, 400'000, 400'000, 1000)};
  ASSERT_EQ(pair.post(writes), 2u);
  pair.a.poll();
  EXPECT_EQ(driver_->copies(), 1u);
  now_ = start + 400'000 - 100'000;
  pair.a.poll();
  EXPECT_EQ(driver_->copies(), 1u);
  now_ = start + 400'000;
  pair.a.poll();
  EXPECT_EQ(driver_->copies(), 2u);
}

TEST_F(GpuLoopback, ALongTransferKeepsTheLinksRate) {
  Pair pair(*this, setup(50e9, 1'000), 1 << 20);
  std::mt19937_64 random(3);
  constexpr std::uint64_t kWrites = 3'000;
  constexpr std::uint32_t kChunk = 256 << 10;
  const std::uint64_t start = now_;
  std::uint64_t posted = 0;
  driver_->hold = true;
  while (pair.a.completed.size() < kWrites) {
    while (posted < kWrites) {
      const Write one = pair.write(0, posted, 0, 0, kChunk);
      if (pair.post({&one, 1}) == 0) break;
      ++posted;
    }
    now_ += random() % 8'000;  // a chunk takes 5.2 µs
    pair.a.poll(256);
    driver_->run();  // the copy engine is done by the next poll
  }
  const double ideal = static_cast<double>(kWrites) * kChunk / 50.0;
  EXPECT_LT(static_cast<double>(now_ - start), 1.03 * ideal);
  EXPECT_GE(static_cast<double>(now_ - start), ideal);
}

TEST_F(GpuLoopback, OneWordFollowsAllTheCopiesOfAPoll) {
  Pair pair(*this, setup());
  for (std::uint32_t i = 0; i < 16; ++i) {
    const Write one = pair.write(i, i, 0, 0, 4096);
    ASSERT_EQ(pair.post({&one, 1}), 1u);
  }
  ASSERT_TRUE(pump({&pair.a}, [&] { return pair.a.completed.size() == 16; }));
  EXPECT_EQ(driver_->copies(), 16u);
  EXPECT_LE(driver_->word_writes(), 4u);
}

TEST_F(GpuLoopback, WhatAGpuStillCopiesIsNotReportedWhenTheLinkGoes) {
  auto a = std::make_unique<Node>(setup());
  auto b = std::make_unique<Node>(setup());
  const TestLink link = join(*a, *b);
  auto source = buffer(*a, 0);
  auto target = buffer(*b, 1);
  ASSERT_TRUE(source && target);
  auto remote = import(*a, link, *target);
  driver_->hold = true;
  const Write under_way = write_of(link, 0, 1, *source, 0, *remote, 0, 1000);
  ASSERT_EQ(a->endpoint->post(link.id, {&under_way, 1}), 1u);
  a->poll();
  a->endpoint->disconnect(link.id);
  for (int i = 0; i < 5; ++i) a->poll();
  EXPECT_EQ(a->total(a->completed) + a->total(a->failed), 0u)
      << "its source would be given back under the GPU's hands";
  driver_->run();
  for (int i = 0; i < 3; ++i) a->poll();
  EXPECT_EQ(a->total(a->completed) + a->total(a->failed), 1u);
  const Write later = write_of(link, 1, 2, *source, 0, *remote, 0, 1000);
  ASSERT_EQ(a->endpoint->post(link.id, {&later, 1}), 1u);
  a->poll();
  EXPECT_TRUE(a->failed.contains(2));

  // And an endpoint that goes waits for its streams.
  driver_->hold = false;
  remote.reset();
  source->region.reset();
  target->region.reset();
  a.reset();
  b.reset();
  EXPECT_EQ(driver_->views(), 0u);
  EXPECT_EQ(driver_->pinned(), 0u);
}

TEST_F(GpuLoopback, DeregisteringWaitsForCopiesOfThisProcessAndStopsLaterOnes) {
  Pair pair(*this, setup());
  driver_->hold = true;
  const Write under_way = pair.write(0, 1, 0, 0, 1000);
  ASSERT_EQ(pair.post({&under_way, 1}), 1u);
  pair.a.poll();
  std::atomic<bool> gone{false};
  std::thread control([&] {
    pair.target.region.reset();
    gone.store(true);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  EXPECT_FALSE(gone.load());
  driver_->run();
  pair.a.poll();
  control.join();
  EXPECT_TRUE(pair.a.completed.contains(1));
  const Write later = pair.write(1, 2, 0, 0, 1000);
  ASSERT_EQ(pair.post({&later, 1}), 1u);
  pair.a.poll();
  pair.a.poll();
  EXPECT_TRUE(pair.a.failed.contains(2));
  EXPECT_EQ(driver_->copies(), 1u);
}

TEST_F(GpuLoopback, WhatAGpuStillReadsStaysUntilItsEndpointEnds) {
  for (const bool share : {true, false}) {
    SCOPED_TRACE(share);
    Pair pair(*this, setup(0, 0, share));
    driver_->hold = true;
    const Write one = pair.write(0, 1, 0, 0, 1000);
    ASSERT_EQ(pair.post({&one, 1}), 1u);
    pair.a.poll();
    ASSERT_EQ(driver_->copies(), share ? 1u : 2u);
    const std::size_t views = driver_->views();
    pair.source.region.reset();
    EXPECT_EQ(driver_->views(), views) << "the GPU has not begun";
    pair.a.endpoint.reset();
    EXPECT_LT(driver_->views(), views);
    driver_->hold = false;
  }
  EXPECT_EQ(driver_->views(), 0u);
}

TEST_F(GpuLoopback, AGpuThatFailsFailsItsWritesAndNoOthers) {
  Pair pair(*this, setup());
  driver_->hold = true;
  const Write lost = pair.write(0, 1, 0, 0, 1000);
  ASSERT_EQ(pair.post({&lost, 1}), 1u);
  pair.a.poll();
  driver_->broken = true;
  now_ += 20'000'000;
  for (int i = 0; i < 3; ++i) pair.a.poll();
  EXPECT_TRUE(pair.a.failed.contains(1));
  EXPECT_EQ(pair.b.flag(0), 0u);
  const Write next = pair.write(0, 2, 0, 0, 1000);
  ASSERT_EQ(pair.post({&next, 1}), 1u);
  pair.a.poll();
  EXPECT_TRUE(pair.a.failed.contains(2));
  // Host memory still moves.
  const Memory from = pair.a.memory(4096);
  const Memory to = pair.b.memory(4096);
  const auto host = fabric::import(pair.a, pair.link, to);
  const Write good = make_write(pair.link, 3, 1, 3, from, 0, *host, 0, 4096);
  ASSERT_EQ(pair.post({&good, 1}), 1u);
  ASSERT_TRUE(pump(
      {&pair.a}, [&] { return pair.b.flag(3) == 1; }, std::chrono::seconds(5)));
}

TEST_F(GpuLoopback, HostAndGpuMemoryDoNotMix) {
  Pair pair(*this, setup());
  const Memory from = pair.a.memory(4096);
  const Memory to = pair.b.memory(4096);
  const auto host = fabric::import(pair.a, pair.link, to);
  const Write up = make_write(pair.link, 0, 1, 1, from, 0, *pair.remote, 0, 4096);
  const Write down = write_of(pair.link, 1, 2, pair.source, 0, *host, 0, 4096);
  ASSERT_EQ(pair.post({&up, 1}), 1u);
  ASSERT_EQ(pair.post({&down, 1}), 1u);
  pair.a.poll();
  EXPECT_TRUE(pair.a.failed.contains(1));
  EXPECT_TRUE(pair.a.failed.contains(2));
  EXPECT_EQ(driver_->copies(), 0u);
  EXPECT_EQ(to.data()[0], kPoison);
}

TEST_F(GpuLoopback, ASourceThatComesLaterReachesWhatWasImportedBefore) {
  Node a(setup());
  Node b(setup());
  const TestLink link = join(a, b);
  auto target = buffer(b, 1);
  ASSERT_TRUE(target);
  const auto remote = import(a, link, *target);
  auto source = buffer(a, 1);
  ASSERT_TRUE(source);
  fill_random({source->memory.data(), kBytes}, 5);
  const Write one = write_of(link, 0, 1, *source, 0, *remote, 0, kBytes);
  ASSERT_EQ(a.endpoint->post(link.id, {&one, 1}), 1u);
  ASSERT_TRUE(pump(
      {&a}, [&] { return b.flag(0) == 1; }, std::chrono::seconds(5)));
  EXPECT_EQ(0, std::memcmp(target->memory.data(), source->memory.data(), kBytes));
}

TEST_F(GpuLoopback, MemoryOfThisProcessIsUsedAsItIs) {
  Pair pair(*this, setup(), kBytes, false);
  EXPECT_EQ(driver_->views(), 0u);
  fill_random({pair.source.memory.data(), kBytes}, 9);
  const Write one = pair.write(0, 1, 0, 0, kBytes);
  ASSERT_EQ(pair.post({&one, 1}), 1u);
  ASSERT_TRUE(pump(
      {&pair.a}, [&] { return pair.b.flag(0) == 1; }, std::chrono::seconds(5)));
  EXPECT_EQ(0, std::memcmp(pair.target.memory.data(), pair.source.memory.data(), kBytes));
}

TEST_F(GpuLoopback, RegistrationAndImportSayWhatIsMissing) {
  FabricSetup without = setup();
  without.loopback.load_gpu_driver = []() -> Result<std::shared_ptr<gpu::Driver>> {
    return fail(ErrorCode::kUnavailable, "there is no CUDA driver on this machine");
  };
  Node none(without);
  const auto refused = buffer(none, 0);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(refused.error().message.find("no CUDA driver"), std::string::npos);

  Node a(setup());
  Node b(setup());
  const TestLink link = join(a, b);
  auto source = buffer(a, 0);
  auto target = buffer(b, 1);
  ASSERT_TRUE(source && target);
  driver_->fail_open = true;
  const auto import_failed = a.endpoint->import_region(link.id, target->region->key());
  EXPECT_FALSE(import_failed);
  const auto register_failed = buffer(a, 0);
  EXPECT_FALSE(register_failed);
  driver_->fail_open = false;
  EXPECT_NE(import(a, link, *target), nullptr);
  // A buffer larger than its allocation would be a way into its neighbours.
  gpu::MemoryKey key = source->memory.key();
  key.process.start_time += 1;
  key.bytes *= 2;
  EXPECT_FALSE(a.endpoint->register_memory({.bytes = kBytes, .device = key}));
}

}  // namespace
}  // namespace mk::fabric
