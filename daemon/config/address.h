/// \file
/// Where a daemon listens or is called: "127.0.0.1:7171", "[::1]:7171", "node1.cluster:7171" or
/// "unix:/run/mkernel/peer.sock".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shm/host/result.h"

namespace mk::daemon {

struct Address {
  bool unix_socket = false;
  std::string host{};      ///< without brackets
  std::uint16_t port = 0;  ///< 0: any free one (listening only)
  std::string path{};      ///< of a Unix socket

  /// Whether only this machine can reach it: a Unix socket, or a loopback host.
  bool local() const;
  /// As parsed; hosts with colons get brackets.
  std::string text() const;
};

/// Errors (kInvalidArgument) say what is allowed, without naming a key.
Result<Address> parse_address(std::string_view text, bool allow_port_0);

/// A name to look up in DNS. "_peer._tcp.mkernel.default.svc.cluster.local" is a service: its SRV
/// records name hosts and ports. "mkernel.default.svc.cluster.local:7171" is a host name: every
/// address of it, each with that port.
struct DnsQuestion {
  std::string name;
  std::uint16_t port = 0;  ///< 0: a service
  bool service() const { return port == 0; }
};
Result<DnsQuestion> parse_dns_question(std::string_view text);

}  // namespace mk::daemon
