// What every fabric promises its proxy, whatever the network: data intact, arrivals once and after
// their data, completions once, back-pressure instead of loss.
#include <numeric>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/sim_setups.h"

namespace mk::fabric {
namespace {

class ConformanceTest : public FabricTest {};

TEST_P(ConformanceTest, TransfersOfAnySizeAndAlignmentArriveIntactAndTouchNothingElse) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  constexpr std::uint64_t kBytes = 9 << 20;
  const Memory source = a.memory(kBytes);
  fill_random({source.data(), kBytes}, 1);
  const Memory target = b.memory(kBytes);
  const auto remote = import(a, link, target);
  std::vector<std::byte> expected(kBytes, kPoison);

  std::mt19937_64 random(2);
  std::vector<std::uint32_t> sizes = {1,    2,    3,    7,     8,      63,      64,      65,
                                      4095, 4096, 4097, 65536, 262144, 1 << 20, 3 << 20, 8 << 20};
  for (int i = 0; i < 12; ++i)
    sizes.push_back(1 + static_cast<std::uint32_t>(random() % (1u << (4 + i % 18))));
  std::uint32_t epoch = 0;
  for (const std::uint32_t bytes : sizes) {
    const std::uint64_t from = random() % (kBytes - bytes + 1);
    const std::uint64_t to = random() % (kBytes - bytes + 1);
    ++epoch;
    const Write write = make_write(link, 7, epoch, epoch, source, from, *remote, to, bytes);
    ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(7) == epoch && a.completed.contains(epoch); }))
        << bytes << " bytes";
    std::memcpy(expected.data() + to, source.data() + from, bytes);
    ASSERT_EQ(0, std::memcmp(expected.data(), target.data(), kBytes))
        << bytes << " bytes from " << from << " to " << to;
  }
  EXPECT_TRUE(a.failed.empty());
  for (const auto& [cookie, count] : a.completed) EXPECT_EQ(count, 1) << cookie;
  for (const auto& [immediate, count] : b.arrivals) EXPECT_EQ(count, 1) << immediate;
  EXPECT_EQ(b.endpoint->gpu_path(), GetParam().gpu_path);
}

TEST_P(ConformanceTest, TwoSessionsSideBySideDoNotSeeEachOther) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  constexpr std::uint32_t kCount = 200;
  constexpr std::uint32_t kBytes = 3'001;
  struct Session {
    Memory source, target, flags;
    std::unique_ptr<RemoteRegion> remote, remote_flags;
  };
  std::vector<Session> sessions;
  for (std::uint32_t s = 0; s < 2; ++s) {
    Session one{a.memory(kCount * std::uint64_t{kBytes}), b.memory(kCount * std::uint64_t{kBytes}),
                b.memory(4 * kCount, true), nullptr, nullptr};
    fill_random({one.source.data(), one.source.bytes()}, 50 + s);
    std::memset(one.flags.data(), 0, one.flags.bytes());
    one.remote = import(a, link, one.target);
    one.remote_flags = import(a, link, one.flags);
    sessions.push_back(std::move(one));
  }
  std::vector<Write> writes;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    for (std::uint32_t s = 0; s < 2; ++s) {
      const std::uint64_t at = i * std::uint64_t{kBytes};
      Write write = make_write(link, i, 1 + s, 2 * i + s, sessions[s].source, at,
                               *sessions[s].remote, at, kBytes);
      write.flags = sessions[s].remote_flags.get();
      write.immediate = shm::make_immediate(static_cast<std::uint16_t>(s), i, 1 + s);
      writes.push_back(write);
    }
  }
  ASSERT_TRUE(post_all(a, link.id, writes, {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] {
    if (!b.ordered) return b.arrivals.size() == 2 * kCount && a.completed.size() == 2 * kCount;
    for (std::uint32_t i = 0; i < kCount; ++i) {
      for (std::uint32_t s = 0; s < 2; ++s) {
        if (shm::load_acquire(reinterpret_cast<std::uint32_t*>(sessions[s].flags.data()) + i) !=
            1 + s)
          return false;
      }
    }
    return a.completed.size() == 2 * kCount;
  }));
  for (const Session& one : sessions)
    EXPECT_EQ(0, std::memcmp(one.source.data(), one.target.data(), kCount * std::uint64_t{kBytes}));
  for (const auto& [immediate, count] : b.arrivals) EXPECT_EQ(count, 1) << immediate;
}

