// Rolling upgrades: clients of the previous minor version (ABI 1.0, mkernel 0.1) beside this one,
// and daemons of it, which are refused. What they say is written out byte by byte and field by
// field here, as it was released, so that no change of today's structs changes it along.
#include <gmock/gmock.h>
#include <unistd.h>

#include "tests/daemon/control/rig.h"

namespace mk::daemon::test {
namespace {

using testing::HasSubstr;

/// Payloads as ABI 1.0 lays them out.
class Old {
 public:
  Old& u16(std::uint16_t value) { return number(value, 2); }
  Old& u32(std::uint32_t value) { return number(value, 4); }
  Old& u64(std::uint64_t value) { return number(value, 8); }
  Old& text(const std::string& value) {
    u32(static_cast<std::uint32_t>(value.size()));
    for (const char c : value) bytes_.push_back(static_cast<std::byte>(c));
    return *this;
  }
  operator std::vector<std::byte>() const { return bytes_; }  // NOLINT: reads as what it makes

 private:
  Old& number(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) bytes_.push_back(static_cast<std::byte>(value >> (8 * i)));
    return *this;
  }
  std::vector<std::byte> bytes_;
};

/// Reads what an ABI 1.0 client expects, to the last byte.
class OldReader {
 public:
  explicit OldReader(const std::vector<std::byte>& bytes) : bytes_(bytes) {}
  std::uint64_t number(int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) {
      if (at_ == bytes_.size()) {
        ADD_FAILURE() << "the reply is short";
        return 0;
      }
      value |= static_cast<std::uint64_t>(bytes_[at_++]) << (8 * i);
    }
    return value;
  }
  std::string text() {
    std::string value;
    for (auto left = number(4); left > 0 && at_ < bytes_.size(); --left) {
      value += static_cast<char>(bytes_[at_++]);
    }
    return value;
  }
  bool at_end() const { return at_ == bytes_.size(); }

 private:
  const std::vector<std::byte>& bytes_;
  std::size_t at_ = 0;
};

// Message types of ABI 1.0.
constexpr std::uint16_t kOldHello = 2, kOldAttach = 4, kOldRegisterBuffer = 7, kOldDeregister = 9,
                        kOldAllocFlags = 10, kOldExchange = 12, kOldDetach = 16;

class VersionSkew : public testing::Test {
 protected:
  VersionSkew() { node.reachable = {1}; }

