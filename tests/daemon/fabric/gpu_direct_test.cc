// GPU memory that NICs reach by themselves: what is tried in which order, and that nothing is shown
// before it was flushed. The NIC is one of the host's, whose writes the "GPU" sees with a flush.
#include "tests/daemon/fabric/gpu_pair.h"

namespace mk::fabric {
namespace {

/// The carriers of both nodes obey one control: only the receiver's flushes.
class DirectTest : public testing::Test {
 protected:
  FabricSetup setup() {
    FabricSetup carrier = ofi("net");
    carrier.direct = [this] { return control_; };
    return with_gpus("direct", FabricSetup{}, carrier);
  }
  /// Until everybody has had the time to do what may be done.
  static void poll(Pair& pair) {
    for (int i = 0; i < 200; ++i) {
      pair.a.poll_endpoint();
      pair.b.poll_endpoint();
    }
  }
  bool pump_until(Pair& pair, const std::function<bool()>& done) {
    return pump({&pair.a, &pair.b}, done);
  }
  const std::shared_ptr<DirectControl> control_ = std::make_shared<DirectControl>();
};

TEST_F(DirectTest, NothingIsShownBeforeItsFlushIsOver) {
  control_->hold_flushes = true;
  Pair pair(setup());
  EXPECT_EQ(control_->by_dmabuf, 2);
  EXPECT_EQ(pair.b.endpoint->gpu_path(), "by dmabuf");
  EXPECT_EQ(pair.target.region->gpu_path, "by dmabuf");
  ASSERT_TRUE(pair.post(pair.write(3, 1, 1, 5000, 16, 100)));
  ASSERT_TRUE(pump_until(pair, [&] { return control_->flushes == 1; }));
  poll(pair);
  EXPECT_EQ(pair.b.flag(3), 0u);
  EXPECT_FALSE(pair.arrived(5000, 16, 100)) << "the test's own GPU sees what was not flushed";
  // What comes while a flush is under way needs another, and one stands for all that wait.
  for (std::uint32_t i = 0; i < 4; ++i)
    ASSERT_TRUE(pair.post(pair.write(4 + i, 1, 2 + i, 100, 200 * i, 6000 + 200 * i)));
  // The sender is done before the receiver has heard of both halves of each.
  ASSERT_TRUE(pump_until(
      pair, [&] { return pair.a.completed.size() == 5 && control_->arrivals == 2 * 5; }));
  poll(pair);
  EXPECT_EQ(control_->flushes, 1);
  control_->end_flushes();
  ASSERT_TRUE(pump_until(pair, [&] { return pair.b.flag(3) == 1; }));
  EXPECT_TRUE(pair.arrived(5000, 16, 100));
  poll(pair);
  EXPECT_EQ(control_->flushes, 2);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(pair.b.flag(4 + i), 0u);
  control_->end_flushes();
  ASSERT_TRUE(pump_until(pair, [&] { return pair.b.flag(7) == 1; }));
  for (std::uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(pair.b.flag(4 + i), 1u);
    EXPECT_TRUE(pair.arrived(100, 200 * i, 6000 + 200 * i));
  }
  EXPECT_EQ(control_->flushes, 2);
}

TEST_F(DirectTest, AFlushThatFailsOrIsNotTakenIsTriedAgain) {
  control_->hold_flushes = control_->refuse_flushes = true;
  Pair pair(setup());
  ASSERT_TRUE(pair.post(pair.write(3, 1, 1, 5000)));
  ASSERT_TRUE(pump_until(pair, [&] { return pair.a.completed.contains(1); }));
  poll(pair);
  control_->refuse_flushes = false;
  ASSERT_TRUE(pump_until(pair, [&] { return control_->flushes == 1; }));
  control_->end_flushes(ErrorCode::kLinkDown);
  ASSERT_TRUE(pump_until(pair, [&] { return control_->flushes == 2; }));
  EXPECT_EQ(pair.b.flag(3), 0u);
  control_->end_flushes();
  ASSERT_TRUE(pump_until(pair, [&] { return pair.b.flag(3) == 1; }));
  EXPECT_TRUE(pair.arrived(5000));
}

// The GPU of one buffer is dead. Arrivals in another go on.
TEST_F(DirectTest, ABufferWhoseFlushesFailHoldsUpNoOther) {
  for (const bool deregistered : {false, true}) {
    control_->hold_flushes = true;
    control_->flushes = control_->dead_flushes = 0;
    Pair pair(setup());
    const Memory other = pair.b.memory(8192);
    const auto remote = import(pair.a, pair.link, other);
    const auto arrives_in_other = [&](std::uint32_t flag) {
      const Write write = make_write(pair.link, flag, 1, flag, pair.source, 0, *remote, 0, 100);
      return pair.post(write) && pump_until(pair, [&] { return pair.b.flag(flag) == 1; }) &&
             std::memcmp(other.data(), pair.source.data(), 100) == 0;
    };
    ASSERT_TRUE(pair.post(pair.write(3, 1, 1, 5000)));
    ASSERT_TRUE(pump_until(pair, [&] { return control_->flushes == 1; }));
    control_->dead = control_->under_way.front().shadow;
    if (deregistered) {
      std::thread control([&] { pair.target.region.reset(); });
      std::this_thread::sleep_for(std::chrono::milliseconds{20});
      control_->hold_flushes = false;
      EXPECT_TRUE(arrives_in_other(4));
      control.join();
      EXPECT_EQ(control_->dead_flushes, 1) << "nobody is left for whom to try again";
    } else {
      control_->hold_flushes = false;
      EXPECT_TRUE(arrives_in_other(4));
      EXPECT_TRUE(pump_until(pair, [&] { return control_->dead_flushes == 5; }));
    }
    for (std::uint32_t flag = 5; flag < 9; ++flag) EXPECT_TRUE(arrives_in_other(flag));
    // Given up: what comes is lost, and holds up nobody either.
    if (!deregistered) {
      EXPECT_TRUE(pair.post(pair.write(9, 1, 99, 100)));
    }
    EXPECT_TRUE(arrives_in_other(10));
    poll(pair);
    EXPECT_EQ(control_->dead_flushes, deregistered ? 1 : 5);
    EXPECT_EQ(pair.b.flag(3), 0u);
    EXPECT_EQ(pair.b.flag(9), 0u);
    control_->dead.reset();
  }
}

TEST_F(DirectTest, WhereNoDmabufWorksTheModuleDoesAndElseItIsStaged) {
  const auto expect_works = [&](const std::string& path, const std::string& why) {
    Pair pair(setup());
    EXPECT_EQ(pair.target.region->gpu_path, path);
    EXPECT_NE(pair.target.region->gpu_path_why.find(why), std::string::npos)
        << pair.target.region->gpu_path_why;
    EXPECT_EQ(pair.b.endpoint->gpu_path(), path);
    ASSERT_TRUE(pair.post(pair.write(3, 1, 1, 5000, 1, 2)));
    ASSERT_TRUE(pump_until(pair, [&] { return pair.b.flag(3) == 1; }));
    EXPECT_TRUE(pair.arrived(5000, 1, 2));
  };
  control_->takes_dmabufs = false;
  expect_works("by the peer-memory module", "");
  EXPECT_EQ(control_->by_module, 2);
  control_->has_module = false;
  expect_works("staged through host memory",
               "takes no dmabuf; by the peer-memory module: the test's NIC has no such");
  EXPECT_EQ(control_->gone, 2);
}

TEST_F(DirectTest, ADirectBufferMayMeetAStagedOne) {
  for (const bool source_direct : {true, false}) {
    const FabricSetup both = setup();
    Node a(both);
    Node b(both);
    const TestLink link = join(a, b);
    control_->takes_dmabufs = control_->has_module = source_direct;
    const Memory source = a.memory(8192);
    control_->takes_dmabufs = control_->has_module = !source_direct;
    const Memory target = b.memory(8192);
    const auto remote = import(a, link, target);
    EXPECT_NE(source.region->gpu_path, target.region->gpu_path);
    fill_random({source.data(), 8192}, 5);
    const Write write = make_write(link, 1, 1, 1, source, 64, *remote, 3, 8000);
    ASSERT_EQ(a.endpoint->post(link.id, {&write, 1}), 1u);
    ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(1) == 1 && a.completed.contains(1); }));
    EXPECT_EQ(0, std::memcmp(source.data() + 64, target.data() + 3, 8000));
  }
}

