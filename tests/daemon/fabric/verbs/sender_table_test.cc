// The table by which the proxy thread knows whose queue pair an arrival came on: every peer there
// can be, every place, and the numbers at the ends.
#include "daemon/fabric/verbs/sender_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "shm/limits.h"

namespace mk::fabric::verbs {
namespace {

constexpr std::uint32_t kNumbers = 1u << 24;  ///< of queue pairs

class SenderTableTest : public ::testing::Test {
 protected:
  std::unique_ptr<SenderTable> table_ = std::make_unique<SenderTable>();
};

TEST_F(SenderTableTest, KnowsEveryPeer) {
  for (const std::uint32_t queue : {0u, 1u, 77u, (1u << 15) - 1, 1u << 15, kNumbers - 1}) {
    for (PeerNumber peer = 0; peer < shm::kNodesMax; ++peer) {
      ASSERT_TRUE(table_->add(queue, peer));
      ASSERT_EQ(table_->find(queue), peer) << queue;
      table_->remove(queue);
      ASSERT_EQ(table_->find(queue), kAnyPeer) << queue << ", " << peer;
    }
    ASSERT_TRUE(table_->add(queue, kAnyPeer));
    EXPECT_EQ(table_->find(queue), kAnyPeer);
    table_->remove(queue);
  }
}

// As many connections as an endpoint takes, of 8 queues each, whose numbers follow each other.
TEST_F(SenderTableTest, HoldsEveryQueueOfTheLargestJob) {
  constexpr std::uint32_t kQueues = 8;
  constexpr std::uint32_t kConnections = 2 * shm::kNodesMax;
  const auto peer_of = [](std::uint32_t i) { return i / kQueues % shm::kNodesMax; };
  for (const std::uint32_t first : {0u, 12345u, kNumbers - kConnections * kQueues}) {
    for (std::uint32_t i = 0; i < kConnections * kQueues; ++i)
      ASSERT_TRUE(table_->add(first + i, peer_of(i))) << i;
    for (std::uint32_t i = 0; i < kConnections * kQueues; ++i)
      ASSERT_EQ(table_->find(first + i), peer_of(i)) << i;
    for (std::uint32_t i = 0; i < kConnections * kQueues; i += 2) table_->remove(first + i);
    for (std::uint32_t i = 0; i < kConnections * kQueues; ++i)
      ASSERT_EQ(table_->find(first + i), i % 2 == 0 ? kAnyPeer : peer_of(i)) << i;
    for (std::uint32_t i = 1; i < kConnections * kQueues; i += 2) table_->remove(first + i);
  }
}

// Numbers that fall on one place go near it, and are told apart; a full neighbourhood refuses.
TEST_F(SenderTableTest, TellsQueuesOfOnePlaceApart) {
  constexpr std::uint32_t kPlaces = 1u << 15;
  std::vector<std::uint32_t> queues;
  for (std::uint32_t i = 0; i < 16; ++i) queues.push_back(kPlaces * i + kPlaces - 1);
  for (std::uint32_t i = 0; i < queues.size(); ++i) ASSERT_TRUE(table_->add(queues[i], 1023 - i));
  EXPECT_FALSE(table_->add(kPlaces * 17 + kPlaces - 1, 5));
  for (std::uint32_t i = 0; i < queues.size(); ++i) EXPECT_EQ(table_->find(queues[i]), 1023 - i);
  EXPECT_EQ(table_->find(kPlaces * 17 + kPlaces - 1), kAnyPeer);
  table_->remove(queues[3]);
  EXPECT_TRUE(table_->add(kPlaces * 17 + kPlaces - 1, 5));
  EXPECT_EQ(table_->find(kPlaces * 17 + kPlaces - 1), 5u);
  EXPECT_EQ(table_->find(queues[3]), kAnyPeer);
}

}  // namespace
}  // namespace mk::fabric::verbs
