/// \file
/// What endpoints tell each other. Address and Key travel over the Peer service; datagrams go from
/// endpoint to endpoint over the network itself (README.md, "Connecting").
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "daemon/fabric/blob.h"

namespace mk::fabric::verbs {

/// Registrations that one region is made of at most.
inline constexpr std::uint32_t kPiecesMax = 40;

/// Queue pairs of one link at most.
inline constexpr std::uint32_t kQueuesMax = kVerbsQueuesMax;

/// An endpoint's address as peers receive it.
struct Address {
  static constexpr std::uint64_t kMagic = 0x32'72'64'61'76'62'6b'6d;  // "mkbvadr2"
  std::uint64_t magic = kMagic;
  Token endpoint{};  ///< its name, which all know
  /// The proof of who sent a datagram: each peer is told an address with another one (passes.h).
  Token pass{};
  std::array<std::uint8_t, 16> gid{};
  std::uint32_t lid = 0;            ///< InfiniBand
  std::uint32_t contact_queue = 0;  ///< the number of the datagram queue pair
  std::uint32_t contact_key = 0;    ///< its Q_Key
  std::uint32_t mtu = IBV_MTU_256;  ///< ibv_mtu
  std::uint32_t link_layer = IBV_LINK_LAYER_UNSPECIFIED;
  std::uint32_t pkey = 0;
  std::uint32_t unordered = 0;  ///< 1: arrivals by immediate
  std::uint32_t version = 0;    ///< grows when the endpoint is to be reached otherwise
};
static_assert(sizeof(Address) == 88);

/// A region's key as peers receive it. Large memory is registered in pieces of 2^piece_shift bytes.
struct Key {
  static constexpr std::uint64_t kMagic = 0x32'79'65'6b'76'62'6b'6d;  // "mkbvkey2"
  std::uint64_t magic = kMagic;
  Token endpoint{};
  Token region{};
  std::uint64_t address = 0;  ///< what offset 0 is called on the wire
  std::uint64_t bytes = 0;
  std::uint32_t piece_shift = 63;
  std::uint32_t reserved = 0;
  std::array<std::uint32_t, kPiecesMax> rkeys{};

  /// Whether `rkeys` has an entry for every byte. A peer's key may say anything.
  bool covers_all() const {
    return bytes != 0 && piece_shift < 64 && (bytes - 1) >> piece_shift < kPiecesMax;
  }
  /// What a peer must know to write at `offset`, and how far that goes.
  std::uint32_t rkey(std::uint64_t offset) const { return rkeys[piece_of(offset)]; }
  std::uint64_t piece_of(std::uint64_t offset) const { return offset >> piece_shift; }
  std::uint64_t left_in_piece(std::uint64_t offset) const {
    const std::uint64_t piece = std::uint64_t{1} << piece_shift;
    return piece - (offset & (piece - 1));
  }
  /// For whom all of it is too long.
  std::uint64_t digest() const {
    std::array<std::byte, sizeof(Key)> all;
    std::memcpy(all.data(), this, sizeof(Key));
    std::uint64_t sum = 14695981039346656037ull;
    for (const std::byte byte : all)
      sum = (sum ^ std::to_integer<unsigned>(byte)) * 1099511628211ull;
    return sum;
  }
};
static_assert(sizeof(Key) == 224);

/// One end of a queue pair's connection.
struct QueueEnd {
  std::uint32_t number = 0;
  std::uint32_t first_packet = 0;  ///< packet sequence number it sends from
};

enum class DatagramKind : std::uint32_t {
  kConnect = 1,  ///< ConnectBody; answered by kAccept or kRefuse
  kRegion,       ///< RegionBody: is the key valid? answered by kAccept or kRefuse
  kAccept,       ///< an answer: AcceptBody, or the Key again
  kRefuse,       ///< an answer: `code`, and text
  kDisconnect,   ///< `number`: of the connect that is given up; not answered
  kGone,         ///< the sending endpoint closes; not answered
  kMoved,        ///< Address: the sending endpoint is to be reached there from now on; not answered
};

struct ConnectBody {
  Address from;
  std::uint32_t queues = 0;
  std::uint32_t reserved = 0;
  std::array<QueueEnd, kQueuesMax> ends{};
};
struct RegionBody {
  Address from;
  Token region{};
  std::uint64_t digest = 0;  ///< of its key
};
struct AcceptBody {
  std::uint32_t queues = 0;
  std::uint32_t reserved = 0;
  std::array<QueueEnd, kQueuesMax> ends{};
  Address from{.magic = 0};  ///< where the ends were made; older peers do not say
};

/// At most 256 bytes, which the smallest MTU carries in one packet.
struct Datagram {
  static constexpr std::uint64_t kMagic = 0x32'6d'67'64'76'62'6b'6d;  // "mkbvdgm2"
  std::uint64_t magic = kMagic;
  Token to{};                ///< Address::pass
  Token from{};              ///< Address::endpoint
  std::uint64_t number = 0;  ///< of the question, among those of `from`; answers repeat it
  DatagramKind kind = DatagramKind::kGone;
  std::uint32_t code = 0;  ///< kRefuse: ErrorCode
  std::array<std::byte, 176> body{};

  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(body));
    std::memcpy(body.data(), &value, sizeof(T));
  }
  template <class T>
  T get() const {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(body));
    T value;
    std::memcpy(&value, body.data(), sizeof(T));
    return value;
  }
  void put_text(std::string_view text) {
    body.fill(std::byte{0});
    std::memcpy(body.data(), text.data(), std::min(text.size(), body.size() - 1));
  }
  std::string text() const {
    const auto* const first = reinterpret_cast<const char*>(body.data());
    return {first, ::strnlen(first, body.size())};
  }
};
static_assert(sizeof(Datagram) <= 256 && sizeof(Datagram) % 8 == 0);

}  // namespace mk::fabric::verbs
