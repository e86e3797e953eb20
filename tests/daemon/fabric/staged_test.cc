// GPU memory staged through the host, over a driver whose streams do their work when the test says
// so. Nothing is sent before it is copied out of the GPU. Nothing is shown before it is copied into
// the other one. Halves of writes find each other in whatever order they come.
#include <fstream>

#include "daemon/fabric/staged/receiver.h"
#include "tests/daemon/fabric/forwarding_nic.h"
#include "tests/daemon/fabric/gpu_pair.h"

namespace mk::fabric {
namespace {

/// Both contracts as the engine sees them, over real sockets.
std::vector<FabricSetup> setups() {
  return {with_gpus("unordered", ofi("net"), ofi("net")),
          with_gpus("ordered", FabricSetup{}, ofi("net"))};
}

class StagedTest : public FabricTest {
 protected:
  gpu::test::FakeDriver& driver() const { return *GetParam().gpus->daemons; }
  /// Everything but the GPUs gets on.
  static void poll_network(Node& a, Node& b) {
    for (int i = 0; i < 50; ++i) {
      a.poll_endpoint();
      b.poll_endpoint();
    }
  }
};

TEST_P(StagedTest, NothingIsSentOrShownBeforeItsCopyIsOver) {
  Pair pair(GetParam(), 1 << 16);
  Node& a = pair.a;
  Node& b = pair.b;
  constexpr std::uint32_t kBytes = 5'000;
  const std::vector<std::byte> untouched(kBytes, kPoison);
  ASSERT_TRUE(pair.post(pair.write(9, 1, 5, kBytes, 16, 4097)));
  poll_network(a, b);
  EXPECT_EQ(driver().copies(), 1u) << "out of the sender's GPU";
  EXPECT_TRUE(a.completed.empty());

  // The copy, and the word behind it.
  ASSERT_EQ(driver().run(), 2u);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (driver().copies() < 2 && std::chrono::steady_clock::now() < deadline) poll_network(a, b);
  EXPECT_EQ(driver().copies(), 2u) << "into the receiver's";
  poll_network(a, b);
  EXPECT_EQ(b.flag(9), 0u);
  EXPECT_EQ(0, std::memcmp(pair.target.data() + 4097, untouched.data(), kBytes));

  driver().run(1);
  poll_network(a, b);
  EXPECT_EQ(b.flag(9), 0u) << "the copy is over, but nobody has been told";
  EXPECT_TRUE(pair.arrived(kBytes, 16, 4097));
  driver().run();
  ASSERT_TRUE(pump({&a, &b}, [&] { return b.flag(9) == 1 && a.completed.contains(5); }));
  EXPECT_EQ(pair.target.data()[4096], kPoison);
  EXPECT_EQ(pair.target.data()[4097 + kBytes], kPoison);
}

// Images hold what ranks of all users compute.
TEST_P(StagedTest, ImagesAreLeftOutOfCoreDumps) {
  const Pair pair(GetParam(), 1 << 16);
  std::ifstream maps("/proc/self/smaps");
  std::size_t images = 0;
  bool image = false;
  for (std::string line; std::getline(maps, line);) {
    // A mapping begins with its addresses, and its flags end it.
    if (line.find('-') < line.find(' ')) image = line.find("mkernel-staging") != std::string::npos;
    if (!image || !line.starts_with("VmFlags:")) continue;
    ++images;
    EXPECT_NE((line + ' ').find(" dd "), std::string::npos) << line;
  }
  EXPECT_GE(images, 2u);
}

TEST_P(StagedTest, HostMemoryGoesAsItWouldWithoutGpus) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  const auto host = [](Node& node) {
    auto file = shm::BufferFile::create("fabric-test", 8192);
    auto region = node.endpoint->register_memory({file->data(), file->bytes(), file->fd(), 0});
    const std::uint64_t size = file->bytes();
    return Memory{std::move(*file), std::nullopt, std::move(*region), size};
  };
  const Memory source = host(a);
  const Memory target = host(b);
  const Memory on_gpu = a.memory(8192);
  const Memory to_gpu = b.memory(8192);
  fill_random({source.data(), 8192}, 1);
  const auto remote = import(a, link, target);
  const auto remote_gpu = import(a, link, to_gpu);
  const Write good = make_write(link, 1, 1, 1, source, 0, *remote, 1, 5000);
  const Write up = make_write(link, 2, 1, 2, source, 0, *remote_gpu, 0, 100);
  const Write down = make_write(link, 3, 1, 3, on_gpu, 0, *remote, 0, 100);
  const Write alone = make_write(link, 4, 1, 4);
  ASSERT_TRUE(post_all(a, link.id, std::array{good, up, down, alone}, {&a, &b}));
  ASSERT_TRUE(pump({&a, &b}, [&] {
    return b.flag(1) == 1 && b.flag(4) == 1 && a.completed.size() == 2 && a.failed.size() == 2;
  }));
  EXPECT_EQ(0, std::memcmp(source.data(), target.data() + 1, 5000));
  EXPECT_TRUE(a.failed.contains(2) && a.failed.contains(3)) << "host and GPU memory do not mix";
  EXPECT_EQ(driver().copies(), 0u);
  EXPECT_EQ(b.flag(2), 0u);
}

TEST_P(StagedTest, WhatAGpuStillReadsIsNotReportedWhenTheLinkIsGivenUp) {
  Pair pair(GetParam());
  Node& a = pair.a;
  Node& b = pair.b;
  ASSERT_TRUE(pair.post(pair.write(1, 1, 1, 8000)));
  a.endpoint->disconnect(pair.link.id);
  poll_network(a, b);
  EXPECT_EQ(a.total(a.failed) + a.total(a.completed), 0u);
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.failed.contains(1); }));
  EXPECT_EQ(b.flag(1), 0u);
  EXPECT_TRUE(a.links_down.empty());
}

