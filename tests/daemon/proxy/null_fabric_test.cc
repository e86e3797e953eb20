#include "daemon/fabric/null_fabric.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "shm/limits.h"

namespace mk::fabric {
namespace {

TEST(NullFabric, CompletesWhatItTookInOrderOnTheNextPoll) {
  const auto endpoint = make_null_endpoint({});
  const LinkId first = endpoint->connect({}, "a").value();
  const LinkId second = endpoint->connect({}, "b").value();
  EXPECT_NE(first, second);
  EXPECT_EQ(endpoint->next_due_ns(), std::nullopt);
  std::array<Write, shm::kBatchMax> writes;
  for (std::size_t i = 0; i < writes.size(); ++i) writes[i].cookie = 100 + i;
  EXPECT_EQ(endpoint->post(second, writes), writes.size());
  EXPECT_EQ(endpoint->next_due_ns(), 0u);
  std::array<Event, 5> events;
  ASSERT_EQ(endpoint->poll(events), 5u);
  EXPECT_EQ(events[4].cookie, 104u);
  EXPECT_EQ(events[4].kind, Event::Kind::kCompleted);
  EXPECT_EQ(events[4].link, second);
  EXPECT_EQ(endpoint->poll(events), 3u);
  EXPECT_EQ(events[0].cookie, 105u);
  EXPECT_EQ(endpoint->poll(events), 0u);
}

TEST(NullFabric, TakesNoMoreThanItCanRemember) {
  const auto endpoint = make_null_endpoint({});
  const std::vector<Write> writes(shm::kBatchMax);
  std::size_t taken = 0;
  while (const std::size_t count = endpoint->post(0, writes)) taken += count;
  std::array<Event, 64> events;
  std::size_t completed = 0;
  while (const std::size_t count = endpoint->poll(events)) completed += count;
  EXPECT_EQ(completed, taken);
  EXPECT_EQ(endpoint->post(0, writes), writes.size());
}

TEST(NullFabric, RegistersAndImportsAnything) {
  const auto endpoint = make_null_endpoint({});
  const auto local = endpoint->register_memory({});
  ASSERT_TRUE(local);
  EXPECT_LE((*local)->key().size(), 256u);
  EXPECT_TRUE(endpoint->import_region(0, (*local)->key()));
  EXPECT_LE(endpoint->address().size(), 512u);
  EXPECT_EQ(endpoint->capabilities().name, "null");
}

}  // namespace
}  // namespace mk::fabric
