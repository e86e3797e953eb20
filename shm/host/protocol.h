/// \file
/// The messages between libmkclient and mkerneld, as plain structs with `encode`/`decode`. The
/// first exchange is Hello, which names the ABI on both sides; nothing else is answered before it.
///
/// Every request gets exactly one reply with the same request number: its own reply type or
/// ErrorReply. Integers are little-endian and unaligned, strings and blobs carry a 32-bit length. A
/// decoder refuses what is short, has bytes left over, or exceeds a limit of limits.h (kProtocol).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shm/host/result.h"
#include "shm/limits.h"

namespace mk::shm {

enum class MessageType : std::uint16_t {
  kError = 1,  ///< reply
  kHello = 2,  ///< request
  kHelloReply = 3,
  kAttach = 4,          ///< request
  kAttachReply = 5,     ///< + segment fd
  kJobUp = 6,           ///< from the daemon: all ranks attached, all links connected
  kRegisterBuffer = 7,  ///< request, + memory fd
  kRegisterBufferReply = 8,
  kDeregisterBuffer = 9,  ///< request; reply kDone
  kAllocFlags = 10,       ///< request
  kAllocFlagsReply = 11,
  kExchange = 12,  ///< request; its reply comes when every rank has sent its part
  kExchangeReply = 13,
  kOpenPeerBuffer = 14,        ///< request
  kOpenPeerBufferReply = 15,   ///< + memory fd
  kDetach = 16,                ///< request; reply kDone, then the daemon closes
  kDone = 17,                  ///< reply without content
  kSessionFailed = 18,         ///< from the daemon: the session is dead; says why
  kRegisterDeviceBuffer = 19,  ///< request; reply kRegisterBufferReply
  kRegisterDmabuf = 20,        ///< request, + dmabuf; reply kRegisterBufferReply
  kRetire = 21,                ///< request; reply kDone, when nobody names the buffer any more
  kLaunchBegins = 22,          ///< request; reply kDone
};

struct ErrorReply {
  static constexpr MessageType kType = MessageType::kError;
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

struct Hello {
  static constexpr MessageType kType = MessageType::kHello;
  std::uint16_t abi_major = 0;
  std::uint16_t abi_minor = 0;
  std::string client_version;
};

struct HelloReply {
  static constexpr MessageType kType = MessageType::kHelloReply;
  std::uint16_t abi_major = 0;
  std::uint16_t abi_minor = 0;
  std::uint64_t generation = 0;
  std::string daemon_version;
};

inline constexpr std::uint32_t kAnyRail = 0xffff'ffff;

/// One rank joins its job. Ranks are node-major: rank = node_rank * local_size + local_rank.
struct Attach {
  static constexpr MessageType kType = MessageType::kAttach;
  std::string job;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::uint32_t node_rank = 0;
  std::uint32_t nodes = 1;
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  std::uint32_t lane_count = 1;
  std::uint32_t slot_count_log2 = 10;
  std::uint32_t flag_count = kFlagsDefault;
  std::uint32_t timeout_ms =
      60'000;  ///< for the rendezvous: after it, the missing ranks are listed
  /// What all ranks of the job know and nobody else; empty: none. On the wire only when there is
  /// one, so that a client without a secret also attaches to a daemon that knows of none.
  std::string secret;
  /// PCI address of the rank's GPU, "0000:1b:00.0"; empty: none, or not known. It and `rail` are on
  /// the wire only when one says something: for daemons of ABI 1.4.
  std::string gpu;
  std::uint32_t rail = kAnyRail;  ///< of the node; kAnyRail: the daemon's choice
};

struct AttachReply {
  static constexpr MessageType kType = MessageType::kAttachReply;
  std::uint32_t session_id = 0;
  std::uint32_t session_slot = 0;
  std::uint64_t segment_bytes = 0;
  std::string fabric;  ///< e.g. "loopback", "ofi:tcp;ofi_rxm"
};

struct JobUp {
  static constexpr MessageType kType = MessageType::kJobUp;
};

struct RegisterBuffer {
  static constexpr MessageType kType = MessageType::kRegisterBuffer;
  std::uint64_t bytes = 0;
  std::string name;  ///< for users: shown by the Admin service
};

struct RegisterBufferReply {
  static constexpr MessageType kType = MessageType::kRegisterBufferReply;
  std::uint16_t handle = kNoHandle;
};

/// Memory of a GPU, which the client owns. Since ABI 1.1.
struct RegisterDeviceBuffer {
  static constexpr MessageType kType = MessageType::kRegisterDeviceBuffer;
  std::uint64_t bytes = 0;
  std::string name;
  std::vector<std::byte> key;  ///< gpu::MemoryKey
};

/// The same with a file by which a NIC reaches the memory itself. Since ABI 1.2.
struct RegisterDmabuf {
  static constexpr MessageType kType = MessageType::kRegisterDmabuf;
  RegisterDeviceBuffer buffer;
  std::uint64_t offset = 0;  ///< where in the file the buffer begins
};

struct DeregisterBuffer {
  static constexpr MessageType kType = MessageType::kDeregisterBuffer;
  std::uint16_t handle = kNoHandle;
};

/// One rank gives up its part of what several ranks use together (an operator): a buffer and flags
/// of its own, and the buffers of others that it could name. What it committed before counts. Whose
/// buffer it could name, could name its own. Buffer, handle and flags come back when each of those
/// ranks has said the same, or has gone. Since ABI 1.3.
struct Retire {
  static constexpr MessageType kType = MessageType::kRetire;
  /// Another rank's buffer, which this rank's commands and kernels will not name any more. The rank
  /// is on the same node, or a rail peer.
  struct PeerBuffer {
    std::uint32_t rank = 0;
    std::uint16_t handle = kNoHandle;
    friend bool operator==(const PeerBuffer&, const PeerBuffer&) = default;
  };
  std::uint16_t handle = kNoHandle;
  std::uint32_t flag_base = kNoFlags;  ///< as AllocFlagsReply gave it out; kNoFlags: none
  std::vector<PeerBuffer> peers;
};

struct AllocFlags {
  static constexpr MessageType kType = MessageType::kAllocFlags;
  std::uint32_t count = 0;  ///< rounded up to whole granules
};

struct AllocFlagsReply {
  static constexpr MessageType kType = MessageType::kAllocFlagsReply;
  std::uint32_t base = 0;  ///< first flag index, a multiple of kFlagGranule
};

/// An all-gather of small blobs over the job. Ranks must make their exchanges in the same order;
/// `tag` is checked to be equal on all ranks. So a rank that is out of step gets an error instead
/// of another's bytes. A buffer registered before the exchange is known to all rail peers' daemons
/// after it.
struct Exchange {
  static constexpr MessageType kType = MessageType::kExchange;
  std::string tag;
  std::vector<std::byte> blob;
  std::uint32_t timeout_ms = 60'000;
};

struct ExchangeReply {
  static constexpr MessageType kType = MessageType::kExchangeReply;
  std::vector<std::vector<std::byte>> blobs;  ///< by rank
};

/// Asks for the memory of a local rank's buffer, to map it as peer memory.
struct OpenPeerBuffer {
  static constexpr MessageType kType = MessageType::kOpenPeerBuffer;
  std::uint32_t local_rank = 0;
  std::uint16_t handle = kNoHandle;
};

struct OpenPeerBufferReply {
  static constexpr MessageType kType = MessageType::kOpenPeerBufferReply;
  std::uint64_t bytes = 0;
};

/// A bit of SegmentHeader::features, beside those of shm/layout.h: the daemon takes LaunchBegins.
inline constexpr std::uint64_t kFeatureLaunchBegins = 1u << 2;

/// After a pause: commands will come. The daemon wakes the thread that takes them.
struct LaunchBegins {
  static constexpr MessageType kType = MessageType::kLaunchBegins;
};

struct Detach {
  static constexpr MessageType kType = MessageType::kDetach;
};

struct Done {
  static constexpr MessageType kType = MessageType::kDone;
};

struct SessionFailed {
  static constexpr MessageType kType = MessageType::kSessionFailed;
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

/// The payload of a frame of type `Message::kType`. Defined for every struct above. The sentence of
/// ErrorReply and SessionFailed is cut to kMessageTextBytesMax. All other strings and blobs are the
/// caller's to keep within kJobNameBytesMax (job), kNameBytesMax and kExchangeBlobBytesMax: the
/// receiver refuses longer ones.
template <class Message>
std::vector<std::byte> encode_message(const Message& message);
template <class Message>
Result<Message> decode_message(std::span<const std::byte> payload);

/// A message type's name, e.g. "attach"; "unknown(77)" for others.
std::string message_type_name(std::uint16_t type);

}  // namespace mk::shm