TEST_P(ConformanceTest, AFlagAloneArrives) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  for (std::uint32_t epoch = 1; epoch <= 300; ++epoch) {
    const Write write = make_write(link, epoch % 5, epoch, epoch);
    ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(epoch % 5) == epoch; })) << epoch;
  }
  EXPECT_TRUE(pump({&a, &b}, [&] { return a.completed.size() == 300; }));
  EXPECT_EQ(a.total(a.completed), 300u);
}

// Whose flags a peer may raise depends on who it is, and that it cannot choose.
TEST_P(ConformanceTest, AnArrivalIsThePeersThatWasToldTheAddress) {
  Node to(GetParam());
  // By the ordered contract flags are written by their keys.
  if (!to.endpoint->capabilities().arrivals_named) return;
  std::map<std::uint32_t, PeerNumber> whose;  // by flag
  to.on_event = [&](const Event& event) {
    if (event.kind == Event::Kind::kArrival)
      whose[shm::immediate_flag(event.immediate)] = event.peer;
  };
  constexpr std::uint32_t kBytes = 5'000;
  const Memory target = to.memory(3 * kBytes);
  Node one(GetParam()), two(GetParam());
  std::uint32_t flag = 0;
  for (Node* const from : {&one, &two, &one}) {
    const PeerNumber peer = from == &one ? 1 : 2;
    const auto id = from->endpoint->connect_peer(
        0, to.endpoint->personal(to.endpoint->address(), peer), "node 0 rail 0");
    ASSERT_TRUE(id) << id.error().message;
    const TestLink link{*id, nullptr};
    auto remote = from->endpoint->import_region(*id, target.region->key_for(peer));
    ASSERT_TRUE(remote) << remote.error().message;
    const Memory source = from->memory(kBytes);
    const std::vector<Write> batch{
        make_write(link, flag, 1, 10, source, 0, **remote, flag * std::uint64_t{kBytes}, kBytes),
        make_write(link, 100 + flag, 1, 11)};
    ASSERT_TRUE(post_all(*from, *id, batch, {from, &to}));
    ASSERT_TRUE(pump({from, &to}, [&] {
      return to.flag(flag) == 1 && to.flag(100 + flag) == 1 && from->completed[10] > 0 &&
             from->completed[11] > 0;
    }));
    EXPECT_EQ(whose[flag], peer) << "with data";
    EXPECT_EQ(whose[100 + flag], peer) << "alone";
    from->completed.clear();
    ++flag;
  }
}

