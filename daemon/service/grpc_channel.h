/// \file
/// The one way to open a gRPC channel to a daemon, for peers and tools alike.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "daemon/config/address.h"
#include "shm/host/result.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace mk::daemon {

/// PEM texts of mutual TLS; all or none.
struct TlsTexts {
  std::string cert, key, ca;
  bool enabled() const { return !cert.empty(); }
};
/// Reads the three files; empty paths give empty texts. Errors name the file.
Result<TlsTexts> read_tls(const std::string& cert, const std::string& key, const std::string& ca);

struct ChannelOptions {
  TlsTexts tls;  ///< not used on Unix sockets: their file's mode says who may speak
  std::chrono::milliseconds connect_timeout{5'000};
  std::chrono::milliseconds reconnect_min{100};
  /// A ping after so long without traffic while a call is open; 0: none.
  std::chrono::milliseconds keepalive_time{0}, keepalive_timeout{0};
};

/// gRPC's name for the address.
std::string grpc_target(const Address& address);

/// Never fails: what is wrong shows in the calls. The channel has connections of its own, shared
/// with no other channel.
std::shared_ptr<grpc::Channel> open_channel(const Address& address, const ChannelOptions& options);

/// A message may be as large as this, both ways.
inline constexpr int kGrpcMessageBytesMax = 8 << 20;

}  // namespace mk::daemon
