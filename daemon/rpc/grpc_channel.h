/// \file
/// The one way to open a gRPC channel to a daemon, for peers and tools alike.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "daemon/config/address.h"
#include "shm/host/result.h"

namespace grpc {
class AuthContext;
class Channel;
}  // namespace grpc

namespace mk::daemon {

/// PEM texts of mutual TLS, and the files they came from; all or none.
struct TlsTexts {
  std::string cert, key, ca;
  std::string cert_path{}, key_path{}, ca_path{};
  bool enabled() const { return !cert.empty(); }
  friend bool operator==(const TlsTexts&, const TlsTexts&) = default;
};
/// Reads the three files; empty paths give empty texts. Errors name the file, and its key in
/// `section` of the configuration.
Result<TlsTexts> read_tls(const std::string& cert, const std::string& key, const std::string& ca,
                          const std::string& section = "tls");

struct ChannelOptions {
  TlsTexts tls;  ///< not used on Unix sockets: their file's mode says who may speak
  /// What the other side's certificate must be made out to; empty: the address's host.
  std::string tls_name{};
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

/// The names that the other side's verified certificate is made out to (its subject's common name
/// last); empty without TLS.
std::vector<std::string> certificate_names(const grpc::AuthContext& context);
/// Whether one of them is `wanted`; "*.cluster" stands for one label more.
bool names_match(const std::vector<std::string>& names, const std::string& wanted);

/// A message may be as large as this, both ways.
inline constexpr int kGrpcMessageBytesMax = 8 << 20;
/// What one stream may send before it is read, fixed: gRPC 1.51 measures it otherwise. A message
/// that is longer than the window of a stream that was not read for a while then waits for up to 10
/// s.
inline constexpr int kGrpcStreamWindowBytes = 1 << 20;

}  // namespace mk::daemon