TEST_P(ConformanceTest, BatchesOfEverySizeArriveWhole) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  const Memory source = a.memory(1 << 20);
  fill_random({source.data(), source.bytes()}, 4);
  const Memory target = b.memory(1 << 20);
  const auto remote = import(a, link, target);
  std::uint32_t flag = 0;
  for (std::size_t size = 1; size <= shm::kBatchMax; ++size) {
    std::vector<Write> batch;
    const std::uint32_t first = flag;
    for (std::size_t i = 0; i < size; ++i, ++flag) {
      const std::uint64_t at = flag * 20'000ull;
      batch.push_back(i % 3 == 2
                          ? make_write(link, flag, 1, flag)
                          : make_write(link, flag, 1, flag, source, at, *remote, at, 19'999));
    }
    ASSERT_TRUE(post_all(a, link.id, batch, {&a, &b}));
    ASSERT_TRUE(pump({&a, &b}, [&] {
      for (std::uint32_t i = first; i < flag; ++i) {
        if (b.flag(i) != 1) return false;
      }
      return a.completed.size() == flag;
    }));
    for (std::size_t i = 0; i < size; ++i) {
      if (batch[i].bytes == 0) continue;
      const std::uint64_t at = batch[i].dst_offset;
      ASSERT_EQ(0, std::memcmp(source.data() + at, target.data() + at, 19'999));
      EXPECT_EQ(target.data()[at + 19'999], kPoison);
    }
  }
}

TEST_P(ConformanceTest, BeyondItsDepthALinkPushesBackAndLosesNothing) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  const Memory source = a.memory(1 << 20);
  fill_random({source.data(), source.bytes()}, 5);
  const Memory target = b.memory(1 << 20);
  const auto remote = import(a, link, target);
  const std::uint32_t depth = a.endpoint->capabilities().link_depth;
  const std::uint32_t count = 3 * depth + 5;
  ASSERT_LE(count, kTestFlags);

  std::vector<Write> writes;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint64_t at = i * 1024ull % (source.bytes() - 1024);
    writes.push_back(make_write(link, i, 1, i, source, at, *remote, at, 1024));
  }
  std::size_t taken = 0;
  while (taken < count) {  // without a poll nothing is reported, so no place becomes free
    const std::size_t now = a.endpoint->post(
        link.id, std::span(writes).subspan(taken, std::min<std::size_t>(8, count - taken)));
    if (now == 0) break;
    taken += now;
  }
  if (GetParam().may_take_fewer) {
    EXPECT_LE(taken, depth);
  } else {
    EXPECT_EQ(taken, depth);
  }
  ASSERT_TRUE(post_all(a, link.id, std::span(writes).subspan(taken), {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (b.flag(i) != 1) return false;
    }
    return a.completed.size() == count;
  }));
  EXPECT_EQ(a.total(a.completed), count);
  EXPECT_TRUE(a.failed.empty());
}

TEST_P(ConformanceTest, ThousandsOfWritesAreOutstandingAtOnce) {
  Node hub(GetParam());
  Node b(GetParam());
  constexpr std::uint32_t kLinks = 12;
  constexpr std::uint32_t kBytes = 512;
  const Memory source = hub.memory(kTestFlags * std::uint64_t{kBytes});
  fill_random({source.data(), source.bytes()}, 8);
  const Memory target = b.memory(source.bytes());
  std::vector<TestLink> links;
  std::vector<std::unique_ptr<RemoteRegion>> remotes;
  for (std::uint32_t i = 0; i < kLinks; ++i) {
    links.push_back(join(hub, b));
    remotes.push_back(import(hub, links[i], target));
  }
  // All links are filled before anybody polls.
  const std::uint32_t depth =
      std::min(kTestFlags / kLinks, hub.endpoint->capabilities().link_depth);
  std::uint32_t posted = 0;
  for (std::uint32_t i = 0; i < kLinks; ++i) {
    for (std::uint32_t refused = 0, taken = 0; taken < depth && refused < 100;) {
      const std::uint64_t at = posted * std::uint64_t{kBytes};
      const Write write =
          make_write(links[i], posted, 1, posted, source, at, *remotes[i], at, kBytes);
      if (hub.endpoint->post(links[i].id, {&write, 1}) == 0) {
        ++refused;
        continue;
      }
      ++posted;
      ++taken;
    }
  }
  EXPECT_EQ(posted, kLinks * depth);
  EXPECT_GE(posted, 3'000u);
  ASSERT_TRUE(pump({&hub, &b}, [&] {
    if (hub.completed.size() < posted) return false;
    for (std::uint32_t i = 0; i < posted; ++i) {
      if (b.flag(i) != 1) return false;
    }
    return true;
  }));
  EXPECT_EQ(hub.total(hub.completed), posted);
  EXPECT_TRUE(hub.failed.empty());
  EXPECT_EQ(0, std::memcmp(source.data(), target.data(), posted * std::uint64_t{kBytes}));
}

TEST_P(ConformanceTest, ABatchOfLargeWritesAtOddOffsetsArrivesWhole) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  constexpr std::uint32_t kBytes = 8 << 20;
  constexpr std::uint32_t kWrites = 4;
  const Memory source = a.memory(kWrites * std::uint64_t{kBytes} + 4096);
  fill_random({source.data(), source.bytes()}, 9);
  const Memory target = b.memory(source.bytes());
  const auto remote = import(a, link, target);
  std::vector<Write> batch;
  for (std::uint32_t i = 0; i < kWrites; ++i) {
    const std::uint64_t at = i * std::uint64_t{kBytes};
    batch.push_back(make_write(link, i, 3, i, source, at + 7, *remote, at + 13, kBytes));
  }
  ASSERT_TRUE(post_all(a, link.id, batch, {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] {
    for (std::uint32_t i = 0; i < kWrites; ++i) {
      if (b.flag(i) != 3) return false;
    }
    return a.completed.size() == kWrites;
  }));
  EXPECT_EQ(0, std::memcmp(source.data() + 7, target.data() + 13, kWrites * std::uint64_t{kBytes}));
  EXPECT_EQ(target.data()[12], kPoison);
  EXPECT_EQ(target.data()[13 + kWrites * std::uint64_t{kBytes}], kPoison);
}

TEST_P(ConformanceTest, MemoryMayGoOnceTheWritesToItAreCompleted) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  constexpr std::uint32_t kBytes = 40'000;
  constexpr std::uint32_t kWrites = 4;
  const Memory source = a.memory(kWrites * std::uint64_t{kBytes});
  for (std::uint32_t round = 0; round < 8; ++round) {
    std::vector<Write> writes;
    Memory target = b.memory(source.bytes());
    std::unique_ptr<RemoteRegion> remote = import(a, link, target);
    for (std::uint32_t i = 0; i < kWrites; ++i) {
      const std::uint64_t at = i * std::uint64_t{kBytes};
      writes.push_back(
          make_write(link, i, round + 1, round * kWrites + i, source, at, *remote, at, kBytes));
    }
    ASSERT_TRUE(post_all(a, link.id, writes, {&a, &b}));
    // The writer looks far more often, and so sees a completion that comes early before the peer
    // has taken the bytes.
    ASSERT_TRUE(pump({&b}, [&] {
      for (int i = 0; i < 20; ++i) a.poll();
      return a.completed.size() + a.failed.size() == (round + 1) * kWrites;
    }));
    ASSERT_TRUE(a.failed.empty()) << "round " << round;
    remote.reset();
    target.region.reset();
    for (int i = 0; i < 20; ++i) {
      b.poll();
      a.poll();
    }
  }
  EXPECT_TRUE(a.links_down.empty());
}

TEST_P(ConformanceTest, AShortEventSpanDelaysEventsAndLosesNone) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink there = join(a, b);
  const TestLink back = join(b, a);
  std::vector<Write> out;
  std::vector<Write> home;
  for (std::uint32_t i = 0; i < 100; ++i) {
    out.push_back(make_write(there, i, 1, i));
    home.push_back(make_write(back, i, 1, 1000 + i));
  }
  ASSERT_TRUE(post_all(a, there.id, out, {&a, &b}));
  ASSERT_TRUE(post_all(b, back.id, home, {&a, &b}));
  ASSERT_TRUE(pump({}, [&] {
    a.poll(1);
    b.poll(1);
    return a.completed.size() == 100 && b.completed.size() == 100 && a.flag(99) == 1 &&
           b.flag(99) == 1;
  }));
}

