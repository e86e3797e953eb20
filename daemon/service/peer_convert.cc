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

/// Which part of which job a message is about.
template <class From, class To>
void put_part_id(const From& from, To& to) {
  to.set_job(from.job);
  to.set_part_id(from.part_id);
}

/// The same, and the part's place in the job.
template <class From, class To>
void put_place(const From& from, To& to) {
  put_part_id(from, to);
  to.set_node_rank(from.node_rank);
  to.set_nodes(from.nodes);
  to.set_local_size(from.local_size);
}

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
  put_place(from, offer);
  offer.set_uid(from.uid);
  offer.set_has_secret(from.has_secret);
  offer.set_nonce(as_string(from.nonce));
}

void put(const JobProof& from, v1::PeerMessage& to) {
  v1::JobProof& proof = *to.mutable_job_proof();
  put_part_id(from, proof);
  proof.set_peer_part_id(from.peer_part_id);
  proof.set_proof(as_string(from.proof));
}

void put(const JobPart& from, v1::PeerMessage& to) {
  v1::JobPart& part = *to.mutable_job_part();
  put_place(from, part);
  for (const PeerSession& session : from.sessions) {
    v1::PeerSession& one = *part.add_sessions();
    one.set_rank(session.rank);
    one.set_slot(session.slot);
    one.set_flag_count(session.flag_count);
    one.set_flags_key(as_string(session.flags_key));
    one.set_rail(session.rail);
  }
}

void put(const JobReady& from, v1::PeerMessage& to) {
  v1::JobReady& ready = *to.mutable_job_ready();
  put_part_id(from, ready);
  ready.set_peer_part_id(from.peer_part_id);
}

void put(const RegionAnnounce& from, v1::PeerMessage& to) {
  v1::RegionAnnounce& region = *to.mutable_region_announce();
  put_part_id(from, region);
  region.set_rank(from.rank);
  region.set_handle(from.handle);
  region.set_bytes(from.bytes);
  region.set_key(as_string(from.key));
}

void put(const RegionWithdraw& from, v1::PeerMessage& to) {
  v1::RegionWithdraw& region = *to.mutable_region_withdraw();
  put_part_id(from, region);
  region.set_rank(from.rank);
  region.set_handle(from.handle);
  region.set_shared(from.shared);
  region.set_flag_base(from.flag_base);
  region.set_flag_count(from.flag_count);
  if (from.arrivals) region.set_arrivals(*from.arrivals);
}

void put(const ExchangePart& from, v1::PeerMessage& to) {
  v1::ExchangePart& part = *to.mutable_exchange_part();
  put_part_id(from, part);
  part.set_rank(from.rank);
  part.set_sequence(from.sequence);
  part.set_tag(from.tag);
  part.set_blob(as_string(from.blob));
}

