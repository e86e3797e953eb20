// What every fabric promises the control thread: buffers come and go, at both ends, while others'
// writes are in flight.
#include <array>
#include <atomic>
#include <thread>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/sim_setups.h"

namespace mk::fabric {
namespace {

class RegistrationTest : public FabricTest {};

constexpr std::uint32_t kBuffers = 40;
constexpr std::uint32_t kInFlight = 4;  ///< buffers at a time
constexpr std::uint32_t kWrites = 16;   ///< into each
constexpr std::uint32_t kBytes = 20'011, kStride = 20'480;

/// A buffer at either end, and the writes from one to the other: write i of buffer n has the flag
/// and the cookie n * kWrites + i.
struct Buffer {
  std::optional<Memory> source, target;
  std::unique_ptr<RemoteRegion> remote;
  std::atomic<std::uint32_t> completed{0}, arrived{0};
  bool over() const { return completed == kWrites && arrived == kWrites; }
};

TEST_P(RegistrationTest, BuffersComeAndGoWhileTheProxyPosts) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  std::array<Buffer, kBuffers> buffers;
  std::atomic<std::uint32_t> given{0};  // buffers that the proxies know of
  a.on_event = [&](const Event& event) {
    if (event.kind == Event::Kind::kCompleted) ++buffers[event.cookie / kWrites].completed;
  };
  std::jthread receiver([&](const std::stop_token& stop) {
    std::vector<bool> seen(kBuffers * kWrites);
    std::uint32_t first = 0;  // all before it have been seen
    while (!stop.stop_requested()) {
      if (b.poll() == 0) std::this_thread::yield();
      for (std::uint32_t i = first; i < given * kWrites; ++i) {
        if (!seen[i] && b.flag(i) == 1) {
          seen[i] = true;
          const Buffer& buffer = buffers[i / kWrites];
          const std::uint64_t at = i % kWrites * std::uint64_t{kStride};
          EXPECT_EQ(0, std::memcmp(buffer.source->data() + at, buffer.target->data() + at, kBytes))
              << "write " << i;
          ++buffers[i / kWrites].arrived;
        }
        if (i == first && seen[i]) ++first;
      }
    }
  });
  std::jthread proxy([&](const std::stop_token& stop) {
    for (std::uint32_t next = 0; !stop.stop_requested();) {
      std::vector<Write> batch;
      while (next + batch.size() < given * kWrites && batch.size() < shm::kBatchMax) {
        const auto i = next + static_cast<std::uint32_t>(batch.size());
        const Buffer& buffer = buffers[i / kWrites];
        const std::uint64_t at = i % kWrites * std::uint64_t{kStride};
        batch.push_back(make_write(link, i, 1, i, *buffer.source, at, *buffer.remote, at, kBytes));
      }
      const std::size_t taken = batch.empty() ? 0 : a.endpoint->post(link.id, batch);
      next += static_cast<std::uint32_t>(taken);
      if (a.poll() == 0 && taken == 0) std::this_thread::yield();
    }
  });

