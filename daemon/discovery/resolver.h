/// \file
/// Names to addresses, by DNS alone: host names (A and AAAA) and services (SRV).
#pragma once

#include <string>
#include <vector>

#include "daemon/config/address.h"
#include "shm/host/result.h"

namespace mk::daemon {

struct DnsAnswer {
  Address address;   ///< numeric host
  std::string name;  ///< it was found under: what its certificate must be made out to
  friend bool operator==(const DnsAnswer& a, const DnsAnswer& b) {
    return a.address.text() == b.address.text() && a.name == b.name;
  }
};

/// Every address, sorted and each once; none when the name has no such records or does not exist (a
/// headless service without pods). kUnavailable when no name server answered. `server`:
/// "10.0.0.10:53" instead of those of /etc/resolv.conf; empty: those. Blocks for a few seconds at
/// most.
Result<std::vector<DnsAnswer>> resolve(const DnsQuestion& question, const std::string& server);

}  // namespace mk::daemon
