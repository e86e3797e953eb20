// The loopback fabric between allocations of real GPUs, owned by another process, as with a daemon
// of its own: every byte, flags after data, the link's rate; and what it does without pacing.
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <csignal>
#include <thread>

#include "shm/gpu/memory.h"
#include "tests/daemon/fabric/fabric_fixture.h"

namespace mk::fabric {
namespace {

constexpr std::uint64_t kBufferBytes = 64 << 20;
constexpr std::uint32_t kChunk = 256 << 10;

/// Another process, which owns GPU memory and does nothing.
class Owner {
 public:
  /// `buffers` of kBufferBytes each, dealt out to all GPUs.
  explicit Owner(int buffers) {
    int up[2];
    int down[2];
    if (::pipe(up) != 0 || ::pipe(down) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::dup2(down[0], 0);
      ::dup2(up[1], 1);
      const std::string count = std::to_string(buffers);
      ::execl("/proc/self/exe", "gpu_fabric_test", "--owner", count.c_str(), nullptr);
      ::_exit(1);
    }
    ::close(up[1]);
    ::close(down[0]);
    from_ = up[0];
    to_ = down[1];
    keys_.resize(static_cast<std::size_t>(buffers));
    for (gpu::MemoryKey& key : keys_) {
      if (::read(from_, &key, sizeof key) != sizeof key) throw std::runtime_error("no GPU memory");
    }
  }
  ~Owner() { kill(); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
    ::close(from_);
    ::close(to_);
  }
  const gpu::MemoryKey& key(std::size_t i) const { return keys_[i]; }

  static int run(int buffers) {
    auto driver = gpu::load_driver();
    if (!driver) return 1;
    std::vector<gpu::Allocation> memory;
    for (int i = 0; i < buffers; ++i) {
      auto made = gpu::Allocation::create(*driver, i % (*driver)->devices(), kBufferBytes);
      if (!made || ::write(1, &made->key(), sizeof made->key()) != sizeof made->key()) return 1;
      memory.push_back(std::move(*made));
    }
    char byte = 0;
    (void)!::read(0, &byte, 1);
    return 0;
  }