TEST_F(DirectTest, ADaemonWithoutCudaServesByDmabuf) {
  FabricSetup one = setup();
  StagedOptions options;
  options.open_carrier = [carrier = *one.carrier] { return carrier.open_rail(); };
  options.load_gpu_driver = []() -> Result<std::shared_ptr<gpu::Driver>> {
    return fail(ErrorCode::kUnavailable, "there is no CUDA driver on this machine");
  };
  auto plain = one.open_rail();
  ASSERT_TRUE(plain);
  const auto endpoint = make_staged_endpoint(std::move(*plain), std::move(options));
  const auto memory = gpu::Allocation::create(one.gpus->ranks, 0, 4096);
  const auto dmabuf = memory->dmabuf();
  ASSERT_TRUE(dmabuf);
  auto region = endpoint->register_memory(
      {.bytes = 4096, .device = memory->key(), .dmabuf = dmabuf->fd.get()});
  ASSERT_TRUE(region) << region.error().message;
  EXPECT_EQ((*region)->gpu_path, "by dmabuf");
  // And lets it go at once.
  EXPECT_EQ(control_->gone, 0);
  region->reset();
  EXPECT_EQ(control_->gone, 1);
}

TEST_F(DirectTest, DeregisteringWaitsForTheFlush) {
  control_->hold_flushes = true;
  Pair pair(setup());
  ASSERT_TRUE(pair.post(pair.write(1, 1, 1, 8000)));
  ASSERT_TRUE(pump_until(pair, [&] { return control_->flushes == 1; }));
  std::thread control([&] { pair.target.region.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  EXPECT_EQ(control_->gone, 0);
  control_->end_flushes();
  for (int i = 0; i < 4; ++i) pair.b.poll_endpoint();
  control.join();
  EXPECT_EQ(control_->gone, 1);
  EXPECT_EQ(pair.b.flag(1), 1u);
}

}  // namespace
}  // namespace mk::fabric
