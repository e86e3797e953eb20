/// \file
/// The client connections of a ControlLoop: accepts them, reads their frames into the control plane
/// and sends its answers, without ever blocking. The loop's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/control/control_loop.h"
#include "daemon/control/control_plane.h"
#include "daemon/control/process_watch.h"
#include "daemon/control/source_line.h"
#include "shm/host/unix_socket.h"

namespace mk::daemon::control {

/// What epoll events carry: the loop's own tokens, then the clients' ids.
inline constexpr std::uint64_t kWakeToken = 0;
inline constexpr std::uint64_t kListenerToken = 1;
inline constexpr ClientId kFirstClient = 2;
/// With a client's id: its process has ended.
inline constexpr std::uint64_t kProcessToken = std::uint64_t{1} << 63;

class Connections final : public ClientPort {
 public:
  /// `epoll` outlives this.
  Connections(const ControlLoopOptions& options, shm::FrameListener listener, int epoll);

  /// Before the first event; `plane` is used until the last one.
  void use(ControlPlane& plane, LogSink log);
  void accept();
  void serve(ClientId id, std::uint32_t events);
  void process_ended(ClientId id);
  /// Handshakes and closings that take too long.
  void tick(std::uint64_t now_ns);
  /// Drops the connections that broke: the last thing of every turn.
  void sweep();
  /// Drops all that have no session: memory has run out.
  void shed();
  /// Sends what goes at once.
  void flush();
  /// Closes all and the listener, too; what is sent from then on goes nowhere.
  void shut();

  // ClientPort
  void send(ClientId id, std::uint16_t type, std::uint64_t request,
            std::span<const std::byte> payload, std::span<const int> fds) override;
  void close(ClientId id) override;
  Status watch_process(ClientId id, UniqueFd told) override;
  std::uint64_t descriptors(std::optional<std::uint32_t> uid) const override;

 private:
  struct Connection {
    shm::FrameSocket socket;
    std::optional<ProcessWatch> process;
    uid_t user = 0;
    bool attached = false;          ///< and its session is alive
    bool ended = false;             ///< its session is not any more
    bool closing = false;           ///< no more frames are taken; goes when all is sent
    bool broken = false;            ///< goes at the end of this turn
    std::string reason;             ///< why
    std::uint64_t deadline_ns = 0;  ///< of the handshake, then of closing
    std::uint64_t unread_since_ns =
        0;                         ///< since when it has read nothing of what is queued; 0: none is
    std::size_t unread_bytes = 0;  ///< queued at that time
    std::uint32_t interest = 0;    ///< epoll events asked for
  };

  void admit(shm::FrameSocket socket);
  /// Whether one more connection of this user may be had; makes room where another has more.
  Status check_room(uid_t user);
  Status check_descriptors(uid_t user) const;
  /// Takes what has come, while nothing waits to be sent.
  void receive(ClientId id, Connection& connection);
  /// An event of this client could not be handled, for want of memory most likely: it goes.
  void give_up(ClientId id, const char* what) noexcept;
  static void say(Connection& connection, ErrorCode code, const std::string& message);
  void break_connection(ClientId id, const std::string& reason);
  void update_interest(ClientId id, Connection& connection);
  bool watch(int operation, int fd, std::uint64_t token, std::uint32_t events);
  void log(LogLevel level, std::string message, std::optional<std::uint32_t> user = std::nullopt,
           SourceLine where = SourceLine::current()) const;

  const ControlLoopOptions options_;
  std::optional<shm::FrameListener> listener_;
  const int epoll_;
  ControlPlane* plane_ = nullptr;
  LogSink log_;
  std::map<ClientId, Connection> connections_;
  std::vector<ClientId> broken_;
  ClientId next_client_ = kFirstClient;
  std::uint64_t accept_paused_until_ns_ = 0;
  bool accept_failing_ = false;
};

}  // namespace mk::daemon::control
