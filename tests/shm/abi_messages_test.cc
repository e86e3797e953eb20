// Builds every message by the table of ABI.md and compares it with what the code writes and reads.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "abi_document.h"
#include "shm/host/protocol.h"

namespace mk::shm {
namespace {

using test::AbiDocument;
using test::number;
using test::Row;
using Bytes = std::vector<std::byte>;
using Peers = std::vector<Retire::PeerBuffer>;
using Value = std::variant<std::uint64_t, std::string, Bytes, std::vector<Bytes>, Peers>;

struct DocumentedField {
  std::string name;
  std::string type;  ///< u16, u32, u64, str, blob, blobs, peers
  std::size_t bytes_max = 0;
};

/// "job str(128), rank u32" as fields.
std::vector<DocumentedField> fields_of(const Row& row) {
  std::vector<DocumentedField> fields;
  std::istringstream text(row.at("fields"));
  for (std::string item; std::getline(text, item, ',');) {
    std::istringstream words(item);
    DocumentedField field;
    words >> field.name >> field.type;
    if (const std::size_t open = field.type.find('('); open != field.type.npos) {
      field.bytes_max = std::strtoull(field.type.c_str() + open + 1, nullptr, 10);
      field.type.resize(open);
    }
    fields.push_back(field);
  }
  return fields;
}

void put(Bytes& out, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) out.push_back(static_cast<std::byte>(value >> (8 * i)));
}

void put(Bytes& out, const DocumentedField& field, const Value& value) {
  const auto put_blob = [&](const Bytes& blob) {
    put(out, blob.size(), 4);
    out.insert(out.end(), blob.begin(), blob.end());
  };
  if (field.type == "str") {
    const auto& text = std::get<std::string>(value);
    const auto* first = reinterpret_cast<const std::byte*>(text.data());
    put_blob(Bytes(first, first + text.size()));
  } else if (field.type == "blob") {
    put_blob(std::get<Bytes>(value));
  } else if (field.type == "blobs") {
    const auto& blobs = std::get<std::vector<Bytes>>(value);
    put(out, blobs.size(), 4);
    for (const Bytes& blob : blobs) put_blob(blob);
  } else if (field.type == "peers") {
    const auto& peers = std::get<Peers>(value);
    put(out, peers.size(), 4);
    for (const auto& peer : peers) {
      put(out, peer.rank, 4);
      put(out, peer.handle, 2);
    }
  } else {
    ASSERT_TRUE(field.type == "u16" || field.type == "u32" || field.type == "u64")
        << field.name << " " << field.type;
    put(out, std::get<std::uint64_t>(value), field.type == "u16" ? 2 : field.type == "u32" ? 4 : 8);
  }
}

struct Sample {
  Bytes encoded;
  std::map<std::string, Value> values;
  std::function<Status(const Bytes&)> decode;
};

template <class M>
std::pair<const std::uint16_t, Sample> sample(const M& message,
                                              std::map<std::string, Value> values) {
  const auto decode = [](const Bytes& bytes) -> Status {
    const auto result = decode_message<M>(bytes);
    if (!result) return propagate(result);
    return {};
  };
  return {static_cast<std::uint16_t>(M::kType),
          Sample{encode_message(message), std::move(values), decode}};
}

/// One message of every type, each field different, and the same values by name.
std::map<std::uint16_t, Sample> samples() {
  const auto u = [](std::uint64_t value) { return Value(value); };
  const auto s = [](const char* value) { return Value(std::string(value)); };
  const Bytes blob = {std::byte{1}, std::byte{0}, std::byte{255}};
  const std::vector<Bytes> blobs = {blob, {}, {std::byte{9}}};
  return {
      sample(ErrorReply{ErrorCode::kTimeout, "late"}, {{"code", u(9)}, {"message", s("late")}}),
      sample(Hello{0x0102, 0x0304, "1.2.3"},
             {{"abi_major", u(0x0102)}, {"abi_minor", u(0x0304)}, {"client_version", s("1.2.3")}}),
      sample(HelloReply{0x0102, 0x0304, 0x1112131415161718, "4.5"},
             {{"abi_major", u(0x0102)},
              {"abi_minor", u(0x0304)},
              {"generation", u(0x1112131415161718)},
              {"daemon_version", s("4.5")}}),
      sample(Attach{"job", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "secret", "0000:1b:00.0", 11},
             {{"job", s("job")},
              {"rank", u(1)},
              {"world", u(2)},
              {"node_rank", u(3)},
              {"nodes", u(4)},
              {"local_rank", u(5)},
              {"local_size", u(6)},
              {"lane_count", u(7)},
              {"slot_count_log2", u(8)},
              {"flag_count", u(9)},
              {"timeout_ms", u(10)},
              {"secret", s("secret")},
              {"gpu", s("0000:1b:00.0")},
              {"rail", u(11)}}),
      sample(AttachReply{0x01020304, 5, 0x1112131415161718, "loopback"},
             {{"session_id", u(0x01020304)},
              {"session_slot", u(5)},
              {"segment_bytes", u(0x1112131415161718)},
              {"fabric", s("loopback")}}),
      sample(JobUp{}, {}),
      sample(RegisterBuffer{0x1112131415161718, "a"},
             {{"bytes", u(0x1112131415161718)}, {"name", s("a")}}),
      sample(RegisterDeviceBuffer{0x1112131415161718, "a", blob},
             {{"bytes", u(0x1112131415161718)}, {"name", s("a")}, {"key", blob}}),
      sample(RegisterDmabuf{{0x1112131415161718, "a", blob}, 0x2122232425262728},
             {{"bytes", u(0x1112131415161718)},
              {"name", s("a")},
              {"key", blob},
              {"offset", u(0x2122232425262728)}}),
      sample(Retire{0x0304, 0x01020304, {{7, 0x0809}, {0x11121314, 0x1516}}},
             {{"handle", u(0x0304)},
              {"flag_base", u(0x01020304)},
              {"peers", Peers{{7, 0x0809}, {0x11121314, 0x1516}}}}),
      sample(RegisterBufferReply{0x0102}, {{"handle", u(0x0102)}}),
      sample(DeregisterBuffer{0x0304}, {{"handle", u(0x0304)}}),
      sample(AllocFlags{0x01020304}, {{"count", u(0x01020304)}}),
      sample(AllocFlagsReply{0x05060708}, {{"base", u(0x05060708)}}),
      sample(Exchange{"tag", blob, 77}, {{"tag", s("tag")}, {"blob", blob}, {"timeout_ms", u(77)}}),
      sample(ExchangeReply{blobs}, {{"blobs", blobs}}),
      sample(OpenPeerBuffer{3, 0x0102}, {{"local_rank", u(3)}, {"handle", u(0x0102)}}),
      sample(OpenPeerBufferReply{0x1112131415161718}, {{"bytes", u(0x1112131415161718)}}),
      sample(LaunchBegins{}, {}),
      sample(Detach{}, {}),
      sample(Done{}, {}),
      sample(SessionFailed{ErrorCode::kPeerLost, "rank 3"},
             {{"code", u(14)}, {"message", s("rank 3")}}),
  };
}

TEST(AbiMessages, EveryMessageHasTheDocumentedBytes) {
  const AbiDocument document;
  auto left = samples();
  for (const Row& row : document.table("Messages")) {
    const auto type = static_cast<std::uint16_t>(number(row, "type"));
    SCOPED_TRACE(row.at("message"));
    EXPECT_EQ(message_type_name(type), row.at("message"));
    ASSERT_EQ(left.count(type), 1u) << "in ABI.md, not in the code";
    const Sample sample = left[type];
    Bytes expected;
    const auto fields = fields_of(row);
    EXPECT_EQ(fields.size(), sample.values.size());
    for (const DocumentedField& field : fields) {
      ASSERT_EQ(sample.values.count(field.name), 1u) << field.name;
      put(expected, field, sample.values.at(field.name));
    }
    EXPECT_EQ(sample.encoded, expected);
    EXPECT_TRUE(sample.decode(expected));
    left.erase(type);
  }
  for (const auto& [type, sample] : left)
    ADD_FAILURE() << message_type_name(type) << " is not in ABI.md";
  EXPECT_NE(message_type_name(23).find("unknown"), std::string::npos)
      << "a message is not in ABI.md";
}

TEST(AbiMessages, EveryDocumentedLimitIsTheCodes) {
  const AbiDocument document;
  const auto all = samples();
  int checked = 0;
  for (const Row& row : document.table("Messages")) {
    const Sample& sample = all.at(static_cast<std::uint16_t>(number(row, "type")));
    const auto fields = fields_of(row);
    for (const DocumentedField& limited : fields) {
      if (limited.bytes_max == 0) continue;
      SCOPED_TRACE(row.at("message") + "." + limited.name);
      ++checked;
      for (const std::size_t excess : {0u, 1u}) {
        Bytes bytes;
        for (const DocumentedField& field : fields) {
          Value value = sample.values.at(field.name);
          if (field.name == limited.name) {
            const std::size_t size = limited.bytes_max + excess;
            if (field.type == "str") value = std::string(size, 'x');
            if (field.type == "blob") value = Bytes(size);
            if (field.type == "blobs") value = std::vector<Bytes>{{}, Bytes(size)};
          }
          put(bytes, field, value);
        }
        EXPECT_EQ(sample.decode(bytes).has_value(), excess == 0);
      }
    }
  }
  EXPECT_EQ(checked, 16);
}

}  // namespace
}  // namespace mk::shm
