// Messages: what is written is read; whatever is short, long or oversize is refused.
#include "shm/host/protocol.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace mk::shm {
namespace {

using Bytes = std::vector<std::byte>;

/// Fills a message's fields with seeded values; sizes stay small so that every truncation can be
/// tried.
class Filler {
 public:
  explicit Filler(std::uint64_t seed) : random_(seed) {}

  template <class T>
  T number() {
    switch (random_() % 4) {
      case 0:
        return T{};
      case 1:
        return static_cast<T>(~T{});
      default:
        return static_cast<T>(random_());
    }
  }
  ErrorCode code() { return static_cast<ErrorCode>(random_() % 20); }
  std::string text() {
    std::string value(random_() % 40, '\0');
    for (char& c : value) c = static_cast<char>(random_());
    return value;
  }
  Bytes blob() {
    Bytes value(random_() % 60);
    for (std::byte& b : value) b = static_cast<std::byte>(random_());
    return value;
  }
  std::vector<Bytes> blobs() {
    std::vector<Bytes> value(random_() % 6);
    for (Bytes& b : value) b = blob();
    return value;
  }

 private:
  std::mt19937_64 random_;
};

template <class M>
M filled(std::uint64_t seed);

template <>
ErrorReply filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.code(), std::string(seed % 50, 'e')};
}
template <>
Hello filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.number<std::uint16_t>(), f.number<std::uint16_t>(), f.text()};
}
template <>
HelloReply filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.number<std::uint16_t>(), f.number<std::uint16_t>(), f.number<std::uint64_t>(),
          f.text()};
}
template <>
Attach filled(std::uint64_t seed) {
  Filler f(seed);
  Attach m;
  m.job = f.text();
  for (std::uint32_t* field :
       {&m.rank, &m.world, &m.node_rank, &m.nodes, &m.local_rank, &m.local_size, &m.lane_count,
        &m.slot_count_log2, &m.flag_count, &m.timeout_ms}) {
    *field = f.number<std::uint32_t>();
  }
  return m;
}
template <>
AttachReply filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.number<std::uint32_t>(), f.number<std::uint32_t>(), f.number<std::uint64_t>(),
          f.text()};
}
template <>
JobUp filled(std::uint64_t) {
  return {};
}
template <>
RegisterBuffer filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.number<std::uint64_t>(), f.text()};
}
template <>
RegisterDeviceBuffer filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.number<std::uint64_t>(), f.text(), f.blob()};
}
template <>
RegisterDmabuf filled(std::uint64_t seed) {
  Filler f(seed);
  return {{f.number<std::uint64_t>(), f.text(), f.blob()}, f.number<std::uint64_t>()};
}
template <>
Retire filled(std::uint64_t seed) {
  Filler f(seed);
  Retire m{f.number<std::uint16_t>(), f.number<std::uint32_t>(), {}};
  for (std::uint64_t i = 0; i < seed % 9; ++i)
    m.peers.push_back({f.number<std::uint32_t>(), f.number<std::uint16_t>()});
  return m;
}
template <>
RegisterBufferReply filled(std::uint64_t seed) {
  return {Filler(seed).number<std::uint16_t>()};
}
template <>
DeregisterBuffer filled(std::uint64_t seed) {
  return {Filler(seed).number<std::uint16_t>()};
}
template <>
AllocFlags filled(std::uint64_t seed) {
  return {Filler(seed).number<std::uint32_t>()};
}
template <>
AllocFlagsReply filled(std::uint64_t seed) {
  return {Filler(seed).number<std::uint32_t>()};
}
template <>
Exchange filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.text(), f.blob(), f.number<std::uint32_t>()};
}
template <>
ExchangeReply filled(std::uint64_t seed) {
  return {Filler(seed).blobs()};
}
template <>
OpenPeerBuffer filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.number<std::uint32_t>(), f.number<std::uint16_t>()};
}
template <>
OpenPeerBufferReply filled(std::uint64_t seed) {
  return {Filler(seed).number<std::uint64_t>()};
}
template <>
Detach filled(std::uint64_t) {
  return {};
}
template <>
Done filled(std::uint64_t) {
  return {};
}
template <>
SessionFailed filled(std::uint64_t seed) {
  Filler f(seed);
  return {f.code(), std::string(seed % 50, 's')};
}

template <class M>
class EveryMessage : public testing::Test {};
using Messages =
    testing::Types<ErrorReply, Hello, HelloReply, Attach, AttachReply, JobUp, RegisterBuffer,
                   RegisterBufferReply, DeregisterBuffer, AllocFlags, AllocFlagsReply, Exchange,
                   ExchangeReply, OpenPeerBuffer, OpenPeerBufferReply, Detach, Done, SessionFailed,
                   RegisterDeviceBuffer, RegisterDmabuf, Retire>;