 private:
  pid_t pid_ = 0;
  int from_ = -1;
  int to_ = -1;
  std::vector<gpu::MemoryKey> keys_;
};

class GpuFabric : public testing::Test {
 protected:
  void SetUp() override {
    auto driver = gpu::load_driver();
    if (!driver) GTEST_SKIP() << driver.error().message;
    driver_ = *driver;
  }
  static FabricSetup setup(double bytes_per_second, std::uint64_t latency_ns) {
    FabricSetup made;
    made.config.link_model = {bytes_per_second, latency_ns};
    return made;
  }
  static std::unique_ptr<LocalRegion> registered(Node& node, const gpu::MemoryKey& key) {
    auto region = node.endpoint->register_memory({.bytes = kBufferBytes, .device = key});
    EXPECT_TRUE(region) << region.error().message;
    return region ? std::move(*region) : nullptr;
  }
  std::vector<std::byte> bytes_of(const gpu::MemoryKey& key, std::uint64_t offset,
                                  std::uint64_t bytes) {
    auto view = gpu::View::open(driver_, 0, key);
    EXPECT_TRUE(view) << view.error().message;
    std::vector<std::byte> out(bytes);
    EXPECT_TRUE(driver_->fetch(0, out.data(), view->data() + offset, bytes));
    return out;
  }
  void fill(const gpu::MemoryKey& key, std::uint64_t seed) {
    std::vector<std::byte> bytes(kBufferBytes);
    fill_random(bytes, seed);
    auto view = gpu::View::open(driver_, 0, key);
    ASSERT_TRUE(view) << view.error().message;
    ASSERT_TRUE(driver_->store(0, view->data(), bytes.data(), bytes.size()));
  }
  static Write chunk(const TestLink& link, const LocalRegion& source, const RemoteRegion& target,
                     std::uint64_t offset, std::uint32_t bytes, std::uint32_t flag,
                     std::uint32_t epoch, std::uint64_t cookie) {
    Write write = make_write(link, flag, epoch, cookie);
    write.src = &source;
    write.src_offset = offset;
    write.dst = &target;
    write.dst_offset = offset;
    write.bytes = bytes;
    return write;
  }
  /// Bytes per second of `count` chunks, by a thread that does nothing else. `receiver`: polled as
  /// well.
  static double stream(Node& a, const TestLink& link, const LocalRegion& source,
                       const RemoteRegion& target, std::uint32_t bytes, std::uint32_t count,
                       Node* receiver = nullptr) {
    std::uint32_t posted = 0;
    a.completed.clear();
    std::uint64_t completed = 0;
    std::vector<Event> events(64);
    const auto begin = std::chrono::steady_clock::now();
    while (completed < count) {
      while (posted < count) {
        const std::uint64_t offset = std::uint64_t{posted} * bytes % kBufferBytes;
        const Write one =
            chunk(link, source, target, offset, bytes, posted % kTestFlags, 1, posted);
        if (a.endpoint->post(link.id, {&one, 1}) == 0) break;
        ++posted;
      }
      completed += a.endpoint->poll(events);
      if (receiver != nullptr) receiver->poll();
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(20)) return 0;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    return static_cast<double>(bytes) * count / seconds.count();
  }
  std::shared_ptr<gpu::Driver> driver_;
};

TEST_F(GpuFabric, EveryByteArrivesBeforeItsFlag) {
  Owner owner(2);
  Node a(setup(0, 0));
  Node b(setup(0, 0));
  const TestLink link = join(a, b);
  const auto source = registered(a, owner.key(0));
  const auto target = registered(b, owner.key(1));
  ASSERT_TRUE(source && target);
  auto remote = a.endpoint->import_region(link.id, target->key());
  ASSERT_TRUE(remote) << remote.error().message;
  fill(owner.key(0), 1);
  std::mt19937_64 random(2);
  const auto expected = bytes_of(owner.key(0), 0, kBufferBytes);
  // One at a time, of odd sizes at odd places, read as soon as the flag shows.
  for (std::uint32_t i = 1; i <= 200; ++i) {
    const auto bytes = static_cast<std::uint32_t>(1 + random() % kChunk);
    const std::uint64_t offset = random() % (kBufferBytes - bytes);
    const Write one = chunk(link, *source, **remote, offset, bytes, 5, i, i);
    ASSERT_EQ(a.endpoint->post(link.id, {&one, 1}), 1u);
    ASSERT_TRUE(pump(
        {&a}, [&] { return b.flag(5) == i; }, std::chrono::seconds(10)))
        << i;
    const auto got = bytes_of(owner.key(1), offset, bytes);
    ASSERT_TRUE(std::equal(got.begin(), got.end(), expected.begin() + static_cast<long>(offset)))
        << i;
  }
  // All at once.
  stream(a, link, *source, **remote, kChunk, kBufferBytes / kChunk);
  EXPECT_EQ(bytes_of(owner.key(1), 0, kBufferBytes), expected);
  EXPECT_EQ(a.failed.size(), 0u);
}

TEST_F(GpuFabric, TheLinkKeepsItsRate) {
  Owner owner(2);
  for (const double rate : {10e9, 50e9}) {
    Node a(setup(rate, 5'000));
    Node b(setup(rate, 5'000));
    const TestLink link = join(a, b);
    const auto source = registered(a, owner.key(0));
    const auto target = registered(b, owner.key(1));
    ASSERT_TRUE(source && target);
    auto remote = a.endpoint->import_region(link.id, target->key());
    ASSERT_TRUE(remote) << remote.error().message;
    stream(a, link, *source, **remote, kChunk, 200);
    const auto count = static_cast<std::uint32_t>(rate / kChunk / 2);  // half a second
    const double measured = stream(a, link, *source, **remote, kChunk, count);
    fmt::print("asked for {:.1f} GB/s, moved {:.2f} GB/s\n", rate / 1e9, measured / 1e9);
    EXPECT_GT(measured, 0.97 * rate);
    EXPECT_LT(measured, 1.03 * rate);
  }
}

TEST_F(GpuFabric, WithoutPacing) {
  Owner owner(2);
  Node a(setup(0, 0));
  Node b(setup(0, 0));
  const TestLink link = join(a, b);
  const auto source = registered(a, owner.key(0));
  const auto target = registered(b, owner.key(1));
  ASSERT_TRUE(source && target);
  auto remote = a.endpoint->import_region(link.id, target->key());
  ASSERT_TRUE(remote) << remote.error().message;
  for (const std::uint32_t bytes : {4u << 10, 64u << 10, kChunk, 1u << 20, 4u << 20}) {
    stream(a, link, *source, **remote, bytes, 1000);
    const double rate = stream(a, link, *source, **remote, bytes, 4000);
    EXPECT_GT(rate, 0);
    // Alone: post to flag.
    std::vector<double> times;
    for (std::uint32_t i = 1; i <= 200; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      const Write one = chunk(link, *source, **remote, 0, bytes, 9, i + bytes, i);
      ASSERT_EQ(a.endpoint->post(link.id, {&one, 1}), 1u);
      ASSERT_TRUE(pump(
          {&a}, [&] { return b.flag(9) == i + bytes; }, std::chrono::seconds(10)));
      const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - begin;
      times.push_back(us.count());
    }
    std::nth_element(times.begin(), times.begin() + 100, times.end());
    fmt::print("{:8} bytes: streamed {:6.1f} GB/s, alone {:5.1f} us (median)\n", bytes, rate / 1e9,
               times[100]);
  }
}

/// Every GPU to the next one, each by a thread of its own as in a daemon: all links keep the rate
/// of one; and what they do together without pacing.
TEST_F(GpuFabric, AllGpusAtOnce) {
  const int gpus = driver_->devices();
  const int buffers = std::max(2, gpus);
  Owner owner(buffers);
  for (const double rate : {50e9, 0.0}) {
    std::vector<double> measured(static_cast<std::size_t>(gpus));
    std::barrier together(gpus);
    std::vector<std::thread> threads;
    for (int gpu = 0; gpu < gpus; ++gpu) {
      threads.emplace_back([&, gpu] {
        const auto from = static_cast<std::size_t>(gpu);
        Node a(setup(rate, 5'000));
        Node b(setup(rate, 5'000));
        const TestLink link = join(a, b);
        const auto source = registered(a, owner.key(from));
        const auto target =
            registered(b, owner.key((from + 1) % static_cast<std::size_t>(buffers)));
        auto remote = a.endpoint->import_region(link.id, target->key());
        EXPECT_TRUE(remote);
        if (remote) stream(a, link, *source, **remote, kChunk, 400);
        together.arrive_and_wait();
        if (!remote) return;
        const double seconds = rate > 0 ? 0.5 : 0.25;
        const auto count = static_cast<std::uint32_t>(seconds * 50e9 / kChunk);
        measured[from] = stream(a, link, *source, **remote, kChunk, count);
      });
    }
    for (std::thread& thread : threads) thread.join();
    const auto [least, most] = std::minmax_element(measured.begin(), measured.end());
    fmt::print("{} GPUs at once, asked for {:.1f} GB/s, moved {:.2f} to {:.2f} GB/s each\n", gpus,
               rate / 1e9, *least / 1e9, *most / 1e9);
    if (rate == 0) continue;
    EXPECT_GT(*least, 0.97 * rate);
    EXPECT_LT(*most, 1.03 * rate);
  }
}

/// By way of pinned host memory, over sockets: what a machine without an RDMA NIC does.
TEST_F(GpuFabric, StagedOverTcpEveryByteArrivesBeforeItsFlag) {
  for (const char* const provider : {"net", "tcp"}) {
    SCOPED_TRACE(provider);
    Owner owner(2);
    FabricSetup over;
    over.config.fabric = "ofi";
    over.config.provider = provider;
    over.config.bind_address = "127.0.0.1";
    Node a(over);
    Node b(over);
    const TestLink link = join(a, b);
    const auto source = registered(a, owner.key(0));
    const auto target = registered(b, owner.key(1));
    ASSERT_TRUE(source && target);
    auto remote = a.endpoint->import_region(link.id, target->key());
    ASSERT_TRUE(remote) << remote.error().message;
    fill(owner.key(0), 11);
    const auto expected = bytes_of(owner.key(0), 0, kBufferBytes);
    std::mt19937_64 random(3);
    for (std::uint32_t i = 1; i <= 150; ++i) {
      const auto bytes =
          static_cast<std::uint32_t>(1 + random() % (i % 10 == 0 ? 8 << 20 : kChunk));
      const std::uint64_t offset = random() % (kBufferBytes - bytes);
      const Write one = chunk(link, *source, **remote, offset, bytes, 5, i, i);
      ASSERT_EQ(a.endpoint->post(link.id, {&one, 1}), 1u);
      ASSERT_TRUE(pump(
          {&a, &b}, [&] { return b.flag(5) == i; }, std::chrono::seconds(10)))
          << i;
      const auto got = bytes_of(owner.key(1), offset, bytes);
      ASSERT_TRUE(std::equal(got.begin(), got.end(), expected.begin() + static_cast<long>(offset)))
          << i;
    }
    constexpr std::uint32_t kWhole = kBufferBytes / kChunk;
    const std::size_t before = b.total(b.arrivals);
    stream(a, link, *source, **remote, kChunk, kWhole, &b);
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.total(b.arrivals) >= before + kWhole; }));
    EXPECT_EQ(bytes_of(owner.key(1), 0, kBufferBytes), expected);
    EXPECT_EQ(a.failed.size(), 0u);
    EXPECT_EQ(a.endpoint->gpu_path(), "staged through host memory");

    for (const std::uint32_t bytes : {4u << 10, 64u << 10, kChunk, 1u << 20, 4u << 20}) {
      const auto count = std::min<std::uint32_t>(1000, (1u << 30) / bytes);
      stream(a, link, *source, **remote, bytes, count / 4, &b);
      const double rate = stream(a, link, *source, **remote, bytes, count, &b);
      EXPECT_GT(rate, 0);
      ASSERT_TRUE(pump({&a, &b}, [&] { return b.poll() == 0; }));
      std::vector<double> times;
      for (std::uint32_t i = 1; i <= 100; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        const Write alone = chunk(link, *source, **remote, 0, bytes, 4095, i, i);
        ASSERT_EQ(a.endpoint->post(link.id, {&alone, 1}), 1u);
        ASSERT_TRUE(pump(
            {&a, &b}, [&] { return b.flag(4095) == i; }, std::chrono::seconds(10)));
        const std::chrono::duration<double, std::micro> us =
            std::chrono::steady_clock::now() - begin;
        times.push_back(us.count());
      }
      std::nth_element(times.begin(), times.begin() + 50, times.end());
      fmt::print("{}, {:8} bytes: streamed {:5.2f} GB/s, alone {:6.1f} us (median)\n", provider,
                 bytes, rate / 1e9, times[50]);
      b.epochs[4095] = 0;
    }
  }
}

TEST_F(GpuFabric, AnOwnerThatIsKilledLeavesTheEndpointAndTheGpuUsable) {
  Node a(setup(0, 0));
  Node b(setup(0, 0));
  const TestLink link = join(a, b);
  for (int round = 0; round < 3; ++round) {
    Owner owner(2);
    auto source = registered(a, owner.key(0));
    auto target = registered(b, owner.key(1));
    ASSERT_TRUE(source && target);
    auto remote = a.endpoint->import_region(link.id, target->key());
    ASSERT_TRUE(remote) << remote.error().message;
    a.completed.clear();
    a.failed.clear();
    std::uint64_t posted = 0;
    const auto feed = [&] {
      const Write one =
          chunk(link, *source, **remote, posted * kChunk % kBufferBytes, kChunk, 1, 1, posted);
      if (a.endpoint->post(link.id, {&one, 1}) == 1) ++posted;
    };
    ASSERT_TRUE(pump({&a}, [&] {
      feed();
      return a.completed.size() > 200;
    }));
    owner.kill();
    for (int i = 0; i < 500; ++i) {
      feed();
      a.poll();
    }
    ASSERT_TRUE(pump({&a}, [&] { return a.completed.size() + a.failed.size() == posted; }));
    fmt::print("after the kill: {} completed, {} failed\n", a.completed.size(), a.failed.size());
    remote->reset();
    source.reset();
    target.reset();
  }
}

}  // namespace
}  // namespace mk::fabric

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--owner")
    return mk::fabric::Owner::run(std::stoi(argv[2]));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
