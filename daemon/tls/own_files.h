/// \file
/// The certificates of a configuration.
#pragma once

#include <vector>

#include "daemon/config/config.h"
#include "daemon/tls/certificates.h"

namespace mk::daemon {

/// The files of [tls], with the names that the other daemons know this node by; empty paths where
/// the configuration has no TLS.
TlsFiles tls_files(const Config& config);

/// A doubt about the certificate of [tls]: `listen` is no name of it, and nothing else says by
/// which name the others know this node. A sentence; empty: none.
std::string name_doubt(const Config& config, std::int64_t now);

/// The faults of all of a configuration's certificates, as sentences: [tls] and discovery.etcd.
std::vector<std::string> certificate_faults(const Config& config, std::int64_t now);

}  // namespace mk::daemon