TEST_P(StagedTest, DeregisteringWaitsForCopiesIntoTheBuffer) {
  Pair pair(GetParam());
  Node& a = pair.a;
  Node& b = pair.b;
  ASSERT_TRUE(pair.post(pair.write(1, 1, 1, 8000)));
  a.poll_endpoint();
  ASSERT_EQ(driver().run(), 2u);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (driver().copies() < 2 && std::chrono::steady_clock::now() < deadline) poll_network(a, b);
  ASSERT_EQ(driver().copies(), 2u);
  std::atomic<bool> gone{false};
  std::thread control([&] {
    pair.target.region.reset();
    gone.store(true);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  EXPECT_FALSE(gone.load());
  b.poll_endpoint();
  driver().run();
  b.poll_endpoint();
  control.join();
  EXPECT_EQ(b.flag(1), 1u);
}

TEST_P(StagedTest, AGpuThatFailsFailsItsWritesAndShowsNothing) {
  Pair pair(GetParam());
  Node& a = pair.a;
  Node& b = pair.b;
  driver().fail_copies = true;
  ASSERT_TRUE(pair.post(pair.write(1, 1, 1, 8000)));
  ASSERT_TRUE(pump({&a, &b}, [&] { return a.failed.contains(1); }));
  driver().fail_copies = false;
  EXPECT_EQ(b.flag(1), 0u);
  EXPECT_TRUE(a.links_down.empty()) << "the network is well";
}

TEST_P(StagedTest, BuffersLeaveNothingBehind) {
  {
    Node a(GetParam());
    Node b(GetParam());
    const TestLink link = join(a, b);
    for (std::uint32_t round = 1; round <= 200; ++round) {
      const Memory source = a.memory(4096);
      const Memory target = b.memory(4096);
      const auto remote = import(a, link, target);
      const Write write = make_write(link, 1, round, round, source, 0, *remote, 0, 4096);
      ASSERT_EQ(a.endpoint->post(link.id, {&write, 1}), 1u);
      ASSERT_TRUE(
          pump({&a, &b}, [&] { return b.flag(1) == round && a.completed.contains(round); }));
    }
  }
  EXPECT_EQ(driver().views(), 0u);
  EXPECT_EQ(driver().pinned(), 0u);
}

TEST_P(StagedTest, ABufferWithoutADriverOrBeyondTheLimitIsRefused) {
  FabricSetup setup = GetParam();
  StagedOptions options;
  options.open_carrier = [carrier = *setup.carrier] { return carrier.open_rail(); };
  options.load_gpu_driver = []() -> Result<std::shared_ptr<gpu::Driver>> {
    return fail(ErrorCode::kUnavailable, "there is no CUDA driver on this machine");
  };
  auto plain = setup.open_rail();
  ASSERT_TRUE(plain);
  const auto none = make_staged_endpoint(std::move(*plain), std::move(options));
  const auto refused = none->register_memory({.bytes = 4096, .device = gpu::MemoryKey{}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(refused.error().message.find("no CUDA driver"), std::string::npos);

  Node node(setup);
  EXPECT_EQ(node.endpoint->capabilities().gpu_regions_max, staged::kRegionsMax);
  std::vector<Memory> many;
  for (std::uint32_t i = 0; i < staged::kRegionsMax; ++i) many.push_back(node.memory(4096));
  EXPECT_THROW((void)node.memory(4096), std::runtime_error);
  many.pop_back();
  EXPECT_NO_THROW((void)node.memory(4096));
}

/// Reaches nobody, and takes its time to find out.
class DeafNic final : public ForwardingNic {
 public:
  DeafNic(std::unique_ptr<Endpoint> real, int& tries)
      : ForwardingNic(std::move(real)), tries_(tries) {}
  Result<LinkId> connect_peer(PeerNumber, std::span<const std::byte>,
                              const std::string& peer_name) override {
    return fail(ErrorCode::kTimeout, "try {}: {} does not answer", ++tries_, peer_name);
  }

 private:
  int& tries_;
};

TEST_P(StagedTest, APeerWhoseSecondEndpointDoesNotAnswerCostsOneWait) {
  int tries = 0;
  FabricSetup setup = GetParam();
  setup.carrier = std::make_shared<FabricSetup>(*setup.carrier);
  setup.carrier->opener = [real = *GetParam().carrier,
                           &tries]() -> Result<std::unique_ptr<Endpoint>> {
    MK_ASSIGN_OR_RETURN(auto endpoint, real.open_rail());
    return std::make_unique<DeafNic>(std::move(endpoint), tries);
  };
  Node a(setup);
  Node b(GetParam());
  const Memory one = b.memory(4096), other = b.memory(4096);
  const TestLink link = join(a, b);
  for (const Memory* target : {&one, &other, &one}) {
    const auto refused = a.endpoint->import_region(link.id, target->region->key());
    ASSERT_FALSE(refused);
    EXPECT_NE(refused.error().message.find("try 1: "), std::string::npos)
        << refused.error().message;
  }
  EXPECT_EQ(tries, 1);
  const TestLink another = join(a, b);  // of which nothing is known
  EXPECT_FALSE(a.endpoint->import_region(another.id, one.region->key()));
  EXPECT_EQ(tries, 2);
}

TEST_P(StagedTest, AnEndpointTellsOfTheBuffersThatAreThere) {
  Node node(GetParam());
  EXPECT_EQ(node.endpoint->gpu_path(), "");
  {
    const Memory one = node.memory(4096), other = node.memory(4096);
    EXPECT_EQ(node.endpoint->gpu_path(), "staged through host memory");
  }
  EXPECT_EQ(node.endpoint->gpu_path(), "");
}

// As many as hang: for the first it waits, in case its copy ends; the others are let go of at once.
TEST(StagedRegionTest, OfBuffersThatHangOnlyTheFirstIsWaitedFor) {
  staged::RegionTable table;
  std::vector<std::shared_ptr<staged::Region>> regions;
  for (int i = 0; i < 20; ++i) {
    regions.push_back(std::make_shared<staged::Region>(
        shm::BufferFile::create("test", staged::kImageOffset).value()));
    ASSERT_TRUE(table.add(regions.back()));
    ASSERT_TRUE(regions.back()->hold());
  }
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& region : regions) table.remove(*region);
  const auto took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took, std::chrono::milliseconds(900));
  EXPECT_LT(took, std::chrono::seconds(10)) << "twenty waits of a second";
  for (const auto& region : regions) {
    EXPECT_EQ(table.find(region->number), nullptr);
    EXPECT_FALSE(region->hold());
  }
}

INSTANTIATE_TEST_SUITE_P(Contracts, StagedTest, testing::ValuesIn(setups()), setup_name);

// -- the receiver alone -------------------------------------------------------------------------

class ReceiverTest : public testing::Test {
 protected:
  ReceiverTest() {
    auto memory = gpu::Allocation::create(driver_, 0, kBytes);
    region_ = std::make_shared<staged::Region>(
        std::move(*shm::BufferFile::create("staging", staged::kImageOffset + kBytes)));
    region_->bytes = kBytes;
    region_->view = std::move(*gpu::View::open(driver_, 0, memory->key()));
    region_->gpu_slot = *copier_.use(0);
    region_->image = region_->memory.data() + staged::kImageOffset;
    EXPECT_TRUE(regions_->add(region_));
    memory_.emplace(std::move(*memory));
  }
  ~ReceiverTest() override { copier_.stop(); }
  static constexpr PeerNumber kPeer = 3;

  void put(const staged::Record& record) {
    std::memcpy(region_->memory.data() + record.flag_index * sizeof record, &record, sizeof record);
  }
  void half(bool record, std::uint32_t flag, std::uint8_t nonce) {
    receiver_.arrived(staged::Half{record, region_->number, flag, nonce}.pack(), kPeer);
  }
  std::vector<std::uint32_t> shown() {
    copier_.mark();
    std::array<Event, 16> events;
    const std::size_t count = receiver_.report(0, events);
    std::vector<std::uint32_t> immediates;
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(events[i].peer, kPeer) << "whom it came from";
      immediates.push_back(events[i].immediate);
    }
    return immediates;
  }

  static constexpr std::uint64_t kBytes = 1 << 16;
  const std::shared_ptr<gpu::test::FakeDriver> driver_ =
      std::make_shared<gpu::test::FakeDriver>(std::make_shared<gpu::test::FakeMachine>());
  GpuCopier copier_{[this]() -> Result<std::shared_ptr<gpu::Driver>> { return driver_; }};
  std::optional<gpu::Allocation> memory_;
  std::shared_ptr<staged::Region> region_;
  const std::shared_ptr<staged::RegionTable> regions_ = std::make_shared<staged::RegionTable>();
  staged::Receiver receiver_{copier_, regions_, nullptr,
                             [](const LocalRegion&, std::uint64_t) { return false; }};
};

TEST_F(ReceiverTest, HalvesMeetInEitherOrderAndOnlyTheirOwn) {
  put({0, 100, 50, 3, 1, 77});
  half(true, 3, 1);
  EXPECT_TRUE(shown().empty());
  half(false, 3, 1);
  EXPECT_EQ(shown(), std::vector<std::uint32_t>{77});
  // The data of a write whose record was lost with its link, then the next write's record first.
  half(false, 3, 2);
  put({0, 200, 50, 3, 2, 78});
  half(true, 3, 3);
  EXPECT_TRUE(shown().empty()) << "its data is not there yet";
  half(false, 4, 3);
  EXPECT_TRUE(shown().empty()) << "another flag's";
  half(false, 3, 3);
  EXPECT_EQ(shown(), std::vector<std::uint32_t>{78});
}

TEST_F(ReceiverTest, RecordsThatCannotBeAreDropped) {
  const staged::Record bad[] = {{0, kBytes, 1, 0, 1, 0},
                                {0, kBytes - 10, 11, 0, 1, 0},
                                {0, UINT64_MAX - 1, 4, 0, 1, 0},
                                {0, 0, 0, 0, 1, 0}};
  std::uint64_t lost = 0;
  for (const staged::Record& record : bad) {
    put(record);
    half(true, 0, 1);
    half(false, 0, 1);
    EXPECT_TRUE(shown().empty());
    EXPECT_EQ(receiver_.lost(), ++lost);
  }
  put({0, 0, 16, 6, 1, 0});  // says that it is another flag's
  std::memcpy(region_->memory.data() + 5 * sizeof(staged::Record),
              region_->memory.data() + 6 * sizeof(staged::Record), sizeof(staged::Record));
  half(true, 5, 1);
  half(false, 5, 1);
  EXPECT_EQ(receiver_.lost(), ++lost);
  receiver_.arrived(staged::Half{true, region_->number + 1, 0, 1}.pack(), kPeer);
  EXPECT_EQ(receiver_.lost(), ++lost) << "no such buffer";
  EXPECT_EQ(driver_->copies(), 0u);
}

TEST(StagedWireTest, AHalfSurvivesItsThirtyTwoBits) {
  for (const staged::Half& half :
       {staged::Half{true, 127, 65535, 255}, staged::Half{}, staged::Half{false, 1, 2, 3},
        staged::Half{true, 64, 32768, 1}}) {
    const staged::Half back = staged::Half::unpack(half.pack());
    EXPECT_EQ(back.record, half.record);
    EXPECT_EQ(back.region, half.region);
    EXPECT_EQ(back.flag_index, half.flag_index);
    EXPECT_EQ(back.nonce, half.nonce);
  }
}

}  // namespace
}  // namespace mk::fabric
