// A command's bytes: hand-written ones, every field's extremes, every reserved bit.
#include "shm/command.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "support.h"

namespace mk::shm {
namespace {

using Words = std::array<std::uint64_t, kCommandWords>;

Words words_of(const Command& command) {
  Words words{};
  encode(command, words.data());
  return words;
}

std::vector<std::uint8_t> bytes_of(const Command& command, std::uint64_t sequence,
                                   std::uint32_t log2) {
  Words words = words_of(command);
  words[kCommitWord] = commit_word(sequence, log2);
  std::vector<std::uint8_t> bytes(sizeof words);
  std::memcpy(bytes.data(), words.data(), sizeof words);
  return bytes;
}

TEST(CommandBytes, WriteWithAllFieldsDifferent) {
  Command command;
  command.opcode = Opcode::kWrite;
  command.peer = 0x0201;
  command.src_handle = 0x0403;
  command.dst_handle = 0x0605;
  command.src_offset = 0x161514131211ull;
  command.dst_offset = 0x262524232221ull;
  command.bytes = 0x34333231;
  command.flag_index = 0x38373635;
  command.epoch = 0x44434241;
  command.commit_time_ns = 0x48474645;
  const std::vector<std::uint8_t> expected = {
      0x01, 0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06,  //
      0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x00, 0x00,  //
      0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x00, 0x00,  //
      0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38,  //
      0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48,  //
      0x54, 0x53, 0x52, 0x51, 0x00, 0x00, 0x00, 0x00,  // sequence 0x51525354 of 16 slots: odd lap
  };
  EXPECT_EQ(bytes_of(command, 0x51525354, 4), expected);
}

TEST(CommandBytes, WriteFlag) {
  Command command;
  command.opcode = Opcode::kWriteFlag;
  command.peer = 1023;
  command.flag_index = 65535;
  command.epoch = 0xfffffffe;
  const std::vector<std::uint8_t> expected = {
      0x02, 0x00, 0xff, 0x03, 0x00, 0x00, 0x00, 0x00,  //
      0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  //
      0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,  //
      0x00, 0x00, 0x00, 0x00, 0xff, 0xff, 0x00, 0x00,  //
      0xfe, 0xff, 0xff, 0xff, 0x00, 0x00, 0x00, 0x00,  //
      0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x80,  // the first command
  };
  EXPECT_EQ(bytes_of(command, 0, 10), expected);
}

TEST(CommandBytes, ZeroCommandDiffersFromZeroMemoryByItsCommitBitAlone) {
  std::vector<std::uint8_t> expected(kCommandBytes, 0);
  expected[47] = 0x80;
  EXPECT_EQ(bytes_of(Command{}, 0, 4), expected);
}

struct Field {
  const char* name;
  unsigned word, low_bit, bits;
  std::function<void(Command&, std::uint64_t)> set;
};

std::vector<Field> fields() {
  return {
      {"opcode", 0, 0, 8, [](Command& c, std::uint64_t v) { c.opcode = static_cast<Opcode>(v); }},
      {"peer", 0, 16, 16,
       [](Command& c, std::uint64_t v) { c.peer = static_cast<std::uint16_t>(v); }},
      {"src_handle", 0, 32, 16,
       [](Command& c, std::uint64_t v) { c.src_handle = static_cast<std::uint16_t>(v); }},
      {"dst_handle", 0, 48, 16,
       [](Command& c, std::uint64_t v) { c.dst_handle = static_cast<std::uint16_t>(v); }},
      {"src_offset", 1, 0, 48, [](Command& c, std::uint64_t v) { c.src_offset = v; }},
      {"dst_offset", 2, 0, 48, [](Command& c, std::uint64_t v) { c.dst_offset = v; }},
      {"bytes", 3, 0, 32,
       [](Command& c, std::uint64_t v) { c.bytes = static_cast<std::uint32_t>(v); }},
      {"flag_index", 3, 32, 32,
       [](Command& c, std::uint64_t v) { c.flag_index = static_cast<std::uint32_t>(v); }},
      {"epoch", 4, 0, 32,
       [](Command& c, std::uint64_t v) { c.epoch = static_cast<std::uint32_t>(v); }},
      {"commit_time_ns", 4, 32, 32,
       [](Command& c, std::uint64_t v) { c.commit_time_ns = static_cast<std::uint32_t>(v); }},
  };
}

TEST(CommandFields, EachExtremeLandsInItsOwnBitsAndComesBack) {
  for (const Field& field : fields()) {
    const std::uint64_t all_ones = (1ull << field.bits) - 1;
    for (const std::uint64_t value :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << (field.bits - 1), all_ones}) {
      SCOPED_TRACE(testing::Message() << field.name << " = " << value);
      Command command;
      field.set(command, value);
      const Words words = words_of(command);
      Words expected{};
      expected[field.word] = value << field.low_bit;
      EXPECT_EQ(words, expected);
      EXPECT_EQ(decode(words.data()), command);
      EXPECT_TRUE(reserved_bits_clear(words.data()));
    }
  }
}

TEST(CommandFields, EachIsUntouchedWhenAllOthersAreOnes) {
  Command ones;
  for (const Field& field : fields()) field.set(ones, (1ull << field.bits) - 1);
  const Words all = words_of(ones);
  EXPECT_TRUE(reserved_bits_clear(all.data()));
  for (const Field& field : fields()) {
    SCOPED_TRACE(field.name);
    Command command = ones;
    field.set(command, 0);
    Words expected = all;
    expected[field.word] &= ~(((1ull << field.bits) - 1) << field.low_bit);
    EXPECT_EQ(words_of(command), expected);
  }
}

TEST(CommandFields, OffsetsAreCutTo48BitsSoThatTheyNeverReachReservedBits) {
  Command command;
  command.src_offset = ~0ull;
  command.dst_offset = 1ull << 48;
  const Words words = words_of(command);
  EXPECT_TRUE(reserved_bits_clear(words.data()));
  EXPECT_EQ(words[1], kOffsetMask);
  EXPECT_EQ(words[2], 0u);
}

TEST(CommandFields, EveryReservedBitIsNoticedAndNoOther) {
  const auto reserved = [](unsigned word, unsigned bit) {
    return (word == 0 && bit >= 8 && bit < 16) || ((word == 1 || word == 2) && bit >= 48) ||
           (word == 5 && bit >= 32 && bit < 63);
  };
  for (const bool others : {false, true}) {
    for (unsigned word = 0; word < kCommandWords; ++word) {
      for (unsigned bit = 0; bit < 64; ++bit) {
        Words words{};
        if (others) {
          for (unsigned w = 0; w < kCommandWords; ++w) {
            for (unsigned b = 0; b < 64; ++b) words[w] |= reserved(w, b) ? 0 : 1ull << b;
          }
        }
        EXPECT_TRUE(reserved_bits_clear(words.data()));
        words[word] ^= 1ull << bit;
        EXPECT_EQ(reserved_bits_clear(words.data()), !reserved(word, bit)) << word << "." << bit;
      }
    }
  }
}

TEST(CommandFields, RandomCommandsRoundTrip) {
  for (std::uint64_t number = 0; number < 20'000; ++number) {
    const Command command = test::command_of(number * 0x123456789ull);
    ASSERT_EQ(decode(words_of(command).data()), command) << number;
  }
}

TEST(CommandFields, AnyBitsDecode) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20'000; ++i) {
    Words words;
    for (auto& word : words) word = random();
    const Words again = words_of(decode(words.data()));
    ASSERT_EQ(again[0], words[0] & ~0xff00ull);
    ASSERT_EQ(again[1], words[1] & kOffsetMask);
    ASSERT_EQ(again[2], words[2] & kOffsetMask);
    ASSERT_EQ(again[3], words[3]);
    ASSERT_EQ(again[4], words[4]);
  }
}

TEST(CommitWord, ParityIsOneInTheFirstLapAndAlternates) {
  for (std::uint32_t log2 = 4; log2 <= 16; ++log2) {
    for (std::uint64_t lap :
         {0ull, 1ull, 2ull, 3ull, (1ull << 32) >> log2, ((1ull << 32) >> log2) + 1, 1ull << 40}) {
      const std::uint64_t first = lap << log2;
      const std::uint64_t last = first + (1ull << log2) - 1;
      const std::uint64_t parity = lap % 2 == 0 ? kParityBit : 0;
      EXPECT_EQ(commit_word(first, log2), parity | (first & 0xffffffff));
      EXPECT_EQ(commit_word(last, log2), parity | (last & 0xffffffff));
      EXPECT_NE(lap_parity(last, log2), lap_parity(last + 1, log2));
    }
  }
}

}  // namespace
}  // namespace mk::shm
