// The loopback link's model on a clock that the test owns: when data may move, when it is seen,
// what a late poll costs.
#include "daemon/fabric/loopback/link.h"
#include "tests/daemon/fabric/fabric_fixture.h"

namespace mk::fabric {
namespace {

constexpr double kGigabyte = 1e9;  // one byte a nanosecond

TEST(LinkScheduleTest, ReservationsFollowEachOtherOnTheModelsClock) {
  loopback::LinkSchedule schedule({kGigabyte, 500});
  const auto first = schedule.reserve(1000, 100);
  EXPECT_EQ(first.start_ns, 1000u);
  EXPECT_EQ(first.end_ns, 1100u);
  EXPECT_EQ(first.arrival_ns, 1600u);
  const auto second = schedule.reserve(1010, 50);
  EXPECT_EQ(second.start_ns, 1100u);
  EXPECT_EQ(second.arrival_ns, 1650u);
  const auto after_a_pause = schedule.reserve(5000, 10);
  EXPECT_EQ(after_a_pause.start_ns, 5000u);
  const auto flag_only = schedule.reserve(5000, 0);
  EXPECT_EQ(flag_only.end_ns, 5010u);
  EXPECT_EQ(flag_only.arrival_ns, 5510u) << "it keeps its place behind the data";
}

TEST(LinkScheduleTest, RoundingDoesNotAccumulate) {
  loopback::LinkSchedule schedule({3e9, 0});  // a byte lasts a third of a nanosecond
  loopback::LinkSchedule::Times last{};
  for (int i = 0; i < 3'000'000; ++i) last = schedule.reserve(0, 1);
  EXPECT_NEAR(static_cast<double>(last.end_ns), 1e6, 2);
}

TEST(LinkScheduleTest, WithoutABandwidthOnlyTheLatencyCounts) {
  loopback::LinkSchedule schedule({0, 700});
  EXPECT_EQ(schedule.reserve(100, 1 << 30).arrival_ns, 800u);
}

class LinkModelTest : public testing::Test {
 protected:
  FabricSetup setup(double bytes_per_second, std::uint64_t latency_ns) {
    FabricSetup made;
    made.config.link_model = {bytes_per_second, latency_ns};
    made.loopback.now_ns = [this] { return now_; };
    return made;
  }
  std::uint64_t now_ = 1'000'000;
};

TEST_F(LinkModelTest, DataMovesInItsWindowAndTheFlagShowsOnArrival) {
  const FabricSetup model = setup(kGigabyte, 5'000);
  Node a(model);
  Node b(model);
  const TestLink link = join(a, b);
  const Memory source = a.memory(4096);
  const Memory target = b.memory(4096);
  fill_random({source.data(), 4096}, 1);
  const auto remote = import(a, link, target);
  const Write writes[] = {make_write(link, 0, 1, 1, source, 0, *remote, 0, 1000),
                          make_write(link, 1, 1, 2, source, 1000, *remote, 1000, 2000)};
  ASSERT_EQ(a.endpoint->post(link.id, writes), 2u);
  const std::uint64_t start = now_;
  const auto at = [&](std::uint64_t ns) {
    now_ = start + ns;
    a.poll();
  };

  at(999);
  EXPECT_FALSE(a.completed.contains(1)) << "its last byte has not left";
  EXPECT_EQ(target.data()[1000], kPoison) << "the second write's turn has not come";
  EXPECT_EQ(a.endpoint->next_due_ns(), start + 1000);
  at(1000);
  EXPECT_TRUE(a.completed.contains(1));
  EXPECT_EQ(0, std::memcmp(target.data(), source.data(), 3000));
  at(3000);
  EXPECT_TRUE(a.completed.contains(2));
  EXPECT_EQ(a.endpoint->next_due_ns(), start + 6000);
  at(5999);
  EXPECT_EQ(b.flag(0), 0u);
  at(6000);
  EXPECT_EQ(b.flag(0), 1u);
  EXPECT_EQ(b.flag(1), 0u);
  at(7999);
  EXPECT_EQ(b.flag(1), 0u);
  at(8000);
  EXPECT_EQ(b.flag(1), 1u);
  EXPECT_EQ(a.endpoint->next_due_ns(), std::nullopt);
}

TEST_F(LinkModelTest, LatePollsDoNotSlowALongTransfer) {
  const FabricSetup model = setup(kGigabyte, 1'000);
  Node a(model);
  Node b(model);
  const TestLink link = join(a, b);
  const Memory source = a.memory(65536);
  const Memory target = b.memory(65536);
  const auto remote = import(a, link, target);
  std::mt19937_64 random(1);
  const std::uint64_t start = now_;
  constexpr std::uint64_t kWrites = 2'000;
  std::uint64_t posted = 0;
  while (a.completed.size() < kWrites) {
    while (posted < kWrites) {  // as many as the link takes: that is what bridges the pauses
      const Write write = make_write(link, 0, 1, posted, source, 0, *remote, 0, 65536);
      if (a.endpoint->post(link.id, {&write, 1}) == 0) break;
      ++posted;
    }
    now_ += random() % 2'000'000;  // up to thirty writes late
    a.poll(256);
  }
  const double ideal = static_cast<double>(kWrites) * 65536;
  EXPECT_LT(static_cast<double>(now_ - start), 1.03 * ideal);
  EXPECT_GE(static_cast<double>(now_ - start), ideal);
}

TEST_F(LinkModelTest, LinksArePacedEachOnItsOwn) {
  const FabricSetup model = setup(kGigabyte, 0);
  Node a(model);
  Node b(model);
  const TestLink first = join(a, b);
  const TestLink second = join(a, b);
  const Memory source = a.memory(4096);
  const Memory target = b.memory(4096);
  const auto by_first = import(a, first, target);
  const auto by_second = import(a, second, target);
  const Write one = make_write(first, 0, 1, 1, source, 0, *by_first, 0, 1000);
  const Write two = make_write(second, 1, 1, 2, source, 0, *by_second, 0, 1000);
  ASSERT_EQ(a.endpoint->post(first.id, {&one, 1}), 1u);
  ASSERT_EQ(a.endpoint->post(second.id, {&two, 1}), 1u);
  now_ += 1000;
  a.poll();
  EXPECT_EQ(b.flag(0), 1u);
  EXPECT_EQ(b.flag(1), 1u) << "the first link's traffic does not delay the second's";
}

TEST_F(LinkModelTest, OnePollCopiesABoundedAmount) {
  const FabricSetup model = setup(0, 0);
  Node a(model);
  Node b(model);
  const TestLink link = join(a, b);
  constexpr std::uint32_t kBytes = 8 << 20;
  const Memory source = a.memory(kBytes);
  fill_random({source.data(), kBytes}, 1);
  const Memory target = b.memory(kBytes);
  const auto remote = import(a, link, target);
  const Write write = make_write(link, 0, 1, 1, source, 0, *remote, 0, kBytes);
  ASSERT_EQ(a.endpoint->post(link.id, {&write, 1}), 1u);
  int polls = 0;
  for (; a.completed.empty() && polls < 100; ++polls) {
    EXPECT_EQ(b.flag(0), 0u);
    a.poll();
  }
  EXPECT_EQ(polls, kBytes / loopback::kPollBytesMax);
  EXPECT_EQ(b.flag(0), 1u);
}

TEST_F(LinkModelTest, EndingTheEndpointShowsWhatWasReportedAsCompleted) {
  const FabricSetup model = setup(kGigabyte, 1'000'000);
  Node a(model);
  Node b(model);
  const TestLink link = join(a, b);
  const Write write = make_write(link, 0, 1, 1);
  ASSERT_EQ(a.endpoint->post(link.id, {&write, 1}), 1u);
  a.poll();
  ASSERT_EQ(a.completed.size(), 1u);
  ASSERT_EQ(b.flag(0), 0u);
  a.endpoint.reset();
  EXPECT_EQ(b.flag(0), 1u);
}

TEST_F(LinkModelTest, GivingUpShowsWhatWasReportedAsCompleted) {
  const FabricSetup model = setup(kGigabyte, 1'000'000);
  Node a(model);
  Node b(model);
  const TestLink link = join(a, b);
  const Write writes[] = {make_write(link, 0, 1, 1), make_write(link, 1, 1, 2)};
  ASSERT_EQ(a.endpoint->post(link.id, writes), 2u);
  a.poll(1);
  ASSERT_EQ(a.completed.size(), 1u);
  ASSERT_EQ(b.flag(0), 0u) << "still on its way";
  a.endpoint->disconnect(link.id);
  a.poll();
  EXPECT_EQ(b.flag(0), 1u);
  EXPECT_EQ(a.total(a.completed) + a.total(a.failed), 2u);
}

}  // namespace
}  // namespace mk::fabric
