// What every fabric promises when a peer, a key or an address is not what it should be.
#include <dirent.h>

#include <chrono>
#include <thread>

#include "tests/daemon/fabric/fabric_fixture.h"

namespace mk::fabric {
namespace {

class FailureTest : public FabricTest {
 protected:
  FabricSetup impatient() const {
    FabricSetup setup = GetParam();
    setup.config.connect_timeout_ns = soon_ns();
    setup.config.write_timeout_ns = soon_ns(2);
    return setup;
  }
};

std::size_t entries_of(const char* path) {
  std::size_t count = 0;
  DIR* const directory = ::opendir(path);
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

/// The number of entries once there are no more than `expected`, or two seconds have passed. A
/// joined thread stays in /proc for a moment: the kernel wakes its joiner before it takes the
/// thread away.
std::size_t entries_by_now(const char* path, std::size_t expected) {
  std::size_t count = entries_of(path);
  for (int i = 0; i < 400 && count > expected; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    count = entries_of(path);
  }
  return count;
}

/// The number of entries once it has stayed the same for 100 ms: those of who just ended are gone.
std::size_t settled_entries_of(const char* path) {
  std::size_t count = entries_of(path);
  for (int i = 0, same = 0; i < 1000 && same < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::size_t now = entries_of(path);
    same = now == count ? same + 1 : 0;
    count = now;
  }
  return count;
}

TEST_P(FailureTest, RegistrationsAndLinksLeaveNoDescriptorAndNoThreadBehind) {
  Node a(GetParam());
  Node b(GetParam());
  const auto round = [&](std::uint32_t epoch) {
    const TestLink link = join(a, b);
    const Memory source = a.memory(8192);
    const Memory target = b.memory(8192);
    fill_random({source.data(), 8192}, epoch);
    const auto remote = import(a, link, target);
    const Write write = make_write(link, 3, epoch, epoch, source, 1, *remote, 2, 8000);
    ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(3) == epoch && a.completed.contains(epoch); }));
    ASSERT_EQ(0, std::memcmp(source.data() + 1, target.data() + 2, 8000));
    a.endpoint->disconnect(link.id);
    for (int i = 0; i < 4; ++i) a.poll();
  };
  // Closed links are freed when the next is made, and a peer's side of a connection when it next
  // looks.
  std::uint32_t epoch = 0;
  for (int i = 0; i < 10; ++i) round(++epoch);
  const std::size_t fds = entries_of("/proc/self/fd");
  const std::size_t threads = settled_entries_of("/proc/self/task");
  for (int i = 0; i < 60; ++i) round(++epoch);
  EXPECT_LE(entries_of("/proc/self/fd"), fds + 8);
  EXPECT_LE(entries_by_now("/proc/self/task", threads), threads);
}

TEST_P(FailureTest, EndpointsLeaveNoDescriptorAndNoThreadBehind) {
  // Those that libraries start once may stay; those of the first node are to be gone before they
  // are counted.
  { const Node first(GetParam()); }
  const std::size_t fds = settled_entries_of("/proc/self/fd");
  const std::size_t threads = settled_entries_of("/proc/self/task");
  for (int i = 0; i < 5; ++i) {
    Node a(GetParam());
    Node b(GetParam());
    const TestLink link = join(a, b);
    const Write write = make_write(link, 0, 1, 1);
    ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(0) == 1; }));
  }
  EXPECT_LE(entries_by_now("/proc/self/fd", fds), fds);
  EXPECT_LE(entries_by_now("/proc/self/task", threads), threads);
}

TEST_P(FailureTest, AKeyThatIsNoneIsRefused) {
  Node a(GetParam());
  Node b(GetParam());
  Node c(GetParam());
  const TestLink link = join(a, b);
  const auto refused = [&](const Bytes& key) {
    const auto region = a.endpoint->import_region(link.id, key);
    return !region && !region.error().message.empty();
  };
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(refused(Bytes(60, std::byte{1})));
  EXPECT_TRUE(refused(c.flags.region->key())) << "a region of another endpoint";
  Bytes key = b.flags.region->key();
  EXPECT_LE(key.size(), kKeyBytesMax);
  key.pop_back();
  EXPECT_TRUE(refused(key)) << "cut short";
  // The unordered fabrics' keys are checked by the network when they are used.
  if (b.ordered && GetParam().gpus == nullptr) {
    for (const std::size_t byte : {0u, 8u, 24u, 39u, 40u, 48u, 56u}) {
      key = b.flags.region->key();
      key[byte] ^= std::byte{1};
      EXPECT_TRUE(refused(key)) << "bit flipped in byte " << byte;
    }
    Memory gone = b.memory(4096);
    key = gone.region->key();
    gone.region.reset();
    EXPECT_TRUE(refused(key)) << "deregistered";
  }
  EXPECT_FALSE(a.endpoint->import_region(link.id + 1, b.flags.region->key())) << "no such link";
  EXPECT_TRUE(a.endpoint->import_region(link.id, b.flags.region->key()));
}

