#include "daemon/proxy/command_validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/daemon/proxy/scripted_endpoint.h"

namespace mk::daemon {
namespace {

using shm::Command;
using shm::Opcode;
using testing::HasSubstr;

constexpr std::uint64_t kSequence = 0x1'2345'6789;  // beyond 32 bits: the word carries the low ones
constexpr std::uint16_t kPeerRank = 5;
constexpr std::uint32_t kFlagCount = 128;
constexpr std::uint64_t kSourceBytes = 10'000;
constexpr std::uint64_t kDestinationBytes = 8'000;

class CommandValidation : public testing::Test {
 protected:
  CommandValidation() {
    bindings_.buffers.bind(3, &local_, kSourceBytes);
    bindings_.buffers.bind(4, &huge_local_, shm::kBufferBytesMax);
    auto peer = std::make_unique<Peer>();
    peer->rank = kPeerRank;
    peer->flag_count = kFlagCount;
    peer->buffers.bind(9, &remote_, kDestinationBytes);
    peer->buffers.bind(10, &huge_remote_, shm::kBufferBytesMax);
    peer_ = peer.get();
    bindings_.bind_peer(std::move(peer));
  }

  static Command valid_write() {
    Command command;
    command.opcode = Opcode::kWrite;
    command.peer = kPeerRank;
    command.src_handle = 3;
    command.dst_handle = 9;
    command.src_offset = 100;
    command.dst_offset = 200;
    command.bytes = 300;
    command.flag_index = 7;
    command.epoch = 42;
    return command;
  }
  static Command valid_flag() {
    Command command;
    command.opcode = Opcode::kWriteFlag;
    command.peer = kPeerRank;
    command.flag_index = 7;
    command.epoch = 42;
    return command;
  }

  struct Words {
    std::uint64_t at[shm::kCommandWords];
  };
  static Words words_of(const Command& command) {
    Words words{};
    shm::encode(command, words.at);
    words.at[shm::kCommitWord] = shm::commit_word(kSequence, 4);
    return words;
  }
  Flaw check(const Words& words) {
    return check_command(words.at, kSequence, bindings_, accepted_);
  }
  Flaw check(const Command& command) { return check(words_of(command)); }
  std::string describe(const Command& command) {
    const Words words = words_of(command);
    return describe_flaw(check(words), 2, kSequence, words.at, bindings_);
  }

