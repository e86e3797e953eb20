/// \file
/// Every limit of the ABI in one place, with the relations between them checked at compile time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mk::shm {

/// Bytes of one command and words in it.
inline constexpr std::size_t kCommandBytes = 48;
inline constexpr std::size_t kCommandWords = 6;

/// Lanes (command rings) of one session.
inline constexpr std::uint32_t kLanesMax = 16;

/// Slots of one ring: a power of two between these.
inline constexpr std::uint32_t kRingSlotsMin = 16;
inline constexpr std::uint32_t kRingSlotsMax = 1u << 16;
inline constexpr std::uint32_t kRingSlotsDefault = 1u << 10;

/// Arrival flags of one session; handed out in granules, each of which has one epoch window.
inline constexpr std::uint32_t kFlagsMax = 1u << 16;
inline constexpr std::uint32_t kFlagsDefault = 1u << 14;
inline constexpr std::uint32_t kFlagGranule = 64;
/// No flag's number: where a message may name flags and names none.
inline constexpr std::uint32_t kNoFlags = 0xffffffff;

/// Sessions one daemon holds at once (the immediate of an unordered fabric names the session in 6
/// bits).
inline constexpr std::uint32_t kSessionsMax = 64;

/// Buffers one session registers; handle 0 is never given out.
inline constexpr std::uint32_t kBuffersMax = 1024;
inline constexpr std::uint16_t kNoHandle = 0;

/// Bytes one command moves and the width of its offsets.
inline constexpr std::uint64_t kCommandPayloadBytesMax = 1ull << 30;
inline constexpr unsigned kOffsetBits = 48;
inline constexpr std::uint64_t kBufferBytesMax = 1ull << kOffsetBits;

/// The largest job: ranks, nodes, and ranks of one node.
inline constexpr std::uint32_t kWorldMax = 8192;
inline constexpr std::uint32_t kNodesMax = 1024;
inline constexpr std::uint32_t kLocalRanksMax = 16;

/// Commands of one submission to the NIC.
inline constexpr std::uint32_t kBatchMax = 8;

/// Strings of the socket protocol and of the header. Names are versions, buffer names, fabrics and
/// exchange tags; texts are sentences for users, and longer ones are cut.
inline constexpr std::size_t kJobNameBytesMax = 128;
inline constexpr std::size_t kJobSecretBytesMax = 128;
/// "0000:1b:00.0"
inline constexpr std::size_t kPciAddressBytesMax = 16;
inline constexpr std::size_t kNameBytesMax = 256;
inline constexpr std::size_t kMessageTextBytesMax = 8192;
inline constexpr std::size_t kReasonBytesMax = 512;
inline constexpr std::size_t kExchangeBlobBytesMax = 64 * 1024;
inline constexpr std::size_t kMessageBytesMax = 4 * 1024 * 1024;
/// Of what a client sends: before it has attached, and then.
inline constexpr std::size_t kHandshakeBytesMax = 4 * 1024;
inline constexpr std::size_t kRequestBytesMax = 128 * 1024;

/// Bytes of one rank's part of an exchange over `world` ranks, 1 to kWorldMax: all parts go into
/// one message. That is a 32-bit count and, for each rank, a 32-bit length and its part.
constexpr std::size_t exchange_blob_bytes_max(std::uint32_t world) {
  const std::size_t share = (kMessageBytesMax - sizeof(std::uint32_t)) / world;
  const std::size_t part = share - sizeof(std::uint32_t);
  return part < kExchangeBlobBytesMax ? part : kExchangeBlobBytesMax;
}

/// The immediate of an unordered fabric: session slot, flag index, low bits of the epoch.
inline constexpr unsigned kImmediateSlotBits = 6;
inline constexpr unsigned kImmediateFlagBits = 16;
inline constexpr unsigned kImmediateEpochBits = 10;

static_assert(kCommandWords * 8 == kCommandBytes);
static_assert(kImmediateSlotBits + kImmediateFlagBits + kImmediateEpochBits == 32);
static_assert(kSessionsMax <= 1u << kImmediateSlotBits);
static_assert(kFlagsMax <= 1u << kImmediateFlagBits);
static_assert(kFlagsMax % kFlagGranule == 0 && kFlagsDefault % kFlagGranule == 0);
static_assert((kRingSlotsMax & (kRingSlotsMax - 1)) == 0 &&
              (kRingSlotsMin & (kRingSlotsMin - 1)) == 0);
static_assert(kRingSlotsMin > kBatchMax, "a ring holds at least one full batch");
static_assert(kBuffersMax < 1u << 16, "handles are 16 bits");
static_assert(kWorldMax < 1u << 16, "a command names its peer in 16 bits");
static_assert(exchange_blob_bytes_max(63) == kExchangeBlobBytesMax);
static_assert(exchange_blob_bytes_max(1024) == 4091);
static_assert(exchange_blob_bytes_max(kWorldMax) == 507);
static_assert(kJobNameBytesMax + kJobSecretBytesMax + kPciAddressBytesMax + kNameBytesMax <=
                  kHandshakeBytesMax / 2,
              "an Attach and a Hello fit, with room for fields to come");
static_assert(kExchangeBlobBytesMax + kNameBytesMax + 1024 <= kRequestBytesMax, "an Exchange fits");
static_assert(kRequestBytesMax <= kMessageBytesMax);

}  // namespace mk::shm
