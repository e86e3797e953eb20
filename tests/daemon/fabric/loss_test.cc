// What every fabric promises when a link is lost: each outstanding write is reported once, and a
// new link to the peer that is back carries every byte.
#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/sim_setups.h"
#include "tests/daemon/fabric/transfer.h"

namespace mk::fabric {
namespace {

class LossTest : public FabricTest {
 protected:
  FabricSetup impatient() const {
    FabricSetup setup = GetParam();
    setup.config.connect_timeout_ns = soon_ns();
    setup.config.write_timeout_ns = soon_ns();
    return setup;
  }
};
/// Of fabrics that can break links between endpoints that live. Verbs does by its port, as
/// tests/rdma/link_loss_test.cc shows, EFA by its device (ofi/efa_test.cc); the others' links break
/// with a peer only.
class BrokenLinkTest : public LossTest {};

/// Writes of many sizes, at odd offsets, from one node to another.
class Traffic {
 public:
  static constexpr std::uint32_t kWrites = 40;

  Traffic(Node& from, Node& to, TestLink on, std::uint32_t seed)
      : link(std::move(on)),
        source(from.memory(kWrites * kStride)),
        target(to.memory(kWrites * kStride)),
        remote(import(from, link, target)) {
    fill_random({source.data(), source.bytes()}, seed);
  }

