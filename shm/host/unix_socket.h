/// \file
/// Framed messages over a Unix stream socket, with file descriptors beside them. A frame is a
/// 16-byte FrameHeader and `payload_bytes` of payload; descriptors travel by SCM_RIGHTS with the
/// frame's first byte. Used by libmkclient and the daemon, and by loopback fabrics among
/// themselves.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::shm {

/// Descriptors one frame may carry.
inline constexpr std::size_t kFrameFdsMax = 4;

/// Little-endian, as all of the ABI.
struct FrameHeader {
  std::uint32_t payload_bytes;
  std::uint16_t type;      ///< MessageType
  std::uint16_t reserved;  ///< zero
  std::uint64_t request;   ///< echoed in the reply; 0 for a message nobody asked for
};
static_assert(sizeof(FrameHeader) == 16);

/// One received or outgoing message.
struct Frame {
  std::uint16_t type = 0;
  std::uint64_t request = 0;
  std::vector<std::byte> payload;
  std::vector<UniqueFd> fds;
};

/// Who is at the other end, by SO_PEERCRED.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};

/// A connected stream socket. Not thread-safe, but one thread may send while another receives.
class FrameSocket {
 public:
  explicit FrameSocket(UniqueFd fd);

  /// Connects to `path`; a path starting with '@' is in the abstract namespace. The error says
  /// whether nobody listens (stale file, daemon not running) or access was refused.
  static Result<FrameSocket> connect(const std::string& path, std::chrono::milliseconds timeout);
  /// Two connected sockets.
  static Result<std::pair<FrameSocket, FrameSocket>> pair();

  /// Sends one frame, blocking until `deadline`. `fds` are duplicated by the kernel and stay the
  /// caller's. kTimeout before the first byte went leaves the connection usable. Later, it is shut
  /// down, for the peer holds half a frame. Refuses what the peer would refuse: payloads above
  /// kMessageBytesMax, more than kFrameFdsMax descriptors.
  Status send(std::uint16_t type, std::uint64_t request, std::span<const std::byte> payload,
              std::span<const int> fds, std::chrono::steady_clock::time_point deadline);
  /// Receives one frame, blocking until `deadline` (kTimeout), end of stream (kUnavailable, "closed
  /// by peer"), or a malformed frame (kProtocol). After kTimeout the next call continues; after the
  /// others it fails again.
  Result<Frame> receive(std::chrono::steady_clock::time_point deadline);

  /// For an event loop: takes what has arrived without blocking; nullopt while no whole frame is
  /// there. Bounded: a frame larger than kMessageBytesMax or with more than kFrameFdsMax
  /// descriptors is refused (kProtocol).
  Result<std::optional<Frame>> try_receive();
  /// For an event loop: queues the frame (duplicating `fds`) and sends as much as goes without
  /// blocking. Fails with kLimitExceeded when more than 2 * kMessageBytesMax are queued: the peer
  /// does not read.
  Status queue_send(std::uint16_t type, std::uint64_t request, std::span<const std::byte> payload,
                    std::span<const int> fds);
  /// For an event loop: sends more of what is queued; call when the socket is writable.
  Status flush();
  bool has_queued() const;
  std::size_t queued_bytes() const { return out_bytes_; }
  /// Descriptors that wait to be sent.
  std::size_t queued_fds() const;
  /// From now on a frame with a larger payload is refused (kProtocol); kMessageBytesMax before the
  /// first call.
  void limit_received(std::size_t payload_bytes) { in_bytes_max_ = payload_bytes; }

  Result<PeerCredentials> credentials() const;
  int fd() const { return fd_.get(); }
  /// Wakes a thread blocked in `receive` of this socket with end of stream.
  void shutdown();

 private:
  struct Queued {
    std::vector<std::byte> bytes;
    std::size_t sent = 0;
    std::vector<UniqueFd> fds;
  };
  enum class Step { kWhole, kPart, kNothing };
  /// Reads once without blocking; says whether the frame is whole, or a part came, or nothing was
  /// there.
  Result<Step> receive_step();
  Frame take_frame();
  tl::unexpected<Error> out_of_step(tl::unexpected<Error> error);
  Status flush_until(std::chrono::steady_clock::time_point deadline);

  UniqueFd fd_;
  FrameHeader in_header_{};
  std::size_t in_bytes_max_;       ///< of a payload
  std::size_t in_bytes_ = 0;       ///< of the frame being received, header included
  Frame in_;                       ///< its payload and descriptors so far
  std::optional<Error> in_error_;  ///< the stream is out of step: every later receive repeats this
  std::deque<Queued> out_;
  std::size_t out_bytes_ = 0;  ///< not yet sent, of all in `out_`
};

/// A listening Unix socket. Owns the file: removes it when destroyed, and only if it is still its
/// own.
class FrameListener {
 public:
  /// Binds and listens (non-blocking). A stale socket file (nobody listens) is replaced; if
  /// somebody listens, the error is kAlreadyExists and names the holder's pid. '@' names the
  /// abstract namespace. `mode` is the file's mode.
  static Result<FrameListener> listen(const std::string& path, mode_t mode = 0666);
  /// Takes over a stream socket that somebody else has bound to `path` and listens with; the file
  /// stays theirs.
  static Result<FrameListener> adopt(UniqueFd socket, const std::string& path);
  FrameListener(FrameListener&&) noexcept;
  FrameListener& operator=(FrameListener&&) noexcept;
  ~FrameListener();

  /// The next connection, or nullopt when none waits.
  Result<std::optional<FrameSocket>> try_accept();
  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }

 private:
  explicit FrameListener(std::string path) : path_(std::move(path)) {}
  Status lock();
  Status replace_stale_file();
  void close();

  UniqueFd fd_;
  UniqueFd lock_;  ///< held lock file, so that two daemons starting at once cannot both win
  std::string path_;
  ino_t inode_ = 0;  ///< of the socket file, 0 while there is none of ours
};

}  // namespace mk::shm
