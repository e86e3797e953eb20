/// \file
/// One command: 48 bytes in six 8-byte words, no field across a word. It names buffers by handle,
/// never by address.
///
///   word 0   opcode 7:0, reserved 15:8, peer 31:16, source handle 47:32, destination handle 63:48
///   word 1   source offset 47:0, reserved 63:48
///   word 2   destination offset 47:0, reserved 63:48
///   word 3   bytes 31:0, flag index 63:32
///   word 4   epoch 31:0, commit time 63:32
///   word 5   sequence 31:0, reserved 62:32, lap parity 63 (the commit word)
///
/// Reserved bits are zero; the daemon refuses a command in which they are not.
#pragma once

#include <cstdint>

#include "shm/limits.h"
#include "shm/platform.h"

namespace mk::shm {

enum class Opcode : std::uint8_t {
  /// Never valid, so that zeroed memory is not a command.
  kInvalid = 0,
  /// Copies `bytes` from the source to the peer's destination, then shows the arrival flag there.
  kWrite = 1,
  /// No payload: only shows the flag at the peer (bank release, barriers).
  kWriteFlag = 2,
};

/// A command's fields, in host form. Offsets and `bytes` are in bytes.
struct Command {
  Opcode opcode = Opcode::kInvalid;
  std::uint16_t peer = 0;            ///< the destination's rank in the job; it must be a rail peer
  std::uint16_t src_handle = 0;      ///< a buffer of the sending session; 0 for kWriteFlag
  std::uint16_t dst_handle = 0;      ///< a buffer of the receiving session; 0 for kWriteFlag
  std::uint64_t src_offset = 0;      ///< 48 bits
  std::uint64_t dst_offset = 0;      ///< 48 bits
  std::uint32_t bytes = 0;           ///< 1 .. kCommandPayloadBytesMax; 0 for kWriteFlag
  std::uint32_t flag_index = 0;      ///< an arrival flag of the receiving session
  std::uint32_t epoch = 0;           ///< the value the flag shows afterwards
  std::uint32_t commit_time_ns = 0;  ///< low 32 bits of CLOCK_MONOTONIC, 0 if not taken

  friend constexpr bool operator==(const Command&, const Command&) = default;
};

/// The bytes in the ring. The commit word is written last, at release; all others are plain stores.
struct alignas(16) CommandSlot {
  std::uint64_t words[kCommandWords];
};
static_assert(sizeof(CommandSlot) == kCommandBytes);

inline constexpr std::uint32_t kEpochWord = 4;
inline constexpr std::uint32_t kCommitWord = 5;
inline constexpr std::uint64_t kParityBit = 1ull << 63;
inline constexpr std::uint64_t kOffsetMask = (1ull << kOffsetBits) - 1;

/// The parity that a committed slot shows in the lap of `sequence`: 1 in laps 0, 2, 4, ... and 0 in
/// laps 1, 3, 5, ... Memory starts at zero, so a slot counts as committed exactly when its bit
/// differs from what the lap before left. No slot is ever cleared.
MK_HOST_DEVICE constexpr std::uint64_t lap_parity(std::uint64_t sequence,
                                                  std::uint32_t slot_count_log2) {
  return ((sequence >> slot_count_log2) & 1) == 0 ? kParityBit : 0;
}

/// The commit word of command number `sequence` (counted from 0 since the ring was made).
MK_HOST_DEVICE constexpr std::uint64_t commit_word(std::uint64_t sequence,
                                                   std::uint32_t slot_count_log2) {
  return lap_parity(sequence, slot_count_log2) | (sequence & 0xffffffffu);
}

/// Writes words 0..4 of `command`; the caller adds the commit word.
MK_HOST_DEVICE constexpr void encode(const Command& command, std::uint64_t words[kCommandWords]) {
  words[0] = static_cast<std::uint64_t>(command.opcode) |
             static_cast<std::uint64_t>(command.peer) << 16 |
             static_cast<std::uint64_t>(command.src_handle) << 32 |
             static_cast<std::uint64_t>(command.dst_handle) << 48;
  words[1] = command.src_offset & kOffsetMask;
  words[2] = command.dst_offset & kOffsetMask;
  words[3] = static_cast<std::uint64_t>(command.bytes) |
             static_cast<std::uint64_t>(command.flag_index) << 32;
  words[4] = static_cast<std::uint64_t>(command.epoch) |
             static_cast<std::uint64_t>(command.commit_time_ns) << 32;
}

/// Reads words 0..4. Any bit pattern decodes; `reserved_bits_clear` and the daemon's checks decide
/// what is valid.
MK_HOST_DEVICE constexpr Command decode(const std::uint64_t words[kCommandWords]) {
  Command command;
  command.opcode = static_cast<Opcode>(words[0] & 0xff);
  command.peer = static_cast<std::uint16_t>(words[0] >> 16);
  command.src_handle = static_cast<std::uint16_t>(words[0] >> 32);
  command.dst_handle = static_cast<std::uint16_t>(words[0] >> 48);
  command.src_offset = words[1] & kOffsetMask;
  command.dst_offset = words[2] & kOffsetMask;
  command.bytes = static_cast<std::uint32_t>(words[3]);
  command.flag_index = static_cast<std::uint32_t>(words[3] >> 32);
  command.epoch = static_cast<std::uint32_t>(words[4]);
  command.commit_time_ns = static_cast<std::uint32_t>(words[4] >> 32);
  return command;
}

/// Whether every reserved bit of words 0..5 is zero.
MK_HOST_DEVICE constexpr bool reserved_bits_clear(const std::uint64_t words[kCommandWords]) {
  return (words[0] & 0xff00u) == 0 && (words[1] & ~kOffsetMask) == 0 &&
         (words[2] & ~kOffsetMask) == 0 && (words[kCommitWord] & 0x7fffffff00000000ull) == 0;
}

}  // namespace mk::shm
