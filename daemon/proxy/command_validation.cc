#include "daemon/proxy/command_validation.h"

#include <fmt/format.h>

#include "shm/host/result.h"

namespace mk::daemon {

namespace {

/// The first reserved bits that are set: which word, and which of its bits are reserved.
std::string describe_reserved(const std::uint64_t words[shm::kCommandWords]) {
  struct Reserved {
    std::uint32_t word;
    std::uint64_t mask;
    const char* bits;
  };
  constexpr Reserved kReserved[] = {{0, 0xff00u, "15:8"},
                                    {1, ~shm::kOffsetMask, "63:48"},
                                    {2, ~shm::kOffsetMask, "63:48"},
                                    {shm::kCommitWord, 0x7fffffff00000000ull, "62:32"}};
  for (const Reserved& reserved : kReserved) {
    if ((words[reserved.word] & reserved.mask) != 0) {
      return fmt::format("word {} is {:#018x}: its reserved bits {} must be zero", reserved.word,
                         words[reserved.word], reserved.bits);
    }
  }
  return "reserved bits must be zero";
}

std::string bound_ranks(const Bindings& bindings) {
  std::string text;
  int listed = 0;
  for (const auto& peer : bindings.peers()) {
    if (++listed > 8) return text + ", ...";
    text += fmt::format("{}{}", text.empty() ? "" : ", ", peer->rank);
  }
  return text.empty() ? "none" : text;
}

std::string describe_not_zero(const shm::Command& command) {
  const struct {
    const char* name;
    std::uint64_t value;
  } fields[] = {{"source handle", command.src_handle},
                {"destination handle", command.dst_handle},
                {"source offset", command.src_offset},
                {"destination offset", command.dst_offset},
                {"bytes", command.bytes}};
  for (const auto& field : fields) {
    if (field.value != 0) {
      return fmt::format("{} is {}: a flag-only write (opcode 2) has no payload, it must be 0",
                         field.name, field.value);
    }
  }
  return "a flag-only write (opcode 2) has no payload";
}

std::string describe_bounds(const char* which, std::uint16_t handle, std::uint64_t offset,
                            std::uint32_t bytes, std::uint64_t limit) {
  return fmt::format(
      "{0} offset {1} with bytes {2} ends at {3}: {0} handle {4} has {5} bytes, offset + bytes may "
      "be at most that",
      which, offset, bytes, offset + bytes, handle, limit);
}

std::string describe_field(Flaw flaw, std::uint64_t sequence,
                           const std::uint64_t words[shm::kCommandWords],
                           const Bindings& bindings) {
  const shm::Command command = shm::decode(words);
  const Peer* peer = bindings.peer(command.peer);
  const auto* src = bindings.buffers.find(command.src_handle);
  const auto* dst = peer != nullptr ? peer->buffers.find(command.dst_handle) : nullptr;
  switch (flaw) {
    case Flaw::kNone:
      break;
    case Flaw::kSequence:
      return fmt::format("sequence is {}: the slot's next command is number {}",
                         static_cast<std::uint32_t>(words[shm::kCommitWord]),
                         static_cast<std::uint32_t>(sequence));
    case Flaw::kOpcode:
      return fmt::format("opcode is {}: 1 (write) and 2 (flag-only write) are allowed",
                         static_cast<unsigned>(command.opcode));
    case Flaw::kReservedBits:
      return describe_reserved(words);
    case Flaw::kPeer:
      return fmt::format("peer is rank {}: the session's rail peers are ranks {}", command.peer,
                         bound_ranks(bindings));
    case Flaw::kFlagIndex:
      return fmt::format("flag index is {}: rank {} has {} flags", command.flag_index, command.peer,
                         peer != nullptr ? peer->flag_count : 0);
    case Flaw::kNotZero:
      return describe_not_zero(command);
    case Flaw::kSourceHandle:
      return fmt::format("source handle is {}: the session has no such buffer (register it first)",
                         command.src_handle);
    case Flaw::kDestinationHandle:
      return fmt::format("destination handle is {}: rank {} has announced no such buffer",
                         command.dst_handle, command.peer);
    case Flaw::kBytes:
      return fmt::format("bytes is {}: 1 to {} are allowed", command.bytes,
                         shm::kCommandPayloadBytesMax);
    case Flaw::kSourceBounds:
      return describe_bounds("source", command.src_handle, command.src_offset, command.bytes,
                             src != nullptr ? src->bytes : 0);
    case Flaw::kDestinationBounds:
      return describe_bounds("destination", command.dst_handle, command.dst_offset, command.bytes,
                             dst != nullptr ? dst->bytes : 0);
  }
  return "it is valid";
}

}  // namespace

std::string describe_flaw(Flaw flaw, std::uint32_t lane, std::uint64_t sequence,
                          const std::uint64_t words[shm::kCommandWords], const Bindings& bindings) {
  return fmt::format("lane {}, command {}: {}", lane, sequence,
                     describe_field(flaw, sequence, words, bindings));
}

}  // namespace mk::daemon