TEST_P(ConformanceTest, ManyLinksOfOneEndpointAreIndependent) {
  Node hub(GetParam());
  Node b(GetParam());
  Node c(GetParam());
  constexpr std::uint32_t kLinks = 12;
  constexpr std::uint32_t kBytes = 70'001;
  const Memory source = hub.memory(kLinks * std::uint64_t{kBytes});
  fill_random({source.data(), source.bytes()}, 6);
  const Memory at_b = b.memory(source.bytes());
  const Memory at_c = c.memory(source.bytes());
  std::vector<TestLink> links;
  std::vector<std::unique_ptr<RemoteRegion>> remotes;
  for (std::uint32_t i = 0; i < kLinks; ++i) {
    links.push_back(join(hub, i % 2 == 0 ? b : c));
    remotes.push_back(import(hub, links[i], i % 2 == 0 ? at_b : at_c));
  }
  for (std::uint32_t i = 0; i < kLinks; ++i) {
    const std::uint64_t at = i * std::uint64_t{kBytes};
    const Write write = make_write(links[i], i, 1, i, source, at, *remotes[i], at, kBytes);
    ASSERT_TRUE(post_all(hub, links[i].id, {&write, 1}, {&hub, &b, &c}));
  }
  ASSERT_TRUE(pump({&hub, &b, &c}, [&] {
    for (std::uint32_t i = 0; i < kLinks; ++i) {
      if ((i % 2 == 0 ? b : c).flag(i) != 1) return false;
    }
    return hub.completed.size() == kLinks;
  }));
  for (std::uint32_t i = 0; i < kLinks; ++i) {
    const std::uint64_t at = i * std::uint64_t{kBytes};
    EXPECT_EQ(0, std::memcmp(source.data() + at, (i % 2 == 0 ? at_b : at_c).data() + at, kBytes));
    EXPECT_EQ((i % 2 == 0 ? at_c : at_b).data()[at], kPoison);
  }
}

INSTANTIATE_TEST_SUITE_P(Fabrics, ConformanceTest, testing::ValuesIn(all_setups()), setup_name);
#if !defined(MK_SOFT_NIC) && !defined(MK_SOFT_EFA)
INSTANTIATE_TEST_SUITE_P(Simulated, ConformanceTest, testing::ValuesIn(sim_setups()), setup_name);
#endif

}  // namespace
}  // namespace mk::fabric