  test::FakeLocalRegion local_, huge_local_;
  test::FakeRemoteRegion remote_, huge_remote_;
  Bindings bindings_{shm::kWorldMax, shm::kNodesMax};
  Peer* peer_ = nullptr;
  AcceptedCommand accepted_;
};

TEST_F(CommandValidation, AcceptsAWriteAndResolvesWhatItNames) {
  ASSERT_EQ(check(valid_write()), Flaw::kNone);
  EXPECT_EQ(accepted_.command, valid_write());
  EXPECT_EQ(accepted_.peer, peer_);
  EXPECT_EQ(accepted_.src, &local_);
  EXPECT_EQ(accepted_.dst, &remote_);
}

TEST_F(CommandValidation, AcceptsAFlagOnlyWriteAndForgetsTheBuffersOfTheOneBefore) {
  ASSERT_EQ(check(valid_write()), Flaw::kNone);
  ASSERT_EQ(check(valid_flag()), Flaw::kNone);
  EXPECT_EQ(accepted_.src, nullptr);
  EXPECT_EQ(accepted_.dst, nullptr);
}

TEST_F(CommandValidation, EveryFieldAtItsBoundaries) {
  struct Case {
    const char* name;
    std::function<void(Command&)> change;
    Flaw expected;
  };
  const std::vector<Case> cases = {
      {"peer not bound", [](Command& c) { c.peer = kPeerRank + 1; }, Flaw::kPeer},
      {"peer beyond the world", [](Command& c) { c.peer = shm::kWorldMax; }, Flaw::kPeer},
      {"peer at the field's end", [](Command& c) { c.peer = 0xffff; }, Flaw::kPeer},
      {"last flag", [](Command& c) { c.flag_index = kFlagCount - 1; }, Flaw::kNone},
      {"first flag beyond", [](Command& c) { c.flag_index = kFlagCount; }, Flaw::kFlagIndex},
      {"flag at the field's end", [](Command& c) { c.flag_index = 0xffff'ffff; }, Flaw::kFlagIndex},
      {"any epoch", [](Command& c) { c.epoch = 0xffff'ffff; }, Flaw::kNone},
      {"any commit time", [](Command& c) { c.commit_time_ns = 0xffff'ffff; }, Flaw::kNone},
      {"source handle 0", [](Command& c) { c.src_handle = 0; }, Flaw::kSourceHandle},
      {"source handle not bound", [](Command& c) { c.src_handle = 2; }, Flaw::kSourceHandle},
      {"the peer's handle as source", [](Command& c) { c.src_handle = 9; }, Flaw::kSourceHandle},
      {"source handle at the field's end", [](Command& c) { c.src_handle = 0xffff; },
       Flaw::kSourceHandle},
      {"destination handle 0", [](Command& c) { c.dst_handle = 0; }, Flaw::kDestinationHandle},
      {"the own handle as destination", [](Command& c) { c.dst_handle = 3; },
       Flaw::kDestinationHandle},
      {"destination handle at the field's end", [](Command& c) { c.dst_handle = 0xffff; },
       Flaw::kDestinationHandle},
      {"no bytes", [](Command& c) { c.bytes = 0; }, Flaw::kBytes},
      {"one byte", [](Command& c) { c.bytes = 1; }, Flaw::kNone},
      {"one byte more than a command moves",
       [](Command& c) {
         c.src_handle = 4, c.dst_handle = 10, c.bytes = shm::kCommandPayloadBytesMax + 1;
       },
       Flaw::kBytes},
      {"as much as a command moves",
       [](Command& c) {
         c.src_handle = 4, c.dst_handle = 10, c.bytes = shm::kCommandPayloadBytesMax;
       },
       Flaw::kNone},
      {"bytes at the field's end", [](Command& c) { c.bytes = 0xffff'ffff; }, Flaw::kBytes},
      {"source to its end", [](Command& c) { c.src_offset = kSourceBytes - c.bytes; }, Flaw::kNone},
      {"one byte beyond the source", [](Command& c) { c.src_offset = kSourceBytes - c.bytes + 1; },
       Flaw::kSourceBounds},
      {"source offset at the field's end", [](Command& c) { c.src_offset = shm::kOffsetMask; },
       Flaw::kSourceBounds},
      {"destination to its end", [](Command& c) { c.dst_offset = kDestinationBytes - c.bytes; },
       Flaw::kNone},
      {"one byte beyond the destination",
       [](Command& c) { c.dst_offset = kDestinationBytes - c.bytes + 1; },
       Flaw::kDestinationBounds},
      {"destination offset at the field's end", [](Command& c) { c.dst_offset = shm::kOffsetMask; },
       Flaw::kDestinationBounds},
      {"the end of the largest buffers",
       [](Command& c) {
         c.src_handle = 4, c.dst_handle = 10,
         c.src_offset = c.dst_offset = shm::kBufferBytesMax - c.bytes;
       },
       Flaw::kNone},
      {"one byte beyond the largest source",
       [](Command& c) { c.src_handle = 4, c.src_offset = shm::kBufferBytesMax - c.bytes + 1; },
       Flaw::kSourceBounds},
  };
  for (const Case& one : cases) {
    Command command = valid_write();
    one.change(command);
    EXPECT_EQ(check(command), one.expected) << one.name;
  }
}

TEST_F(CommandValidation, AFlagOnlyWriteHasNoPayloadFields) {
  const std::vector<std::function<void(Command&)>> changes = {
      [](Command& c) { c.src_handle = 3; },
      [](Command& c) { c.dst_handle = 9; },
      [](Command& c) { c.src_offset = 1; },
      [](Command& c) { c.dst_offset = 1; },
      [](Command& c) { c.bytes = 1; },
      [](Command& c) { c.bytes = 1u << 31; },
      [](Command& c) { c.src_offset = 1ull << 47; }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    Command command = valid_flag();
    changes[i](command);
    EXPECT_EQ(check(command), Flaw::kNotZero) << i;
  }
  Command beyond = valid_flag();
  beyond.flag_index = kFlagCount;
  EXPECT_EQ(check(beyond), Flaw::kFlagIndex);
}

TEST_F(CommandValidation, OfAllOpcodesOnlyTheTwoPass) {
  for (unsigned opcode = 0; opcode < 256; ++opcode) {
    Command write = valid_write();
    write.opcode = static_cast<Opcode>(opcode);
    const Flaw expected = opcode == 1 ? Flaw::kNone : opcode == 2 ? Flaw::kNotZero : Flaw::kOpcode;
    EXPECT_EQ(check(write), expected) << opcode;
  }
}

TEST_F(CommandValidation, EveryReservedBitIsRefused) {
  const std::uint64_t reserved[shm::kCommandWords] = {
      0xff00u, ~shm::kOffsetMask, ~shm::kOffsetMask, 0, 0, 0x7fff'ffff'0000'0000u};
  for (std::uint32_t word = 0; word < shm::kCommandWords; ++word) {
    for (unsigned bit = 0; bit < 64; ++bit) {
      if ((reserved[word] >> bit & 1) == 0) continue;
      Words words = words_of(valid_write());
      words.at[word] |= 1ull << bit;
      EXPECT_EQ(check(words), Flaw::kReservedBits) << "word " << word << " bit " << bit;
    }
  }
}

TEST_F(CommandValidation, EveryBitOfTheSequenceCounts) {
  for (unsigned bit = 0; bit < 32; ++bit) {
    Words words = words_of(valid_write());
    words.at[shm::kCommitWord] ^= 1ull << bit;
    EXPECT_EQ(check(words), Flaw::kSequence) << bit;
  }
  Words parity = words_of(valid_write());
  parity.at[shm::kCommitWord] ^= shm::kParityBit;  // the ring's business
  EXPECT_EQ(check(parity), Flaw::kNone);
}

TEST_F(CommandValidation, EveryRankAndEveryHandle) {
  for (unsigned value = 0; value < 0x10000; ++value) {
    Command by_peer = valid_flag();
    by_peer.peer = static_cast<std::uint16_t>(value);
    ASSERT_EQ(check(by_peer), value == kPeerRank ? Flaw::kNone : Flaw::kPeer) << value;
    Command by_source = valid_write();
    by_source.src_handle = static_cast<std::uint16_t>(value);
    ASSERT_EQ(check(by_source), value == 3 || value == 4 ? Flaw::kNone : Flaw::kSourceHandle)
        << value;
    Command by_destination = valid_write();
    by_destination.dst_handle = static_cast<std::uint16_t>(value);
    ASSERT_EQ(check(by_destination),
              value == 9 || value == 10 ? Flaw::kNone : Flaw::kDestinationHandle)
        << value;
  }
}

TEST_F(CommandValidation, UnboundHandlesAndReplacedPeersAreGone) {
  bindings_.buffers.unbind(3);
  EXPECT_EQ(check(valid_write()), Flaw::kSourceHandle);
  bindings_.buffers.bind(3, &local_, kSourceBytes);
  peer_->buffers.unbind(9);
  EXPECT_EQ(check(valid_write()), Flaw::kDestinationHandle);
  auto successor = std::make_unique<Peer>();
  successor->rank = kPeerRank;
  successor->flag_count = 1;
  bindings_.bind_peer(std::move(successor));
  EXPECT_EQ(check(valid_flag()), Flaw::kFlagIndex);
}

TEST_F(CommandValidation, HandlesBeyondTheUsualTableWork) {
  bindings_.buffers.bind(0xffff, &local_, kSourceBytes);
  bindings_.buffers.bind(shm::kNoHandle, &local_, kSourceBytes);  // never
  Command command = valid_write();
  command.src_handle = 0xffff;
  EXPECT_EQ(check(command), Flaw::kNone);
  command.src_handle = 0;
  EXPECT_EQ(check(command), Flaw::kSourceHandle);
}

TEST_F(CommandValidation, TheSentenceNamesLaneCommandFieldValueAndWhatIsAllowed) {
  Command command = valid_write();
  command.bytes = kSourceBytes;
  EXPECT_EQ(describe(command),
            "lane 2, command 4886718345: source offset 100 with bytes 10000 ends at 10100: source "
            "handle 3 has 10000 "
            "bytes, offset + bytes may be at most that");
  command = valid_write();
  command.peer = 6;
  EXPECT_THAT(describe(command), HasSubstr("peer is rank 6: the session's rail peers are ranks 5"));
  command = valid_write();
  command.flag_index = 128;
  EXPECT_THAT(describe(command), HasSubstr("flag index is 128: rank 5 has 128 flags"));
  command = valid_write();
  command.opcode = static_cast<Opcode>(77);
  EXPECT_THAT(describe(command),
              HasSubstr("opcode is 77: 1 (write) and 2 (flag-only write) are allowed"));
  command = valid_flag();
  command.dst_offset = 5;
  EXPECT_THAT(describe(command), HasSubstr("destination offset is 5"));
  command = valid_write();
  command.dst_handle = 300;
  EXPECT_THAT(describe(command),
              HasSubstr("destination handle is 300: rank 5 has announced no such buffer"));
  command = valid_write();
  command.bytes = 0;
  EXPECT_THAT(describe(command), HasSubstr("bytes is 0: 1 to 1073741824 are allowed"));
}

/// Words that are random, or valid but for a few bits: whatever is accepted lies inside what was
/// bound.
TEST_F(CommandValidation, FuzzNeverAcceptsOutOfBounds) {
  std::mt19937_64 random(20240607);
  std::uint64_t accepted_count = 0;
  for (int i = 0; i < 400'000; ++i) {
    Words words = words_of(random() % 2 == 0 ? valid_write() : valid_flag());
    if (i % 4 == 0) {
      for (std::uint64_t& word : words.at) word = random();
      words.at[shm::kCommitWord] =
          (words.at[shm::kCommitWord] & ~0xffff'ffffull) | (kSequence & 0xffff'ffff);
    } else {
      for (std::uint64_t flips = random() % 4; flips > 0; --flips) {
        words.at[random() % shm::kCommandWords] ^= 1ull << random() % 64;
      }
    }
    const Flaw flaw = check(words);
    const std::string text = describe_flaw(flaw, 0, kSequence, words.at, bindings_);
    ASSERT_FALSE(text.empty());
    if (flaw != Flaw::kNone) continue;
    ++accepted_count;
    const Command& command = accepted_.command;
    ASSERT_EQ(command.peer, kPeerRank);
    ASSERT_LT(command.flag_index, kFlagCount);
    if (command.opcode == Opcode::kWriteFlag) {
      ASSERT_EQ(command.bytes, 0u);
      ASSERT_EQ(accepted_.src, nullptr);
      continue;
    }
    ASSERT_EQ(command.opcode, Opcode::kWrite);
    const std::uint64_t src_bytes = accepted_.src == &local_ ? kSourceBytes : shm::kBufferBytesMax;
    const std::uint64_t dst_bytes =
        accepted_.dst == &remote_ ? kDestinationBytes : shm::kBufferBytesMax;
    ASSERT_GE(command.bytes, 1u);
    ASSERT_LE(command.src_offset + command.bytes, src_bytes);
    ASSERT_LE(command.dst_offset + command.bytes, dst_bytes);
  }
  EXPECT_GT(accepted_count, 50'000u);
}

}  // namespace
}  // namespace mk::daemon