TYPED_TEST_SUITE(EveryMessage, Messages);

TYPED_TEST(EveryMessage, RoundTrips) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const Bytes bytes = encode_message(filled<TypeParam>(seed));
    const auto received = decode_message<TypeParam>(bytes);
    ASSERT_TRUE(received) << received.error().message;
    // Different messages have different bytes (abi_messages_test.cc), so equal bytes are equal
    // messages.
    EXPECT_EQ(encode_message(*received), bytes) << seed;
  }
}

TYPED_TEST(EveryMessage, EveryTruncationIsRefused) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const Bytes bytes = encode_message(filled<TypeParam>(seed));
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      // A copy of just that size, so that a read beyond it is seen by the sanitizer.
      const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      const auto received = decode_message<TypeParam>(cut);
      ASSERT_FALSE(received) << size << " of " << bytes.size();
      EXPECT_EQ(received.error().code, ErrorCode::kProtocol);
      EXPECT_NE(received.error().message.find(
                    message_type_name(static_cast<std::uint16_t>(TypeParam::kType))),
                std::string::npos)
          << received.error().message;
    }
  }
}

TYPED_TEST(EveryMessage, BytesLeftOverAreRefused) {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    Bytes bytes = encode_message(filled<TypeParam>(seed));
    bytes.push_back(std::byte{0});
    const auto received = decode_message<TypeParam>(bytes);
    ASSERT_FALSE(received);
    // A message whose last field may be absent takes the byte for the beginning of that field.
    const bool may_be_absent = std::is_same_v<TypeParam, Attach>;
    const char* const expected = may_be_absent ? "cut short" : "left over";
    EXPECT_NE(received.error().message.find(expected), std::string::npos)
        << received.error().message;
  }
}

// Daemons before ABI 1.4 read up to the secret, and those before know of none: what an Attach does
// not say takes no byte.
TEST(AttachTail, IsThereAsFarAsItSaysSomething) {
  Attach attach = filled<Attach>(1);
  const std::size_t without = encode_message(attach).size();
  attach.secret = "between us";
  const std::size_t with_secret = encode_message(attach).size();
  attach.gpu = "0000:1b:00.0";
  attach.rail = 3;
  Bytes bytes = encode_message(attach);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    const auto received = decode_message<Attach>(std::span(bytes).first(size));
    ASSERT_EQ(received.has_value(), size == without || size == with_secret || size == bytes.size())
        << size;
    if (!received) continue;
    EXPECT_EQ(received->secret, size == without ? "" : "between us");
    EXPECT_EQ(received->gpu, size == bytes.size() ? "0000:1b:00.0" : "");
    EXPECT_EQ(received->rail, size == bytes.size() ? 3u : kAnyRail);
  }
  bytes.push_back(std::byte{0});
  const auto received = decode_message<Attach>(bytes);
  ASSERT_FALSE(received);
  EXPECT_NE(received.error().message.find("left over"), std::string::npos)
      << received.error().message;
}

TEST(AttachTail, OfAnyPartsIsReadAsItWasWritten) {
  for (const char* secret : {"", "s"}) {
    for (const char* gpu : {"", "0000:1b:00.0"}) {
      for (const std::uint32_t rail : {0u, 15u, kAnyRail}) {
        Attach attach = filled<Attach>(2);
        attach.secret = secret;
        attach.gpu = gpu;
        attach.rail = rail;
        const auto received = decode_message<Attach>(encode_message(attach));
        ASSERT_TRUE(received) << received.error().message;
        EXPECT_EQ(received->secret, secret);
        EXPECT_EQ(received->gpu, gpu);
        EXPECT_EQ(received->rail, rail);
      }
    }
  }
}

TYPED_TEST(EveryMessage, RandomBytesAreRefusedOrReadAsTheyAre) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 3000; ++i) {
    Bytes bytes(random() % 80);
    for (std::byte& byte : bytes)
      byte = static_cast<std::byte>(random() % 3 == 0 ? random() : random() % 4);
    const auto received = decode_message<TypeParam>(bytes);
    if (received) {
      EXPECT_EQ(encode_message(*received), bytes);
    }
  }
}

TYPED_TEST(EveryMessage, HasAName) {
  EXPECT_EQ(message_type_name(static_cast<std::uint16_t>(TypeParam::kType)).find("unknown"),
            std::string::npos);
}

TEST(MessageNames, UnknownTypesAreSaid) {
  EXPECT_EQ(message_type_name(0), "unknown(0)");
  EXPECT_EQ(message_type_name(77), "unknown(77)");
}

