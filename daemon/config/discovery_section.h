/// \file
/// The tables [discovery], [discovery.dns] and [discovery.etcd] of the configuration.
#pragma once

#include "daemon/config/config.h"
#include "daemon/config/reader.h"

namespace mk::daemon {

void read_discovery(Section discovery, Config& config);
/// What the certificate of node `node`, found by discovery, must be made out to, so that no node's
/// certificate speaks for another one's: discovery.node_name; under DNS, where that is empty,
/// "node-<id>." and the name that is looked up, without a service's labels. Empty: what its source
/// says.
std::string node_name_of(const Config& config, std::uint32_t node);
/// discovery.advertise, or --advertise.
Status accept_advertise(std::string_view text, Config& config);
/// What needs the rest of the configuration.
void check_discovery(const Config& config, Diagnostics& diagnostics);

/// Whether the daemon may speak to this address: it is on this machine, or there is TLS, or
/// `insecure` says so.
bool may_reach(const Config& config, const Address& address);

}  // namespace mk::daemon
