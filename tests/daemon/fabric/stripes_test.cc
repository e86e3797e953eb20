// What packs of blobs and rails of several NICs refuse; that they carry data is the conformance
// suite's business.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <set>

#include "daemon/fabric/striped/endpoint.h"
#include "daemon/fabric/striped/pack.h"

namespace mk::fabric {
namespace {

TEST(PackTest, BlobsComeBackAndNothingElseIsOne) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<Bytes> blobs(1 + random() % 5);
    for (Bytes& blob : blobs) {
      blob.resize(random() % 300);
      for (std::size_t i = 0; i < blob.size() / 2; ++i)
        blob[i] = static_cast<std::byte>(random() % 3);
    }
    Bytes packed = pack(blobs);
    EXPECT_EQ(unpack(packed, blobs.size()), blobs);
    EXPECT_FALSE(unpack(packed, blobs.size() + 1));
    EXPECT_FALSE(unpack(std::span(packed).first(random() % packed.size()), blobs.size()));
    packed.push_back(std::byte{0});
    EXPECT_FALSE(unpack(packed, blobs.size()));
    // Whatever bytes come, an answer comes, too.
    for (std::byte& byte : packed) byte = static_cast<std::byte>(random() % 4 == 0 ? random() : 0);
    (void)unpack(packed, blobs.size());
  }
  EXPECT_LT(pack({Bytes(368, std::byte{0}), Bytes(368, std::byte{0})}).size(), 32u);
}

EndpointConfig named(const std::string& fabric, const std::string& nics) {
  EndpointConfig config;
  config.fabric = fabric;
  config.provider = "net";
  config.bind_address = nics;
  return config;
}

TEST(StripedTest, ARailOfSeveralNicsIsOpenedByTheirNames) {
  const auto two = open_endpoint(named("ofi", "127.0.0.1+127.0.0.1"));
  if (!two && two.error().code == ErrorCode::kUnsupported) GTEST_SKIP() << two.error().message;
  ASSERT_TRUE(two) << two.error().message;
  const auto one = open_endpoint(named("ofi", "127.0.0.1"));
  ASSERT_TRUE(one) << one.error().message;
  EXPECT_EQ((*two)->capabilities().link_depth, 2 * (*one)->capabilities().link_depth);
  EXPECT_LE((*two)->address().size(), 512u);
  EXPECT_FALSE((*two)->connect((*one)->address(), "node 1 rail 0")) << "as many NICs on both sides";
  EXPECT_FALSE((*one)->connect((*two)->address(), "node 1 rail 0"));
  EXPECT_FALSE(open_endpoint(named("ofi", "127.0.0.1+")));
}

/// A NIC of a rail, whose links go down when a test says so.
class PlayedStripe final : public Endpoint {
 public:
  const Capabilities& capabilities() const override { return capabilities_; }
  Bytes address() const override { return Bytes(4, std::byte{1}); }
  Result<std::unique_ptr<LocalRegion>> register_memory(const MemoryDescriptor&) override {
    return fail(ErrorCode::kUnsupported, "it moves no data");
  }
  Result<LinkId> connect(std::span<const std::byte>, const std::string&) override {
    if (connecting) connecting();
    return next++;
  }
  void disconnect(LinkId link) override { given_up.insert(link); }
  Result<std::unique_ptr<RemoteRegion>> import_region(LinkId, std::span<const std::byte>) override {
    return fail(ErrorCode::kUnsupported, "it moves no data");
  }
  std::string link_reason(LinkId link) const override {
    const auto found = down.find(link);
    return found == down.end() ? std::string() : found->second;
  }
  std::size_t post(LinkId link, std::span<const Write> writes) override {
    posted.insert(link);
    return writes.size();
  }
  std::size_t poll(std::span<Event> events) override {
    std::size_t count = 0;
    for (const auto& [link, reason] : down) {
      if (count < events.size() && told.insert(link).second)
        events[count++] = {.kind = Event::Kind::kLinkDown, .link = link};
    }
    return count;
  }

  std::function<void()> connecting;
  LinkId next = 0;
  std::map<LinkId, std::string> down;  ///< with the reason
  std::set<LinkId> told, given_up, posted;

 private:
  const Capabilities capabilities_{};
};

TEST(StripedTest, AStripeThatGoesDownWhileAnotherConnectsConcernsTheNewLinkOnly) {
  std::vector<std::unique_ptr<Endpoint>> stripes;
  std::vector<PlayedStripe*> played;
  for (int i = 0; i < 2; ++i) {
    auto one = std::make_unique<PlayedStripe>();
    played.push_back(one.get());
    stripes.push_back(std::move(one));
  }
  auto made = make_striped_endpoint(std::move(stripes));
  ASSERT_TRUE(made) << made.error().message;
  Endpoint& rail = **made;
  const auto healthy = rail.connect(rail.address(), "node 1 rail 0");
  ASSERT_TRUE(healthy) << healthy.error().message;

  std::array<Event, 8> events;
  std::size_t seen = 0;
  played[1]->connecting = [&] {  // as the proxy does meanwhile
    played[0]->down[1] = "node 2 rail 0 is gone";
    seen += rail.poll(events);
  };
  const auto lost = rail.connect(rail.address(), "node 2 rail 0");
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(lost.error().message, "node 2 rail 0 is gone");
  for (int i = 0; i < 4; ++i) seen += rail.poll(events);
  EXPECT_EQ(seen, 0u) << "nothing has happened to node 1";
  for (const PlayedStripe* stripe : played) EXPECT_EQ(stripe->given_up, std::set<LinkId>{1});
  std::array<Write, 16> writes{};
  for (std::uint32_t i = 0; i < writes.size(); ++i) writes[i].flag_index = i;
  EXPECT_EQ(rail.post(*healthy, writes), writes.size());
  for (const PlayedStripe* stripe : played) EXPECT_EQ(stripe->posted, std::set<LinkId>{0});
}

TEST(StripedTest, AFlagHasOneStripeAndAllAreUsed) {
  for (std::uint32_t stripes = 2; stripes <= kStripesMax; ++stripes) {
    std::vector<int> load(stripes);
    for (std::uint32_t flag = 0; flag < 8 * stripes * 3; ++flag) {
      ASSERT_LT(stripe_of(flag, stripes), stripes);
      EXPECT_EQ(stripe_of(flag, stripes), stripe_of(flag & ~7u, stripes));
      ++load[stripe_of(flag, stripes)];
    }
    for (const int share : load) EXPECT_EQ(share, 24);
  }
}

}  // namespace
}  // namespace mk::fabric
