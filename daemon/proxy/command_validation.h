/// \file
/// The check of a command that came out of a ring: pure functions over the copied words. Whatever
/// the words say, the answer is either a command whose every reference lies inside what the session
/// was given, or the first rule it breaks.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/plant.h"
#include "daemon/proxy/bindings.h"
#include "shm/command.h"
#include "shm/ring.h"

namespace mk::daemon {

/// The rules, in the order in which they are checked.
enum class Flaw : std::uint8_t {
  kNone = 0,
  kSequence,           ///< word 5 carries another command's number
  kOpcode,             ///< neither kWrite nor kWriteFlag
  kReservedBits,       ///< not zero
  kPeer,               ///< not a rail peer of the session
  kFlagIndex,          ///< at or beyond the peer's flag count
  kNotZero,            ///< kWriteFlag with a handle, an offset or a byte count
  kSourceHandle,       ///< not bound
  kDestinationHandle,  ///< not bound at the peer
  kBytes,              ///< 0 or above kCommandPayloadBytesMax
  kSourceBounds,       ///< runs past the end of the source
  kDestinationBounds,  ///< runs past the end of the destination
};

/// A command that passed, with what it names. The pointers hold until the bindings are released.
struct AcceptedCommand {
  shm::Command command;
  Peer* peer = nullptr;
  const fabric::LocalRegion* src = nullptr;   ///< null for kWriteFlag
  const fabric::RemoteRegion* dst = nullptr;  ///< null for kWriteFlag
};

/// Checks `words`, the private copy of command number `sequence` of its lane. `accepted` is
/// complete only on kNone.
inline Flaw check_command(const std::uint64_t words[shm::kCommandWords], std::uint64_t sequence,
                          const Bindings& bindings, AcceptedCommand& accepted) {
  if (static_cast<std::uint32_t>(words[shm::kCommitWord]) != static_cast<std::uint32_t>(sequence)) {
    return Flaw::kSequence;
  }
  const shm::Command command = shm::decode(words);
  const bool payload = command.opcode == shm::Opcode::kWrite;
  if (!payload && command.opcode != shm::Opcode::kWriteFlag) return Flaw::kOpcode;
  if (!shm::reserved_bits_clear(words)) return Flaw::kReservedBits;
  Peer* peer = bindings.peer(command.peer);
  if (peer == nullptr) return Flaw::kPeer;
  if (command.flag_index >= peer->flag_count) return Flaw::kFlagIndex;
  accepted.command = command;
  accepted.peer = peer;
  if (!payload) {
    const std::uint64_t rest = command.src_handle | command.dst_handle | command.src_offset |
                               command.dst_offset | command.bytes;
    if (rest != 0) return Flaw::kNotZero;
    accepted.src = nullptr;
    accepted.dst = nullptr;
    return Flaw::kNone;
  }
  const auto* src = bindings.buffers.find(command.src_handle);
  if (src == nullptr) return Flaw::kSourceHandle;
  const auto* dst = peer->buffers.find(command.dst_handle);
  if (dst == nullptr) return Flaw::kDestinationHandle;
  if (command.bytes == 0 || command.bytes > shm::kCommandPayloadBytesMax) return Flaw::kBytes;
  // Offsets have 48 bits and counts 32: the sums cannot wrap in 64.
  if (command.src_offset + command.bytes > src->bytes) return Flaw::kSourceBounds;
  const std::uint64_t dst_begin = MK_PLANT(bounds_without_offset) ? 0 : command.dst_offset;
  if (dst_begin + command.bytes > dst->bytes) return Flaw::kDestinationBounds;
  accepted.src = src->region;
  accepted.dst = dst->region;
  return Flaw::kNone;
}

/// The sentence for a refused command: lane, command number, field, value, and what is allowed.
std::string describe_flaw(Flaw flaw, std::uint32_t lane, std::uint64_t sequence,
                          const std::uint64_t words[shm::kCommandWords], const Bindings& bindings);

}  // namespace mk::daemon
