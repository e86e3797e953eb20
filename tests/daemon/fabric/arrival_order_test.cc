// What every fabric promises of arrivals: a flag is never seen before the last byte of its data.
#include "tests/daemon/fabric/chunks.h"
#include "tests/daemon/fabric/hasty_nic.h"
#include "tests/daemon/fabric/sim_setups.h"

namespace mk::fabric {
namespace {

class ArrivalOrderTest : public FabricTest {};

TEST_P(ArrivalOrderTest, AFlagIsNeverSeenBeforeItsData) {
  Node a(GetParam());
  Node b(GetParam());
  const TestLink link = join(a, b);
  constexpr std::uint32_t kSlots = 8;
  constexpr std::uint32_t kSlotBytes = 96 * 1024 + 40;
  constexpr std::uint32_t kRounds = 25;
  const Memory source = a.memory(kSlots * kRounds * std::uint64_t{kSlotBytes});
  fill_random({source.data(), source.bytes()}, 3);
  const Memory target = b.memory(kSlots * kRounds * std::uint64_t{kSlotBytes});
  const auto remote = import(a, link, target);

  // The receiving proxy looks at the payload in the very moment the flag shows. It goes on when
  // the test ends early, until it is told to stop; and while completions may need its polls.
  std::uint32_t count = 0;
  std::atomic<bool> completed{false};
  std::jthread receiver([&](const std::stop_token& stop) {
    const auto deadline = std::chrono::steady_clock::now() + patience() * std::chrono::seconds(60);
    std::vector<bool> seen(kSlots * kRounds);
    while ((count < kSlots * kRounds || !completed) && !stop.stop_requested() &&
           std::chrono::steady_clock::now() < deadline) {
      if (b.poll() == 0) std::this_thread::yield();
      for (std::uint32_t i = 0; i < kSlots * kRounds; ++i) {
        if (seen[i] || b.flag(i) == 0) continue;
        seen[i] = true;
        ++count;
        const std::uint64_t at = i * std::uint64_t{kSlotBytes};
        EXPECT_EQ(checksum({source.data() + at, kSlotBytes}),
                  checksum({target.data() + at, kSlotBytes}))
            << i;
      }
    }
  });
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    std::vector<Write> batch;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      const std::uint32_t i = round * kSlots + slot;
      const std::uint64_t at = i * std::uint64_t{kSlotBytes};
      batch.push_back(make_write(link, i, 1, i, source, at, *remote, at, kSlotBytes));
    }
    ASSERT_TRUE(post_all(a, link.id, batch, {&a}));
  }
  EXPECT_TRUE(pump({&a}, [&] { return a.completed.size() == kSlots * kRounds && a.settled(); }));
  completed = true;
  receiver.join();
  EXPECT_EQ(count, kSlots * kRounds);
}

TEST_P(ArrivalOrderTest, AHundredThousandChunksArriveBeforeTheirFlags) {
  Node a(GetParam());
  Node b(GetParam());
  EXPECT_EQ(ChunkRun(a, b, chunk_count(GetParam())).run(), "");
}

// A machine that is too slow fails the test, and nothing else.
TEST_P(ArrivalOrderTest, ARunThatIsCutShortLeavesNothingUnderWay) {
  // libfabric's shm reads what an endpoint that has gone left behind, and dies of it.
  if (!GetParam().notices_death) GTEST_SKIP();
  for (const int limit_ms : {0, 1, 5, 20}) {
    Node a(GetParam());
    Node b(GetParam());
    const std::string wrong = ChunkRun(a, b, 1'000'000, std::chrono::milliseconds(limit_ms)).run();
    EXPECT_NE(wrong.find("arrived in time"), std::string::npos) << wrong;
  }
}

INSTANTIATE_TEST_SUITE_P(Fabrics, ArrivalOrderTest, testing::ValuesIn(all_setups()), setup_name);
#if !defined(MK_SOFT_NIC) && !defined(MK_SOFT_EFA)
INSTANTIATE_TEST_SUITE_P(Simulated, ArrivalOrderTest, testing::ValuesIn(sim_setups()), setup_name);

// The check itself, against a NIC that shows some flags before the last byte of their data.
TEST(ArrivalOrderOfAHastyNicTest, IsFoundToBeWrong) {
  for (FabricSetup setup : {all_setups()[0], sim_setups()[0], sim_setups()[1]}) {
    const auto control = std::make_shared<HastyControl>();
    setup.opener = [control, plain = setup] { return HastyNic::open(plain, control); };
    Node a(setup);
    Node b(setup);
    const std::string wrong = ChunkRun(a, b, 20'000).run();
    EXPECT_NE(wrong.find("was not whole when its flag showed"), std::string::npos)
        << setup.name << ": " << wrong;
  }
}
#endif

}  // namespace
}  // namespace mk::fabric