  static std::uint32_t bytes_of(std::uint32_t i) { return 1 + i * 7919 % 60'000; }
  Write write(std::uint32_t i) const {
    const std::uint64_t at = i * kStride + i % 5;
    return make_write(link, i, 1, i, source, at, *remote, at, bytes_of(i));
  }
  /// Whether write i is there, and nothing beside it.
  bool arrived(std::uint32_t i) const {
    const std::uint64_t at = i * kStride + i % 5;
    const std::byte* const there = target.data() + at;
    return std::memcmp(source.data() + at, there, bytes_of(i)) == 0 &&
           there[bytes_of(i)] == kPoison && (i % 5 == 0 || there[-1] == kPoison);
  }

  const TestLink link;
  const Memory source;
  Memory target;
  const std::unique_ptr<RemoteRegion> remote;

 private:
  static constexpr std::uint64_t kStride = 64 * 1024;
};

/// A link of `a` to `b`, as soon as there can be one.
std::optional<TestLink> join_when_possible(Node& a, Node& b) {
  std::optional<LinkId> id;
  if (!pump({&a, &b}, [&] {
        auto made = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
        if (made) id = *made;
        return id.has_value();
      }))
    return std::nullopt;
  auto flags = a.endpoint->import_region(*id, b.flags.region->key());
  if (!flags) return std::nullopt;
  return TestLink{*id, std::move(*flags)};
}

void expect_once_each(const Node& node, std::uint64_t first, std::uint64_t last) {
  const auto times = [](const std::map<std::uint64_t, int>& counts, std::uint64_t cookie) {
    const auto found = counts.find(cookie);
    return found == counts.end() ? 0 : found->second;
  };
  for (std::uint64_t i = first; i < last; ++i)
    EXPECT_EQ(times(node.completed, i) + times(node.failed, i), 1) << "write " << i;
}

/// Posts those from `first` on, and lets only `a` work in between.
void post_rest(Node& a, const Traffic& traffic, std::uint32_t first, std::uint32_t end) {
  ASSERT_TRUE(pump({&a}, [&] {
    for (; first < end; ++first) {
      const Write write = traffic.write(first);
      if (a.endpoint->post(traffic.link.id, {&write, 1}) == 0) break;
    }
    return first == end;
  }));
}

/// All writes of a new link arrive, each once, and every byte is compared.
void expect_everything_arrives(Node& a, Node& b) {
  auto link = join_when_possible(a, b);
  ASSERT_TRUE(link);
  const Traffic traffic(a, b, std::move(*link), 77);
  std::vector<Write> writes;
  for (std::uint32_t i = 0; i < Traffic::kWrites; ++i) {
    writes.push_back(traffic.write(i));
    writes.back().flag_index += 1'000;
    writes.back().immediate = shm::make_immediate(0, 1'000 + i, 1);
  }
  a.completed.clear();
  a.failed.clear();
  std::memset(b.flags.data(), 0, b.flags.bytes());
  std::ranges::fill(b.epochs, 0);
  b.arrivals.clear();
  ASSERT_TRUE(post_all(a, traffic.link.id, writes, {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] {
    for (std::uint32_t i = 0; i < Traffic::kWrites; ++i) {
      if (b.flag(1'000 + i) != 1) return false;
    }
    return a.completed.size() == Traffic::kWrites;
  }));
  expect_once_each(a, 0, Traffic::kWrites);
  EXPECT_TRUE(a.failed.empty());
  for (std::uint32_t i = 0; i < Traffic::kWrites; ++i) EXPECT_TRUE(traffic.arrived(i)) << i;
  for (const auto& [immediate, count] : b.arrivals) EXPECT_EQ(count, 1) << immediate;
  a.endpoint->disconnect(traffic.link.id);
  for (int i = 0; i < 4; ++i) a.poll();
}

TEST_P(LossTest, APeerThatEndsIsReportedAndWhenItIsBackEveryByteArrives) {
  const FabricSetup setup = impatient();
  Node a(setup);
  auto b = std::make_unique<Node>(setup);
  for (std::uint32_t round = 0; round < 2; ++round) {
    a.completed.clear();
    a.failed.clear();
    Traffic traffic(a, *b, join(a, *b), round);
    constexpr std::uint32_t kBefore = 10;
    post_rest(a, traffic, 0, kBefore);
    ASSERT_TRUE(pump({&a, b.get()}, [&] {
      for (std::uint32_t i = 0; i < kBefore; ++i) {
        if (b->flag(i) != 1) return false;
      }
      return a.completed.size() == kBefore;
    }));
    for (std::uint32_t i = 0; i < kBefore; ++i) EXPECT_TRUE(traffic.arrived(i)) << i;

    post_rest(a, traffic, kBefore, Traffic::kWrites);
    traffic.target.region.reset();
    b.reset();
    // An end notices with the next writes at the latest; no write is lost, before or
    // after.
    std::uint64_t posted = Traffic::kWrites;
    ASSERT_TRUE(pump({&a},
                     [&] {
                       const std::size_t reported = a.completed.size() + a.failed.size();
                       const bool down = a.links_down.contains(traffic.link.id);
                       if (setup.notices_death && !down && reported + 4 > posted) {
                         Write next =
                             traffic.write(static_cast<std::uint32_t>(posted % Traffic::kWrites));
                         next.cookie = posted;
                         posted += a.endpoint->post(traffic.link.id, {&next, 1});
                       }
                       return reported >= posted && (down || !setup.notices_death);
                     }))
        << a.total(a.completed) << " completed, " << a.total(a.failed) << " failed of " << posted;
    for (int i = 0; i < 50; ++i) a.poll();
    expect_once_each(a, 0, posted);
    EXPECT_EQ(a.completed.size() + a.failed.size(), posted);
    if (setup.notices_death) {
      EXPECT_EQ(a.links_down[traffic.link.id], 1);
      EXPECT_FALSE(a.endpoint->link_reason(traffic.link.id).empty());
      // The network may have been done with all of them before; over the lost link none is.
      const Write late = make_write(traffic.link, 50, 1, posted);
      ASSERT_TRUE(post_all(a, traffic.link.id, {&late, 1}, {&a}));
      ASSERT_TRUE(pump({&a}, [&] { return a.failed.contains(posted); }));
    }
    a.endpoint->disconnect(traffic.link.id);

    b = std::make_unique<Node>(setup);
    expect_everything_arrives(a, *b);
    expect_everything_arrives(*b, a);
  }
}

#if !defined(MK_SOFT_NIC) && !defined(MK_SOFT_EFA)
TEST_P(BrokenLinkTest, ABrokenLinkIsReportedAndTheNextOneCarriesEveryByte) {
  const FabricSetup setup = impatient();
  Node a(setup);
  Node b(setup);
  for (std::uint32_t round = 0; round < 20; ++round) {
    a.completed.clear();
    a.failed.clear();
    const Traffic traffic(a, b, join(a, b), round);
    post_rest(a, traffic, 0, Traffic::kWrites);
    for (std::uint32_t i = 0; i < round; ++i) a.poll();
    setup.break_links();
    ASSERT_TRUE(pump({&a, &b}, [&] {
      return a.completed.size() + a.failed.size() == Traffic::kWrites &&
             a.links_down.contains(traffic.link.id);
    }));
    EXPECT_FALSE(a.endpoint->link_reason(traffic.link.id).empty());
    const Write late = make_write(traffic.link, 50, 1, 999);
    ASSERT_TRUE(post_all(a, traffic.link.id, {&late, 1}, {&a, &b}));
    ASSERT_TRUE(pump({&a, &b}, [&] { return a.failed.contains(999); }));
    for (int i = 0; i < 50; ++i) {
      a.poll();
      b.poll();
    }
    EXPECT_EQ(a.links_down[traffic.link.id], 1);
    expect_once_each(a, 0, Traffic::kWrites);
    for (std::uint32_t i = 0; i < Traffic::kWrites; ++i) {
      EXPECT_TRUE(traffic.arrived(i) || !a.completed.contains(i)) << i;
    }
    a.endpoint->disconnect(traffic.link.id);
    expect_everything_arrives(a, b);
    expect_everything_arrives(b, a);
  }
}

#endif

INSTANTIATE_TEST_SUITE_P(Fabrics, LossTest, testing::ValuesIn(all_setups()), setup_name);
#if !defined(MK_SOFT_NIC) && !defined(MK_SOFT_EFA)
INSTANTIATE_TEST_SUITE_P(Simulated, LossTest, testing::ValuesIn(sim_setups()), setup_name);
INSTANTIATE_TEST_SUITE_P(Simulated, BrokenLinkTest, testing::ValuesIn(sim_setups()), setup_name);
#endif

}  // namespace
}  // namespace mk::fabric
