// Devices that fail, and come back: what becomes of links, of memory, of what was under way; on
// software NICs.
#include <atomic>
#include <deque>

#include "tests/daemon/fabric/verbs/trouble.h"

namespace mk::fabric {
namespace {

class VerbsRecovery : public VerbsTrouble {};
class VerbsFailures : public VerbsTrouble, public testing::WithParamInterface<soft_nic::Failure> {};

FabricSetup impatient(const std::string& device) {
  FabricSetup setup = on(device);
  setup.config.connect_timeout_ns = soon_ns();
  return setup;
}

// Without completions of their own, an error of the device or an answer, too.
TEST_P(VerbsFailures, InMidTrafficEndTheLinksOnceAndTheNextOnesWork) {
  FabricSetup setup = impatient("soft0");
  std::atomic<int> said{0};
  setup.config.notice = [&said](const std::string& text) {
    if (holds(text, "soft0:1")) ++said;
  };
  Node a(setup);
  Node b(impatient("soft1"));
  constexpr std::uint32_t kBytes = 1 << 20;
  const TestLink link = join(a, b);
  const TestLink reverse = join(b, a);
  const Memory source = a.memory(kBytes);
  const Memory target = b.memory(kBytes);
  const auto remote = import(a, link, target);
  const Bytes address = a.endpoint->address();
  std::vector<Write> writes;
  for (std::uint32_t i = 0; i < 40; ++i)
    writes.push_back(make_write(link, i, 1, i, source, 0, *remote, 0, kBytes));
  ASSERT_TRUE(post_all(a, link.id, std::span(writes).first(20), {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.total(a.completed) >= 2; }));
  soft_nic::hold(true);
  ASSERT_TRUE(post_all(a, link.id, std::span(writes).subspan(20), {&a, &b}));
  soft_nic::fail_device("soft0", GetParam());
  soft_nic::hold(false);

  EXPECT_TRUE(holds(reason_of(a, b, link.id), "soft0:1")) << a.endpoint->link_reason(link.id);
  EXPECT_TRUE(pump({&a, &b}, [&] {
    return holds(a.endpoint->link_reason(link.id),
                 "node 1 rail 0 cannot be reached by RDMA port soft0:1: the device");
  })) << a.endpoint->link_reason(link.id);
  ASSERT_TRUE(
      pump({&a, &b}, [&] { return a.total(a.completed) + a.total(a.failed) == writes.size(); }));
  EXPECT_GE(a.total(a.failed), 20u);
  for (std::uint64_t cookie = 0; cookie < writes.size(); ++cookie)
    EXPECT_EQ(a.completed[cookie] + a.failed[cookie], 1) << cookie;
  // Nothing is posted any more, and nothing is lost in silence.
  const Write late = make_write(link, 1, 2, 1000);
  ASSERT_TRUE(post_all(a, link.id, {&late, 1}, {&a, &b}));
  EXPECT_TRUE(pump({&a, &b}, [&] { return a.failed.contains(1000); }));

  // While the device is away: clear refusals, and all of it is closed though memory is still held.
  const auto refused = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
  ASSERT_FALSE(refused);
  EXPECT_TRUE(holds(refused.error().message, "node 1 rail 0: RDMA port soft0:1 is lost"))
      << refused.error().message;
  const auto unregistered = a.endpoint->register_memory({source.data(), 4096});
  ASSERT_FALSE(unregistered);
  EXPECT_TRUE(holds(unregistered.error().message, "soft0:1")) << unregistered.error().message;
  a.endpoint->disconnect(link.id);
  EXPECT_TRUE(pump({&a, &b}, [&] {
    (void)a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");  // sweeps
    return soft_nic::open_contexts("soft0") == 0;
  }));

  soft_nic::repair_device("soft0");
  ASSERT_TRUE(reconnects(a, b));
  EXPECT_EQ(soft_nic::open_contexts("soft0"), 1u);
  EXPECT_GE(said.load(), 2);  // lost, and back
  EXPECT_EQ(a.links_down[link.id], 1);
  EXPECT_TRUE(holds(reason_of(b, a, reverse.id), "node 1 rail 0")) << "the peer noticed";
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
  // What was registered before is nowhere now: it neither sends nor receives.
  const TestLink fresh = join(a, b);
  const auto there = import(a, fresh, target);
  const Write stale = make_write(fresh, 2, 7, 1001, source, 0, *there, 0, 4096);
  ASSERT_TRUE(post_all(a, fresh.id, {&stale, 1}, {&a, &b}));
  EXPECT_TRUE(pump({&a, &b}, [&] { return a.failed.contains(1001); }));
  EXPECT_FALSE(a.links_down.contains(fresh.id));
  const auto link_back = b.endpoint->connect(a.endpoint->address(), "node 0 rail 0");
  ASSERT_TRUE(link_back) << link_back.error().message;
  const auto old_key = b.endpoint->import_region(*link_back, source.region->key());
  ASSERT_FALSE(old_key);
  EXPECT_TRUE(holds(old_key.error().message, "node 0 rail 0: it has no region of that key"))
      << old_key.error().message;
  // Another node that knows only where the endpoint once was is told by its first link.
  EXPECT_NE(a.endpoint->address(), address);
}
INSTANTIATE_TEST_SUITE_P(Ways, VerbsFailures,
                         testing::Values(soft_nic::Failure::kFlushing, soft_nic::Failure::kGone,
                                         soft_nic::Failure::kUnsaid),
                         [](const auto& param) {
                           return param.param == soft_nic::Failure::kFlushing ? "flushing"
                                  : param.param == soft_nic::Failure::kGone   ? "gone"
                                                                              : "unsaid";
                         });

// The peers know only where it was; it tells them.
TEST_F(VerbsRecovery, PeersFindTheEndpointWhereItIsOpenedAgain) {
  Node a(impatient("soft0"));
  Node b(impatient("soft1"));
  const Bytes first = a.endpoint->address();
  const Busy busy(a, b);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::fail_device("soft0");
  (void)reason_of(a, b, busy.link.id);
  soft_nic::repair_device("soft0");
  EXPECT_TRUE(pump({&a, &b}, [&] {
    const auto link = b.endpoint->connect(first, "node 0 rail 0");
    if (link) b.endpoint->disconnect(*link);
    return link.has_value();
  }));
}

// Neither can tell the other: each is found by the address that it gives out by then.
TEST_F(VerbsRecovery, EndpointsThatAreOpenedAgainAtOnceFindEachOtherByTheirPresentAddresses) {
  Node a(impatient("soft0"));
  Node b(impatient("soft1"));
  const Bytes first[] = {a.endpoint->address(), b.endpoint->address()};
  const Busy there(a, b);
  const Busy back(b, a);
  EXPECT_TRUE(there.arrives(a, b) && back.arrives(b, a));
  for (const char* const device : {"soft0", "soft1"}) soft_nic::fail_device(device);
  (void)reason_of(a, b, there.link.id);
  (void)reason_of(b, a, back.link.id);
  for (const char* const device : {"soft0", "soft1"}) soft_nic::repair_device(device);
  ASSERT_TRUE(pump({&a, &b}, [&] {
    return a.endpoint->address() != first[0] && b.endpoint->address() != first[1];
  }));
  EXPECT_FALSE(a.endpoint->connect(first[1], "node 1 rail 0"));
  for (const auto& [from, to] : {std::pair<Node&, Node&>(a, b), std::pair<Node&, Node&>(b, a)}) {
    const auto id = from.endpoint->connect(to.endpoint->address(), "the other node");
    ASSERT_TRUE(id) << id.error().message;
    TestLink link{*id, nullptr};
    const Memory flags = to.memory(4096, true);  // what was registered before is forgotten
    link.flags = import(from, link, flags);
    const Write write = make_write(link, 7, 3, 2000);
    ASSERT_TRUE(post_all(from, link.id, {&write, 1}, {&a, &b}));
    EXPECT_TRUE(pump({&a, &b}, [&, &sender = from] { return sender.completed.contains(2000); }));
    EXPECT_EQ(reinterpret_cast<const std::uint32_t*>(flags.data())[7], 3u);
  }
}

TEST_F(VerbsRecovery, ADeviceThatComesBackUnderAnotherNameIsFound) {
  Node a(impatient("soft0"));
  Node b(impatient("soft1"));
  const Busy busy(a, b);
  EXPECT_TRUE(busy.arrives(a, b));
  soft_nic::fail_device("soft0", soft_nic::Failure::kGone);
  (void)reason_of(a, b, busy.link.id);
  soft_nic::rename_device("soft0", "soft9");
  soft_nic::repair_device("soft9");
  ASSERT_TRUE(reconnects(a, b));
  EXPECT_GE(soft_nic::open_contexts("soft9"), 1u);
  const Busy again(a, b);
  EXPECT_TRUE(again.arrives(a, b));
  soft_nic::fail_device("soft9");
  const std::string reason = reason_of(a, b, again.link.id);
  EXPECT_TRUE(holds(reason, "RDMA port soft9:1")) << reason;
}

TEST_F(VerbsRecovery, ADeviceThatFailsAgainAndAgainIsFollowed) {
  Node a(impatient("soft0"));
  Node b(impatient("soft1"));
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(reconnects(a, b)) << round;
    const Busy busy(a, b);
    EXPECT_TRUE(busy.arrives(a, b));
    soft_nic::fail_device("soft0",
                          round % 2 == 0 ? soft_nic::Failure::kGone : soft_nic::Failure::kFlushing);
    const std::string reason = reason_of(a, b, busy.link.id);
    EXPECT_TRUE(holds(reason, "soft0:1")) << reason;
    a.endpoint->disconnect(busy.link.id);
    soft_nic::repair_device("soft0");
  }
  ASSERT_TRUE(reconnects(a, b));
}

// A rail of two NICs stands and falls with both; the one that is well is left alone.
TEST_F(VerbsRecovery, OneOfTwoStripesThatFailsTakesTheRailUntilItIsBack) {
  FabricSetup striped = impatient("soft0+soft1");
  Node a(striped);
  Node b(striped);
  Node c(impatient("soft0"));
  Node d(impatient("soft0"));
  const Busy busy(a, b);
  const Busy beside(c, d);
  EXPECT_TRUE(busy.arrives(a, b));
  const std::size_t open = soft_nic::open_contexts("soft0");
  soft_nic::fail_device("soft1");
  const std::string reason = reason_of(a, b, busy.link.id);
  EXPECT_TRUE(holds(reason, "RDMA port soft1:1: the device failed")) << reason;
  const auto refused = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
  ASSERT_FALSE(refused);
  EXPECT_TRUE(holds(refused.error().message, "soft1:1 is lost")) << refused.error().message;
  EXPECT_TRUE(beside.arrives(c, d));
  EXPECT_TRUE(Busy(c, d).arrives(c, d));
  EXPECT_TRUE(c.links_down.empty());
  EXPECT_EQ(soft_nic::open_contexts("soft0"), open);

  soft_nic::repair_device("soft1");
  ASSERT_TRUE(reconnects(a, b));
  TestLink link{*a.endpoint->connect(b.endpoint->address(), "node 1 rail 0"), nullptr};
  const Memory source = a.memory(4096);
  const Memory target = b.memory(4096);
  const Memory flags = b.memory(4096, true);
  const auto remote = import(a, link, target);
  link.flags = import(a, link, flags);
  fill_random({source.data(), 4096}, 5);
  for (const std::uint32_t flag : {1u, 9u}) {  // one of each stripe
    const Write write = make_write(link, flag, 3, 2000 + flag, source, 0, *remote, 0, 4096);
    ASSERT_TRUE(post_all(a, link.id, {&write, 1}, {&a, &b}));
    EXPECT_TRUE(pump({&a, &b}, [&] { return a.completed.contains(2000 + flag); })) << flag;
    EXPECT_EQ(reinterpret_cast<const std::uint32_t*>(flags.data())[flag], 3u);
  }
  EXPECT_EQ(std::memcmp(source.data(), target.data(), 4096), 0);
}

// Flushes of a GPU's memory: none is waited for that cannot end.
TEST_F(VerbsRecovery, FlushesOfALostDeviceEndAndOfItsMemoryNeverSucceed) {
  const auto file = shm::BufferFile::create("flush-test", 4096);
  ASSERT_TRUE(file);
  FabricSetup setup = impatient("soft0");
  setup.config.verbs.arrival = "immediate";
  Node a(setup);
  const auto memory = [&] {
    MemoryDescriptor descriptor{.address = file->data(), .bytes = 4096};
    descriptor.dmabuf = file->fd();
    descriptor.direct = GpuWindow::kDmabuf;
    auto region = a.endpoint->register_memory(descriptor);
    return region ? std::move(*region) : nullptr;
  };
  const auto old = memory();
  ASSERT_NE(old, nullptr);
  std::map<std::uint64_t, ErrorCode> flushed;
  const auto ends = [&](std::uint64_t cookie) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!flushed.contains(cookie) && std::chrono::steady_clock::now() < deadline) {
      std::array<Event, 8> events;
      const std::size_t count = a.endpoint->poll(events);
      for (std::size_t i = 0; i < count; ++i) flushed.emplace(events[i].cookie, events[i].code);
    }
    return flushed.contains(cookie);
  };
  (void)a.poll();
  ASSERT_TRUE(a.endpoint->flush(*old, 1));
  ASSERT_TRUE(ends(1));
  EXPECT_EQ(flushed[1], ErrorCode::kOk);
  soft_nic::hold(true);
  ASSERT_TRUE(a.endpoint->flush(*old, 2));
  soft_nic::fail_device("soft0", soft_nic::Failure::kGone);
  ASSERT_TRUE(ends(2));
  EXPECT_EQ(flushed[2], ErrorCode::kLinkDown);
  soft_nic::hold(false);
  // While there is no device, and when there is another.
  const auto flush = [&](const LocalRegion& region, std::uint64_t cookie) {
    return pump({&a}, [&] { return a.endpoint->flush(region, cookie); });
  };
  ASSERT_TRUE(flush(*old, 3));
  ASSERT_TRUE(ends(3));
  EXPECT_EQ(flushed[3], ErrorCode::kNotFound);
  soft_nic::repair_device("soft0");
  std::unique_ptr<LocalRegion> fresh;
  ASSERT_TRUE(pump({&a}, [&] { return (fresh = memory()) != nullptr; }));
  ASSERT_TRUE(flush(*fresh, 4));
  ASSERT_TRUE(flush(*old, 5));
  ASSERT_TRUE(ends(4) && ends(5));
  EXPECT_EQ(flushed[4], ErrorCode::kOk);
  EXPECT_EQ(flushed[5], ErrorCode::kNotFound);
}

