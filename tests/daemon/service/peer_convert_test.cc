// Every peer message survives protobuf, and values out of the ABI's limits are refused.
#include "daemon/service/peer_convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "daemon/control/job_secret.h"
#include "shm/limits.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;

class Random {
 public:
  std::uint64_t word() {
    // Small values, powers of two and their neighbours are as likely as any.
    switch (engine_() % 3) {
      case 0:
        return engine_() % 4;
      case 1:
        return (std::uint64_t{1} << (engine_() % 64)) - engine_() % 2;
      default:
        return engine_();
    }
  }
  std::uint32_t below(std::uint64_t limit) { return static_cast<std::uint32_t>(word() % limit); }
  Bytes bytes(std::size_t max) {
    Bytes out(engine_() % 3 == 0 ? max : below(max + 1));
    for (std::byte& one : out) one = static_cast<std::byte>(engine_());
    return out;
  }
  std::string text(std::size_t max) {
    std::string out(engine_() % 3 == 0 ? max : below(max + 1), 'x');
    for (char& one : out) one = static_cast<char>(' ' + engine_() % 95);
    return out;
  }

 private:
  std::mt19937_64 engine_{20240917};
};

PeerMessage random_message(std::size_t kind, Random& r) {
  const std::string job = r.text(shm::kJobNameBytesMax);
  const std::uint64_t part_id = r.word();
  const std::uint32_t rank = r.below(shm::kWorldMax);
  const auto handle = static_cast<std::uint16_t>(r.word());
  switch (kind) {
    case 0: {
      PeerHello hello{r.below(shm::kNodesMax),
                      r.word(),
                      static_cast<std::uint16_t>(r.word()),
                      static_cast<std::uint16_t>(r.word()),
                      r.text(shm::kNameBytesMax),
                      r.text(shm::kNameBytesMax),
                      {},
                      {}};
      for (std::uint32_t i = r.below(shm::kLocalRanksMax + 1); i > 0; --i) {
        hello.rail_devices.push_back(r.text(shm::kNameBytesMax));
      }
      for (std::uint32_t i = r.below(shm::kLocalRanksMax + 1); i > 0; --i) {
        hello.rail_addresses.push_back(r.bytes(512));
      }
      hello.protocol = r.below(1ull << 32);
      return hello;
    }
    case 1: {
      JobPart part{job,
                   part_id,
                   r.below(shm::kNodesMax),
                   r.below(shm::kNodesMax + 1),
                   r.below(shm::kLocalRanksMax + 1),
                   {}};
      for (std::uint32_t i = r.below(shm::kLocalRanksMax + 1); i > 0; --i) {
        part.sessions.push_back({r.below(shm::kWorldMax), r.below(shm::kSessionsMax),
                                 r.below(shm::kFlagsMax + 1), r.bytes(512)});
      }
      return part;
    }
    case 2:
      return JobReady{job, part_id, r.word()};
    case 3:
      return RegionAnnounce{
          job, part_id, rank, handle, r.word() % (shm::kBufferBytesMax + 1), r.bytes(512)};
    case 4:
      return RegionWithdraw{
          job,
          part_id,
          rank,
          handle,
          r.word() % 2 == 0,
          r.below(shm::kFlagsMax + 1),
          r.below(shm::kFlagsMax + 1),
          r.word() % 2 == 0 ? std::nullopt : std::optional<std::uint64_t>(r.word())};
    case 5:
      return ExchangePart{job,
                          part_id,
                          rank,
                          r.word(),
                          r.text(shm::kNameBytesMax),
                          r.bytes(shm::kExchangeBlobBytesMax)};
    case 6:
      return JobLeft{job,
                     part_id,
                     rank,
                     static_cast<ErrorCode>(r.word()),
                     r.text(shm::kMessageTextBytesMax),
                     r.word() % 2 == 0 ? std::nullopt : std::optional<std::uint64_t>(r.word())};
    case 8:
      return JobOffer{job,
                      part_id,
                      r.below(shm::kNodesMax),
                      r.below(shm::kNodesMax + 1),
                      r.below(shm::kLocalRanksMax + 1),
                      r.below(1ull << 32),
                      r.word() % 2 == 0,
                      r.bytes(kNonceBytes)};
    case 9:
      return JobProof{job, part_id, r.word(), r.bytes(kDigestBytes)};
    default:
      return RailMoved{r.below(shm::kLocalRanksMax), r.bytes(512)};
  }
}

