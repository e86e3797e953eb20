// Holds the code to ABI.md: every offset, bit, limit and code of its tables.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "abi_document.h"
#include "shm/command.h"
#include "shm/error_code.h"
#include "shm/flag.h"
#include "shm/host/unix_socket.h"
#include "shm/layout.h"

namespace mk::shm {
namespace {

using test::AbiDocument;
using test::number;
using test::Row;
using test::Table;

struct Field {
  std::size_t offset;
  std::size_t bytes;
};
using Fields = std::map<std::string, Field>;
#define MK_FIELD(Struct, member)                                  \
  {                                                               \
#member, { offsetof(Struct, member), sizeof(Struct::member) } \
  }

/// Compares a table of offsets with a struct: the same fields, where the table says, without gaps
/// if `packed`.
void expect_fields(const Table& table, Fields fields, std::size_t packed_bytes) {
  std::uint64_t end = 0;
  for (const Row& row : table) {
    const std::string name = row.at("field");
    SCOPED_TRACE(name);
    ASSERT_EQ(fields.count(name), 1u) << "in ABI.md, not in the code";
    EXPECT_EQ(fields[name].offset, number(row, "offset"));
    EXPECT_EQ(fields[name].bytes, number(row, "bytes"));
    if (packed_bytes > 0) {
      EXPECT_EQ(number(row, "offset"), end) << "a gap in ABI.md";
    }
    end = number(row, "offset") + number(row, "bytes");
    fields.erase(name);
  }
  if (packed_bytes > 0) {
    EXPECT_EQ(end, packed_bytes);
  }
  for (const auto& [name, field] : fields)
    ADD_FAILURE() << name << " is in the code, not in ABI.md";
}

TEST(AbiDocument, SegmentHeader) {
  const AbiDocument document;
  const Table& table = document.table("SegmentHeader");
  expect_fields(
      table,
      {MK_FIELD(SegmentHeader, magic),           MK_FIELD(SegmentHeader, abi_major),
       MK_FIELD(SegmentHeader, abi_minor),       MK_FIELD(SegmentHeader, header_bytes),
       MK_FIELD(SegmentHeader, features),        MK_FIELD(SegmentHeader, segment_bytes),
       MK_FIELD(SegmentHeader, generation),      MK_FIELD(SegmentHeader, session_id),
       MK_FIELD(SegmentHeader, session_slot),    MK_FIELD(SegmentHeader, reserved0),
       MK_FIELD(SegmentHeader, lanes_offset),    MK_FIELD(SegmentHeader, slots_offset),
       MK_FIELD(SegmentHeader, flags_offset),    MK_FIELD(SegmentHeader, lane_count),
       MK_FIELD(SegmentHeader, slot_count_log2), MK_FIELD(SegmentHeader, flag_count),
       MK_FIELD(SegmentHeader, reserved1),       MK_FIELD(SegmentHeader, reserved2),
       MK_FIELD(SegmentHeader, heartbeat_ns),    MK_FIELD(SegmentHeader, error_word),
       MK_FIELD(SegmentHeader, abort_flag),      MK_FIELD(SegmentHeader, network_bytes_per_s),
       MK_FIELD(SegmentHeader, reserved3),       MK_FIELD(SegmentHeader, client_pid),
       MK_FIELD(SegmentHeader, launches),        MK_FIELD(SegmentHeader, beats),
       MK_FIELD(SegmentHeader, reserved4),       MK_FIELD(SegmentHeader, reason),
       MK_FIELD(SegmentHeader, progress)},
      sizeof(SegmentHeader));
  std::map<std::uint64_t, std::set<std::string>> writers;
  for (const Row& row : table) writers[number(row, "offset") / kCacheLine].insert(row.at("writer"));
  for (const auto& [line, of_line] : writers)
    EXPECT_EQ(of_line.size(), 1u) << "line " << line << " has two writers";
}

TEST(AbiDocument, Progress) {
  const AbiDocument document;
  expect_fields(document.table("Progress"),
                {MK_FIELD(Progress, op), MK_FIELD(Progress, epoch), MK_FIELD(Progress, tag),
                 MK_FIELD(Progress, m), MK_FIELD(Progress, tiles), MK_FIELD(Progress, chunks),
                 MK_FIELD(Progress, sizes), MK_FIELD(Progress, tiles_done),
                 MK_FIELD(Progress, chunks_done), MK_FIELD(Progress, roles)},
                0);
  // Numbers that other versions know.
  EXPECT_EQ(progress_operator("ag_gemm"), 1u);
  EXPECT_EQ(progress_operator("ring_attention"), 6u);
  EXPECT_EQ(progress_operator("all_gather"), 7u);
  EXPECT_EQ(progress_operator("reduce_scatter"), 8u);
  EXPECT_EQ(kProgressSizeNames[progress_operator("gemm_ar")][1], "k");
  EXPECT_EQ(kProgressSizeNames[progress_operator("moe_dispatch")][3], "top_k");
  EXPECT_EQ(kProgressRoleNames[7], "pull");
  EXPECT_EQ(kProgressWaitNames[15], "indexed rows");
}

TEST(AbiDocument, RoleWord) {
  const std::string text = "running (16 bits), waiting (16), rank (16), wait (8), hops (8)";
  EXPECT_NE(AbiDocument().text().find(text), std::string::npos);
  const std::pair<RoleWord, std::uint64_t> all[] = {{{.running = 0xffff}, 0xffffull},
                                                    {{.waiting = 0xffff}, 0xffffull << 16},
                                                    {{.rank = 0xffff}, 0xffffull << 32},
                                                    {{.wait = 0xff}, 0xffull << 48},
                                                    {{.hops = 0xff}, 0xffull << 56}};
  for (const auto& [word, bits] : all) {
    EXPECT_EQ(encode(word), bits);
    EXPECT_EQ(decode_role(bits), word);
  }
}

TEST(AbiDocument, MagicBytes) {
  const AbiDocument document;
  const std::string meaning = document.table("SegmentHeader").at(0).at("meaning");
  std::istringstream text(meaning.substr(meaning.find("bytes ") + 6));
  std::array<unsigned char, 8> bytes{};
  for (auto& byte : bytes) {
    unsigned value = 0;
    text >> std::hex >> value;
    byte = static_cast<unsigned char>(value);
  }
  EXPECT_EQ(std::memcmp(bytes.data(), &kSegmentMagic, 8), 0) << meaning;
}

TEST(AbiDocument, VersionsAndHeaderBytes) {
  const AbiDocument document;
  std::map<std::string, std::uint64_t> meaning;
  for (const Row& row : document.table("SegmentHeader")) {
    meaning[row.at("field")] = std::strtoull(row.at("meaning").c_str(), nullptr, 10);
  }
  EXPECT_EQ(meaning["abi_major"], kAbiMajor);
  EXPECT_EQ(meaning["abi_minor"], kAbiMinor);
  EXPECT_EQ(meaning["header_bytes"], kHeaderBytes);
}

TEST(AbiDocument, LaneControl) {
  const AbiDocument document;
  expect_fields(document.table("LaneControl"),
                {MK_FIELD(LaneControl, consumed), MK_FIELD(LaneControl, completed),
                 MK_FIELD(LaneControl, produced)},
                0);
}

TEST(AbiDocument, FrameHeader) {
  const AbiDocument document;
  expect_fields(document.table("FrameHeader"),
                {MK_FIELD(FrameHeader, payload_bytes), MK_FIELD(FrameHeader, type),
                 MK_FIELD(FrameHeader, reserved), MK_FIELD(FrameHeader, request)},
                sizeof(FrameHeader));
}

TEST(AbiDocument, SizesOfTheParts) {
  const AbiDocument document;
  std::map<std::string, std::uint64_t> factor;
  for (const Row& row : document.table("2. The segment")) {
    if (row.at("part") != "header") factor[row.at("part")] = number(row, "size");
  }
  EXPECT_EQ(factor["lane controls"], sizeof(LaneControl));
  EXPECT_EQ(factor["slots"], sizeof(CommandSlot));
  EXPECT_EQ(factor["flags"], sizeof(std::uint32_t));
}

TEST(AbiDocument, CommandBits) {
  const AbiDocument document;
  std::map<std::string, std::function<void(Command&)>> set_all = {
      {"opcode", [](Command& c) { c.opcode = static_cast<Opcode>(0xff); }},
      {"peer", [](Command& c) { c.peer = 0xffff; }},
      {"src_handle", [](Command& c) { c.src_handle = 0xffff; }},
      {"dst_handle", [](Command& c) { c.dst_handle = 0xffff; }},
      {"src_offset", [](Command& c) { c.src_offset = ~0ull; }},
      {"dst_offset", [](Command& c) { c.dst_offset = ~0ull; }},
      {"bytes", [](Command& c) { c.bytes = ~0u; }},
      {"flag_index", [](Command& c) { c.flag_index = ~0u; }},
      {"epoch", [](Command& c) { c.epoch = ~0u; }},
      {"commit_time_ns", [](Command& c) { c.commit_time_ns = ~0u; }}};
  std::array<std::uint64_t, kCommandWords> covered{};
  for (const Row& row : document.table("Command")) {
    const std::string name = row.at("field");
    SCOPED_TRACE(name);
    const std::uint64_t word = number(row, "word"), low = number(row, "low bit"),
                        bits = number(row, "bits");
    ASSERT_LT(word, kCommandWords);
    ASSERT_LE(low + bits, 64u);
    const std::uint64_t mask = ((std::uint64_t{1} << bits) - 1) << low;
    EXPECT_EQ(covered[word] & mask, 0u) << "overlaps";
    covered[word] |= mask;
    std::uint64_t words[kCommandWords] = {};
    if (name == "reserved") {
      for (std::uint64_t bit = low; bit < low + bits; ++bit) {
        words[word] = std::uint64_t{1} << bit;
        EXPECT_FALSE(reserved_bits_clear(words)) << bit;
      }
    } else if (name == "sequence") {
      EXPECT_EQ(commit_word(~0ull, 4) & ~kParityBit, mask);
    } else if (name == "parity") {
      EXPECT_EQ(kParityBit, mask);
      EXPECT_EQ(word, kCommitWord);
    } else {
      ASSERT_EQ(set_all.count(name), 1u) << "in ABI.md, not in the code";
      Command command;
      set_all[name](command);
      encode(command, words);
      for (std::uint64_t w = 0; w < kCommandWords; ++w)
        EXPECT_EQ(words[w], w == word ? mask : 0) << "word " << w;
      set_all.erase(name);
    }
  }
  for (const std::uint64_t word : covered)
    EXPECT_EQ(word, ~0ull) << "bits without a meaning in ABI.md";
  EXPECT_TRUE(set_all.empty()) << set_all.begin()->first << " is in the code, not in ABI.md";
}

TEST(AbiDocument, ExampleCommand) {
  const AbiDocument document;
  CommandSlot slot{};
  Command command;
  command.opcode = Opcode::kWrite;
  command.peer = 3;
  command.src_handle = 1;
  command.dst_handle = 2;
  command.src_offset = 0x1000;
  command.dst_offset = 0x40000;
  command.bytes = 262144;
  command.flag_index = 70;
  command.epoch = 5;
  encode(command, slot.words);
  slot.words[kCommitWord] = commit_word(9, 10);
  std::istringstream text(document.block("Command"));
  const auto* bytes = reinterpret_cast<const unsigned char*>(&slot);
  for (std::size_t i = 0; i < sizeof slot; ++i) {
    unsigned expected = 256;
    text >> std::hex >> expected;
    EXPECT_EQ(bytes[i], expected) << "byte " << i;
  }
  std::string more;
  EXPECT_FALSE(text >> more);
}

TEST(AbiDocument, Immediate) {
  const AbiDocument document;
  std::map<std::string, std::uint32_t> all = {{"slot", make_immediate(63, 0, 0)},
                                              {"flag", make_immediate(0, 65535, 0)},
                                              {"epoch", make_immediate(0, 0, ~0u)}};
  for (const Row& row : document.table("Immediate")) {
    const std::uint64_t mask = ((std::uint64_t{1} << number(row, "bits")) - 1)
                               << number(row, "low bit");
    EXPECT_EQ(all.at(row.at("field")), mask) << row.at("field");
    all.erase(row.at("field"));
  }
  EXPECT_TRUE(all.empty());
}

TEST(AbiDocument, Limits) {
  std::map<std::string, std::uint64_t> limits = {
      {"kLanesMax", kLanesMax},
      {"kRingSlotsMin", kRingSlotsMin},
      {"kRingSlotsMax", kRingSlotsMax},
      {"kFlagGranule", kFlagGranule},
      {"kFlagsMax", kFlagsMax},
      {"kSessionsMax", kSessionsMax},
      {"kBuffersMax", kBuffersMax},
      {"kBufferBytesMax", kBufferBytesMax},
      {"kCommandPayloadBytesMax", kCommandPayloadBytesMax},
      {"kWorldMax", kWorldMax},
      {"kNodesMax", kNodesMax},
      {"kLocalRanksMax", kLocalRanksMax},
      {"kJobNameBytesMax", kJobNameBytesMax},
      {"kNameBytesMax", kNameBytesMax},
      {"kMessageTextBytesMax", kMessageTextBytesMax},
      {"kReasonBytesMax", kReasonBytesMax},
      {"kExchangeBlobBytesMax", kExchangeBlobBytesMax},
      {"kMessageBytesMax", kMessageBytesMax},
      {"kHandshakeBytesMax", kHandshakeBytesMax},
      {"kRequestBytesMax", kRequestBytesMax},
      {"kFrameFdsMax", kFrameFdsMax}};
  const AbiDocument document;
  for (const Row& row : document.table("1. Limits")) {
    const std::string name = row.at("constant");
    ASSERT_EQ(limits.count(name), 1u) << name;
    EXPECT_EQ(limits[name], number(row, "value")) << name;
    limits.erase(name);
  }
  EXPECT_TRUE(limits.empty()) << limits.begin()->first << " is not in ABI.md";
}

TEST(AbiDocument, ErrorCodes) {
  const AbiDocument document;
  std::uint32_t next = 0;
  for (const Row& row : document.table("6. Error codes")) {
    EXPECT_EQ(number(row, "code"), next);
    EXPECT_EQ(row.at("name"), error_code_name(static_cast<ErrorCode>(next)));
    ++next;
  }
  EXPECT_STREQ(error_code_name(static_cast<ErrorCode>(next)), "unknown")
      << "a code is not in ABI.md";
}

}  // namespace
}  // namespace mk::shm