// The proxy posts and polls all the time, on a thread of its own, while the device comes and goes.
TEST_F(VerbsRecovery, AProxyThatNeverRestsTouchesNothingThatIsClosed) {
  Node a(impatient("soft0"));
  Node b(impatient("soft1"));
  std::atomic<LinkId> link{~LinkId{0}};
  std::atomic<const Memory*> source{nullptr};
  std::atomic<const RemoteRegion*> remote{nullptr};
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> ended{0}, passes{0};
  std::thread proxy([&] {
    std::array<Event, 64> events;
    for (std::uint64_t cookie = 0; !stop; ++passes) {
      if (const RemoteRegion* const to = remote) {
        Write write;
        write.src = source.load()->region.get();
        write.dst = to;
        write.flags = to;
        write.bytes = 256;
        write.epoch = 1;
        write.cookie = cookie++;
        (void)a.endpoint->post(link, {&write, 1});
      }
      const std::size_t count = a.endpoint->poll(events);
      for (std::size_t i = 0; i < count; ++i)
        ended += events[i].kind == Event::Kind::kCompleted ? 1 : 0;
      std::this_thread::yield();
    }
  });
  struct Round {
    Memory source, target;
    std::unique_ptr<RemoteRegion> remote;
  };
  std::deque<Round> rounds;  // freed after the proxy has ended: it may still name them
  for (int round = 0; round < 4; ++round) {
    const auto id = [&]() -> std::optional<LinkId> {
      for (int tries = 0; tries < 600; ++tries) {
        const auto made = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
        if (made) return *made;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      return std::nullopt;
    }();
    if (!id) break;
    rounds.push_back({a.memory(4096), b.memory(4096), nullptr});
    auto imported = a.endpoint->import_region(*id, rounds.back().target.region->key());
    if (!imported) break;
    rounds.back().remote = std::move(*imported);
    link = *id;
    source = &rounds.back().source;
    const std::uint64_t before = ended;
    remote = rounds.back().remote.get();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (ended < before + 50 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_GE(ended, before + 50) << round;
    soft_nic::fail_device("soft0",
                          round % 2 == 0 ? soft_nic::Failure::kFlushing : soft_nic::Failure::kGone);
    soft_nic::repair_device("soft0");
    const std::uint64_t then = passes;
    while (passes < then + 20) std::this_thread::yield();
    a.endpoint->disconnect(*id);
  }
  EXPECT_EQ(rounds.size(), 4u);
  stop = true;
  proxy.join();
}

}  // namespace
}  // namespace mk::fabric
