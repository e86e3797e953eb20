// Every message in every state of a connection: what is answered, and whether the connection stays.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include "shm/host/text.h"
#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {
namespace {

using T = shm::MessageType;
using testing::HasSubstr;

enum class At { kConnected, kGreeted, kWaiting, kUp, kLeaving, kFailed };
constexpr At kStates[] = {At::kConnected, At::kGreeted, At::kWaiting,
                          At::kUp,        At::kLeaving, At::kFailed};

std::string name_of(At state) {
  switch (state) {
    case At::kConnected:
      return "connected";
    case At::kGreeted:
      return "greeted";
    case At::kWaiting:
      return "waiting";
    case At::kUp:
      return "up";
    case At::kLeaving:
      return "leaving";
    case At::kFailed:
      return "failed";
  }
  return "?";
}

/// What must come back: a reply of this type, or an error with this code.
struct Answer {
  std::optional<T> reply;
  ErrorCode error = ErrorCode::kOk;
  bool closed = false;
};
constexpr Answer ok(T reply, bool closed = false) { return {reply, ErrorCode::kOk, closed}; }
constexpr Answer refused(ErrorCode code, bool closed = false) { return {{}, code, closed}; }
constexpr Answer kBreaks = refused(ErrorCode::kProtocol, true);
constexpr Answer kOutOfOrder = refused(ErrorCode::kProtocol);
constexpr Answer kLater{};  ///< neither a reply nor an error yet

/// The rules, as the protocol states them.
Answer expected(At state, T type) {
  const bool is_request =
      type == T::kHello || type == T::kAttach || type == T::kRegisterBuffer ||
      type == T::kDeregisterBuffer || type == T::kAllocFlags || type == T::kRetire ||
      type == T::kRegisterDeviceBuffer || type == T::kRegisterDmabuf || type == T::kExchange ||
      type == T::kOpenPeerBuffer || type == T::kLaunchBegins || type == T::kDetach;
  if (!is_request) return kBreaks;
  const bool needs_session = type != T::kHello && type != T::kAttach;
  switch (state) {
    case At::kConnected:
      return type == T::kHello ? ok(T::kHelloReply) : kBreaks;
    case At::kGreeted:
      return type == T::kAttach ? ok(T::kAttachReply) : kOutOfOrder;
    case At::kWaiting:
    case At::kUp:
      switch (type) {
        case T::kRegisterBuffer:
        case T::kRegisterDeviceBuffer:
        case T::kRegisterDmabuf:
          return ok(T::kRegisterBufferReply);
        case T::kDeregisterBuffer:
        case T::kRetire:
          return refused(ErrorCode::kNotFound);
        case T::kAllocFlags:
          return ok(T::kAllocFlagsReply);
        case T::kExchange:
          return state == At::kUp ? ok(T::kExchangeReply) : kLater;
        case T::kOpenPeerBuffer:
          return refused(ErrorCode::kNotFound);
        case T::kLaunchBegins:
          return ok(T::kDone);
        case T::kDetach:
          return kLater;  // when nothing is in flight any more
        default:
          return kOutOfOrder;
      }
    case At::kLeaving:
      return kOutOfOrder;
    case At::kFailed:
      if (type == T::kDetach) return ok(T::kDone, true);
      return needs_session ? refused(ErrorCode::kPeerLost) : kOutOfOrder;
  }
  return {};
}

class ProtocolOrder : public testing::Test {
 protected:
  /// A client in that state. Jobs of two local ranks wait or fail, jobs of one are up.
  ClientId client_in(TestNode& node, At state) {
    if (state == At::kConnected) return node.connect();
    if (state == At::kGreeted) {
      const ClientId client = node.connect();
      node.send(client, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
      EXPECT_TRUE(node.take<shm::HelloReply>(client));
      return client;
    }
    const bool alone = state == At::kUp || state == At::kLeaving;
    const ClientId client = node.attach(rank_of("job", 1, alone ? 1 : 2, 0));
    EXPECT_TRUE(node.take<shm::AttachReply>(client));
    if (state == At::kLeaving) node.send(client, shm::Detach{});
    if (state == At::kFailed) {
      const ClientId other = node.attach(rank_of("job", 1, 2, 1));
      node.hang_up(other);
      node.step();
      EXPECT_TRUE(node.take<shm::SessionFailed>(client));
    }
    return client;
  }

  std::uint64_t send(TestNode& node, ClientId client, T type) {
    switch (type) {
      case T::kHello:
        return node.send(client, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
      case T::kAttach:
        return node.send(client, rank_of("second", 1, 1, 0));
      case T::kRegisterBuffer: {
        auto file = shm::BufferFile::create("test", 4096);
        std::vector<UniqueFd> fds;
        fds.emplace_back(::dup(file->fd()));
        return node.send(client, shm::RegisterBuffer{4096, "b"}, std::move(fds));
      }
      case T::kRegisterDeviceBuffer:
      case T::kRegisterDmabuf: {
        gpu::MemoryKey key;
        key.bytes = 4096;
        std::vector<std::byte> bytes(sizeof key);
        std::memcpy(bytes.data(), &key, sizeof key);
        shm::RegisterDeviceBuffer buffer{4096, "b", std::move(bytes)};
        if (type == T::kRegisterDeviceBuffer) return node.send(client, std::move(buffer));
        std::vector<UniqueFd> fds;
        fds.emplace_back(::memfd_create("test", MFD_CLOEXEC));
        return node.send(client, shm::RegisterDmabuf{std::move(buffer), 0}, std::move(fds));
      }
      case T::kDeregisterBuffer:
        return node.send(client, shm::DeregisterBuffer{7});
      case T::kRetire:
        return node.send(client, shm::Retire{7, shm::kNoFlags, {}});
      case T::kAllocFlags:
        return node.send(client, shm::AllocFlags{1});
      case T::kExchange:
        return node.send(client, shm::Exchange{"tag", {}, 1000});
      case T::kOpenPeerBuffer:
        return node.send(client, shm::OpenPeerBuffer{0, 7});
      case T::kLaunchBegins:
        return node.send(client, shm::LaunchBegins{});
      case T::kDetach:
        return node.send(client, shm::Detach{});
      default:
        return node.send_raw(client, static_cast<std::uint16_t>(type), {});
    }
  }
};

TEST_F(ProtocolOrder, EveryMessageInEveryState) {
  for (const At state : kStates) {
    for (std::uint16_t number = 0; number <= 22; ++number) {
      SCOPED_TRACE(fmt::format("{} while {}", shm::message_type_name(number), name_of(state)));
      const auto type = static_cast<T>(number);
      TestNode node({.nodes = 1}, std::make_shared<FakeMemory>(),
                    std::make_shared<std::uint64_t>(1));
      const ClientId client = client_in(node, state);
      const std::uint64_t request = send(node, client, type);
      const Answer answer = expected(state, type);
      EXPECT_EQ(node.closed(client), answer.closed);
      const auto error = node.take(client, T::kError);
      ASSERT_EQ(error.has_value(), answer.error != ErrorCode::kOk);
      if (error) {
        EXPECT_EQ(error->request, request);
        EXPECT_EQ(shm::decode_message<shm::ErrorReply>(error->payload)->code, answer.error);
      }
      if (answer.reply) {
        const auto reply = node.take(client, *answer.reply);
        ASSERT_TRUE(reply);
        EXPECT_EQ(reply->request, request);
      }
      // However it stands, a hang-up clears everything away.
      node.hang_up(client);
      node.step();
      node.expect_nothing_left();
    }
  }
}

TEST_F(ProtocolOrder, MalformedPayloadEndsTheConnectionAndTheSession) {
  for (const At state : kStates) {
    for (std::uint16_t number = 1; number <= 19; ++number) {
      SCOPED_TRACE(fmt::format("{} while {}", shm::message_type_name(number), name_of(state)));
      const auto type = static_cast<T>(number);
      const Answer answer = expected(state, type);
      if (answer.error == ErrorCode::kProtocol || state == At::kFailed) continue;  // never decoded
      TestNode node({.nodes = 1}, std::make_shared<FakeMemory>(),
                    std::make_shared<std::uint64_t>(1));
      const ClientId client = client_in(node, state);
      std::vector<UniqueFd> fds;
      if (type == T::kRegisterBuffer) fds.emplace_back(::open("/dev/null", 0));
      node.send_raw(client, number, std::vector<std::byte>(3), std::move(fds));
      const auto error = node.take<shm::ErrorReply>(client);
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code, ErrorCode::kProtocol);
      EXPECT_THAT(error->message, HasSubstr(shm::message_type_name(number)));
      EXPECT_TRUE(node.closed(client));
      node.step();
      node.expect_nothing_left();
    }
  }
}

// What others get to see of a client, in errors, logs, JSON and other daemons' messages, is text.
TEST_F(ProtocolOrder, ATextThatIsNoneIsRefusedAndCostsNothingElse) {
  TestNode node({}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  node.reachable = {1};
  for (const std::string& text :
       {std::string("caf\xe9"), std::string("a\nb"), std::string(1, '\0')}) {
    const auto refused = [&](ClientId client) {
      const auto error = node.take<shm::ErrorReply>(client);
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code, ErrorCode::kInvalidArgument);
      EXPECT_TRUE(shm::is_plain_text(error->message));
      EXPECT_FALSE(node.closed(client));
      EXPECT_FALSE(node.take<shm::SessionFailed>(client));
    };
    const ClientId stranger = node.connect();
    node.send(stranger, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, text});
    refused(stranger);
    node.hang_up(stranger);
    const ClientId client = node.attach(rank_of("text", 2, 1, 0));
    node.send(client, shm::Exchange{text, bytes_of("blob"), 1'000});
    refused(client);
    auto memory = shm::BufferFile::create("text", 4096);
    ASSERT_TRUE(memory);
    std::vector<UniqueFd> fds;
    fds.emplace_back(::dup(memory->fd()));
    node.send(client, shm::RegisterBuffer{4096, text}, std::move(fds));
    refused(client);
    node.send(client, shm::RegisterDeviceBuffer{4096, text, {}});
    refused(client);
    EXPECT_NE(node.register_buffer(client), 0) << "the session goes on";
    node.hang_up(client);
    node.step();
    auto attach = rank_of("job", 2, 1, 0);
    attach.job = text;
    const ClientId other = node.connect();
    node.send(other, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"});
    node.send(other, attach);
    refused(other);
    node.hang_up(other);
  }
  for (const auto& [to, message] : node.sent) {
    EXPECT_FALSE(std::holds_alternative<ExchangePart>(message));
  }
  for (const std::string& line : node.logged) EXPECT_TRUE(shm::is_plain_text(line)) << line;
}

TEST_F(ProtocolOrder, DescriptorsWhereNoneBelongEndTheConnection) {
  TestNode node({.nodes = 1}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  const std::size_t before = open_descriptors();
  const ClientId client = node.connect();
  std::vector<UniqueFd> fds;
  fds.emplace_back(::open("/dev/null", 0));
  node.send(client, shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "test"}, std::move(fds));
  const auto error = node.take<shm::ErrorReply>(client);
  ASSERT_TRUE(error);
  EXPECT_THAT(error->message, HasSubstr("1 descriptors"));
  EXPECT_TRUE(node.closed(client));
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(ProtocolOrder, AnotherAbiIsRefusedWithBothVersions) {
  TestNode node({.nodes = 1}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1));
  for (const int other : {0, shm::kAbiMajor + 1, 0xffff}) {
    const auto major = static_cast<std::uint16_t>(other);
    const ClientId client = node.connect();
    node.send(client, shm::Hello{major, 3, "9.9"});
    const auto error = node.take<shm::ErrorReply>(client);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::kAbiMismatch);
    EXPECT_THAT(error->message, HasSubstr(fmt::format("ABI {}.3", major)));
    EXPECT_THAT(error->message, HasSubstr(fmt::format(") {}.{}", shm::kAbiMajor, shm::kAbiMinor)));
    EXPECT_TRUE(node.closed(client));
  }
  // A newer minor version is compatible.
  const ClientId client = node.connect();
  node.send(client, shm::Hello{shm::kAbiMajor, 77, "9.9"});
  const auto reply = node.take<shm::HelloReply>(client);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->generation, node.plane->hello().generation);
  EXPECT_EQ(reply->daemon_version, "test");
}

}  // namespace
}  // namespace mk::daemon::test