TEST_P(FailureTest, AWriteBeyondARegionFailsAlone) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  const Memory source = a.memory(8192);
  const Memory target = b.memory(4096);
  const auto remote = import(a, link, target);
  const Write beyond = make_write(link, 0, 1, 1, source, 0, *remote, 4000, 200);
  const Write within = make_write(link, 1, 1, 2, source, 0, *remote, 0, 200);
  ASSERT_TRUE(post_all(a, link.id, {&beyond, 1}, {&a, &b}));
  ASSERT_TRUE(post_all(a, link.id, {&within, 1}, {&a, &b}));
  ASSERT_TRUE(pump(
      {&a, &b}, [&] { return a.failed.contains(1) && a.completed.contains(2) && b.flag(1) == 1; }));
  EXPECT_EQ(b.flag(0), 0u);
  EXPECT_TRUE(a.links_down.empty());
}

TEST_P(FailureTest, AnAddressThatIsNoneIsRefused) {
  Node a(GetParam());
  for (const Bytes& address : {Bytes{}, Bytes(24, std::byte{9}), Bytes(400)}) {
    const auto link = a.endpoint->connect(address, "node 7 rail 1");
    ASSERT_FALSE(link);
    EXPECT_EQ(link.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(link.error().message.find("node 7 rail 1"), std::string::npos)
        << link.error().message;
  }
}

TEST_P(FailureTest, AnAddressWhereNobodyIsFailsInTime) {
  const FabricSetup setup = impatient();
  Node a(setup);
  Bytes address;
  {
    const Node gone(setup);
    address = gone.endpoint->address();
    EXPECT_LE(address.size(), kAddressBytesMax);
  }
  const auto link = a.endpoint->connect(address, "node 7 rail 1");
  if (!link) {
    EXPECT_NE(link.error().message.find("node 7 rail 1"), std::string::npos)
        << link.error().message;
    return;
  }
  // Where there is nothing to ask, the first write tells.
  ASSERT_FALSE(a.ordered);
  Write write;
  write.cookie = 5;
  ASSERT_EQ(a.endpoint->post(*link, {&write, 1}), 1u);
  ASSERT_TRUE(pump({&a}, [&] { return a.failed.contains(5) && a.links_down.contains(*link); }));
  EXPECT_FALSE(a.endpoint->link_reason(*link).empty());
}

TEST_P(FailureTest, APeerThatEndsInMidTransferBringsTheLinkDown) {
  const FabricSetup setup = impatient();
  Node a(setup);
  auto b = std::make_unique<Node>(setup);
  const TestLink link = join(a, *b);
  constexpr std::uint32_t kBytes = 1 << 20;
  const Memory source = a.memory(8 * kBytes);
  Memory target = b->memory(8 * kBytes);
  auto remote = import(a, link, target);
  std::uint64_t cookie = 0;
  const auto feed = [&] {
    while (cookie - a.total(a.completed) - a.total(a.failed) < 8) {
      const std::uint64_t at = cookie % 8 * kBytes;
      const Write write = make_write(link, 1, 1, cookie, source, at, *remote, at, kBytes);
      if (a.endpoint->post(link.id, {&write, 1}) == 0) break;
      ++cookie;
    }
  };
  ASSERT_TRUE(pump({&a, b.get()}, [&] {
    feed();
    return a.total(a.completed) >= 20;
  }));
  target.region.reset();
  b.reset();
  ASSERT_TRUE(pump({&a}, [&] {
    feed();
    return a.links_down.contains(link.id);
  }));
  const std::uint64_t posted = cookie;
  ASSERT_TRUE(pump({&a}, [&] { return a.total(a.completed) + a.total(a.failed) == posted; }));
  EXPECT_FALSE(a.failed.empty());
  EXPECT_EQ(a.links_down[link.id], 1);
  EXPECT_FALSE(a.endpoint->link_reason(link.id).empty());
  for (const auto& [id, count] : a.completed) EXPECT_EQ(count, 1) << id;
  for (const auto& [id, count] : a.failed) EXPECT_EQ(count, 1) << id;

  // The endpoint goes on: a new peer, a new link.
  Node c(setup);
  const TestLink next = join(a, c);
  EXPECT_NE(next.id, link.id);
  const Write write = make_write(next, 9, 4, 1'000'000);
  ASSERT_TRUE(post_all(a, next.id, {&write, 1}, {&a, &c}));
  EXPECT_TRUE(pump({&a, &c}, [&] { return c.flag(9) == 4; }));
}

TEST_P(FailureTest, ASenderThatEndsInMidTransferHarmsNobodyElse) {
  Node b(GetParam());
  constexpr std::uint32_t kBytes = 2 << 20;
  const Memory target = b.memory(kBytes);
  for (int round = 0; round < 3; ++round) {
    Node a(GetParam());
    const TestLink link = join(a, b);
    const Memory source = a.memory(kBytes);
    const auto remote = import(a, link, target);
    for (std::uint32_t i = 0; i < 6; ++i) {
      const Write write = make_write(link, i, 1, i, source, 0, *remote, 0, kBytes);
      ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    }
    for (int i = 0; i < 10 * (round + 1); ++i) {
      a.poll();
      b.poll();
    }
    a.endpoint.reset();
  }
  Node c(GetParam());
  const TestLink link = join(c, b);
  const Write write = make_write(link, 100, 8, 1);
  ASSERT_TRUE(post_all(c, link.id, {&write, 1}, {&c, &b}));
  EXPECT_TRUE(pump({&c, &b}, [&] { return b.flag(100) == 8; }));
}

TEST_P(FailureTest, GivingALinkUpReportsEveryWriteOnce) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  const Memory source = a.memory(1 << 20);
  const Memory target = b.memory(1 << 20);
  const auto remote = import(a, link, target);
  std::vector<Write> writes;
  for (std::uint32_t i = 0; i < 40; ++i) {
    writes.push_back(make_write(link, i, 1, i, source, 0, *remote, 0, 1 << 20));
  }
  ASSERT_TRUE(post_all(a, link.id, writes, {&a, &b}));
  a.endpoint->disconnect(link.id);
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.total(a.completed) + a.total(a.failed) == 40; }));
  EXPECT_TRUE(a.links_down.empty()) << "nobody needs to be told of what they asked for";
  const Write late = make_write(link, 50, 1, 999);
  ASSERT_TRUE(post_all(a, link.id, {&late, 1}, {&a, &b}));
  EXPECT_TRUE(pump({&a, &b}, [&] { return a.failed.contains(999); }));
}