template <class M>
void expect_too_long(const M& message) {
  const auto received = decode_message<M>(encode_message(message));
  ASSERT_FALSE(received);
  EXPECT_EQ(received.error().code, ErrorCode::kProtocol);
  EXPECT_NE(received.error().message.find("too long"), std::string::npos)
      << received.error().message;
}

TEST(MessageLimits, StringsAndBlobsAboveTheirLimitAreRefused) {
  const std::string name(kNameBytesMax, 'n');
  Attach attach;
  attach.job = std::string(kJobNameBytesMax, 'j');
  EXPECT_TRUE(decode_message<Attach>(encode_message(attach)));
  attach.job += 'j';
  expect_too_long(attach);
  attach.job = "j";
  attach.secret = std::string(kJobSecretBytesMax, 's');
  EXPECT_EQ(decode_message<Attach>(encode_message(attach))->secret, attach.secret);
  attach.secret += 's';
  expect_too_long(attach);
  // Without a secret, the field is not there; present and empty, it is malformed.
  attach.secret = "s";
  std::vector<std::byte> payload = encode_message(attach);
  attach.secret.clear();
  EXPECT_EQ(encode_message(attach).size() + 5, payload.size());
  payload.pop_back();
  payload[payload.size() - 4] = std::byte{0};
  EXPECT_FALSE(decode_message<Attach>(payload));
  EXPECT_TRUE(decode_message<Hello>(encode_message(Hello{1, 0, name})));
  expect_too_long(Hello{1, 0, name + 'n'});
  expect_too_long(HelloReply{1, 0, 1, name + 'n'});
  expect_too_long(AttachReply{1, 0, 1, name + 'n'});
  expect_too_long(RegisterBuffer{1, name + 'n'});
  EXPECT_TRUE(
      decode_message<Exchange>(encode_message(Exchange{name, Bytes(kExchangeBlobBytesMax), 1})));
  expect_too_long(Exchange{name + 'n', {}, 1});
  expect_too_long(Exchange{name, Bytes(kExchangeBlobBytesMax + 1), 1});
  EXPECT_TRUE(decode_message<ExchangeReply>(
      encode_message(ExchangeReply{{Bytes(kExchangeBlobBytesMax), {}}})));
  expect_too_long(ExchangeReply{{{}, Bytes(kExchangeBlobBytesMax + 1)}});
}

TEST(MessageLimits, SentencesForPeopleAreCutSoThatTheyAlwaysArrive) {
  std::string long_text;
  while (long_text.size() < 3 * kMessageTextBytesMax) long_text += "\u20ac";
  const auto error =
      decode_message<ErrorReply>(encode_message(ErrorReply{ErrorCode::kTimeout, long_text}));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, long_text.substr(0, kMessageTextBytesMax - kMessageTextBytesMax % 3));
  const auto failed =
      decode_message<SessionFailed>(encode_message(SessionFailed{ErrorCode::kTimeout, long_text}));
  ASSERT_TRUE(failed);
  EXPECT_EQ(failed->message, error->message);
  // From a peer that does not cut:
  Bytes bytes = encode_message(ErrorReply{ErrorCode::kTimeout, long_text});
  bytes.push_back(std::byte{'x'});
  bytes.push_back(std::byte{'x'});
  bytes.push_back(std::byte{'x'});
  const auto size = static_cast<std::uint32_t>(bytes.size() - 8);
  ASSERT_GT(size, kMessageTextBytesMax);
  std::memcpy(bytes.data() + 4, &size, sizeof size);
  EXPECT_FALSE(decode_message<ErrorReply>(bytes));
}

TEST(MessageLimits, AReplyHasAtMostAsManyBlobsAsAJobHasRanks) {
  const ExchangeReply most{std::vector<Bytes>(kWorldMax)};
  EXPECT_TRUE(decode_message<ExchangeReply>(encode_message(most)));
  EXPECT_FALSE(decode_message<ExchangeReply>(
      encode_message(ExchangeReply{std::vector<Bytes>(kWorldMax + 1)})));
}

TEST(MessageLimits, AHugeCountWithoutBytesIsRefusedAtOnce) {
  for (const std::uint32_t count : {1u, 1024u, 1025u, 0x7fffffffu, ~0u}) {
    Bytes bytes(4);
    std::memcpy(bytes.data(), &count, 4);
    EXPECT_FALSE(decode_message<ExchangeReply>(bytes));
    Bytes text(8);
    std::memcpy(text.data() + 4, &count, 4);
    EXPECT_FALSE(decode_message<ErrorReply>(text));
  }
}

}  // namespace
}  // namespace mk::shm