  /// The reply of this type to an old client's request.
  std::vector<std::byte> ask(ClientId client, std::uint16_t type,
                             const std::vector<std::byte>& payload, std::uint16_t reply,
                             std::vector<UniqueFd> fds = {}) {
    node.send_raw(client, type, payload, std::move(fds));
    node.step();
    const auto received = node.take(client, static_cast<shm::MessageType>(reply));
    if (!received) {
      const auto error = node.take<shm::ErrorReply>(client);
      ADD_FAILURE() << "no reply " << reply << " to " << type
                    << (error ? ": " + error->message : "");
      return {};
    }
    return received->payload;
  }
  ClientId old_client(std::uint32_t nodes = 1) {
    const ClientId client = node.connect();
    const auto reply = ask(client, kOldHello, Old().u16(1).u16(0).text("0.1.0"), 3);
    OldReader hello(reply);
    EXPECT_EQ(hello.number(2), 1u);  // the major version, which it compares
    hello.number(2);
    EXPECT_NE(hello.number(8), 0u);
    hello.text();
    EXPECT_TRUE(hello.at_end());
    // job, rank, world, node_rank, nodes, local_rank, local_size, lanes, log2 slots, flags, timeout
    const auto attached = ask(client, kOldAttach,
                              Old()
                                  .text("skew")
                                  .u32(0)
                                  .u32(nodes)
                                  .u32(0)
                                  .u32(nodes)
                                  .u32(0)
                                  .u32(1)
                                  .u32(2)
                                  .u32(8)
                                  .u32(128)
                                  .u32(5'000),
                              5);
    OldReader session(attached);
    EXPECT_NE(session.number(4), 0u);
    session.number(4);
    EXPECT_GT(session.number(8), 4096u);
    EXPECT_EQ(session.text(), "fake");
    EXPECT_TRUE(session.at_end());
    return client;
  }

  TestNode node{{}, std::make_shared<FakeMemory>(), std::make_shared<std::uint64_t>(1)};
};

TEST_F(VersionSkew, AClientOfThePreviousMinorVersionDoesAllItCould) {
  const ClientId client = old_client();
  EXPECT_TRUE(node.take(client, shm::MessageType::kJobUp));
  auto memory = shm::BufferFile::create("old", 8192);
  ASSERT_TRUE(memory);
  std::vector<UniqueFd> fds;
  fds.push_back(UniqueFd(::dup(memory->fd())));
  const auto registered =
      ask(client, kOldRegisterBuffer, Old().u64(8192).text("buffer"), 8, std::move(fds));
  OldReader handle_reply(registered);
  const auto handle = static_cast<std::uint16_t>(handle_reply.number(2));
  EXPECT_NE(handle, 0);
  EXPECT_TRUE(handle_reply.at_end());
  EXPECT_EQ(ask(client, kOldAllocFlags, Old().u32(64), 11).size(), 4u);
  const auto exchanged = ask(client, kOldExchange, Old().text("tag").text("blob").u32(5'000), 13);
  OldReader blobs(exchanged);
  EXPECT_EQ(blobs.number(4), 1u);
  EXPECT_EQ(blobs.text(), "blob");
  EXPECT_TRUE(blobs.at_end());
  EXPECT_EQ(ask(client, kOldDeregister, Old().u16(handle), 17).size(), 0u);
  EXPECT_EQ(ask(client, kOldDetach, Old(), 17).size(), 0u);
  node.step();
  EXPECT_EQ(node.plane->counts().sessions, 0u);
}

// It would send and expect keys of flags without any proof: with one hostile node that claims to be
// old, all would be as they were.
TEST_F(VersionSkew, ADaemonThatProvesNothingIsRefusedAndBothAreNamed) {
  PeerHello hello = node.plane->hello();
  hello.node = 1;
  hello.generation = 99;
  hello.abi_minor = 0;
  hello.version = "0.1.0";
  hello.protocol = 0;
  const Status refused = node.plane->on_peer_message(1, hello);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("mkerneld 0.1.0) speaks version 0"));
  EXPECT_THAT(refused.error().message, HasSubstr(fmt::format("version {}", kPeerProtocol)));
  const ClientId client = node.attach(rank_of("skew", 2, 1, 0));
  EXPECT_TRUE(node.sent.empty());
  node.wait(5'100);
  const auto failed = node.take<shm::SessionFailed>(client);
  ASSERT_TRUE(failed);
  EXPECT_THAT(failed->message, HasSubstr("mkerneld 0.1.0)"));
}

TEST_F(VersionSkew, AnotherMajorVersionIsRefusedAndBothAreNamed) {
  for (const std::uint16_t major : {std::uint16_t{0}, std::uint16_t{2}}) {
    const ClientId client = node.connect();
    node.send_raw(client, kOldHello, Old().u16(major).u16(7).text("9.8.7"));
    const auto error = node.take<shm::ErrorReply>(client);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::kAbiMismatch);
    EXPECT_THAT(error->message,
                HasSubstr(fmt::format("libmkclient 9.8.7) speaks ABI {}.7", major)));
    EXPECT_THAT(error->message, HasSubstr(fmt::format("{}.{}", shm::kAbiMajor, shm::kAbiMinor)));

    PeerHello hello = node.plane->hello();
    hello.node = 1;
    hello.abi_major = major;
    hello.version = "9.8.7";
    const Status refused = node.plane->on_peer_message(1, hello);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kAbiMismatch);
    EXPECT_THAT(refused.error().message,
                HasSubstr(fmt::format("mkerneld 9.8.7) speaks ABI {}.", major)));
    EXPECT_THAT(refused.error().message,
                HasSubstr(fmt::format("{}.{}", shm::kAbiMajor, shm::kAbiMinor)));
  }
}

}  // namespace
}  // namespace mk::daemon::test
