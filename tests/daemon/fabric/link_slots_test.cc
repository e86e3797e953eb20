// The links of an endpoint as the proxy thread walks them: each once, in turn, and none that is
// gone.
#include "daemon/fabric/link_slots.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "daemon/fabric/link_table.h"

namespace mk::fabric {
namespace {

struct Link : LinkBase {};

std::vector<LinkId> walk(const LinkTable<Link>& table, std::uint32_t first,
                         std::uint32_t* next = nullptr) {
  std::vector<LinkId> seen;
  const std::uint32_t then = table.each(first, [&](const Link& link) { seen.push_back(link.id); });
  if (next != nullptr) *next = then;
  return seen;
}

TEST(LinkSlots, AWalkBeginsAnywhereAndMeetsEachLinkOnce) {
  LinkTable<Link> table;
  std::vector<LinkId> all;
  EXPECT_TRUE(walk(table, 0).empty());
  for (std::uint32_t i = 0; i < shm::kNodesMax - 1; ++i) {
    const auto added = table.add(std::make_unique<Link>());
    ASSERT_TRUE(added);
    EXPECT_EQ(table.find((*added)->id), nullptr) << "not shown yet";
    table.publish(**added);
    EXPECT_EQ(table.find((*added)->id), *added);
    all.push_back((*added)->id);
  }
  for (std::uint32_t first = 0; first < kLinksMax; ++first) {
    std::vector<LinkId> expected = all;
    const auto middle = std::lower_bound(expected.begin(), expected.end(), first);
    std::rotate(expected.begin(), middle, expected.end());
    std::uint32_t next = 0;
    ASSERT_EQ(walk(table, first, &next), expected) << first;
    ASSERT_EQ(next, link_slot(expected.front() + 1)) << first;
  }
}

// Links come and go, more of them than there are slots; as many stay as a large job has.
TEST(LinkSlots, ATableGoesOnThroughManyLives) {
  LinkTable<Link> table;
  std::mt19937 random(3);
  std::set<LinkId> live;
  LinkId last = 0;
  for (std::uint32_t i = 0; i < 5 * kLinksMax; ++i) {
    if (live.size() < shm::kNodesMax) {
      const auto added = table.add(std::make_unique<Link>());
      ASSERT_TRUE(added) << i;
      EXPECT_TRUE(i == 0 || (*added)->id > last) << "a number is never used again";
      last = (*added)->id;
      table.publish(**added);
      live.insert(last);
    }
    if (live.size() == shm::kNodesMax || random() % 3 == 0) {
      const auto which = std::next(live.begin(), static_cast<long>(random() % live.size()));
      Link* const link = table.find(*which);
      ASSERT_NE(link, nullptr);
      link->closing = true;
      table.release(*link);
      live.erase(which);
    }
    if (i % 64 == 0) {
      auto seen = walk(table, i % kLinksMax);
      std::sort(seen.begin(), seen.end());
      ASSERT_EQ(seen, std::vector<LinkId>(live.begin(), live.end()));
    }
  }
}

TEST(LinkSlots, OneTooManyIsRefused) {
  LinkTable<Link> table;
  for (std::uint32_t i = 0; i < kLinksMax; ++i) ASSERT_TRUE(table.add(std::make_unique<Link>()));
  const auto refused = table.add(std::make_unique<Link>());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kLimitExceeded);
  EXPECT_NE(refused.error().message.find("2048 links"), std::string::npos)
      << refused.error().message;
}

}  // namespace
}  // namespace mk::fabric