  const auto deadline = std::chrono::steady_clock::now() + patience() * std::chrono::seconds(60);
  for (std::uint32_t round = 0; round < kBuffers + kInFlight; ++round) {
    if (round >= kInFlight) {
      // Those given after it are in flight now.
      Buffer& buffer = buffers[round - kInFlight];
      while (!buffer.over()) {
        ASSERT_LT(std::chrono::steady_clock::now(), deadline)
            << "buffer " << round - kInFlight << ": " << buffer.completed << " completed, "
            << buffer.arrived << " arrived";
        std::this_thread::yield();
      }
      for (std::uint32_t i = 0; i < kWrites; ++i) {
        const std::uint64_t at = i * std::uint64_t{kStride};
        ASSERT_EQ(0, std::memcmp(buffer.source->data() + at, buffer.target->data() + at, kBytes));
        for (std::uint32_t beyond = kBytes; beyond < kStride; ++beyond)
          ASSERT_EQ(buffer.target->data()[at + beyond], kPoison) << beyond << " of write " << i;
      }
      buffer.remote.reset();
      buffer.target.reset();
      buffer.source.reset();
    }
    if (round >= kBuffers) continue;
    Buffer& buffer = buffers[round];
    buffer.source.emplace(a.memory(kWrites * std::uint64_t{kStride}));
    fill_random({buffer.source->data(), buffer.source->bytes()}, 100 + round);
    buffer.target.emplace(b.memory(buffer.source->bytes()));
    buffer.remote = import(a, link, *buffer.target);
    ++given;
    if (round % 2 != 0) continue;
    // Links come and go as well.
    auto again = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_TRUE(a.endpoint->import_region(*again, buffer.target->region->key()));
    a.endpoint->disconnect(*again);
  }
  proxy.request_stop();
  proxy.join();
  receiver.request_stop();
  receiver.join();
  EXPECT_EQ(a.completed.size(), kBuffers * kWrites);
  EXPECT_EQ(a.total(a.completed), kBuffers * kWrites);
  EXPECT_TRUE(a.failed.empty());
  EXPECT_TRUE(a.links_down.empty());
  for (const auto& [immediate, count] : b.arrivals) EXPECT_EQ(count, 1) << immediate;
}

TEST_P(RegistrationTest, OthersMemoryComesAndGoesWhileWritesArrive) {
  constexpr std::uint32_t kWritesAtOnce = 8, kBuffersAtOnce = 16, kRounds = 150;
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  const Memory source = a.memory(kWritesAtOnce * std::uint64_t{kStride});
  const Memory target = b.memory(source.bytes());
  const auto remote = import(a, link, target);
  std::atomic<bool> failed{false};
  // By flag, the epoch that has arrived: its place may be written again only then.
  std::array<std::atomic<std::uint32_t>, kWritesAtOnce> arrived{};
  std::jthread receiver([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      if (b.poll() == 0) std::this_thread::yield();
      for (std::uint32_t flag = 0; flag < kWritesAtOnce; ++flag) arrived[flag] = b.flag(flag);
    }
  });
  std::jthread proxy([&](const std::stop_token& stop) {
    std::uint64_t posted = 0;
    while (!stop.stop_requested() || posted > a.completed.size() + a.failed.size()) {
      const auto flag = static_cast<std::uint32_t>(posted % kWritesAtOnce);
      const auto epoch = static_cast<std::uint32_t>(1 + posted / kWritesAtOnce);
      const bool free = posted < a.completed.size() + kWritesAtOnce && arrived[flag] + 1 == epoch;
      if (!stop.stop_requested() && free) {
        const std::uint64_t at = flag * std::uint64_t{kStride};
        const Write write = make_write(link, flag, epoch, posted, source, at, *remote, at, kBytes);
        posted += a.endpoint->post(link.id, {&write, 1});
      }
      if (a.poll() == 0) std::this_thread::yield();
      if (!a.failed.empty() || !a.links_down.empty()) failed = true;
    }
  });
  for (std::uint32_t round = 0; round < kRounds && !failed; ++round) {
    std::vector<Memory> others;
    for (std::uint32_t i = 0; i < kBuffersAtOnce; ++i) others.push_back(b.memory(4096, true));
  }
  proxy.request_stop();
  proxy.join();
  receiver.request_stop();
  receiver.join();
  EXPECT_TRUE(a.failed.empty());
  EXPECT_TRUE(a.links_down.empty());
  EXPECT_FALSE(a.completed.empty());
}

INSTANTIATE_TEST_SUITE_P(Fabrics, RegistrationTest, testing::ValuesIn(all_setups()), setup_name);
#if !defined(MK_SOFT_NIC) && !defined(MK_SOFT_EFA)
INSTANTIATE_TEST_SUITE_P(Simulated, RegistrationTest, testing::ValuesIn(sim_setups()), setup_name);
#endif

}  // namespace
}  // namespace mk::fabric
