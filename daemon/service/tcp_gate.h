/// \file
/// The TCP side of a gRPC server. gRPC bounds neither how many connections there are nor how many
/// of them never say a word; so the daemon accepts them itself and hands them over.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/config/address.h"
#include "daemon/service/live_connections.h"
#include "shm/host/result.h"
#include "shm/host/unique_fd.h"
#include "shm/limits.h"

namespace mk::daemon {

/// How many there may be, all alive at once.
struct TcpGateLimits {
  std::size_t connections = 512 + shm::kNodesMax;
  /// Of one address. One more takes the place of its oldest that has not proved who it is; there is
  /// none such, it is turned away.
  std::size_t of_address = 128;
  /// That have not proved who they are: younger than `handshake`, after which gRPC hangs up.
  std::size_t unproved = 256, unproved_of_address = 64;
  std::chrono::milliseconds handshake{10'000};
};

class TcpGate {
 public:
  /// Takes the connection over. On the gate's thread.
  using Deliver = std::function<void(UniqueFd connection, int listener)>;
  /// Told when one is turned away; a sentence. On the gate's thread.
  using Refused = std::function<void(const std::string&)>;

  /// Listens at every address of the host, all at one port; nothing is accepted before `start`. An
  /// address that another process holds is refused (kAlreadyExists).
  static Result<std::unique_ptr<TcpGate>> open(const Address& address, const TcpGateLimits& limits);
  ~TcpGate();

  std::uint16_t port() const { return port_; }
  void start(Deliver deliver, Refused refused);
  /// See LiveConnections. From any thread.
  std::vector<std::string> last_heard() const {
    std::lock_guard lock(live_mutex_);
    return live_.last_heard();
  }

 private:
  TcpGate(std::vector<UniqueFd> listeners, std::uint16_t port, const TcpGateLimits& limits);
  void run();
  void admit(UniqueFd connection, int listener);

  const std::vector<UniqueFd> listeners_;
  const std::uint16_t port_;
  const TcpGateLimits limits_;
  mutable std::mutex live_mutex_;
  LiveConnections live_;
  Deliver deliver_;
  Refused refused_;
  UniqueFd stop_;
  std::thread thread_;
};

}  // namespace mk::daemon