// The structs have no operator==; these are all their fields.
auto fields(const PeerHello& m) {
  return std::tie(m.node, m.generation, m.abi_major, m.abi_minor, m.version, m.fabric,
                  m.rail_addresses, m.rail_devices, m.protocol);
}
auto fields(const JobOffer& m) {
  return std::tie(m.job, m.part_id, m.node_rank, m.nodes, m.local_size, m.uid, m.has_secret,
                  m.nonce);
}
auto fields(const JobProof& m) { return std::tie(m.job, m.part_id, m.peer_part_id, m.proof); }
auto fields(const RailMoved& m) { return std::tie(m.rail, m.address); }
auto fields(const PeerSession& m) { return std::tie(m.rank, m.slot, m.flag_count, m.flags_key); }
auto fields(const JobReady& m) { return std::tie(m.job, m.part_id, m.peer_part_id); }
auto fields(const RegionAnnounce& m) {
  return std::tie(m.job, m.part_id, m.rank, m.handle, m.bytes, m.key);
}
auto fields(const RegionWithdraw& m) {
  return std::tie(m.job, m.part_id, m.rank, m.handle, m.shared, m.flag_base, m.flag_count,
                  m.arrivals);
}
auto fields(const ExchangePart& m) {
  return std::tie(m.job, m.part_id, m.rank, m.sequence, m.tag, m.blob);
}
auto fields(const JobLeft& m) {
  return std::tie(m.job, m.part_id, m.rank, m.code, m.reason, m.peer_part_id);
}

template <class Message>
bool same(const Message& a, const Message& b) {
  return fields(a) == fields(b);
}
bool same(const JobPart& a, const JobPart& b) {
  return std::tie(a.job, a.part_id, a.node_rank, a.nodes, a.local_size) ==
             std::tie(b.job, b.part_id, b.node_rank, b.nodes, b.local_size) &&
         std::equal(
             a.sessions.begin(), a.sessions.end(), b.sessions.begin(), b.sessions.end(),
             [](const PeerSession& x, const PeerSession& y) { return fields(x) == fields(y); });
}

class RoundTrip : public testing::TestWithParam<std::size_t> {};

TEST_P(RoundTrip, KeepsEveryField) {
  Random random;
  for (int i = 0; i < 300; ++i) {
    const PeerMessage message = random_message(GetParam(), random);
    ASSERT_EQ(message.index(), GetParam());
    std::string wire;
    ASSERT_TRUE(to_proto(message).SerializeToString(&wire));
    v1::PeerMessage parsed;
    ASSERT_TRUE(parsed.ParseFromString(wire));
    const auto back = from_proto(parsed);
    ASSERT_TRUE(back) << back.error().message;
    ASSERT_EQ(back->index(), message.index());
    EXPECT_TRUE(std::visit(
        [&](const auto& kind) { return same(kind, std::get<std::decay_t<decltype(kind)>>(*back)); },
        message));
  }
}
INSTANTIATE_TEST_SUITE_P(EveryKind, RoundTrip,
                         testing::Range<std::size_t>(0, std::variant_size_v<PeerMessage>));