void put(const JobLeft& from, v1::PeerMessage& to) {
  v1::JobLeft& left = *to.mutable_job_left();
  put_part_id(from, left);
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
  /// Which part of which job the message is about.
  template <class From, class To>
  void part_id(const From& from, To& to) {
    to.job = text("bytes of job", from.job(), shm::kJobNameBytesMax);
    to.part_id = from.part_id();
  }
  /// The same, and the part's place in the job.
  template <class From, class To>
  void place(const From& from, To& to) {
    at_most("node_rank", from.node_rank(), shm::kNodesMax - 1);
    at_most("nodes", from.nodes(), shm::kNodesMax);
    at_most("local_size", from.local_size(), shm::kLocalRanksMax);
    part_id(from, to);
    to.node_rank = from.node_rank();
    to.nodes = from.nodes();
    to.local_size = from.local_size();
  }
  /// The same as `part_id`, and one of the job's ranks.
  template <class From, class To>
  void rank(const From& from, To& to) {
    at_most("rank", from.rank(), shm::kWorldMax - 1);
    part_id(from, to);
    to.rank = from.rank();
  }
  Bytes bytes(const char* field, const std::string& value, std::size_t max) {
    size(field, value, max);
    return as_bytes(value);
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
    hello.rail_addresses.push_back(
        check.bytes("bytes of a rail's address", address, kAddressBytesMax));
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
  JobOffer offer;
  check.place(from, offer);
  offer.uid = from.uid();
  offer.has_secret = from.has_secret();
  offer.nonce = check.bytes("bytes of nonce", from.nonce(), kNonceBytes);
  return check.result(std::move(offer));
}

Result<PeerMessage> take(const v1::JobProof& from) {
  Checker check("job_proof");
  JobProof proof;
  check.part_id(from, proof);
  proof.peer_part_id = from.peer_part_id();
  proof.proof = check.bytes("bytes of proof", from.proof(), kDigestBytes);
  return check.result(std::move(proof));
}

Result<PeerMessage> take(const v1::JobPart& from) {
  Checker check("job_part");
  JobPart part;
  check.place(from, part);
  check.at_most("number of sessions", static_cast<std::uint64_t>(from.sessions_size()),
                kPartSessionsMax);
  for (const v1::PeerSession& one : from.sessions()) {
    check.at_most("rank", one.rank(), shm::kWorldMax - 1);
    check.at_most("slot", one.slot(), shm::kSessionsMax - 1);
    check.at_most("flag_count", one.flag_count(), shm::kFlagsMax);
    check.at_most("rail", one.rail(), shm::kLocalRanksMax - 1);
    part.sessions.push_back({one.rank(), one.slot(), one.flag_count(),
                             check.bytes("bytes of flags_key", one.flags_key(), kKeyBytesMax),
                             one.rail()});
  }
  return check.result(std::move(part));
}

Result<PeerMessage> take(const v1::JobReady& from) {
  Checker check("job_ready");
  JobReady ready;
  check.part_id(from, ready);
  ready.peer_part_id = from.peer_part_id();
  return check.result(std::move(ready));
}

Result<PeerMessage> take(const v1::RegionAnnounce& from) {
  Checker check("region_announce");
  RegionAnnounce region;
  check.rank(from, region);
  check.at_most("bytes", from.bytes(), shm::kBufferBytesMax);
  region.handle = check.word("handle", from.handle());
  region.bytes = from.bytes();
  region.key = check.bytes("bytes of key", from.key(), kKeyBytesMax);
  return check.result(std::move(region));
}

Result<PeerMessage> take(const v1::RegionWithdraw& from) {
  Checker check("region_withdraw");
  RegionWithdraw region;
  check.rank(from, region);
  check.at_most("flag_base", from.flag_base(), shm::kFlagsMax);
  check.at_most("flag_count", from.flag_count(), shm::kFlagsMax);
  region.handle = check.word("handle", from.handle());
  region.shared = from.shared();
  region.flag_base = from.flag_base();
  region.flag_count = from.flag_count();
  if (from.has_arrivals()) region.arrivals = from.arrivals();
  return check.result(std::move(region));
}

Result<PeerMessage> take(const v1::ExchangePart& from) {
  Checker check("exchange_part");
  ExchangePart part;
  check.rank(from, part);
  part.sequence = from.sequence();
  part.tag = check.text("bytes of tag", from.tag(), shm::kNameBytesMax);
  part.blob = check.bytes("bytes of blob", from.blob(), shm::kExchangeBlobBytesMax);
  return check.result(std::move(part));
}

Result<PeerMessage> take(const v1::JobLeft& from) {
  Checker check("job_left");
  JobLeft left;
  check.rank(from, left);
  left.code = static_cast<ErrorCode>(from.code());  // a newer peer's code is still an error
  // Whatever a sentence of another daemon is like, it costs nobody a stream.
  left.reason = shm::plain_text(from.reason(), shm::kMessageTextBytesMax);
  if (from.has_peer_part_id()) left.peer_part_id = from.peer_part_id();
  return check.result(std::move(left));
}

Result<PeerMessage> take(const v1::RailMoved& from) {
  Checker check("rail_moved");
  check.at_most("rail", from.rail(), shm::kLocalRanksMax - 1);
  RailMoved moved{from.rail(), check.bytes("bytes of address", from.address(), kAddressBytesMax)};
  return check.result(std::move(moved));
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
