// A peer's buffers that take long to bind: its other messages come meanwhile, in any order that it
// may send them, and are taken in that order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/daemon/control/peer_messages_rig.h"

namespace mk::daemon::test {
namespace {

constexpr std::uint64_t kPart = 11;
constexpr std::uint64_t kExchanges = 6;

class SlowImports : public PeerMessages, public testing::WithParamInterface<std::uint32_t> {
 protected:
  void announce() {
    say(RegionAnnounce{"job", kPart, 1, next_handle, 4096, Bytes(8)});
    announced.push_back(next_handle++);
  }
  void withdraw_one() {
    if (announced.empty()) return;
    const auto one = announced.begin() + static_cast<std::ptrdiff_t>(random() % announced.size());
    say(RegionWithdraw{.job = "job", .part_id = kPart, .rank = 1, .handle = *one});
    announced.erase(one);
    ++withdrawn;
  }
  void exchange() {
    if (blobs.size() == kExchanges) return;
    blobs.emplace_back(random() % 64);
    for (std::byte& byte : blobs.back()) byte = static_cast<std::byte>(random());
    say(ExchangePart{"job", kPart, 1, blobs.size() - 1, "t", blobs.back()});
  }

  std::mt19937 random{GetParam()};
  std::uint16_t next_handle = 1;
  std::vector<std::uint16_t> announced;
  std::size_t withdrawn = 0;
  std::vector<Bytes> blobs;
};

TEST_P(SlowImports, KeepTheOrderOfWhatThePeerSays) {
  say(hello());
  node.nic->on_import = [&] { node.pass(250); };  // one uses up what an event may wait
  const ClientId client = node.attach(rank_of("job", 2, 1, 0));
  say(part_of("job", kPart, 2, 1, 1));
  const auto early = 2 + random() % 4;
  for (std::uint32_t i = 0; i < early; ++i) announce();
  say(JobReady{"job", kPart, own_part()});
  ASSERT_TRUE(node.take<shm::JobUp>(client));
  for (int i = 0; i < 40; ++i) {
    switch (random() % 8) {
      case 0:
        announce();
        break;
      case 1:
        node.wait(100);
        break;
      case 2:
      case 3:
      case 4:
        exchange();
        break;
      default:
        withdraw_one();
    }
  }
  while (blobs.size() != kExchanges) exchange();
  for (std::uint32_t i = 0; i < next_handle; ++i) node.wait(100);
  for (const Bytes& blob : blobs) {
    node.send(client, shm::Exchange{"t", bytes_of("ours"), 60'000});
    const auto reply = node.take<shm::ExchangeReply>(client);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->blobs, (std::vector<Bytes>{bytes_of("ours"), blob}));
  }
  node.step();
  EXPECT_EQ(sent<RegionWithdraw>().size(), withdrawn);
}

INSTANTIATE_TEST_SUITE_P(Seeds, SlowImports, testing::Range(0u, 32u));

}  // namespace
}  // namespace mk::daemon::test
