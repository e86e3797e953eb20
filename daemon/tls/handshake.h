/// \file
/// A look at another daemon's port: connecting, and one TLS handshake as a daemon would make it.
#pragma once

#include <chrono>
#include <string>

#include "daemon/config/address.h"
#include "daemon/tls/certificates.h"
#include "shm/host/unique_fd.h"

namespace mk::daemon {

/// Connects to the address, at most `patience` for each address that its name has; the socket does
/// not block. Looking the name up takes what the system's resolver takes.
Result<UniqueFd> connect_to(const Address& address, std::chrono::milliseconds patience);

/// What TLS has against a pair of daemons. Shows the certificate of `contents`, read from `own`, to
/// the program at the other end of `connected` (see connect_to), who must be `name`. kPermission
/// with a clause for each fault of either side ("its certificate expired on ...; it refuses
/// tls.cert ..."); OK when both accept each other. Ends early when somebody shuts the socket down.
Status try_handshake(const TlsFiles& own, const TlsContents& contents, const UniqueFd& connected,
                     const std::string& name, std::chrono::milliseconds patience);

}  // namespace mk::daemon
