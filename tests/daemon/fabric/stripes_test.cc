// What packs of blobs and rails of several NICs refuse; that they carry data is the conformance
// suite's business.
#include <gtest/gtest.h>

#include <random>

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