// Neither protobuf nor we drop a stream for it.
TEST(PeerConvert, ATextOfAnyBytesIsTakenAndShown) {
  const auto back = [](const PeerMessage& message) {
    v1::PeerMessage parsed;
    EXPECT_TRUE(parsed.ParseFromString(to_proto(message).SerializeAsString()));
    auto taken = from_proto(parsed);
    EXPECT_TRUE(taken) << taken.error().message;
    return taken ? *taken : PeerMessage();
  };
  const auto exchange = back(ExchangePart{"job", 1, 2, 3, "caf\xe9", {}});
  EXPECT_EQ(std::get<ExchangePart>(exchange).tag, "caf\\xe9");
  const auto ready = back(JobReady{"\xff", 1, 2});
  EXPECT_EQ(std::get<JobReady>(ready).job, "\\xff");
  PeerHello hello;
  hello.version = "\xc0";
  hello.rail_devices = {"mlx\x1b"};
  const auto said = std::get<PeerHello>(back(hello));
  EXPECT_EQ(said.version, "\\xc0");
  EXPECT_EQ(said.rail_devices.at(0), "mlx\\x1b");
  v1::PeerMessage left;
  left.mutable_job_left()->set_reason("\xe9" + std::string(100'000, 'x'));
  const auto cut = from_proto(left);
  ASSERT_TRUE(cut);
  EXPECT_EQ(std::get<JobLeft>(*cut).reason,
            "\\xe9" + std::string(shm::kMessageTextBytesMax - 4, 'x'));
  // Other versions refuse a longer one.
  const v1::PeerMessage sent =
      to_proto(JobLeft{"job", 1, 2, ErrorCode::kTimeout, std::string(100'000, 'x'), {}});
  EXPECT_EQ(sent.job_left().reason().size(), shm::kMessageTextBytesMax);
}

TEST(PeerConvert, ValuesOutOfLimitsAreRefused) {
  const auto refused = [](const auto& fill, const char* part_of_message) {
    v1::PeerMessage message;
    fill(message);
    const auto result = from_proto(message);
    ASSERT_FALSE(result) << part_of_message;
    EXPECT_EQ(result.error().code, ErrorCode::kProtocol);
    EXPECT_THAT(result.error().message, HasSubstr(part_of_message));
  };
  const std::string long_job(shm::kJobNameBytesMax + 1, 'x');
  refused([](auto& m) { m.mutable_hello()->set_node(1024); }, "hello: node is 1024, at most 1023");
  refused([](auto& m) { m.mutable_hello()->set_abi_major(65536); }, "hello: abi_major is 65536");
  refused([](auto& m) { m.mutable_hello()->set_abi_minor(65536); }, "hello: abi_minor");
  refused([](auto& m) { m.mutable_hello()->set_version(std::string(257, 'v')); }, "version");
  refused([](auto& m) { m.mutable_hello()->set_fabric(std::string(257, 'v')); }, "fabric");
  refused([](auto& m) { m.mutable_hello()->add_rail_addresses(std::string(513, 'a')); },
          "rail's address is 513");
  refused(
      [](auto& m) {
        for (int i = 0; i < 17; ++i) m.mutable_hello()->add_rail_addresses("");
      },
      "number of rails is 17");
  refused([&](auto& m) { m.mutable_job_part()->set_job(long_job); }, "job_part: bytes of job");
  refused([](auto& m) { m.mutable_job_part()->set_nodes(1025); }, "nodes is 1025");
  refused([](auto& m) { m.mutable_job_part()->set_node_rank(1024); }, "node_rank is 1024");
  refused([](auto& m) { m.mutable_job_part()->set_local_size(17); }, "local_size is 17");
  refused([](auto& m) { m.mutable_job_part()->add_sessions()->set_rank(8192); }, "rank is 8192");
  refused([](auto& m) { m.mutable_job_part()->add_sessions()->set_slot(64); }, "slot is 64");
  refused([](auto& m) { m.mutable_job_part()->add_sessions()->set_flag_count(65537); },
          "flag_count");
  refused(
      [](auto& m) { m.mutable_job_part()->add_sessions()->set_flags_key(std::string(1025, 'k')); },
      "flags_key is 1025");
  refused(
      [](auto& m) {
        for (int i = 0; i < 17; ++i) m.mutable_job_part()->add_sessions();
      },
      "number of sessions is 17");
  refused([&](auto& m) { m.mutable_job_ready()->set_job(long_job); }, "job_ready: bytes of job");
  refused([](auto& m) { m.mutable_region_announce()->set_handle(65536); }, "handle is 65536");
  refused([](auto& m) { m.mutable_region_announce()->set_bytes(shm::kBufferBytesMax + 1); },
          "region_announce: bytes is");
  refused([](auto& m) { m.mutable_region_announce()->set_key(std::string(1025, 'k')); }, "key");
  refused([](auto& m) { m.mutable_region_announce()->set_rank(8192); }, "rank");
  refused([](auto& m) { m.mutable_region_withdraw()->set_handle(65536); }, "handle is 65536");
  refused([](auto& m) { m.mutable_exchange_part()->set_blob(std::string(65537, 'b')); }, "blob");
  refused([](auto& m) { m.mutable_exchange_part()->set_tag(std::string(257, 't')); }, "tag");
  refused([](auto& m) { m.mutable_job_left()->set_rank(8192); }, "job_left: rank");
  refused([](auto& m) { m.mutable_rail_moved()->set_rail(16); }, "rail_moved: rail is 16");
  refused([](auto& m) { m.mutable_rail_moved()->set_address(std::string(513, 'a')); },
          "rail_moved: bytes of address is 513");
  refused([](auto&) {}, "of a kind that this version does not know");
}

}  // namespace
}  // namespace mk::daemon
