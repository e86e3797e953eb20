/// \file
/// The gRPC server of a daemon: Peer, Admin, health checking and reflection on one address.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/config/address.h"
#include "daemon/rpc/grpc_channel.h"
#include "daemon/service/log.h"
#include "daemon/service/tcp_gate.h"
#include "daemon/service/unix_gate.h"
#include "shm/host/result.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace mk::daemon {

struct GrpcListenOptions {
  Address address;
  /// TCP only. When it names its files, they are watched: new ones are used from the next
  /// connection on. While they are broken, or not each other's, there is no new connection.
  TlsTexts tls;
  /// What everybody who can connect may call. The services outlive the server.
  std::vector<grpc::Service*> services;
  /// Unix sockets: what root, the daemon's own user and members of `group` may call instead.
  std::vector<grpc::Service*> trusted_services;
  std::uint32_t mode = 0660;  ///< of a Unix socket's file, and its group
  std::optional<gid_t> group;
  ConnectionBook* book = nullptr;  ///< outlives the server; null: one of its own
  Logger* logger = nullptr;        ///< hears of connections that are turned away; may be null
  /// TCP with TLS: hears of handshakes that fail, of whom that may be, and what OpenSSL says. On
  /// gRPC's threads. Of one server of the process, after route_grpc_log.
  std::function<void(const std::vector<std::string>& remotes, std::string_view why)> refused_tls;
  TcpGateLimits tcp;
  UnixGateLimits unix_connections;
  /// A connection without a call for so long is closed.
  std::chrono::milliseconds idle_timeout{60'000};
};

class GrpcServer {
 public:
  /// Listens; calls are served at once, but health says NOT_SERVING until `set_serving`. An address
  /// that another process holds is refused (kAlreadyExists), with the holder's pid for a Unix
  /// socket; a stale socket file is replaced.
  static Result<std::unique_ptr<GrpcServer>> listen(const GrpcListenOptions& options);
  /// The same services for all who can connect.
  static Result<std::unique_ptr<GrpcServer>> listen(const Address& address, const TlsTexts& tls,
                                                    const std::vector<grpc::Service*>& services) {
    GrpcListenOptions options;
    options.address = address;
    options.tls = tls;
    options.services = services;
    return listen(options);
  }
  ~GrpcServer();  ///< shuts down at once if it still runs

  /// The address with the real port.
  const Address& address() const;
  void set_serving(bool serving);
  /// Refuses new calls, waits for those under way until `deadline`, then cancels them.
  void shutdown(std::chrono::system_clock::time_point deadline);

 private:
  class Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// gRPC's own complaints go to `logger` (as debug events; its errors as warnings) instead of
/// stderr. The logger outlives all of gRPC's threads: call with nullptr before it goes.
void route_grpc_log(Logger* logger);

}  // namespace mk::daemon