INSTANTIATE_TEST_SUITE_P(Fabrics, FailureTest, testing::ValuesIn(setups_that_notice_death()),
                         setup_name);

// The other programs have no such fabrics. And libfabric keeps whatever RDMA device it finds, a
// software NIC too.
#if !defined(MK_SOFT_NIC) && !defined(MK_SOFT_EFA)
class TcpTest : public FabricTest {};

// It has accepted the connection, so it has the time of a write, and not of a connection.
TEST_P(TcpTest, APeerThatTakesLongOverTheFirstWriteKeepsItsLink) {
  FabricSetup setup = GetParam();
  setup.config.connect_timeout_ns = soon_ns(2);
  setup.config.write_timeout_ns = soon_ns(60);
  Node a(setup);
  Node b(setup);
  const TestLink link = join(a, b);
  constexpr std::uint32_t kBytes = 64 << 20;
  const Memory source = a.memory(kBytes);
  const Memory target = b.memory(kBytes);
  fill_random({source.data(), kBytes}, 1);
  source.data()[0] = ~kPoison;
  const auto remote = import(a, link, target);
  const Write write = make_write(link, 1, 1, 5, source, 0, *remote, 0, kBytes);
  const auto posted = std::chrono::steady_clock::now();
  const auto done = [&] { return a.completed.contains(5) || !a.links_down.empty(); };
  ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] { return target.data()[0] != kPoison || done(); }));
  b.poll();  // so that its answers have left, too
  b.poll();
  const auto later = posted + std::chrono::nanoseconds(soon_ns(3));
  while (!done() && std::chrono::steady_clock::now() < later) a.poll();
  ASSERT_TRUE(pump({&a, &b}, done));
  ASSERT_TRUE(a.links_down.empty()) << a.endpoint->link_reason(link.id);
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(1) == 1; }));
  EXPECT_EQ(0, std::memcmp(source.data(), target.data(), kBytes));
}

std::vector<FabricSetup> tcp_setups() {
  std::vector<FabricSetup> setups = all_setups();
  std::erase_if(setups, [](const FabricSetup& setup) {
    return (setup.config.provider != "tcp" && setup.config.provider != "net") ||
           setup.gpus != nullptr;
  });
  return setups;
}

INSTANTIATE_TEST_SUITE_P(Fabrics, TcpTest, testing::ValuesIn(tcp_setups()), setup_name);

TEST(OpenEndpointTest, UnknownNamesAreRefusedWithWhatIsAllowed) {
  EndpointConfig config;
  config.fabric = "carrier-pigeon";
  const auto endpoint = open_endpoint(config);
  ASSERT_FALSE(endpoint);
  EXPECT_EQ(endpoint.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(endpoint.error().message.find("loopback"), std::string::npos);

  config.fabric = "ofi";
  config.provider = "no-such-provider";
  const auto ofi = open_endpoint(config);
  ASSERT_FALSE(ofi);
  EXPECT_EQ(ofi.error().code, ErrorCode::kUnsupported);
  config.provider = "efa";
  EXPECT_FALSE(open_endpoint(config)) << "neither libfabric 1.17 nor this machine has it";
}
#endif

}  // namespace
}  // namespace mk::fabric
