/// \file
/// Who is at the other end of a gRPC connection over a Unix socket. gRPC does not say. So the
/// daemon accepts these connections itself, asks the kernel (SO_PEERCRED), and hands each to the
/// server that its user may speak to.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "daemon/control/log.h"
#include "daemon/service/live_connections.h"
#include "shm/host/result.h"
#include "shm/host/unique_fd.h"
#include "shm/host/unix_socket.h"

namespace mk::daemon {

/// Which process made a connection, by gRPC's name for it. Thread-safe.
class ConnectionBook {
 public:
  /// A descriptor's number for a new connection, and who made it. Numbers are used in turn, so that
  /// one comes back only after kNumbers other connections: a call that is still being answered when
  /// its caller hangs up is not taken for the next caller's.
  UniqueFd number(const shm::FrameSocket& socket, const shm::PeerCredentials& caller);
  /// "uid 0, pid 77"; empty for a peer that came by none of our gates. `grpc_peer` is
  /// grpc::ServerContext::peer().
  std::string who(std::string_view grpc_peer) const;
  std::optional<uid_t> uid_of(std::string_view grpc_peer) const;

 private:
  static constexpr int kNumbers = 256;
  std::optional<shm::PeerCredentials> caller(std::string_view grpc_peer) const;
  mutable std::mutex mutex_;
  std::map<int, shm::PeerCredentials> callers_;
  int next_ = 0;
};

/// How many connections there may be, all alive at once: below the numbers that ConnectionBook has.
struct UnixGateLimits {
  std::size_t connections = 128;
  std::size_t of_user = 32;
  /// Beside them, for those who may change things: however many look, an administrator gets in.
  std::size_t reserve = 32;
};

class UnixGate {
 public:
  struct Options {
    std::string path;
    mode_t mode = 0660;
    std::optional<gid_t> group;  ///< of the file; its members are trusted
    UnixGateLimits limits{};
    /// Told when a connection is turned away; a sentence. On the gate's thread; may be empty.
    std::function<void(const std::string&)> refused{};
  };
  /// Takes the connection over. On the gate's thread.
  using Deliver = std::function<void(UniqueFd connection, bool trusted)>;

  /// Listens at once. A stale socket file is replaced; a live one is refused (kAlreadyExists).
  /// `book` outlives this.
  static Result<std::unique_ptr<UnixGate>> open(Options options, ConnectionBook& book,
                                                Deliver deliver);
  ~UnixGate();  ///< removes the file

 private:
  UnixGate(shm::FrameListener listener, Options options, ConnectionBook& book, Deliver deliver);
  void run();
  void admit(const shm::FrameSocket& socket);
  /// Whether there is a place for one more of this caller.
  bool has_room(const shm::PeerCredentials& caller, bool trust);
  /// Root, this process's own user, and members of the group.
  bool trusted(int fd, const shm::PeerCredentials& caller) const;

  shm::FrameListener listener_;
  const Options options_;
  ConnectionBook& book_;
  const Deliver deliver_;
  LiveConnections live_{std::chrono::seconds(0)};
  UniqueFd stop_;
  std::thread thread_;
};

}  // namespace mk::daemon
