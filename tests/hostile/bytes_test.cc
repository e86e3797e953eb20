// Any bytes in any field of any message: they cost at most the session that sent them.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "shm/host/text.h"
#include "tests/hostile/hostile_pair.h"

namespace mk::test {
namespace {

using daemon::test::SocketClient;

/// Fields as nobody would fill them in, now and then as somebody would.
class RandomFields {
 public:
  explicit RandomFields(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t end) { return random_() % end; }
  bool one_in(std::uint64_t count) { return below(count) == 0; }
  std::uint64_t number() {
    switch (below(4)) {
      case 0:
        return below(4);
      case 1:
        return (std::uint64_t{1} << below(64)) - below(2);
      case 2:
        return below(70'000);
      default:
        return random_();
    }
  }
  std::uint32_t small() { return static_cast<std::uint32_t>(number()); }
  std::uint16_t handle() { return static_cast<std::uint16_t>(one_in(2) ? below(8) : number()); }
  /// For a field of at most `limit` bytes: around its limit, far above it, or short.
  std::size_t length(std::size_t limit) {
    switch (below(8)) {
      case 0:
        return 0;
      case 1:
        return limit - below(2);
      case 2:
        return limit + 1;
      case 3:
        return one_in(16) ? 100'000 : below(2 * limit);
      default:
        return below(24);
    }
  }
  std::string text(std::size_t limit) {
    std::string text(length(limit), 'x');
    const std::uint64_t kind = below(4);
    for (char& c : text) {
      if (kind == 0 || (kind == 1 && one_in(8))) c = static_cast<char>(random_());
      if (kind == 2) c = static_cast<char>(' ' + below(95));
    }
    // Characters cut off, overlong, of half a pair; what terminals obey; ends of lines.
    static constexpr const char* kOdd[] = {"caf\xe9", "\xe2\x82", "\xc0\xaf", "\xed\xa0\x80",
                                           "\x1b[2J", "a\r\nb",   "\xf4\x90", "{}%s%n"};
    if (one_in(3)) text += kOdd[below(std::size(kOdd))];
    return text;
  }
  std::vector<std::byte> blob(std::size_t limit) {
    std::vector<std::byte> bytes(length(limit));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    return bytes;
  }

  struct Message {
    std::uint16_t type = 0;
    std::vector<std::byte> payload;
    bool with_file = false;
  };
  /// Of `kinds` of messages and some that are none. `within`: of a session that is up, which a
  /// malformed message would end at once.
  Message message(bool within) {
    Message message = well_formed(within);
    if (within && !one_in(64)) return message;
    if (one_in(4)) {
      for (std::uint64_t flips = below(4); flips > 0 && !message.payload.empty(); --flips) {
        message.payload[below(message.payload.size())] = static_cast<std::byte>(random_());
      }
    }
    if (one_in(16)) message.payload.resize(below(message.payload.size() + 8));
    if (one_in(16)) message.type = static_cast<std::uint16_t>(one_in(2) ? below(24) : random_());
    if (one_in(16)) message.with_file = !message.with_file;
    return message;
  }

 private:
  template <class M>
  static Message encoded(const M& message, bool with_file = false) {
    return {static_cast<std::uint16_t>(M::kType), shm::encode_message(message), with_file};
  }
  Message well_formed(bool within) {
    // Exchanges and buffers' names are what other daemons and ranks get to see.
    switch (below(within ? 9 : 13)) {
      case 0:
      case 1:
        return encoded(shm::Exchange{limited(shm::kNameBytesMax, within),
                                     blob(one_in(8) ? shm::kExchangeBlobBytesMax : 64),
                                     static_cast<std::uint32_t>(below(50))});
      case 2:
        return encoded(shm::RegisterBuffer{one_in(2) ? kFileBytes : number(),
                                           limited(shm::kNameBytesMax, within)},
                       true);
      case 3:
        return encoded(
            shm::RegisterDeviceBuffer{number(), limited(shm::kNameBytesMax, within), blob(128)});
      case 4:
        return encoded(
            shm::RegisterDmabuf{{number(), limited(shm::kNameBytesMax, within), blob(128)},
                                number()},
            true);
      case 5:
        return encoded(shm::DeregisterBuffer{handle()});
      case 6:
        return encoded(shm::AllocFlags{small()});
      case 7:
        return encoded(shm::OpenPeerBuffer{small(), handle()});
      case 8:
        return within ? encoded(shm::Exchange{"caf\xe9", {}, 1}) : encoded(shm::Detach{});
      case 9:
        return encoded(shm::Hello{one_in(4) ? static_cast<std::uint16_t>(number())
                                            : static_cast<std::uint16_t>(shm::kAbiMajor),
                                  static_cast<std::uint16_t>(number()),
                                  limited(shm::kNameBytesMax, !one_in(4))});
      case 10:
        return encoded(shm::ErrorReply{static_cast<ErrorCode>(number()), text(8'192)});
      case 11:
        return encoded(shm::SessionFailed{static_cast<ErrorCode>(number()), text(8'192)});
      default:
        return encoded(attach());
    }
  }
  shm::Attach attach() {
    shm::Attach attach;
    attach.job = one_in(4) ? text(shm::kJobNameBytesMax) : one_in(4) ? "healthy" : "any";
    const bool fits = one_in(2);
    attach.world = fits ? 2 : small();
    attach.nodes = fits ? 2 : small();
    attach.rank = fits ? static_cast<std::uint32_t>(below(2)) : small();
    attach.node_rank = fits ? attach.rank : small();
    attach.local_rank = fits ? 0 : small();
    attach.local_size = fits ? 1 : small();
    attach.lane_count = one_in(4) ? small() : 1;
    attach.slot_count_log2 = one_in(4) ? small() : 4;
    attach.flag_count = one_in(4) ? small() : 128;
    attach.timeout_ms = one_in(4) ? small() : static_cast<std::uint32_t>(below(300));
    attach.secret = one_in(4) ? text(shm::kJobSecretBytesMax) : "";
    return attach;
  }
  /// Within a session that is to live: not longer than the field.
  std::string limited(std::size_t limit, bool keep) {
    std::string one = text(limit);
    if (keep && one.size() > limit) one.resize(limit);
    return one;
  }

 public:
  static constexpr std::uint64_t kFileBytes = 4096;

 private:
  std::mt19937_64 random_;
};

class HostileBytes : public HostileTest {
 protected:
  HostileBytes() : file_(shm::BufferFile::create("hostile", RandomFields::kFileBytes).value()) {}

  /// How many messages: MK_HOSTILE_MESSAGES, or few.
  static std::uint64_t messages() {
    const char* const text = std::getenv("MK_HOSTILE_MESSAGES");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : 4'000;
  }
  /// False when the connection has ended.
  bool send(SocketClient& client, const RandomFields::Message& message) {
    const int fds[] = {file_.fd()};
    tried();
    return client.try_frame(message.type, message.payload,
                            std::span(fds).first(message.with_file ? 1 : 0)) &&
           client.drain();
  }

 private:
  const shm::BufferFile file_;
};

// Or the other cases would prove less than they say.
TEST_F(HostileBytes, ComeFromAnotherUserThanTheHealthyJobs) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be several users";
  const HostilePair pair(daemons());
  const auto shown = nlohmann::json::parse(sessions_shown(), nullptr, false);
  ASSERT_TRUE(shown.is_object());
  std::map<std::string, std::uint32_t> users;
  for (const auto& session : shown["sessions"]) users[session["job"]] = session.value("uid", 0u);
  ASSERT_TRUE(users.contains("healthy") && users.contains(pair.job)) << shown.dump();
  EXPECT_EQ(users[pair.job], kOtherUser);
  EXPECT_EQ(users["healthy"], 0u);
}

TEST_F(HostileBytes, InAnyFieldOfAnyMessageCostAtMostTheSessionThatSentThem) {
  RandomFields random(20'261'127);
  const std::uint64_t count = messages();
  constexpr std::uint64_t kLook = 100'000, kOfOneSession = 200, kOfOneStranger = 24;
  std::uint64_t sent = 0, next_look = kLook;
  while (sent < count && !HasFailure()) {
    {
      // One rank of a job that is up over both nodes: what it says goes on to the other daemon.
      HostilePair pair(daemons());
      SocketClient& guilty = pair.client(static_cast<std::uint32_t>(random.below(2)));
      for (std::uint64_t i = 0; i < kOfOneSession; ++i, ++sent) {
        if (!send(guilty, random.message(true))) break;
      }
    }
    for (int strangers = 0; strangers < 4; ++strangers) {
      HostileClient stranger(socket(static_cast<std::uint32_t>(random.below(2))));
      if (!random.one_in(4)) {
        (void)stranger.call<shm::HelloReply>(
            shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "stranger"});
      }
      for (std::uint64_t i = 0; i < kOfOneStranger; ++i, ++sent) {
        if (!send(stranger, random.message(false))) break;
      }
    }
    if (sent < next_look) continue;
    next_look += kLook;
    expect_all_well();
  }
  expect_all_well();
}

// The one call that once broke two daemons for everybody, from either side of the stream.
TEST_F(HostileBytes, ATagThatIsNoTextBreaksNoStream) {
  for (const std::uint32_t rank : {0u, 1u}) {
    HostilePair pair(daemons());
    const auto refused =
        pair.client(rank).call<shm::ExchangeReply>(shm::Exchange{"caf\xe9", {}, 1'000});
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument) << refused.error().message;
    EXPECT_NE(refused.error().message.find("caf\\xe9"), std::string::npos);
    tried();
    pair.expect_detaches();
    expect_all_well();
  }
}

}  // namespace
}  // namespace mk::test
