#include "daemon/service/peer_convert.h"

#include <algorithm>

#include "daemon/control/job_secret.h"
#include "daemon/fabric/fabric.h"
#include "shm/host/text.h"
#include "shm/limits.h"

namespace mk::daemon {
namespace {

using fabric::kAddressBytesMax;
using fabric::kKeyBytesMax;
constexpr std::uint32_t kPartSessionsMax = shm::kLocalRanksMax;

std::string as_string(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
Bytes as_bytes(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

// -- to protobuf ------------------------------------------------------------------------------

void put(const PeerHello& from, v1::PeerMessage& to) {
  v1::Hello& hello = *to.mutable_hello();
  hello.set_node(from.node);
  hello.set_generation(from.generation);
  hello.set_abi_major(from.abi_major);
  hello.set_abi_minor(from.abi_minor);
  hello.set_version(from.version);
  hello.set_fabric(from.fabric);
  for (const Bytes& address : from.rail_addresses) hello.add_rail_addresses(as_string(address));
  for (const std::string& device : from.rail_devices) hello.add_rail_devices(device);
  hello.set_protocol(from.protocol);
}

void put(const JobOffer& from, v1::PeerMessage& to) {
  v1::JobOffer& offer = *to.mutable_job_offer();
  offer.set_job(from.job);
  offer.set_part_id(from.part_id);
  offer.set_node_rank(from.node_rank);
  offer.set_nodes(from.nodes);
  offer.set_local_size(from.local_size);
  offer.set_uid(from.uid);
  offer.set_has_secret(from.has_secret);
  offer.set_nonce(as_string(from.nonce));
}

void put(const JobProof& from, v1::PeerMessage& to) {
  v1::JobProof& proof = *to.mutable_job_proof();
  proof.set_job(from.job);
  proof.set_part_id(from.part_id);
  proof.set_peer_part_id(from.peer_part_id);
  proof.set_proof(as_string(from.proof));
}

void put(const JobPart& from, v1::PeerMessage& to) {
  v1::JobPart& part = *to.mutable_job_part();
  part.set_job(from.job);
  part.set_part_id(from.part_id);
  part.set_node_rank(from.node_rank);
  part.set_nodes(from.nodes);
  part.set_local_size(from.local_size);
  for (const PeerSession& session : from.sessions) {
    v1::PeerSession& one = *part.add_sessions();
    one.set_rank(session.rank);
    one.set_slot(session.slot);
    one.set_flag_count(session.flag_count);
    one.set_flags_key(as_string(session.flags_key));
  }
}

void put(const JobReady& from, v1::PeerMessage& to) {
  v1::JobReady& ready = *to.mutable_job_ready();
  ready.set_job(from.job);
  ready.set_part_id(from.part_id);
  ready.set_peer_part_id(from.peer_part_id);
}

void put(const RegionAnnounce& from, v1::PeerMessage& to) {
  v1::RegionAnnounce& region = *to.mutable_region_announce();
  region.set_job(from.job);
  region.set_part_id(from.part_id);
  region.set_rank(from.rank);
  region.set_handle(from.handle);
  region.set_bytes(from.bytes);
  region.set_key(as_string(from.key));
}

void put(const RegionWithdraw& from, v1::PeerMessage& to) {
  v1::RegionWithdraw& region = *to.mutable_region_withdraw();
  region.set_job(from.job);
  region.set_part_id(from.part_id);
  region.set_rank(from.rank);
  region.set_handle(from.handle);
  region.set_shared(from.shared);
  region.set_flag_base(from.flag_base);
  region.set_flag_count(from.flag_count);
  if (from.arrivals) region.set_arrivals(*from.arrivals);
}

void put(const ExchangePart& from, v1::PeerMessage& to) {
  v1::ExchangePart& part = *to.mutable_exchange_part();
  part.set_job(from.job);
  part.set_part_id(from.part_id);
  part.set_rank(from.rank);
  part.set_sequence(from.sequence);
  part.set_tag(from.tag);
  part.set_blob(as_string(from.blob));
}

void put(const JobLeft& from, v1::PeerMessage& to) {
  v1::JobLeft& left = *to.mutable_job_left();
  left.set_job(from.job);
  left.set_part_id(from.part_id);
  left.set_rank(from.rank);
  left.set_code(static_cast<std::uint32_t>(from.code));
  left.set_reason(std::string(shm::clip_utf8(from.reason, shm::kMessageTextBytesMax)));
  if (from.peer_part_id) left.set_peer_part_id(*from.peer_part_id);
}

void put(const RailMoved& from, v1::PeerMessage& to) {
  v1::RailMoved& moved = *to.mutable_rail_moved();
  moved.set_rail(from.rail);
  moved.set_address(as_string(from.address));
}

// -- from protobuf ----------------------------------------------------------------------------

/// Collects the first breach of a limit of one message.
class Checker {
 public:
  explicit Checker(const char* kind) : kind_(kind) {}
  void at_most(const char* field, std::uint64_t value, std::uint64_t max) {
    if (value > max && status_) {
      status_ = fail(ErrorCode::kProtocol, "peer message {}: {} is {}, at most {} is allowed",
                     kind_, field, value, max);
    }
  }
  void size(const char* field, const std::string& value, std::size_t max) {
    at_most(field, value.size(), max);
  }
  /// A name that people get to see.
  std::string text(const char* field, const std::string& value, std::size_t max) {
    size(field, value, max);
    return shm::plain_text(value, max);
  }
  /// The value when it fits 16 bits.
  std::uint16_t word(const char* field, std::uint32_t value) {
    at_most(field, value, 0xffff);
    return static_cast<std::uint16_t>(value);
  }
  Result<PeerMessage> result(PeerMessage message) {
    if (!status_) return propagate(status_);
    return message;
  }

 private:
  const char* kind_;
  Status status_;
};

Result<PeerMessage> take(const v1::Hello& from) {
  Checker check("hello");
  check.at_most("node", from.node(), shm::kNodesMax - 1);
  check.at_most("number of rails", static_cast<std::uint64_t>(from.rail_addresses_size()),
                shm::kLocalRanksMax);
  PeerHello hello;
  hello.node = from.node();
  hello.generation = from.generation();
  hello.abi_major = check.word("abi_major", from.abi_major());
  hello.abi_minor = check.word("abi_minor", from.abi_minor());
  hello.version = check.text("bytes of version", from.version(), shm::kNameBytesMax);
  hello.fabric = check.text("bytes of fabric", from.fabric(), shm::kNameBytesMax);
  for (const std::string& address : from.rail_addresses()) {
    check.size("bytes of a rail's address", address, kAddressBytesMax);
    hello.rail_addresses.push_back(as_bytes(address));
  }
  check.at_most("number of rails' devices", static_cast<std::uint64_t>(from.rail_devices_size()),
                shm::kLocalRanksMax);
  for (const std::string& device : from.rail_devices()) {
    hello.rail_devices.push_back(
        check.text("bytes of a rail's device", device, shm::kNameBytesMax));
  }
  hello.protocol = from.protocol();
  return check.result(std::move(hello));
}

Result<PeerMessage> take(const v1::JobOffer& from) {
  Checker check("job_offer");
  check.at_most("node_rank", from.node_rank(), shm::kNodesMax - 1);
  check.at_most("nodes", from.nodes(), shm::kNodesMax);
  check.at_most("local_size", from.local_size(), shm::kLocalRanksMax);
  check.size("bytes of nonce", from.nonce(), kNonceBytes);
  JobOffer offer;
  offer.job = check.text("bytes of job", from.job(), shm::kJobNameBytesMax);
  offer.part_id = from.part_id();
  offer.node_rank = from.node_rank();
  offer.nodes = from.nodes();
  offer.local_size = from.local_size();
  offer.uid = from.uid();
  offer.has_secret = from.has_secret();
  offer.nonce = as_bytes(from.nonce());
  return check.result(std::move(offer));
}

Result<PeerMessage> take(const v1::JobProof& from) {
  Checker check("job_proof");
  check.size("bytes of proof", from.proof(), kDigestBytes);
  JobProof proof;
  proof.job = check.text("bytes of job", from.job(), shm::kJobNameBytesMax);
  proof.part_id = from.part_id();
  proof.peer_part_id = from.peer_part_id();
  proof.proof = as_bytes(from.proof());
  return check.result(std::move(proof));
}

Result<PeerMessage> take(const v1::JobPart& from) {
  Checker check("job_part");
  check.at_most("node_rank", from.node_rank(), shm::kNodesMax - 1);
  check.at_most("nodes", from.nodes(), shm::kNodesMax);
  check.at_most("local_size", from.local_size(), shm::kLocalRanksMax);
  check.at_most("number of sessions", static_cast<std::uint64_t>(from.sessions_size()),
                kPartSessionsMax);
  JobPart part;
  part.job = check.text("bytes of job", from.job(), shm::kJobNameBytesMax);
  part.part_id = from.part_id();
  part.node_rank = from.node_rank();
  part.nodes = from.nodes();
  part.local_size = from.local_size();
  for (const v1::PeerSession& one : from.sessions()) {
    check.at_most("rank", one.rank(), shm::kWorldMax - 1);
    check.at_most("slot", one.slot(), shm::kSessionsMax - 1);
    check.at_most("flag_count", one.flag_count(), shm::kFlagsMax);
    check.size("bytes of flags_key", one.flags_key(), kKeyBytesMax);
    part.sessions.push_back({one.rank(), one.slot(), one.flag_count(), as_bytes(one.flags_key())});
  }
  return check.result(std::move(part));
}

Result<PeerMessage> take(const v1::JobReady& from) {
  Checker check("job_ready");
  std::string job = check.text("bytes of job", from.job(), shm::kJobNameBytesMax);
  return check.result(JobReady{std::move(job), from.part_id(), from.peer_part_id()});
}

Result<PeerMessage> take(const v1::RegionAnnounce& from) {
  Checker check("region_announce");
  check.at_most("rank", from.rank(), shm::kWorldMax - 1);
  check.at_most("bytes", from.bytes(), shm::kBufferBytesMax);
  check.size("bytes of key", from.key(), kKeyBytesMax);
  RegionAnnounce region;
  region.job = check.text("bytes of job", from.job(), shm::kJobNameBytesMax);
  region.part_id = from.part_id();
  region.rank = from.rank();
  region.handle = check.word("handle", from.handle());
  region.bytes = from.bytes();
  region.key = as_bytes(from.key());
  return check.result(std::move(region));
}

Result<PeerMessage> take(const v1::RegionWithdraw& from) {
  Checker check("region_withdraw");
  check.at_most("rank", from.rank(), shm::kWorldMax - 1);
  const std::uint16_t handle = check.word("handle", from.handle());
  check.at_most("flag_base", from.flag_base(), shm::kFlagsMax);
  check.at_most("flag_count", from.flag_count(), shm::kFlagsMax);
  RegionWithdraw region{check.text("bytes of job", from.job(), shm::kJobNameBytesMax),
                        from.part_id(),
                        from.rank(),
                        handle,
                        from.shared(),
                        from.flag_base(),
                        from.flag_count()};
  if (from.has_arrivals()) region.arrivals = from.arrivals();
  return check.result(std::move(region));
}

Result<PeerMessage> take(const v1::ExchangePart& from) {
  Checker check("exchange_part");
  check.at_most("rank", from.rank(), shm::kWorldMax - 1);
  check.size("bytes of blob", from.blob(), shm::kExchangeBlobBytesMax);
  ExchangePart part;
  part.job = check.text("bytes of job", from.job(), shm::kJobNameBytesMax);
  part.part_id = from.part_id();
  part.rank = from.rank();
  part.sequence = from.sequence();
  part.tag = check.text("bytes of tag", from.tag(), shm::kNameBytesMax);
  part.blob = as_bytes(from.blob());
  return check.result(std::move(part));
}

Result<PeerMessage> take(const v1::JobLeft& from) {
  Checker check("job_left");
  check.at_most("rank", from.rank(), shm::kWorldMax - 1);
  JobLeft left;
  left.job = check.text("bytes of job", from.job(), shm::kJobNameBytesMax);
  left.part_id = from.part_id();
  left.rank = from.rank();
  left.code = static_cast<ErrorCode>(from.code());  // a newer peer's code is still an error
  // Whatever a sentence of another daemon is like, it costs nobody a stream.
  left.reason = shm::plain_text(from.reason(), shm::kMessageTextBytesMax);
  if (from.has_peer_part_id()) left.peer_part_id = from.peer_part_id();
  return check.result(std::move(left));
}

Result<PeerMessage> take(const v1::RailMoved& from) {
  Checker check("rail_moved");
  check.at_most("rail", from.rail(), shm::kLocalRanksMax - 1);
  check.size("bytes of address", from.address(), kAddressBytesMax);
  return check.result(RailMoved{from.rail(), as_bytes(from.address())});
}

}  // namespace

v1::PeerMessage to_proto(const PeerMessage& message) {
  v1::PeerMessage out;
  std::visit([&out](const auto& kind) { put(kind, out); }, message);
  return out;
}

Result<PeerMessage> from_proto(const v1::PeerMessage& message) {
  switch (message.kind_case()) {
    case v1::PeerMessage::kHello:
      return take(message.hello());
    case v1::PeerMessage::kJobOffer:
      return take(message.job_offer());
    case v1::PeerMessage::kJobProof:
      return take(message.job_proof());
    case v1::PeerMessage::kJobPart:
      return take(message.job_part());
    case v1::PeerMessage::kJobReady:
      return take(message.job_ready());
    case v1::PeerMessage::kRegionAnnounce:
      return take(message.region_announce());
    case v1::PeerMessage::kRegionWithdraw:
      return take(message.region_withdraw());
    case v1::PeerMessage::kExchangePart:
      return take(message.exchange_part());
    case v1::PeerMessage::kJobLeft:
      return take(message.job_left());
    case v1::PeerMessage::kRailMoved:
      return take(message.rail_moved());
    case v1::PeerMessage::KIND_NOT_SET:
      break;
  }
  return fail(ErrorCode::kProtocol, "peer message of a kind that this version does not know");
}

}  // namespace mk::daemon
